"""Personal models in whole runs: what is recorded, resumed, sent, and never trained on."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message

from fedplat import experiment
from fedplat.arrays import FlatArrays, Layout
from fedplat.clients.app import ExperimentApp, make_client_app
from fedplat.clients.mods.fedp3 import FedP3Mod
from fedplat.clients.personal import AFTER, PERSONAL, told
from fedplat.clients.training import evaluate
from fedplat.compression.simple import Uncompressed
from fedplat.config import ExperimentConfig, load
from fedplat.engines import LocalEngine
from fedplat.errors import UserError
from fedplat.layer_map import LayerMap
from fedplat.models.flat import FlatModel
from fedplat.personal_metrics import over_clients
from fedplat.personal_setup import least_upload
from fedplat.protection import client_mods
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display
from fedplat.results.report import write_report
from fedplat.rounds import rounds
from fedplat.runtime.local import LocalGrid
from fedplat.scenario_app import ScenarioApp
from fedplat.strategies import Mean
from fedplat.strategies.fedper import SharedLayers
from fedplat.submodel_setup import public_samples

from .test_scenario_app import Told, same_results

SCENARIO: dict[str, Any] = {
    "name": "own",
    "rounds": 2,
    "data": {"name": "digits"},
    "partition": {"name": "shards", "clients": 5, "own_test": 0.3},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"lr": 0.2, "momentum": 0.5, "keep_optimizer": True},
}
KINDS: dict[str, dict[str, Any]] = {
    "fine-tuning": {"name": "fine-tuning", "epochs": 1},
    "ditto": {"name": "ditto", "strength": 0.5},
    "fedper": {"name": "fedper", "layers": 1},
}


def config_of(kinds: Mapping[str, Any] = KINDS, **changes: Any) -> ExperimentConfig:
    tables = {name: {"name": "mean", "personal": kind} for name, kind in kinds.items()}
    named = {"strategies": ["mean", *kinds], "strategy": tables}
    return load({**SCENARIO, **named, **changes}, "own.toml")


def run(path: Path, config: ExperimentConfig, engine: Any = None, observer: Display | None = None) -> Path:
    folder = RunFolder.open(path, config, resume=True)
    engine = engine or LocalEngine(1)
    experiment.run(config, folder, engine=engine, device="cpu", observer=observer or Display(), group_size=1)
    return path


def rows(path: Path, file: str = "rounds.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / file).read_text().splitlines()]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("own") / "run", config_of())


@functools.cache
def situation() -> experiment.Situation:
    return experiment.build_situation(load(SCENARIO, "own"), "cpu")


# Records -------------------------------------------------------------------------------------------------


def test_every_strategy_has_figures_of_the_global_model_and_of_own_ones(done: Path) -> None:
    for name in ("mean", *KINDS):
        first, *_, last = rows(done / name)
        assert set(last["own_tests"]) == set(last["own_tests_after"]) == {"mean", "worst-10", "spread"}
        assert "own_tests" in first
        assert "own_tests_after" not in first
        assert AFTER not in last["train"]
        told = [row["own_test_after"] for row in rows(done / name, "clients.jsonl") if row["round"] == 2]
        assert last["own_tests_after"] == pytest.approx(over_clients(told))
    # Two classes each: a model of one's own is better than that of all after two rounds.
    assert last["own_tests_after"]["mean"] > last["own_tests"]["mean"]


def test_the_global_figures_are_those_of_the_model_on_what_clients_hold_out(done: Path) -> None:
    task = situation().task
    state = torch.load(done / "mean" / "model.pt", weights_only=True)
    module = task.build_model()
    module.load_state_dict(state)
    accuracies = [evaluate(module, *task.own_tests(client), 10).accuracy for client in range(5)]
    last = rows(done / "mean")[-1]["own_tests"]
    assert last["mean"] == pytest.approx(np.mean(accuracies))
    assert last["worst-10"] == pytest.approx(min(accuracies))
    assert last["spread"] == pytest.approx(np.std(accuracies))


@pytest.mark.parametrize("kind", ["fine-tuning", "ditto"])
def test_own_models_change_nothing_of_the_global_run(kind: str, done: Path) -> None:
    files = ("mean", kind)
    models = [(done / name / "model.pt").read_bytes() for name in files]
    assert models[0] == models[1]
    shared = ("accuracy", "loss", "own_tests", "bytes_up", "bytes_down")
    lines = [[[row[key] for key in shared] for row in rows(done / name)] for name in files]
    assert lines[0] == lines[1]


def test_holding_out_and_measuring_changes_nothing_of_a_training(tmp_path: Path) -> None:
    """The same parts without anything held out give the same bits."""
    task = situation().task
    assert not set(np.concatenate(list(task.parts))) & set(np.concatenate(list(task.held_out)))
    finals = []
    for one in (task, replace(task, held_out=())):
        with LocalGrid(make_client_app(one), 5, workers=0) as grid:
            *_, last = rounds(Mean(fraction_evaluate=0), grid, situation().initial, 2)
        finals.append(FlatArrays.of_record(last.arrays).vector.tobytes())
    assert finals[0] == finals[1]


def test_fedper_without_own_layers_is_federated_averaging_bit_for_bit(done: Path, tmp_path: Path) -> None:
    config = config_of({"fedper": {"name": "fedper", "layers": 0}}, strategies=["fedper"])
    out = run(tmp_path / "run", config)
    assert (out / "fedper" / "model.pt").read_bytes() == (done / "mean" / "model.pt").read_bytes()


def test_fedpers_own_layers_never_leave_the_client(done: Path) -> None:
    layout = layout_of_model()
    head = LayerMap.of(layout).arrays_of([head_name()])
    own_bytes = sum(layout.by_name[name].stop - layout.by_name[name].start for name in head) * 4
    shared, whole = rows(done / "fedper")[-1], rows(done / "mean")[-1]
    assert whole["bytes_up"] - shared["bytes_up"] == 5 * own_bytes
    assert whole["bytes_down"] - shared["bytes_down"] == 5 * own_bytes
    new = torch.load(done / "fedper" / "model.pt", weights_only=True)
    before = FlatArrays.of_record(situation().initial)
    for name, tensor in new.items():
        same = np.array_equal(tensor.numpy(), before.view(name))
        assert same == (name in head)


def layout_of_model() -> Layout:
    return FlatArrays.of_record(situation().initial).layout


def head_name() -> str:
    return LayerMap.of(layout_of_model()).head.name


def test_replies_to_fedper_hold_the_shared_layers_and_the_state_the_others() -> None:
    task = situation().task
    head = LayerMap.of(layout_of_model()).arrays_of([head_name()])
    strategy = Mean(submodels=SharedLayers(head), fraction_evaluate=0)
    config = ConfigRecord({PERSONAL: told("fedper", {"layers": 1})})
    with LocalGrid(make_client_app(task), 5, workers=0) as grid:
        messages = list(strategy.configure_train(1, situation().initial, config, grid))
        replies = list(grid.send_and_receive(messages))
        states = grid.node_states()
    for one in [*messages, *replies]:
        assert not set(one.content["arrays"]) & head
        assert set(one.content["arrays"]) | head == set(layout_of_model().by_name)
    assert all(b"fedplat.own-model" in state for state in states.values())


# Resume, engines -----------------------------------------------------------------------------------------


class Impatient(Display):
    def __init__(self, strategy: str) -> None:
        self.strategy = strategy

    def round(self, strategy: str, record: Mapping[str, Any]) -> None:
        if strategy == self.strategy and record["round"] == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["ditto", "fedper"])
def test_own_models_survive_an_interruption_to_the_bit(kind: str, done: Path, tmp_path: Path) -> None:
    config = config_of({kind: KINDS[kind]}, strategies=[kind])
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", config, observer=Impatient(kind))
    out = run(tmp_path / "run", config)
    for key in ("own_tests_after", "own_tests", "accuracy"):
        assert [row.get(key) for row in rows(out / kind)] == [row.get(key) for row in rows(done / kind)]
    assert (out / kind / "clients.jsonl").read_text() == (done / kind / "clients.jsonl").read_text()
    assert (out / kind / "model.pt").read_bytes() == (done / kind / "model.pt").read_bytes()


def test_clients_that_are_told_everything_give_the_same_bits(done: Path, tmp_path: Path) -> None:
    config = config_of()
    out = run(tmp_path / "told", config, Told(ScenarioApp(simulation=True)))
    assert same_results(done, out, config.strategies)
    for name in config.strategies:
        assert rows(out / name)[-1]["own_tests_after"] == rows(done / name)[-1]["own_tests_after"]


def test_fedp3_runs_on_both_kinds_of_clients_with_the_same_bits(tmp_path: Path) -> None:
    named: dict[str, Any] = {
        "strategies": ["fedp3", "private"],
        "strategy": {
            "fedp3": {"submodels": {"name": "fedp3", "layers": "lower-b", "p": 0.5}},
            "private": {
                "name": "fedp3",
                "submodels": {
                    "name": "fedp3", "layers": "opu2", "dp_clip": 1.0, "dp_noise": 1.0, "dp_delta": 1e-4,
                },
            },
        },
        "model": {"name": "mlp", "hidden": [16, 12, 8]},
    }  # fmt: skip
    config = load({**SCENARIO, **named}, "own.toml")
    known = run(tmp_path / "known", config)
    out = run(tmp_path / "told", config, Told(ScenarioApp(simulation=True)))
    assert same_results(known, out, config.strategies)
    last = rows(known / "fedp3")[-1]
    assert last["bytes_up"] < last["bytes_down"]
    assert "own_tests_after" in last
    private = rows(known / "private")[-1]
    assert private["diagnostics"]["epsilon"] > 0
    assert "own_tests_after" not in private  # clients tell nothing that noise does not protect


def test_noise_of_clients_that_are_no_simulation_does_not_repeat() -> None:
    config = load(SCENARIO, "own")
    for simulation, seed in ((True, 1), (False, None)):
        _, outer = client_mods(config, simulation=simulation)
        (mod,) = [mod for mod in outer if isinstance(mod, FedP3Mod)]
        assert mod.noise_seed == seed


# Samples -------------------------------------------------------------------------------------------------


def test_held_out_samples_are_never_trained_on_nor_the_servers() -> None:
    task = situation().task
    held = np.concatenate(list(task.held_out))
    garbage = task.dataset.train.x.copy()
    garbage[held] = 255
    spoilt = replace(task.dataset, train=replace(task.dataset.train, x=garbage))
    finals = []
    for dataset in (task.dataset, spoilt):
        one = replace(task, dataset=dataset)
        with LocalGrid(make_client_app(one), 5, workers=0) as grid:
            config = ConfigRecord({PERSONAL: told("ditto", {"strength": 0.1})})
            *_, last = rounds(Mean(fraction_evaluate=0), grid, situation().initial, 1, train_config=config)
            finals.append((FlatArrays.of_record(last.arrays).vector.tobytes(), grid.node_states()))
    assert finals[0] == finals[1]
    server = task.for_server()
    assert len(server.dataset.train) == len(task.dataset.train) - len(held)
    x, _ = public_samples(replace(task, dataset=spoilt).for_server(), 900)()
    whole = spoilt.prepare(np.full_like(garbage[:1], 255))
    assert not (x == whole).flatten(1).all(dim=1).any()
    assert replace(task, held_out=()).for_server().dataset is task.dataset


def test_pooling_spreads_the_test_set_too_and_tests_on_what_is_held_out() -> None:
    plain = situation().task.dataset
    changes = {"partition": {**SCENARIO["partition"], "pool": True}}
    task = experiment.build_task(load({**SCENARIO, **changes}, "own"), "cpu")
    assert len(task.dataset.train) == len(plain.train) + len(plain.test)
    assert len(task.dataset.test) == sum(map(len, task.held_out))
    assert sum(map(len, task.parts)) + sum(map(len, task.held_out)) == len(task.dataset.train)
    sizes = [
        len(test) / (len(test) + len(train)) for test, train in zip(task.held_out, task.parts, strict=True)
    ]
    assert sizes == pytest.approx([0.3] * 5, abs=0.01)


# Attackers, Flower's own strategies, reports ---------------------------------------------------------------


def test_attackers_do_not_count_and_flowers_own_strategies_have_global_figures(tmp_path: Path) -> None:
    config = load(
        {
            **SCENARIO,
            "strategies": ["mean", "own"],
            "strategy": {
                "own": {"name": "flwr.serverapp.strategy:FedAvg", "personal": {"name": "fine-tuning"}}
            },
            "attacks": [{"name": "label-flip", "clients": [0], "source": [1], "target": 7}],
            "rounds": 1,
        },
        "own.toml",
    )
    out = run(tmp_path / "run", config)
    told = [row for row in rows(out / "mean", "clients.jsonl") if row["client"] != 0]
    last = rows(out / "mean")[-1]
    assert last["own_tests_after"]["mean"] == pytest.approx(np.mean([row["own_test_after"] for row in told]))
    # Own models are asked for by the run, so they are measured for any strategy.
    assert {"own_tests", "own_tests_after"} <= rows(out / "own")[-1].keys()
    folder = RunFolder.existing(out)
    summary = write_report(folder)
    assert summary["strategies"]["own"]["own_tests"] == rows(out / "own")[-1]["own_tests"]
    text = (out / "report.md").read_text()
    for words in ("own tests %", "own models, worst 10 %", "Own models are", "own_test = 0.3"):
        assert words in text


# Devices ---------------------------------------------------------------------------------------------------


def test_the_least_upload_is_a_lower_bound_for_parts_of_models() -> None:
    task = situation().task
    least = least_upload(Uncompressed(), task)
    whole = situation().initial
    assert least(whole) == layout_of_model().nbytes
    sent = ArrayRecord({"values": Array(np.zeros(layout_of_model().num_params, np.float32))})
    layers = LayerMap.of(layout_of_model())
    smallest = min(
        sum(4 * (layout_of_model().by_name[n].stop - layout_of_model().by_name[n].start)
            for n in layers.arrays_of((layer.name, head_name())))
        for layer in layers.hidden
    )  # fmt: skip
    assert least(sent) == smallest


def test_fedp3_on_emulated_devices_is_not_late_by_an_upload_that_it_does_not_make(tmp_path: Path) -> None:
    """A deadline that suits the part that is sent back, and not a whole model's upload."""
    changes: dict[str, Any] = {
        "strategies": ["fedp3"],
        "strategy": {"fedp3": {"submodels": {"name": "fedp3", "layers": "lower-b", "p": 0.5}}},
        "model": {"name": "mlp", "hidden": [16, 12, 8]},
        "devices": {"name": "classes", "levels": [SLOW]},
        "emulation": {"deadline_s": 39.0},
        "rounds": 1,
    }
    config = load({**SCENARIO, **changes}, "own.toml")
    last = rows(run(tmp_path / "run", config) / "fedp3")[-1]
    assert last["accepted"] == 5


# 4,520 bytes up at most, and 5,212 down: 36 and 42 seconds at this speed.
SLOW: dict[str, Any] = {"name": "slow", "memory_mb": 1000, "down_mbps": 1000, "up_mbps": 0.001}


# Mistakes --------------------------------------------------------------------------------------------------

EDGES = {"name": "edges", "edges": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": {**SCENARIO["partition"], "own_test": 0}, "personal": {"name": "ditto"}}, "own_test"),
        ({"partition": {**SCENARIO["partition"], "own_test": 0, "pool": True}}, "partition.pool"),
        ({"personal": {"name": "dito"}}, "ditto"),
        ({"personal": {"name": "fedper"}, "topology": EDGES}, "shared layers alone"),
        ({"personal": {"name": "fedper"}, "aggregation": {"secure_groups": 2}}, "secure_groups"),
        ({"personal": {"name": "ditto"}, "submodels": {"name": "heterofl"}}, "whole models"),
        ({"personal": {"name": "fedplat.clients.personal:Ditto"}}, "import path"),
        ({"submodels": {"name": "fedp3"}, "topology": EDGES}, "parts of them"),
        ({"submodels": {"name": "fedp3"}, "privacy": {"mode": "central"}}, "'central'"),
        ({"submodels": {"name": "fedp3"}, "aggregation": {"secure_groups": 2}}, "sums"),
    ],
)
def test_mistakes_are_explained(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load({**SCENARIO, **changes}, "own.toml")


def test_clients_with_classes_that_their_backbone_has_seen_are_refused() -> None:
    backbone = {"data": "digits", "classes": [0, 1]}
    config = load({**SCENARIO, "model": {"name": "federated-ssf", "backbone": backbone}}, "own.toml")
    with pytest.raises(UserError, match="clients hold classes"):
        experiment.build_task(config, "cpu")


def test_more_own_layers_than_there_are_is_explained(tmp_path: Path) -> None:
    config = config_of({"fedper": {"name": "fedper", "layers": 2}}, strategies=["fedper"])
    with pytest.raises(UserError, match="one has to be shared"):
        run(tmp_path / "run", config)


def test_scenarios_without_own_tests_are_called_what_they_were() -> None:
    plain = {key: value for key, value in SCENARIO.items() if key != "partition"}
    plain["partition"] = {"name": "shards", "clients": 5}
    config = load(plain, "own")
    assert {"personal", "own_tests"}.isdisjoint(config.to_dict())
    assert config.to_dict()["partition"].keys() == {"name", "clients", "classes_per_client", "min_samples"}
    told = config_of()
    assert load(told.to_dict(), "again").digest() == told.digest() != config.digest()
    for file in Path("experiments/scenarios").glob("mnist-clean.toml"):
        known = tomllib.loads(file.read_text())
        assert load({"name": "mnist-clean", **known}, str(file)).digest() == "1cf15bc9"


def test_a_client_refuses_nonsense_about_own_models() -> None:
    for text in ("{", json.dumps({"name": "ditto", "pull": 1}), json.dumps({"name": "a.b:c"})):
        with LocalGrid(ExperimentApp(situation().task), 5, workers=0) as grid:
            strategy = Mean(fraction_evaluate=0)
            sent = list(
                strategy.configure_train(1, situation().initial, ConfigRecord({PERSONAL: text}), grid)
            )
            replies: list[Message] = list(grid.send_and_receive(sent))
        assert all(reply.has_error() for reply in replies)


def test_a_model_is_measured_on_own_tests_only() -> None:
    model = FlatModel(situation().task.build_model())
    x, y = situation().task.own_tests(2)
    assert len(y) == len(situation().task.held_out[2])
    assert model(x).shape == (len(y), 10)
