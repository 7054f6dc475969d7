"""Numbers as they come out of records, where one may be missing or not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the numbers that are known and finite, None if there are none."""
    known = [value for value in map(finite, values) if value is not None]
    return sum(known) / len(known) if known else None


def finite(value: Any) -> float | None:
    """Return a number that is one, None for anything else.

    >>> finite(0.5), finite(float("nan")), finite(None)
    (0.5, None, None)
    """
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def running(values: Iterable[Any]) -> list[float | None]:
    """Return the sums so far, None from the first value on that is not a finite number.

    >>> running([1, 2, None, 3])
    [1.0, 3.0, None, None]
    """
    sums: list[float | None] = []
    total: float | None = 0.0
    for value in values:
        number = finite(value)
        total = None if total is None or number is None else total + number
        sums.append(total)
    return sums
