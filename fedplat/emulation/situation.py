"""The devices of a run: drawn once from settings and seed, kept with it, the same for every strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .hardware import Hardware
from .schedule import DeviceSchedule

if TYPE_CHECKING:
    from ..config import ExperimentConfig

SCHEDULE, HARDWARE = "schedule.csv", "hardware.csv"


@dataclass(frozen=True)
class Devices:
    """What each client's device has in each round, and how fast and thirsty its processor and radio are."""

    schedule: DeviceSchedule
    hardware: Hardware

    def keep_in(self, folder: Path) -> None:
        """Write both as CSV; if they are there, raise UserError unless they are the same.

        A run that goes on has to meet the devices it began with, also if logs have changed since.
        """
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
    return Devices(schedule, config.hardware.build(clients, config.seed))
