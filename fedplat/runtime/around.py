"""A grid around a grid."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ..compat import Run


class GridWrapper(Grid):
    """Hands everything on to another grid, which stays the one to close; subclasses change some of it."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return the replies."""
        return list(self._grid.send_and_receive(messages, timeout=timeout))

    def set_run(self, run: Run) -> None:
        """Use another description of the run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run this grid belongs to."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message to a node."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """Return all node ids."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Iterable[Any]:
        """Return what is known of all nodes."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there by now."""
        return self._grid.pull_messages(message_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_grid"], name)
