"""Logs of devices that do not exist, made from a seed. Nothing here was observed on a device.

All numbers below are inferred: chosen so that the classes differ as such devices plausibly do, not fitted to
data. The model, at a fixed step:

* class: drawn by its share. The device's memory is one of the class's sizes, the mean share of it that is
  free U[0.3, 0.6], its base speeds log-uniform in the class's ranges, at the same place of both.
* free memory: AR(1) around that mean, correlation exp(-step / 2 h), standard deviation 8 % of all memory,
  kept between 5 % and 95 % of it.
* link: three states (good, fair, poor: 1, 0.4, 0.1 times the base speed) left after 60, 30 and 10 min on
  average, to either of the others with equal chance, times a log-normal factor (sigma 0.15) per sample.
* day: each device has one daily window (a phone's night on the charger, a laptop's working day). The chance
  to be available is one number inside and another outside; a draw holds for an hour on average, or until the
  window opens or closes.
* battery: charges 25 % per hour inside a phone's window and outside a laptop's, falls 3 to 6 % (phone) or
  8 to 15 % (laptop) per hour otherwise, from 5 to 100 %; a single-board computer has none.

The shipped set is made by ``fedplat devices generate --devices 24 --hours 48 --seed 1 --step-s 900``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..rng import generator
from .logs import DeviceLog, DeviceLogs, read_logs

DAY_S = 86_400.0
MEMORY_MEMORY_S = 7_200.0
"""How slowly the AR(1) of free memory forgets, in seconds."""
LINK_FACTORS = (1.0, 0.4, 0.1)
LINK_DWELL_S = (3_600.0, 1_800.0, 600.0)
AVAILABLE_DWELL_S = 3_600.0
SHIPPED = {"devices": 24, "hours": 48.0, "seed": 1, "step_s": 900.0}
_MOST_SAMPLES = 50_000_000


class Range(NamedTuple):
    """From where to where."""

    low: float
    high: float


@dataclass(frozen=True)
class DeviceKind:
    """One class of devices: share of all, memory sizes in MB, speeds in Mbit/s, its day and battery.

    ``opens`` and ``lasts`` are the daily window in hours; ``inside`` and ``outside`` the chance of being
    available; ``charges_inside`` is None without a battery; ``drain`` is in percent per hour.
    """

    name: str
    share: float
    memory_mb: tuple[int, ...]
    down_mbps: Range
    up_mbps: Range
    opens: Range
    lasts: Range
    inside: float
    outside: float
    charges_inside: bool | None
    drain: Range


_NIGHT, _NIGHT_H, _WORK, _WORK_H = Range(21, 24), Range(6, 9), Range(7, 10), Range(8, 11)
KINDS = (
    DeviceKind("phone-low", 0.30, (2000, 3000), Range(2, 10), Range(0.5, 3),
               _NIGHT, _NIGHT_H, 0.90, 0.15, True, Range(3, 6)),
    DeviceKind("phone-mid", 0.30, (4000, 6000), Range(8, 40), Range(2, 12),
               _NIGHT, _NIGHT_H, 0.92, 0.20, True, Range(3, 6)),
    DeviceKind("phone-high", 0.15, (8000, 12000), Range(25, 150), Range(8, 40),
               _NIGHT, _NIGHT_H, 0.94, 0.25, True, Range(3, 6)),
    DeviceKind("board", 0.10, (1000, 2000, 4000, 8000), Range(10, 90), Range(5, 40),
               Range(0, 24), Range(12, 12), 0.98, 0.98, None, Range(0, 0)),
    DeviceKind("laptop", 0.15, (8000, 16000), Range(30, 200), Range(10, 80),
               _WORK, _WORK_H, 0.85, 0.10, False, Range(8, 15)),
)  # fmt: skip


def generate(devices: int, hours: float, seed: int, step_s: float = 900.0) -> DeviceLogs:
    """Return ``devices`` logs from 0 to ``hours``, a sample every ``step_s`` seconds and one at the end.

    Device i depends on the seed and i alone: it is the same however many others there are. Time 0 is
    midnight. Times are rounded to ms, memory to MB, speeds to 0.001 Mbit/s, the battery to 0.1 %.
    Raises UserError for values that are not above 0, and for more than 50 million samples.

    >>> generate(3, 24, seed=5).devices
    ('000-phone-low', '001-phone-mid', '002-phone-mid')
    """
    if devices < 1 or seed < 0:
        raise UserError(
            f"{devices} devices, seed {seed}: at least one device is needed, and a seed of 0 or more"
        )
    if not (0 < hours < math.inf and 0.001 <= step_s <= hours * 3600):
        raise UserError(
            f"{hours:g} hours in steps of {step_s:g} s: expected a step that fits, of 1 ms or more"
        )
    steps = math.ceil(hours * 3600 / step_s - 1e-9)
    if steps * devices > _MOST_SAMPLES:
        raise UserError(f"{steps * devices:,} samples, more than {_MOST_SAMPLES:,}: use longer steps")
    times = np.unique(np.round(np.append(np.arange(steps) * step_s, hours * 3600), 3))
    return DeviceLogs(tuple(_device(index, times, step_s, seed) for index in range(devices)))


def synthetic_logs() -> DeviceLogs:
    """Return the set that is shipped: 24 synthetic devices over 48 hours."""
    with as_file(files("fedplat.emulation") / "data" / "synthetic.csv") as path:
        return read_logs(path)


def _device(index: int, times: NDArray[np.float64], step_s: float, seed: int) -> DeviceLog:
    rng = generator(seed, "synthetic device log", index)
    kind = KINDS[int(rng.choice(len(KINDS), p=[kind.share for kind in KINDS]))]
    total = kind.memory_mb[int(rng.integers(len(kind.memory_mb)))]
    mean = rng.uniform(0.3, 0.6)
    place = rng.uniform()
    down_base, up_base = (
        speeds.low ** (1 - place) * speeds.high**place for speeds in (kind.down_mbps, kind.up_mbps)
    )
    opens, lasts, drain = (rng.uniform(*span) for span in (kind.opens, kind.lasts, kind.drain))

    free = np.clip(
        mean + 0.08 * autoregressive(rng, len(times), math.exp(-step_s / MEMORY_MEMORY_S)), 0.05, 0.95
    )
    link = np.array(LINK_FACTORS)[_link_states(rng, len(times), step_s)]
    down, up = (
        np.round(base * link * np.exp(0.15 * rng.standard_normal(len(times))), 3)
        for base in (down_base, up_base)
    )
    inside = np.mod(times - opens * 3600, DAY_S) < lasts * 3600
    available = _availability(rng, inside, kind, step_s)
    battery = None
    if kind.charges_inside is not None:
        charging = inside == kind.charges_inside
        battery = _battery(rng.uniform(40, 100), charging, drain, step_s)
    name = f"{index:03d}-{kind.name}"
    return DeviceLog(name, times, np.round(total * free), down, up, battery, available)


def autoregressive(rng: np.random.Generator, count: int, correlation: float) -> NDArray[np.float64]:
    """Return a stationary AR(1) path of mean 0 and variance 1: neighbours correlate by ``correlation``."""
    noise = rng.standard_normal(count)
    noise[1:] *= math.sqrt(1 - correlation**2)
    for step in range(1, count):
        noise[step] += correlation * noise[step - 1]
    return noise


def _link_states(rng: np.random.Generator, count: int, step_s: float) -> NDArray[np.int64]:
    leaves, moves = rng.random(count), rng.integers(1, 3, count)
    share = np.array(LINK_DWELL_S) / sum(LINK_DWELL_S)  # equal chances of moving: time shares go as the dwell
    states = np.empty(count, np.int64)
    state = int(rng.choice(len(share), p=share))
    for step in range(count):
        if step and leaves[step] < -math.expm1(-step_s / LINK_DWELL_S[state]):
            state = (state + int(moves[step])) % len(LINK_DWELL_S)
        states[step] = state
    return states


def _availability(
    rng: np.random.Generator, inside: NDArray[np.bool_], kind: DeviceKind, step_s: float
) -> NDArray[np.bool_]:
    draws, ends = rng.random(len(inside)), rng.random(len(inside)) < -math.expm1(-step_s / AVAILABLE_DWELL_S)
    ends[0] = True
    ends[1:] |= inside[1:] != inside[:-1]
    drawn = np.maximum.accumulate(np.where(ends, np.arange(len(inside)), 0))  # which draw holds at each step
    return draws[drawn] < np.where(inside, kind.inside, kind.outside)


def _battery(level: float, charging: NDArray[np.bool_], drain: float, step_s: float) -> NDArray[np.float64]:
    levels = np.empty(len(charging))
    for step, plugged in enumerate(charging.tolist()):
        levels[step] = level
        level = min(max(level + (25.0 if plugged else -drain) * step_s / 3600, 5.0), 100.0)
    return np.round(levels, 1)
