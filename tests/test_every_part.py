"""Every name in the catalogue does its work in a small run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedplat import experiment
from fedplat.config import load
from fedplat.engines import LocalEngine
from fedplat.registry import entries
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display
from fedplat.results.summary import summarise
from fedplat.verdicts import VERDICTS

BASE: dict[str, Any] = {
    "name": "every",
    "rounds": 3,
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 11},
    "model": {"name": "softmax"},
    "training": {"lr": 0.05},
    "attacks": [{"name": "sign-flip", "clients": [2, 5], "factor": -4.0}],
}


def run(path: Path, **changes: Any) -> tuple[Path, dict[str, Any]]:
    folder = RunFolder.open(path / "run", load({**BASE, **changes}, "every"), resume=False)
    experiment.run(folder.config, folder, engine=LocalEngine(1), device="cpu", observer=Display())
    return path / "run", summarise(folder)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", entries("strategies"))
def test_every_strategy_runs_reports_on_each_client_and_learns_something(name: str, tmp_path: Path) -> None:
    # A step to suit a short run: one thousandth per coordinate and round would hardly move the model.
    tables = {"sign-vote": {"lr": 0.02}}
    changes = {"submodels": {"public_samples": 100}} if name in ("fedconv-weights", "server-alone") else {}
    own = {n: t for n, t in tables.items() if n == name}
    out, summary = run(tmp_path, strategies=[name], strategy=own, **changes)
    clients = rows(out / name / "clients.jsonl")
    assert len(clients) == 3 * 11
    for number in (1, 2, 3):
        shares = [row["weight"] for row in clients if row["round"] == number]
        assert all(share >= 0 for share in shares)
        assert sum(shares) == pytest.approx(1) or not any(shares)
    assert {row["verdict"] for row in clients} <= {"", *VERDICTS}
    figures = summary["strategies"][name]
    assert not figures["diverged"]
    # FoolsGold takes clients with equal data for sybils; a bound of 1 hardly holds back two who send four;
    # MUD-HoG watches for three rounds before it judges.
    not_made_for_this = (
        "mean",
        "foolsgold",
        "norm-clipping",
        "mud-hog",
        "fedconv-weights",
        "fedins",
        "fedbn",
        "fedp3",
    )
    assert figures["accuracy"] > (0.05 if name in not_made_for_this else 0.3)


@pytest.mark.parametrize("name", entries("attacks"))
def test_every_attack_runs_and_its_clients_are_named(name: str, tmp_path: Path) -> None:
    out, _ = run(tmp_path, strategies=["median"], attacks=[{"name": name, "count": 2, "start": 2}])
    clients = rows(out / "median" / "clients.jsonl")
    assert {row["attack"] for row in clients} == {"", name}
    assert {row["truth"] for row in clients} <= set(VERDICTS)
    assert sum(row["status"] == "failed" for row in clients) == 0
    refused = {row["round"] for row in clients if row["status"] == "refused"}
    assert refused <= {2, 3}  # in round 1 everybody behaves


@pytest.mark.parametrize("name", entries("pre-aggregators"))
def test_every_pre_aggregator_runs_before_a_rule(name: str, tmp_path: Path) -> None:
    tables = {"krum": {"f": 1, "before": [{"name": name}]}}
    _, summary = run(tmp_path, strategies=["krum"], strategy=tables)
    assert summary["strategies"]["krum"]["accuracy"] > 0.3


class Impatient(Display):
    """Stops the run as Ctrl-C does, after some rounds."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round(self, strategy: str, record: Mapping[str, Any]) -> None:
        if record["round"] == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["fed-credit", "mud-hog", "rffl", "foolsgold", "dnc", "flame"])
def test_what_a_rule_and_colluders_remember_survives_an_interruption(name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "strategies": [name],
        "rounds": 6,
        "attacks": [{"name": "mimic", "count": 2}, {"name": "gaussian-noise", "count": 2, "start": 3}],
    }
    config = load({**BASE, **changes}, "every")
    once, twice = (RunFolder.open(tmp_path / part, config, resume=False) for part in ("once", "twice"))
    experiment.run(config, once, engine=LocalEngine(1), device="cpu", observer=Display())
    with pytest.raises(KeyboardInterrupt):
        experiment.run(config, twice, engine=LocalEngine(1), device="cpu", observer=Impatient(4))
    again = RunFolder.open(tmp_path / "twice", config, resume=True)
    experiment.run(config, again, engine=LocalEngine(1), device="cpu", observer=Display())
    for file in ("clients.jsonl", "model.pt"):
        assert (tmp_path / "once" / name / file).read_bytes() == (
            tmp_path / "twice" / name / file
        ).read_bytes()
