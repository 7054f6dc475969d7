"""The server's end of compression: between the strategy and whatever runs the clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from ..arrays import FlatArrays, Layout, RowBlock
from ..runtime.around import GridWrapper
from ..security.validation import array_records, refusal
from .base import Compressor, EncodingError
from .envelope import decoded, is_enclosed, is_training, opened, reference_of, restored
from .simple import Uncompressed
from .wire import note

log = logging.getLogger("fedplat")


class CompressionGrid(GridWrapper):
    """A grid that puts the model back into replies from which clients left it out.

    Everything above sees plain replies, with the very model that a client signed; see
    :class:`fedplat.clients.mods.compression.CompressionMod`. Replies that are not compressed pass as they
    are. One whose arrays are not what the ``compressor`` makes of the model that was sent is replaced by a
    refusal.

    What each reply took on its way is told by :func:`fedplat.compression.wire.wire_bytes`, and by
    ``sent_bytes``, by node id: of the last round of training, or of all that was pulled since messages were
    last pushed.
    """

    def __init__(self, grid: Grid, compressor: Compressor) -> None:
        super().__init__(grid)
        self.compressor = compressor
        self.sent_bytes: dict[int, int] = {}
        self._pushed: dict[str, tuple[ArrayRecord, float]] = {}
        self._told = False

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return the replies, uncompressed, in the order in which the grid has them."""
        sent = list(messages)
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        asked = [(message, record) for message in sent if (record := _model_in(message)) is not None]
        if asked:
            self.sent_bytes = {}
        by_id = {message.metadata.message_id: record for message, record in asked}
        by_node = {message.metadata.dst_node_id: record for message, record in asked}

        def sent_to(reply: Message) -> ArrayRecord | None:
            answered, node = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
            return by_id.get(answered) if answered in by_id else by_node.get(node)

        return self._restored(replies, sent_to)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages and return their ids."""
        sent = list(messages)
        ids = list(self._grid.push_messages(sent))
        now = time.time()
        self._pushed = {key: kept for key, kept in self._pushed.items() if kept[1] > now}
        if len(ids) == len(sent):
            for message_id, message in zip(ids, sent, strict=True):
                if (record := _model_in(message)) is not None:
                    meta = message.metadata
                    self._pushed[message_id] = record, meta.created_at + meta.ttl
        self.sent_bytes = {}
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there by now, uncompressed."""
        replies = list(self._grid.pull_messages(message_ids))
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        sent = {key: self._pushed.pop(key)[0] for key in answered if key in self._pushed}
        return self._restored(replies, lambda reply: sent.get(reply.metadata.reply_to_message_id))

    def engine_for(self, messages: Sequence[Message]) -> None:
        """Return None: replies are decoded together, and never come in waves."""
        if not self._told:
            self._told = True
            log.info("compressed replies of a round are decoded together, and therefore held in memory")

    def _restored(
        self, replies: list[Message], sent_to: Callable[[Message], ArrayRecord | None]
    ) -> list[Message]:
        """Put models into replies; those to one model are rows of one matrix, in their order."""
        references: dict[int, FlatArrays] = {}
        found: dict[int, tuple[FlatArrays, str, dict[str, np.ndarray]]] = {}
        result = list(replies)
        for index, reply in enumerate(replies):
            if not is_training(reply) or reply.has_error():
                continue
            self.sent_bytes[reply.metadata.src_node_id] = note(reply)
            if not is_enclosed(reply):
                continue
            try:
                if (record := sent_to(reply)) is None or isinstance(self.compressor, Uncompressed):
                    raise EncodingError("nobody asked for a compressed model")
                if id(record) not in references:
                    references[id(record)] = reference_of(record, self.compressor)
                found[index] = (references[id(record)], *opened(reply.content, self.compressor))
            except EncodingError as error:
                result[index] = _refused(reply, error)
        layouts = [reference.layout for reference, _, _ in found.values()]
        blocks = {layout: _block(layout, layouts.count(layout)) for layout in dict.fromkeys(layouts)}
        rows = dict.fromkeys(blocks, 0)
        for index, (reference, name, arrays) in found.items():
            layout = reference.layout
            try:
                model, _ = decoded(arrays, reference, self.compressor, blocks[layout].row(rows[layout]))
            except EncodingError as error:
                result[index] = _refused(replies[index], error)
                continue
            rows[layout] += 1
            result[index] = restored(replies[index], name, model)
        return result


def _model_in(message: Message) -> ArrayRecord | None:
    """Return the one model that a training message carries."""
    records = array_records(message) if is_training(message) else []
    return records[0] if len(records) == 1 else None


def _block(layout: Layout, rows: int) -> RowBlock:
    return RowBlock(
        layout, np.empty((rows, layout.dim), np.float32), np.zeros((rows, layout.side_bytes), np.uint8)
    )


def _refused(reply: Message, error: EncodingError) -> Message:
    return refusal(reply, f"the compressed model is refused: {error}")
