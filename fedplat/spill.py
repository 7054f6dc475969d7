"""Sparing memory: rows in a temporary file that is gone with the process, and freed memory given back."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import UserError


def spill_folder() -> Path:
    """Return where large temporary files go: TMPDIR if it is set, else /var/tmp.

    Many systems keep /tmp in memory, which is what such a file is there to spare.
    """
    usual, roomy = tempfile.gettempdir(), "/var/tmp"
    chosen = roomy if "TMPDIR" not in os.environ and os.access(roomy, os.W_OK | os.X_OK) else usual
    return Path(chosen)


class RowFile:
    """The rows (n, d) of a float32 matrix on disk: appended block by block, read back in the same order.

    The file has no name and goes with ``close`` or the process. What was written or read is taken out of the
    system's cache where it can be told so. Raises UserError if ``folder`` has no room for ``expected`` rows,
    or runs out of it.
    """

    def __init__(self, columns: int, expected: int = 0, folder: Path | None = None) -> None:
        self.folder = spill_folder() if folder is None else folder
        self.columns = columns
        self.rows = 0
        self._expected = expected
        try:
            if row_bytes(columns, expected) > (free := shutil.disk_usage(self.folder).free):
                raise self._no_room(f"there are {_gigabytes(free)} free")
            self._file = tempfile.TemporaryFile(prefix="fedplat-", dir=self.folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._no_room(str(error)) from error

    def append(self, rows: torch.Tensor) -> None:
        """Write rows (k, d) behind those that are there."""
        left = _bytes_of(np.ascontiguousarray(rows.numpy(), np.float32))
        self._file.seek(0, os.SEEK_END)
        try:
            while left:
                left = left[self._file.write(left) :]  # one call writes 2 GiB at most
        except OSError as error:
            raise self._no_room(str(error)) from error
        self.rows += len(rows)
        self._forget()

    def blocks(self, at_a_time: int) -> Iterator[torch.Tensor]:
        """Yield all rows in order, ``at_a_time`` of them at once; each block is valid until the next."""
        memory = np.empty((min(at_a_time, self.rows), self.columns), np.float32)
        self._file.seek(0)
        for start in range(0, self.rows, at_a_time):
            block = memory[: min(at_a_time, self.rows - start)]
            left = _bytes_of(block)
            while left:
                count = self._file.readinto(left)
                if not count:
                    raise OSError(f"the temporary file in {self.folder} has lost its end")
                left = left[count:]
            self._forget()
            yield torch.from_numpy(block)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def _forget(self) -> None:
        # Pages still to be written stay until a later call.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, self._file.tell(), os.POSIX_FADV_DONTNEED)

    def _no_room(self, found: str) -> UserError:
        count = max(self._expected, self.rows + 1)
        return UserError(
            f"a temporary file in {self.folder} needs {_gigabytes(row_bytes(self.columns, count))} for the "
            f"updates of {count:,} clients with {self.columns:,} numbers, but {found}: set TMPDIR to a "
            "folder on a disk with more room, or let fewer clients take part in a round"
        )


def _bytes_of(rows: NDArray[np.float32]) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


def give_back_freed_memory() -> None:
    """Return free pages within the heap to the system, where the C library can do that.

    Between large tensors that come and go, small ones that stay leave holes which glibc does not use again:
    some hundred kilobytes for every client of a large model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def row_bytes(columns: int, rows: int) -> int:
    """Return the bytes of a float32 matrix."""
    return 4 * columns * rows


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"
