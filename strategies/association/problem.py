"""The problem that Plan A solves: who is to report where, in expectation, and what a solution is worth.

A client n that is there with chance q_n counts as q_n clients, spends q_n of its energy and has q_n of its
labels; the delay is that of the slowest one chosen, whether it comes or not. With x the assignment::

    J = w_T T / T_ref + w_E E / E_ref + g_K sum_m max(0, D_m - delta) + g_L sum_m max(0, L_m - sum_n q_n x_nm)
    T = max_m [ edge_rounds * max_n seconds[n, m] + cloud_seconds[m] ]
    E = edge_rounds * sum_nm q_n joules[n, m] x_nm

D_m is the distance of the expected mix of labels from the target. All of it is inferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .base import NOWHERE, Bools, Costs, EdgeWorld, Floats, Ints, Limits, Prices
from .quality import Measure, distances, farthest


@dataclass(frozen=True)
class Terms:
    """How labels, delays and energy are judged, the same by Plan A and Plan B.

    ============ ==========================================================================================
    ``measure``  of the distance between mixes of labels
    ``within``   how far an edge's mix may be, in that measure; None: ``Limits.divergence``
    ``gamma``    of distance, per unit of cost (Plan B)
    ``deadline`` seconds in which a pair's edge rounds and the cloud's share have to be done; None: any
    ``joules``   a client may spend in a round of the cloud; None: any
    ============ ==========================================================================================
    """

    measure: Measure = "kl"
    within: float | None = None
    gamma: float = 1.0
    deadline: float | None = None
    joules: float | None = None

    def limit(self, limits: Limits) -> float:
        """Return the largest distance allowed."""
        return limits.divergence if self.within is None else self.within

    def pairs(self, world: EdgeWorld, costs: Costs) -> Bools:
        """Return the pairs (N, M) in reach that keep the deadline and the budget."""
        allowed = world.covered.copy()
        if self.deadline is not None:
            allowed &= world.edge_rounds * costs.seconds + world.cloud_seconds <= self.deadline
        if self.joules is not None:
            allowed &= world.edge_rounds * costs.joules <= self.joules
        return allowed


@dataclass(frozen=True, eq=False)
class Problem:
    """What is known, for the clients that are candidates.

    ============= =========================================================================================
    ``clients``   (C,) the candidates
    ``allowed``   (C, M) pairs that may be chosen
    ``chance``    (C,) of being there
    ``seconds``   (C, M) of a round of the cloud, its own part included
    ``joules``    (C, M) of a round of the cloud, as expected
    ``counts``    (C, K) labels as expected
    ``limit``     of the distance ``measure`` of an edge's mix
    ``risk``      None, or how likely an edge may be to have fewer clients than its least (RISK)
    ============= =========================================================================================
    """

    total: int
    clients: Ints
    allowed: Bools
    chance: Floats
    seconds: Floats
    joules: Floats
    counts: Floats
    limits: Limits
    prices: Prices
    measure: Measure = "kl"
    limit: float = 0.3
    risk: float | None = None
    quality_weight: float = 5.0
    quorum_weight: float = 5.0

    @classmethod
    def of(
        cls,
        world: EdgeWorld,
        limits: Limits,
        prices: Prices,
        costs: Costs,
        chance: Floats,
        candidates: Bools,
        terms: Terms | None = None,
        *,
        risk: float | None = None,
    ) -> Problem:
        """Return the problem for ``candidates`` (N,), each there with ``chance`` (N,).

        Clients that can report nowhere are left out. Candidates are ordered by what they are and not by
        their number, so that a search treats clients the same however they are numbered.
        """
        terms = terms or Terms()
        allowed = terms.pairs(world, costs) & (limits.most > 0) & candidates[:, None]
        chosen = np.flatnonzero(allowed.any(axis=1))
        weight = np.where(allowed, costs.seconds, 0.0).sum(axis=1)[chosen]
        energy = np.where(allowed, costs.joules, 0.0).sum(axis=1)[chosen]
        chosen = chosen[np.lexsort((chance[chosen], energy, weight))]
        return cls(
            world.clients,
            chosen,
            allowed[chosen],
            chance[chosen],
            world.edge_rounds * costs.seconds[chosen] + world.cloud_seconds,
            world.edge_rounds * chance[chosen, None] * costs.joules[chosen],
            chance[chosen, None] * world.counts[chosen],
            limits,
            prices,
            terms.measure,
            terms.limit(limits),
            risk,
        )

    @property
    def edges(self) -> int:
        """M."""
        return self.allowed.shape[1]

    def spread(self, of_candidates: Ints) -> Ints:
        """Return the edges of all clients (N,) from those of the candidates (C,)."""
        edge_of = np.full(self.total, NOWHERE)
        edge_of[self.clients] = of_candidates
        return edge_of

    def worth(self, edge_of: Ints) -> float:
        """Return J of an assignment of all clients (N,); those that are no candidates do not count."""
        cost, lacking = self.judged(edge_of)
        return cost + lacking

    def judged(self, edge_of: Ints) -> tuple[float, float]:
        """Return the cost U and the penalties of an assignment (N,); no penalties if it keeps the limits."""
        mine = edge_of[self.clients]
        here = mine[:, None] == np.arange(self.edges)
        seconds = np.where(here, self.seconds, 0.0).max(initial=0.0)
        cost = self.prices.cost(float(seconds), float(np.where(here, self.joules, 0.0).sum()))
        away = distances(here.T.astype(np.float64) @ self.counts, self.limits_target, self.measure)
        away = np.minimum(away, farthest(self.limits_target, self.measure))
        quality = np.maximum(away - self.limit, 0.0).sum()
        quorum = sum(self.shortage(edge, self.chance[here[:, edge]].tolist()) for edge in range(self.edges))
        return cost, float(self.quality_weight * quality + self.quorum_weight * quorum)

    @property
    def limits_target(self) -> Floats:
        """Return the target mix (K,), empty where clients have no classes."""
        return self.limits.target[: self.counts.shape[1]]

    def shortage(self, edge: int, chances: Sequence[float]) -> float:
        """Return how many clients an edge lacks, in expectation; with RISK also L times the risk too much."""
        least = int(self.limits.least[edge])
        short = max(0.0, least - sum(chances))
        if self.risk is not None:
            short += least * max(0.0, chance_of_fewer(chances, least) - self.risk)
        return short


def chance_of_fewer(chances: Sequence[float], least: int) -> float:
    """Return the chance that fewer than ``least`` of independent clients are there, exactly.

    The number of those there is Poisson-binomial: its distribution is built client by client, in
    O(clients * least).

    >>> round(chance_of_fewer([0.5, 0.5], 1), 3), round(chance_of_fewer([0.9, 0.8], 2), 3)
    (0.25, 0.28)
    """
    if least <= 0:
        return 0.0
    exactly = [1.0] + [0.0] * (least - 1)
    for chance in chances:
        for number in range(least - 1, 0, -1):
            exactly[number] += chance * (exactly[number - 1] - exactly[number])
        exactly[0] *= 1.0 - chance
    return min(max(sum(exactly), 0.0), 1.0)
