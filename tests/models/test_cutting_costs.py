from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from fedplat.emulation.compute import sample_flops
from fedplat.emulation.memory import training_memory
from fedplat.errors import UserError
from fedplat.models import count_parameters
from fedplat.models.cutting import CutPlan, Sizes, plan_of, shrink
from fedplat.models.cutting_costs import CutCosts, on_meta, weight_uses
from fedplat.models.dense import mlp
from fedplat.models.flat import FlatModel
from fedplat.training_config import LocalTraining

from .cutting_nets import random_input
from .test_cutting_shrink import NETS

ADAM = LocalTraining(optimizer="adam", batch_size=4)


def test_the_costs_of_an_mlp_by_hand() -> None:
    module = mlp((1, 2, 2), 3, hidden=(8,))
    plan = plan_of(module, (1, 2, 2))
    costs = CutCosts(module, plan, (1, 2, 2), LocalTraining())
    cost = costs(plan.prefix(0.5).sizes)
    assert cost.parameters == 4 * 4 + 4 + 3 * 4 + 3
    assert cost.nbytes == 4 * cost.parameters
    assert cost.flops == 4 * (4 * 4) + 6 * (3 * 4)  # no gradient of the images


@pytest.mark.parametrize("name", list(NETS))
def test_costs_are_those_of_the_part_itself(name: str) -> None:
    make, shape = NETS[name]
    module = make()
    plan = plan_of(module, shape)
    costs = CutCosts(module, plan, shape, ADAM)
    for cut in (plan.full, plan.prefix(0.4, {stage.name: 1 for stage in plan.stages})):
        part, cost = shrink(module, plan, cut.sizes), costs(cut.sizes)
        assert cost.parameters == count_parameters(part)
        assert cost.nbytes == FlatModel(part).layout.nbytes
        assert cost.flops == sample_flops(part, shape)
        assert cost.memory == training_memory(part, shape, 4, ADAM).total


def test_a_smaller_part_never_costs_more() -> None:
    make, shape = NETS["resnet-group"]
    plan = plan_of(make(), shape)
    costs = CutCosts(make, plan, shape, ADAM)
    cuts = [plan.full, plan.prefix(0.5), plan.prefix(0.5, {"stage1": 1}), plan.prefix(0.25, {"stage1": 1})]
    numbers = [vars(costs(cut.sizes)).values() for cut in cuts]
    for larger, smaller in pairwise(numbers):
        assert all(a > b for a, b in zip(larger, smaller, strict=True))


@pytest.mark.parametrize("name", [name for name in NETS if name != "conv"])
def test_the_weights_of_layers_explain_all_flops(name: str) -> None:
    make, shape = NETS[name]
    module = on_meta(make())
    uses, weights = weight_uses(module, shape), dict(module.named_parameters())
    assert sum(weights[key].numel() * times for key, times in uses.items()) == sample_flops(module, shape)


def test_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETS["mlp"]
    plan = plan_of(make(), shape)
    costs = CutCosts(make, plan, shape, ADAM, constant=1000)
    sizes = plan.prefix(0.5).sizes
    first, smaller_batch = costs(sizes), costs(sizes, batch_size=2)
    assert smaller_batch.memory < first.memory
    monkeypatch.setattr("fedplat.models.cutting_costs.training_memory", None)
    assert costs(Sizes.loads(sizes.dumps())) == first
    assert costs(sizes, 2) == smaller_batch


def test_a_builder_is_asked_for_shapes_alone() -> None:
    seen = []

    def build() -> nn.Module:
        module = NETS["cnn"][0]()
        seen.append(next(module.parameters()).is_meta)
        return module

    plan = plan_of(NETS["cnn"][0](), (1, 16, 16))
    state = torch.get_rng_state()
    CutCosts(build, plan, (1, 16, 16), ADAM)(plan.prefix(0.5).sizes)
    assert seen == [True]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_is_not_copied_and_stays_as_it_is() -> None:
    module = NETS["resnet-batch"][0]()
    x = random_input((1, 8, 8))
    meta = on_meta(module)
    assert all(tensor.is_meta for tensor in meta.state_dict().values())
    assert not any(tensor.is_meta for tensor in module.state_dict().values())
    assert module(x).shape == (4, 5)


class Mixing(nn.Module):
    """Multiplies outside of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.second(hidden @ (self.first.weight @ self.first.weight.T))
        return out

    def cut_plan(self) -> CutPlan:
        axes = {"first.weight": ("h", None), "first.bias": ("h",), "second.weight": (None, "h")}
        return CutPlan.declare(self, axes)


def test_products_outside_of_layers_are_counted_too() -> None:
    module = nn.Sequential(nn.Flatten(), Mixing())
    own = Mixing()
    plan = CutPlan.declare(module, {f"1.{array.name}": array.axes for array in plan_of(own, (4,)).arrays})
    costs = CutCosts(module, plan, (1, 2, 2), ADAM)
    sizes = plan.prefix(0.5).sizes
    assert costs.flops(sizes) == sample_flops(shrink(module, plan, sizes), (1, 2, 2))


def test_sizes_and_samples_that_do_not_fit_are_refused() -> None:
    make, shape = NETS["mlp"]
    plan = plan_of(make(), shape)
    costs = CutCosts(make, plan, shape, ADAM)
    with pytest.raises(UserError, match="99 units of 'fc1'"):
        costs(Sizes((("fc1", 99), ("fc2", 6))))
    with pytest.raises(UserError, match="cannot train on samples of shape"):
        CutCosts(make, plan, (1, 3, 3), ADAM)(plan.full.sizes)
