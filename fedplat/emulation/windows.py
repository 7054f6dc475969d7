"""What a device log holds over windows of time, rather than at instants."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .logs import Beyond, DeviceLog

NO_SPEED = 0.5e-6
"""Below this many Mbit/s a link rounds to 0 bit/s: nothing gets through."""


def over_windows(
    log: DeviceLog, starts: ArrayLike, window_s: float = 0.0, beyond: Beyond = "wrap"
) -> NDArray[np.float64]:
    """Return free MB, Mbit/s down, Mbit/s up and availability (0 or 1) over each window, (4, n).

    The windows are [start, start + ``window_s``), in seconds on the log's clock. Memory is the least in the
    window; speeds are harmonic means over time, 0 where the link is down for any moment; a device is
    available if it is throughout. A window of 0 s is the instant.

    The harmonic mean of 4 Mbit/s for one half and 1 Mbit/s for the other:

    >>> log = DeviceLog("a", [0, 10, 20], [7, 5, 9], [4, 1, 1], [1, 0, 1], available=[1, 1, 0])
    >>> over_windows(log, [0, 5, 10], 10.0).T.tolist()
    [[7.0, 4.0, 1.0, 1.0], [5.0, 1.6, 0.0, 1.0], [5.0, 1.0, 0.0, 1.0]]

    Raises UserError for times that are not finite and an unknown ``beyond``.
    """
    times = np.asarray(starts, np.float64)
    instant = log.index_at(times, beyond)
    free = np.ones(len(log)) if log.available is None else log.available.astype(np.float64)
    table = np.stack([log.mem_free_mb, log.down_mbps, log.up_mbps, free])
    if window_s == 0 or len(log) == 1:
        return table[:, instant]
    # Before the log begins its first sample holds, which is also the first of what comes then.
    before = np.clip(log.time_s[0] - times, 0.0, window_s)
    times, lasts = np.maximum(times, log.time_s[0]), window_s - before
    whole = np.zeros(times.shape)
    if beyond == "wrap":
        # Two periods in a row hold any window shorter than one, wherever it begins.
        whole, lasts = np.divmod(lasts, log.span_s)
        times = log.time_s[0] + np.mod(times - log.time_s[0], log.span_s)
        edges = np.concatenate([log.time_s, log.time_s[1:] + log.span_s])
        table = np.tile(table[:, :-1], 2)
    else:
        edges = np.append(log.time_s, max(log.time_s[-1], float((times + lasts).max())) + 1.0)
    ends = times + lasts
    first = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, table.shape[1] - 1)
    last = np.clip(np.searchsorted(edges, ends, side="left") - 1, first, table.shape[1] - 1)
    pairs = np.stack([first, last + 1], axis=1).ravel()

    padded = np.pad(table, ((0, 0), (0, 1)), constant_values=np.inf)
    least = np.minimum.reduceat(padded, pairs, axis=1)[:, ::2]
    least = np.where(whole > 0, table.min(axis=1, keepdims=True), least)

    speeds = table[1:3]
    slowness = np.divide(1.0, speeds, out=np.zeros(speeds.shape), where=speeds >= NO_SPEED)
    costs = slowness * np.diff(edges)  # seconds per Mbit, times the seconds that it holds
    some = np.add.reduceat(np.pad(costs, ((0, 0), (0, 1))), pairs, axis=1)[:, ::2]
    some -= slowness[:, first] * (times - edges[first]) + slowness[:, last] * (edges[last + 1] - ends)
    period = costs[:, : len(log) - 1].sum(axis=1, keepdims=True)
    total = slowness[:, :1] * before + whole * period + some
    flows = (least[1:3] >= NO_SPEED) & (total > 0)
    means = np.divide(window_s, total, out=np.zeros(total.shape), where=flows)
    return np.stack([least[0], *means, least[3]])
