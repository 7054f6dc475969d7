"""The place where devices are emulated: between a strategy and whatever runs the clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.serverapp import Grid

from ..arrays import payload_bytes
from ..clients.attacks.base import round_of
from ..clients.mods.memory_cap import MEMORY_KEY
from ..compat import make_message
from ..compression.wire import wire_bytes
from ..edge_keys import EDGE, EDGE_ROUND
from ..runtime.around import GridWrapper
from ..security.validation import array_records
from ..strategies.nodes import sender
from .edge_rounds import CloudLinks, EdgeRounds, EdgeTime
from .schedule import Budget, DeviceSchedule
from .timeline import DeviceRound, Policy, Timeline, Work, record_of_round

log = logging.getLogger("fedplat")

DEVICE_FAILED_CODE = 1002
"""Error code of a reply that an emulated device did not deliver."""

_LIMITS = "fedplat.limits"


class EmulatedGrid(GridWrapper):
    """Lets each node's training take what its device would take, and fail where the device would fail.

    A node that is away, has too little memory, is gone before its upload or misses the deadline gives an
    reply in place of its own; only nodes that deliver are trained, and those that turn out late by the size
    of their reply. Time is simulated: nothing waits, and no result depends on how fast this machine is.

    ``clients`` is each node's number in ``schedule``, ``work_of`` what the task in a message takes for a
    client, and ``least_up`` the fewest bytes that a reply to arrays can have. Messages other than for
    training pass as they are.

    With ``links`` to a cloud messages come from edge servers, several times in a round: clients have at
    an edge what ``budget_at`` says of client, edge and round; a round takes what :mod:`.edge_rounds` says.
    """

    def __init__(
        self,
        grid: Grid,
        schedule: DeviceSchedule,
        timeline: Timeline,
        policy: Policy,
        *,
        clients: Mapping[int, int],
        work_of: Callable[[Message, int], Work],
        least_up: Callable[[ArrayRecord], int] = payload_bytes,
        links: CloudLinks | None = None,
        budget_at: Callable[[int, int, int], Budget] | None = None,
    ) -> None:
        super().__init__(grid)
        self._schedule = schedule
        self._timeline = timeline
        self._policy = policy
        self._clients = clients
        self._work_of = work_of
        self._least_up = least_up
        self._links = links
        self._budget_at = budget_at
        self._edges = EdgeRounds()
        self._devices: list[DeviceRound] = []
        self._round = 0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send what devices can do and return all replies, those that devices cannot give as errors."""
        messages = list(messages)
        if not messages or messages[0].metadata.message_type.split(".")[0] != "train":
            return super().send_and_receive(messages, timeout=timeout)
        if self._round != (number := round_of(messages[0])):
            self._round, self._edges = number, EdgeRounds()
        down, up = _sizes(messages, payload_bytes), _sizes(messages, self._least_up)
        asked = [self._ask(message, *pair) for message, *pair in zip(messages, down, up, strict=True)]
        delivering = [m for m, device in zip(messages, asked, strict=True) if device.outcome == "delivered"]
        sent = self._with_limits(delivering)
        answers = super().send_and_receive(sent, timeout=timeout)
        nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
        by_node = {sender(answer, nodes): answer for answer in answers}
        self._devices, replies = [], []
        for message, size, device in zip(messages, down, asked, strict=True):
            reply: Message | None = None
            if device.outcome == "delivered":
                reply = by_node.get(message.metadata.dst_node_id)
                device = self._answered(message, size, reply)
            self._devices.append(device)
            if self._links is not None:
                self._edges.add(*_edge_of(message), device)
            if device.outcome not in ("delivered", "failed"):
                reply = Message(Error(DEVICE_FAILED_CODE, device.reason), reply_to=message)
            if reply is not None:
                replies.append(reply)
        return replies

    def engine_for(self, messages: Sequence[Message]) -> None:
        """Say that the replies of a round come all at once: which of them arrive is known then."""
        log.debug("emulated devices: the replies of a round are held in memory")

    def devices_in(self, server_round: int) -> list[DeviceRound]:
        """Return the devices that were asked in a round that is just over, in the order of the messages."""
        if server_round != self._round:
            return []
        return self._devices if self._links is None else self._edges.clients()

    def edges_in(self, server_round: int) -> dict[int, EdgeTime]:
        """Return what each edge took of a round that is just over, by number; {} without edges."""
        if self._links is None or server_round != self._round:
            return {}
        return self._edges.edges(self._links, self._timeline.closed_at)

    def record(self, server_round: int) -> dict[str, object]:
        """Return the figures of a round that is just over; of number 0, before any training, all are 0."""
        if server_round == 0:
            return record_of_round([], 0, 0.0)
        devices = self.devices_in(server_round)
        available = int(self._schedule.available[:, server_round - 1].sum())
        if self._links is None:
            return record_of_round(devices, available, self._timeline.closed_at(devices))
        edges = self.edges_in(server_round)
        # A cloud of which no edge asked anybody waits as a server does that asked nobody.
        seconds = max((edge.seconds for edge in edges.values()), default=self._timeline.closed_at([]))
        record = record_of_round(devices, available, seconds)
        cloud = self._edges.link_joules(self._links) if edges else 0.0
        return {**record, "joules": record["joules"] + cloud, "joules_cloud": cloud}

    def _ask(self, message: Message, size: int, least: int) -> DeviceRound:
        client = self._clients[message.metadata.dst_node_id]
        work = self._work_of(message, client)
        return self._timeline.of(client, self._budget(message), work, size, least)

    def _answered(self, message: Message, size: int, reply: Message | None) -> DeviceRound:
        client = self._clients[message.metadata.dst_node_id]
        work, budget = self._work_of(message, client), self._budget(message)
        failed = None
        if reply is None:
            failed = "no reply before the timeout"
        elif reply.has_error():
            failed = reply.error.reason or f"error code {reply.error.code}"
        up = 0 if reply is None or failed is not None else wire_bytes(reply)
        return self._timeline.of(client, budget, work, size, up, failed)

    def _budget(self, message: Message) -> Budget:
        client = self._clients[message.metadata.dst_node_id]
        if self._links is None or self._budget_at is None:
            return self._schedule[client, self._round]
        return self._budget_at(client, _edge_of(message)[0], self._round)

    def _with_limits(self, messages: list[Message]) -> list[Message]:
        """Tell each client how much memory it may use, if that is enforced."""
        if not self._policy.enforce:
            return messages
        limited = []
        for message in messages:
            budget = self._budget(message)
            left = max(budget.memory_bytes - self._policy.overhead_bytes, 0)
            content = RecordDict({**message.content, _LIMITS: ConfigRecord({MEMORY_KEY: left})})
            limited.append(make_message(message.metadata, content))
        return limited


def _edge_of(message: Message) -> tuple[int, int]:
    """Return which edge a message is from, and which of its rounds it belongs to."""
    for record in message.content.values():
        if isinstance(record, ConfigRecord) and EDGE in record:
            return int(record[EDGE]), int(record.get(EDGE_ROUND, 1))  # type: ignore[arg-type]
    return 0, 1


def _sizes(messages: Iterable[Message], size: Callable[[ArrayRecord], int]) -> list[int]:
    """Return the size of each message's arrays; messages share records, each of which is looked at once."""
    known: dict[int, int] = {}
    for message in messages:
        for record in array_records(message):
            if id(record) not in known:
                known[id(record)] = size(record)
    return [sum(known[id(record)] for record in array_records(message)) for message in messages]
