"""Logs of devices: free memory, link speeds, battery and availability over time, kept as CSV.

A log is piecewise constant: a sample holds from its time to the next one's; samples may come at any times.
Before the first sample the first one holds. What comes after the last is chosen at each question:

* ``wrap``: the log repeats. Its last sample marks the end, where it begins again, so the period is the last
  time minus the first, and at the last time the first sample holds.
* ``clamp``: the last sample holds for ever.

A log of one sample never changes. A look-up is a function of (device, time) alone, whatever was asked before.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UserError, unknown_name

Beyond = Literal["wrap", "clamp"]
REQUIRED = ("time_s", "mem_free_mb", "down_mbps", "up_mbps")
OPTIONAL = ("battery", "available")


@dataclass(frozen=True)
class Sample:
    """What a device has at one moment; ``battery`` is None where it is not known or there is none."""

    mem_free_mb: float
    down_mbps: float
    up_mbps: float
    battery: float | None
    available: bool


@dataclass(frozen=True, eq=False)
class DeviceLog:
    """One device's samples as arrays of equal length, read-only copies of what is given.

    Times are in seconds and strictly increase; memory is in MB of 10^6 bytes, speeds in Mbit/s, the battery
    in percent (NaN: not known). Without ``available`` the device always is.
    Raises UserError on anything else.
    """

    device: str
    time_s: NDArray[np.float64]
    mem_free_mb: NDArray[np.float64]
    down_mbps: NDArray[np.float64]
    up_mbps: NDArray[np.float64]
    battery: NDArray[np.float64] | None = None
    available: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if not self.device or self.device != self.device.strip() or not self.device.isprintable():
            raise UserError(
                f"device {self.device!r}: a name needs printable characters, no blanks around them"
            )
        for name in (*REQUIRED, *OPTIONAL):
            given = getattr(self, name)
            if given is None and name in OPTIONAL:
                continue
            array = np.array(given, np.bool_ if name == "available" else np.float64)
            self._check(name, array)
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    def _check(self, name: str, array: NDArray[Any]) -> None:
        if array.ndim != 1 or not array.size or len(array) != len(self.time_s):
            raise UserError(f"device {self.device}: {name} must be as long as time_s, at least one sample")
        if name == "battery" and bool(np.any((array < 0) | (array > 100))):
            raise UserError(f"device {self.device}: battery must be 0 to 100 (percent)")
        if name in REQUIRED and not bool(np.all(np.isfinite(array) & (array >= 0))):
            raise UserError(f"device {self.device}: {name} is negative or not finite")
        if name == "time_s" and bool(np.any(np.diff(array) <= 0)):
            raise UserError(f"device {self.device}: time_s must increase from sample to sample")

    def __len__(self) -> int:
        return len(self.time_s)

    @property
    def span_s(self) -> float:
        """Seconds from the first sample to the last, which is the period of ``wrap``."""
        return float(self.time_s[-1] - self.time_s[0])

    def index_at(self, times: ArrayLike, beyond: Beyond = "wrap") -> NDArray[np.int64]:
        """Return which sample holds at each of ``times`` (any shape, seconds), by bisection.

        >>> log = DeviceLog("a", [0, 10, 30], [5, 6, 7], [1, 1, 1], [1, 1, 1])
        >>> log.index_at([-5, 0, 9, 10, 30, 41]).tolist(), log.index_at([30, 41], "clamp").tolist()
        ([0, 0, 0, 1, 0, 1], [2, 2])

        Raises UserError for times that are not finite and an unknown ``beyond``.
        """
        asked = np.asarray(times, np.float64)
        if beyond not in get_args(Beyond):
            raise unknown_name("value of beyond", str(beyond), get_args(Beyond))
        if not np.isfinite(asked).all():
            raise UserError(f"device {self.device}: a log cannot be looked up at a time that is not finite")
        last = len(self) - 1
        if beyond == "wrap" and last:
            start = self.time_s[0]
            asked = np.where(asked < self.time_s[-1], asked, start + np.mod(asked - start, self.span_s))
            last -= 1  # rounding may lead back to the very end
        found = np.searchsorted(self.time_s, asked, side="right") - 1
        return np.clip(found, 0, last).astype(np.int64)

    def at(self, time_s: float, beyond: Beyond = "wrap") -> Sample:
        """Return what holds at one time; see :meth:`index_at`."""
        index = int(self.index_at(time_s, beyond))
        battery = math.nan if self.battery is None else float(self.battery[index])
        return Sample(
            float(self.mem_free_mb[index]),
            float(self.down_mbps[index]),
            float(self.up_mbps[index]),
            None if math.isnan(battery) else battery,
            True if self.available is None else bool(self.available[index]),
        )


@dataclass(frozen=True, eq=False)
class DeviceLogs:
    """The logs of several devices, in the order given, under different names."""

    logs: tuple[DeviceLog, ...]

    def __post_init__(self) -> None:
        if not self.logs:
            raise UserError("no device logs: at least one is needed")
        if len(self._places) < len(self.logs):
            twice = next(n for place, n in enumerate(self.devices) if self._places[n] != place)
            raise UserError(f"device {twice} has two logs; give each device its own name")

    @cached_property
    def _places(self) -> dict[str, int]:
        return {log.device: place for place, log in enumerate(self.logs)}

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The devices' names."""
        return tuple(log.device for log in self.logs)

    def __len__(self) -> int:
        return len(self.logs)

    def __iter__(self) -> Iterator[DeviceLog]:
        return iter(self.logs)

    def __getitem__(self, device: str) -> DeviceLog:
        if device not in self._places:
            raise unknown_name("device", device, self.devices)
        return self.logs[self._places[device]]

    def at(self, device: str, time_s: float, beyond: Beyond = "wrap") -> Sample:
        """Return what a device has at a time."""
        return self[device].at(time_s, beyond)


def read_logs(path: Path | str) -> DeviceLogs:
    """Return the logs in a CSV file, or in all ``*.csv`` files of a folder, by name.

    The first line names the columns, in any order: ``time_s``, ``mem_free_mb``, ``down_mbps``, ``up_mbps``
    and, if wanted, ``battery`` (percent, may be empty) and ``available`` (0 or 1). With a column ``device`` a
    file holds several devices, whose lines may be mixed; without, the file's name is the device's.
    Raises UserError with file and line for whatever is malformed.
    """
    path = Path(path)
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: no .csv file in this folder")
    return DeviceLogs(tuple(log for file in files for log in _read_file(file)))


def write_logs(logs: DeviceLogs, path: Path | str) -> Path:
    """Write all logs to one CSV file with a column ``device``; read and written again it is the same.

    Numbers are written with as few digits as tell them apart. Missing folders are made; raises UserError if
    it cannot be written.
    """
    path = Path(path)
    extra = [name for name in OPTIONAL if any(getattr(log, name) is not None for log in logs)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("device", *REQUIRED, *extra))
            for log in logs:
                columns = [[log.device] * len(log), *(_texts(getattr(log, name)) for name in REQUIRED)]
                if "battery" in extra:
                    columns.append([""] * len(log) if log.battery is None else _texts(log.battery))
                if "available" in extra:
                    free = np.ones(len(log), bool) if log.available is None else log.available
                    columns.append(["1" if value else "0" for value in free.tolist()])
                writer.writerows(zip(*columns, strict=True))
    except OSError as error:
        raise UserError(f"{path}: cannot write the logs: {error}") from error
    return path


def _texts(values: NDArray[np.float64]) -> list[str]:
    return ["" if math.isnan(value) else repr(value).removesuffix(".0") for value in values.tolist()]


def _read_file(path: Path) -> list[DeviceLog]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            columns = next(reader, None)
            _check_header(columns or [], path)
            rows: dict[str, list[list[float]]] = {}
            names = [name for name in (columns or []) if name != "device"]
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                device, values = _parse_row(row, columns or [], path.stem, where)
                known = rows.setdefault(device, [])
                time = names.index("time_s")
                if known and values[time] <= known[-1][time]:
                    how = "is the time of the line before" if values[time] == known[-1][time] else "goes back"
                    raise UserError(
                        f"{where}: time_s {values[time]:g} {how} for device {device}; it must increase"
                    )
                known.append(values)
    except OSError as error:
        raise UserError(f"{path}: cannot read the logs: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV file in UTF-8: {error}") from error
    if not rows:
        raise UserError(f"{path}: no samples after the line of column names")
    return [
        DeviceLog(device, **dict(zip(names, np.array(samples, np.float64).T, strict=True)))
        for device, samples in rows.items()
    ]


def _check_header(columns: Sequence[str], path: Path) -> None:
    allowed = ("device", *REQUIRED, *OPTIONAL)
    for name in columns:
        if name not in allowed:
            raise UserError(f"{path}, line 1: {unknown_name('column', name, allowed)}")
        if columns.count(name) > 1:
            raise UserError(f"{path}, line 1: column {name} comes twice")
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise UserError(f"{path}, line 1: missing column {', '.join(missing)}; needed: {','.join(REQUIRED)}")


def _parse_row(row: list[str], columns: Sequence[str], stem: str, where: str) -> tuple[str, list[float]]:
    if len(row) != len(columns):
        raise UserError(f"{where}: {len(row)} fields, expected {len(columns)}: {','.join(columns)}")
    device, values = stem, []
    for name, text in zip(columns, row, strict=True):
        if name == "device":
            device = text.strip()
            if not device:
                raise UserError(f"{where}: device is empty")
        else:
            values.append(_number(name, text, where))
    return device, values


def _number(name: str, text: str, where: str) -> float:
    if name == "battery" and not text.strip():
        return math.nan
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{where}: {name} is '{text}', expected a number") from None
    if name == "available" and value not in (0, 1):
        raise UserError(f"{where}: available is '{text}', expected 0 or 1")
    if not math.isfinite(value) or value < 0 or (name == "battery" and value > 100):
        limits = "0 to 100" if name == "battery" else "a finite number, 0 or more"
        raise UserError(f"{where}: {name} is '{text}', expected {limits}")
    return value
