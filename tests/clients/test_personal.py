"""Models of the clients' own, by hand and against training without a server."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from fedplat import experiment
from fedplat.arrays import FlatArrays
from fedplat.clients.personal import Ditto, FedPer, FineTuning, OwnWork, Personal, personal_of, told
from fedplat.clients.training import train_one
from fedplat.config import load
from fedplat.errors import UserError
from fedplat.layer_map import part_of
from fedplat.models import loss_fn
from fedplat.models.flat import FlatModel
from fedplat.rng import generator
from fedplat.training_config import LocalTraining

SCENARIO: dict[str, Any] = {
    "name": "own",
    "rounds": 1,
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 4, "own_test": 0.3},
    "model": {"name": "mlp", "hidden": [8]},
    "training": {"lr": 0.2},
}


@functools.cache
def situation() -> experiment.Situation:
    return experiment.build_situation(load(SCENARIO, "own"), "cpu")


def initial() -> FlatArrays:
    return FlatArrays.of_record(situation().initial)


def other() -> FlatArrays:
    model = initial()
    rng = np.random.default_rng(3)
    return FlatArrays(
        model.layout, model.vector + rng.normal(0, 0.1, model.layout.dim).astype(np.float32), model.side
    )


def work(server_round: int = 1, client: int = 0, **training: Any) -> OwnWork:
    task = situation().task
    how = task.training.model_copy(update=training)
    return OwnWork(
        FlatModel(task.build_model()), how, lambda: task.samples(client), task.seed, (client, server_round)
    )


def alone(start: FlatArrays, server_round: int = 1, **training: Any) -> np.ndarray:
    """What training without any server gives, with the same batches."""
    task = situation().task
    model = FlatModel(task.build_model())
    model.load(start)
    rng = generator(task.seed, "personal-batches", 0, server_round)
    train_one(model, task.training.model_copy(update=training), *task.samples(0), rng)
    return model.vector.numpy().copy()


def test_ditto_without_a_pull_is_training_alone_round_after_round() -> None:
    ditto, own, by_hand = Ditto(strength=0), None, initial()
    for server_round in (1, 2, 3):
        received = initial() if server_round == 1 else other()
        own = ditto.remembered(received, received, own, work(server_round))
        by_hand = FlatArrays(by_hand.layout, alone(by_hand, server_round), by_hand.side)
    assert own is not None
    assert own.vector.tobytes() == by_hand.vector.tobytes()


def test_ditto_with_a_huge_pull_is_the_global_model() -> None:
    ditto, received = Ditto(strength=1e12), other()
    own = ditto.remembered(received, received, initial(), work())
    np.testing.assert_allclose(own.vector, received.vector, rtol=0, atol=1e-7)
    assert not np.array_equal(own.vector, initial().vector)


def test_a_step_of_ditto_is_the_proximal_one_by_hand() -> None:
    """One step on all samples: v' = (v − ηg + ηλw) / (1 + ηλ)."""
    task, own, received = situation().task, initial(), other()
    size = len(task.parts[0])
    new = Ditto(strength=2.0).remembered(received, received, own, work(batch_size=size, lr=0.1))
    module = task.build_model()
    x, y = task.samples(0)
    loss_fn(module(x), y).backward()
    grad = torch.cat(
        [parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None]
    )
    expected = (own.vector - 0.1 * grad.numpy() + 0.2 * received.vector) / 1.2
    np.testing.assert_allclose(new.vector, expected, atol=1e-6)
    # To first order in the rate, that of the gradient of the whole objective, as published.
    published = own.vector - 0.1 * (grad.numpy() + 2.0 * (own.vector - received.vector))
    assert np.abs(new.vector - published).max() < 0.1 * 2.0 * 0.1


def test_a_stronger_pull_stays_nearer_to_the_global_model() -> None:
    received = other()
    far = [
        float(
            np.linalg.norm(
                Ditto(strength=s).remembered(received, received, None, work()).vector - received.vector
            )
        )
        for s in (0.0, 0.1, 1.0, 10.0)
    ]
    assert far == sorted(far, reverse=True)
    assert far[-1] < far[0] / 2


def test_own_epochs_and_rate_are_used() -> None:
    tuned = FineTuning(epochs=2, lr=0.05).model(initial(), None, work())
    assert tuned.vector.tobytes() == alone(initial(), epochs=2, lr=0.05).tobytes()
    usual = FineTuning(epochs=1).model(initial(), None, work())
    assert usual.vector.tobytes() == alone(initial()).tobytes()


def test_nothing_that_is_given_is_changed_and_a_second_call_gives_the_same() -> None:
    received, own = other(), initial()
    before = received.vector.copy(), own.vector.copy()
    results = [
        kind.remembered(received, received, own, work()).vector.tobytes()  # type: ignore[union-attr]
        for kind in (Ditto(), Ditto())
    ]
    tuned = [FineTuning().model(received, None, work()).vector.tobytes() for _ in range(2)]
    assert results[0] == results[1]
    assert tuned[0] == tuned[1]
    assert (received.vector.tobytes(), own.vector.tobytes()) == tuple(one.tobytes() for one in before)


@pytest.mark.parametrize("layers", [0, 1])
def test_fedper_keeps_the_last_layers_and_takes_the_others(layers: int) -> None:
    kind, layout = FedPer(layers=layers), initial().layout
    local = kind.local(layout)
    assert {entry.name for entry in layout.entries if entry.name in local} == {
        entry.name for entry in layout.entries[len(layout.entries) - 2 * layers :]
    }
    kept = kind.remembered(initial(), other(), None, work())
    if not layers:
        assert kept is None
        return
    assert kept is not None
    assert kept.layout == kind.memory(layout)
    mixed = kind.model(initial(), kept, work())
    for entry in layout.entries:
        source = other() if entry.name in local else initial()
        assert np.array_equal(mixed.view(entry.name), source.view(entry.name))
    assert np.array_equal(part_of(mixed, local).vector, kept.vector)


def test_who_has_not_trained_has_the_global_model() -> None:
    for kind in (Ditto(), FedPer(), Personal()):
        assert kind.model(other(), None, work()).vector.tobytes() == other().vector.tobytes()


def test_what_is_told_comes_back() -> None:
    kind = personal_of(told("fedper", {"layers": 1}))
    assert isinstance(kind, FedPer)
    assert kind.layers == 1
    assert personal_of(told("none", {})) is None
    for text in ("{", "[]", '{"pull": 1}', '{"name": "fedper", "depth": 1}', '{"name": "ditt"}'):
        with pytest.raises(UserError):
            personal_of(text)
    with pytest.raises(UserError, match="import path"):
        personal_of(told("fedplat.clients.personal:Ditto", {}))


def test_training_settings_other_than_those_given_stay() -> None:
    training = LocalTraining(lr=0.2, steps=3, batch_size=8)
    how = dict(training.model_dump(exclude={"precision"}))
    tuned = FineTuning(epochs=1).model(initial(), None, work(**how))
    assert tuned.vector.tobytes() == alone(initial(), **{**how, "steps": None}).tobytes()
