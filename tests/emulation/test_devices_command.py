from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedplat import experiment
from fedplat.cli import main
from fedplat.cli.common import load_config
from fedplat.cli.devices import app
from fedplat.emulation import DeviceLogs, generate, read_logs
from fedplat.emulation.figures import draw_logs
from fedplat.emulation.situation import devices_of
from fedplat.emulation.summary import Summary
from fedplat.errors import UserError


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> str:
    """Return what a command prints; a user's mistake is raised as the command line would see it."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None:
        raise result.exception
    return result.output


def test_generated_logs_are_shown_and_drawn() -> None:
    assert run("generate", "--devices", "3", "--hours", "6", "--out", "a/logs.csv") == (
        "a/logs.csv: 3 synthetic devices, 75 samples\n"
    )
    told = run("show", "a/logs.csv", "--png", "a/logs.png")
    for log in read_logs("a/logs.csv"):
        assert log.device in told
    assert "picture: a/logs.png" in told
    assert Path("a/logs.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match="nothing is overwritten"):
        run("generate", "--out", "a/logs.csv")


def test_the_shipped_set_is_shown_by_its_name() -> None:
    told = run("show", "synthetic", "--most", "2")
    assert "000-" in told
    assert "002-" not in told
    assert "and 22 more" in told


def test_a_trace_is_imported_into_a_folder() -> None:
    Path("bw.csv").write_text("0,4\n60,8\n120,8\n")
    told = run("import", "pairs", "bw.csv", "--out", "in", "--mem-free-mb", "900", "--up-mbps", "1")
    assert told == "in/devices.csv: 1 devices, 3 samples\n"
    assert Path("in/devices.csv").read_text() == (
        "device,time_s,mem_free_mb,down_mbps,up_mbps\nbw,0,900,4,1\nbw,60,900,8,1\nbw,120,900,8,1\n"
    )
    with pytest.raises(UserError, match="give it with --up-mbps"):
        run("import", "pairs", "bw.csv", "--out", "other", "--mem-free-mb", "900")
    assert not Path("other").exists()


def test_a_summary_weighs_samples_by_how_long_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("time_s,mem_free_mb,down_mbps,up_mbps,available\n0,10,1,5,1\n10,20,2,6,0\n40,5,9,9,1\n")
    assert Summary.of(read_logs(path).logs[0]) == Summary(5, 20, 2, 6, 0.25)


def test_mistakes_are_told() -> None:
    with pytest.raises(UserError, match=r"ends in \.png"):
        run("show", "synthetic", "--png", "x.pdf")
    with pytest.raises(UserError, match="cannot read"):
        run("show", "nothing.csv")
    assert "generate" in run()


@pytest.mark.parametrize("devices", [1, 7, 8])
def test_the_same_logs_make_the_same_picture(devices: int) -> None:
    logs = generate(devices, 6, 1)
    for name in ("1.png", "2.png"):
        draw_logs(logs, Path(name), "title")
    assert Path("1.png").read_bytes() == Path("2.png").read_bytes()


def test_logs_of_one_sample_and_of_zeros_can_be_drawn() -> None:
    Path("x.csv").write_text("time_s,mem_free_mb,down_mbps,up_mbps\n5,0,0,0\n")
    draw_logs(read_logs("x.csv"), Path("x.png"), "one")
    lone = [
        type(log)(f"d{i}", log.time_s[:1], *[log.time_s[:1]] * 3) for i, log in enumerate(generate(9, 1, 1))
    ]
    draw_logs(DeviceLogs(tuple(lone)), Path("y.png"), "nine")
    assert Path("y.png").exists()


SCENARIO = """rounds = 6
data.name = "digits"
model.name = "mlp"
partition = {name = "iid", clients = 4}

[devices]
name = "uniform"
memory_mb = [200, 300]
down_mbps = [10, 20]
up_mbps = [1, 2]
availability = 0.5

[variants.gone.emulation]
drop_probability = 1.0
"""


def no_data(_: object) -> None:
    raise AssertionError("the data is not needed to say what devices have")


def table_of(told: str) -> list[list[str]]:
    return [words for line in told.splitlines() if (words := line.split()) and words[0].isdigit()]


def test_the_devices_of_a_scenario_are_printed_and_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "load_data", no_data)
    Path("mine.toml").write_text(SCENARIO)
    told = run("mine.toml", "--png", "a/b.png")
    assert told.startswith("mine: devices uniform, availability always, seed 1; 4 clients, 6 rounds, ")
    assert Path("a/b.png").read_bytes().startswith(b"\x89PNG")
    found = devices_of(load_config("mine.toml", None, None), 4, lambda: np.zeros((4, 1), np.int64))
    assert found is not None
    there = found.schedule.available[0]
    first = table_of(told)[0]
    assert len(table_of(told)) == 4
    assert first[1] == f"{found.schedule.memory_bytes[0][there].min() / 1e6:.0f}"
    assert first[2] == f"{np.median(found.schedule.memory_bytes[0][there]) / 1e6:.0f}"
    assert first[3] == f"{np.median(found.schedule.down_bps[0][there]) / 1e6:.3g}"
    assert first[5:] == [f"{found.hardware.cpu_hz[0] / 1e9:.3g}", f"{there.mean():.0%}"]


@pytest.mark.usefixtures("undrawn")
def test_options_and_variants_of_a_scenario_are_heeded() -> None:
    Path("mine.toml").write_text(SCENARIO)
    tables = [run("mine.toml", *more) for more in ([], [], ["--seed", "2"])]
    assert tables[0] == tables[1] != tables[2]
    assert len(list(Path("runs").glob("devices-mine-*.png"))) == 2
    told = run("mine.toml:gone", "--set", "devices.availability=1.0", "--most", "3")
    assert told.startswith("mine-gone: ")
    assert [row[-2:] for row in table_of(told)] == [["100%", "6"]] * 3
    assert "and 1 more; --most lists more of them" in told


@pytest.mark.usefixtures("undrawn")
def test_a_device_that_is_never_there_has_no_numbers() -> None:
    Path("mine.toml").write_text(SCENARIO)
    told = run("mine.toml", "--set", "devices.availability=0.0")
    assert [row[1:5] for row in table_of(told)] == [["–"] * 4] * 4


@pytest.mark.usefixtures("undrawn")
def test_devices_without_limits_are_told_as_such() -> None:
    told = run("quickstart", "--set", "emulation.drop_probability=0.5", "--most", "1")
    assert table_of(told)[0][1:3] == ["no", "limit"]


@pytest.mark.usefixtures("undrawn")
def test_availability_that_depends_on_labels_looks_at_the_data() -> None:
    told = run("quickstart", "--set", "availability.name=label-dependent")
    assert "availability label-dependent" in told
    assert len(table_of(told)) == 20


def test_a_scenario_without_devices_is_told_what_to_add() -> None:
    with pytest.raises(UserError, match=r"add a table \[devices\]"):
        run("quickstart")


def test_a_mistyped_command_is_told_and_so_is_a_mistyped_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "shwo", "synthetic"]) == 2
    assert "No such command 'shwo'. Did you mean 'show'?" in capsys.readouterr().err
    assert main(["devices", "quickstrat"]) == 2
    assert "unknown scenario 'quickstrat': did you mean 'quickstart'?" in capsys.readouterr().err
    assert main(["devices", "nothing.toml"]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert main(["devices", "quickstart", "--png", "x.pdf"]) == 2
    assert "ends in .png" in capsys.readouterr().err


def test_the_commands_for_logs_are_listed_and_the_hidden_one_is_not() -> None:
    told = run("--help")
    assert "SCENARIO" in told
    assert "generate" in told
    assert "schedule" not in told
