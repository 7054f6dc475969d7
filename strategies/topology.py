"""What an aggregator sees together: here all the clients of one server.

A tier of edge servers is not a topology of one strategy but servers with strategies of their own, whose
clients in turn are those of the edges: see :mod:`fedplat.strategies.hierarchy`.
"""

from __future__ import annotations

from typing import Annotated, Protocol

from pydantic import Field

from fedplat.updates import ClientUpdates

from .aggregators import Aggregate, Aggregator


class Topology(Protocol):
    """Decides whose updates an aggregator sees together."""

    def combine(self, updates: ClientUpdates, aggregator: Aggregator, server_round: int) -> Aggregate:
        """Combine the updates of a round."""
        ...


class Flat:
    """Clients report to one server.

    In a ``[world]`` of edges, an upload to it takes ``cloud_slower`` times as long as one to the best edge.
    """

    def __init__(
        self,
        *,
        cloud_slower: Annotated[float, Field(ge=1, description="uploads straight to the cloud")] = 10.0,
    ) -> None:
        self.cloud_slower = cloud_slower

    def combine(self, updates: ClientUpdates, aggregator: Aggregator, server_round: int) -> Aggregate:
        """Give all updates to the aggregator at once."""
        return aggregator(updates)
