"""What runs in a worker process: take a message, run the ``ClientApp``, leave the reply in shared memory."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ..arrays import FlatArrays, Layout, LayoutError, RowBlock
from ..compat import (
    ErrorCode,
    keep_arrays_unserialised,
    make_message,
    records_from_bytes,
    records_to_bytes,
    set_task_identity,
)
from ..grouped import GroupApp
from .buffers import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's numbers
_LARGE = 1 << 30


@dataclass(frozen=True)
class Block:
    """Where a batch of ``rows`` models lies: at the start of a buffer."""

    buffer: int
    layout: Layout
    rows: int


@dataclass(frozen=True)
class Content:
    """The records of a message, each a ``Block`` of one row or pickled, and the block for reply arrays.

    It is sent once to each worker, however many messages carry it.
    """

    id: int
    records: tuple[tuple[str, Block | bytes], ...]
    replies: Block | None


@dataclass(frozen=True)
class Task:
    """One message for one client: which content, which row its reply may use, and the client's state."""

    id: int
    content: int
    row: int
    metadata: Any
    node_id: int
    node_config: dict[str, Any]
    state: bytes


@dataclass(frozen=True)
class Outcome:
    """What came of a task: records or an error, and the new state; a record in the task's row is None."""

    task: int
    records: tuple[tuple[str, bytes | None], ...] = ()
    error: tuple[int, str] | None = None
    state: bytes = b""
    seconds: float = 0.0


class ClientRunner:
    """Runs tasks one after another; ``find_buffer`` returns the mapping of a buffer id."""

    def __init__(
        self, app: ClientApp, run_id: int, run_config: dict[str, Any], find_buffer: Callable[[int], Mapping]
    ) -> None:
        self._app = app
        self._run_id = run_id
        self._run_config = run_config
        self._find_buffer = find_buffer
        self._sources: dict[int, tuple[list[tuple[str, FlatArrays | bytes]], RowBlock | None]] = {}

    def add_content(self, content: Content) -> None:
        """Remember the records that later tasks refer to."""
        records: list[tuple[str, FlatArrays | bytes]] = []
        for name, record in content.records:
            if isinstance(record, Block):
                arrays = self._find_buffer(record.buffer).rows(record.layout, record.rows).row(0)
                arrays.vector.flags.writeable = arrays.side.flags.writeable = False
                records.append((name, arrays))
            else:
                records.append((name, record))
        block = content.replies
        replies = (
            self._find_buffer(block.buffer).rows(block.layout, block.rows) if block is not None else None
        )
        self._sources[content.id] = records, replies

    def forget_contents(self) -> None:
        """Drop all contents; called between batches of messages."""
        self._sources.clear()

    def run_all(self, tasks: list[Task]) -> list[Outcome]:
        """Run the clients of some tasks, together if the app is one that can; see :class:`GroupApp`."""
        if len(tasks) == 1 or not isinstance(self._app, GroupApp):
            return [self.run(task) for task in tasks]
        start = time.perf_counter()
        messages, contexts = zip(*map(self._message_and_context, tasks), strict=True)
        try:
            replies = self._app.run_group(list(messages), list(contexts))
        except Exception:
            # One by one, whoever is to blame gets its own error, and the others their replies.
            replies = [None] * len(tasks)
        seconds = (time.perf_counter() - start) / max(len(tasks) - replies.count(None), 1)
        return [
            self.run(task) if reply is None else replace(self._outcome(task, reply, context), seconds=seconds)
            for task, reply, context in zip(tasks, replies, contexts, strict=True)
        ]

    def _message_and_context(self, task: Task) -> tuple[Message, Context]:
        content = RecordDict()
        for name, source in self._sources[task.content][0]:
            # Each client gets its own records: what it changes in them, no other client sees.
            content[name] = pickle.loads(source) if isinstance(source, bytes) else source.to_record()
        state = records_from_bytes(task.state)
        context = Context(self._run_id, task.node_id, task.node_config, state, self._run_config)
        return make_message(task.metadata, content), context

    def run(self, task: Task) -> Outcome:
        """Run the client of one task; whatever it raises becomes an error outcome."""
        start = time.perf_counter()
        try:
            message, context = self._message_and_context(task)
            outcome = self._outcome(task, self._app(message, context), context)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            reason = "".join(traceback.format_exception_only(error)).strip()
            outcome_error = ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{reason}\n{traceback.format_exc()}"
            outcome = Outcome(task.id, error=outcome_error, state=task.state)
        return replace(outcome, seconds=time.perf_counter() - start)

    def _outcome(self, task: Task, reply: Any, context: Context) -> Outcome:
        if not isinstance(reply, Message):
            raise TypeError(f"the ClientApp returned {type(reply).__name__} instead of a Message")
        state = records_to_bytes(context.state) if context.state else b""
        if reply.has_error():
            return Outcome(task.id, error=(reply.error.code, reply.error.reason or ""), state=state)
        replies = self._sources[task.content][1]
        row = replies.row(task.row) if replies is not None and task.row >= 0 else None
        records: list[tuple[str, bytes | None]] = []
        for name, record in reply.content.items():
            if row is not None and isinstance(record, ArrayRecord):
                try:
                    row.fill(record)
                    row = None
                    records.append((name, None))
                    continue
                except LayoutError:
                    pass  # other arrays than were asked for travel by themselves: the strategy judges them
            records.append((name, pickle.dumps(record, protocol=pickle.HIGHEST_PROTOCOL)))
        return Outcome(task.id, tuple(records), None, state)


def one_thread_each() -> None:
    """Keep this process to one arithmetic thread: clients run side by side, not on top of one another."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def keep_freed_memory() -> None:
    """Let glibc keep large freed blocks for the next client instead of giving them back page by page.

    Clients allocate arrays of the same sizes over and over; faulting their pages in anew each time took half
    of a round of 10 MB models.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, _LARGE)


def why_no_workers() -> str:
    """Return why no process that trains could be forked from this one; empty if it could."""
    if not hasattr(os, "fork"):
        return "this system cannot fork"
    # PyTorch refuses to go backward in the fork of a process in which it did so on a GPU or a fake tensor.
    for path in glob.glob("/proc/self/task/*/comm"):
        with contextlib.suppress(OSError), open(path) as name:
            if name.read().startswith("pt_autograd"):
                return "this process has trained on a GPU, after which PyTorch cannot train in a fork of it"
    return ""


def worker_main(
    connection: Connection,
    inherited: list[Connection],
    app: ClientApp,
    run_id: int,
    run_config: dict[str, Any],
) -> None:
    """Serve tasks until the server closes its end of the connection.

    ``inherited`` are the server's ends that a forked process carries along; they are closed here so that
    every worker notices when the server is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()
    one_thread_each()
    keep_freed_memory()
    keep_arrays_unserialised(lambda named: FlatArrays.copy_of(named).to_record())
    set_task_identity(run_id)
    buffers: dict[int, Mapping] = {}
    runner = ClientRunner(app, run_id, run_config, buffers.__getitem__)
    try:
        while True:
            kind, value = pickle.loads(connection.recv_bytes())
            if kind == "tasks":
                outcomes = runner.run_all(value)
                connection.send_bytes(pickle.dumps(outcomes, protocol=pickle.HIGHEST_PROTOCOL))
            elif kind == "content":
                runner.add_content(value)
            elif kind == "buffer":
                buffer_id, nbytes = value
                descriptor = recv_handle(connection)
                buffers[buffer_id] = Mapping(descriptor, nbytes)
                os.close(descriptor)
            elif kind == "batch":
                runner.forget_contents()
                for buffer_id in value:
                    buffers.pop(buffer_id, None)
    except (EOFError, OSError):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # a forked child must not run the server's exit handlers
