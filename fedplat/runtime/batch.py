"""Messages pushed together, as tasks for workers: shared contents, shared memory, one row per reply."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, Error, Message, RecordDict

from ..arrays import Layout, RowBlock
from .buffers import BufferPool, Lease, SharedBuffer, arrange, rows_nbytes
from .worker import Block, Content, Outcome, Task


@dataclass(eq=False)
class Job:
    """One message on its way: its task, and how often a worker died while running it."""

    message: Message
    task: Task
    batch: Batch
    crashes: int = 0

    def reply(self, outcome: Outcome) -> Message:
        """Build the Flower message for an outcome; arrays in shared memory become views of it."""
        if outcome.error is not None:
            return self.error_reply(*outcome.error)
        content = RecordDict()
        block = self.batch.reply_blocks.get(self.task.content)
        for name, record in outcome.records:
            if record is not None:
                content[name] = pickle.loads(record)
            elif block is not None:
                content[name] = block.row(self.task.row).to_record()
        return Message(content, reply_to=self.message)

    def error_reply(self, code: int, reason: str) -> Message:
        """Build the error reply to this job's message."""
        return Message(Error(code, reason), reply_to=self.message)


class Batch:
    """Lay out the messages' arrays and the replies' rows in leased buffers.

    Messages that carry the same ``RecordDict`` object share one ``Content``, and equal ``ArrayRecord``
    objects are copied to shared memory once. Replies to messages of one layout are rows of one matrix, in
    the order of the messages.
    """

    def __init__(
        self,
        pool: BufferPool,
        next_id: Callable[[], int],
        node_configs: Mapping[int, dict[str, Any]],
    ) -> None:
        self._pool = pool
        self._next_id = next_id
        self._node_configs = node_configs
        self._leases: dict[int, Lease] = {}
        self._sent: dict[int, Block] = {}
        self.contents: dict[int, Content] = {}
        self.reply_blocks: dict[int, RowBlock] = {}

    def jobs(self, messages: list[Message]) -> list[Job]:
        """Return one job per message. The batch keeps none, so its memory is free with the last reply."""
        layouts: dict[int, Layout | None] = {}
        rows: dict[Layout | None, int] = {}
        row_of_message = []
        for message in messages:
            key = id(message.content)
            if key not in layouts:
                layouts[key] = _reply_layout(message.content)
            row_of_message.append(rows.setdefault(layouts[key], 0))
            rows[layouts[key]] += 1

        blocks = {
            layout: self._lease_block(layout, count) for layout, count in rows.items() if layout is not None
        }
        content_ids: dict[int, int] = {}
        jobs = []
        for message, row in zip(messages, row_of_message, strict=True):
            key = id(message.content)
            layout = layouts[key]
            if key not in content_ids:
                content_ids[key] = content_id = self._next_id()
                replies = None
                if layout is not None:
                    replies, self.reply_blocks[content_id] = blocks[layout]
                self.contents[content_id] = Content(
                    content_id, tuple(self._records(message.content)), replies
                )
            task_id, node = self._next_id(), message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = str(task_id)
            task = Task(
                task_id,
                content_ids[key],
                row if layout is not None else -1,
                message.metadata,
                node,
                self._node_configs[node],
                b"",
            )
            jobs.append(Job(message, task, self))
        return jobs

    def buffers(self, content: Content) -> Iterator[SharedBuffer]:
        """Yield the buffers that a content refers to."""
        for _, record in content.records:
            if isinstance(record, Block):
                yield self._leases[record.buffer].buffer
        if content.replies is not None:
            yield self._leases[content.replies.buffer].buffer

    def _records(self, content: RecordDict) -> Iterator[tuple[str, Block | bytes]]:
        for name, record in content.items():
            if isinstance(record, ArrayRecord) and len(record) > 0:
                if id(record) not in self._sent:
                    self._sent[id(record)], block = self._lease_block(Layout.of_record(record), 1)
                    block.row(0).fill(record)
                yield name, self._sent[id(record)]
            else:
                yield name, pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)

    def _lease_block(self, layout: Layout, rows: int) -> tuple[Block, RowBlock]:
        lease = self._pool.lease(rows_nbytes(layout, rows))
        self._leases[lease.buffer.id] = lease
        return Block(lease.buffer.id, layout, rows), arrange(lease.memory(), layout, rows)


def _reply_layout(content: RecordDict) -> Layout | None:
    """Return the layout that a reply's arrays will have if the client trains what it was sent."""
    for record in content.values():
        if isinstance(record, ArrayRecord) and len(record) > 0:
            return Layout.of_record(record)
    return None
