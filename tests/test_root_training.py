from __future__ import annotations

from typing import Any

import pytest
import torch

from fedplat import experiment
from fedplat.arrays import FlatArrays
from fedplat.clients.app import make_client_app
from fedplat.config import load
from fedplat.engines import LocalEngine
from fedplat.errors import UserError
from fedplat.root_training import root_training
from fedplat.round_records import client_records
from fedplat.rounds import rounds
from fedplat.runtime.local import LocalGrid

SCENARIO: dict[str, Any] = {
    "name": "tiny",
    "rounds": 2,
    "strategies": ["fltrust"],
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 5},
    "model": {"name": "softmax"},
    "training": {"lr": 0.05, "keep_optimizer": True, "momentum": 0.5},
}


def situation(**changes: Any) -> experiment.Situation:
    return experiment.build_situation(load({**SCENARIO, **changes}, "tiny"), "cpu")


def test_root_training_improves_the_model_and_depends_on_seed_and_round_alone() -> None:
    here = situation()

    def trained(server_round: int, seed: int = 1) -> torch.Tensor:
        train = root_training(situation(seed=seed).task, 200)
        return torch.from_numpy(FlatArrays.of_record(train(here.initial, server_round)).vector.copy())

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))
    assert not torch.equal(trained(1), trained(1, seed=2))
    record = root_training(here.task, 200)(here.initial, 1)
    before, after = here.evaluate_fn(0, here.initial), here.evaluate_fn(1, record)
    assert before is not None
    assert after is not None
    assert after["accuracy"] > before["accuracy"] + 0.3


def test_more_root_samples_than_there_are_is_a_users_mistake() -> None:
    config = load({**SCENARIO, "strategy": {"fltrust": {"root_samples": 5000}}}, "tiny")
    with pytest.raises(UserError, match="root_samples: 5000 wanted, the training set has 1438"):
        experiment.build_strategy(config, "fltrust", situation(), LocalEngine())


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_the_root_update_tells_turned_updates_from_honest_ones_even_in_the_majority(share: float) -> None:
    here = situation(attacks=[{"name": "sign-flip", "fraction": share, "factor": -4.0}])
    strategy = experiment.build_strategy(here.config, "fltrust", here, LocalEngine())
    with LocalGrid(make_client_app(here.task), 5, workers=0) as grid:
        for current in rounds(strategy, grid, here.initial, 2, evaluate_fn=here.evaluate_fn):
            last = current
    rows = client_records(last, strategy, here.task.attacks)
    assert all((row["weight"] == 0) == bool(row["attack"]) for row in rows)
    assert last.server_metrics is not None
    assert last.server_metrics["accuracy"] > 0.5
