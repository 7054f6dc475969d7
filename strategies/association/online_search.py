"""Plan A's search run anew every round, on those who are there: how good edges could be, at great expense."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from fedplat.rng import generator

from .anneal import anneal
from .announcing import Announcing
from .base import Decision, RoundState
from .problem import Problem


class OnlineSearch(Announcing):
    """Simulated annealing of the round's cost, quorums and labels over all present clients, every round.

    The search is Plan A's, with this round's costs and everybody who is there counted in full; ``proposals``
    are the changes it tries (0: 500 per client present). All present clients are asked. A bound on quality,
    not a policy for large worlds: O(proposals · (U + K)) with U clients at an edge and K classes.
    """

    def __init__(
        self, *, proposals: Annotated[int, Field(ge=0, description="0: 500 per client")] = 0
    ) -> None:
        self.proposals = proposals

    def decide(self, state: RoundState) -> Decision:
        """Search the assignment of those that are there."""
        everybody = np.ones(self.world.clients)
        problem = Problem.of(self.world, self.limits, self.prices, state.costs, everybody, state.present)
        rng = generator(self.seed, "association-online-search", state.number)
        return self.decided(anneal(problem, rng, self.proposals), len(problem.clients))
