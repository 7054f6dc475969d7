"""Runs of FedIns and its baselines, from the scenario to the files on disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fedplat import engines
from fedplat.config import load
from fedplat.errors import UserError
from fedplat.models import backbones
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display

from .runs import Runs

BACKBONE: dict[str, Any] = {
    "width": 4,
    "data": "digits",
    "classes": [0, 1, 2, 3, 4],
    "epochs": 4,
    "batch_size": 32,
    "augment": "none",
    "gate": 0,
}
POOL: dict[str, Any] = {
    "name": "fedplat.models.pool:fedins",
    "members": 4,
    "chosen": 2,
    "backbone": BACKBONE,
}
SCENARIO: dict[str, Any] = {
    "name": "fedins",
    "rounds": 2,
    "strategies": ["fedins"],
    "strategy": {"fedins": {"name": "fedplat.strategies.fedins:FedIns"}},
    "data": {
        "name": "fedplat.datasets.subset:load",
        "of": "digits",
        "classes": [5, 6, 7, 8, 9],
        "per_class": 24,
        "sub_domains": ["plain", "inverted"],
    },
    "partition": {
        "name": "fedplat.datasets.sub_domains:dirichlet_domains",
        "clients": 4,
        "alpha": 1.0,
        "min_samples": 4,
    },
    "model": POOL,
    "training": {"batch_size": 8, "lr": 0.1},
}
MEAN = {"strategies": ["mean"], "strategy": {}}


run = Runs(SCENARIO, group_size=1)


def records(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in folder.rounds(name)]


def test_a_pool_learns_and_sends_nothing_but_itself(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", rounds=6, training={"batch_size": 8, "lr": 0.3, "epochs": 3})
    first, *_, last = records(folder, "fedins")
    assert last["accuracy"] > first["accuracy"] + 0.15
    floats = folder.environment["parameters"]
    assert 4 * 4 * floats <= last["bytes_up"] < 4 * 4 * floats + 4 * 4000
    assert all(row["status"] == "accepted" for row in folder.clients("fedins"))


class Stop(Display):
    def round(self, strategy: str, record: dict[str, Any]) -> None:
        if record["round"] == 1:
            raise KeyboardInterrupt


def test_a_seed_gives_the_same_bits_in_two_workers_and_after_an_interruption(tmp_path: Path) -> None:
    one = run(tmp_path / "a")
    two = run(tmp_path / "b", engine=engines.LocalEngine(2))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "c", Stop())
    # Another process would have to read its backbone from the cache.
    backbones._FROZEN.clear()
    three = run(tmp_path / "c", resume=True)
    models = [(folder.path / "fedins" / "model.pt").read_bytes() for folder in (one, two, three)]
    assert models[0] == models[1] == models[2]
    assert records(one, "fedins") == records(two, "fedins") == records(three, "fedins")


@pytest.mark.parametrize(
    "changes",
    [
        {"attacks": [{"name": "sign-flip", "clients": [1]}], "strategies": ["median"], "strategy": {}},
        {"attacks": [{"name": "gradient-ascent", "clients": [1]}], **MEAN},
        {"attacks": [{"name": "alie", "clients": [0, 1]}], "strategies": ["krum"], "strategy": {}},
        {"compression": {"name": "top-k"}, **MEAN},
        {"compression": {"name": "qsgd"}},
        {"aggregation": {"secure_groups": 1}, **MEAN},
        {"privacy": {"mode": "local", "clip": 0.5, "noise_multiplier": 0.001}},
        {"security": {"signed_updates": True}},
    ],
    ids=["sign-flip", "gradient-ascent", "alie", "top-k", "qsgd", "secure", "local-privacy", "signed"],
)
def test_whatever_works_on_models_works_on_pools(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = run(tmp_path / "a", rounds=1, **changes)
    (name,) = changes.get("strategies", ["fedins"])
    assert records(folder, name)[-1]["accuracy"] >= 0
    assert all(row["status"] == "accepted" for row in folder.clients(name))


@pytest.mark.parametrize("baseline", ["head_only", "federated_ssf", "fully_tuned"])
def test_baselines_of_the_same_backbone_run_and_their_sizes_are_in_order(
    baseline: str, tmp_path: Path
) -> None:
    folder = run(
        tmp_path / "a",
        rounds=1,
        model={"name": f"fedplat.models.pool:{baseline}", "backbone": BACKBONE},
        **MEAN,
    )
    # A head of 5 classes and 16 features; two numbers for each of the 100 channels; the whole net.
    assert (
        folder.environment["parameters"]
        == {"head_only": 85, "federated_ssf": 285, "fully_tuned": 5_057}[baseline]
    )


def test_fedbn_tells_how_good_each_client_s_own_norms_are(tmp_path: Path) -> None:
    model = {"name": "fedplat.models.pool:fully_tuned", "backbone": BACKBONE}
    table = {"fedbn": {"name": "fedplat.strategies.fedins:FedBN"}}
    folder = run(tmp_path / "a", strategies=["fedbn"], strategy=table, model=model)
    parts = records(folder, "fedbn")[-1]["submodels"]
    assert set(parts) == {f"client-{client}" for client in range(4)}
    assert all(0 <= accuracy <= 1 for accuracy in parts.values())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"members": 2, "chosen": 3}, "chosen = 3 of 2 members"),
        ({"backbone": {**BACKBONE, "gate": 70}}, "gate asks for"),
        ({"backbone": {**BACKBONE, "classes": []}}, "public 'classes' or 'held_back'"),
        ({"backbone": {**BACKBONE, "kind": "convnet"}}, "conv"),
        ({"choice": "cosin"}, "cosine"),
    ],
)
def test_mistakes_are_explained(model: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        run(tmp_path / "a", model={**POOL, **model})


def test_the_scenario_survives_being_written_down(tmp_path: Path) -> None:
    config = load(SCENARIO, "fedins.toml")
    again = load(config.to_dict(), "again")
    assert again.digest() == config.digest()
    assert again.model.settings()["backbone"].classes == (0, 1, 2, 3, 4)
    assert math.isclose(again.model.settings()["pull"], 0.1)
