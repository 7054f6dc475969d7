import tomllib
from pathlib import Path

import numpy as np
import pytest

from fedplat.cli.report import left_out_lines
from fedplat.emulation.schedule import uniform_schedule
from fedplat.results.device_report import devices_said, devices_text
from fedplat.results.left_out import left_out_text
from fedplat.results.report import report_text, write_report
from fedplat.results.summary import summarise

from . import config, make_run
from .device_records import make_device_run


def outcome_of(client: int, number: int) -> str:
    """Client 0 is always late, 1 has too little memory in odd rounds, 2 is asked in even rounds only."""
    return {
        0: "late",
        1: "out-of-memory" if number % 2 else "delivered",
        2: "" if number % 2 else "delivered",
    }.get(client, "delivered")


def test_report_has_a_section_on_devices_with_its_pictures(tmp_path: Path) -> None:
    folder = make_device_run(
        tmp_path / "run", {"mean": [0.1, 0.3, 0.6], "median": [0.1, 0.4, 0.7]}, outcome_of
    )
    uniform_schedule(4, 2, 1, (100, 200), (1, 2), (1, 2)).save(tmp_path / "run" / "devices" / "schedule.csv")
    write_report(folder)
    text = (tmp_path / "run" / "report.md").read_text()
    for part in (
        "## Devices",
        "Every strategy met the same devices, which are in [devices/schedule.csv](devices/schedule.csv)",
        "| mean | 7 | 4 | 2 | 1 | 2 |",
        "![Accuracy over simulated time, energy and bytes](simulated.png)",
        "![What became of every client, median](median/devices.png)",
        "| mean | 0 | late 2x | late after 5 s down, 40 s training, 15 s up | 2 of 2 |",
        "| mean | 1 | out of memory 1x | needs 320 MB, has 200 MB | 1 of 2 |",
        "| simulated s per round | kJ | late | out of memory | simulated s to 50 % | kJ to 50 % |",
        "Simulated s are simulated seconds",
    ):
        assert part in text
    assert "hardware.csv" not in text
    assert "dropped |" not in text
    for name in ("simulated.png", "mean/devices.png", "median/devices.png"):
        assert (tmp_path / "run" / name).read_bytes().startswith(b"\x89PNG")


def test_a_run_without_devices_says_nothing_of_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.1, 0.5]})
    summary = write_report(folder)
    text = report_text(folder, summary)
    assert devices_text(folder, summary) == ""
    assert "Devices" not in text
    assert "imulated" not in text
    assert not list((tmp_path / "run").glob("**/devices.png"))
    assert not (tmp_path / "run" / "simulated.png").exists()


def test_many_late_clients_are_one_row_for_each_strategy(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    late = rng.random((30, 51)) < 0.7
    folder = make_device_run(
        tmp_path / "run", {"mean": [0.1] * 51}, lambda c, n: "late" if late[c, n] else "delivered", 30
    )
    summary = summarise(folder)
    text = left_out_text(summary["left_out"])
    lines = text.splitlines()
    assert len(lines) == 3
    assert "| mean | 30 clients: 0, 1, 2, 3 (attacker), 4," in lines[2]
    assert lines[2].endswith(f"and 15 more | late | 0 | {late[:, 1:].sum()} | 1 to 50 |")
    assert left_out_lines(summary["left_out"]) == [f"left out: 30 clients, late (mean {late[:, 1:].sum()}x)"]
    section = devices_text(folder, summary)
    assert len([line for line in section.splitlines() if line.startswith("| mean |")]) == 1 + 8
    assert "Clients that missed fewer rounds are in summary.json (mean: 22 more)." in section


def test_failures_that_are_not_the_devices_keep_a_row_of_their_own(tmp_path: Path) -> None:
    folder = make_device_run(
        tmp_path / "run",
        {"mean": [0.1, 0.2, 0.3]},
        lambda c, n: ("late", "failed", "delivered")[min(c, n, 2)],
    )
    text = left_out_text(summarise(folder)["left_out"])
    assert "| mean | 0 | late | 0 | 2 | 1 to 2 |" in text
    assert "| mean | 1 | ValueError: no data (2x) | 0 | 2 | 1 to 2 |" in text
    assert "| mean | 2, 3 (attacker) | ValueError: no data (1x) | 0 | 1 | 1 to 1 |" in text


def test_the_situation_says_which_devices_there_were() -> None:
    assert devices_said(config().to_dict()) == {}
    said = devices_said(
        {
            "devices": {"name": "mine:devices", "fast": True, "hardware": {"cpu_ghz": [1.0, 2.0]}},
            "availability": {"name": "mine:there", "p": 0.5},
            "emulation": {"deadline_s": 60.0, "late": "drop", "drop_probability": 0.05, "ask": "all"},
            "compression": {"name": "mine:small"},
        }
    )
    assert said["Devices"].endswith("given by import path) (fast = true)")
    assert said["Devices' hardware"] == "cpu_ghz = 1.0, 2.0"
    assert said["Devices are there"].endswith("(p = 0.5)")
    assert said["Deadline"] == (
        "60 simulated seconds, late replies are dropped; also devices that are away are asked"
    )
    assert said["Dropping out"] == "5 % of the participations, between training and upload"
    assert said["Compression"].startswith("mine:small")


@pytest.mark.parametrize(
    ("emulation", "text"),
    [
        ("", "none, a round lasts until its last device is done"),
        ("deadline_s = 5\nlate = 'wait'", "5 simulated seconds, late replies are waited for"),
        ("enforce = true", "none, a round lasts until its last device is done; memory limits are real"),
    ],
)
def test_the_deadline_is_told(emulation: str, text: str) -> None:
    raw = tomllib.loads(f"[devices]\nname = 'mine:devices'\n[emulation]\n{emulation}")
    assert devices_said(raw)["Deadline"].startswith(text)
