"""A table that runs can be followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedplat.tables import followed
from fedplat.tables.followed import Followed
from fedplat.tables.on_disk import DONE

from . import fake_cell, planned


class Told:
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> object:
        return lambda *args: self.calls.append((name, *args))


def done(out: Path) -> int:
    cells = json.loads((out / "table.json").read_text())["cells"]
    return sum(run["state"] == DONE for cell in cells for run in cell["runs"])


def test_the_table_is_there_before_its_first_run_and_follows_those_that_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(followed.time, "monotonic", lambda: now[0])
    made, told = planned(), Told()
    tmp_path.mkdir(exist_ok=True)
    watcher = Followed(told, made, tmp_path, "fedplat table tiny")
    assert done(tmp_path) == 0
    fake_cell(made, tmp_path, ("0.5", "mean", "none"), {1: 0.9})
    now[0] += 1.0
    watcher.end("some-run", DONE, "")
    assert done(tmp_path) == 0  # it was written a second ago
    now[0] += 10.0
    watcher.tick()
    assert done(tmp_path) == 1
    watcher.start("another")
    watcher.round("another", 1, 0.5)
    watcher.note("a word")
    assert told.calls == [
        ("end", "some-run", DONE, ""),
        ("tick",),
        ("start", "another"),
        ("round", "another", 1, 0.5),
        ("note", "a word"),
    ]


def test_nothing_is_written_again_while_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(followed.time, "monotonic", lambda: now[0])
    watcher = Followed(Told(), planned(), tmp_path, "fedplat table tiny")
    (tmp_path / "table.json").unlink()
    now[0] += 1000.0
    watcher.tick()
    assert not (tmp_path / "table.json").exists()
