"""Topologies: whether there is a tier of edge servers between the clients and the cloud."""

from __future__ import annotations

from typing import Protocol

from fedplat.updates import ClientUpdates

from .aggregators import Aggregate, Aggregator


class Topology(Protocol):
    """Decides whose updates an aggregator sees together."""

    def combine(self, updates: ClientUpdates, aggregator: Aggregator, server_round: int) -> Aggregate:
        """Combine the updates of a round."""
        ...


class Flat:
    """Clients report to one server."""

    def combine(self, updates: ClientUpdates, aggregator: Aggregator, server_round: int) -> Aggregate:
        """Give all updates to the aggregator at once."""
        return aggregator(updates)
