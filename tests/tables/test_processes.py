"""Cells in processes of their own: however many, and whatever kills them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedplat.cli import main
from fedplat.tables.cells import Options, Plan, cell_path, plan
from fedplat.tables.grid_view import Progress, Silent
from fedplat.tables.on_disk import state_of
from fedplat.tables.one_cell import run_job
from fedplat.tables.runner import missing_jobs, run_here

from . import TINY, planned, tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def contents(plan: Plan, out: Path) -> dict[str, list[bytes]]:
    """Return what must be the same bits, by run."""
    found = {}
    for identity, cell in plan.runs.items():
        folder = cell_path(out, identity) / cell.strategy
        rounds = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        kept = json.dumps([{k: v for k, v in record.items() if k != "seconds"} for record in rounds])
        files = [(folder / name).read_bytes() for name in ("model.pt", "clients.jsonl")]
        found[identity] = [*files, kept.encode()]
    return found


def run(plan: Plan, out: Path, at_once: int, cores: int) -> Progress:
    progress = Progress(plan, dict.fromkeys(plan.runs, "missing"))
    run_here(missing_jobs(plan, out, device="cpu"), at_once, cores, Silent(progress))
    return progress


def test_results_depend_neither_on_how_many_run_at_once_nor_on_their_cores(tmp_path: Path) -> None:
    made = planned(seeds=1, keep={"method": ["mean", "median"]})
    assert set(run(made, tmp_path / "one", 1, 2).states.values()) == {"done"}
    run(made, tmp_path / "two", 2, 1)
    assert contents(made, tmp_path / "one") == contents(made, tmp_path / "two")


def test_a_cell_whose_process_is_killed_has_failed_and_the_others_go_on(tmp_path: Path) -> None:
    made = planned(seeds=1, keep={"method": ["mean"]}, rounds=15)
    victim = missing_jobs(made, tmp_path, device="cpu")[0].identity

    class Killer(Silent):
        def round(self, identity: str, number: int, accuracy: float | None) -> None:
            super().round(identity, number, accuracy)
            if identity == victim and number == 3:
                for child in children_of(os.getpid()):
                    os.kill(child, signal.SIGKILL)

    progress = Progress(made, dict.fromkeys(made.runs, "missing"))
    run_here(missing_jobs(made, tmp_path, device="cpu"), 1, 1, Killer(progress))
    assert progress.states.pop(victim) == "failed"
    assert set(progress.states.values()) == {"done"}
    path = cell_path(tmp_path, victim)
    assert "SIGKILL" in json.loads((path / "failed.json").read_text())["reason"]
    jobs = missing_jobs(made, tmp_path, device="cpu", retry=True)
    assert [job.identity for job in jobs] == [victim]
    run_here(jobs, 1, 1, Silent(progress))
    assert state_of(path, made.runs[victim]) == "done"


def children_of(parent: int) -> list[int]:
    """Return the spawned interpreters of a process, but for the one that tracks shared resources."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = (stat.parent / "cmdline").read_text()
        except OSError:
            continue
        if int(fields[1]) == parent and "spawn_main" in command:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_ended_at_any_moment_goes_on_to_the_same_bits(
    tmp_path: Path, number: signal.Signals
) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(TINY.replace("rounds = 2", "rounds = 30"))
    options = Options(keep={"method": ["mean"]}, seeds=1)
    made = plan("tiny", tiny(**{"rounds = 2": "rounds = 30"}), options)
    words = ["table", str(file), "--rows", "mean", "--seeds", "1", "--jobs", "1", "--device", "cpu"]
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "fedplat", *words, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    second = list(made.runs)[1]
    records = cell_path(out, second) / "mean" / "rounds.jsonl"
    deadline = time.monotonic() + 200
    while not records.exists() or records.read_text().count("\n") < 10:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    workers = children_of(process.pid)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert f"To go on:\n  fedplat table {file}" in errors
        assert "unfinished" in (out / "table.md").read_text()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert [state_of(cell_path(out, i), cell) for i, cell in made.runs.items()] == ["done", "started"]
    first = cell_path(out, next(iter(made.runs))) / "mean" / "model.pt"
    when = first.stat().st_mtime_ns
    assert main([*words, "--out", str(out), "--quiet"]) == 0
    assert first.stat().st_mtime_ns == when
    for job in missing_jobs(made, tmp_path / "whole", device="cpu"):
        assert run_job(job, lambda number, accuracy: None) == ("done", "")
    assert contents(made, out) == contents(made, tmp_path / "whole")
