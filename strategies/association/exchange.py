"""Random edges, made better by moving one client or exchanging two until no such step lowers the cost.

In the manner of HFEL (Luo et al., IEEE Trans. Wireless Communications 2020), without its division of radio
and processor among the clients of an edge: costs here are given.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedplat.rng import generator

from .announcing import Announcing
from .base import NOWHERE, Costs, Decision, EdgeWorld, Floats, Ints, Limits, Prices, RoundState
from .random_choice import random_edges

_GAIN = 1e-12  # what rounding may make of no gain at all


class Exchanges:
    """All single steps from an assignment, and the cost of the round (U) after each.

    Clients only move within their reach, never to a full edge, and never from one that would then have fewer
    than its least. Those that take no part stay out.
    """

    def __init__(self, world: EdgeWorld, costs: Costs, limits: Limits, prices: Prices, edge_of: Ints) -> None:
        self.world, self.limits, self.prices = world, limits, prices
        self.clients = np.flatnonzero(edge_of != NOWHERE)
        self.edge_of = edge_of.copy()
        self.seconds = world.edge_rounds * costs.seconds[self.clients]
        self.joules = world.edge_rounds * costs.joules[self.clients]
        self.covered = world.covered[self.clients]
        self.rows = np.arange(len(self.clients))
        self._look()

    def _look(self) -> None:
        """Sum up the edges: their size, slowest client, and how slow they are without each client."""
        world, at = self.world, self.edge_of[self.clients]
        here = at[:, None] == np.arange(world.edges)
        times = np.where(here, self.seconds, 0.0)
        self.at, self.size = at, here.sum(axis=0)
        self.slowest = times.max(axis=0, initial=0.0)
        ordered = np.sort(times, axis=0)
        second = ordered[-2] if len(ordered) > 1 else np.zeros(world.edges)
        alone = times[self.rows, at] >= self.slowest[at]
        self.without = np.where(alone, second[at], self.slowest[at])
        ends = np.where(self.size > 0, self.slowest + world.cloud_seconds, 0.0)
        self.others = others(ends)
        self.own = self.joules[self.rows, at]
        self.total = float(self.own.sum() + world.cloud_joules[self.size > 0].sum())
        self.cost = self.prices.cost(float(ends.max(initial=0.0)), self.total)

    def transfers(self) -> Floats:
        """Return the cost after each client's move to each edge (clients used, M); infinite if it may not."""
        world, at = self.world, self.at
        leaves_none = self.size[at] == 1
        behind = np.where(leaves_none, 0.0, self.without + world.cloud_seconds[at])
        ahead = np.maximum(self.slowest, self.seconds) + world.cloud_seconds
        seconds = np.maximum(np.maximum(self.others[at], behind[:, None]), ahead)
        opened = np.where(self.size == 0, world.cloud_joules, 0.0)
        closed = np.where(leaves_none, world.cloud_joules[at], 0.0)
        joules = self.total + self.joules - self.own[:, None] + opened - closed[:, None]
        allowed = self.covered & (self.size < self.limits.most)
        allowed &= (self.size > self.limits.least)[at][:, None]
        allowed[self.rows, at] = False
        return np.where(allowed, self._cost(seconds, joules), np.inf)

    def exchanges(self) -> Floats:
        """Return the cost after each exchange of two clients (clients used, squared); infinite likewise."""
        at, cloud = self.at, self.world.cloud_seconds
        # Where the client of a row was, the client of a column is now.
        there = np.maximum(self.without[:, None], self.seconds[:, at].T) + cloud[at][:, None]
        seconds = np.maximum(np.maximum(there, there.T), self.others[at][:, at])
        moved = self.joules[:, at]
        joules = self.total + moved + moved.T - self.own[:, None] - self.own
        reach = self.covered[:, at]
        allowed = reach & reach.T & (at[:, None] != at)
        return np.where(allowed, self._cost(seconds, joules), np.inf)

    def _cost(self, seconds: Floats, joules: Floats) -> Floats:
        return self.prices.cost(seconds, joules)  # type: ignore[arg-type, return-value]

    def step(self) -> bool:
        """Take the best transfer, or the best exchange where no transfer helps; say whether one did."""
        if not len(self.clients):
            return False
        table = self.transfers()
        row, edge = divmod(int(np.argmin(table)), table.shape[1])
        if table[row, edge] < self.cost - _GAIN:
            self.edge_of[self.clients[row]] = edge
        else:
            table = self.exchanges()
            row, other = divmod(int(np.argmin(table)), table.shape[1])
            if not table[row, other] < self.cost - _GAIN:
                return False
            pair = self.clients[[row, other]]
            self.edge_of[pair] = self.edge_of[pair[::-1]]
        self._look()
        return True


def others(ends: Floats) -> Floats:
    """Return the largest of ``ends`` (M,) but for those of two edges, (M, M); 0 if there are no others.

    >>> others(np.array([3.0, 5.0, 4.0])).tolist()
    [[5.0, 4.0, 5.0], [4.0, 4.0, 3.0], [5.0, 3.0, 5.0]]
    """
    edges = np.arange(len(ends))
    found = np.zeros((len(ends), len(ends)))
    # From the third largest on: two edges left out hide two at most.
    for edge in np.argsort(-ends, kind="stable")[:3][::-1]:
        free = (edges[:, None] != edge) & (edges != edge)
        found[free] = ends[edge]
    return found


class Hfel(Announcing):
    """Random edges, then single moves and exchanges of two clients while they lower the cost.

    ``start`` says how many clients the random edges get: ``most`` (as many as an edge takes, since HFEL uses
    every device) or ``least``. Everybody present is asked. O(steps · clients used²).
    """

    def __init__(self, *, start: Literal["least", "most"] = "most") -> None:
        self.start = start

    def decide(self, state: RoundState) -> Decision:
        """Draw edges, and improve them until no step lowers the cost."""
        limits = self.limits
        room = np.minimum(limits.most, limits.least) if self.start == "least" else limits.most
        rng = generator(self.seed, "association-hfel", state.number)
        drawn = random_edges(self.world.covered, state.present, room, rng)
        search = Exchanges(self.world, state.costs, limits, self.prices, drawn)
        steps = 0
        while search.step():
            steps += 1
        return self.decided(search.edge_of, int(state.present.sum()), steps=float(steps))
