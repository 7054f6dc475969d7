"""A device log in five numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .logs import DeviceLog


@dataclass(frozen=True)
class Summary:
    """MB, Mbit/s, and the share of time available; a sample counts for as long as it holds."""

    memory_least: float
    memory_median: float
    down_median: float
    up_median: float
    available: float

    @classmethod
    def of(cls, log: DeviceLog) -> Summary:
        """Return a log's numbers over its span; a log of one sample is that sample."""
        lasts = np.diff(log.time_s) if len(log) > 1 else np.ones(1)
        count = len(lasts)  # the last sample only marks the end
        free = np.ones(count) if log.available is None else log.available[:count].astype(np.float64)
        memory, down, up = (
            weighted_median(values[:count], lasts) for values in (log.mem_free_mb, log.down_mbps, log.up_mbps)
        )
        share = float(np.average(free, weights=lasts))
        return cls(float(log.mem_free_mb.min()), memory, down, up, share)


def weighted_median(values: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return the smallest value at or below which half of the weight lies.

    >>> weighted_median(np.array([1.0, 9.0, 5.0]), np.array([1.0, 3.0, 1.0]))
    9.0
    """
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
