"""What a user adds to a public trace, and how the parts of one are read and checked."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError


@dataclass(frozen=True)
class Given:
    """What the user adds to a format: MB, Mbit/s, the window of Mahimahi in s, at most how many devices."""

    mem_free_mb: float | None = None
    down_mbps: float | None = None
    up_mbps: float | None = None
    window_s: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("mem_free_mb", "down_mbps", "up_mbps"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{_option(name)} is {value}, expected a finite number, 0 or more")
        if not (math.isfinite(self.window_s) and self.window_s > 0):
            raise UserError(f"--window-s is {self.window_s}, expected a number of seconds above 0")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"--limit is {self.limit}, expected at least 1")

    def constant(self, name: str, count: int, lacks: str) -> NDArray[np.float64]:
        """Return the given constant ``count`` times; raises UserError if it was not given."""
        value = getattr(self, name)
        if value is None:
            raise UserError(f"{lacks} does not say {name}: give it with {_option(name)}")
        return np.full(count, value)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def entries(data: Any, path: Path, given: Given, keys: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    """Return (device, table) of at most ``limit`` devices; raises UserError unless all have ``keys``."""
    if not isinstance(data, dict) or not data:
        raise UserError(f"{path}: expected a table from device to its entries")
    found = []
    for device, entry in islice(data.items(), given.limit):
        if not isinstance(device, (str, int)) or not isinstance(entry, dict):
            raise UserError(f"{path}: device {device!r}: expected a table with {', '.join(keys)}")
        missing = [key for key in keys if key not in entry]
        if missing:
            raise UserError(f"{path}: device {device}: missing {', '.join(missing)}")
        found.append((str(device), entry))
    return found


def numbers_of(value: Any, what: str) -> NDArray[np.float64]:
    """Return a list of finite numbers, 0 or more, or one of them, as an array."""
    try:
        array = np.atleast_1d(np.asarray(value, np.float64))
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{what}: expected numbers, found {short(value)}") from None
    if array.ndim != 1 or not (np.isfinite(array) & (array >= 0)).all():
        raise UserError(f"{what}: expected finite numbers, 0 or more, found {short(value)}")
    return array


def number_of(value: Any, what: str) -> float:
    """Return one finite number, 0 or more; raises UserError."""
    array = numbers_of(value, what)
    if array.size != 1:
        raise UserError(f"{what}: expected one number, found {array.size}")
    return float(array[0])


def text_of(path: Path) -> str:
    """Return a file's text; raises UserError if there is none or it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text: {error}") from error


def json_of(path: Path) -> Any:
    """Return what a JSON file holds; raises UserError."""
    try:
        return json.loads(text_of(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from error
