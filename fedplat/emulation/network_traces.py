"""Traces of links: Mahimahi's delivery times and [seconds, Mbit/s] pairs; see ``importers``."""

from __future__ import annotations

import math
import re
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .given import Given, json_of, numbers_of, text_of
from .logs import DeviceLog

PACKET_BITS = 1500 * 8
_MOST_WINDOWS = 10_000_000


def _files(path: Path, given: Given) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file() and file.suffix != ".up")
    if not files:
        raise UserError(f"{path}: no trace in this folder")
    return files[: given.limit]


def mahimahi(path: Path, given: Given) -> list[DeviceLog]:
    """Read delivery times; next to X.down, X.up is its uplink (names of the published traces), both cut to
    the shorter one's length. Otherwise the uplink is ``--up-mbps``.
    """  # fmt: skip
    logs = []
    for file in _files(path, given):
        times, uplink = _deliveries(file), file.with_suffix(".up")
        both = file.suffix == ".down" and uplink.is_file()
        up_times = _deliveries(uplink) if both else times
        end = min(int(times[-1]), int(up_times[-1]))
        edges, down = delivery_rates(times, end, given.window_s)
        if both:
            up = delivery_rates(up_times, end, given.window_s)[1]
        else:
            up = given.constant("up_mbps", len(edges), f"mahimahi ({file.name})")
        memory = given.constant("mem_free_mb", len(edges), "mahimahi")
        logs.append(DeviceLog(file.stem, edges, memory, down, up))
    return logs


def _deliveries(path: Path) -> NDArray[np.int64]:
    times: list[int] = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        text = line.strip()
        if not text.isascii() or not text.isdigit() or len(text) > 15:
            raise UserError(f"{path}, line {number}: '{text[:40]}', expected a time in whole ms")
        if times and int(text) < times[-1]:
            raise UserError(f"{path}, line {number}: {text} ms comes after {times[-1]} ms; time goes back")
        times.append(int(text))
    if not times or times[-1] == 0:
        raise UserError(f"{path}: no delivery after 0 ms, so the trace has no length")
    return np.array(times, np.int64)


def delivery_rates(
    times_ms: NDArray[np.int64], end_ms: int, window_s: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the starts of windows (s) with the end of the trace, and the mean Mbit/s in each.

    A packet counts to the window at whose end or before it comes, so no bit is lost; the last window may be
    shorter; the last value is repeated at the end.

    >>> delivery_rates(np.array([500, 1000, 1500]), 1500, 1.0)
    (array([0. , 1. , 1.5]), array([0.024, 0.024, 0.024]))
    """
    windows = max(1, math.ceil(end_ms / 1000 / window_s - 1e-9))
    if windows > _MOST_WINDOWS:
        raise UserError(
            f"{windows:,} windows of {window_s:g} s, more than {_MOST_WINDOWS:,}: use longer windows"
        )
    edges = np.append(np.arange(windows) * window_s, end_ms / 1000)
    kept = times_ms[times_ms <= end_ms] / 1000
    window = np.clip(np.searchsorted(edges, kept, side="left") - 1, 0, windows - 1)
    rates = np.bincount(window, minlength=windows) * PACKET_BITS / 1e6 / np.diff(edges)
    return edges, np.append(rates, rates[-1])


def pairs(path: Path, given: Given) -> list[DeviceLog]:
    """Read [seconds, Mbit/s] pairs of the downlink, one device per file."""
    logs = []
    for file in _files(path, given):
        pairs = _json_pairs(file) if file.suffix == ".json" else _line_pairs(file)
        times, down = np.array(pairs, np.float64).T
        up = given.constant("up_mbps", len(times), "pairs")
        memory = given.constant("mem_free_mb", len(times), "pairs")
        back = np.flatnonzero(np.diff(times) <= 0)
        if len(back):
            raise UserError(
                f"{file}: pair {int(back[0]) + 2}: its time must be above that of the pair before"
            )
        logs.append(DeviceLog(file.stem, times, memory, down, up))
    return logs


def _json_pairs(path: Path) -> list[list[float]]:
    data = json_of(path)
    if not isinstance(data, list) or not data:
        raise UserError(f"{path}: expected a list of [seconds, Mbit/s] pairs")
    return [_pair(pair, f"{path}: pair {number}") for number, pair in enumerate(data, 1)]


def _line_pairs(path: Path) -> list[list[float]]:
    pairs = []
    for number, line in enumerate(text_of(path).splitlines(), 1):
        text = line.partition("#")[0].strip()
        if text:
            pairs.append(_pair(re.split(r"\s*,\s*|\s+", text), f"{path}, line {number}"))
    if not pairs:
        raise UserError(f"{path}: no pairs")
    return pairs


def _pair(pair: Any, where: str) -> list[float]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise UserError(f"{where}: expected two numbers, seconds and Mbit/s, found {short(pair)}")
    return [float(value) for value in numbers_of(pair, where)]
