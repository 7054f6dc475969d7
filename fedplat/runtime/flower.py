"""Flower's own grids, as the rest of fedplat wants a grid: waits that end, nodes in order, states to save."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ..compat import records_from_bytes, records_to_bytes
from .around import GridWrapper

log = logging.getLogger("fedplat")

STATE_QUERY = "query.fedplat_state"
"""Type of the message that asks a client for its state, or gives it one back."""

_STATE = "state"
_STATE_SECONDS = 600.0


class FlowerGrid(GridWrapper):
    """A grid of Flower's, of a simulation or of a SuperLink, with the clients of an experiment behind it.

    Replies are asked for every ``poll_seconds`` and returned in the order of the messages. With
    ``saves_states`` the clients are asked for their states, which then are part of a checkpoint; without, as
    on real devices, what a client remembers stays with it and is gone when its SuperNode is.
    """

    def __init__(self, grid: Grid, *, poll_seconds: float, saves_states: bool = False) -> None:
        super().__init__(grid)
        self._poll_seconds = poll_seconds
        self._saves_states = saves_states

    def get_node_ids(self) -> list[int]:
        """Return all node ids, in a stable order."""
        return sorted(self._grid.get_node_ids())

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return the replies, in the order of the messages.

        Replies that are not there after ``timeout`` seconds are given up; a warning says whose they are.
        """
        sent = list(messages)
        if not sent:
            return []
        deadline = None if timeout is None else time.monotonic() + timeout
        ids = list(self._grid.push_messages(sent))
        replies: dict[str, Message] = {}
        missing = set(ids)
        while missing:
            for reply in self.pull_messages(missing):
                replies[reply.metadata.reply_to_message_id] = reply
            missing -= replies.keys()
            if deadline is not None and missing and time.monotonic() >= deadline:
                late = sorted(m.metadata.dst_node_id for m in sent if m.metadata.message_id in missing)
                log.warning(
                    "%d of %d replies did not arrive within %g s: nodes %s",
                    len(missing),
                    len(sent),
                    timeout,
                    late,
                )
                break
            if missing:
                time.sleep(self._poll_seconds)
        return [replies[i] for i in ids if i in replies]

    def start_workers(self) -> None:
        """Do nothing: Flower has started its own."""

    def node_states(self) -> dict[int, bytes]:
        """Return each node's ``Context.state`` in Flower's wire format; empty states are left out."""
        if not self._saves_states:
            return {}
        question = RecordDict()
        asked = [Message(question, node, STATE_QUERY) for node in self.get_node_ids()]
        states = {}
        for reply in self.send_and_receive(asked, timeout=_STATE_SECONDS):
            if reply.has_content() and (state := _bytes_of(reply)):
                states[reply.metadata.src_node_id] = state
        return states

    def load_node_states(self, states: Mapping[int, bytes]) -> None:
        """Set the nodes' states to what :meth:`node_states` returned."""
        if self._saves_states:
            messages = [Message(_with_bytes(state), node, STATE_QUERY) for node, state in states.items()]
            self.send_and_receive(messages, timeout=_STATE_SECONDS)


def answer_state_query(message: Message, state: RecordDict) -> Message:
    """Return a client's reply to a state query: its state, after it was set to the one that is given."""
    if given := _bytes_of(message):
        state.clear()
        state.update(records_from_bytes(given))
    return Message(_with_bytes(records_to_bytes(state) if state else b""), reply_to=message)


def _with_bytes(state: bytes) -> RecordDict:
    return RecordDict({_STATE: ConfigRecord({_STATE: state})})


def _bytes_of(message: Message) -> bytes:
    record = message.content.get(_STATE)
    value = record.get(_STATE) if isinstance(record, ConfigRecord) else None
    return value if isinstance(value, bytes) else b""
