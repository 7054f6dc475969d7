"""Runs the cells of a table in processes beside one another, each from its checkpoint if it has one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from ..errors import UserError
from .cells import Plan, cell_path
from .on_disk import DONE, FAILED, MISSING, STARTED, state_of, write_failure
from .one_cell import Job, prepare_process, run_job

_PATIENCE_SECONDS = 15.0
_TICK_SECONDS = 0.5


class Watcher(Protocol):
    """Is told how a table goes on; runs are named by their identity."""

    def start(self, identity: str) -> None:
        """A run starts, or goes on."""
        ...

    def round(self, identity: str, number: int, accuracy: float | None) -> None:
        """A run has come this far."""
        ...

    def end(self, identity: str, state: str, reason: str) -> None:
        """A run is over."""
        ...

    def note(self, text: str) -> None:
        """Something is worth knowing."""
        ...

    def tick(self) -> None:
        """Time passes."""
        ...


class FolderLock:
    """Keeps a second ``fedplat table`` out of a folder while the first one works in it."""

    def __init__(self, out: Path) -> None:
        try:
            out.mkdir(parents=True, exist_ok=True)
            self._file = (out / ".lock").open("a")
        except OSError as error:
            raise UserError(f"{out}: cannot write the table's folder: {error}") from error
        try:
            import fcntl
        except ImportError:  # not on Windows
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UserError(
                f"{out}: another 'fedplat table' is at work there; wait for it, or give another folder "
                f"with --out"
            ) from None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def missing_jobs(plan: Plan, out: Path, *, device: str, retry: bool = False) -> list[Job]:
    """Return the runs that are not there yet, first seeds first; with ``retry`` also those that failed."""
    wanted = (MISSING, STARTED)
    jobs = []
    for identity, cell in sorted(plan.runs.items(), key=lambda item: item[1].seed):
        path = cell_path(out, identity)
        state = state_of(path, cell)
        if state in wanted or (retry and state != DONE):
            label = f"{plan.name}, {', '.join(cell.position)}, seed {cell.seed}"
            jobs.append(Job(identity, label, str(path), cell.config.to_dict(), device=device))
    return jobs


def share_cores(jobs: Sequence[Job], wanted: int | None, cores: int) -> tuple[int, int]:
    """Return how many cells to run at once and the cores of each; together never more than there are.

    >>> share_cores([], None, 8)
    (1, 8)
    """
    at_once = max(1, min(wanted or cores, cores, len(jobs)))
    return at_once, max(1, cores // at_once)


def run_here(jobs: Sequence[Job], at_once: int, cores: int, watcher: Watcher) -> None:
    """Run jobs in ``at_once`` processes on this machine, each with so many ``cores``.

    A cell whose process dies has failed, and another process takes its place. Nothing is tried again. If
    this process ends, however that may be, so do they, with all full rounds on disk.
    """
    pool = _Pool([_with_cores(job, cores) for job in jobs], at_once, watcher)
    try:
        pool.work()
    finally:
        pool.close()


def _with_cores(job: Job, cores: int) -> Job:
    return Job(job.identity, job.label, job.path, job.config, cores, job.device)


class _Process:
    def __init__(self) -> None:
        # A fresh interpreter: the one of the command line may have threads, which a fork would not survive.
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        self.process: BaseProcess = spawn.Process(target=_serve, args=(theirs, os.getpid()))
        self.process.start()
        theirs.close()
        self.job: Job | None = None


class _Pool:
    def __init__(self, jobs: Sequence[Job], at_once: int, watcher: Watcher) -> None:
        self._waiting = deque(jobs)
        self._watcher = watcher
        self._processes = [_Process() for _ in range(min(at_once, len(jobs)))]

    def work(self) -> None:
        """Hand out jobs until all are done."""
        for process in self._processes:
            self._next(process)
        while any(process.job for process in self._processes):
            ready = wait([p.connection for p in self._processes if p.job], _TICK_SECONDS)
            for process in list(self._processes):
                if process.connection in ready:
                    self._listen(process)
            self._watcher.tick()

    def close(self) -> None:
        """End the processes; those at work save nothing more than the rounds that are on disk."""
        for process in self._processes:
            with suppress(OSError):
                process.connection.send(None)
            if process.job:
                process.process.terminate()
        for process in self._processes:
            process.process.join(_PATIENCE_SECONDS)
            if process.process.is_alive():
                process.process.kill()
                process.process.join()
            process.connection.close()

    def _next(self, process: _Process) -> None:
        process.job = self._waiting.popleft() if self._waiting else None
        if process.job is None:
            return
        try:
            process.connection.send(process.job)
        except OSError:  # it died before it was asked; the answer to that is in _listen
            return
        self._watcher.start(process.job.identity)

    def _listen(self, process: _Process) -> None:
        job = process.job
        assert job is not None
        try:
            kind, *told = process.connection.recv()
        except (EOFError, OSError):
            process.process.join()
            reason = _why_dead(process.process.exitcode)
            write_failure(Path(job.path), FAILED, reason)
            self._watcher.end(job.identity, FAILED, reason)
            process.connection.close()
            self._processes.remove(process)
            if self._waiting:
                self._processes.append(fresh := _Process())
                self._next(fresh)
            return
        if kind == "round":
            self._watcher.round(job.identity, *told)
        else:
            self._watcher.end(job.identity, *told)
            self._next(process)


def _why_dead(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        memory = ", as when memory runs out" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{memory}"
    return f"its process ended with status {code}"


def _serve(connection: Connection, parent: int) -> None:
    """Run jobs that come through a connection, one after another, until None comes."""
    from ..emulation.enforce_heap import die_with_parent

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, stop)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    prepare_process()

    def tell(*message: Any) -> None:
        try:
            connection.send(message)
        except OSError:  # nobody is there any more
            os._exit(1)

    try:
        while (job := connection.recv()) is not None:
            state, reason = run_job(job, lambda number, accuracy: tell("round", number, accuracy))
            tell("end", state, reason)
    except (EOFError, KeyboardInterrupt):
        pass
