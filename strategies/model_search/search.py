"""Ways to look for the architecture that makes the most of a client's limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .costs import FloatArray
from .space import IntArray, SearchSpace

Objective = Literal["min", "mean", "size"]


@dataclass(frozen=True)
class Problem:
    """What a client may use, and what architectures do use.

    ``used(choices)`` returns (m, c) for ``limits`` (c,), which may be infinite; ``parameters(choices)``
    returns (m,). The last column is the size that ``objective="size"`` goes by. ``allowed(choices)``, (m,)
    bool, may rule out more without counting as utilisation.
    """

    space: SearchSpace
    used: Callable[[IntArray], FloatArray]
    parameters: Callable[[IntArray], FloatArray]
    limits: FloatArray
    objective: Objective = "min"
    allowed: Callable[[IntArray], NDArray[np.bool_]] | None = None

    def scores(self, choices: IntArray) -> FloatArray:
        """Return the utilisation of architectures, (m,), −inf of those that do not fit."""
        scores = utilisation(self.used(choices), self.limits, self.objective)
        return scores if self.allowed is None else np.where(self.allowed(choices), scores, -np.inf)


def utilisation(used: FloatArray, limits: FloatArray, objective: Objective = "min") -> FloatArray:
    """Return what share of the limits (c,) is used, by row of ``used`` (m, c); −inf beyond any limit.

    The smallest of the shares, their mean, or the last column's; infinite limits have none. 0 without limits.

    >>> utilisation(np.array([[50.0, 30.0], [120.0, 10.0]]), np.array([100.0, 40.0])).tolist()
    [0.5, -inf]
    """
    finite = np.isfinite(limits)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.nan_to_num(used[:, finite] / limits[finite], nan=0.0)
    if not finite.any() or (objective == "size" and not finite[-1]):
        score = np.zeros(len(used))
    elif objective == "size":
        score = shares[:, -1]
    else:
        score = shares.min(axis=1) if objective == "min" else shares.mean(axis=1)
    return np.where((used <= limits).all(axis=1), score, -np.inf)


def best_of(scores: FloatArray, parameters: FloatArray) -> int | None:
    """Return the row of the highest score, of these the most parameters, of these the first; None: −inf."""
    if not len(scores) or scores.max() == -np.inf:
        return None
    top = np.flatnonzero(scores == scores.max())
    return int(top[np.argmax(parameters[top])])


@dataclass(frozen=True)
class EarlyStop:
    """When a random search ends, once it knows an architecture that fits.

    At a utilisation of ``tau``, or after ``patience`` draws in a row that were no better; or, with ``coin``,
    at each step with that probability, as in the released code (0.8). After ``max_draws`` in any case.
    """

    tau: float = 0.95
    patience: int = 20
    max_draws: int = 50
    coin: float | None = None


def random_early_stop(
    problem: Problem, rng: np.random.Generator, database: IntArray, stop: EarlyStop
) -> tuple[IntArray | None, IntArray]:
    """Return the best (knobs,) of the database (m, knobs) and some draws, and the draws, (k, knobs).

    If nothing known or drawn fits, the smallest is tried; None if that does not fit either.

    Source: the released code of Yao, IEEE BigData 2024; the end at ``tau`` or ``patience`` is inferred from
    the paper's abstract.
    """
    draws = problem.space.draw(rng, stop.max_draws)
    coins = rng.random(stop.max_draws + 1)
    every = np.concatenate([database, draws, problem.space.smallest()[None]])
    scores, parameters = problem.scores(every), problem.parameters(every)
    known = len(database)
    best = best_of(scores[:known], parameters[:known])
    taken = idle = 0
    while taken < stop.max_draws:
        if best is not None:
            enough = scores[best] >= stop.tau or idle >= stop.patience
            if coins[taken] <= stop.coin if stop.coin is not None else enough:
                break
        row = known + taken
        taken += 1
        pair = [row] if best is None else [best, row]
        won = best_of(scores[pair], parameters[pair])
        idle = 0 if won is not None and pair[won] == row else idle + 1
        best = best if won is None else pair[won]
    if best is None and scores[-1] > -np.inf:
        best = len(every) - 1
    return None if best is None else every[best], draws[:taken]


@dataclass(frozen=True)
class Evolution:
    """Individuals of a population, and for how many generations it lives.

    It ends early at a utilisation of ``tau``, or after ``patience`` generations without a better one.
    """

    population: int = 32
    generations: int = 30
    tau: float = 0.99
    patience: int = 6


def evolution(problem: Problem, rng: np.random.Generator, settings: Evolution) -> IntArray | None:
    """Return the best architecture (knobs,) that an evolutionary search met, None if none fits.

    The children of a generation mix the knobs of two parents, each the better of two drawn, and change one
    knob in expectation; the best of parents and children live on. What breaks a limit counts the less, the
    more it does, so a population that starts too large shrinks.
    """
    space, size = problem.space, settings.population
    alive = np.concatenate([space.smallest()[None], space.largest()[None], space.draw(rng, size)])
    fitness = _fitness(problem, alive)
    idle = 0
    for _ in range(settings.generations):
        # In order, the fittest first, so of two individuals the one with the lower number wins.
        alive, fitness = _fittest(alive, fitness, size)
        best = tuple(fitness[:, 0])
        if best[0] >= settings.tau or idle >= settings.patience:
            break
        mother, father = alive[rng.integers(0, len(alive), (2, 2, size)).min(axis=1)]
        children = np.where(rng.random(mother.shape) < 0.5, mother, father)
        mutated = rng.random(children.shape) < 1 / max(1, len(space.knobs))
        children = np.where(mutated, space.draw(rng, size), children)
        alive = np.concatenate([alive, children])
        fitness = np.concatenate([fitness, _fitness(problem, children)], axis=1)
        idle = 0 if (fitness[0].max(), fitness[1, fitness[0].argmax()]) > best else idle + 1
    alive, fitness = _fittest(alive, fitness, size)
    return alive[0] if fitness[0, 0] >= 0 else None


def _fittest(alive: IntArray, fitness: FloatArray, n: int) -> tuple[IntArray, FloatArray]:
    """Return the n fittest of distinct individuals, the fittest first."""
    alive, rows = np.unique(alive, axis=0, return_index=True)
    order = np.lexsort((-fitness[1, rows], -fitness[0, rows]))[:n]
    return alive[order], fitness[:, rows[order]]


def _fitness(problem: Problem, choices: IntArray) -> FloatArray:
    """Return scores, below 0 what breaks limits, and parameters, (2, m)."""
    used, scores = problem.used(choices), problem.scores(choices)
    finite = np.isfinite(problem.limits)
    excess = (used[:, finite] / np.maximum(problem.limits[finite], 1e-9)).max(axis=1, initial=1e-9)
    return np.stack([np.where(scores == -np.inf, -excess, scores), problem.parameters(choices)])
