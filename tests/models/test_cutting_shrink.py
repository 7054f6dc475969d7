import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fedplat import registry
from fedplat.clients.stacked.kernels import dense_layers
from fedplat.clients.stacked.modules import stackable
from fedplat.errors import UserError
from fedplat.models.cnn import hfl_cnn
from fedplat.models.cutting import Cut, CutPlan, Scaler, Sizes, plan_of, shrink
from fedplat.models.dense import mlp
from fedplat.models.flat import FlatModel
from fedplat.models.lstm import CharLSTM
from fedplat.rng import generator, seeded_torch

from .cutting_nets import (
    ZOO,
    arrays_of,
    layout_of,
    random_input,
    seeded,
    shape_of,
    small_conv_net,
    tiny_resnet,
    zoo_model,
)
from .test_cutting import Own

ON_OFF: tuple[Scaler, Scaler] = ("training", "off")
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp((1, 2, 2), 3, hidden=(10, 6)), (1, 2, 2)),
    "cnn": (lambda: hfl_cnn((1, 16, 16), 4, dropout=0.5), (1, 16, 16)),
    "conv": (small_conv_net, (1, 6, 6)),
    "resnet-group": (tiny_resnet, (1, 8, 8)),
    "resnet-batch": (partial(tiny_resnet, "batch"), (1, 8, 8)),
    "lstm": (lambda: CharLSTM(10, 4, 8, 2), (6,)),
}


def cut_and_zeroed(module: nn.Module, plan: CutPlan, cut: Cut) -> tuple[nn.Module, nn.Module]:
    """The sub-model with its numbers extracted, and the model with all other numbers set to zero."""
    flat = FlatModel(copy.deepcopy(module))
    part = plan.index_map(cut, flat.layout)
    small = FlatModel(shrink(module, plan, cut.sizes))
    small.load(part.extract(arrays_of(flat)))
    flat.vector[~part.coverage] = 0
    return small.module, flat.module


@pytest.mark.parametrize("number", range(len(ZOO)))
def test_the_part_of_every_model_of_the_zoo_is_laid_out_as_its_index_map_says(number: int) -> None:
    flat, shape = zoo_model(number), shape_of(ZOO[number][0])
    plan, model = plan_of(flat.module, shape), arrays_of(flat)
    for width in (1, 0.5, 0.25, 0.0625) if ZOO[number][0] != "resnet34" else (0.25,):
        for depth in ({}, {stage.name: 1 for stage in plan.stages}):
            cut = plan.prefix(width, depth)
            part = plan.index_map(cut, flat.layout)
            small = FlatModel(shrink(flat.module, plan, cut.sizes, scaler="training"))
            assert small.layout == part.layout
            assert torch.equal(small.vector, torch.from_numpy(part.extract(model).vector))


@pytest.mark.parametrize("number", [i for i, (name, _) in enumerate(ZOO) if "resnet" not in name])
def test_the_part_of_a_model_of_the_zoo_computes_as_the_model_without_the_rest(number: int) -> None:
    flat, shape = zoo_model(number), shape_of(ZOO[number][0])
    plan, x = plan_of(flat.module, shape), random_input(shape)
    for cut in (plan.prefix(0.25), plan.window(0.5, 3)):
        small, zeroed = (module.eval() for module in cut_and_zeroed(flat.module, plan, cut))
        torch.testing.assert_close(small(x), zeroed(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.parametrize("training", [True, False])
def test_a_part_computes_as_the_model_with_all_else_zero(name: str, training: bool) -> None:
    make, shape = NETS[name]
    module = seeded(make)
    plan, x = plan_of(module, shape), random_input(shape)
    cuts = [plan.prefix(1), plan.prefix(0.5)]
    if name != "resnet-group":  # whose groups of channels would be others
        cuts += [plan.window(0.5, 5), plan.random(0.3, generator(1, "test"))]
    for cut in cuts:
        small, zeroed = cut_and_zeroed(module, plan, cut)
        for one in (small, zeroed):
            one.train(training)
            for layer in one.modules():
                if "Dropout" in type(layer).__name__:
                    layer.eval()
        torch.testing.assert_close(small(x), zeroed(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_shallower_resnet_computes_as_one_whose_last_blocks_add_nothing(norm: str) -> None:
    module = seeded(partial(tiny_resnet, norm)).eval()
    plan, x = plan_of(module, (1, 8, 8)), random_input((1, 8, 8))
    small, zeroed = cut_and_zeroed(module, plan, plan.prefix(0.5, {"stage1": 2, "stage2": 1}))
    torch.testing.assert_close(small.eval()(x), zeroed.eval()(x), rtol=1e-4, atol=1e-5)
    assert [len(small.get_submodule(stage)._modules) for stage in ("stage1", "stage2")] == [2, 1]


def test_an_lstm_of_fewer_layers_is_the_first_ones() -> None:
    module = seeded(lambda: CharLSTM(10, 4, 8, 3))
    plan = plan_of(module, (6,))
    small = shrink(module, plan, plan.prefix(1, {"lstm": 1}).sizes)
    by_hand = CharLSTM(10, 4, 8, 1)
    state = module.state_dict()
    by_hand.load_state_dict({name: state[name] for name in by_hand.state_dict()})
    x = random_input((6,))
    assert torch.equal(small(x), by_hand(x))


def test_layers_know_their_new_sizes() -> None:
    module = small_conv_net()
    plan = plan_of(module, (1, 6, 6))
    small = shrink(module, plan, plan.prefix(0.5).sizes)
    assert str(small) == str(
        nn.Sequential(
            *[
                *(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3, groups=2), nn.Conv2d(2, 3, 1)),
                *(nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)),
            ]
        )
    ).replace("(0)", "(conv1)").replace("(1)", "(relu1)").replace("(2)", "(depthwise)").replace(
        "(3)", "(conv2)"
    ).replace("(4)", "(norm2)").replace("(5)", "(relu2)").replace("(6)", "(flatten)").replace(
        "(7)", "(fc1)"
    ).replace("(8)", "(relu3)").replace("(9)", "(fc2)")
    assert str(module) == str(small_conv_net())


@pytest.mark.parametrize(("kept", "groups"), [(8, 4), (6, 3), (4, 2), (2, 1), (1, 1), (5, 1), (7, 1)])
def test_group_norm_keeps_its_channels_per_group_or_more(kept: int, groups: int) -> None:
    module = nn.Sequential(nn.Conv2d(1, 8, 1), nn.GroupNorm(4, 8), nn.Flatten(), nn.Linear(8, 2))
    plan = plan_of(module, (1, 1, 1))
    norm = shrink(module, plan, Sizes((("0", kept),))).get_submodule("1")
    assert (norm.num_groups, norm.num_channels) == (groups, kept)


def test_layer_norm_and_one_dimensional_layers_are_cut() -> None:
    module = seeded(
        lambda: nn.Sequential(
            *(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 6)),
            *(nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)),
        )
    )
    plan = plan_of(module, (2, 5))
    cut = plan.prefix(0.5)
    small = shrink(module, plan, cut.sizes)
    assert layout_of(small) == plan.index_map(cut, layout_of(module)).layout
    assert small(random_input((2, 5))).shape == (4, 2)


def test_a_module_with_its_own_plan_and_forward_pass_is_cut() -> None:
    class Looped(Own):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).relu()
            for block in self.blocks:
                x = x + block(x).relu()
            out: Tensor = self.second(x)
            return out

    module = seeded(Looped)
    plan = plan_of(module, (3,))
    small, zeroed = cut_and_zeroed(module, plan, plan.prefix(0.5, {"blocks": 2}))
    with seeded_torch(1, "test"):
        x = torch.randn(4, 3)
    assert len(small.get_submodule("blocks")._modules) == 2
    torch.testing.assert_close(small(x), zeroed(x))


@pytest.mark.parametrize("name", list(NETS))
def test_shrinking_leaves_the_module_and_random_numbers_alone(name: str) -> None:
    make, shape = NETS[name]
    module = seeded(make).eval()
    before, state = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    plan = plan_of(module, shape)
    small = shrink(module, plan, plan.prefix(0.5).sizes, scaler="training")
    FlatModel(small).vector.zero_()
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(layer.training for layer in small.modules())
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("name", list(NETS))
def test_modules_without_numbers_are_cut_as_well(name: str) -> None:
    make, shape = NETS[name]
    plan = plan_of(make(), shape)
    sizes = plan.prefix(0.5).sizes
    shapes = {key: value.shape for key, value in shrink(make(), plan, sizes).state_dict().items()}
    with torch.device("meta"):
        module = make()
    state = shrink(module, plan, sizes, scaler="training").state_dict()
    assert all(tensor.is_meta for tensor in state.values())
    assert {key: value.shape for key, value in state.items()} == shapes
    with FakeTensorMode():
        state = shrink(make(), plan, sizes).state_dict()
    assert all(isinstance(tensor, FakeTensor) for tensor in state.values())
    assert {key: value.shape for key, value in state.items()} == shapes


def test_other_sizes_and_plans_are_refused() -> None:
    module = mlp((1, 2, 2), 3, hidden=(10, 6))
    plan = plan_of(module, (1, 2, 2))
    with pytest.raises(UserError, match="11 units of 'fc1', allowed are 1 to 10"):
        shrink(module, plan, Sizes((("fc1", 11), ("fc2", 6))))
    with pytest.raises(UserError, match="the cut plan belongs to another model"):
        shrink(mlp((1, 2, 2), 3, hidden=(9, 6)), plan, plan.full.sizes)


def test_the_scaler_divides_by_the_share_kept_while_training_only() -> None:
    module = seeded(
        lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False), nn.Linear(3, 2))
    )
    plan = plan_of(module, (3,))
    sizes = plan.prefix({"0": 0.5, "1": 0.5}).sizes  # 2 of 4, and 2 of 3
    scaled, plain = (shrink(module, plan, sizes, scaler=on) for on in ON_OFF)
    assert layout_of(scaled) == layout_of(plain)
    x = torch.ones(1, 3)
    hidden = plain[1](plain[0](x))  # type: ignore[index]
    torch.testing.assert_close(scaled(x), plain[2](hidden * 2 * 1.5))  # type: ignore[index]
    always = shrink(module, plan, sizes, scaler="always")
    assert torch.equal(always.eval()(x), scaled(x))
    assert torch.equal(scaled.eval()(x), plain(x))
    with pytest.raises(UserError, match="unknown scaler 'alway': did you mean 'always'"):
        shrink(module, plan, sizes, scaler="alway")  # type: ignore[arg-type]


def test_a_scaled_convolution_gives_the_gradient_of_what_it_computes() -> None:
    module = seeded(small_conv_net)
    plan = plan_of(module, (1, 6, 6))
    scaled = shrink(module, plan, plan.prefix(0.5).sizes, scaler="training")
    kinds = {name: type(layer).__name__ for name, layer in scaled.named_children()}
    assert (kinds["conv1"], kinds["depthwise"]) == ("ScaledConv2d", "Conv2d")
    assert (kinds["conv2"], kinds["fc1"], kinds["fc2"]) == ("ScaledConv2d", "ScaledLinear", "Linear")
    plain = shrink(module, plan, plan.prefix(0.5).sizes)
    x = random_input((1, 6, 6))
    torch.testing.assert_close(scaled.conv1(x), plain.conv1(x) * 2)  # type: ignore[operator]


def test_a_scaled_lstm_is_divided_where_it_is_read() -> None:
    module = seeded(lambda: CharLSTM(10, 4, 8, 2))
    plan = plan_of(module, (6,))
    scaled, plain = (shrink(module, plan, plan.prefix(0.25).sizes, scaler=on) for on in ON_OFF)
    assert isinstance(plain, CharLSTM)
    x = random_input((6,))
    states, _ = plain.lstm(plain.embedding(x) * 4)
    torch.testing.assert_close(scaled(x), plain.fc(states * 4))
    assert torch.equal(scaled.eval()(x), plain(x))
    torch.testing.assert_close(stackable(scaled)(x), plain.fc(states * 4))


def test_scalers_survive_copies_functional_calls_and_stacking() -> None:
    module = seeded(NETS["mlp"][0])
    plan, x = plan_of(module, (1, 2, 2)), random_input((1, 2, 2))
    scaled, plain = (shrink(module, plan, plan.prefix(0.5).sizes, scaler=on) for on in ON_OFF)
    expected = scaled(x)
    assert not torch.allclose(expected, plain(x))
    assert torch.equal(copy.deepcopy(scaled)(x), expected)
    assert torch.equal(torch.func.functional_call(plain, dict(scaled.named_parameters()), (x,)), plain(x))
    assert torch.equal(torch.func.functional_call(scaled, dict(plain.named_parameters()), (x,)), expected)
    assert torch.equal(FlatModel(stackable(scaled))(x), expected)
    assert dense_layers(plain)
    assert not dense_layers(scaled)


def test_nothing_is_scaled_in_a_whole_model() -> None:
    for make, shape in NETS.values():
        plan = plan_of(module := make(), shape)
        whole = shrink(module, plan, plan.full.sizes, scaler="training")
        assert [type(layer) for layer in whole.modules()] == [type(layer) for layer in module.modules()]


def test_every_layer_of_the_zoo_that_is_cut_and_has_weights_is_scaled() -> None:
    target = registry.find("models", "resnet18").load()
    with torch.device("meta"):
        module = target((1, 9, 9), 10)
    plan = plan_of(module, (1, 9, 9))
    small = shrink(module, plan, plan.prefix(0.5).sizes, scaler="training")
    kinds = [type(layer).__name__ for layer in small.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    assert kinds == ["ScaledConv2d"] * 20 + ["Linear"]
