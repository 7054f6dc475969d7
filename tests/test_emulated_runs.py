"""Runs on emulated devices, from the scenario to the files on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedplat import engines, experiment
from fedplat.compression import QSGD
from fedplat.config import load
from fedplat.emulation import DeviceSchedule, generate, write_logs
from fedplat.errors import UserError
from fedplat.models.flat import FlatModel
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display

from .runs import Runs, without_times

SCENARIO: dict[str, Any] = {
    "name": "devices",
    "rounds": 4,
    "strategies": ["mean", "median"],
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 8},
    "model": {"name": "mlp"},
    "training": {"batch_size": 32, "lr": 0.1, "momentum": 0.5, "keep_optimizer": True},
    "devices": {"name": "trace"},
    "emulation": {"deadline_s": 0.4, "overhead_mb": 500.0, "drop_probability": 0.2},
}


run = Runs(SCENARIO)


def outcomes(folder: RunFolder, strategy: str) -> list[tuple[int, int, str]]:
    return [(row["round"], row["client"], row["device"]["outcome"]) for row in folder.clients(strategy)]


def test_all_strategies_and_all_runs_of_a_seed_meet_the_same_devices(tmp_path: Path) -> None:
    first = run(tmp_path / "a")
    other = run(tmp_path / "b", strategies=["trimmed-mean"])
    for name in ("schedule.csv", "hardware.csv"):
        assert (first.path / "devices" / name).read_bytes() == (other.path / "devices" / name).read_bytes()
    met = outcomes(first, "mean")
    assert met == outcomes(first, "median") == outcomes(other, "trimmed-mean")
    assert {outcome for _, _, outcome in met} >= {"delivered", "late", "out-of-memory"}
    changed = run(tmp_path / "c", seed=2)
    assert DeviceSchedule.load(changed.path / "devices" / "schedule.csv") != DeviceSchedule.load(
        first.path / "devices" / "schedule.csv"
    )


def test_who_did_not_deliver_has_no_weight_and_the_row_says_why(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", strategies=["mean"])
    schedule = DeviceSchedule.load(folder.path / "devices" / "schedule.csv")
    for row in folder.clients("mean"):
        device, budget = row["device"], schedule[row["client"], row["round"]]
        assert budget.available
        assert device["memory_budget"] == budget.memory_bytes
        assert (row["status"] == "accepted") == (device["outcome"] == "delivered") == (row["weight"] > 0)
        if device["outcome"] == "out-of-memory":
            assert device["memory_bytes"] > budget.memory_bytes
            assert row["reason"].startswith("out of memory:")
        if device["outcome"] == "late":
            assert row["reason"].startswith("late: ")
            assert device["seconds"] == pytest.approx(0.4)
    for record in folder.rounds("mean")[1:]:
        simulated = record["simulated"]
        assert simulated["asked"] == simulated["available"] == record["accepted"] + record["failed"]
        assert simulated["delivered"] == record["accepted"]
        assert "simulated" not in record["seconds"]


class _StopsAfter(Display):
    def __init__(self, rounds: int) -> None:
        self.left = rounds

    def round(self, strategy: str, record: Mapping[str, Any]) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", compression={"name": "top-k", "fraction": 0.1})
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", _StopsAfter(3), compression={"name": "top-k", "fraction": 0.1})
    stopped = run(tmp_path / "stopped", resume=True, compression={"name": "top-k", "fraction": 0.1})
    for name in ("mean", "median"):
        assert without_times(whole.rounds(name)) == without_times(stopped.rounds(name))
        assert list(whole.clients(name)) == list(stopped.clients(name))
        ends = [torch.load(f.log(name).path / "model.pt", weights_only=True) for f in (whole, stopped)]
        assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_a_run_does_not_go_on_with_logs_that_have_changed(tmp_path: Path) -> None:
    write_logs(generate(4, 12.0, 1), tmp_path / "logs.csv")
    devices = {"name": "trace", "logs": str(tmp_path / "logs.csv")}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", _StopsAfter(2), devices=devices)
    write_logs(generate(4, 12.0, 2), tmp_path / "logs.csv")
    with pytest.raises(UserError, match=r"schedule.csv holds other devices than this run's settings give"):
        run(tmp_path / "run", resume=True, devices=devices)


def test_bytes_up_are_those_of_the_compressed_updates(tmp_path: Path) -> None:
    folder = run(
        tmp_path / "a", strategies=["mean"], compression={"name": "qsgd"},
        emulation={"deadline_s": 2.0}, devices={"name": "unlimited"},
    )  # fmt: skip
    task = experiment.build_task(folder.config, "cpu")
    layout = FlatModel(task.build_model()).layout
    for record in folder.rounds("mean")[1:]:
        assert record["bytes_up"] == 8 * (QSGD().encoded_bytes(layout) or 0)
        assert record["bytes_down"] == 8 * layout.nbytes
    assert folder.rounds("mean")[-1]["accuracy"] > 0.5


def test_availability_alone_makes_rounds_smaller(tmp_path: Path) -> None:
    changes = {"devices": {"name": "unlimited"}, "emulation": {}, "availability": {"name": "markov"}}
    folder = run(tmp_path / "a", strategies=["mean"], **changes)
    schedule = DeviceSchedule.load(folder.path / "devices" / "schedule.csv")
    asked = [record["simulated"]["asked"] for record in folder.rounds("mean")[1:]]
    assert asked == schedule.available.sum(axis=0).tolist()
    assert min(asked) < 8
    everyone = run(tmp_path / "b", strategies=["mean"], **{**changes, "emulation": {"ask": "all"}})
    assert [record["simulated"]["asked"] for record in everyone.rounds("mean")[1:]] == [8] * 4
    away = [record["simulated"]["away"] for record in everyone.rounds("mean")[1:]]
    assert away == (8 - schedule.available.sum(axis=0)).tolist()
    assert [r["accuracy"] for r in everyone.rounds("mean")] == [r["accuracy"] for r in folder.rounds("mean")]


def test_devices_are_part_of_what_makes_a_run_another_one() -> None:
    plain = {key: value for key, value in SCENARIO.items() if key not in ("devices", "emulation")}
    config = load(plain, "plain.toml")
    assert not config.emulates_devices
    assert not {"devices", "hardware", "availability", "emulation", "compression"} & config.to_dict().keys()
    digests = {
        load({**plain, **more}, "x.toml").digest()
        for more in (
            {}, {"emulation": {"deadline_s": 1.0}}, {"devices": {"name": "uniform"}},
            {"hardware": {"name": "hierfavg"}}, {"compression": {"name": "fp16"}},
        )
    }  # fmt: skip
    assert len(digests) == 5
    for raw in (SCENARIO, {**plain, "devices": {"name": "classes"}, "compression": {"name": "qsgd"}}):
        once = load(raw, "x.toml")
        assert load(json.loads(json.dumps(once.to_dict())), "x.toml").digest() == once.digest()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"devices": {"name": "traces"}}, "did you mean 'trace'"),
        ({"devices": {"name": "trace", "logs": "nowhere.csv"}}, "nowhere.csv"),
        ({"devices": {"name": "uniform", "memory_mb": [5, 1]}}, "has to go from low to high"),
        ({"emulation": {"deadline": 5}}, "did you mean 'deadline_s'"),
        ({"emulation": {"late": "later"}}, "emulation.late"),
        ({"availability": {"name": "bernoulli", "p": [0.5, 1.5]}}, "availability.p"),
        ({"compression": {"name": "top-k", "fraction": 0}}, "compression.fraction"),
        ({"compression": {"name": "fp16"}, "aggregation": {"secure_groups": 2}}, "compression.name"),
    ],
)
def test_a_wrong_scenario_says_what_is_allowed(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=told):
        run(tmp_path / "run", **changes)


@pytest.mark.slow
def test_flowers_simulation_meets_the_same_devices_and_ends_with_the_same_model(tmp_path: Path) -> None:
    changes = {"strategies": ["mean"], "compression": {"name": "qsgd"}, "rounds": 3}
    local = run(tmp_path / "local", **changes)
    with engines.of("flower-simulation", device="cpu") as engine:
        simulated = run(tmp_path / "simulated", engine=engine, **changes)
    assert without_times(local.rounds("mean")) == without_times(simulated.rounds("mean"))
    assert list(local.clients("mean")) == list(simulated.clients("mean"))


@pytest.mark.slow
def test_enforced_memory_fails_those_that_the_estimate_says_do_not_fit(tmp_path: Path) -> None:
    levels = [
        {"name": "small", "memory_mb": 80, "down_mbps": 100, "up_mbps": 100, "share": 1},
        {"name": "large", "memory_mb": 600, "down_mbps": 100, "up_mbps": 100, "share": 1},
    ]
    changes = {
        "strategies": ["mean"], "rounds": 1, "partition": {"name": "iid", "clients": 4},
        "model": {"name": "mlp", "hidden": [4000, 4000]}, "training": {"steps": 1, "batch_size": 8},
        "devices": {"name": "classes", "levels": levels},
    }  # fmt: skip
    estimated = run(tmp_path / "estimated", emulation={}, **changes)
    enforced = run(tmp_path / "enforced", emulation={"enforce": True}, **changes)
    found = outcomes(estimated, "mean")
    assert sorted(outcome for _, _, outcome in found) == ["delivered"] * 2 + ["out-of-memory"] * 2
    assert outcomes(enforced, "mean") == found
    reasons = [row["reason"] for row in enforced.clients("mean") if row["status"] == "failed"]
    assert all(reason.startswith("out of memory: training does not fit into 80 MB") for reason in reasons)
