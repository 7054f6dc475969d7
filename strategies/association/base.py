"""Which client reports to which edge in a round: what deciders know, and what their decisions cost.

Clients n = 0..N-1 and edges m = 0..M-1. Once per edge round, each client of an edge trains and uploads, and
the edge waits for the slowest; after ``edge_rounds`` of them the cloud waits for the slowest edge::

    T = max_m [ edge_rounds * max_{n at m} seconds[n, m] + cloud_seconds[m] ]
    E = sum_m [ edge_rounds * sum_{n at m} joules[n, m]  + cloud_joules[m]  ]      over edges with clients

The model is inferred: it is the usual one of wireless hierarchical federated learning; of the paper on
stage-wise decisions under intermittent clients (Wu et al., arXiv 2502.09303) only the abstract could be read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NOWHERE = -1
"""The edge of a client that takes no part."""


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds and joules of one edge round by client and edge, (N, M) each: training and transfer."""

    seconds: Floats
    joules: Floats


@dataclass(frozen=True, eq=False)
class EdgeWorld:
    """What is known before a run, and does not change: coverage, data, history, mean costs.

    ==================== ===================================================================================
    ``covered``          (N, M) booleans: the client is in the edge's range
    ``counts``           (N, K) label histograms as clients told them; K = 0 where samples have no classes
    ``samples``          (N,) how many samples a client has
    ``history``          (N, H) who was there in the rounds before the run, oldest first
    ``mean``             costs on average, over the radio's ups and downs
    ``cloud_seconds``    (M,) for an edge's model to the cloud and back
    ``cloud_joules``     (M,) likewise
    ``edge_rounds``      edge rounds per round of the cloud
    ==================== ===================================================================================
    """

    covered: Bools
    counts: Floats
    samples: Ints
    history: Bools
    mean: Costs
    cloud_seconds: Floats
    cloud_joules: Floats
    edge_rounds: int = 1

    @property
    def clients(self) -> int:
        """N."""
        return len(self.covered)

    @property
    def edges(self) -> int:
        """M."""
        return int(self.covered.shape[1])


@dataclass(frozen=True, eq=False)
class RoundState:
    """What is so in one round of the cloud, ``number`` from 1: who is ``present`` (N,), and its costs.

    A decider may look at ``present`` for free (clients send a beacon); for each client whose costs of this
    round it uses, it has to ask (``Decision.probed``), and pays for that.
    """

    number: int
    present: Bools
    costs: Costs


@dataclass(frozen=True, eq=False)
class Limits:
    """What each edge should have: ``least`` and at most ``most`` clients (M,), and a mix of labels.

    The mix is good if its Kullback-Leibler divergence from ``target`` (K,) is at most ``divergence``.
    """

    least: Ints
    most: Ints
    divergence: float
    target: Floats


@dataclass(frozen=True)
class Prices:
    """What makes seconds and joules comparable: U = w_T * T / T_ref + w_E * E / E_ref."""

    seconds_weight: float = 0.5
    joules_weight: float = 0.5
    seconds_ref: float = 1.0
    joules_ref: float = 1.0

    def cost(self, seconds: float, joules: float) -> float:
        """Return U."""
        return (
            self.seconds_weight * seconds / self.seconds_ref + self.joules_weight * joules / self.joules_ref
        )


@dataclass(frozen=True, eq=False)
class Decision:
    """The edge of each client (N,), ``NOWHERE`` for those that take no part.

    ``probed`` is how many clients were asked for their state, and ``changed`` how many were told another edge
    than they knew. ``notes`` are figures for the records.
    """

    edge_of: Ints
    probed: int = 0
    changed: int = 0
    notes: Mapping[str, float] = field(default_factory=dict)


class AssociationPolicy(ABC):
    """Decides, round after round, who takes part and at which edge.

    ``prepare`` is called once, before the first round; ``decide`` once per round, in their order; ``observe``
    after a round with who delivered. A policy draws from ``numpy.random.Generator`` of its own, made from the
    seed, and what it remembers from round to round is in its ``state_dict``.
    """

    def prepare(self, world: EdgeWorld, limits: Limits, prices: Prices, seed: int) -> None:
        """Get to know the world."""
        self.world, self.limits, self.prices, self.seed = world, limits, prices, seed

    @abstractmethod
    def decide(self, state: RoundState) -> Decision:
        """Return who takes part in a round; nobody who is not there, or at an edge out of reach."""

    def observe(  # noqa: B027
        self, state: RoundState, decision: Decision, delivered: Bools
    ) -> None:
        """Learn who of those that were to take part did deliver (N,)."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is remembered from round to round, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Put back what :meth:`state_dict` returned."""


def at_edges(edge_of: Ints, edges: int) -> Bools:
    """Return the assignment as (N, M) booleans."""
    return edge_of[:, None] == np.arange(edges)


def round_seconds(world: EdgeWorld, costs: Costs, edge_of: Ints) -> float:
    """Return T of a round; 0 if nobody takes part."""
    here = at_edges(edge_of, world.edges)
    slowest = np.where(here, costs.seconds, 0.0).max(axis=0, initial=0.0)
    each = world.edge_rounds * slowest + world.cloud_seconds
    return float(each[here.any(axis=0)].max(initial=0.0))


def round_joules(world: EdgeWorld, costs: Costs, edge_of: Ints) -> float:
    """Return E of a round; 0 if nobody takes part."""
    here = at_edges(edge_of, world.edges)
    clients = world.edge_rounds * np.where(here, costs.joules, 0.0).sum()
    return float(clients + world.cloud_joules[here.any(axis=0)].sum())


def divergences(counts: Floats, target: Floats) -> Floats:
    """Return the Kullback-Leibler divergence from ``target`` (K,) of each mix of labels, in nats.

    ``counts`` (..., K) are label counts, of any sum; a mix of nothing is infinitely far away, and without
    classes (K = 0) every mix is as good as any: 0.

    >>> divergences(np.array([[6.0, 0.0], [3.0, 3.0], [0.0, 0.0]]), np.array([0.5, 0.5])).round(4).tolist()
    [0.6931, 0.0, inf]
    """
    if not counts.shape[-1]:
        return np.zeros(counts.shape[:-1])
    sums = counts.sum(axis=-1, keepdims=True)
    mix = np.divide(counts, sums, out=np.zeros_like(counts, dtype=np.float64), where=sums > 0)
    with np.errstate(divide="ignore"):  # a label that the target has not: infinitely far away
        terms = mix * np.log(np.divide(mix, target, out=np.ones_like(mix), where=mix > 0))
    return np.where(sums[..., 0] > 0, np.maximum(terms.sum(axis=-1), 0.0), np.inf)


def edge_divergences(world: EdgeWorld, limits: Limits, edge_of: Ints) -> Floats:
    """Return the divergence of each edge's mix of labels (M,); infinite for one without clients."""
    return divergences(at_edges(edge_of, world.edges).T.astype(np.float64) @ world.counts, limits.target)


def healthy_edges(world: EdgeWorld, limits: Limits, edge_of: Ints) -> Bools:
    """Return which edges (M,) have their least number of clients and a good mix of labels."""
    size = at_edges(edge_of, world.edges).sum(axis=0)
    return (size >= limits.least) & (edge_divergences(world, limits, edge_of) <= limits.divergence)
