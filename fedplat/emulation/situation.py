"""The devices of a run: drawn once from settings and seed, kept with it, the same for every strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .hardware import Hardware
from .schedule import Budget, DeviceSchedule
from .world import World
from .world_settings import world_of

if TYPE_CHECKING:
    from ..config import ExperimentConfig

SCHEDULE, HARDWARE = "schedule.csv", "hardware.csv"


@dataclass(frozen=True)
class Devices:
    """What each client's device has in each round, and how fast and thirsty its processor and radio are.

    In a ``world``, the speeds in ``schedule`` are those of each client at its best edge.
    """

    schedule: DeviceSchedule
    hardware: Hardware
    world: World | None = None

    def straight_to_cloud(self, slower: float) -> DeviceSchedule:
        """Return the schedule of clients that report to the cloud; in a world over a link so much slower."""
        if self.world is None:
            return self.schedule
        return replace(
            self.schedule,
            down_bps=np.maximum(self.schedule.down_bps // slower, 1).astype(np.int64),
            up_bps=np.maximum(self.schedule.up_bps // slower, 1).astype(np.int64),
        )

    def at_edge(self, edge: int) -> DeviceSchedule:
        """Return what each client has at one edge; out of its reach, what it has at its best."""
        if self.world is None:
            return self.schedule
        reached = np.where(self.world.covered[:, edge], edge, self.world.best_edge)
        return self.world.schedule(reached, self.schedule)

    def budget_at(self, client: int, edge: int, server_round: int) -> Budget:
        """Return what a client has at an edge in a round."""
        device = self.schedule[client, server_round]
        if self.world is None:
            return device
        return self.world.budget(client, edge, server_round, device)

    def keep_in(self, folder: Path) -> None:
        """Write both as CSV; if they are there, raise UserError unless they are the same.

        A run that goes on has to meet the devices it began with, also if logs have changed since.
        """
        if self.world is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.world.keep_in(folder)
        for name, table in ((SCHEDULE, self.schedule), (HARDWARE, self.hardware)):
            path = folder / name
            if not path.exists():
                table.save(path)
            elif type(table).load(path) != table:
                raise UserError(
                    f"{path} holds other devices than this run's settings give: did the logs change? Go on "
                    f"with those of then, or give another folder with --out"
                )


def devices_of(
    config: ExperimentConfig, clients: int, class_counts: Callable[[], NDArray[np.int64] | None]
) -> Devices | None:
    """Draw the devices of a scenario; None for one that emulates none.

    ``class_counts`` gives the clients' samples per class (clients, classes), if something depends on them.
    """
    if not config.emulates_devices:
        return None
    schedule: DeviceSchedule = config.devices.build(clients, config.rounds, config.seed)
    availability = config.availability
    if availability.name != "always":
        schedule = schedule.with_availability(
            availability.build(clients, config.rounds, config.seed, class_counts)
        )
    if config.emulation.drop_probability:
        schedule = schedule.with_drops(config.emulation.drop_probability, config.seed)
    world = world_of(config, clients, class_counts)
    if world is not None:
        world = world.with_availability(schedule.available)
        schedule = world.schedule(devices=schedule)
        return Devices(schedule, world.hardware, world)
    return Devices(schedule, config.hardware.build(clients, config.seed))
