"""Edges that lack something, and what each client of a pool would do for them."""

from __future__ import annotations

import numpy as np

from .base import NOWHERE, Bools, Costs, EdgeWorld, Floats, Ints, Limits, Prices
from .problem import Terms
from .quality import distances, farthest


class Filling:
    """An assignment under repair: sums per edge, and scores of the pairs (D, P) of edges lacking and pool.

    The score of a pair is dC + gamma * dK: dC is what it adds to U (the delay's increase over the slowest
    edge so far, the client's energy), dK what it adds to the distance of the edge's mix from the target; an
    edge of nobody counts as one of the worst mix. A pair that brings an edge with enough clients no nearer to
    the target is not admissible: infinite. Adding a client computes the distances of one edge anew, O(P K).
    """

    def __init__(
        self, world: EdgeWorld, limits: Limits, prices: Prices, terms: Terms, costs: Costs, edge_of: Ints
    ) -> None:
        self.world, self.limits, self.prices, self.terms, self.costs = world, limits, prices, terms, costs
        self.edge_of = edge_of.copy()
        self.target = limits.target[: world.counts.shape[1]]
        self.limit, self.far = terms.limit(limits), farthest(self.target, terms.measure)
        seated = np.flatnonzero(edge_of != NOWHERE)
        at = edge_of[seated]
        self.size = np.bincount(at, minlength=world.edges)
        self.mix = np.zeros((world.edges, world.counts.shape[1]))
        np.add.at(self.mix, at, world.counts[seated])
        self.slowest = np.zeros(world.edges)
        np.maximum.at(self.slowest, at, world.edge_rounds * costs.seconds[seated, at])
        self.distance = self._distances(self.mix)

    def _distances(self, counts: Floats) -> Floats:
        return distances(np.maximum(counts, 0.0), self.target, self.terms.measure)

    @property
    def lacking(self) -> Bools:
        """Return which edges (M,) have too few clients or too bad a mix."""
        return (self.size < self.limits.least) | (self.distance > self.limit)

    def short(self) -> int:
        """Return how many clients the edges have less than their least, together."""
        return int(np.maximum(self.limits.least - self.size, 0).sum())

    def seconds(self) -> float:
        """Return T of the assignment."""
        each = np.where(self.size > 0, self.slowest + self.world.cloud_seconds, 0.0)
        return float(each.max(initial=0.0))

    def open_pool(self, pool: Ints, costs: Costs) -> None:
        """Get to know the clients of a pool (P,), who told their costs, and score them."""
        world, prices = self.world, self.prices
        self.costs, self.pool = costs, pool
        self.edges = np.flatnonzero(self.lacking & (self.size < self.limits.most))
        fit = Costs(costs.seconds[pool], costs.joules[pool])
        part = np.ix_(pool, self.edges)
        allowed = world.covered[part]
        if self.terms.deadline is not None:
            cloud = world.cloud_seconds[self.edges]
            allowed &= world.edge_rounds * fit.seconds[:, self.edges] + cloud <= self.terms.deadline
        if self.terms.joules is not None:
            allowed &= world.edge_rounds * fit.joules[:, self.edges] <= self.terms.joules
        self.open = allowed.T.copy()
        self.pool_seconds = world.edge_rounds * fit.seconds[:, self.edges].T
        self.pool_joules = world.edge_rounds * fit.joules[:, self.edges].T
        self.pool_counts = world.counts[pool]
        self.per_second = prices.seconds_weight / prices.seconds_ref
        self.per_joule = prices.joules_weight / prices.joules_ref
        self.fixed = np.full(self.open.shape, np.inf)
        self.delay = np.zeros(self.open.shape)
        self.longest = self.seconds()
        for row in range(len(self.edges)):
            self.weigh(row)
        self.scores = self.scores_of(slice(None))

    def own_costs(self) -> Floats:
        """Return what each pair (D, P) costs by itself: its delay and its energy."""
        return self.per_second * self.pool_seconds + self.per_joule * self.pool_joules

    def weigh(self, row: int) -> None:
        """Compute anew, for one edge, all of the scores that does not depend on other edges."""
        edge = self.edges[row]
        self.fixed[row] = np.inf
        if not self.lacking[edge] or self.size[edge] >= self.limits.most[edge]:
            return
        who = np.flatnonzero(self.open[row])
        gained = self._distances(self.mix[edge] + self.pool_counts[who]) - min(self.distance[edge], self.far)
        joules = self.pool_joules[row, who] + (0.0 if self.size[edge] else self.world.cloud_joules[edge])
        fixed = self.per_joule * joules + self.terms.gamma * gained
        if self.size[edge] >= self.limits.least[edge]:
            fixed[gained >= 0] = np.inf
        self.fixed[row, who] = fixed
        slower = np.maximum(self.slowest[edge], self.pool_seconds[row])
        self.delay[row] = slower + self.world.cloud_seconds[edge]

    def scores_of(self, rows: slice | int) -> Floats:
        """Return the scores of some of the edges' pairs, by the slowest edge so far."""
        longer = np.maximum(self.delay[rows] - self.longest, 0.0)
        scores: Floats = self.fixed[rows] + self.per_second * longer
        return scores

    def _update(self, row: int) -> None:
        edge = self.edges[row]
        self.distance[edge] = self._distances(self.mix[edge][None])[0]
        self.weigh(row)
        longest = self.seconds()
        if longest != self.longest:
            self.longest, self.scores = longest, self.scores_of(slice(None))
        else:
            self.scores[row] = self.scores_of(row)

    def add(self, row: int, place: int) -> None:
        """Give edge number ``row`` of those lacking the client number ``place`` of the pool."""
        edge, client = self.edges[row], self.pool[place]
        self.edge_of[client] = edge
        self.size[edge] += 1
        self.mix[edge] += self.pool_counts[place]
        self.slowest[edge] = max(self.slowest[edge], self.pool_seconds[row, place])
        self.open[:, place] = False
        self.fixed[:, place] = self.scores[:, place] = np.inf
        self._update(row)

    def give_up(self, row: int, place: int) -> None:
        """Take a client from an edge again; who else may have it now is up to the caller."""
        edge, client = self.edges[row], self.pool[place]
        self.edge_of[client] = NOWHERE
        self.size[edge] -= 1
        self.mix[edge] -= self.pool_counts[place]
        if not self.size[edge]:  # what adding and subtracting left over is no mix
            self.mix[edge] = 0.0
        left = np.flatnonzero(self.edge_of == edge)
        seconds = self.world.edge_rounds * self.costs.seconds[left, edge]
        self.slowest[edge] = seconds.max(initial=0.0)
        self._update(row)

    def prune(self) -> int:
        """Remove, from edges with more than their least, the costliest whose removal keeps the mix good.

        The costliest is who costs most by itself; it is repeated until nobody can go. Returns how many went.
        """
        world, removed = self.world, 0
        per_second = self.prices.seconds_weight / self.prices.seconds_ref
        per_joule = self.prices.joules_weight / self.prices.joules_ref
        for edge in np.flatnonzero(self.size > np.maximum(self.limits.least, 1)):
            members = np.flatnonzero(self.edge_of == edge)
            seconds, joules = self.costs.seconds[members, edge], self.costs.joules[members, edge]
            price = world.edge_rounds * (per_second * seconds + per_joule * joules)
            while len(members) > max(self.limits.least[edge], 1):
                good = self._distances(self.mix[edge] - world.counts[members]) <= self.limit
                if not good.any():
                    break
                victim = int(np.argmax(np.where(good, price, -np.inf)))
                self.mix[edge] -= world.counts[members[victim]]
                self.edge_of[members[victim]] = NOWHERE
                members, price = np.delete(members, victim), np.delete(price, victim)
                removed += 1
            self.size[edge] = len(members)
            self.distance[edge] = self._distances(self.mix[edge][None])[0]
        return removed
