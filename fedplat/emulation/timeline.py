"""What a device does in a round, on a simulated clock that no real clock has anything to do with.

A participant downloads the model, trains, and uploads its reply; it may run out of memory before it trains,
be gone before it uploads, or miss the round's deadline. All times are in simulated seconds from the start of
the round, all energies in joules, all sizes in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..clients.mods.memory_cap import OUT_OF_MEMORY
from .hardware import Hardware
from .schedule import Budget

Outcome = Literal["delivered", "late", "out-of-memory", "dropped", "away", "failed"]


@dataclass(frozen=True)
class Work:
    """What a client's task of a round takes: bytes of memory at its peak, FLOPs, and bits of samples seen."""

    memory_bytes: int
    flops: float
    sample_bits: float


@dataclass(frozen=True)
class DeviceRound:
    """What became of one device in one round.

    ``seconds`` is when it was done, or gave up; its parts and ``joules`` are what it spent until then, so a
    device that is late spends up to the deadline only if late replies are dropped. ``late`` is whether the
    deadline was missed, also by a device that is waited for, and ``bytes_down`` and ``bytes_up`` what went
    over its link.
    """

    client: int
    outcome: Outcome
    reason: str
    budget: Budget
    memory_bytes: int
    seconds_down: float = 0.0
    seconds_compute: float = 0.0
    seconds_up: float = 0.0
    joules_compute: float = 0.0
    joules_transfer: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    late: bool = False

    @property
    def seconds(self) -> float:
        """When the device was done, or gave up."""
        return self.seconds_down + self.seconds_compute + self.seconds_up

    @property
    def joules(self) -> float:
        """What it spent."""
        return self.joules_compute + self.joules_transfer

    @property
    def memory_used(self) -> float:
        """What the task takes over what the device has."""
        return self.memory_bytes / self.budget.memory_bytes if self.budget.memory_bytes else math.inf

    def record(self) -> dict[str, Any]:
        """Return the row for the records of a run."""
        return {
            "outcome": self.outcome,
            "seconds": self.seconds,
            "seconds_down": self.seconds_down,
            "seconds_compute": self.seconds_compute,
            "seconds_up": self.seconds_up,
            "joules": self.joules,
            "memory_bytes": self.memory_bytes,
            "memory_budget": self.budget.memory_bytes,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "down_bps": self.budget.down_bps,
            "up_bps": self.budget.up_bps,
        }


@dataclass(frozen=True)
class Policy:
    """When a round closes: ``deadline_s`` after its start, or never; late replies drop, or are waited for.

    With ``enforce``, memory is not compared with an estimate: the clients run under a limit, which leaves out
    ``overhead_bytes`` of what the device has.
    """

    deadline_s: float | None = None
    late: Literal["drop", "wait"] = "drop"
    enforce: bool = False
    overhead_bytes: int = 0

    @property
    def closes_s(self) -> float:
        """When the server stops waiting."""
        return math.inf if self.deadline_s is None or self.late == "wait" else self.deadline_s


class Timeline:
    """Works out the rounds of devices.

    Transfers take bytes * 8 / speed, training takes cycles / frequency; energy is as :mod:`.hardware` says.
    """

    def __init__(self, hardware: Hardware, policy: Policy) -> None:
        self._hardware = hardware
        self._policy = policy

    def of(
        self,
        client: int,
        budget: Budget,
        work: Work,
        bytes_down: int,
        bytes_up: int,
        failed: str | None = None,
    ) -> DeviceRound:
        """Return the round of a client that is asked; ``failed`` is why its reply is an error, if it is."""
        if not (budget.available and budget.down_bps and budget.up_bps):
            why = "its link stands still" if budget.available else "the device is not there"
            return DeviceRound(client, "away", f"away: {why}", budget, work.memory_bytes)
        hardware, closes = self._hardware, self._policy.closes_s
        cycles = float(hardware.cycles(client, work.flops, work.sample_bits))
        down, up = bytes_down * 8 / budget.down_bps, bytes_up * 8 / budget.up_bps
        compute = float(hardware.compute_seconds(client, cycles))
        fits = self._policy.enforce or work.memory_bytes <= budget.memory_bytes
        outcome: Outcome = "delivered"
        reason = ""
        if down > closes:
            outcome, reason = "late", self._late(down)
        elif not fits:
            outcome, compute, up = "out-of-memory", 0.0, 0.0
            reason = f"{OUT_OF_MEMORY} {_mb(work.memory_bytes)} of {_mb(budget.memory_bytes)} MB"
        elif failed is not None:
            outcome, reason, up = (
                ("out-of-memory" if failed.startswith(OUT_OF_MEMORY) else "failed"),
                failed,
                0.0,
            )
        elif down + compute > closes:
            outcome, reason = "late", self._late(down + compute + up)
        elif budget.drops:
            outcome, reason, up = "dropped", "dropped: the device was gone before it sent its reply", 0.0
        elif down + compute + up > closes:
            outcome, reason = "late", self._late(down + compute + up)
        deadline = self._policy.deadline_s
        missed = deadline is not None and down + compute + up > deadline
        spent_down, spent_compute, spent_up = _cut((down, compute, up), closes)
        return DeviceRound(
            client,
            outcome,
            reason,
            budget,
            work.memory_bytes,
            seconds_down=spent_down,
            seconds_compute=spent_compute,
            seconds_up=spent_up,
            joules_compute=float(hardware.compute_joules(client, cycles)) * _part(spent_compute, compute),
            joules_transfer=float(hardware.transfer_joules(client, spent_down, spent_up)),
            bytes_down=round(bytes_down * _part(spent_down, down)),
            bytes_up=round(bytes_up * _part(spent_up, up)),
            late=missed,
        )

    def closed_at(self, devices: Sequence[DeviceRound]) -> float:
        """Return how long a round was: until the last participant was done, or the deadline.

        A server that closes its rounds waits until then for a device that is late, gone or away, and if it
        could ask nobody; one without a deadline is told of a lost link. Of an error it is told by the client.
        """
        closes = self._policy.closes_s
        if math.isfinite(closes) and (
            not devices or any(d.outcome in ("late", "dropped", "away") for d in devices)
        ):
            return closes
        return max((device.seconds for device in devices), default=0.0)

    def _late(self, seconds: float) -> str:
        return f"late: {seconds:,.3g} s of {self._policy.closes_s:,.3g} s"


def record_of_round(devices: Sequence[DeviceRound], available: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a round that was ``seconds`` long, with so many devices available.

    Use of memory and links is the mean over the devices that were asked and there; that of a link is what
    went over it by what could have gone in the time of the round. A violation is a task that does not fit
    into the memory, or a missed deadline.
    """
    there = [device for device in devices if device.outcome != "away"]
    count = {
        outcome: sum(device.outcome == outcome for device in devices)
        for outcome in ("delivered", "late", "out-of-memory", "dropped", "away", "failed")
    }
    compute, transfer = sum(d.joules_compute for d in devices), sum(d.joules_transfer for d in devices)
    return {
        "seconds": seconds,
        "joules": compute + transfer,
        "joules_compute": compute,
        "joules_transfer": transfer,
        "available": available,
        "asked": len(devices),
        **{outcome.replace("-", "_"): number for outcome, number in count.items()},
        "violations": sum(d.late + (d.memory_bytes > d.budget.memory_bytes) for d in there),
        "memory_used": _mean([device.memory_used for device in there]),
        "down_used": _mean([_share(d.bytes_down, d.budget.down_bps, seconds) for d in there]),
        "up_used": _mean([_share(d.bytes_up, d.budget.up_bps, seconds) for d in there]),
    }


def _cut(parts: Sequence[float], end: float) -> tuple[float, ...]:
    """Return how much of each of the phases, one after another, is over by ``end``."""
    done, kept = 0.0, []
    for part in parts:
        kept.append(min(part, max(end - done, 0.0)))
        done += part
    return tuple(kept)


def _part(spent: float, whole: float) -> float:
    return spent / whole if whole else 0.0


def _share(nbytes: int, bps: int, seconds: float) -> float:
    return nbytes * 8 / (bps * seconds) if seconds else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.4g}"
