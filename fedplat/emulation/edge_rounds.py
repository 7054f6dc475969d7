"""What the rounds of edge servers take together, on the simulated clock of a round of the cloud.

An edge begins its next round when the last is closed, and all edges begin at once; the cloud waits for the
slowest::

    T = max_m [ sum over the edge's rounds of when they close + seconds of the link to the cloud ]
    E = sum over clients and rounds of their joules           + joules of the links that were used

The link to the cloud is used by an edge for which a client delivered in any of its rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from .timeline import DeviceRound

Floats = NDArray[np.float64]
ClosedAt = Callable[[Sequence[DeviceRound]], float]


@dataclass(frozen=True, eq=False)
class CloudLinks:
    """Seconds and joules (M,) from each edge to the cloud and back."""

    seconds: Floats
    joules: Floats


@dataclass(frozen=True)
class EdgeTime:
    """What one edge took of a round: ``joules`` are its clients' and those of its link to the cloud."""

    seconds: float
    joules: float


@dataclass
class EdgeRounds:
    """The devices of one round of the cloud, by edge and by round of the edge, as they come."""

    devices: dict[int, dict[int, list[DeviceRound]]] = field(default_factory=dict)

    def add(self, edge: int, edge_round: int, device: DeviceRound) -> None:
        """Note what a device did in a round of its edge."""
        self.devices.setdefault(edge, {}).setdefault(edge_round, []).append(device)

    def clients(self) -> list[DeviceRound]:
        """Return what each device did over all rounds of its edge, in the order of clients."""
        found: dict[int, list[DeviceRound]] = {}
        for rounds in self.devices.values():
            for _, devices in sorted(rounds.items()):
                for device in devices:
                    found.setdefault(device.client, []).append(device)
        return [together(rounds) for _, rounds in sorted(found.items())]

    def edges(self, links: CloudLinks, closed_at: ClosedAt) -> dict[int, EdgeTime]:
        """Return what each edge took of which clients were asked."""
        found = {}
        for edge, rounds in sorted(self.devices.items()):
            used = any(d.outcome == "delivered" for devices in rounds.values() for d in devices)
            seconds = sum(closed_at(devices) for devices in rounds.values())
            joules = sum(d.joules for devices in rounds.values() for d in devices)
            found[edge] = EdgeTime(
                seconds + used * float(links.seconds[edge]), joules + used * float(links.joules[edge])
            )
        return found

    def link_joules(self, links: CloudLinks) -> float:
        """Return the joules of the links to the cloud that were used."""
        return sum(
            float(links.joules[edge])
            for edge, rounds in self.devices.items()
            if any(d.outcome == "delivered" for devices in rounds.values() for d in devices)
        )


def together(rounds: Sequence[DeviceRound]) -> DeviceRound:
    """Return several rounds of one device as one: times, energies and bytes add up, the last has the say."""
    last = rounds[-1]
    if len(rounds) == 1:
        return last
    return replace(
        last,
        **{name: sum(getattr(device, name) for device in rounds) for name in _SUMS},
        memory_bytes=max(device.memory_bytes for device in rounds),
        late=any(device.late for device in rounds),
    )


_SUMS = (
    *("seconds_down", "seconds_compute", "seconds_up", "joules_compute", "joules_transfer"),
    *("bytes_down", "bytes_up"),
)
