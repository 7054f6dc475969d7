"""Memory that the server and its worker processes see at once.

A buffer is an anonymous file mapped by every process, so a worker writes a reply where the aggregator reads
it. It is not /dev/shm, whose size containers cap, and it vanishes with the last process that maps it.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import Layout, RowBlock

_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 << 20
_MAX_FREE_BUFFERS = 4
_MAX_SLACK = 4


def _anonymous_file(nbytes: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("fedplat", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile(prefix="fedplat-") as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, nbytes)
    return descriptor


class Mapping:
    """One process's view of a buffer: ``bytes`` is the mapped memory as a uint8 array."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.memory = mmap.mmap(descriptor, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= _HUGE_PAGE:
            with suppress(OSError):  # a kernel without huge pages only makes the first touch slower
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self.memory, np.uint8)

    def rows(self, layout: Layout, count: int) -> RowBlock:
        """Arrange the memory as ``count`` models: first the matrix (n, d), then the side blocks."""
        return arrange(self.bytes, layout, count)


def rows_nbytes(layout: Layout, count: int) -> int:
    """Bytes that ``count`` models of a layout take in a buffer."""
    return count * (4 * layout.dim + layout.side_bytes)


def arrange(memory: NDArray[np.uint8], layout: Layout, count: int) -> RowBlock:
    """View memory as the matrix (n, d) of ``count`` models followed by their side blocks (n, side bytes)."""
    split = 4 * layout.dim * count
    matrix = memory[:split].view(np.float32).reshape(count, layout.dim)
    side = memory[split : split + count * layout.side_bytes].reshape(count, layout.side_bytes)
    return RowBlock(layout, matrix, side)


class SharedBuffer:
    """An anonymous file of ``nbytes``, mapped here; others map it through its file ``descriptor``."""

    _ids = itertools.count()

    def __init__(self, nbytes: int) -> None:
        self.id = next(self._ids)
        self.nbytes = -(-max(nbytes, 1) // _PAGE) * _PAGE
        self.descriptor = _anonymous_file(self.nbytes)
        self.mapping = Mapping(self.descriptor, self.nbytes)

    def close(self) -> None:
        """Close the descriptor; the memory itself goes once nothing maps it any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class Lease:
    """The right to a buffer's memory: held by every array made from it, given back when the last one dies."""

    def __init__(self, buffer: SharedBuffer) -> None:
        self.buffer = buffer
        # NumPy makes the object behind this attribute the base of the array and of all its views.
        self.__array_interface__: dict[str, Any] = buffer.mapping.bytes.__array_interface__

    def memory(self) -> NDArray[np.uint8]:
        """Return the buffer's bytes as an array that keeps the lease alive."""
        return np.asarray(self)


class BufferPool:
    """Buffers to be used again once nothing refers to their memory any more.

    A strategy that keeps replies from round to round therefore keeps its memory, and the next round simply
    gets another buffer.
    """

    def __init__(self) -> None:
        self._free: list[SharedBuffer] = []
        self._leased: dict[int, SharedBuffer] = {}
        self._open = True

    def lease(self, nbytes: int) -> Lease:
        """Return a buffer of at least ``nbytes``, with whatever an earlier user left in it."""
        fitting = [b for b in self._free if nbytes <= b.nbytes <= max(_MAX_SLACK * nbytes, _PAGE)]
        if fitting:
            buffer = min(fitting, key=lambda b: b.nbytes)
            self._free.remove(buffer)
        else:
            buffer = SharedBuffer(nbytes)
        self._leased[buffer.id] = buffer
        lease = Lease(buffer)
        weakref.finalize(lease, self._give_back, buffer).atexit = False
        return lease

    def _give_back(self, buffer: SharedBuffer) -> None:
        self._leased.pop(buffer.id, None)
        self._free.append(buffer)
        while len(self._free) > (_MAX_FREE_BUFFERS if self._open else 0):
            self._free.pop(0).close()

    def open_ids(self) -> set[int]:
        """Return the ids of all buffers that may be used again; workers unmap the others."""
        return {buffer.id for buffer in self._free} | self._leased.keys()

    def close(self) -> None:
        """Close what is free now, and the rest as it comes back."""
        self._open = False
        for buffer in self._free:
            buffer.close()
        self._free.clear()
