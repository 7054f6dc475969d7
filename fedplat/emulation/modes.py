"""What the devices of a scenario are: the names of the table ``[devices]`` and their settings.

Each is a function ``(nodes, rounds, seed)`` that returns a :class:`DeviceSchedule`; its keyword-only
parameters are its settings. All default numbers are inferred, unless a source is given: chosen so that small
nets fit everywhere and residual nets do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator

from .logs import read_logs
from .ranges import MOST, Amount, Amounts, Chance, Positive
from .schedule import (
    DeviceSchedule,
    Level,
    class_schedule,
    markov_schedule,
    trace_schedule,
    uniform_schedule,
)
from .synthetic import synthetic_logs


class DeviceState(BaseModel):
    """What a device has in one state: MB, Mbit/s, and the chance of being available in a round."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_mb: Amount
    down_mbps: Amount
    up_mbps: Amount
    availability: Chance = 1.0

    def level(self) -> Level:
        """Return it as the schedule has it."""
        return Level(self.memory_mb, self.down_mbps, self.up_mbps, self.availability)


class DeviceClass(DeviceState):
    """A class of devices: a state it is in for ever, and its share of all nodes (in any unit)."""

    name: Annotated[str, Field(min_length=1)]
    share: Positive = 1.0

    def level(self) -> Level:
        """Return it as the schedule has it."""
        return Level(self.memory_mb, self.down_mbps, self.up_mbps, self.availability, self.share)


def _offset(value: Any) -> float | str:
    if value == "random":
        return "random"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise ValueError("expected a number of seconds, 0 or more, or 'random'")
    return float(value)


def _differ(levels: tuple[DeviceClass, ...]) -> tuple[DeviceClass, ...]:
    if not levels or len({level.name for level in levels}) < len(levels):
        raise ValueError("expected at least one class, each with a name of its own")
    return levels


# Of these two, what pydantic says by itself names things that no user has written.
Offset = Annotated[float | Literal["random"], PlainValidator(_offset)]
Classes = Annotated[tuple[DeviceClass, ...], AfterValidator(_differ)]

CLASSES = (
    DeviceClass(name="low", memory_mb=100, down_mbps=5, up_mbps=1, availability=0.8, share=0.4),
    DeviceClass(name="middle", memory_mb=400, down_mbps=20, up_mbps=5, availability=0.9, share=0.4),
    DeviceClass(name="high", memory_mb=2000, down_mbps=100, up_mbps=40, availability=0.95, share=0.2),
)
GOOD = DeviceState(memory_mb=400, down_mbps=50, up_mbps=10)
BAD = DeviceState(memory_mb=60, down_mbps=2, up_mbps=0.5)


def unlimited(nodes: int, rounds: int, seed: int) -> DeviceSchedule:
    """Devices with more memory and faster links than anything needs, always there."""
    most = Level(MOST, MOST, MOST)
    return class_schedule(nodes, rounds, seed, [most])


def trace(
    nodes: int, rounds: int, seed: int, *,
    logs: Annotated[str, Field(min_length=1, description="a CSV, a folder of them, or synthetic")] = (
        "synthetic"
    ),
    interval_s: Annotated[Positive, Field(description="seconds of log time from round to round")] = 900.0,
    offset_s: Annotated[Offset, Field(description="log time before round 1; random: one per node")] = (
        "random"
    ),
    beyond: Annotated[Literal["wrap", "clamp"], Field(description="after a log's end")] = "wrap",
    window_s: Annotated[Amount, Field(description="seconds a round's budget holds for; 0: an instant")] = 0.0,
) -> DeviceSchedule:  # fmt: skip
    """Budgets read from logs, an interval of log time apart; ``synthetic`` is the set that is shipped.

    See :func:`trace_schedule`. A folder called synthetic is given as ``./synthetic``.
    """
    found = synthetic_logs() if logs == "synthetic" else read_logs(Path(logs).expanduser())
    offset = None if offset_s == "random" else float(offset_s)
    return trace_schedule(found, nodes, rounds, seed, interval_s, offset, beyond, window_s)


def uniform(
    nodes: int, rounds: int, seed: int, *,
    memory_mb: Annotated[Amounts, Field(description="free memory, from and to")] = (43.0, 223.0),
    down_mbps: Annotated[Amounts, Field(description="speed of the link, from and to")] = (5.0, 100.0),
    up_mbps: Annotated[Amounts, Field(description="speed of the link, from and to")] = (1.0, 40.0),
    availability: Annotated[Chance, Field(description="chance to be there in a round")] = 1.0,
) -> DeviceSchedule:  # fmt: skip
    """Budgets uniform between two numbers, anew for every node and round; see :func:`uniform_schedule`.

    The range of memory is that of model sizes in the released code of Yao, 2024 (arXiv 2409.08858).
    """
    return uniform_schedule(nodes, rounds, seed, memory_mb, down_mbps, up_mbps, availability)


def classes(
    nodes: int, rounds: int, seed: int, *,
    levels: Annotated[Classes, Field(description="tables: name, share, what devices have")] = CLASSES,
) -> DeviceSchedule:  # fmt: skip
    """Classes of devices, each with budgets that never change; see :func:`class_schedule`."""
    return class_schedule(nodes, rounds, seed, [level.level() for level in levels])


def class_names(nodes: int, seed: int, levels: tuple[DeviceClass, ...] = CLASSES) -> list[str]:
    """Return the name of the class that each node has in :func:`classes`."""
    names = [level.name for level in levels]
    numbered = [Level(place, 0, 0, share=level.share) for place, level in enumerate(levels)]
    places = class_schedule(nodes, 1, seed, numbered).memory_bytes[:, 0] // 1_000_000
    return [names[place] for place in places.tolist()]


def markov(
    nodes: int, rounds: int, seed: int, *,
    good: Annotated[DeviceState, Field(description="what a device has in the good state")] = GOOD,
    bad: Annotated[DeviceState, Field(description="what it has in the bad one")] = BAD,
    stay_good: Annotated[Chance, Field(description="chance to stay good for another round")] = 0.9,
    stay_bad: Annotated[Chance, Field(description="chance to stay bad for another round")] = 0.7,
) -> DeviceSchedule:  # fmt: skip
    """Each device moves between a good and a bad state; see :func:`markov_schedule`."""
    return markov_schedule(nodes, rounds, seed, good.level(), bad.level(), stay_good, stay_bad)
