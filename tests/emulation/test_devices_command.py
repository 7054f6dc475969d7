from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedplat.cli.devices import app
from fedplat.emulation import DeviceLogs, generate, read_logs
from fedplat.emulation.figures import draw_logs
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
