"""Plan A: the long-term clients and their edges, found before the run from who was there before.

Wu et al., arXiv 2502.09303, of which the abstract and summaries are known: that there is such a stage, that
it works from past participation and is a 0-1 integer program. Everything else is inferred.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .anneal import anneal
from .base import Costs, EdgeWorld, Floats, Ints, Limits, Prices
from .plan_a_exact import lacking, solve
from .problem import Problem, Terms

Solver = Literal["search", "exact"]
STEP = 0.05


@dataclass(frozen=True, eq=False)
class LongTerm:
    """What Plan A found.

    ``edge_of`` (N,) are the seats, ``threshold`` is the continuity that candidates had to have after it was
    lowered, ``worth`` is J and ``penalty`` the part of it for limits that are not kept; ``exact`` tells
    whether the integer program's solution is used.
    """

    edge_of: Ints
    threshold: float
    worth: float
    penalty: float
    exact: bool


def candidates(
    world: EdgeWorld,
    limits: Limits,
    prices: Prices,
    costs: Costs,
    chance: Floats,
    c_min: float,
    terms: Terms,
    risk: float | None = None,
) -> tuple[Problem, float]:
    """Return the problem for clients of continuity ``c_min`` at least, and that threshold.

    If the edges cannot get their least numbers of clients together, c_min is lowered by 0.05 and again,
    until they can, or as nearly as all clients could: an edge that nobody reaches lowers nothing.
    """

    def problem_from(threshold: float) -> Problem:
        fit = chance >= threshold
        return Problem.of(world, limits, prices, costs, chance, fit, terms, risk=risk)

    problem = problem_from(c_min)
    if (short := lacking(problem)) <= 1e-6:
        return problem, c_min
    everybody = problem_from(0.0)
    unavoidable = lacking(everybody) + 1e-6
    threshold = c_min
    while short > unavoidable and threshold > 0:
        # Rounded, or twelve steps of 0.05 from 0.6 would leave a little more than nothing.
        threshold = max(0.0, round(threshold - STEP, 9))
        problem = problem_from(threshold)
        short = lacking(problem)
    return problem, threshold


def plan_a(
    world: EdgeWorld,
    limits: Limits,
    prices: Prices,
    chance: Floats,
    rng: np.random.Generator,
    *,
    c_min: float = 0.6,
    terms: Terms | None = None,
    risk: float | None = None,
    solver: Solver = "search",
    proposals: int = 0,
    runs: int = 3,
    time_limit: float = 20.0,
    costs: Costs | None = None,
) -> LongTerm:
    """Return the long-term clients for continuities ``chance`` (N,); by mean costs unless others are given.

    ``search`` anneals, which suits any number of clients; ``exact`` solves the integer program, and falls
    back to the search where no assignment keeps the limits or it takes more than ``time_limit`` seconds.
    Whether time runs out depends on the machine: results of ``exact`` repeat only where it does not.
    """
    problem, threshold = candidates(
        world, limits, prices, costs or world.mean, chance, c_min, terms or Terms(), risk
    )
    found = solve(problem, time_limit).edge_of if solver == "exact" else None
    exact = found is not None
    edge_of = anneal(problem, rng, proposals, runs) if found is None else found
    cost, penalty = problem.judged(edge_of)
    return LongTerm(edge_of, threshold, cost + penalty, penalty, exact)
