from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedplat import experiment
from fedplat.clients.stacked import execution
from fedplat.clients.stacked.execution import (
    Execution,
    decide,
    known_execution,
    measured_execution,
    usual_execution,
)
from fedplat.config import load
from fedplat.engines import LocalEngine
from fedplat.errors import UserError
from fedplat.models import build
from fedplat.models.cnn import hfl_cnn
from fedplat.models.dense import mlp
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display
from fedplat.training_config import LocalTraining

TRAINING = LocalTraining(batch_size=4)
IMAGE = torch.zeros(1, 1, 28, 28)
DENSE = functools.partial(build, mlp, (1, 28, 28), 10, 1, hidden=(8,))
CONVOLUTIONS = functools.partial(build, hfl_cnn, (1, 28, 28), 10, 1)


def recurrent() -> nn.Module:
    return nn.Sequential(nn.Flatten(2), nn.GRU(784, 3))


def test_stacking_that_changes_bits_has_to_be_worth_it() -> None:
    slower = {"single": 100.0, "1": 130.0, "4": 90.0, "16": 80.0}
    assert decide(slower, exact=False) == Execution(False, 1, True, "measured", slower)
    faster = slower | {"16": 60.0}
    assert decide(faster, exact=False) == Execution(True, 16, False, "measured", faster)


def test_stacking_that_changes_no_bits_is_always_used_and_the_size_is_the_smallest_of_the_best() -> None:
    measured = {"single": 50.0, "1": 60.0, "4": 55.0, "16": 54.0}
    assert decide(measured, exact=True) == Execution(True, 4, True, "measured", measured)


def test_a_step_that_is_all_arithmetic_is_not_measured_in_groups() -> None:
    assert decide({"single": 9e5}, exact=False) == Execution(False, 1, True, "measured", {"single": 9e5})


def test_without_a_trial_only_exact_kernels_are_stacked() -> None:
    assert usual_execution(DENSE, TRAINING, IMAGE).group > 1
    assert not usual_execution(CONVOLUTIONS, TRAINING, IMAGE).stacked
    assert usual_execution(recurrent, TRAINING, IMAGE) == Execution(False, 1, True, "known", {})


def test_a_group_size_that_is_given_decides() -> None:
    assert known_execution(DENSE, TRAINING, IMAGE, 1) == Execution(True, 1, True, "given", {})
    assert known_execution(CONVOLUTIONS, TRAINING, IMAGE, 1) == Execution(False, 1, True, "given", {})
    assert known_execution(CONVOLUTIONS, TRAINING, IMAGE, 5) == Execution(True, 5, False, "given", {})
    assert known_execution(recurrent, TRAINING, IMAGE, 5) == Execution(False, 1, True, "known", {})


def test_a_trial_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measured_execution(DENSE, TRAINING, IMAGE, "cpu", tmp_path)
    assert first.source == "measured"
    assert {"single", "1", "4"} <= set(first.microseconds)
    monkeypatch.setattr(execution, "_measure", lambda *_: pytest.fail("it is known"))
    again = measured_execution(DENSE, TRAINING, IMAGE, "cpu", tmp_path)
    assert again == replace(first, source="cached")
    (path,) = (tmp_path / "group-sizes").iterdir()
    assert json.loads(path.read_text())["group"] == first.group


def test_another_batch_size_and_a_broken_record_are_measured_anew(tmp_path: Path) -> None:
    measured_execution(DENSE, TRAINING, IMAGE, "cpu", tmp_path)
    other = LocalTraining(batch_size=5)
    assert measured_execution(DENSE, other, IMAGE, "cpu", tmp_path).source == "measured"
    for path in (tmp_path / "group-sizes").iterdir():
        path.write_text("{")
    assert measured_execution(DENSE, TRAINING, IMAGE, "cpu", tmp_path).source == "measured"


CONFIG: dict[str, Any] = {
    "name": "tiny",
    "rounds": 2,
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "alpha": 0.5, "clients": 8},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"batch_size": 16, "lr": 0.1, "momentum": 0.9, "keep_optimizer": True},
    "attacks": [
        {"name": "label-flip", "count": 1},
        {"name": "sign-flip", "count": 1},
        {"name": "few-steps", "count": 1},
    ],
    "strategies": ["mean"],
}


def run_in(path: Path, changes: dict[str, Any], workers: int, group_size: int | None) -> torch.Tensor:
    config = load(CONFIG | changes, "t")
    folder = RunFolder.open(path, config, resume=True)
    experiment.run(
        config, folder, engine=LocalEngine(workers), device="cpu", observer=Display(), group_size=group_size
    )
    state = torch.load(path / "mean" / "model.pt", weights_only=True)
    return torch.cat([tensor.flatten() for tensor in state.values()])


def test_a_run_of_a_dense_model_has_the_same_bits_for_every_group_and_number_of_workers(
    tmp_path: Path,
) -> None:
    expected = run_in(tmp_path / "0", {}, workers=1, group_size=1)
    for number, (workers, size) in enumerate([(1, 3), (2, 8), (3, None)], start=1):
        assert torch.equal(run_in(tmp_path / str(number), {}, workers, size), expected)


def test_a_run_whose_groups_decide_on_bits_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    changes = {"model": {"name": "cnn-cifar"}, "rounds": 1, "partition": {"name": "iid", "clients": 17}}
    one, three = (run_in(tmp_path / str(w), changes, workers=w, group_size=2) for w in (1, 3))
    assert torch.equal(one, three)
    alone = run_in(tmp_path / "alone", changes, workers=1, group_size=1)
    torch.testing.assert_close(one, alone, rtol=1e-3, atol=1e-4)


def test_a_run_goes_on_as_it_began(tmp_path: Path) -> None:
    changes = {"model": {"name": "cnn-cifar"}, "rounds": 1}
    run_in(tmp_path, changes, workers=1, group_size=2)
    environment = RunFolder.existing(tmp_path).environment
    assert environment["execution"]["group"] == 2
    assert environment["execution"]["summary"] == "up to 2 clients at once in each worker (given)"
    task = experiment.build_situation(load(CONFIG | changes, "t"), "cpu").task
    folder = RunFolder.existing(tmp_path)
    assert experiment.execution_for(task, folder, None) == Execution(True, 2, False, "given", {})
    with pytest.raises(UserError, match="begun with --group-size 2"):
        experiment.execution_for(task, folder, 3)
