"""Policies without a plan: random edges, and everybody at the nearest one.

They are what others are measured against; :class:`RandomLeast` also sets the scale of costs
(:func:`fedplat.strategies.association.reference.reference_prices`).
"""

from __future__ import annotations

import numpy as np

from fedplat.rng import generator

from .announcing import Announcing
from .base import NOWHERE, Bools, Decision, Floats, Ints, RoundState


def random_edges(covered: Bools, present: Bools, room: Ints, rng: np.random.Generator) -> Ints:
    """Return, for those present in random order, a random edge in reach that still has ``room`` (M,).

    Two draws per client are made whoever is present, so one client's absence moves nobody else's draws.

    >>> random_edges(np.array([[True]] * 3), np.array([True, False, True]), np.array([5]), generator(1, "x"))
    array([ 0, -1,  0])
    """
    order, pick = rng.random(len(covered)), rng.random(len(covered))
    left, edge_of = room.copy(), np.full(len(covered), NOWHERE)
    for client in np.argsort(order, kind="stable"):
        if present[client]:
            choice = np.flatnonzero(covered[client] & (left > 0))
            if len(choice):
                edge = choice[int(pick[client] * len(choice))]
                edge_of[client] = edge
                left[edge] -= 1
    return edge_of


class RandomLeast(Announcing):
    """Random clients at random edges in reach, as few as an edge needs. Asks nobody.

    O(N·M). In the manner of client sampling in HierFAVG, Liu et al., ICC 2020.
    """

    def decide(self, state: RoundState) -> Decision:
        """Fill each edge to its least number of clients, as far as clients reach."""
        return self.decided(self._random(state, self.limits.least))

    def _random(self, state: RoundState, room: Ints) -> Ints:
        rng = generator(self.seed, "association-random", state.number)
        return random_edges(self.world.covered, state.present, np.minimum(room, self.limits.most), rng)


class RandomMost(RandomLeast):
    """Random clients at random edges in reach, as many as an edge takes. Asks nobody. O(N·M)."""

    def decide(self, state: RoundState) -> Decision:
        """Fill each edge to its most clients, as far as clients reach."""
        return self.decided(self._random(state, self.limits.most))


def nearest_edges(seconds: Floats, allowed: Bools, room: Ints) -> Ints:
    """Return the fastest allowed edge of each client; a full one keeps its fastest and sends others on.

    Pairs are taken from the fastest on, which ends where no client and edge would both rather have each
    other. ``seconds`` and ``allowed`` are (N, M), ``room`` (M,).

    >>> nearest_edges(np.array([[1.0, 5.0], [2.0, 3.0]]), np.ones((2, 2), bool), np.array([1, 1])).tolist()
    [0, 1]
    """
    clients, edges = np.nonzero(allowed)
    left, edge_of = room.copy(), np.full(len(seconds), NOWHERE)
    for i in np.argsort(seconds[clients, edges], kind="stable"):
        client, edge = clients[i], edges[i]
        if edge_of[client] == NOWHERE and left[edge] > 0:
            edge_of[client] = edge
            left[edge] -= 1
    return edge_of


class AllOnline(Announcing):
    """Everybody who is there, at the edge with the best channel. Asks nobody: clients hear the edges' pilots.

    An edge takes its most clients at most and sends the slowest to their next best edge; with
    ``limited = false`` each client gets its best edge, however many are there. O(N·M·log(N·M)).
    """

    def __init__(self, *, limited: bool = True) -> None:
        self.beyond_most = not limited

    def decide(self, state: RoundState) -> Decision:
        """Send everybody to the fastest edge with room."""
        everybody = np.full(self.world.edges, self.world.clients)
        room = everybody if self.beyond_most else self.limits.most
        allowed = self.world.covered & state.present[:, None]
        return self.decided(nearest_edges(state.costs.seconds, allowed, room))
