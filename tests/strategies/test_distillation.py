from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedplat.arrays import FlatArrays
from fedplat.errors import UserError
from fedplat.models.cutting import IndexMaps, Sizes, plan_of
from fedplat.models.cutting_costs import on_meta
from fedplat.models.dense import mlp
from fedplat.models.flat import FlatModel
from fedplat.models.lstm import char_lstm
from fedplat.strategies.distillation import Distillation, DistillationSettings
from tests.models.cutting_nets import arrays_of, seeded, small_conv_net, tiny_resnet

QUICK = DistillationSettings(subnets=2, steps=8, batch=16)
NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "group": (tiny_resnet, (1, 8, 8)),
    "batch": (lambda: tiny_resnet("batch"), (1, 8, 8)),
    "conv": (small_conv_net, (1, 6, 6)),
    "lstm": (lambda: char_lstm((6,), 10, hidden=8), (6,)),
}


def case(name: str, **settings: Any) -> tuple[Distillation, FlatArrays, list[Sizes]]:
    make, shape = NETS[name]
    module = seeded(make)
    plan = plan_of(module, shape)
    subnets = [plan.prefix(0.25, {s.name: 1 for s in plan.stages}).sizes, plan.prefix(0.5).sizes]
    distillation = Distillation(on_meta(module), plan, shape, replace(QUICK, **settings), seed=4)
    return distillation, arrays_of(FlatModel(module)), subnets


def covered(distillation: Distillation, model: FlatArrays, sizes: Sizes) -> np.ndarray:
    plan = distillation.plan
    return IndexMaps(plan, model.layout)(plan.of_sizes(sizes)).coverage.numpy()


@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.parametrize("scaler", ["off", "training"])
def test_the_loss_falls_on_noise_not_trained_on(name: str, scaler: str) -> None:
    distillation, model, subnets = case(name, scaler=scaler, steps=15)
    before = model.vector.copy()
    new, figures = distillation(model, subnets, 1)
    assert figures["distillation.kept"] == 1
    assert figures["distillation.after"] < figures["distillation.before"]
    assert np.array_equal(model.vector, before)
    # Fresh noise, and another round's at that.
    other = Distillation(
        distillation._module, distillation.plan, distillation.sample_shape, replace(QUICK, scaler=scaler), 99
    )
    teacher, rng = other._flat(model), np.random.default_rng(0)
    noise = other._noise(teacher.module, rng)
    old = other._losses(teacher, other._flat(model).module, subnets, noise)
    assert np.mean(other._losses(teacher, other._flat(new).module, subnets, noise)) < np.mean(old)


@pytest.mark.parametrize("name", list(NETS))
def test_weights_of_sub_models_change_and_nothing_else(name: str) -> None:
    distillation, model, subnets = case(name)
    new, figures = distillation(model, subnets, 1)
    assert figures["distillation.kept"] == 1
    changed = new.vector != model.vector
    inside = covered(distillation, model, subnets[1])  # the other is part of it
    inside[model.layout.num_params :] = False
    assert changed.any()
    assert not changed[~inside].any()
    assert changed[inside].mean() > 0.5
    assert np.array_equal(new.side, model.side)


def test_batch_norms_statistics_and_counters_stay_bit_for_bit() -> None:
    distillation, model, subnets = case("batch")
    new, _ = distillation(model, subnets, 1)
    buffers = slice(model.layout.num_params, None)
    assert len(model.vector[buffers])
    assert len(model.side)
    assert np.array_equal(new.vector[buffers], model.vector[buffers])
    assert np.array_equal(new.side, model.side)
    # Nor are they used: others give the same.
    model.vector[buffers] = 0.7
    again, _ = distillation(model, subnets, 1)
    assert np.array_equal(again.vector[: model.layout.num_params], new.vector[: model.layout.num_params])


def test_the_loss_is_the_divergence_of_probabilities_by_hand() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(2, 3, bias=False))
    with torch.no_grad():
        module[1].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]]))
    other = nn.Sequential(nn.Flatten(), nn.Linear(2, 3, bias=False))
    with torch.no_grad():
        other[1].weight.zero_()
    distillation = Distillation(
        module, plan_of(module, (1, 1, 2)), (1, 1, 2), replace(QUICK, temperature=2.0)
    )
    x = torch.tensor([[[[1.0, 2.0]]], [[[0.5, -1.0]]]])
    logits = np.array([[1.0, 4.0, 1.0], [0.5, -2.0, -1.5]]) / 2
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = (p * (np.log(p) - np.log(1 / 3))).sum(axis=1).mean() * 4
    assert float(distillation.loss(module, other, x).detach()) == pytest.approx(expected, rel=1e-5)
    assert float(distillation.loss(module, module, x).detach()) == pytest.approx(0, abs=1e-7)


def test_the_first_step_is_that_of_adam_on_the_sub_models_own_weights() -> None:
    module = seeded(lambda: mlp((1, 2, 2), 3, hidden=(4,)))
    plan = plan_of(module, (1, 2, 2))
    model, sizes = arrays_of(FlatModel(module)), plan.prefix(0.5).sizes
    settings = DistillationSettings(subnets=1, steps=1, batch=32, lr=1e-3)
    new, figures = Distillation(module, plan, (1, 2, 2), settings, seed=2)(model, [sizes], 1)
    assert figures["distillation.kept"] == 1
    moved = np.abs(new.vector - model.vector)[new.vector != model.vector]
    # Adam's first step is the learning rate in each number, whatever the gradient, from the old weights.
    assert moved == pytest.approx(1e-3, rel=2e-2)
    half, _ = Distillation(module, plan, (1, 2, 2), replace(settings, beta=0.5), seed=2)(model, [sizes], 1)
    assert half.vector - model.vector == pytest.approx((new.vector - model.vector) / 2, abs=1e-7)


def test_the_same_seed_and_round_give_the_same_bits_and_others_do_not() -> None:
    distillation, model, subnets = case("conv")
    state = torch.get_rng_state()
    first, _ = distillation(model, subnets, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(case("conv")[0](model, subnets, 3)[0].vector, first.vector)
    assert not np.array_equal(distillation(model, subnets, 4)[0].vector, first.vector)


@pytest.mark.parametrize("bad", [np.nan, 1e38])
def test_a_model_that_breaks_is_given_back_as_it_was(bad: float) -> None:
    distillation, model, subnets = case("group")
    model.vector[:50] = bad
    new, figures = distillation(model, subnets, 1)
    assert new is model
    assert figures["distillation.kept"] == 0


def test_what_makes_things_worse_is_not_kept() -> None:
    distillation, model, subnets = case("group", lr=50.0)
    new, figures = distillation(model, subnets, 1)
    assert new is model
    assert figures["distillation.kept"] == 0


def test_noise_for_text_takes_the_place_of_the_embedding() -> None:
    distillation, model, _ = case("lstm")
    teacher = distillation._flat(model)
    noise = distillation._noise(teacher.module, np.random.default_rng(0))
    assert noise.shape == (16, 6, 8)
    lstm: Any = teacher.module
    expected = lstm.fc(lstm.lstm(noise)[0])
    other = distillation._flat(model)
    with torch.no_grad():
        other.module.embedding.weight.fill_(3.0)  # type: ignore[union-attr]
        other.module.fc.bias.add_(torch.arange(10.0))  # type: ignore[union-attr]
    loss = distillation.loss(teacher.module, other.module, noise)
    p = functional.log_softmax(expected.flatten(0, 1), dim=1)
    q = functional.log_softmax((expected + torch.arange(10.0)).flatten(0, 1), dim=1)
    assert float(loss.detach()) == pytest.approx(
        float((p.exp() * (p - q)).sum(dim=1).mean().detach()), rel=1e-4
    )
    new, _ = distillation(model, case("lstm")[2], 1)
    assert np.array_equal(new.view("embedding.weight"), model.view("embedding.weight"))
    assert not np.array_equal(new.view("lstm.weight_hh_l0"), model.view("lstm.weight_hh_l0"))


def test_a_module_is_left_as_it_is() -> None:
    make, shape = NETS["batch"]
    module = seeded(make).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = arrays_of(FlatModel(seeded(make)))
    plan = plan_of(module, shape)
    Distillation(module, plan, shape, QUICK)(model, [plan.prefix(0.5).sizes], 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(one.training for one in module.modules())


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"batch": 1}, {"beta": 1.5}, {"lr": 0.0}, {"temperature": 0.0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="distillation"):
        case("conv", **wrong)
