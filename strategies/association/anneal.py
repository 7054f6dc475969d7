"""Simulated annealing of an assignment, by changes of one or two edges at a time."""

from __future__ import annotations

from collections.abc import Iterator
from math import exp, inf
from typing import NamedTuple

import numpy as np

from .base import NOWHERE, Ints
from .problem import Problem
from .quality import farthest, one_distance

PER_CLIENT = 500
FEWEST = 30_000
HOT, COLD = 0.3, 1e-4
MOVES = 0.7
_CHUNK = 4096


class Edge(NamedTuple):
    """An edge with the clients it has: replaced, never changed, so that going back is free."""

    members: tuple[int, ...]
    seconds: float
    joules: float
    mix: list[float]
    penalty: float


def proposals_for(clients: int) -> int:
    """Return how many changes to try: 500 per client, and 30,000 at least."""
    return max(FEWEST, PER_CLIENT * clients)


def anneal(problem: Problem, rng: np.random.Generator, proposals: int = 0, runs: int = 1) -> Ints:
    """Return the edges of all clients (N,) with the lowest J met in any of the runs.

    ``proposals`` is how many changes a run tries, 0: :func:`proposals_for` the candidates. Tight limits leave
    valleys apart from each other, so three runs find the best solution more often than one as long as all.

    Seven of ten changes move a client to another edge or out, at the expense of a random one if that edge is
    full; the others exchange two clients. A change is taken by Metropolis' rule at temperature
    0.3 (1 - i/I)^2 + 0.0001. At the end, clients whose removal lowers J are dropped. Each change costs
    O(U + K) for the two edges touched, with U clients at an edge and K classes.
    """
    best, lowest = problem.spread(np.full(len(problem.clients), NOWHERE)), inf
    for _ in range(runs if len(problem.clients) else 0):
        search = _Search(problem)
        search.run(rng, proposals or proposals_for(len(problem.clients)))
        found = problem.spread(np.array(search.where, dtype=np.int64))
        if (worth := problem.worth(found)) < lowest:
            best, lowest = found, worth
    return best


class _Search:
    """The assignment under change; clients are numbered among the candidates."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        prices = problem.prices
        self.per_second = prices.seconds_weight / prices.seconds_ref
        per_joule = prices.joules_weight / prices.joules_ref
        # Plain lists: looking one number up in an array costs more than the arithmetic on it.
        self.seconds = (self.per_second * problem.seconds).tolist()
        self.joules = (per_joule * problem.joules).tolist()
        self.allowed = problem.allowed.tolist()
        self.counts = problem.counts.tolist()
        self.chance = problem.chance.tolist()
        self.near = [np.flatnonzero(row).tolist() for row in problem.allowed]
        self.most = problem.limits.most.tolist()
        self.least = problem.limits.least.tolist()
        self.distance = one_distance(problem.limits_target, problem.measure)
        self.far = farthest(problem.limits_target, problem.measure)
        self.where = [NOWHERE] * len(problem.clients)
        self.edges = [self._edge(m, (), [0.0] * problem.counts.shape[1]) for m in range(problem.edges)]
        self.slowest = 0.0

    def _edge(self, edge: int, members: tuple[int, ...], mix: list[float]) -> Edge:
        problem, seconds, joules = self.problem, self.seconds, self.joules
        if not members:  # what adding and subtracting left over is forgotten
            mix = [0.0] * len(mix)
        chances = [self.chance[i] for i in members]
        if problem.risk is None:
            short = max(0.0, self.least[edge] - sum(chances))
        else:
            short = problem.shortage(edge, chances)
        away = min(self.distance(mix, sum(mix)), self.far)
        penalty = problem.quorum_weight * short
        if away > problem.limit:
            penalty += problem.quality_weight * (away - problem.limit)
        return Edge(
            members,
            max([seconds[i][edge] for i in members], default=0.0),
            sum([joules[i][edge] for i in members]),
            mix,
            penalty,
        )

    def _changed(self, edge: int, leaves: int, comes: int) -> Edge:
        """Return an edge without the client that leaves and with the one that comes; -1 for nobody."""
        old = self.edges[edge]
        members, mix = old.members, old.mix
        if leaves >= 0:
            members = tuple([i for i in members if i != leaves])
            mix = [a - b for a, b in zip(mix, self.counts[leaves], strict=True)]
        if comes >= 0:
            members = (*members, comes)
            mix = [a + b for a, b in zip(mix, self.counts[comes], strict=True)]
        return self._edge(edge, members, mix)

    def _slowest_with(self, first: int, one: Edge | None, second: int, two: Edge | None) -> float:
        """Return w_T T / T_ref if up to two edges were replaced."""
        before, now = self.slowest, 0.0
        if one is not None:
            now = one.seconds
        if two is not None and two.seconds > now:
            now = two.seconds
        if now >= before:
            return now
        edges = self.edges
        if (one is None or edges[first].seconds < before) and (two is None or edges[second].seconds < before):
            return before
        for place, edge in enumerate(edges):
            if edge.seconds > now and place != first and place != second:
                now = edge.seconds
        return now

    def _proposal(self, one: float, two: float, three: float, four: float) -> tuple[int, int, int, int]:
        """Return (client, its edge, other client, other edge), -1 for none; client -1 for no change."""
        where = self.where
        client = int(one * len(where))
        here = where[client]
        if here < 0 or two < MOVES:
            near = self.near[client]
            there = near[int(three * len(near))]
            if there == here:  # its own edge among those in reach stands for leaving
                return client, here, -1, -1
            members = self.edges[there].members
            evicted = members[int(four * len(members))] if len(members) >= self.most[there] else -1
            return client, here, evicted, there
        other = int(three * len(where))
        there = where[other]
        if there == here or not self.allowed[other][here] or (there >= 0 and not self.allowed[client][there]):
            return -1, -1, -1, -1
        return client, here, other, there

    def run(self, rng: np.random.Generator, proposals: int) -> None:
        worth = best = self.slowest + sum(e.joules + e.penalty for e in self.edges)
        kept = (list(self.edges), list(self.where))
        draws = _draws(rng)
        for step in range(proposals):
            one, two, three, four, luck = next(draws)
            client, here, other, there = self._proposal(one, two, three, four)
            if client < 0:
                continue
            # In an exchange the other takes the client's place; evicted from a full edge, it goes nowhere.
            swap = here >= 0 and other >= 0 and two >= MOVES
            changed_here = self._changed(here, client, other if swap else -1) if here >= 0 else None
            changed_there = self._changed(there, other, client) if there >= 0 else None
            slowest = self._slowest_with(here, changed_here, there, changed_there)
            gain = slowest - self.slowest
            if changed_here is not None:
                old = self.edges[here]
                gain += changed_here.joules - old.joules + changed_here.penalty - old.penalty
            if changed_there is not None:
                old = self.edges[there]
                gain += changed_there.joules - old.joules + changed_there.penalty - old.penalty
            if gain > 0:
                left = 1.0 - step / proposals
                if luck >= exp(-gain / (HOT * left * left + COLD)):
                    continue
            if changed_here is not None:
                self.edges[here] = changed_here
            if changed_there is not None:
                self.edges[there] = changed_there
            if other >= 0:
                self.where[other] = here if swap else NOWHERE
            self.where[client] = there
            self.slowest = slowest
            worth += gain
            if worth < best - 1e-12:
                best, kept = worth, (list(self.edges), list(self.where))
        self.edges, self.where = kept
        self.slowest = max(edge.seconds for edge in self.edges)
        self._drop()

    def _drop(self) -> None:
        """Leave out, as long as there are any, the client whose removal lowers J the most."""
        while True:
            best, found = -1e-12, None
            for client, here in enumerate(self.where):
                if here < 0:
                    continue
                old, new = self.edges[here], self._changed(here, client, -1)
                gain = self._slowest_with(here, new, -1, None) - self.slowest
                gain += new.joules - old.joules + new.penalty - old.penalty
                if gain < best:
                    best, found = gain, (client, here, new)
            if found is None:
                return
            client, here, new = found
            self.edges[here], self.where[client] = new, NOWHERE
            self.slowest = max(edge.seconds for edge in self.edges)


def _draws(rng: np.random.Generator) -> Iterator[list[float]]:
    while True:
        yield from rng.random((_CHUNK, 5)).tolist()
