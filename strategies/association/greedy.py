"""Clients and edges paired one after the other, always the pair that raises a score the least.

The score of a pair is the cost that it adds to the round, and ``gamma`` times what it adds to the divergence
of the edge's labels. Greedy association of this form is in SHARE (Deng et al., ICDCS 2021).
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from .announcing import Announcing
from .base import NOWHERE, Bools, Costs, Decision, EdgeWorld, Floats, Ints, Limits, Prices, RoundState
from .base import divergences as divergences_of

Until = Literal["least", "healthy", "most"]
Gamma = Annotated[float, Field(ge=0, description="of divergence in nats, per unit of cost")]


class Pairing:
    """A growing assignment of ``free`` clients (N,), and what each further pair would add.

    ``prices`` None leaves costs out, ``gamma`` 0 leaves labels out. Adding a client costs O(N·K + N·M): only
    the divergences of the edge that changed are computed anew.
    """

    def __init__(
        self,
        world: EdgeWorld,
        costs: Costs,
        limits: Limits,
        free: Bools,
        *,
        prices: Prices | None,
        gamma: float,
    ) -> None:
        self.world, self.limits, self.prices, self.gamma = world, limits, prices, gamma
        self.pool = np.flatnonzero(free & world.covered.any(axis=1))
        self.open = world.covered[self.pool]  # a copy, of which taken clients are struck
        self.seconds = world.edge_rounds * costs.seconds[self.pool]
        self.joules = world.edge_rounds * costs.joules[self.pool]
        self.counts = np.asarray(world.counts[self.pool], np.float64)
        self.edge_of = np.full(world.clients, NOWHERE)
        self.size = np.zeros(world.edges, np.int64)
        self.slowest = np.zeros(world.edges)
        self.mixes = np.zeros((world.edges, self.counts.shape[1]))
        self.divergence = divergences_of(self.mixes, limits.target)
        self.round_seconds = 0.0
        # A mix of nothing counts as the worst mix there is, of one label.
        self.worst = float(np.log(max(self.counts.shape[1], 1)))
        self.gained = np.zeros(self.open.shape)
        if gamma:
            self.gained += divergences_of(self.counts, limits.target)[:, None] - self.worst

    def _reweigh(self, edge: int) -> None:
        now = min(float(self.divergence[edge]), self.worst)
        self.gained[:, edge] = divergences_of(self.mixes[edge] + self.counts, self.limits.target) - now

    def scores(self) -> Floats:
        """Return what each pair of the pool would add, (pool, M)."""
        score = self.gamma * self.gained if self.gamma else np.zeros(self.open.shape)
        if (prices := self.prices) is not None:
            reach = np.maximum(self.slowest, self.seconds) + self.world.cloud_seconds
            longer = np.maximum(reach - self.round_seconds, 0.0)
            joules = self.joules + np.where(self.size == 0, self.world.cloud_joules, 0.0)
            score = score + prices.cost(longer, joules)  # type: ignore[arg-type]
        return score

    def wanting(self, until: Until) -> Bools:
        """Return which edges (M,) are to get more clients, and have room."""
        most, least = self.limits.most, self.limits.least
        if until == "most":
            return self.size < most
        wanted = self.size < least
        if until == "healthy":
            wanted |= self.divergence > self.limits.divergence
        return wanted & (self.size < most)

    def add(self, row: int, edge: int) -> None:
        """Put a client of the pool at an edge."""
        self.edge_of[self.pool[row]] = edge
        self.open[row] = False
        self.size[edge] += 1
        self.slowest[edge] = max(self.slowest[edge], self.seconds[row, edge])
        self.round_seconds = max(self.round_seconds, self.slowest[edge] + self.world.cloud_seconds[edge])
        self.mixes[edge] += self.counts[row]
        self.divergence[edge] = divergences_of(self.mixes[edge], self.limits.target)
        if self.gamma:
            self._reweigh(edge)

    def fill(self, until: Until) -> Ints:
        """Add pairs until no edge wants more or none can be had; return the assignment (N,).

        An edge that has enough clients takes another one only if that improves its mix.
        """
        while (wanting := self.wanting(until)).any():
            allowed = self.open & wanting
            if until == "healthy":
                allowed &= (self.size < self.limits.least) | (self.gained < 0)
            score = np.where(allowed, self.scores(), np.inf)
            row, edge = divmod(int(np.argmin(score)), score.shape[1]) if score.size else (0, 0)
            if not score.size or not np.isfinite(score[row, edge]):
                break
            self.add(row, edge)
        return self.edge_of


class CostGreedy(Announcing):
    """The cheapest pairs of client and edge until each edge has enough clients, whatever their labels.

    A fresh assignment every round, for which everybody in reach is asked. O(clients used · N·M).
    """

    def decide(self, state: RoundState) -> Decision:
        """Add the pair that raises the cost the least, until each edge has its least number of clients."""
        pairing = Pairing(self.world, state.costs, self.limits, state.present, prices=self.prices, gamma=0.0)
        probed = len(pairing.pool)
        return self.decided(pairing.fill("least"), probed)


class QualityGreedy(Announcing):
    """The pairs that bring edges closest to the wanted mix of labels, whatever they cost. Asks nobody.

    A fresh assignment every round; edges go on above their least number of clients until their mix is good or
    does not get better. O(clients used · N·(K + M)).
    """

    def decide(self, state: RoundState) -> Decision:
        """Add the pair that lowers the divergence most, until each edge is healthy."""
        pairing = Pairing(self.world, state.costs, self.limits, state.present, prices=None, gamma=1.0)
        return self.decided(pairing.fill("healthy"))


class Share(Announcing):
    """SHARE's greedy association, made once for all clients as if all were always there.

    Before the first round, pairs are added by their mean costs and ``gamma`` times divergence until everybody
    has an edge or all edges are full; in a round, those take part who are there. SHARE's own search for the
    set of edges to use is left out: edges are given. Deng et al., ICDCS 2021.
    """

    def __init__(self, *, gamma: Gamma = 1.0) -> None:
        self.gamma = gamma

    def prepare(self, world: EdgeWorld, limits: Limits, prices: Prices, seed: int) -> None:
        """Make the association."""
        super().prepare(world, limits, prices, seed)
        everybody = np.ones(world.clients, bool)
        pairing = Pairing(world, world.mean, limits, everybody, prices=prices, gamma=self.gamma)
        self.seats = pairing.fill("most")

    def decide(self, state: RoundState) -> Decision:
        """Use those that are there."""
        return self.decided(np.where(state.present, self.seats, NOWHERE))
