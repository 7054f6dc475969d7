"""One measurement, one forked process: a fresh heap, its own threads, a bounded wait and its peak memory.

The calling process keeps torch to one thread: a forked child can then start as many as it wants, which after
a fork from a process with running OpenMP threads would hang.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fedplat.spill import give_back_freed_memory

_SAMPLE_SECONDS = 0.2


class TurnError(RuntimeError):
    """A measurement failed or did not end in time; the message is what to print in its place."""


@dataclass(frozen=True)
class Child:
    """What a forked function returned, and the largest memory of it and all its children, in bytes.

    ``own_peak`` and ``tree_peak`` are proportional set sizes (shared pages are divided among those who share
    them), sampled several times a second; 0 unless asked for, or where the system does not tell.
    """

    value: Any
    own_peak: int = 0
    tree_peak: int = 0


def in_child(function: Callable[[], Any], timeout: float, watch_memory: bool = False) -> Child:
    """Run ``function`` in a forked process and return what it returned.

    Raises TurnError if it raises, dies, or is not done after ``timeout`` seconds; then everything it started
    is killed.
    """
    ours, theirs = multiprocessing.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(function, theirs))
    with warnings.catch_warnings():
        # The child takes no lock that a thread of the parent could hold: it measures and exits at once.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    assert process.pid is not None
    peaks, done = _Peaks(process.pid), threading.Event()
    watcher = threading.Thread(target=peaks.watch, args=(done,), daemon=True) if watch_memory else None
    if watcher:
        watcher.start()
    try:
        if not ours.poll(timeout):
            raise TurnError(f"not done after {timeout:g} s")
        try:
            kind, value = pickle.loads(ours.recv_bytes())
        except EOFError:
            process.join(5)
            raise TurnError(f"its process ended with exit code {process.exitcode}") from None
        if kind == "error":
            raise TurnError(value)
        process.join(15)  # it stops what it started before it ends
        return Child(value, peaks.own, peaks.tree)
    finally:
        done.set()
        if watcher:
            watcher.join()
        _kill(process.pid if process.is_alive() else 0)
        process.join(5)
        ours.close()


def _serve(function: Callable[[], Any], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which kills the whole family
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        answer: tuple[str, Any] = ("value", function())
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = "".join(traceback.format_exception_only(error)).strip()
        answer = ("error", f"{reason} ({Path(where.filename).name}, line {where.lineno})")
    with contextlib.suppress(OSError):  # nobody may be left to hear it
        connection.send_bytes(pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL))
    connection.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a forked child must not run the parent's exit handlers


def _kill(pid: int) -> None:
    """Kill a process and its descendants, which are found before their parents are gone."""
    for found in reversed(family(pid)) if pid else ():
        try:
            os.kill(found, signal.SIGKILL)
        except ProcessLookupError:
            continue


def family(pid: int) -> list[int]:
    """Return a process and its descendants, parents first; only itself where there is no ``/proc``."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:  # it ended meanwhile
                continue
    return found


class _Peaks:
    """The largest memory seen of a process and of its whole family."""

    def __init__(self, pid: int) -> None:
        self.pid, self.own, self.tree = pid, 0, 0

    def watch(self, done: threading.Event) -> None:
        while not done.is_set():
            start = time.monotonic()
            sizes = [proportional_bytes(pid) for pid in family(self.pid)]
            self.own, self.tree = max(self.own, sizes[0]), max(self.tree, sum(sizes))
            # Reading the page tables of a large process takes its time: never more than a tenth of it.
            done.wait(max(_SAMPLE_SECONDS, 9 * (time.monotonic() - start)))


def proportional_bytes(pid: int) -> int:
    """Return a process's share of the memory it has mapped; 0 if the system does not tell."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def growth_of(function: Callable[[], Any]) -> tuple[Any, float, int]:
    """Call ``function``; return its value, the seconds, and how far memory grew at its peak in bytes.

    The growth is 0 where the system cannot reset or tell its high-water mark.
    """
    give_back_freed_memory()  # what lies free in the heap would be used again without being counted
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    before = _status("VmRSS")
    start = time.perf_counter()
    value = function()
    seconds = time.perf_counter() - start
    return value, seconds, max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(field + ":"))
