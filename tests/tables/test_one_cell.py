"""One cell: run, failed, refused, run again and compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedplat.errors import UserError
from fedplat.tables.cells import Cell, Plan, cell_path
from fedplat.tables.check import check, choose, differences
from fedplat.tables.on_disk import entries_of, outcome_of, state_of, write_failure
from fedplat.tables.one_cell import run_cell, run_job
from fedplat.tables.runner import FolderLock, missing_jobs, share_cores

from . import fake_cell, planned


def silent(number: int, accuracy: float | None) -> None:
    pass


def made(tmp_path: Path, **options: Any) -> tuple[Plan, Cell, Path]:
    plan = planned(seeds=1, keep={"method": ["mean"], "attack": ["flip"]}, **options)
    return plan, plan.cells[0], cell_path(tmp_path, plan.cells[0].identity)


def test_a_cell_runs_is_told_of_and_has_figures(tmp_path: Path) -> None:
    plan, cell, path = made(tmp_path)
    told: list[tuple[int, float | None]] = []
    job = missing_jobs(plan, tmp_path, device="cpu")[0]
    assert run_job(job, lambda *what: told.append(what)) == ("done", "")
    assert [number for number, _ in told] == [0, 0, 1, 2]
    outcome = outcome_of(path, cell, ("accuracy", "megabytes"))
    assert (outcome.state, outcome.rounds) == ("done", 2)
    assert outcome.values["accuracy"] == told[-1][1]
    assert outcome.values["megabytes"]
    assert outcome.facts["data_fingerprint"]
    assert missing_jobs(plan, tmp_path, device="cpu") == []
    entry = entries_of(plan, tmp_path)[cell.position]
    assert entry.mean("accuracy") == outcome.values["accuracy"]


@pytest.mark.parametrize(
    ("overrides", "state", "reason"),
    [
        (("partition.min_samples=2000",), "failed", "min_samples"),
        (("data.root=/nowhere", "data.name=fashion-mnist", "data.download=false"), "failed", "/nowhere"),
        (("strategy.mean.before=[{name='nnm', f=1}]",), "refused", "less than n"),
    ],
)
def test_a_failure_is_written_down_and_not_tried_again_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], state: str, reason: str
) -> None:
    monkeypatch.delenv("FEDPLAT_DATA", raising=False)
    plan, cell, path = made(tmp_path, overrides=overrides)
    job = missing_jobs(plan, tmp_path, device="cpu")[0]
    found, why = run_job(job, silent)
    assert (found, state_of(path, cell)) == (state, state)
    assert reason in why
    assert outcome_of(path, cell, ("accuracy",)).reason == why
    assert missing_jobs(plan, tmp_path, device="cpu") == []
    assert missing_jobs(plan, tmp_path, device="cpu", retry=True) == [job]


def test_a_fault_of_the_program_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, cell, path = made(tmp_path)

    def broken(*arguments: Any, **more: Any) -> None:
        raise ZeroDivisionError("1 / 0\nand more")

    monkeypatch.setattr("fedplat.experiment.run", broken)
    job = missing_jobs(plan, tmp_path, device="cpu")[0]
    assert run_job(job, silent) == ("failed", "ZeroDivisionError: 1 / 0")
    assert "broken" in " ".join(json.loads((path / "failed.json").read_text())["traceback"])
    monkeypatch.undo()
    assert run_job(job, silent) == ("done", "")
    assert state_of(path, cell) == "done"


@pytest.fixture
def finished(tmp_path: Path) -> tuple[Plan, Cell, Path]:
    plan, cell, path = made(tmp_path)
    run_cell(cell.config, path, 1, "cpu", silent)
    return plan, cell, path


def test_a_check_of_what_nobody_touched_finds_the_same_bits(
    finished: tuple[Plan, Cell, Path], tmp_path: Path
) -> None:
    plan, cell, _ = finished
    assert choose(plan, tmp_path) == cell
    assert check(cell, tmp_path, 1, "cpu", silent) == []


def changed_model(path: Path) -> None:
    model = torch.load(path / "model.pt", weights_only=True)
    name = next(iter(model))
    model[name].view(-1)[0] = torch.nextafter(model[name].view(-1)[0], torch.tensor(9.0))
    torch.save(model, path / "model.pt")


def changed_line(path: Path) -> None:
    lines = (path / "rounds.jsonl").read_text().splitlines()
    record = json.loads(lines[1])
    record["loss"] += 1e-12
    lines[1] = json.dumps(record)
    (path / "rounds.jsonl").write_text("\n".join(lines) + "\n")


def lost_line(path: Path) -> None:
    lines = (path / "clients.jsonl").read_text().splitlines()
    (path / "clients.jsonl").write_text("\n".join(lines[:-1]) + "\n")


def garbage(path: Path) -> None:
    (path / "model.pt").write_bytes(b"no model")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (changed_model, "model.pt: "),
        (changed_line, "rounds.jsonl: round 1, first in loss"),
        (lost_line, "clients.jsonl: 3 lines, and now 4"),
        (garbage, "model.pt: cannot be read"),
    ],
)
def test_a_check_finds_whatever_was_changed(
    finished: tuple[Plan, Cell, Path], tmp_path: Path, change: Any, told: str
) -> None:
    _, cell, path = finished
    change(path / "mean")
    found = check(cell, tmp_path, 1, "cpu", silent)
    assert len(found) == 1
    assert found[0].startswith(told)


def test_wall_time_is_no_difference_but_simulated_time_is(tmp_path: Path) -> None:
    for name, seconds, simulated in (("a", 1.0, 5.0), ("b", 2.0, 5.0), ("c", 1.0, 6.0)):
        folder = tmp_path / name
        folder.mkdir()
        torch.save({"w": torch.ones(2)}, folder / "model.pt")
        row = {"round": 1, "seconds": {"train": seconds}, "simulated": {"seconds": simulated}}
        (folder / "rounds.jsonl").write_text(json.dumps(row) + "\n")
        (folder / "clients.jsonl").write_text("")
    assert differences(tmp_path / "a", tmp_path / "b") == []
    assert differences(tmp_path / "a", tmp_path / "c") == ["rounds.jsonl: round 1, first in simulated"]


def test_a_check_without_a_finished_cell_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no finished cell"):
        choose(planned(), tmp_path)


def test_begun_and_missing_cells_are_to_do_and_first_seeds_come_first(tmp_path: Path) -> None:
    plan = planned(keep={"method": ["mean"]})
    fake_cell(plan, tmp_path, ("0.5", "mean", "none"), {1: 0.9})
    fake_cell(plan, tmp_path, ("0.5", "mean", "flip"), {2: 0.9}, finished=False)
    jobs = missing_jobs(plan, tmp_path, device="auto")
    seeds = [plan.runs[job.identity].seed for job in jobs]
    assert seeds == [1, 2, 2]
    write_failure(Path(jobs[0].path), "failed", "lost")
    assert len(missing_jobs(plan, tmp_path, device="auto")) == 2


def test_cores_are_shared_and_never_promised_twice(tmp_path: Path) -> None:
    jobs = missing_jobs(planned(), tmp_path, device="cpu")
    for cores in (1, 2, 3, 8, 64):
        for wanted in (None, 1, 2, 5, 100):
            at_once, each = share_cores(jobs, wanted, cores)
            assert 1 <= at_once * each <= cores
            assert at_once <= (wanted or cores)
    assert share_cores(jobs[:1], 4, 8) == (1, 8)


def test_two_commands_do_not_work_in_one_folder(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "t"), pytest.raises(UserError, match="another 'fedplat table' is at work"):
        FolderLock(tmp_path / "t")
    with FolderLock(tmp_path / "t"):
        pass
