"""The local engine: a Flower ``Grid`` that runs a ``ClientApp`` in persistent processes, without Ray."""

from __future__ import annotations

import itertools
import logging
import math
import multiprocessing
import os
import pickle
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import send_handle
from typing import Any

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from ..compat import ErrorCode, Run, set_task_identity
from ..threads import one_thread
from .batch import Batch
from .buffers import BufferPool, SharedBuffer
from .units import Planner, Unit, without
from .worker import ClientRunner, Outcome, Task, why_no_workers, worker_main

log = logging.getLogger("fedplat")

_RUN_ID = 1
FIRST_NODE_ID = 1000
_MAX_CRASHES = 2
_QUEUE_AHEAD_BYTES = (
    32_768  # two such tasks fit a socket's buffer, so queueing one can never block the server
)
_QUEUE_AHEAD_SECONDS = 0.02
_TASK_BYTES = 1024  # of a task without its state, generously


def available_cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    """The server's end of one worker process; ``units`` are sent and unanswered, the first one is running."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.units: deque[Unit] = deque()
        self._batch: Callable[[], Batch | None] = lambda: None
        self.known_contents: set[int] = set()
        self.known_buffers: set[int] = set()

    @property
    def batch(self) -> Batch | None:
        """The batch of the contents sent last, unless it is over: its memory is not held for it."""
        return self._batch()

    @batch.setter
    def batch(self, batch: Batch) -> None:
        self._batch = weakref.ref(batch)

    def send(self, kind: str, value: Any) -> None:
        self.connection.send_bytes(pickle.dumps((kind, value), protocol=pickle.HIGHEST_PROTOCOL))

    def send_buffer(self, buffer: SharedBuffer) -> None:
        self.send("buffer", (buffer.id, buffer.nbytes))
        send_handle(self.connection, buffer.descriptor, self.process.pid)
        self.known_buffers.add(buffer.id)


class LocalGrid(Grid):
    """Run a ``ClientApp`` for ``num_nodes`` virtual nodes in ``workers`` processes on this machine.

    Any Flower strategy can use it: ``FedAvg().start(LocalGrid(app, 10), initial_arrays)``. Every node gets a
    ``Context`` with ``partition-id`` and ``num-partitions`` whose ``state`` survives from round to round.
    Replies are returned in the order of the messages, whatever order they were finished in.

    A client that raises gives an error reply. A worker that dies is replaced and its clients run again; a
    client over which workers die twice gives an error reply. Replies that miss ``timeout`` are dropped.

    The arrays of replies lie as rows of one shared (n, d) matrix that is theirs for as long as anything
    refers to them. ``workers=0`` runs clients in this process, one after another, which is what a GPU and a
    debugger want. Use it as a context manager, or call ``close``.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        *,
        workers: int | None = None,
        run_config: Mapping[str, Any] | None = None,
        node_config: Callable[[int], Mapping[str, Any]] | None = None,
    ) -> None:
        if num_nodes < 1:
            raise ValueError(f"num_nodes must be at least 1, got {num_nodes}")
        if workers is not None and workers < 0:
            raise ValueError(f"workers must be at least 0, got {workers}")
        if workers != 0 and (obstacle := why_no_workers()):
            log.warning("%s: clients run one after another in this process", obstacle)
            workers = 0
        set_task_identity(_RUN_ID)
        self._run = Run.create_empty(_RUN_ID)
        self._app = client_app
        self._run_config = dict(run_config or {})
        self._num_workers = min(available_cores() if workers is None else workers, num_nodes)
        self._node_configs: dict[int, dict[str, Any]] = {
            FIRST_NODE_ID + i: {
                "partition-id": i,
                "num-partitions": num_nodes,
                **(node_config(i) if node_config else {}),
            }
            for i in range(num_nodes)
        }
        self._states: dict[int, bytes] = dict.fromkeys(self._node_configs, b"")
        self._pool = BufferPool()
        self._workers: list[_Worker] = []
        # One queue per worker; a worker whose own is empty takes from the end of another's.
        self._queues: list[deque[Unit]] = [deque() for _ in range(max(self._num_workers, 1))]
        self._done: dict[str, Message] = {}
        self._ids = itertools.count(1)
        self._planner = Planner(client_app, len(self._queues))
        self._closed = False

    # The Grid interface ------------------------------------------------------------------------------------

    def set_run(self, run: Run) -> None:
        """Use another description of the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """The run this grid belongs to."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message to a node, as Flower's grids do."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return all node ids, in the order of their partitions."""
        return list(self._node_configs)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Hand messages to the workers and return their ids; work goes on in ``pull_messages``."""
        if self._closed:
            raise RuntimeError("this grid is closed")
        pushed = list(messages)
        for message in pushed:
            if message.metadata.dst_node_id not in self._node_configs:
                raise ValueError(f"there is no node {message.metadata.dst_node_id}")
        units = self._planner.units(Batch(self._pool, self._ids.__next__, self._node_configs).jobs(pushed))
        # Longest first, going by the last time they ran; the results do not depend on it.
        for unit in sorted(units, key=lambda unit: -self._planner.expected_seconds(unit)):
            self._queues[unit.home].append(unit)
        if self._num_workers > 0:
            self.start_workers()
            self._dispatch()
        return [message.metadata.message_id for message in pushed]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are there by now, each once."""
        self._work(0.0)
        return [self._done.pop(i) for i in message_ids if i in self._done]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return the replies, in the order of the messages.

        After ``timeout`` seconds the missing replies are given up: their clients are stopped, their state
        stays as it was, and the replies that did arrive are returned.
        """
        return self.collect(self.push_messages(messages), timeout)

    def collect(self, message_ids: Sequence[str], timeout: float | None = None) -> list[Message]:
        """Wait for the replies to pushed messages and return them, in the order of the ids.

        What is missing after ``timeout`` seconds is given up, as in :meth:`send_and_receive`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        missing = set(message_ids)
        try:
            while missing := {i for i in missing if i not in self._done}:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    log.warning(
                        "%d of %d replies did not arrive within %g s", len(missing), len(message_ids), timeout
                    )
                    break
                self._work(left)
        finally:
            self._abandon(missing)
        return [self._done.pop(i) for i in message_ids if i in self._done]

    # What the rest of fedplat uses -------------------------------------------------------------------------

    def start_workers(self) -> None:
        """Start the worker processes now, rather than with the first message."""
        while len(self._workers) < self._num_workers:
            self._workers.append(self._new_worker())

    def node_states(self) -> dict[int, bytes]:
        """Return each node's ``Context.state`` in Flower's wire format; empty states are left out."""
        return {node: state for node, state in self._states.items() if state}

    def load_node_states(self, states: Mapping[int, bytes]) -> None:
        """Set the nodes' states to what :meth:`node_states` returned."""
        self._states = {node: states.get(node, b"") for node in self._node_configs}

    def worker_pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        return [worker.process.pid or 0 for worker in self._workers]

    def close(self) -> None:
        """Stop the workers. Arrays handed out stay valid."""
        self._closed = True
        for worker in self._workers:
            self._stop(worker)
        self._workers.clear()
        for queue in self._queues:
            queue.clear()
        self._pool.close()

    def __enter__(self) -> LocalGrid:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Workers -----------------------------------------------------------------------------------------------

    def _work(self, timeout: float | None) -> None:
        """Collect what is finished, wait up to ``timeout`` seconds for it, and hand out what is waiting."""
        if self._num_workers == 0:
            self._run_inline()
            return
        self._dispatch()
        busy = {worker.connection: worker for worker in self._workers if worker.units}
        for connection in wait(list(busy), timeout) if busy else ():
            worker = busy[connection]  # type: ignore[index]
            try:
                outcomes: list[Outcome] = pickle.loads(worker.connection.recv_bytes())
            except (EOFError, OSError):
                self._replace(worker)
                continue
            self._finish(worker.units.popleft(), outcomes)
        self._dispatch()

    def _dispatch(self) -> None:
        for ahead in range(2):
            for worker, own in zip(list(self._workers), self._queues, strict=True):
                if len(worker.units) != ahead or (ahead and not own):
                    continue
                queue = own or max(self._queues, key=len)
                if not queue or (ahead and not self._may_queue_ahead(worker, queue[0])):
                    continue
                unit = queue.popleft() if queue is own else queue.pop()
                try:
                    self._send(worker, unit)
                except OSError:
                    queue.appendleft(unit)
                    self._replace(worker)

    def _may_queue_ahead(self, worker: _Worker, unit: Unit) -> bool:
        """Whether a busy worker may get a unit in advance: only a short one, which will not wait for long.

        It must also be a small message, or server and worker could wait for each other to read.
        """
        states = sum(len(self._states[job.task.node_id]) for job in unit.jobs)
        return (
            worker.batch is unit.batch
            and unit.jobs[0].task.content in worker.known_contents
            and states + len(unit.jobs) * _TASK_BYTES < _QUEUE_AHEAD_BYTES
            and self._planner.expected_seconds(unit, unknown=math.inf) < _QUEUE_AHEAD_SECONDS
        )

    def _send(self, worker: _Worker, unit: Unit) -> None:
        batch = unit.batch
        content = batch.contents[unit.jobs[0].task.content]
        if worker.batch is not batch:
            worker.send("batch", list(worker.known_buffers - self._pool.open_ids()))
            worker.known_buffers &= self._pool.open_ids()
            worker.known_contents.clear()
            worker.batch = batch
        if content.id not in worker.known_contents:
            for buffer in batch.buffers(content):
                if buffer.id not in worker.known_buffers:
                    worker.send_buffer(buffer)
            worker.send("content", content)
            worker.known_contents.add(content.id)
        worker.send("tasks", self._tasks(unit))
        worker.units.append(unit)

    def _tasks(self, unit: Unit) -> list[Task]:
        return [replace(job.task, state=self._states[job.task.node_id]) for job in unit.jobs]

    def _finish(self, unit: Unit, outcomes: list[Outcome]) -> None:
        for job, outcome in zip(unit.jobs, outcomes, strict=True):
            if outcome.error is None:
                self._states[job.task.node_id] = outcome.state
            self._planner.took(job, outcome.seconds)
            self._done[job.message.metadata.message_id] = job.reply(outcome)

    def _run_inline(self) -> None:
        if not self._queues[0]:
            return
        unit = self._queues[0].popleft()
        contents = unit.batch.contents
        mappings = {b.id: b.mapping for c in contents.values() for b in unit.batch.buffers(c)}
        runner = ClientRunner(self._app, _RUN_ID, self._run_config, mappings.__getitem__)
        runner.add_content(contents[unit.jobs[0].task.content])
        with one_thread():
            self._finish(unit, runner.run_all(self._tasks(unit)))

    def _new_worker(self) -> _Worker:
        ours, theirs = multiprocessing.Pipe(duplex=True)
        inherited = [worker.connection for worker in self._workers] + [ours]
        arguments = (theirs, inherited, self._app, _RUN_ID, self._run_config)
        process = multiprocessing.get_context("fork").Process(target=worker_main, args=arguments, daemon=True)
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # The child takes no lock that another thread could hold: it runs clients and exits at once.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _replace(self, worker: _Worker) -> None:
        """Put a new worker in the place of a dead one and run its clients again."""
        self._stop(worker)
        code = worker.process.exitcode
        home = self._workers.index(worker)
        units = list(worker.units)
        if units:
            # In a unit of several anyone may be to blame: alone, each shows whether it is.
            suspects = units.pop(0).jobs
            if len(suspects) == 1:
                suspects[0].crashes += 1
                if suspects[0].crashes >= _MAX_CRASHES:
                    job = suspects.pop()
                    reason = (
                        f"the worker process died {job.crashes} times running this client (exit code {code})"
                    )
                    self._done[job.message.metadata.message_id] = job.error_reply(
                        ErrorCode.CLIENT_APP_CRASHED, reason
                    )
            units = [Unit([job], home) for job in suspects] + units
        log.warning(
            "a worker process died (exit code %s); %d clients run again",
            code,
            sum(len(u.jobs) for u in units),
        )
        self._queues[home].extendleft(reversed(units))
        self._workers[home] = self._new_worker()

    def _stop(self, worker: _Worker) -> None:
        worker.connection.close()
        worker.process.join(0.05 if not worker.units else 0)
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()

    def _abandon(self, message_ids: set[str]) -> None:
        """Give up messages: take them from the queue and stop the workers that are running them."""
        if not message_ids:
            return
        self._queues = [deque(without(queue, message_ids)) for queue in self._queues]
        for home, worker in enumerate(self._workers):
            if any(unit.message_ids & message_ids for unit in worker.units):
                self._queues[home].extendleft(reversed(without(worker.units, message_ids)))
                self._stop(worker)
                self._workers[home] = self._new_worker()
