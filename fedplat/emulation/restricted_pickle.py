"""Reading pickles that others made, without letting them run anything.

A pickle is a program; what makes it dangerous is that it may name any function of any module and have it
called. Here it may name none: only what has its own instruction can come out (None, numbers, text, bytes,
lists, tuples, sets, dictionaries).
"""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

from ..errors import UserError

MOST_BYTES = 512_000_000


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise UserError(f"the pickle asks for {module}.{name}; only plain containers and numbers are read")

    def persistent_load(self, pid: object) -> NoReturn:
        raise UserError("the pickle asks for an object outside itself; only plain data are read")


def read_plain_pickle(path: Path) -> Any:
    """Return the plain data in a pickle.

    Raises UserError if it names anything to import (the message says what), is larger than 512 MB, is
    damaged, or cannot be read.
    """
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= MOST_BYTES else b""
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    if size > MOST_BYTES:
        raise UserError(f"{path}: {size:,} bytes, more than the {MOST_BYTES:,} that are read")
    try:
        return _PlainUnpickler(BytesIO(data), encoding="latin-1").load()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle fails in many ways: EOFError, KeyError, OverflowError, ...
        raise UserError(f"{path}: not a pickle, or damaged: {type(error).__name__}: {error}") from error
