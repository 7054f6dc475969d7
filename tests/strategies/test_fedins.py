from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

from fedplat.arrays import FlatArrays
from fedplat.clients.app import ExperimentApp
from fedplat.clients.stacked.execution import Execution
from fedplat.clients.task import ClientTask
from fedplat.clients.training import TrainResult, train_one
from fedplat.datasets.base import Source
from fedplat.datasets.subset import load
from fedplat.models import build, loss_fn
from fedplat.models.backbones import BackboneRecipe, frozen
from fedplat.models.flat import FlatModel
from fedplat.models.pool import InstancePool, federated_ssf, fedins, fully_tuned, head_only
from fedplat.rng import generator
from fedplat.rounds import Round, rounds
from fedplat.runtime.local import LocalGrid
from fedplat.strategies.baselines import Mean
from fedplat.strategies.fedins import FedBN, FedIns, LocalNorms, norm_mask, selection_figures
from fedplat.strategies.reports import ClientReport
from fedplat.strategies.submodels import SubModelScheme
from fedplat.training_config import LocalTraining

SHAPE = (1, 8, 8)
RECIPE = BackboneRecipe(
    width=4, data="digits", classes=(0, 1, 2, 3, 4), epochs=2, batch_size=64, augment="none", gate=0.0
)
CLIENTS = 4


class Telling(ExperimentApp):
    """The usual app, whose replies hold what the model tells of its training."""

    def _reply(self, message: Message, context: Context, trained: FlatArrays, result: TrainResult) -> Message:
        reply = super()._reply(message, context, trained, result)
        told = {**reply.content["metrics"], **result.metrics}
        content = RecordDict({**reply.content, "metrics": MetricRecord(told)})  # type: ignore[arg-type]
        return Message(content, reply_to=message)


def task(model: Any = fedins, lr: float = 0.05, epochs: int = 1, **settings: Any) -> ClientTask:
    if model is fedins:
        settings = {"members": 4, "chosen": 2, **settings}
    data = load(
        Source(None, Path("unused"), False, 1),
        of="digits",
        classes=(5, 6, 7, 8, 9),
        per_class=24,
        sub_domains=("plain", "inverted"),
    )
    parts = [
        np.sort(part) for part in np.array_split(generator(1, "test").permutation(len(data.train)), CLIENTS)
    ]
    training = LocalTraining(batch_size=8, lr=lr, epochs=epochs)
    return ClientTask(
        data, parts, partial(build, model, SHAPE, 5, 1, backbone=RECIPE, **settings), training, 1
    )


def run(strategy: Any, task: ClientTask, count: int = 2) -> tuple[ArrayRecord, Round]:
    """Return the model to start from, and the last round."""
    model = FlatModel(task.build_model())
    start = FlatArrays(model.layout, model.vector.numpy().copy(), model.side.numpy().copy()).to_record()
    with LocalGrid(Telling(task, Execution(False, 1, True, "known", {})), CLIENTS, workers=0) as grid:
        *_, last = rounds(strategy, grid, start, count)
    return start, last


def values(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in record.items()}


def test_only_pool_tensors_are_sent_they_change_and_the_backbone_does_not() -> None:
    here = task()
    module = here.build_model()
    assert isinstance(module, InstancePool)
    before = module.backbone.fingerprint()
    first, last = run(FedIns(), here)
    old, new = values(first), values(last.arrays)
    assert set(new) == {"gamma", "beta", "keys", "head_weight", "head_bias"}
    assert sum(array.size for array in new.values()) == module.floats
    assert all(not np.array_equal(old[name], new[name]) for name in new)
    assert frozen(RECIPE, SHAPE).fingerprint() == before
    payload = 4 * module.floats * CLIENTS
    assert payload <= last.bytes_up < 2 * payload + 8000 * CLIENTS


def test_the_new_pool_is_the_plain_mean_member_by_member_unless_weights_are_asked_for() -> None:
    here = task()
    here = ClientTask(
        here.dataset, [here.parts[0], *[p[:8] for p in here.parts[1:]]], here.build_model, here.training, 1
    )
    trained = []
    for client in range(CLIENTS):
        model = FlatModel(here.build_model())
        train_one(model, here.training, *here.samples(client), generator(1, "batches", client, 1))
        trained.append(model.vector.clone())
    sizes = torch.tensor([float(len(part)) for part in here.parts])
    layout = FlatModel(here.build_model()).layout
    for strategy, weights in ((FedIns(), torch.ones(CLIENTS)), (FedIns(weighted=True), sizes)):
        new = FlatArrays.of_record(run(strategy, here, 1)[-1].arrays, layout).vector
        expected = (torch.stack(trained) * (weights / weights.sum())[:, None]).sum(0)
        np.testing.assert_allclose(new, expected, atol=1e-6)


def test_one_member_is_federated_ssf_bit_for_bit() -> None:
    one, ssf = task(members=1, chosen=1, pull=0.0), task(federated_ssf)

    def from_the_same_numbers(model: Any, *arguments: Any, **settings: Any) -> torch.nn.Module:
        module, numbers = build(model, *arguments, **settings), one.build_model().state_dict()
        module.load_state_dict({name: numbers[name] for name in module.state_dict()})
        return module

    alike = partial(from_the_same_numbers, federated_ssf, SHAPE, 5, 1, backbone=RECIPE)
    ssf = ClientTask(ssf.dataset, ssf.parts, alike, ssf.training, 1)
    start, single = run(FedIns(), one)
    old, new = values(run(FedIns(), ssf)[1].arrays), values(single.arrays)
    assert set(new) - set(old) == {"keys"}
    assert all(np.array_equal(old[name], new[name]) for name in old)
    # Without a weight of the pull, nothing moves the key.
    np.testing.assert_allclose(new["keys"], values(start)["keys"], rtol=1e-6)


def test_the_loss_of_the_model_is_what_a_client_descends_and_others_keep_cross_entropy() -> None:
    here = task(pull=0.5)
    model, x, y = FlatModel(here.build_model()), *here.samples(0)
    one_step = LocalTraining(lr=0.1, steps=1, batch_size=len(y))
    module = here.build_model()
    assert isinstance(module, InstancePool)
    expected = float(module.training_loss(x, y).detach())
    result = train_one(model, one_step, x, y, generator(1, "test"))
    assert result.loss == pytest.approx(expected, rel=1e-5)
    head = FlatModel(task(head_only).build_model())
    plain = float(loss_fn(head.module(x), y).detach())
    result = train_one(head, one_step, x, y, generator(1, "test"))
    assert result.loss == pytest.approx(plain, rel=1e-5)
    assert result.metrics == {}
    given = train_one(
        model, one_step, x, y, generator(1, "test"), loss_of=lambda x, y: model(x).sum() * 0 + 7
    )
    assert given.loss == 7


def test_clients_and_the_server_tell_what_was_selected() -> None:
    strategy = FedIns()
    run(strategy, task())
    for report in strategy.reports:
        shares = [report.scores[f"selected.{m:02d}"] for m in range(4)]
        assert sum(shares) == pytest.approx(1)
        entropy = -sum(s * math.log(s) for s in shares if s)
        assert report.scores["selection-entropy"] == pytest.approx(entropy, abs=1e-6)
    assert 0 <= strategy.diagnostics["selection-entropy"] <= math.log(4)
    assert strategy.diagnostics["selection-entropy"] >= strategy.diagnostics["client-entropy"] - 1e-9


def test_selection_figures_by_hand() -> None:
    def report(shares: list[float], count: int, status: str = "accepted") -> ClientReport:
        told = {f"selected.{m:02d}": share for m, share in enumerate(shares)}
        return ClientReport(1, 1, status, num_examples=count, metrics={**told, "selection-entropy": 0.0})

    found = selection_figures([report([1, 0, 0], 10), report([0, 1, 0], 30), report([0, 0, 1], 5, "refused")])
    expected = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    assert found["selection-entropy"] == pytest.approx(expected)
    assert found["client-entropy"] == 0
    assert found["unused-members"] == 1
    assert found["mostly-one"] == 0.75
    assert selection_figures([]) == selection_figures([ClientReport(1, 1, "accepted", num_examples=3)]) == {}


def test_every_client_trains_even_one_with_fewer_samples_than_a_batch() -> None:
    here = task()
    here = ClientTask(here.dataset, [p[:3] for p in here.parts], here.build_model, here.training, 1)
    strategy = FedIns()
    first, last = run(strategy, here, 1)
    assert [report.status for report in strategy.reports] == ["accepted"] * CLIENTS
    assert all(report.update_norm for report in strategy.reports)
    assert not np.array_equal(values(first)["gamma"], values(last.arrays)["gamma"])


@pytest.mark.parametrize("model", [head_only, fully_tuned, federated_ssf])
def test_the_baselines_are_averaged_by_any_strategy(model: Any) -> None:
    first, last = run(Mean(), task(model))
    old, new = values(first), values(last.arrays)
    assert all(np.isfinite(array).all() for array in new.values())
    assert any(not np.array_equal(old[name], new[name]) for name in new)


def test_fedbn_keeps_norms_apart_and_averages_the_rest() -> None:
    here, strategy = task(fully_tuned), FedBN()
    first, last = run(strategy, here, 2)
    old, new = values(first), values(last.arrays)
    norms = {name for name in new if "norm" in name and "num_batches" not in name}
    assert norms
    for name in new:
        if "num_batches" not in name:
            assert np.array_equal(old[name], new[name]) == (name in norms)
    scheme = strategy.submodels
    assert isinstance(scheme, LocalNorms)
    assert sorted(scheme.norms) == list(range(CLIENTS))
    assert not np.array_equal(scheme.norms[0], scheme.norms[1])


def test_a_client_gets_its_own_norms_again_and_they_survive_a_checkpoint() -> None:
    here, strategy = task(fully_tuned), FedBN()
    _, last = run(strategy, here, 1)
    layout = FlatModel(here.build_model()).layout
    model = FlatArrays.of_record(last.arrays, layout)
    again = FedBN()
    again.load_state_dict(strategy.state_dict())
    for scheme in (strategy.submodels, again.submodels):
        assert isinstance(scheme, LocalNorms)
        for name, spec in scheme.parts_to_test(1).items():
            client = int(name.removeprefix("client-"))
            mine = scheme.extract(model, spec)
            assert np.array_equal(mine.vector[norm_mask(model)], scheme.norms[client])
            assert np.array_equal(mine.vector[~norm_mask(model)], model.vector[~norm_mask(model)])
    with pytest.raises(ValueError, match="whole model"):
        FedBN(submodels=SubModelScheme())
