import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedplat.errors import UserError
from fedplat.models.cnn import hfl_cnn
from fedplat.models.cutting import Axis, Cut, CutPlan, Group, Sizes, Stage, plan_of
from fedplat.models.dense import mlp, softmax_regression
from fedplat.models.lstm import CharLSTM, char_lstm
from fedplat.models.resnet import ResidualBlock
from fedplat.rng import generator

from .cutting_nets import ZOO, shape_of, small_conv_net, tiny_resnet, zoo_model


def mlp_plan(*hidden: int) -> CutPlan:
    return plan_of(mlp((1, 2, 2), 3, hidden=hidden), (1, 2, 2))


PLAN = mlp_plan(10, 6)


def axes(plan: CutPlan) -> dict[str, tuple[Axis | None, ...]]:
    return {array.name: array.axes for array in plan.arrays}


def test_an_mlp_has_a_group_per_hidden_layer_and_whole_ends() -> None:
    assert PLAN.groups == (Group("fc1", 10), Group("fc2", 6))
    one, two = Axis("fc1"), Axis("fc2")
    assert axes(PLAN) == {
        "fc1.weight": (one, None),
        "fc1.bias": (one,),
        "fc2.weight": (two, one),
        "fc2.bias": (two,),
        "fc3.weight": (None, two),
        "fc3.bias": (None,),
    }


def test_a_flattened_channel_is_as_many_inputs_as_it_has_pixels() -> None:
    plan = plan_of(hfl_cnn((1, 28, 28), 10), (1, 28, 28))
    assert axes(plan)["fc1.weight"] == (Axis("fc1"), Axis("conv2", repeat=16))


def test_depthwise_filters_and_norms_belong_to_the_channels_they_read() -> None:
    plan = plan_of(small_conv_net(), (1, 6, 6))
    assert plan.groups == (Group("conv1", 4), Group("conv2", 6), Group("fc1", 8))
    assert axes(plan)["depthwise.weight"] == (Axis("conv1"), None, None, None)
    assert axes(plan)["norm2.running_var"] == (Axis("conv2"),)
    assert axes(plan)["norm2.num_batches_tracked"] == ()
    assert axes(plan)["fc1.weight"] == (Axis("fc1"), Axis("conv2", repeat=4))


def test_channels_joined_by_a_skip_connection_are_one_group() -> None:
    plan = plan_of(tiny_resnet(), (1, 8, 8))
    by_name = axes(plan)
    for name in ("conv", "stage1.0.conv2", "stage1.1.conv2", "stage1.2.conv2"):
        assert by_name[f"{name}.weight"][0] == Axis("conv")
    for name in ("stage2.0.conv2", "stage2.0.shortcut.conv", "stage2.1.conv2"):
        assert by_name[f"{name}.weight"][0] == Axis("stage2.0.conv2")
    assert by_name["stage1.1.conv1.weight"] == (Axis("stage1.1.conv1"), Axis("conv"), None, None)
    assert by_name["stage2.0.shortcut.norm.bias"] == (Axis("stage2.0.conv2"),)
    assert plan.stages == (Stage("stage1", 3), Stage("stage2", 2))
    assert {a.name.split(".")[1] for a in plan.arrays if a.block == 1} == {"1"}


def test_an_lstm_has_one_group_for_the_states_of_all_layers_and_four_gates() -> None:
    plan = plan_of(char_lstm((6,), 11, embedding=4, hidden=8), (6,))
    by_name = axes(plan)
    gates, units = Axis("lstm", blocks=4), Axis("lstm")
    assert by_name["embedding.weight"] == (None, Axis("embedding"))
    assert by_name["lstm.weight_ih_l0"] == (gates, Axis("embedding"))
    assert by_name["lstm.weight_ih_l1"] == by_name["lstm.weight_hh_l0"] == (gates, units)
    assert by_name["lstm.bias_hh_l1"] == (gates,)
    assert by_name["fc.weight"] == (None, units)
    assert plan.stages == (Stage("lstm", 2),)


def test_a_model_of_one_layer_has_nothing_to_leave_out() -> None:
    plan = plan_of(softmax_regression((1, 2, 2), 3), (1, 2, 2))
    assert plan.groups == plan.stages == ()
    assert plan.prefix(0.1) == plan.full
    assert plan_of(nn.Linear(4, 2), (4,)).groups == ()


@pytest.mark.parametrize("number", range(len(ZOO)))
def test_every_model_of_the_zoo_has_a_plan_with_all_its_arrays(number: int) -> None:
    flat, shape = zoo_model(number), shape_of(ZOO[number][0])
    plan = plan_of(flat.module, shape)
    assert [(a.name, a.shape) for a in plan.arrays] == [(e.name, e.shape) for e in flat.layout.entries]
    assert plan == plan_of(flat.module, shape)
    assert hash(plan) == hash(plan_of(flat.module, shape))


@pytest.mark.parametrize(
    ("width", "kept"), [(1, (10, 6)), (0.7, (7, 5)), (0.5, (5, 3)), (0.25, (3, 2)), (0.01, (1, 1))]
)
def test_a_prefix_keeps_the_share_rounded_up_and_at_least_one(width: float, kept: tuple[int, int]) -> None:
    assert PLAN.prefix(width).kept == (("fc1", range(kept[0])), ("fc2", range(kept[1])))


def test_a_share_that_is_a_whole_number_of_units_is_not_rounded_up() -> None:
    assert 0.07 * 100 > 7
    assert mlp_plan(100).prefix(0.07).units == {"fc1": range(7)}


def test_widths_by_name_pattern_or_not_at_all() -> None:
    plan = plan_of(tiny_resnet(), (1, 8, 8))
    units = plan.prefix({"stage2.0.conv1": 0.25, "stage2.*": 0.5}).units
    assert [len(units[g]) for g in ("conv", "stage1.0.conv1", "stage2.0.conv1", "stage2.0.conv2")] == [
        8,
        8,
        4,
        8,
    ]


def test_a_window_goes_round_at_the_end_of_every_group() -> None:
    cut = PLAN.window(0.5, offset=8)
    assert cut.units == {"fc1": (0, 1, 2, 8, 9), "fc2": range(2, 5)}
    assert PLAN.window(0.5, offset=30) == PLAN.prefix(0.5)
    assert PLAN.window(1, offset=3) == PLAN.full


def test_windows_of_successive_rounds_cover_all_units_equally_often() -> None:
    seen = np.zeros(10, int)
    for server_round in range(10):
        seen[list(PLAN.window(0.3, server_round).units["fc1"])] += 1
    assert (seen == 3).all()


def test_random_units_come_from_the_generator_alone_and_are_sorted() -> None:
    first, again, other = (PLAN.random(0.5, generator(seed, "test")) for seed in (1, 1, 2))
    assert first == again != other
    assert list(first.units["fc1"]) == sorted(first.units["fc1"])
    assert first.sizes == PLAN.prefix(0.5).sizes


def test_random_units_do_not_depend_on_the_depth() -> None:
    plan = plan_of(tiny_resnet(), (1, 8, 8))
    deep, shallow = (plan.random(0.5, generator(1, "test"), depth) for depth in (None, {"stage1": 1}))
    assert deep.units["stage2.1.conv1"] == shallow.units["stage2.1.conv1"]


def test_cuts_that_keep_the_same_are_equal() -> None:
    assert PLAN.prefix(0.41) == PLAN.prefix(0.5) == PLAN.of_sizes(PLAN.prefix(0.5).sizes)
    assert hash(PLAN.prefix(0.41)) == hash(PLAN.prefix(0.5))
    plan = plan_of(tiny_resnet(), (1, 8, 8))
    shallow = plan.prefix({"stage1.1.conv1": 0.5}, {"stage1": 1})
    assert shallow == plan.prefix(1, {"stage1": 1})
    assert shallow.units["stage1.2.conv1"] == range(0)


def test_nested_cuts() -> None:
    plan = plan_of(tiny_resnet(), (1, 8, 8))
    half, quarter = plan.prefix(0.5), plan.prefix(0.25, {"stage1": 1})
    assert quarter.is_nested_in(half)
    assert quarter.is_nested_in(quarter)
    assert not half.is_nested_in(quarter)
    assert not plan.window(0.25, 7).is_nested_in(half)
    assert plan.window(0.25, 7).is_nested_in(plan.full)
    assert not half.is_nested_in(plan.prefix(1, {"stage2": 1}))
    with pytest.raises(UserError, match="different models"):
        half.is_nested_in(PLAN.full)


def test_sizes_travel_as_text() -> None:
    plan = plan_of(tiny_resnet(), (1, 8, 8))
    cut = plan.prefix(0.5, {"stage2": 1})
    assert Sizes.loads(cut.sizes.dumps()) == cut.sizes
    assert plan.of_sizes(Sizes.loads(cut.sizes.dumps())) == cut


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "3", "{}", '{"units":{}}', '{"units":{},"depths":3}', '{"units":{"a":1.5},"depths":{}}'),
        *('{"units":{"a":true},"depths":{}}', '{"units":{},"depths":{},"more":1}', "[" * 100_000),
    ],
)
def test_other_text_is_no_sizes(text: str) -> None:
    with pytest.raises(UserError, match="sizes of a sub-model"):
        Sizes.loads(text)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (Sizes((("fc1", 3),)), r"groups \['fc1'\], but the model has"),
        (Sizes((("fc1", 3), ("fc2", 7))), "7 units of 'fc2', allowed are 1 to 6"),
        (Sizes((("fc1", 0), ("fc2", 6))), "0 units of 'fc1', allowed are 1 to 10"),
        (Sizes((("fc1", 1), ("fc2", 6)), (("stage1", 1),)), "unknown stage 'stage1'"),
    ],
)
def test_sizes_that_the_model_has_not_are_refused(sizes: Sizes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PLAN.of_sizes(sizes)


@pytest.mark.parametrize("width", [0, -1, 1.01, float("nan")])
def test_widths_outside_0_to_1_are_refused(width: float) -> None:
    with pytest.raises(UserError, match="above 0 and at most 1"):
        PLAN.prefix(width)
    with pytest.raises(UserError, match="above 0 and at most 1"):
        PLAN.prefix({"fc1": width})


def test_unknown_groups_stages_and_depths_are_refused() -> None:
    plan = plan_of(tiny_resnet(), (1, 8, 8))
    with pytest.raises(UserError, match="unknown group of units 'fc9'"):
        PLAN.prefix({"fc9": 0.5})
    with pytest.raises(UserError, match="unknown stage 'stage9'"):
        plan.prefix(1, {"stage9": 1})
    for depth in (0, 4):
        with pytest.raises(UserError, match=f"depth of 'stage1' = {depth}: allowed are 1 to 3"):
            plan.prefix(1, {"stage1": depth})


def test_a_cut_made_by_hand_is_checked() -> None:
    for units in (range(5, 12), (3, 1), (-1, 2), (2, 2)):
        with pytest.raises(UserError, match="'fc1' have to be ascending, from 0 to 9"):
            PLAN.check_cut(Cut((("fc1", units), ("fc2", range(2)))))


class Strange(nn.Module):
    pass


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (nn.Sequential(nn.Flatten(), Strange()), (1, 2, 2), "'1' is a Strange"),
        (Strange(), (1, 2, 2), "model: a Strange"),
        (nn.Conv2d(4, 8, 3, groups=2), (4, 6, 6), "a Conv2d"),
        (
            nn.Sequential(nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4, affine=False)),
            (1, 2, 2),
            "'1' is a GroupNorm",
        ),
        (nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(3, 4, 1)), (1, 2, 2), "'1' reads 3 .* gets 4"),
        (
            nn.Sequential(nn.Conv2d(1, 4, 1), nn.Linear(4, 4)),
            (1, 2, 2),
            "'1' reads images that are not flattened",
        ),
        (
            nn.Sequential(nn.Conv2d(1, 4, 1), nn.Flatten(), nn.Linear(15, 4)),
            (1, 2, 2),
            "'2' reads 15 .* gets 12",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Conv2d(4, 4, 1)), (1, 2, 2), "'2' .* that are flat"),
        (nn.Sequential(nn.Linear(4, 4), nn.Flatten(0)), (4,), "'1' is a Flatten"),
    ],
)
def test_what_cannot_be_cut_is_named(module: nn.Module, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(module, shape)


def test_samples_without_numbers_are_refused() -> None:
    for shape in ((), (1, 0, 2)):
        with pytest.raises(UserError, match="have no numbers"):
            plan_of(nn.Linear(4, 2), shape)


def test_channels_that_are_the_output_stay_whole_wherever_they_are_added_up() -> None:
    last = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2), nn.Flatten())
    assert plan_of(last, (1, 2, 2)).groups == (Group("0", 4),)
    block = ResidualBlock(3, 3, 1, nn.BatchNorm2d)
    assert plan_of(block, (3, 4, 4)).groups == (Group("conv1", 3),)


def test_an_lstm_of_two_directions_is_not_understood() -> None:
    module = CharLSTM(5, 3, 4, 1)
    module.lstm = nn.LSTM(3, 4, bidirectional=True, batch_first=True)
    with pytest.raises(UserError, match="'lstm' is a LSTM, or has options"):
        plan_of(module, (6,))


class Own(nn.Module):
    def __init__(self, answer: object = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.answer = answer

    def cut_plan(self) -> object:
        axes = {"first.weight": ("h", None), "first.bias": ("h",), "second.weight": (None, "h")}
        for i in range(3):
            axes |= {f"blocks.{i}.weight": ("h", "h"), f"blocks.{i}.bias": ("h",)}
        return self.answer or CutPlan.declare(self, axes, ["blocks"])


def test_a_module_may_have_a_plan_of_its_own() -> None:
    plan = plan_of(Own(), (3,))
    assert plan.groups == (Group("h", 6),)
    assert plan.stages == (Stage("blocks", 3),)
    assert [a.block for a in plan.arrays if a.name.endswith("bias")] == [0, 0, 0, 1, 2]
    with pytest.raises(UserError, match="returned a int"):
        plan_of(Own(3), (3,))


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"first.wight": ("h", None)},
            "unknown array of the model 'first.wight': did you mean 'first.weight'",
        ),
        ({"first.weight": ("h",)}, "'first.weight' has 2 axes, not 1"),
        ({"first.weight": ("h", "h")}, "an axis of 3 of 'first.weight' does not fit group 'h' of 6 units"),
        ({"first.weight": (Axis("h", repeat=4), None)}, "an axis of 6 of 'first.weight' does not fit"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(
    declared: dict[str, tuple[str, ...]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        CutPlan.declare(Own(), declared)
    with pytest.raises(UserError, match="unknown child module 'bloks'"):
        CutPlan.declare(Own(), {}, ["bloks"])


@given(
    hidden=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    widths=st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)),
)
@settings(max_examples=40, deadline=None)
def test_of_two_prefixes_the_narrower_is_nested_in_the_wider(
    hidden: list[int], widths: tuple[float, float]
) -> None:
    plan = mlp_plan(*hidden)
    narrow, wide = plan.prefix(min(widths)), plan.prefix(max(widths))
    assert narrow.is_nested_in(wide)
    assert wide.is_nested_in(plan.full)
    assert wide.is_nested_in(narrow) == (wide == narrow)
