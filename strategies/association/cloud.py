"""Clients that report straight to the cloud: plain FedAvg, seen as a world with one edge that is the cloud.

A round of it does the work of a round with edges: ``edge_rounds`` times, each client trains and uploads, now
over the slow way to the cloud. So an edge's upload time u of a client becomes ``factor`` · u, its own energy
likewise, and there is no way from an edge to the cloud left to pay::

    T = edge_rounds * max_n [ training seconds + factor * upload seconds ]

A client's upload is that to its best edge, whether or not it is in that edge's range. Ten times is what
HierFAVG assumes (Liu et al., ICC 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedplat.errors import UserError
from fedplat.rng import generator

from .announcing import Announcing
from .base import Costs, Decision, EdgeWorld, Limits, Prices, RoundState
from .random_choice import random_edges


def cloud_costs(costs: Costs, upload: Costs, factor: float = 10.0) -> Costs:
    """Return the costs (N, 1) of reporting to the cloud; ``upload`` is the part of ``costs`` to transfer."""
    best = upload.seconds.argmin(axis=1)[:, None]

    def straight(whole: np.ndarray, part: np.ndarray) -> np.ndarray:
        return np.take_along_axis(whole + (factor - 1) * part, best, 1)

    return Costs(straight(costs.seconds, upload.seconds), straight(costs.joules, upload.joules))


def cloud_world(
    world: EdgeWorld, limits: Limits, upload: Costs, factor: float = 10.0
) -> tuple[EdgeWorld, Limits]:
    """Return the world with the cloud as its one edge, which has the quorum and the room of all edges.

    ``upload`` is what of ``world.mean`` is for transfers.
    """
    flat = replace(
        world,
        covered=np.ones((world.clients, 1), bool),
        mean=cloud_costs(world.mean, upload, factor),
        cloud_seconds=np.zeros(1),
        cloud_joules=np.zeros(1),
    )
    least, most = np.array([limits.least.sum()]), np.array([limits.most.sum()])
    return flat, replace(limits, least=least, most=most)


def cloud_states(
    states: Sequence[RoundState], uploads: Sequence[Costs], factor: float = 10.0
) -> list[RoundState]:
    """Return the rounds as the cloud sees them; ``uploads`` are the part of their costs for transfers."""
    return [
        replace(state, costs=cloud_costs(state.costs, upload, factor))
        for state, upload in zip(states, uploads, strict=True)
    ]


class Cloud(Announcing):
    """Random clients that report straight to the cloud, as many as it needs: FedAvg. Asks nobody. O(N).

    For worlds with one edge, which stands for the cloud: see :func:`cloud_world`. McMahan et al., 2017.
    """

    def prepare(self, world: EdgeWorld, limits: Limits, prices: Prices, seed: int) -> None:
        """Get to know the world; raises UserError if it has more than one edge."""
        if world.edges != 1:
            raise UserError(
                f"association 'cloud' is for one edge, which is the cloud; there are {world.edges}: "
                "set edges = 1, or take 'random-least' for edges"
            )
        super().prepare(world, limits, prices, seed)

    def decide(self, state: RoundState) -> Decision:
        """Draw the least number of clients among those that are there."""
        rng = generator(self.seed, "association-cloud", state.number)
        room = np.minimum(self.limits.least, self.limits.most)
        return self.decided(random_edges(self.world.covered, state.present, room, rng))
