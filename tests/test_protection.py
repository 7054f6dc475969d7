"""What a scenario puts around its clients and strategies, in runs on the local engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fedplat import experiment
from fedplat.config import load
from fedplat.engines import FederationEngine, LocalEngine
from fedplat.errors import UserError
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display
from fedplat.results.report import write_report
from fedplat.runtime.local import LocalGrid
from fedplat.scenario_app import ScenarioApp
from fedplat.strategies.signed_updates import SignedUpdates
from fedplat.strategies.wrapper import innermost

BASE: dict[str, Any] = {
    "name": "protected",
    "rounds": 3,
    "strategies": ["fed-credit"],
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 8},
    "model": {"name": "softmax"},
    "training": {"lr": 0.05},
}
SIGNED = {"security": {"signed_updates": True}}
GROUPED = {"aggregation": {"secure_groups": 4}}
LOCAL = {"privacy": {"mode": "local", "clip": 0.5, "noise_multiplier": 0.5}}
CENTRAL = {"privacy": {"mode": "central", "clip": 0.5, "noise_multiplier": 0.5}}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(path: Path, observer: Display | None = None, workers: int = 1, **changes: Any) -> Path:
    folder = RunFolder.open(path, load({**BASE, **changes}, "protected"), resume=True)
    engine = LocalEngine(workers)
    experiment.run(folder.config, folder, engine=engine, device="cpu", observer=observer or Display())
    return path / folder.config.strategies[0]


def same(a: Path, b: Path) -> bool:
    return all((a / f).read_bytes() == (b / f).read_bytes() for f in ("clients.jsonl", "model.pt"))


@pytest.mark.usefixtures("undrawn")
def test_signatures_change_no_bit_of_a_run_and_colluders_sign_what_they_forge(tmp_path: Path) -> None:
    attacks = [{"name": "alie", "count": 2}, {"name": "sign-flip", "count": 1}]
    plain = run(tmp_path / "plain", attacks=attacks)
    signed = run(tmp_path / "signed", attacks=attacks, **SIGNED)
    assert same(plain, signed)
    write_report(RunFolder.existing(tmp_path / "signed"))
    assert "- Signed updates: Ed25519" in (tmp_path / "signed" / "report.md").read_text()
    assert {row["status"] for row in rows(signed / "clients.jsonl")} == {"accepted"}


def test_groups_report_every_member_and_a_rule_inside_sees_groups(tmp_path: Path) -> None:
    out = run(tmp_path, **GROUPED, strategies=["krum"], strategy={"krum": {"f": 0}})
    for number in (1, 2, 3):
        of_round = [row for row in rows(out / "clients.jsonl") if row["round"] == number]
        assert [row["client"] for row in of_round] == list(range(8))
        assert sum(row["weight"] for row in of_round) == pytest.approx(1)
        assert sum(row["weight"] > 0 for row in of_round) == 2  # Krum takes one group, and it has two members


def test_a_rule_has_to_be_able_to_work_on_the_number_of_groups() -> None:
    config = load({**BASE, **GROUPED, "strategies": ["krum"], "strategy": {"krum": {"f": 2}}}, "protected")
    situation = experiment.build_situation(config, "cpu")
    with pytest.raises(UserError, match=r"4"):
        experiment.build_strategy(config, "krum", situation, LocalEngine())


@pytest.mark.parametrize("privacy", [LOCAL, CENTRAL])
@pytest.mark.usefixtures("undrawn")
def test_epsilon_is_reported_each_round_and_grows(privacy: dict[str, Any], tmp_path: Path) -> None:
    out = run(tmp_path / "a", strategies=["mean"], **privacy)
    spent = [row["diagnostics"]["epsilon"] for row in rows(out / "rounds.jsonl")[1:]]
    assert 0 < spent[0] < spent[1] < spent[2]
    folder = RunFolder.existing(tmp_path / "a")
    summary = write_report(folder)
    assert summary["strategies"]["mean"]["epsilon"] == spent[2]
    report = (tmp_path / "a" / "report.md").read_text()
    assert (
        f"- Differential privacy: {privacy['privacy']['mode']} (clip = 0.5, noise_multiplier = 0.5" in report
    )
    assert "| epsilon |" in report
    again = run(tmp_path / "b", workers=2, strategies=["mean"], **privacy)
    assert same(out, again)


@pytest.mark.usefixtures("undrawn")
def test_a_spent_budget_ends_a_strategy_and_not_the_comparison(tmp_path: Path) -> None:
    privacy = {"privacy": {**CENTRAL["privacy"], "budget": 30.0}}
    run(tmp_path, strategies=["mean", "median"], rounds=9, **privacy)
    summary = write_report(folder := RunFolder.existing(tmp_path))
    assert folder.finished
    for name in ("mean", "median"):
        row = summary["strategies"][name]
        assert 0 < row["rounds"] < 9
        assert row["epsilon"] <= 30
        assert f"{name} (round {row['rounds']} of 9)" in (tmp_path / "report.md").read_text()


def test_what_clients_spent_is_one_account_although_their_keys_are_learned_late(tmp_path: Path) -> None:
    alone = run(tmp_path / "alone", **LOCAL)
    together = run(tmp_path / "together", **LOCAL, **SIGNED, **GROUPED)
    for a, b in zip(rows(alone / "rounds.jsonl")[1:], rows(together / "rounds.jsonl")[1:], strict=True):
        assert b["diagnostics"]["epsilon"] == a["diagnostics"]["epsilon"]


class Impatient(Display):
    def round(self, strategy: str, record: Mapping[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt


def test_a_protected_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    everything: dict[str, Any] = {**LOCAL, **SIGNED, **GROUPED, "rounds": 4}
    once = run(tmp_path / "once", **everything)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "twice", Impatient(), **everything)
    assert same(once, run(tmp_path / "twice", **everything))


def test_what_does_not_go_together_is_told_before_the_run() -> None:
    with pytest.raises(UserError, match="'central' has to see each client's update"):
        load({**BASE, **CENTRAL, **GROUPED}, "protected")
    config = load({**BASE, **GROUPED, "attacks": [{"name": "alie", "count": 2}]}, "protected")
    with pytest.raises(UserError, match="'alie' is made from what honest clients sent"):
        experiment.build_situation(config, "cpu")


def test_real_clients_that_sign_need_registered_keys(tmp_path: Path) -> None:
    config = load({**BASE, **SIGNED}, "protected")
    situation = experiment.build_situation(config, "cpu")
    with LocalGrid(ScenarioApp(), 8, workers=0) as grid:
        engine = FederationEngine(grid, device="cpu", min_nodes=3, node_wait=7.0, simulated=False)
        with pytest.raises(UserError, match=r"folder of their public keys as security\.signing_keys"):
            experiment.build_strategy(config, "fed-credit", situation, engine)
        plain = load(BASE, "protected")
        strategy = experiment.build_strategy(plain, "fed-credit", situation, engine)
        assert strategy._nodes._min_nodes == 3  # type: ignore[attr-defined]


def test_signatures_are_the_outermost_layer() -> None:
    config = load({**BASE, **SIGNED, **GROUPED, **LOCAL}, "protected")
    situation = experiment.build_situation(config, "cpu")
    strategy = experiment.build_strategy(config, "fed-credit", situation, LocalEngine())
    assert isinstance(strategy, SignedUpdates)
    assert type(innermost(strategy)).__name__ == "FedCredit"
