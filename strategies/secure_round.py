"""One round of secure aggregation on the server: the messages to all groups, and what comes of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from flwr.app import DEFAULT_TTL, ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fedplat.arrays import FlatArrays, RowBlock, peek
from fedplat.compat import SERVER_NODE_ID, ErrorCode, MessageType, make_error_message, make_message
from fedplat.security.fixed_point import FixedPoint, decode_update, vector_length
from fedplat.security.masking import ProtocolError, Ring, Session
from fedplat.security.secure_group import SecureGroup
from fedplat.security.secure_messages import (
    KEYS,
    MASKED,
    RECORD,
    SHARES,
    UNMASK,
    bytes_in,
    list_in,
    pack_ids,
    peer_fields,
    record_of,
    session_fields,
    unpack_ids,
)
from fedplat.security.validation import array_records, is_refusal, scalar_metrics

from .nodes import sender

log = logging.getLogger("fedplat")

_COUNT = "num-examples"

Take = Callable[[SecureGroup, int, ConfigRecord], None]


@dataclass
class SecureRound:
    """The groups of a round by number, and what became of those who are out of it.

    ``dropped`` tells by node id the status and the reason, ``failed`` by group number why the whole group was
    left out. ``timeout`` bounds the wait for the answers to each question, in seconds.
    """

    session: Session
    groups: Mapping[int, SecureGroup]
    codec: FixedPoint
    received: FlatArrays
    grid: Grid
    timeout: float
    dropped: dict[int, tuple[str, str]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    _asked: list[Metadata] = field(default_factory=list)
    _metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    @cached_property
    def terms(self) -> bytes:
        """What all members are told: a digest of the model and of the settings."""
        return self.codec.digest(self.received)

    @property
    def going_on(self) -> dict[int, SecureGroup]:
        """The groups that have not failed."""
        return {number: group for number, group in self.groups.items() if number not in self.failed}

    def fail(self, number: int, reason: str) -> None:
        """Leave a whole group out of the round."""
        self.failed[number] = reason
        log.warning("round %d: group %d is left out: %s", self.session.server_round, number, reason)
        for node_id in self.groups[number].members:
            self.dropped.setdefault(node_id, ("failed", f"group {number} was left out: {reason}"))

    # Before the training -----------------------------------------------------------------------------------

    def share_secrets(self) -> None:
        """Bring every group to exchange keys and to share its secrets; two questions to each member."""
        question = self._content({})
        members = {node_id: question for group in self.going_on.values() for node_id in group.members}
        self._ask(KEYS, members, _take_keys)
        self._fail_where("sent keys", lambda group: group.listed)
        questions: dict[int, RecordDict] = {}
        for group in self.going_on.values():
            content = self._content({**peer_fields(group.listed), "threshold": group.threshold})
            questions |= {peer.node_id: content for peer in group.listed}
        self._ask(SHARES, questions, _take_shares)
        self._fail_where("shared their secrets", lambda group: group.sharing)

    def training_messages(self, messages: Iterable[Message]) -> list[Message]:
        """Return the messages to those who are still there, with the settings of the round.

        All of them carry the same settings, so that an engine still sees which messages are alike.
        """
        groups = self.going_on.values()
        settings = {
            "groups": [pack_ids(group.sharing) for group in groups],
            "clip": self.codec.clip,
            "bits": self.codec.bits,
            "summands": self.codec.summands,
            "max-weight": self.codec.max_weight,
            "terms": self.terms,
        }
        record = self._content(settings)[RECORD]
        present = {node_id for group in groups for node_id in group.sharing}
        contents: dict[int, RecordDict] = {}
        training = []
        for message in messages:
            told, old = message.metadata, message.content
            if told.dst_node_id in present:
                if id(old) not in contents:
                    contents[id(old)] = RecordDict({**old, RECORD: record})
                content = contents[id(old)]
                training.append(
                    Message(
                        content, told.dst_node_id, told.message_type, ttl=told.ttl, group_id=told.group_id
                    )
                )
        self._asked = [message.metadata for message in training]
        return training

    # After the training ------------------------------------------------------------------------------------

    def add_up(self, replies: Iterable[Message]) -> None:
        """Add the masked updates to the sums of their groups as they come."""
        asked = {m.message_id: m.dst_node_id for m in self._asked if m.message_id}
        length = vector_length(self.received.layout)
        group_of = {node_id: g for g in self.going_on.values() for node_id in g.sharing}
        answered: set[int] = set()
        for reply in replies:
            node_id = sender(reply, asked)
            if node_id not in group_of or node_id in answered:
                log.warning("a reply of node %d that nobody asked for is left out", node_id)
                continue
            answered.add(node_id)
            if reply.has_error():
                status = "refused" if is_refusal(reply) else "failed"
                self.dropped[node_id] = status, f"no masked update: {_why(reply.error)}"
                continue
            try:
                group_of[node_id].take_masked(node_id, _masked(reply, length, self.codec))
                self._metrics[node_id] = scalar_metrics(reply)
            except ProtocolError as error:
                self.dropped[node_id] = "refused", str(error)
        for node_id in sorted(group_of.keys() - answered):
            self.dropped[node_id] = "failed", "no masked update before the timeout"
        self._fail_where("sent a masked update", lambda group: group.survivors)

    def unmask(self) -> None:
        """Ask the survivors of every group for the shares that take the masks off its sum.

        Whoever is silent now is in the sum all the same, as long as enough others answer.
        """
        questions = {}
        for group in self.going_on.values():
            for node_id in group.survivors:
                sealed = group.sealed_for(node_id)
                fields = {
                    "survivors": pack_ids(group.survivors),
                    "senders": pack_ids(list(sealed)),
                    "sealed": list(sealed.values()),
                }
                questions[node_id] = self._content(fields)
        self._ask(UNMASK, questions, _take_revealed, needed=False)
        self._fail_where("helped to unmask the sum", lambda group: group.revealing)

    def means(self) -> list[Message]:
        """Return a reply for every group in order: its mean model, as a row of one matrix, or an error.

        The sender of a reply is the group's number; its sample count is what the mean weighs.
        """
        layout, going_on = self.received.layout, self.going_on
        block = RowBlock(
            layout,
            np.empty((len(going_on), layout.dim), np.float32),
            np.zeros((len(going_on), layout.side_bytes), np.uint8),
        )
        rows: dict[int, tuple[FlatArrays, int]] = {}
        for number, group in going_on.items():
            row, members = block.row(len(rows)), len(group.survivors)
            try:
                total = group.total(self.terms)
                rows[number] = row, decode_update(total, members, self.received, self.codec, into=row)
            except ValueError as error:
                self.fail(number, str(error))
            group.release()
        shared = self._shared_metrics(rows)
        replies = []
        for number in self.groups:
            about = _metadata(number, self.session.server_round)
            if number in rows:
                row, weight = rows[number]
                metrics = MetricRecord({**shared[number], _COUNT: weight})
                replies.append(
                    make_message(about, RecordDict({"arrays": row.to_record(), "metrics": metrics}))
                )
            else:
                error_reply = Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, self.failed[number])
                replies.append(make_error_message(about, error_reply))
        return replies

    def _shared_metrics(self, numbers: Iterable[int]) -> dict[int, dict[str, float]]:
        """Return the plain means, by group, of the metrics that every member of every such group released.

        Flower's own strategies end a run in which two replies have different metrics.
        """
        groups = {number: self.groups[number].survivors for number in numbers}
        everybody = [self._metrics[node_id].keys() for members in groups.values() for node_id in members]
        names = sorted(set.intersection(*map(set, everybody)) - {_COUNT}) if everybody else []
        return {
            number: {
                name: float(np.mean([self._metrics[node_id][name] for node_id in members])) for name in names
            }
            for number, members in groups.items()
        }

    # Questions ---------------------------------------------------------------------------------------------

    def _content(self, fields: Mapping[str, object]) -> RecordDict:
        """Return the content of a message of this session."""
        record = ConfigRecord({**session_fields(self.session), **fields})  # type: ignore[dict-item]
        return RecordDict({RECORD: record})

    def _ask(self, kind: str, questions: Mapping[int, RecordDict], take: Take, needed: bool = True) -> None:
        """Ask nodes and let ``take`` have their answers.

        Who gives none that it takes is out of the round, if an answer is ``needed``.
        """
        number = str(self.session.server_round)
        messages = [Message(content, node, kind, group_id=number) for node, content in questions.items()]
        replies = list(self.grid.send_and_receive(messages, timeout=self.timeout)) if messages else []
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in messages if m.metadata.message_id}
        group_of = {node: g for g in self.going_on.values() for node in g.members}
        lost = dict.fromkeys(questions, ("failed", f"no answer to {kind} within {self.timeout:g} s"))
        for reply in sorted(replies, key=lambda reply: sender(reply, asked)):
            node_id = sender(reply, asked)
            if node_id not in lost:
                continue
            if reply.has_error():
                lost[node_id] = "failed", f"{kind}: {_why(reply.error)}"
                continue
            try:
                take(group_of[node_id], node_id, record_of(reply.content))
                del lost[node_id]
            except ProtocolError as error:
                lost[node_id] = "refused", f"{kind}: {error}"
        for node_id, (status, reason) in lost.items():
            log.warning("round %s: node %d: %s", number, node_id, reason)
            if needed:
                self.dropped[node_id] = status, reason

    def _fail_where(self, what: str, come: Callable[[SecureGroup], tuple[object, ...]]) -> None:
        """Leave out the groups of which too few members have come so far."""
        for number, group in self.going_on.items():
            if lacking := group.lacking(come(group), what):
                self.fail(number, lacking)


def _take_keys(group: SecureGroup, node_id: int, answer: ConfigRecord) -> None:
    group.take_keys(node_id, bytes_in(answer, "encryption-key"), bytes_in(answer, "mask-key"))


def _take_shares(group: SecureGroup, node_id: int, answer: ConfigRecord) -> None:
    group.take_shares(node_id, list_in(answer, "sealed"), bytes_in(answer, "commitment"))


def _take_revealed(group: SecureGroup, node_id: int, answer: ConfigRecord) -> None:
    ids, shares = unpack_ids(bytes_in(answer, "ids")), list_in(answer, "shares")
    if len(ids) != len(shares):
        raise ProtocolError("the list of shares is cut off")
    group.take_revealed(node_id, dict(zip(ids, shares, strict=True)))


def _masked(reply: Message, length: int, codec: FixedPoint) -> Ring:
    """Return the masked vector of a reply; raises ProtocolError if it is not one."""
    records = array_records(reply)
    if len(records) != 1 or list(records[0]) != [MASKED]:
        raise ProtocolError("the reply is not a masked update")
    try:
        vector = peek(records[0][MASKED])
    except (ValueError, SyntaxError, TypeError) as error:
        raise ProtocolError(f"the masked update cannot be read: {error}") from error
    if vector.shape != (length,) or vector.dtype != codec.dtype:
        raise ProtocolError(
            f"the masked update is {vector.dtype.name} {vector.shape}, expected {codec.dtype} ({length},)"
        )
    return vector


def _why(error: Error) -> str:
    """Return the first line of an error; one that only a missing mod explains says so."""
    reason = (error.reason or "").strip() or f"error code {error.code}"
    if "function registered with name 'secure_" in reason:
        return "the client's app has no SecureAggregationMod, or it was not registered"
    return reason.splitlines()[0]


def _metadata(group: int, server_round: int) -> Metadata:
    return Metadata(
        run_id=0,
        message_id="",
        src_node_id=group,
        dst_node_id=SERVER_NODE_ID,
        reply_to_message_id="",
        group_id=str(server_round),
        created_at=time.time(),
        ttl=DEFAULT_TTL,
        message_type=MessageType.TRAIN,
    )
