"""Who is there in which round: processes drawn before a run, the same for every method compared.

Each process is a function ``(nodes, rounds, seed, class_counts, history=0)`` that returns a table of booleans
(nodes, history + rounds); its keyword-only parameters are its settings. ``class_counts`` (nodes, classes) is
how many samples of each class a node has, or a function that returns it, or None where samples have no
class; it is ``label_dependent`` alone that looks.

A node's row depends on the seed, the settings and the node: more rounds and more nodes only append
(except that ``log_normal`` and ``daily`` compare each node with the steadiest of all). A ``history`` is the
same process before round 1: it only prepends, so a run has the same rounds whether or not somebody looks
back; see :func:`with_history`.

Where availability comes from a log, it is in the schedule already (``trace_schedule``): leave this at
``always``. Dropping out in the middle of a round is ``DeviceSchedule.with_drops``.

The functions ``..._chances`` tell what a scheduler never sees: the long-run chance of each node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..errors import UserError
from ..rng import generator
from .ranges import Chances, check_range

Table = NDArray[np.bool_]
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
ClassCounts = Counts | Callable[[], Counts | None] | None
Beta = Annotated[float, Field(ge=0, lt=1, description="how unequal the nodes are; 0: all always there")]


class Availability(Protocol):
    """A process with its settings filled in."""

    def __call__(
        self, nodes: int, rounds: int, seed: int, class_counts: ClassCounts, history: int, /
    ) -> Table:
        """Return who is there, (nodes, history + rounds)."""
        ...


def with_history(
    process: Availability,
    nodes: int,
    rounds: int,
    history: int,
    seed: int,
    class_counts: ClassCounts = None,
) -> tuple[Table, Table]:
    """Return who was there in ``history`` rounds before round 1, and who is in the run, each (nodes, ...).

    The last column of the first table is the round before round 1. The second table is the process's own
    without any history.

    >>> before, during = with_history(bernoulli, 3, 5, 100, seed=1)
    >>> before.shape, np.array_equal(during, bernoulli(3, 5, 1))
    ((3, 100), True)
    """
    table = process(nodes, rounds, seed, class_counts, history)
    return table[:, :history], table[:, history:]


def always(nodes: int, rounds: int, seed: int, class_counts: ClassCounts = None, history: int = 0) -> Table:
    """Everybody is there in every round."""
    _check(nodes, rounds, seed, history)
    return np.ones((nodes, history + rounds), np.bool_)


def bernoulli(
    nodes: int, rounds: int, seed: int, class_counts: ClassCounts = None, history: int = 0, *,
    p: Annotated[Chances, Field(description="range of the nodes' chances to be there")] = (0.3, 0.95),
) -> Table:  # fmt: skip
    """Each node is there with its own chance, uniform over ``p``, in each round anew.

    Inferred: nothing is published but that clients come and go.
    """
    _check(nodes, rounds, seed, history)
    return _independent(bernoulli_chances(nodes, seed, p)[:, None], rounds, seed, history)


def bernoulli_chances(nodes: int, seed: int, p: tuple[float, float] = (0.3, 0.95)) -> Floats:
    """Return each node's chance (nodes,)."""
    check_range("p", p, most=1)
    return _uniform(nodes, seed, "availability chance", p)


def markov(
    nodes: int, rounds: int, seed: int, class_counts: ClassCounts = None, history: int = 0, *,
    stay_on: Annotated[Chances, Field(description="range of the chances to stay")] = (0.8, 0.98),
    turn_on: Annotated[Chances, Field(description="range of the chances to come back")] = (0.1, 0.5),
) -> Table:  # fmt: skip
    """Each node comes and goes by a chain of two states with its own chances: absences come in bursts.

    The first round is drawn from the chain's long-run share, :func:`markov_chances`. A chain of two states
    looks the same in both directions of time, so the history goes on from round 1 backwards.
    The ranges are inferred: they give a share of 0.7 on average.
    """
    _check(nodes, rounds, seed, history)
    stay, turn = markov_settings(nodes, seed, stay_on, turn_on)
    share = markov_chances(stay, turn)
    table = np.empty((nodes, history + rounds), np.bool_)
    future = _draws(nodes, rounds, seed, "availability")
    table[:, history] = future[:, 0] < share
    for column in range(1, rounds):
        chance = np.where(table[:, history + column - 1], stay, turn)
        table[:, history + column] = future[:, column] < chance
    if history:
        past = _draws(nodes, history, seed, "availability history")
        for back in range(history):
            chance = np.where(table[:, history - back], stay, turn)
            table[:, history - back - 1] = past[:, back] < chance
    return table


def markov_settings(
    nodes: int,
    seed: int,
    stay_on: tuple[float, float] = (0.8, 0.98),
    turn_on: tuple[float, float] = (0.1, 0.5),
) -> tuple[Floats, Floats]:
    """Return each node's chance to stay and its chance to come back, (nodes,) each."""
    check_range("stay_on", stay_on, most=1)
    check_range("turn_on", turn_on, most=1)
    return (
        _uniform(nodes, seed, "availability stay", stay_on),
        _uniform(nodes, seed, "availability turn", turn_on),
    )


def markov_chances(stay: Floats, turn: Floats) -> Floats:
    """Return the long-run share of rounds in which each node is there: turn / (1 - stay + turn).

    An even chance where neither state is ever left.

    >>> markov_chances(np.array([0.9, 1.0]), np.array([0.3, 0.0])).round(3).tolist()
    [0.75, 0.5]
    """
    leaves = 1 - stay + turn
    return np.divide(turn, leaves, out=np.full(leaves.shape, 0.5), where=leaves > 0)


def log_normal(
    nodes: int, rounds: int, seed: int, class_counts: ClassCounts = None, history: int = 0, *,
    beta: Beta = 0.1,
) -> Table:  # fmt: skip
    """Some nodes are there far more often than others: chances are log-normal, the highest is 1.

    Source: the simulator of FLGo ("LN").
    """
    _check(nodes, rounds, seed, history)
    return _independent(log_normal_chances(nodes, seed, beta)[:, None], rounds, seed, history)


def log_normal_chances(nodes: int, seed: int, beta: float = 0.1) -> Floats:
    """Return each node's chance (nodes,): T / max T with T log-normal(0, sigma = -ln(1 - beta))."""
    _check_beta(beta)
    normals = np.array(
        [generator(seed, "availability log-normal", n).standard_normal() for n in range(nodes)]
    )
    scaled = -math.log1p(-beta) * normals
    return np.asarray(np.exp(scaled - scaled.max()))


def daily(
    nodes: int, rounds: int, seed: int, class_counts: ClassCounts = None, history: int = 0, *,
    beta: Beta = 0.1,
    rounds_per_day: Annotated[int, Field(ge=1, description="rounds until the wave begins again")] = 24,
) -> Table:  # fmt: skip
    """As ``log_normal``, times a wave over the day that all nodes share, from 0.1 to 0.9.

    Source: the simulator of FLGo ("SLN").
    """
    _check(nodes, rounds, seed, history)
    wave = daily_wave(np.arange(1 - history, rounds + 1), rounds_per_day)
    return _independent(log_normal_chances(nodes, seed, beta)[:, None] * wave, rounds, seed, history)


def daily_wave(rounds: Counts, rounds_per_day: int = 24) -> Floats:
    """Return 0.4 sin(2 pi (1 + g mod D) / D) + 0.5 for rounds g, any shape; 0 and below is the history.

    >>> daily_wave(np.array([5, 11, 17, 29])).round(3).tolist()
    [0.9, 0.5, 0.1, 0.9]
    """
    if rounds_per_day < 1:
        raise UserError(f"rounds_per_day is {rounds_per_day}, expected 1 or more")
    hours = 1 + np.mod(np.asarray(rounds), rounds_per_day)
    return np.asarray(0.4 * np.sin(2 * math.pi * hours / rounds_per_day) + 0.5)


def label_dependent(
    nodes: int, rounds: int, seed: int, class_counts: ClassCounts = None, history: int = 0, *,
    beta: Annotated[float, Field(ge=0, le=1, description="how much the labels decide; 0: not at all")] = 0.5,
) -> Table:  # fmt: skip
    """Nodes with low labels are away more often, so that what is missing is not missing at random.

    Source: the simulator of FLGo ("YMF"). Raises UserError where samples have no class.
    """
    _check(nodes, rounds, seed, history)
    counts = class_counts() if callable(class_counts) else class_counts
    if counts is None:
        raise UserError(
            "availability 'label-dependent' needs samples that have a class each, and those of this data set "
            "have none: use bernoulli or log-normal"
        )
    if len(counts) != nodes:
        raise UserError(f"{len(counts)} rows of class counts for {nodes} nodes")
    return _independent(label_chances(counts, beta)[:, None], rounds, seed, history)


def label_chances(class_counts: Counts, beta: float = 0.5) -> Floats:
    """Return each node's chance (nodes,): beta * (its least label) / (the largest label) + 1 - beta.

    The largest label is the number of classes less one. A node without samples counts as having that one.

    >>> label_chances(np.array([[3, 0, 1], [0, 2, 2], [0, 0, 9], [0, 0, 0]]), beta=0.6).round(3).tolist()
    [0.4, 0.7, 1.0, 1.0]
    """
    if not 0 <= beta <= 1:
        raise UserError(f"beta is {beta}, expected 0 to 1")
    counts = np.asarray(class_counts)
    largest = counts.shape[1] - 1
    least = np.where(counts.any(axis=1), (counts > 0).argmax(axis=1), largest)
    return np.asarray(beta * least / max(largest, 1) + (1 - beta))


def _independent(chances: Floats, rounds: int, seed: int, history: int) -> Table:
    """Draw each round by itself; ``chances`` (nodes, 1) or (nodes, history + rounds)."""
    nodes = len(chances)
    draws = _draws(nodes, rounds, seed, "availability")
    if history:
        # Drawn backwards from round 0, so that a longer history only goes further back.
        past = _draws(nodes, history, seed, "availability history")[:, ::-1]
        draws = np.concatenate([past, draws], axis=1)
    return np.asarray(draws < chances)


def _draws(nodes: int, count: int, seed: int, purpose: str) -> Floats:
    return np.stack([generator(seed, purpose, node).random(count) for node in range(nodes)])


def _uniform(nodes: int, seed: int, purpose: str, span: tuple[float, float]) -> Floats:
    low, high = span
    return low + _draws(nodes, 1, seed, purpose)[:, 0] * (high - low)


def _check(nodes: int, rounds: int, seed: int, history: int) -> None:
    if nodes < 1 or rounds < 1 or seed < 0 or history < 0:
        raise UserError(
            f"{nodes} nodes, {rounds} rounds, seed {seed}, {history} rounds of history: expected 1 or more "
            "nodes and rounds, a seed and a history of 0 or more"
        )


def _check_beta(beta: float) -> None:
    if not 0 <= beta < 1:
        raise UserError(f"beta is {beta}, expected 0 or more and below 1")
