from pathlib import Path

import numpy as np
import pytest

from fedplat.emulation.schedule import DeviceSchedule, uniform_schedule
from fedplat.emulation.schedule_figure import draw_schedule

ONES = np.ones((3, 4), np.int64)
SCHEDULES = {
    "ordinary": uniform_schedule(5, 8, 1, (100, 4000), (0.1, 90), (1, 2), 0.8),
    "one cell": uniform_schedule(1, 1, 1, (100, 100), (1, 1), (1, 1)),
    "many": uniform_schedule(200, 100, 1, (1, 1000), (1, 1000), (1, 1000), 0.5),
    "nobody is ever there": DeviceSchedule(ONES, ONES, ONES, np.zeros((3, 4), np.bool_)),
    "zeros": DeviceSchedule(0 * ONES, 0 * ONES, 0 * ONES, np.ones((3, 4), np.bool_)),
    "no limits": DeviceSchedule(10**18 * ONES, 10**18 * ONES, 10**18 * ONES, np.ones((3, 4), np.bool_)),
    "far apart, with zeros": DeviceSchedule(
        np.array([[0, 1, 10**6, 10**9]]), np.array([[0, 1, 10, 1]]), np.array([[0, 0, 0, 5]]),
        np.ones((1, 4), np.bool_),
    ),
    "drops": DeviceSchedule(ONES, ONES, ONES, np.ones((3, 4), np.bool_), np.eye(3, 4, dtype=np.bool_)),
}  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.filterwarnings("error")
def test_every_kind_of_schedule_can_be_drawn(schedule: DeviceSchedule, tmp_path: Path) -> None:
    draw_schedule(schedule, tmp_path / "new" / "a.png", "title")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_schedule_makes_the_same_picture(tmp_path: Path) -> None:
    for name in ("1.png", "2.png"):
        draw_schedule(SCHEDULES["ordinary"], tmp_path / name, "title")
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes()
