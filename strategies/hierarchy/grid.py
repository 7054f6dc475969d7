"""A grid whose nodes are edge servers, around the grid that their clients are nodes of."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from fedplat.compression.wire import sent_bytes, wire_bytes
from fedplat.errors import UserError
from fedplat.runtime.around import GridWrapper
from fedplat.security.privacy import BudgetSpent

from ..association.base import NOWHERE, Decision, Prices, RoundState
from ..nodes import sender
from ..reports import ClientReport
from ..wrapper import load_state, state_of
from .deciding import Deciding, everywhere, no_limits
from .edge import Edge
from .fixed import Fixed

log = logging.getLogger("fedplat")

FIRST_EDGE_ID = 1 << 32
"""The node id of edge 0, as the cloud sees it; the others follow."""

EDGE_CANNOT_CODE = 1004
"""Error code of the reply to a message that edges have no answer to."""

Mod = Callable[[Message, Context, Callable[[Message, Context], Message]], Message]


class EdgeGrid(GridWrapper):
    """Lets any strategy be the cloud: the nodes it sees are ``edges``, each of which asks its clients.

    All edges run side by side: a round of each is one ``send_and_receive`` of the ``grid``, so that all of
    its workers are busy. Which client is at which edge ``deciding`` tells before each round of the cloud, by
    default round-robin; clients that are nowhere are not asked. ``clients`` is each node's number in the
    world that is decided on, by default its place in the list of nodes.

    Training and evaluation go to the edges, which answer questions for their partition by their number.
    Nothing else gets through to clients. ``mods`` are what edges, by number, do to their replies, such as an
    attack; they are Flower's client mods. Simulates edges where the cloud is; for edges that are processes of
    their own, :class:`Edge` alone is enough::

        edges = [Edge(Median(), edge_rounds=4, number=m) for m in range(5)]
        FedAvg().start(EdgeGrid(grid, edges), initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        grid: Grid,
        edges: Sequence[Edge],
        deciding: Deciding | None = None,
        *,
        clients: Mapping[int, int] | None = None,
        mods: Mapping[int, Mod] | None = None,
    ) -> None:
        super().__init__(grid)
        if not edges:
            raise UserError("a grid of edges needs at least one edge")
        if deciding is not None and deciding.world.edges != len(edges):
            raise UserError(f"{len(edges)} edges for an association with {deciding.world.edges}")
        for number, edge in enumerate(edges):
            edge.number = number
        self.edges = list(edges)
        self.bytes_down = self.bytes_up = 0
        self._deciding = deciding
        self._clients = dict(clients) if clients is not None else None
        self._mods = dict(mods or {})
        self._at: list[set[int]] = [set() for _ in edges]
        self._states = [RecordDict() for _ in edges]
        self._done: dict[str, Message] = {}
        self._ids = itertools.count(1)

    # What the cloud sees -----------------------------------------------------------------------------------

    def get_node_ids(self) -> list[int]:
        """Return the node ids of all edges, also of those without clients."""
        return [FIRST_EDGE_ID + number for number in range(len(self.edges))]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Let edges answer, those that are to train side by side; replies are in the messages' order.

        ``timeout`` bounds each wait for clients, of which an edge's round has one.
        """
        sent = list(messages)
        replies: dict[int, Message] = {}
        training = [m for m in sent if _kind(m) == "train"]
        if training:
            replies |= self._trained(training, timeout)
        for message in sent:
            if id(message) not in replies:
                replies[id(message)] = self._other(message, timeout)
        return [replies[id(message)] for message in sent]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Let edges answer now, and return the ids that :meth:`pull_messages` wants."""
        sent = list(messages)
        ids = [f"edge-{next(self._ids)}" for _ in sent]
        for message, message_id in zip(sent, ids, strict=True):
            message.metadata.__dict__["_message_id"] = message_id
        self._done |= dict(zip(ids, self.send_and_receive(sent), strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to pushed messages, each once."""
        return [self._done.pop(i) for i in message_ids if i in self._done]

    def engine_for(self, messages: Sequence[Message]) -> None:
        """Return None: the replies of edges never come in waves."""
        log.debug("edges: the replies of a round are held in memory")

    # Training ----------------------------------------------------------------------------------------------

    def _trained(self, messages: Sequence[Message], timeout: float | None) -> dict[int, Message]:
        asked = {self._number(message): message for message in messages}
        self.bytes_down = self.bytes_up = 0
        first = next(iter(asked.values()))
        self._place(self.deciding.decide(_round_of(first)))
        for number, message in asked.items():
            self.edges[number].begin(message)
        for turn in range(1, max(self.edges[number].edge_rounds for number in asked) + 1):
            self._turn(turn, [n for n in asked if turn <= self.edges[n].edge_rounds], timeout)
        self._nobody_left(asked)
        self.deciding.observe(self._delivered())
        return {id(message): self._answered(number, message) for number, message in asked.items()}

    def _turn(self, turn: int, numbers: Sequence[int], timeout: float | None) -> None:
        """Run one round of several edges."""
        edge_of: dict[int, int] = {}
        questions: list[Message] = []
        for number in numbers:
            own = self.edges[number].ask(turn, self.view(number))
            edge_of |= {message.metadata.dst_node_id: number for message in own}
            questions += own
        answers = super().send_and_receive(questions, timeout=timeout) if questions else []
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in questions if m.metadata.message_id}
        replies: dict[int, list[Message]] = {number: [] for number in numbers}
        for answer in answers:
            # An answer that nobody asked for has no edge to go to.
            if (number := edge_of.get(sender(answer, asked), NOWHERE)) in replies:
                replies[number].append(answer)
        self.bytes_down += sent_bytes(questions)
        self.bytes_up += sum(map(wire_bytes, answers))
        for number in numbers:
            self.edges[number].take(replies.pop(number))

    def _answered(self, number: int, message: Message) -> Message:
        reply = self.edges[number].answer()
        mod = self._mods.get(number)
        if mod is None or reply.has_error():
            return reply
        # Numbered after the clients, so that an edge draws nothing that a client draws too.
        config: dict[str, bool | float | int | str] = {"partition-id": self.deciding.world.clients + number}
        context = Context(self.run.run_id, FIRST_EDGE_ID + number, config, self._states[number], {})
        return mod(message, context, lambda message, context: reply)

    def _nobody_left(self, asked: Collection[int]) -> None:
        """Raise BudgetSpent if that is why no edge has a model."""
        edges = [self.edges[number] for number in asked]
        spent = [edge.spent for edge in edges if edge.spent is not None]
        if spent and not any(edge.samples for edge in edges):
            raise BudgetSpent(str(spent[0]))

    def _delivered(self) -> np.ndarray:
        delivered = np.zeros(self.deciding.world.clients, np.bool_)
        for edge in self.edges:
            delivered[[self.numbers[node] for node in edge.delivered]] = True
        return delivered

    # Everything else ---------------------------------------------------------------------------------------

    def _other(self, message: Message, timeout: float | None) -> Message:
        kind, number = _kind(message), self._number(message)
        if kind == "evaluate":
            if self._deciding is None or self._deciding.decided is None:
                self._place(self.deciding.decide(_round_of(message)))
            return self.edges[number].evaluate(message, self.view(number), timeout=timeout)
        if message.metadata.message_type == "query":
            return Message(RecordDict({"node": ConfigRecord({"partition-id": number})}), reply_to=message)
        why = f"an edge has no answer to a message of type '{message.metadata.message_type}'"
        return Message(Error(EDGE_CANNOT_CODE, why), reply_to=message)

    def view(self, number: int) -> Grid:
        """Return the grid as an edge sees it: its nodes are the clients that are at it and connected."""
        return _Part(self._grid, self._at[number])

    @property
    def numbers(self) -> dict[int, int]:
        """Each node's number in the world."""
        if self._clients is None:
            self._clients = {node: place for place, node in enumerate(self._grid.get_node_ids())}
        return self._clients

    @property
    def deciding(self) -> Deciding:
        """What tells which client is at which edge."""
        if self._deciding is None:
            n, m = len(self.numbers), len(self.edges)
            everybody = np.ones(n, np.bool_)
            world = everywhere(n, m, edge_rounds=max(edge.edge_rounds for edge in self.edges))
            self._deciding = Deciding(
                Fixed(), world, no_limits(n, m), Prices(), lambda g: RoundState(g, everybody, world.mean)
            )
        return self._deciding

    def _place(self, decision: Decision) -> None:
        self._at = [set() for _ in self.edges]
        for node, client in self.numbers.items():
            if (edge := int(decision.edge_of[client])) != NOWHERE:
                self._at[edge].add(node)

    def _number(self, message: Message) -> int:
        number = message.metadata.dst_node_id - FIRST_EDGE_ID
        if not 0 <= number < len(self.edges):
            raise ValueError(f"there is no node {message.metadata.dst_node_id}: nodes are edges here")
        return number

    # Reports, state ----------------------------------------------------------------------------------------

    def at(self, number: int) -> Collection[int]:
        """Return the nodes of the clients that the last decision sent to an edge."""
        return self._at[number]

    def client_reports(self, weights: Mapping[int, float]) -> list[tuple[int, ClientReport]]:
        """Return what became of each client in its edge's last round, with the edge; ``weights`` by edge.

        A client's weight is its share in the model of the cloud: that in its edge's times the edge's own.
        """
        found = [
            (number, _times(report, weights.get(number, 0.0)))
            for number, edge in enumerate(self.edges)
            for report in edge.reports
        ]
        return sorted(found, key=lambda pair: pair[1].client)

    def state_dict(self) -> dict[str, Any]:
        """Return what edges and association remember from round to round, as tensors and plain values."""
        return {
            "association": self.deciding.state_dict(),
            "edges": {str(number): state_of(edge.strategy) for number, edge in enumerate(self.edges)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned for the same edges."""
        self.deciding.load_state_dict(state["association"])
        for number, edge in enumerate(self.edges):
            load_state(edge.strategy, state["edges"][str(number)])


class _Part(GridWrapper):
    """A grid of which only some nodes are seen."""

    def __init__(self, grid: Grid, nodes: Collection[int]) -> None:
        super().__init__(grid)
        self._nodes = nodes

    def get_node_ids(self) -> list[int]:
        """Return the nodes that are seen, in the grid's order."""
        return [node for node in self._grid.get_node_ids() if node in self._nodes]


def _times(report: ClientReport, weight: float) -> ClientReport:
    return replace(report, weight=report.weight * weight)


def _kind(message: Message) -> str:
    return message.metadata.message_type.split(".")[0]


def _round_of(message: Message) -> int:
    for record in message.content.values():
        if isinstance(record, ConfigRecord) and "server-round" in record:
            return int(record["server-round"])  # type: ignore[arg-type]
    return 1
