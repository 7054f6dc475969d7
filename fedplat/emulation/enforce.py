"""Running something in a process of its own that cannot have more memory than it is allowed.

The process is a fork of this one: it has everything that is loaded here, and what it allocates beyond that is
counted by the kernel, up to a limit. Memory that this process has freed is no help to it: the free memory is
given back and its holes are closed before counting starts. Linux only.
"""

from __future__ import annotations

import builtins
import functools
import json
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from ..clients.training import train_one
from ..errors import UserError
from ..models.dense import mlp
from ..models.flat import FlatModel
from ..rng import generator
from ..runtime.worker import one_thread_each, why_no_workers
from ..training_config import LocalTraining
from .enforce_heap import at_most, data_bytes, die_with_parent, settle

T = TypeVar("T")

OVERHEAD_BYTES = 16 << 20
"""What a client gets on top of its cap, for what it takes beside the tensors of its training: 16 MiB.

Python objects, about 1 MB (``process_overhead_bytes`` measures it), and what oneDNN takes to have
convolutions at all, 7 to 15 MB whatever the batch. Scratch memory that grows with the model, of an LSTM or
a deep residual net, is not in it, nor are a client's own samples.
"""

_LENGTH = struct.Struct("<cQ")
_DONE, _FAILED, _OUT_OF_MEMORY = b"d", b"f", b"m"
# oneDNN says no more than this when its scratch memory is refused.
_SAYS_NO_MEMORY = (
    *("can't allocate memory", "cannot allocate memory", "bad_alloc", "not enough memory"),
    *("could not create a primitive", "could not execute a primitive", "could not create a memory"),
    *("could not reorder", "out of memory"),
)
_TOLD = 600


class OutOfMemory(Exception):
    """The work needed more memory than it was allowed; the text says what was refused."""


def why_not_enforced() -> str:
    """Return why no process with a limit could be forked from this one; empty if it could."""
    if not sys.platform.startswith("linux"):
        return "limits of a process's memory need Linux"
    if torch.cuda.is_initialized():
        return "this process uses a GPU, which a fork of it cannot"
    return why_no_workers()


def run_capped(
    work: Callable[[], T],
    pack: Callable[[T], bytes],
    cap: int,
    *,
    overhead: int = OVERHEAD_BYTES,
    prepare: Callable[[], object] | None = None,
) -> bytes:
    """Return ``pack(work())``, worked out in a forked process that may allocate ``cap + overhead`` bytes.

    ``prepare`` runs there first, and what it frees is counted as not there; ``pack`` runs after the limit is
    lifted. What the work changes in this process's objects stays in the fork: only the bytes come back.
    What it prints to standard error comes when it has ended.

    Raises OutOfMemory; UserError where no such process can be made; RuntimeError if it is killed or ends
    otherwise than by returning; and whatever ``work`` or ``pack`` raise. An exception whose
    arguments are no plain values, or whose class cannot be found here, comes as a RuntimeError of that name.

    >>> run_capped(lambda: sum(range(10)), lambda total: str(total).encode(), 1 << 20)
    b'45'
    """
    if cap < 0 or overhead < 0:
        raise UserError(f"a memory cap of {cap} bytes with {overhead} on top: both have to be 0 or more")
    if reason := why_not_enforced():
        raise UserError(f"a memory cap cannot be enforced here: {reason}")
    warm_up()
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = os.pipe()
    errors = os.memfd_create("fedplat-capped")
    pid = os.fork()
    if pid == 0:
        _child(theirs, errors, work, pack, cap + overhead, prepare)
    os.close(theirs)
    status: int | None = None
    try:
        with open(ours, "rb") as pipe:
            head = pipe.read(_LENGTH.size)
            kind, size = _LENGTH.unpack(head) if len(head) == _LENGTH.size else (b"", 0)
            body = pipe.read(size)
        if len(body) < size:
            kind = b""
        status = os.waitpid(pid, 0)[1]
    finally:
        if status is None:  # interrupted: the child must not outlive the call
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        printed = _printed(errors)
    if kind == _DONE:
        return body
    if kind == _OUT_OF_MEMORY:
        raise OutOfMemory(body.decode())
    if kind == _FAILED:
        raise _exception(json.loads(body))
    raise _death(status, printed)


def least_cap(work: Callable[[], object], low: int, high: int, step: int = 1 << 18) -> int:
    """Return the least cap, to within ``step`` bytes, under which ``work`` succeeds with no overhead given.

    Found by bisection between ``low``, which may suffice as well, and ``high``. Raises OutOfMemory if that
    is not enough.
    """
    _try(work, high)
    while high - low > step:
        middle = (low + high) // 2
        try:
            _try(work, middle)
            high = middle
        except OutOfMemory:
            low = middle
    return high


@functools.cache
def process_overhead_bytes(step: int = 1 << 18) -> int:
    """Measure what training takes in a forked process beyond its tensors, with a net of a few kilobytes."""
    warm_up()
    return least_cap(_train_a_little, 0, 256 << 20, step)


@functools.cache
def warm_up() -> None:
    """Train a small net once, so that what PyTorch loads when it first trains is loaded before forking."""
    _train_a_little()


def _try(work: Callable[[], object], cap: int) -> None:
    run_capped(work, lambda result: b"", cap, overhead=0)


def _train_a_little() -> None:
    x, y = torch.zeros(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)
    with torch.random.fork_rng(devices=[]):
        layers = torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.Linear(72, 4)
        nets = [mlp((1, 8, 8), 4), torch.nn.Sequential(*layers)]
    for net in nets:
        flat = FlatModel(net)
        for name in ("sgd", "adam"):
            training = LocalTraining(optimizer=name, steps=2, batch_size=4)
            train_one(flat, training, x, y, generator(0, "warm-up"))


# The child --------------------------------------------------------------------------------------------------


def _child(
    pipe: int,
    errors: int,
    work: Callable[[], T],
    pack: Callable[[T], bytes],
    allowed: int,
    prepare: Callable[[], object] | None,
) -> NoReturn:
    """Do the work and end, whatever happens: none of the parent's code may go on in a fork."""
    status = 1
    try:
        die_with_parent(signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        os.dup2(errors, 2)
        kind, body = _outcome(work, pack, allowed, prepare)
        with open(pipe, "wb") as file:
            file.write(_LENGTH.pack(kind, len(body)))
            file.write(body)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _outcome(
    work: Callable[[], T],
    pack: Callable[[T], bytes],
    allowed: int,
    prepare: Callable[[], object] | None,
) -> tuple[bytes, bytes]:
    try:
        one_thread_each()
        if prepare is not None:
            prepare()
        settle()
        with at_most(data_bytes() + allowed):
            result = work()
        return _DONE, pack(result)
    except BaseException as error:
        if _is_memory(error):
            return _OUT_OF_MEMORY, f"{type(error).__name__}: {error}".strip(": ")[:_TOLD].encode()
        return _FAILED, json.dumps(_described(error)).encode()


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return False  # a GPU's memory, which has no cap here
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError | ImportError) and any(w in text for w in _SAYS_NO_MEMORY)


def _described(error: BaseException) -> dict[str, Any]:
    kind = type(error)
    told: dict[str, Any] = {"module": kind.__module__, "name": kind.__qualname__, "text": str(error)}
    if all(value is None or isinstance(value, str | int | float) for value in error.args):
        told["args"] = list(error.args)
    return told | {"trace": "".join(traceback.format_exception(error))}


# The parent -------------------------------------------------------------------------------------------------


def _exception(told: dict[str, Any]) -> BaseException:
    """Return the exception that was raised in the child, or one of its name and text."""
    kind = getattr(sys.modules.get(told["module"], builtins), told["name"], None)
    error: BaseException | None = None
    if "args" in told and isinstance(kind, type) and issubclass(kind, BaseException):
        try:
            error = kind(*told["args"])
        except Exception:  # a class that takes other arguments than it keeps
            error = None
    if error is None or str(error) != told["text"]:
        error = type(told["name"].rpartition(".")[2], (RuntimeError,), {})(told["text"])
    error.add_note(f"In the process with limited memory:\n{told['trace'].strip()}")
    return error


def _death(status: int, printed: str) -> Exception:
    code = os.waitstatus_to_exitcode(status)
    lines = printed.strip().splitlines()
    last = lines[-1][:_TOLD] if lines else "nothing printed"
    if code == -signal.SIGKILL:
        return OutOfMemory("the system killed the process, as it does when memory runs out")
    refused = [line for line in lines if _tells_memory(line)]
    if code < 0 and refused:
        return OutOfMemory(f"the process ended itself: {refused[-1].strip()[:_TOLD]}")
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return RuntimeError(f"the process that runs the client {how}: {last}")


def _tells_memory(line: str) -> bool:
    text = line.lower()
    return "memoryerror" in text or any(words in text for words in _SAYS_NO_MEMORY)


def _printed(errors: int) -> str:
    """Pass on what the child printed to standard error, and return it."""
    with open(errors, "rb") as file:
        file.seek(0)
        text = file.read().decode(errors="replace")
    if text:
        sys.stderr.write(text)
        sys.stderr.flush()
    return text


__all__ = [
    "OVERHEAD_BYTES",
    "OutOfMemory",
    "least_cap",
    "process_overhead_bytes",
    "run_capped",
    "warm_up",
    "why_not_enforced",
]
