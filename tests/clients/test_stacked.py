from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedplat import registry
from fedplat.arrays import FlatArrays
from fedplat.clients.stacked import Learner, StackedTrainer, train_many
from fedplat.clients.stacked.modules import NotStackable
from fedplat.clients.training import TrainResult, train_one
from fedplat.models import build
from fedplat.models.flat import FlatModel
from fedplat.rng import generator, seeded_torch
from fedplat.training_config import LocalTraining

from ..models.zoo import plain_models

SIZES = [13, 5, 9, 13, 3]
IMAGES = {
    "cnn-mudhog-mnist": (1, 30, 30),
    "cnn-cifar": (3, 16, 16),
    "resnet18": (3, 9, 9),
    "resnet34": (3, 9, 9),
}
MODELS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in plain_models()]
MODELS += [("cnn-hfl", {"dropout": 0.5}), ("resnet18", {"norm": "batch"})]

Result = tuple[FlatArrays, TrainResult]


class Clients:
    """Some clients' samples, one common model, and both ways of training them."""

    def __init__(self, model: FlatModel, x: Tensor, y: Tensor, sizes: Sequence[int] = SIZES) -> None:
        self.model, self.x, self.y = model, x, y
        self.start = copy_of(model)
        rng = np.random.default_rng(5)
        self.parts = [rng.choice(len(y), size, replace=False) for size in sizes]

    def learner(self, i: int, state: Any = None) -> Learner:
        return Learner(self.parts[i], generator(1, "order", i), torch.Generator().manual_seed(50 + i), state)

    def together(self, training: LocalTraining, who: Sequence[int] | None = None) -> list[Result]:
        who = range(len(self.parts)) if who is None else who
        models, results = train_many(
            self.model, training, [self.start] * len(who), self.x, self.y, [self.learner(i) for i in who]
        )
        return [(kept(m), r) for m, r in zip(models, results, strict=True)]

    def one_by_one(self, training: LocalTraining) -> list[Result]:
        found = []
        for i, part in enumerate(self.parts):
            self.model.load(self.start)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(50 + i)
                result = train_one(self.model, training, self.x[part], self.y[part], generator(1, "order", i))
            found.append((copy_of(self.model), result))
        return found


def copy_of(model: FlatModel) -> FlatArrays:
    return FlatArrays(model.layout, model.vector.numpy().copy(), model.side.numpy().copy())


def kept(arrays: FlatArrays) -> FlatArrays:
    return FlatArrays(arrays.layout, arrays.vector.copy(), arrays.side.copy())


def clients_of(name: str, settings: dict[str, Any] | None = None, sizes: Sequence[int] = SIZES) -> Clients:
    text = name == "char-lstm"
    shape = (7,) if text else IMAGES.get(name, (1, 28, 28))
    target = registry.find("models", name).load()
    model = FlatModel(build(target, shape, 12 if text else 10, seed=3, **(settings or {})))
    with seeded_torch(7, "stacked"):
        x = torch.randint(0, 12, (30, *shape)) if text else torch.randn(30, *shape)
        y = torch.randint(0, 12, (30, *shape)) if text else torch.randint(0, 10, (30,))
    return Clients(model, x, y, sizes)


def dense(sizes: Sequence[int] = SIZES) -> Clients:
    return clients_of("mlp", {"hidden": (17, 9)}, sizes)


def assert_equal_up_to_rounding(ours: list[Result], theirs: list[Result], start: FlatArrays) -> None:
    errors = []
    for (a, done), (b, expected) in zip(ours, theirs, strict=True):
        errors.append(np.linalg.norm(a.vector - b.vector) / np.linalg.norm(b.vector - start.vector))
        np.testing.assert_array_equal(a.side, b.side)
        assert (done.samples, done.steps) == (expected.samples, expected.steps)
        np.testing.assert_allclose(done.loss, expected.loss, rtol=1e-4)
    # Where two values of a pool, or one and zero, are equal up to rounding, a sample may go another way.
    assert np.median(errors) < 3e-4
    assert max(errors) < 0.02


@pytest.mark.parametrize(("name", "settings"), MODELS, ids=str)
def test_every_model_trains_together_as_it_does_alone(name: str, settings: dict[str, Any]) -> None:
    # A small rate: a deep net on noise doubles differences of rounding from step to step.
    deep = name.startswith("resnet")
    clients = clients_of(name, settings, [5, 3] if deep else SIZES)
    training = LocalTraining(batch_size=4, lr=1e-4 if deep else 1e-3, momentum=0.9, weight_decay=1e-3)
    assert_equal_up_to_rounding(clients.together(training), clients.one_by_one(training), clients.start)


@pytest.mark.parametrize("name", ["mlp", "cnn-hfl"])
@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.1, "epochs": 2},
        {"lr": 0.1, "steps": 5},
        {"lr": 0.1, "drop_last": True},
        {"lr": 0.1, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
        {"lr": 0.3, "max_grad_norm": 0.2},
        {"lr": 0.3, "momentum": 0.5, "max_grad_norm": 0.2},
        {"lr": 0.01, "optimizer": "adam", "weight_decay": 0.1},
    ],
    ids=str,
)
def test_every_setting_of_the_optimiser_means_the_same_as_alone(name: str, options: dict[str, Any]) -> None:
    clients = clients_of(name, {"hidden": (17, 9)} if name == "mlp" else {})
    training = LocalTraining(batch_size=4, **options)
    assert_equal_up_to_rounding(clients.together(training), clients.one_by_one(training), clients.start)


@pytest.mark.parametrize(
    "optimizer", [{"momentum": 0.9, "lr": 0.1}, {"optimizer": "adam", "lr": 0.01}], ids=str
)
def test_an_optimiser_that_is_handed_on_is_one_uninterrupted_optimiser(optimizer: dict[str, Any]) -> None:
    clients = dense([8])
    training = LocalTraining(batch_size=4, keep_optimizer=True, **optimizer)
    rng = generator(1, "order", 0)
    learner = Learner(clients.parts[0], rng)
    (half,), (first,) = train_many(clients.model, training, [clients.start], clients.x, clients.y, [learner])
    assert first.optimizer_state is not None
    again = Learner(clients.parts[0], rng, None, first.optimizer_state)
    (end,), (second,) = train_many(clients.model, training, [kept(half)], clients.x, clients.y, [again])
    both = training.model_copy(update={"epochs": 2})
    ((whole, _),) = clients.together(both)
    np.testing.assert_array_equal(end.vector, whole.vector)
    assert second.optimizer_state is not None
    assert set(second.optimizer_state) == set(first.optimizer_state)
    # What one way of training kept, the other takes over.
    clients.model.load(half)
    x, y = clients.x[clients.parts[0]], clients.y[clients.parts[0]]
    train_one(clients.model, training, x, y, generator(1, "any"), second.optimizer_state)


@pytest.mark.parametrize("optimizer", [{"lr": 0.1}, {"optimizer": "adam", "lr": 0.01}], ids=str)
def test_dense_models_have_the_same_bits_in_every_company(optimizer: dict[str, Any]) -> None:
    clients = dense([13, 5, 9, 13, 3, 1, 8, 2])
    training = LocalTraining(batch_size=4, **optimizer)
    together = clients.together(training)
    for who in ([3], [5], [7, 0], [6, 5, 4, 3, 2, 1]):
        for i, (arrays, result) in zip(who, clients.together(training, who), strict=True):
            np.testing.assert_array_equal(arrays.vector, together[i][0].vector)
            assert result.loss == together[i][1].loss


def test_a_client_without_samples_keeps_its_model_and_others_do_not_notice() -> None:
    clients = dense([6, 0, 6])
    (a, _), (b, empty), (c, _) = clients.together(LocalTraining(batch_size=4))
    np.testing.assert_array_equal(b.vector, clients.start.vector)
    assert (empty.samples, empty.steps) == (0, 0)
    assert np.isnan(empty.loss)
    assert not np.array_equal(a.vector, c.vector)
    ((nobody, _),) = clients.together(LocalTraining(batch_size=4), [1])
    np.testing.assert_array_equal(nobody.vector, clients.start.vector)


@pytest.mark.parametrize("name", ["mlp", "cnn-hfl"])
def test_a_client_that_diverges_does_not_touch_the_others(name: str) -> None:
    clients = clients_of(name)
    training = LocalTraining(batch_size=4, lr=0.01)
    before = clients.together(training)
    own = int(np.setdiff1d(clients.parts[0], np.concatenate(clients.parts[1:]))[0])
    clients.x = clients.x.clone()
    clients.x[own] = float("nan")
    after = clients.together(training)
    assert np.isnan(after[0][0].vector).any()
    for (a, _), (b, _) in zip(before[1:], after[1:], strict=True):
        np.testing.assert_array_equal(a.vector, b.vector)


def test_dropout_masks_are_each_clients_own() -> None:
    clients = clients_of("cnn-hfl", {"dropout": 0.5}, [8, 8])
    clients.parts = [clients.parts[0]] * 2
    training = LocalTraining(batch_size=8, lr=0.1)

    def trained(first: int, second: int) -> list[FlatArrays]:
        learners = [
            Learner(clients.parts[0], generator(1, "same"), torch.Generator().manual_seed(seed))
            for seed in (first, second)
        ]
        starts = [clients.start] * 2
        models, _ = train_many(clients.model, training, starts, clients.x, clients.y, learners)
        return [kept(model) for model in models]

    a, b = trained(1, 1)
    np.testing.assert_array_equal(a.vector, b.vector)
    c, d = trained(1, 2)
    np.testing.assert_array_equal(a.vector, c.vector)
    assert not np.array_equal(c.vector, d.vector)


def test_dropout_without_a_generator_is_refused() -> None:
    clients = clients_of("cnn-hfl", {"dropout": 0.5})
    learner = Learner(clients.parts[0], generator(1, "order"))
    with pytest.raises(ValueError, match="needs a generator"):
        train_many(clients.model, LocalTraining(), [clients.start], clients.x, clients.y, [learner])


class Recurrent(nn.Module):
    """A layer that cannot be trained for many clients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, batch_first=True)
        self.fc = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.gru(x.flatten(1).unflatten(1, (-1, 3)))[0][:, -1])
        return logits


def test_what_cannot_be_stacked_is_trained_one_after_another() -> None:
    with seeded_torch(3, "recurrent"):
        model = FlatModel(Recurrent())
        x, y = torch.randn(30, 1, 3, 4), torch.randint(0, 10, (30,))
    clients = Clients(model, x, y)
    training = LocalTraining(batch_size=4, lr=0.1)
    with pytest.raises(NotStackable, match="'gru' is a GRU"):
        StackedTrainer(model.module, model.layout, training, x[:1], model.device)
    for (a, done), (b, expected) in zip(
        clients.together(training), clients.one_by_one(training), strict=True
    ):
        np.testing.assert_array_equal(a.vector, b.vector)
        assert done.loss == expected.loss


@pytest.mark.parametrize(
    "layer", [nn.LSTM(3, 4, bidirectional=True), nn.LSTM(3, 4, 2, dropout=0.5), nn.AlphaDropout(0.5)], ids=str
)
def test_layers_without_a_stacked_form_are_named(layer: nn.Module) -> None:
    model = FlatModel(nn.Sequential(nn.Flatten(), layer, nn.Linear(4, 2)))
    with pytest.raises(NotStackable, match="'1' is a"):
        StackedTrainer(model.module, model.layout, LocalTraining(), torch.zeros(1, 3), model.device)


def test_a_long_lived_trainer_forgets_the_group_before() -> None:
    clients = dense()
    training = LocalTraining(batch_size=4, lr=0.1, momentum=0.9)
    trainer = StackedTrainer(
        clients.model.module, clients.model.layout, training, clients.x[:1], clients.model.device
    )
    who = range(len(clients.parts))

    def group(chosen: Sequence[int]) -> list[FlatArrays]:
        learners = [clients.learner(i) for i in chosen]
        models, _ = trainer.train([clients.start] * len(chosen), clients.x, clients.y, learners)
        return [kept(model) for model in models]

    first, small, again = group(who), group([1, 2]), group(who)
    np.testing.assert_array_equal(small[0].vector, first[1].vector)
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.vector, b.vector)


@pytest.mark.parametrize("name", ["mlp", "cnn-hfl"])
def test_bfloat16_is_near_float32_and_keeps_float32_weights(name: str) -> None:
    clients = clients_of(name)
    full, half = (LocalTraining(batch_size=4, lr=0.01, precision=p) for p in ("float32", "bf16"))
    for ours, alone, exact in zip(
        clients.together(half), clients.one_by_one(half), clients.one_by_one(full), strict=True
    ):
        moved = np.linalg.norm(exact[0].vector - clients.start.vector)
        for rough in (ours, alone):
            error = np.linalg.norm(rough[0].vector - exact[0].vector)
            assert 1e-5 * moved < error < 0.2 * moved
            assert rough[0].vector.dtype == np.float32


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["mlp", "cnn-hfl"])
def test_a_gpu_trains_together_what_it_trains_alone(name: str) -> None:
    clients = clients_of(name)
    training = LocalTraining(batch_size=4, lr=0.01, momentum=0.9)
    expected = clients.one_by_one(training)
    clients.model = FlatModel(clients.model.module, "cuda")
    assert_equal_up_to_rounding(clients.together(training), expected, clients.start)
