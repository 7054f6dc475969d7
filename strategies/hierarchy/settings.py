"""What a scenario may say of the tier of edge servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedplat.config_parts import AssociationConfig, EdgeConfig

from ..association.base import AssociationPolicy, Floats, Limits, Prices

Weight = Annotated[float, Field(ge=0, description="in the cost of a round")]


class Edges:
    """Edge servers between the clients and the cloud: hierarchical federated averaging, HierFAVG.

    In each round of the cloud an edge runs ``edge_rounds`` rounds of the strategy ``edge`` with the clients
    that ``association`` sends it; the scenario's strategy is the cloud's. The weight of a client, and of an
    edge, is the samples of those that delivered. With one round of one edge it is a flat run, to the bit, in
    which the association is who takes part.

    An edge is to have ``least`` to ``most`` clients (0: no limit) whose labels are within ``divergence`` nats
    of ``target``: uniform, or what all clients have together. Associations see label counts, with Laplace
    noise if ``histogram_epsilon`` is given. Without a ``[world]`` every client reaches each of ``edges``
    edges at the same cost, the link to the cloud takes ``cloud_seconds`` and ``cloud_joules``, and
    associations have seen ``history`` rounds of the availability. With one edge in a world of several, that
    edge is the cloud, to which uploads take ``cloud_slower`` times as long as to the best edge.

    Liu et al., ICC 2020.
    """

    def __init__(
        self,
        *,
        edges: Annotated[int, Field(ge=0, description="0: those of [world]")] = 0,
        edge_rounds: Annotated[int, Field(ge=1, description="of an edge, per round of the cloud")] = 1,
        edge: EdgeConfig = EdgeConfig(),  # noqa: B008
        association: AssociationConfig = AssociationConfig(),  # noqa: B008
        least: Annotated[int, Field(ge=1, description="clients an edge should have")] = 1,
        most: Annotated[int, Field(ge=0, description="clients an edge can have; 0: no limit")] = 0,
        divergence: Annotated[float, Field(ge=0, description="of an edge's labels, in nats")] = 0.3,
        target: Annotated[Literal["uniform", "population"], Field(description="of labels")] = "uniform",
        seconds_weight: Weight = 0.5,
        joules_weight: Weight = 0.5,
        histogram_epsilon: Annotated[float | None, Field(gt=0, description="of noisy label counts")] = None,
        cloud_seconds: Annotated[float, Field(ge=0, description="edge to cloud and back")] = 0.0,
        cloud_joules: Annotated[float, Field(ge=0, description="likewise")] = 0.0,
        history: Annotated[int, Field(ge=0, description="rounds watched before the run")] = 100,
        cloud_slower: Annotated[float, Field(ge=1, description="uploads straight to the cloud")] = 10.0,
    ) -> None:
        self.edges = edges
        self.edge_rounds = edge_rounds
        self.edge = edge
        self.association = association
        self.least = least
        self.most = most
        self.divergence = divergence
        self.target = target
        self.weights = Prices(seconds_weight, joules_weight)
        self.histogram_epsilon = histogram_epsilon
        self.cloud_seconds = cloud_seconds
        self.cloud_joules = cloud_joules
        self.history = history
        self.cloud_slower = cloud_slower

    def limits(self, clients: int, edges: int, counts: Floats) -> Limits:
        """Return what each edge should have, for label counts (clients, classes)."""
        classes = counts.shape[1]
        whole = counts.sum(axis=0)
        if self.target == "population" and whole.sum() > 0:
            # A label that nobody has may be told by a noisy count all the same.
            target = np.maximum(whole, 1e-9) / np.maximum(whole, 1e-9).sum()
        else:
            target = np.full(classes, 1 / classes) if classes else np.zeros(0)
        most = np.full(edges, self.most or clients)
        return Limits(np.full(edges, self.least), most, self.divergence, target)

    def prices(self, seconds_ref: float, joules_ref: float) -> Prices:
        """Return the prices on a scale."""
        return replace(self.weights, seconds_ref=seconds_ref, joules_ref=joules_ref)

    def policy(self) -> AssociationPolicy:
        """Return a new policy."""
        policy: AssociationPolicy = self.association.build()
        return policy
