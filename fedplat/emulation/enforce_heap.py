"""A process's memory as Linux and glibc have it: how much it holds, no free holes, and a limit.

The limit is ``RLIMIT_DATA``: private writable memory, so heap, large blocks and copies, whether touched or
not. ``RLIMIT_AS`` would also count what merely has an address: libraries, gigabytes of them with a
CUDA build of PyTorch, files mapped for reading and the address space that CUDA reserves; that changes with
every library loaded. Linux does not enforce ``RLIMIT_RSS`` at all. Memory shared between processes counts in
neither way.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import resource
from collections.abc import Iterator
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's numbers
_LARGE_BLOCK = 128 << 10
_SMALLEST_HOLE, _LARGEST_HOLE = 1 << 15, 1 << 34
_MOST_PLUGS = 1 << 12  # per size; more holes than that are left open
_PR_SET_PDEATHSIG = 1


def data_bytes() -> int:
    """Return this process's private writable memory in bytes, what RLIMIT_DATA counts.

    >>> data_bytes() > 0
    True
    """
    found = re.search(r"^VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def settle() -> None:
    """Give back what this process has freed, and close the holes, so that new memory has to be asked for.

    Blocks freed by an earlier client would otherwise be used again without the limit noticing. For a
    process that is to end soon: large blocks are from now on mapped, and given back when freed; and what
    garbage there is stays, where collecting it later would free memory for nothing.
    """
    gc.freeze()
    libc = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("mallopt", "malloc_trim", "gnu_get_libc_version")):
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK)
    libc.mallopt(_M_TRIM_THRESHOLD, _LARGE_BLOCK)
    libc.malloc_trim(0)
    _plug_holes(libc)


def _plug_holes(libc: ctypes.CDLL) -> None:
    """Allocate, and never touch, what free blocks the heap has between used ones; about 64 kB is the least.

    Trimming returns their pages but not their addresses, which the limit has counted already.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    size, least = _LARGEST_HOLE, max(_SMALLEST_HOLE, _LARGE_BLOCK)
    while size >= least:
        for _ in range(_MOST_PLUGS):
            block = libc.malloc(size)
            if not block:
                break
            # The word before a block holds its size and, as its second bit, that it was mapped.
            if ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & 2:
                libc.free(block)
                break
        size //= 2


@contextlib.contextmanager
def at_most(limit: int) -> Iterator[None]:
    """Let this process hold no more than ``limit`` bytes of private memory while the block runs."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    hard = before[1]
    limit = max(0, limit if hard == resource.RLIM_INFINITY else min(limit, hard))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def die_with_parent(signal_number: int) -> None:
    """Let the kernel send this process a signal when the one that forked it ends."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
