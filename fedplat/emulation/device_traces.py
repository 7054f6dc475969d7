"""Traces of devices: FedScale's two pickles and FLASH's events; see ``importers``."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from .given import Given, entries, json_of, number_of, numbers_of
from .logs import DeviceLog
from .restricted_pickle import read_plain_pickle

_FLASH_EVENTS = {
    "screen_off": ("dark", True), "screen_on": ("dark", False),
    "screen_lock": ("locked", True), "screen_unlock": ("locked", False),
    "battery_charged_on": ("charging", True), "battery_charged_off": ("charging", False),
    "wifi": ("wifi", True),
    **dict.fromkeys(("unknown", "2g", "3g", "4g", "5g"), ("wifi", False)),
}  # fmt: skip


def fedscale_capacity(path: Path, given: Given) -> list[DeviceLog]:
    """Read FedScale's ``client_device_capacity``: one constant speed per device."""
    logs = []
    for device, entry in entries(read_plain_pickle(path), path, given, ("communication",)):
        speed = (
            np.array([number_of(entry["communication"], f"{path}: device {device}: communication")]) / 1000
        )
        memory = given.constant("mem_free_mb", 1, "fedscale-capacity")
        logs.append(DeviceLog(device, np.zeros(1), memory, speed, speed))
    return logs


def fedscale_behaviour(path: Path, given: Given) -> list[DeviceLog]:
    """Read FedScale's ``client_behave_trace``: when each device is available."""
    logs = []
    for device, entry in entries(read_plain_pickle(path), path, given, ("active", "inactive", "finish_time")):
        where = f"{path}: device {device}"
        on = numbers_of(entry["active"], f"{where}: active")
        off = numbers_of(entry["inactive"], f"{where}: inactive")
        end = number_of(entry["finish_time"], f"{where}: finish_time")
        if len(on) != len(off) or (off < on).any() or end <= 0:
            raise UserError(
                f"{where}: each active time needs its inactive time after it, finish_time be above 0"
            )
        times = np.unique(np.concatenate([[0.0], on, off]))
        times = times[times < end]
        # Begun intervals minus ended ones, which is right for those that touch or overlap as well.
        begun, ended = (np.searchsorted(np.sort(edge), times, side="right") for edge in (on, off))
        available = (begun > ended).tolist()
        logs.append(
            _constant_log(
                device, [*times.tolist(), end], given, "fedscale-behaviour", [*available, available[-1]]
            )
        )
    return logs


def _constant_log(
    device: str, times: list[float], given: Given, kind: str, available: list[bool],
    battery: list[float] | None = None,
) -> DeviceLog:  # fmt: skip
    memory, down, up = (
        given.constant(name, len(times), kind) for name in ("mem_free_mb", "down_mbps", "up_mbps")
    )
    return DeviceLog(
        device, np.array(times), memory, down, up,
        None if battery is None else np.array(battery), np.array(available),
    )  # fmt: skip


def flash(path: Path, given: Given) -> list[DeviceLog]:
    """Read FLASH's events per phone; time 0 is its first event."""
    logs = []
    for device, entry in entries(json_of(path), path, given, ("messages",)):
        events = _flash_events(entry["messages"], f"{path}: device {device}")
        start, state, battery = (
            events[0][0],
            dict.fromkeys(("dark", "locked", "charging", "wifi"), False),
            math.nan,
        )
        samples: dict[float, tuple[float, bool]] = {}
        for when, event in events:
            if event in _FLASH_EVENTS:
                key, value = _FLASH_EVENTS[event]
                state[key] = value
            elif event.endswith("%"):
                battery = float(event[:-1])
            ready = (state["dark"] or state["locked"]) and state["charging"] and state["wifi"]
            samples[(when - start).total_seconds()] = (battery, ready)
        levels, ready_at = zip(*samples.values(), strict=True)
        logs.append(_constant_log(device, list(samples), given, "flash", list(ready_at), list(levels)))
    return logs


def _flash_events(messages: Any, where: str) -> list[tuple[datetime, str]]:
    if not isinstance(messages, str):
        raise UserError(f"{where}: messages must be text")
    events = []
    for number, line in enumerate(messages.splitlines(), 1):
        if not line.strip():
            continue
        stamp, _, event = line.strip().partition("\t")
        event = event.strip().lower()
        try:
            when = datetime.strptime(stamp.strip(), "%Y-%m-%d %H:%M:%S")
            level = float(event[:-1]) if event.endswith("%") else 0.0
        except ValueError:
            raise UserError(
                f"{where}: message {number}: '{line.strip()[:60]}', expected time<tab>event"
            ) from None
        if not 0 <= level <= 100:
            raise UserError(f"{where}: message {number}: battery {event}, expected 0% to 100%")
        events.append((when, event))
    if not events:
        raise UserError(f"{where}: no messages")
    return sorted(events, key=lambda pair: pair[0])
