from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedplat import experiment
from fedplat.arrays import FlatArrays
from fedplat.clients.app import make_client_app
from fedplat.config import load
from fedplat.models.flat import FlatModel
from fedplat.rounds import rounds
from fedplat.runtime.local import LocalGrid
from fedplat.strategies import Mean

TINY: dict[str, Any] = {
    "name": "tiny",
    "rounds": 3,
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 4},
    "model": {"name": "softmax"},
    "training": {"batch_size": 400, "lr": 0.5},
}


def trained(changes: dict[str, Any], num_rounds: int = 3, workers: int = 0) -> torch.Tensor:
    situation = experiment.build_situation(load(TINY | changes, "t"), "cpu")
    with LocalGrid(make_client_app(situation.task), situation.num_clients, workers=workers) as grid:
        *_, last = rounds(Mean(fraction_evaluate=0), grid, situation.initial, num_rounds)
    return torch.from_numpy(FlatArrays.of_record(last.arrays).vector.copy())


def test_full_batch_rounds_of_equal_clients_are_gradient_descent_on_all_the_data() -> None:
    config = load(TINY, "t")
    situation = experiment.build_situation(config, "cpu")
    parts = situation.task.parts
    model = FlatModel(situation.task.build_model())
    dataset = situation.task.dataset
    for _ in range(3):
        gradient = torch.zeros_like(model.grad)
        for part in parts:
            model.zero_grad()
            x, y = dataset.prepare(dataset.train.x[part]), torch.from_numpy(np.asarray(dataset.train.y[part]))
            torch.nn.functional.cross_entropy(model(x), y).backward()
            gradient += model.grad * len(part) / sum(map(len, parts))
        with torch.no_grad():
            model.vector -= 0.5 * gradient
    torch.testing.assert_close(trained({}), model.vector, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_momentum_that_is_kept_travels_with_the_client_between_workers(workers: int) -> None:
    changes = {"training": {"batch_size": 50, "lr": 0.1, "momentum": 0.9, "keep_optimizer": True}}
    kept = trained(changes, workers=workers)
    assert torch.equal(kept, trained(changes, workers=0))
    changes["training"]["keep_optimizer"] = False
    assert not torch.equal(kept, trained(changes, workers=workers))


def test_dropout_depends_on_the_client_and_the_round_not_on_who_ran_before() -> None:
    changes = {
        "data": {"name": "digits"},
        "model": {"name": "tests.clients.test_app:dropout_net"},
        "training": {"batch_size": 50, "lr": 0.1},
    }
    state = torch.get_rng_state()
    first = trained(changes, workers=2)
    assert torch.equal(first, trained(changes, workers=0))
    assert torch.equal(torch.get_rng_state(), state)


def dropout_net(input_shape: tuple[int, ...], num_classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(int(np.prod(input_shape)), num_classes)
    )


def test_clients_evaluate_on_their_own_samples() -> None:
    situation = experiment.build_situation(load(TINY, "t"), "cpu")
    with LocalGrid(make_client_app(situation.task), 4, workers=0) as grid:
        *_, last = rounds(Mean(), grid, situation.initial, 3)
    assert last.client_metrics is not None
    assert 0.3 < last.client_metrics["eval-acc"] <= 1
    assert last.client_metrics["eval-loss"] > 0


@pytest.mark.parametrize("model", ["resnet18"])
def test_batch_norm_statistics_are_averaged_and_counters_stay_integers(model: str) -> None:
    changes = {
        "model": {"name": model, "norm": "batch"},
        "training": {"batch_size": 8, "lr": 0.01, "steps": 1},
        "data": {"name": "tests.clients.test_app:random_images"},
        "partition": {"name": "iid", "clients": 2, "min_samples": 1},
    }
    situation = experiment.build_situation(load(TINY | changes, "t"), "cpu")
    with LocalGrid(make_client_app(situation.task), 2, workers=0) as grid:
        *_, last = rounds(Mean(fraction_evaluate=0), grid, situation.initial, 1)
    name = next(n for n in last.arrays if n.endswith("num_batches_tracked"))
    assert last.arrays[name].numpy().dtype == np.int64
    assert last.arrays[name].numpy() == 1
    variance = next(n for n in last.arrays if n.endswith("running_var"))
    assert not np.array_equal(last.arrays[variance].numpy(), situation.initial[variance].numpy())


def random_images(source):
    from fedplat.datasets.base import Dataset, Split

    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (20, 16, 16), dtype=np.uint8), rng.integers(0, 10, 20)
    split = Split(x, y)
    classes = tuple(map(str, range(10)))
    return Dataset("random", split, split, classes, (1, 16, 16), (0.5,), (0.5,))
