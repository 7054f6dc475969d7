"""Which nodes there are, and in what order: by partition, so that no run depends on ids drawn at random."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedplat.compat import SERVER_NODE_ID, ErrorCode, MessageType
from fedplat.emulation.schedule import Budget, DeviceSchedule
from fedplat.errors import UserError

log = logging.getLogger("fedplat")

_POLL_SECONDS = 1.0
_QUERY_SECONDS = 120.0


@dataclass(frozen=True)
class Node:
    """A client: the id Flower gave it and the partition it holds, which is None if it does not tell."""

    node_id: int
    partition: int | None

    @property
    def key(self) -> int:
        """The number that orders nodes and seeds their draws."""
        return self.node_id if self.partition is None else self.partition


def budget_of(devices: DeviceSchedule | None, node: Node, server_round: int) -> Budget | None:
    """Return what a node's device has in a round; None for one that is not emulated."""
    known = devices is not None and node.partition is not None and node.partition < devices.nodes
    return devices[node.key, server_round] if devices is not None and known else None


def present(nodes: list[Node], devices: DeviceSchedule | None, server_round: int) -> list[Node]:
    """Return the nodes whose devices are there in a round."""
    budgets = ((node, budget_of(devices, node, server_round)) for node in nodes)
    return [node for node, budget in budgets if budget is None or budget.available]


def sender(reply: Message, asked: Mapping[str, int]) -> int:
    """Return the id of the node that a reply is about; ``asked`` is who got each message, by message id.

    The error that stands for a lost node comes from the SuperLink: only the message it answers tells whose.
    """
    source = reply.metadata.src_node_id
    return asked.get(reply.metadata.reply_to_message_id, source) if source == SERVER_NODE_ID else source


class NodeDirectory:
    """Knows the nodes of a grid in the order of their partitions; asks each new node once for its own."""

    def __init__(self, min_nodes: int, wait_seconds: float) -> None:
        self._min_nodes = min_nodes
        self._wait_seconds = wait_seconds
        self._known: dict[int, Node] = {}

    def __getitem__(self, node_id: int) -> Node:
        return self._known.get(node_id, Node(node_id, None))

    def online(self, grid: Grid) -> list[Node]:
        """Return the connected nodes, at least ``min_nodes``.

        Raises UserError if that many have not connected within ``wait_seconds``.
        """
        deadline = time.monotonic() + self._wait_seconds
        while len(ids := list(grid.get_node_ids())) < self._min_nodes:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"{len(ids)} of at least {self._min_nodes} clients are connected after "
                    f"{self._wait_seconds:g} s: start more clients, or lower min_nodes"
                )
            time.sleep(_POLL_SECONDS)
        new = sorted(set(ids) - self._known.keys())
        if new:
            self._ask(grid, new, {self._known[i].partition for i in ids if i in self._known})
        # Nodes that do not tell their partition come last, by id.
        return sorted((self[i] for i in ids), key=lambda n: (n.partition is None, n.key))

    def numbers(self, grid: Grid) -> dict[int, int]:
        """Return the connected node of each partition that has one, by partition; waits for no others."""
        ids = list(grid.get_node_ids())
        nodes = self.online(grid) if len(ids) >= self._min_nodes else []
        return {node.partition: node.node_id for node in nodes if node.partition is not None}

    def _ask(self, grid: Grid, ids: list[int], taken: set[int | None]) -> None:
        """Ask nodes for their partition; one that somebody else holds, or two claim, counts as not told."""
        question = RecordDict()
        messages = [Message(question, i, MessageType.QUERY) for i in ids]
        partitions: dict[int, int] = {}
        for reply in grid.send_and_receive(messages, timeout=_QUERY_SECONDS):
            node_id = reply.metadata.src_node_id
            if reply.has_content():
                self._known[node_id] = Node(node_id, None)
                for record in reply.content.config_records.values():
                    value = record.get("partition-id")
                    if isinstance(value, int):
                        partitions[node_id] = value
            elif reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION and node_id in ids:
                # An app without an answer has none next time either; a node that was lost may have.
                self._known[node_id] = Node(node_id, None)
        claimed = list(partitions.values())
        for node_id, partition in partitions.items():
            if claimed.count(partition) == 1 and partition not in taken:
                self._known[node_id] = Node(node_id, partition)
        if len(partitions) < len(ids):
            log.debug(
                "%d nodes do not tell their partition; they are ordered by id", len(ids) - len(partitions)
            )
