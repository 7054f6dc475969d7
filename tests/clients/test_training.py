from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from fedplat.clients.training import Evaluation, LocalTraining, batches, evaluate, train_one
from fedplat.models import build, loss_fn
from fedplat.models.cnn import hfl_cnn
from fedplat.models.dense import mlp, softmax_regression
from fedplat.models.flat import FlatModel
from fedplat.models.lstm import char_lstm
from fedplat.rng import generator, seeded_torch

DIGITS = (1, 8, 8)


def data(n: int, shape: tuple[int, ...] = DIGITS, classes: int = 4) -> tuple[Tensor, Tensor]:
    with seeded_torch(7, "test"):
        return torch.randn(n, *shape), torch.randint(0, classes, (n,))


def model(seed: int = 1) -> FlatModel:
    return FlatModel(build(mlp, DIGITS, 4, seed=seed, hidden=(17,)))


def plain_training(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: list[Any],
    x: Tensor,
    y: Tensor,
    clip: float | None,
) -> float:
    total, seen = 0.0, 0
    for batch in plan:
        optimizer.zero_grad()
        loss = loss_fn(module(x[batch]), y[batch])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        total, seen = total + loss.item() * len(batch), seen + len(batch)
    return total / seen


SETTINGS: list[dict[str, Any]] = [
    {"lr": 0.3},
    {"lr": 0.3, "weight_decay": 0.01},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    {"lr": 0.01, "optimizer": "adam"},
    {"lr": 0.01, "optimizer": "adam", "weight_decay": 0.01},
    {"lr": 0.3, "max_grad_norm": 0.2},
]


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_training_equals_torch_optim_over_the_separate_parameters(options: dict[str, Any]) -> None:
    x, y = data(43)
    training = LocalTraining(epochs=3, batch_size=8, **options)
    flat, module = model(), build(mlp, DIGITS, 4, seed=1, hidden=(17,))
    kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.SGD
    names = {"lr", "momentum", "weight_decay", "nesterov"} & options.keys()
    optimizer = kind(module.parameters(), **{name: options[name] for name in names})
    plan = batches(43, training, generator(3, "batches"))
    loss = plain_training(module, optimizer, plan, x, y, training.max_grad_norm)
    result = train_one(flat, training, x, y, generator(3, "batches"))
    expected = torch.cat([p.detach().flatten() for p in module.parameters()])
    tolerance = 0 if options == {"lr": 0.3} else 1e-6
    torch.testing.assert_close(flat.vector, expected, atol=tolerance, rtol=tolerance)
    assert result.loss == pytest.approx(loss, abs=1e-6)
    assert (result.samples, result.steps) == (3 * 43, len(plan)) == (129, 18)


@pytest.mark.parametrize("options", [*SETTINGS[:1], *SETTINGS[3:5]], ids=str)
def test_keeping_the_optimizer_equals_one_that_never_stopped_to_the_bit(options: dict[str, Any]) -> None:
    x, y = data(30)
    whole, parts = model(), model()
    train_one(whole, LocalTraining(epochs=3, batch_size=8, **options), x, y, generator(3, "batches"))
    rng, state = generator(3, "batches"), None
    for _ in range(3):
        training = LocalTraining(epochs=1, batch_size=8, keep_optimizer=True, **options)
        state = train_one(parts, training, x, y, rng, state).optimizer_state
        assert state is not None
        state = {name: value.copy() for name, value in state.items()}
    assert torch.equal(whole.vector, parts.vector)


def test_without_keep_optimizer_momentum_starts_afresh_and_no_state_is_returned() -> None:
    x, y = data(30)
    kept = LocalTraining(batch_size=8, momentum=0.9, keep_optimizer=True)
    state = train_one(model(), kept, x, y, generator(3, "batches")).optimizer_state
    first, second = model(), model()
    training = LocalTraining(batch_size=8, momentum=0.9)
    result = train_one(first, training, x, y, generator(3, "batches"), state)
    train_one(second, training, x, y, generator(3, "batches"))
    assert result.optimizer_state is None
    assert torch.equal(first.vector, second.vector)


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"optimizer": "adam"}], ids=str)
def test_a_returned_optimizer_state_is_a_copy(options: dict[str, Any]) -> None:
    x, y = data(30)
    training = LocalTraining(batch_size=8, lr=0.01, keep_optimizer=True, **options)
    flat = model()
    state = train_one(flat, training, x, y, generator(3, "batches")).optimizer_state
    assert state is not None
    saved = {name: value.copy() for name, value in state.items()}
    train_one(flat, training, x, y, generator(4, "batches"), state)
    assert all(np.array_equal(state[name], saved[name]) for name in saved)


def test_an_optimizer_state_of_another_kind_or_size_is_refused() -> None:
    x, y = data(8)
    training = LocalTraining(momentum=0.5, keep_optimizer=True)
    with pytest.raises(ValueError, match=r"shape \(3,\), expected"):
        train_one(model(), training, x, y, generator(1, "batches"), {"momentum_buffer": np.zeros(3)})
    with pytest.raises(ValueError, match="does not belong to 'sgd'"):
        train_one(model(), training, x, y, generator(1, "batches"), {"exp_avg": np.zeros(3)})


def test_training_lowers_the_loss_of_an_image_net_and_of_a_text_net() -> None:
    x, y = data(20, (1, 16, 16))
    image = FlatModel(build(hfl_cnn, (1, 16, 16), 4, seed=1))
    tokens = torch.arange(24).remainder(5).view(4, 6)
    text = FlatModel(build(char_lstm, (5,), 5, seed=1, hidden=12))
    training = LocalTraining(epochs=20, batch_size=10, optimizer="adam", lr=0.01)
    for flat, inputs, targets in ((image, x, y), (text, tokens[:, :-1], tokens[:, 1:])):
        before = evaluate(flat, inputs, targets, 5)
        train_one(flat, training, inputs, targets, generator(1, "batches"))
        assert evaluate(flat, inputs, targets, 5).loss < 0.8 * before.loss


def test_dropout_repeats_inside_seeded_torch_and_the_global_generator_is_not_touched() -> None:
    x, y = data(20, (1, 16, 16))
    training = LocalTraining(batch_size=5)
    before = torch.get_rng_state()
    vectors = []
    for seed in (1, 1, 2):
        flat = FlatModel(build(hfl_cnn, (1, 16, 16), 4, seed=1, dropout=0.5))
        with seeded_torch(seed, "dropout"):
            train_one(flat, training, x, y, generator(1, "batches"))
        vectors.append(flat.vector)
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])
    assert torch.equal(before, torch.get_rng_state())


def test_no_number_is_read_off_the_device_while_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Tensor) -> float:
        raise AssertionError("item() waits for the device")

    x, y = data(20)
    monkeypatch.setattr(torch.Tensor, "item", forbidden)
    for options in SETTINGS:
        train_one(model(), LocalTraining(batch_size=5, **options), x, y, generator(1, "batches"))


def test_a_client_without_samples_changes_nothing() -> None:
    flat, (x, y) = model(), data(0)
    before = flat.vector.clone()
    result = train_one(flat, LocalTraining(steps=5), x, y, generator(1, "batches"))
    assert torch.equal(flat.vector, before)
    assert (result.samples, result.steps) == (0, 0)
    assert np.isnan(result.loss)


def test_diverging_training_reports_it_and_does_not_raise() -> None:
    x, y = data(20)
    result = train_one(model(), LocalTraining(epochs=9, lr=1e30), x * 1e10, y, generator(1, "batches"))
    assert not np.isfinite(result.loss)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 60), size=st.integers(1, 70), epochs=st.integers(1, 3), drop_last=st.booleans())
def test_every_epoch_visits_each_sample_once_except_a_dropped_rest(
    n: int, size: int, epochs: int, drop_last: bool
) -> None:
    training = LocalTraining(epochs=epochs, batch_size=size, drop_last=drop_last)
    plan = batches(n, training, generator(0, "batches"))
    dropped = n % size if drop_last and n >= size else 0
    seen = np.bincount(np.concatenate(plan), minlength=n)
    assert seen.sum() == epochs * (n - dropped)
    assert seen.max() <= epochs
    assert all(len(batch) == min(size, n) for batch in plan[: (n - dropped) // size])
    assert len(plan) == epochs * -(-(n - dropped) // size)


def test_drop_last_trains_on_the_partial_batch_of_a_client_that_has_no_other() -> None:
    plan = batches(5, LocalTraining(batch_size=128, drop_last=True), generator(0, "batches"))
    assert [sorted(batch) for batch in plan] == [[0, 1, 2, 3, 4]]


def test_drop_last_gives_the_449_full_batches_of_the_mud_hog_mnist_split() -> None:
    sizes = """
        1378 1801 1350 3223 1214 2204 1859 1327 2061 1223 1791 1628 1325 1106 741 1050 2271 1787 671 1208
        1056 1226 2196 1261 1357 933 1901 1783 1306 1037 1611 986 1031 2363 2108 1503 1396 1509 920 1299
    """
    training = LocalTraining(batch_size=128, drop_last=True)
    assert sum(len(batches(int(n), training, generator(0, "batches"))) for n in sizes.split()) == 449


def test_steps_override_epochs_and_go_through_fresh_permutations() -> None:
    training = LocalTraining(epochs=9, steps=7, batch_size=4)
    plan = batches(10, training, generator(0, "batches"))
    assert [len(batch) for batch in plan] == [4, 4, 2, 4, 4, 2, 4]
    assert sorted(np.concatenate(plan[:3])) == list(range(10))
    epochs = batches(10, LocalTraining(epochs=3, batch_size=4), generator(0, "batches"))
    assert all(np.array_equal(a, b) for a, b in zip(plan, epochs, strict=False))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"lr": 0.0}, "lr"),
        ({"lr": float("inf")}, "finite"),
        ({"momentum": 1.0}, "momentum"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"optimizer": "adagrad"}, "'sgd' or 'adam'"),
        ({"learning_rate": 0.1}, "learning_rate"),
        ({"optimizer": "adam", "momentum": 0.5}, "leave them out for 'adam'"),
        ({"nesterov": True}, "nesterov needs a momentum"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LocalTraining(**options)


def test_settings_are_frozen_and_described() -> None:
    training = LocalTraining()
    with pytest.raises(ValidationError):
        training.lr = 0.5  # type: ignore[misc]
    assert all(field.description for field in LocalTraining.model_fields.values())


class Fixed(nn.Module):
    """Returns the given logits, whatever the weights."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        return self.logits[x]


def judged(logits: list[Any], y: list[Any], classes: int = 3, batch_size: int = 2) -> Evaluation:
    return evaluate(Fixed(torch.tensor(logits)), torch.arange(len(y)), torch.tensor(y), classes, batch_size)


def test_confusion_has_true_classes_as_rows() -> None:
    result = judged([[9.0, 0, 0], [0, 9.0, 0], [0, 9.0, 0], [0, 0, 9.0], [0, 9.0, 0]], [0, 0, 1, 1, 1])
    assert result.confusion.tolist() == [[1, 1, 0], [0, 2, 1], [0, 0, 0]]
    assert result.support.tolist() == [2, 3, 0]
    assert result.accuracy == 3 / 5
    assert (result.samples, result.undecided) == (5, 0)
    assert result.confusion.dtype == np.int64


@pytest.mark.parametrize("batch_size", [1, 7, 50, 1000])
def test_the_batch_size_does_not_change_an_evaluation(batch_size: int) -> None:
    x, y = data(50)
    flat = model()
    whole, cut = evaluate(flat, x, y, 4, 50), evaluate(flat, x, y, 4, batch_size)
    logits = flat(x)
    assert np.array_equal(whole.confusion, cut.confusion)
    assert cut.loss == pytest.approx(loss_fn(logits, y).item(), rel=1e-6)
    assert cut.accuracy == whole.accuracy == int((logits.argmax(1) == y).sum()) / 50


def test_nan_logits_are_wrong_belong_to_no_column_and_do_not_raise() -> None:
    nan = float("nan")
    result = judged([[nan, nan, nan], [0.0, nan, 1.0], [0.0, 0.0, 5.0]], [0, 1, 2])
    assert np.isnan(result.loss)
    assert result.accuracy == 1 / 3
    assert result.confusion.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert result.support.tolist() == [1, 1, 1]
    assert result.undecided == 2


def test_infinite_logits_still_name_a_class() -> None:
    inf = float("inf")
    result = judged([[0.0, inf, 0.0], [-inf, 0.0, -inf], [0.0, 1.0, -inf]], [1, 1, 2])
    assert not np.isfinite(result.loss)
    assert result.accuracy == 2 / 3
    assert result.confusion.tolist() == [[0, 0, 0], [0, 2, 0], [0, 1, 0]]


def test_text_is_judged_per_position() -> None:
    logits = [[[9.0, 0, 0], [0, 9.0, 0]], [[0, 0, 9.0], [9.0, 0, 0]]]
    result = judged(logits, [[0, 1], [2, 1]])
    assert result.accuracy == 3 / 4
    assert result.confusion.tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


def test_a_model_may_have_fewer_outputs_than_classes_but_not_more() -> None:
    assert judged([[9.0, 0, 0]], [0], classes=5).confusion.shape == (5, 5)
    with pytest.raises(ValueError, match="3 outputs for 2 classes"):
        judged([[9.0, 0, 0]], [0], classes=2)


def test_an_empty_set_has_no_accuracy() -> None:
    x, y = data(0)
    result = evaluate(model(), x, y, 4)
    assert np.isnan(result.loss)
    assert np.isnan(result.accuracy)
    assert result.confusion.sum() == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_evaluation_puts_every_layer_back_in_its_mode_and_changes_no_weight(frozen: bool) -> None:
    with seeded_torch(1, "test"):
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    flat = FlatModel(module)
    module[2].train(not frozen)
    before, modes = flat.vector.clone(), [part.training for part in module.modules()]
    x, y = data(10)
    first, second = evaluate(flat, x, y, 4), evaluate(flat, x, y, 4)
    assert first.loss == second.loss
    assert torch.equal(flat.vector, before)
    assert [part.training for part in module.modules()] == modes
    assert not flat.grad.any()


def test_the_modes_come_back_even_if_the_model_fails() -> None:
    flat = FlatModel(build(softmax_regression, DIGITS, 4, seed=1))
    flat.module.train()
    x, y = data(4, (1, 9, 9))
    with pytest.raises(RuntimeError):
        evaluate(flat, x, y, 4)
    assert all(part.training for part in flat.module.modules())
