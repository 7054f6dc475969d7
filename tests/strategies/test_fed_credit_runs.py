"""Fed-Credit in whole runs on the digits that ship with scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedplat import experiment
from fedplat.config import load
from fedplat.engines import LocalEngine
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display

SCENARIO: dict[str, Any] = {
    "name": "credit",
    "rounds": 10,
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 15, "alpha": 1.0},
    "model": {"name": "mlp", "hidden": [32]},
    "training": {"lr": 0.1, "batch_size": 16},
}


def run(path: Path, strategy: str, *attacks: dict[str, Any], rounds: int = 10) -> RunFolder:
    config = load(
        {**SCENARIO, "strategies": [strategy], "attacks": list(attacks), "rounds": rounds}, "credit"
    )
    folder = RunFolder.open(path, config, resume=False)
    experiment.run(config, folder, engine=LocalEngine(1), device="cpu", observer=Display())
    return folder


def accuracy(folder: RunFolder) -> float:
    return folder.rounds(folder.config.strategies[0])[-1]["accuracy"]


def credibility(folder: RunFolder, server_round: int, attackers: bool) -> float:
    rows = [row for row in folder.clients("fed-credit") if row["round"] == server_round]
    values = [row["credibility"] for row in rows if bool(row["attack"]) == attackers]
    return sum(values) / len(values)


def test_turned_models_cost_fed_credit_little_and_the_mean_everything(tmp_path: Path) -> None:
    attack = {"name": "sign-flip", "of": "weights", "fraction": 0.3}
    clean = accuracy(run(tmp_path / "clean", "fed-credit"))
    folder = run(tmp_path / "attacked", "fed-credit", attack)
    assert clean > 0.8
    assert accuracy(folder) > clean - 0.06
    assert accuracy(run(tmp_path / "mean", "mean", attack)) < 0.35
    assert credibility(folder, 10, attackers=True) < 0.1 < 1 < credibility(folder, 10, attackers=False)


def test_attackers_who_behave_first_earn_credibility_and_lose_it_when_they_turn(tmp_path: Path) -> None:
    folder = run(tmp_path, "fed-credit", {"name": "sign-flip", "of": "weights", "fraction": 0.3, "start": 6})
    assert credibility(folder, 5, attackers=True) > 1.5
    # Two bad rounds take away what five good ones earned.
    assert credibility(folder, 7, attackers=True) == 0
    assert accuracy(folder) > 0.75


def test_attackers_who_turn_on_and_off_regain_some_credibility_but_less_than_the_honest(
    tmp_path: Path,
) -> None:
    attack = {"name": "sign-flip", "of": "weights", "fraction": 0.3, "start": 3, "on": 1, "off": 2}
    folder = run(tmp_path, "fed-credit", attack, rounds=12)
    for attacking in (6, 9, 12):
        assert credibility(folder, attacking - 1, attackers=True) > 0.5  # after two rounds of good behaviour
        lost = credibility(folder, attacking, attackers=True)
        assert lost < 0.3
        assert lost < credibility(folder, attacking, attackers=False) - 1
    assert accuracy(folder) > 0.75
