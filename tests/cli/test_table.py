"""The flow of ``fedplat table``, with cells in this process."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedplat.cli import main
from fedplat.cli.table import chosen, parse_jobs
from fedplat.errors import UserError
from fedplat.tables import heat_map, runner
from fedplat.tables.grid_view import Grid, Lines, Progress
from fedplat.tables.one_cell import Job, run_job
from fedplat.tables.spec import read_table

from ..tables import TINY, planned


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Job]:
    """Run cells in this process; return those that were run."""
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    ran: list[Job] = []

    def run(jobs: Sequence[Job], at_once: int, cores: int, watcher: Any) -> None:
        for job in jobs:
            ran.append(job)
            watcher.start(job.identity)
            told = run_job(job, lambda n, a, i=job.identity: watcher.round(i, n, a))
            watcher.end(job.identity, *told)

    monkeypatch.setattr(runner, "run_here", run)
    monkeypatch.setattr(heat_map, "draw_heat_map", lambda plan, entries, path: path.write_bytes(b"a picture"))
    return ran


SMALL = ["table", "tiny.toml", "--rows", "mean", "--seeds", "1", "--device", "cpu"]


def test_a_table_is_run_written_and_not_run_again(
    here: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(SMALL) == 0
    output = capsys.readouterr().out
    assert "A tiny table: 2 of 2 runs to do, in tables/tiny" in output
    assert "0.5, mean, sign flip: done, accuracy" in output
    assert "(2 done, 0 running, 0 waiting" in output
    assert len(here) == 2
    names = {path.name for path in Path("tables/tiny").iterdir()}
    assert names >= {"table.md", "table.csv", "table.tex", "table.json", "heatmap.png", "cells"}
    assert main(SMALL) == 0
    assert len(here) == 2
    values = json.loads(Path("tables/tiny/table.json").read_text())
    assert values["command"] == "fedplat table tiny.toml --rows mean --seeds 1"
    assert {cell["state"] for cell in values["cells"]} == {"done"}


def test_more_seeds_keep_the_cells_that_are_there(here: list[Job]) -> None:
    main(SMALL)
    assert main([*SMALL, "--seeds", "2"]) == 0
    assert len(here) == 4
    assert len({job.identity for job in here}) == 4


def test_a_failed_cell_is_told_in_the_status_and_the_others_are_there(
    here: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    broken = TINY.replace("set = { attacks = [] }", 'set = { attacks = [], "partition.min_samples" = 2000 }')
    Path("tiny.toml").write_text(broken)
    assert main(SMALL) == 1
    output = capsys.readouterr().out
    assert "failed: 0.5, mean, none, seed 1: partition 'dirichlet'" in output
    assert "| mean | failed" in Path("tables/tiny/table.md").read_text()
    assert main(SMALL) == 1
    assert len(here) == 2
    assert "1 failed before and stay as they are; --retry runs them again" in capsys.readouterr().out
    assert main([*SMALL, "--retry"]) == 1
    assert len(here) == 3


def test_without_running_the_table_is_written_from_what_is_there(here: list[Job]) -> None:
    assert main([*SMALL, "--no-run", "--quiet"]) == 0
    assert here == []
    assert "| mean | missing" in Path("tables/tiny/table.md").read_text()


def test_ctrl_c_writes_what_is_there_and_says_how_to_go_on(
    here: list[Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_here", stop)
    assert main([*SMALL, "--out", "my table"]) == 130
    command = "fedplat table tiny.toml --rows mean --seeds 1 --out 'my table'"
    assert f"To go on:\n  {command}\n" in capsys.readouterr().err
    assert Path("my table/table.md").exists()


def test_a_check_says_whether_the_bits_are_the_same(
    here: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--check"]) == 2
    main(SMALL)
    assert main([*SMALL, "--check"]) == 0
    assert "the same bits again: 0.5, mean, " in capsys.readouterr().out
    for model in Path("tables/tiny/cells").glob("*/mean/rounds.jsonl"):
        model.write_text(model.read_text().replace('"round": 1,', '"round": 1, "loss2": 0,'))
    assert main([*SMALL, "--check"]) == 1
    assert "differs: 0.5, mean, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["table", "mud-hgo"], "did you mean 'mud-hog'?"),
        ([*SMALL, "--columns", "flop"], "unknown attack 'flop': did you mean 'flip'?"),
        ([*SMALL, "--blocks", "0.7"], "unknown block '0.7'"),
        ([*SMALL, "--jobs", "many"], "--jobs many: expected a number"),
        ([*SMALL, "--device", "gpu"], "--device"),
        ([*SMALL, "--set", "partition.cleints=3"], "did you mean 'clients'?"),
    ],
)
def test_a_typo_is_told_before_anything_runs(
    here: list[Job], capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(words) == 2
    assert told in capsys.readouterr().err
    assert not Path("tables").exists()


def test_blocks_are_found_by_value_and_jobs_may_be_an_address() -> None:
    _, table = read_table("mud-hog")
    assert chosen(table, ["mean,median"], None, ["mnist,exp4"]) == {
        "method": ["mean", "median"],
        "data": ["mnist"],
        "series": ["exp4"],
    }
    assert chosen(table, None, None, ["series=exp1,exp2"]) == {"series": ["exp1", "exp2"]}
    assert parse_jobs("ray:10.0.0.1:6379") == "10.0.0.1:6379"
    with pytest.raises(UserError, match="expected a number"):
        parse_jobs("0")


def test_the_grid_shows_what_is_done_running_waiting_and_failed() -> None:
    ticks = iter([0.0, 10.0, 10.0, 10.0, 10.0])
    made = planned(seeds=1)
    progress = Progress(made, dict.fromkeys(made.runs, "missing"), clock=lambda: next(ticks))
    first, second, third, *_ = made.runs
    console = Console(width=80, height=30, record=True, force_terminal=True, file=io.StringIO())
    grid = Grid(progress, console)
    for identity, accuracy in ((first, 0.9), (second, None)):
        grid.start(identity)
        grid.round(identity, 0, None)
        grid.round(identity, 1, accuracy)
    grid.end(first, "done", "")
    grid.end(third, "failed", "out of luck")
    console.print(grid.picture())
    text = console.export_text()
    assert "Me_dian: failed: out of luck" in text.replace("0.5, ", "").replace(", none", "")
    assert "90.0" in text
    assert "1/2" in text
    assert "failed" in text
    assert "·" in text
    # Two rounds in 10 s; one is left of the running run and two of each of the two that wait.
    assert "1 done, 1 running, 2 waiting, 1 failed, about 25 s left" in text


def test_lines_are_whole_and_tell_how_the_table_stands(capsys: pytest.CaptureFixture[str]) -> None:
    made = planned(seeds=1)
    lines = Lines(Progress(made, dict.fromkeys(made.runs, "missing")), Console(width=20))
    first = next(iter(made.runs))
    lines.start(first)
    lines.round(first, 1, 0.5)
    lines.end(first, "refused", "f is too large")
    assert capsys.readouterr().out.splitlines() == [
        "0.5, mean, none: starts",
        "0.5, mean, none: round 1/2, accuracy 50.0 %",
        "0.5, mean, none: cannot work: f is too large (0 done, 0 running, 4 waiting, 1 cannot work)",
    ]
