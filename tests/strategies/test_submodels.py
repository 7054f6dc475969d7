from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from torch import nn

from fedplat.arrays import FlatArrays, Layout
from fedplat.emulation.schedule import Budget, DeviceSchedule
from fedplat.errors import UserError
from fedplat.models.cutting import Sizes
from fedplat.models.dense import mlp
from fedplat.models.flat import FlatModel
from fedplat.strategies import Krum, Mean
from fedplat.strategies.nodes import Node
from fedplat.strategies.submodel_schemes import (
    Depth,
    FederatedDropout,
    FedRolex,
    FjORD,
    FullOnly,
    HeteroFL,
    LevelScheme,
    Smallest,
)
from fedplat.strategies.submodels import (
    FULL,
    KIND,
    SCALER,
    SIZES,
    STATIC_NORM,
    WIDTHS,
    FullModel,
    SubModelContext,
    layout_of,
)
from tests.flower_apps import replies_to
from tests.models.cutting_nets import seeded, small_conv_net, tiny_resnet

SHAPE = (1, 4, 4)
net = functools.partial(mlp, SHAPE, 3, hidden=(8, 4))


def context(**changes: Any) -> SubModelContext:
    return SubModelContext.of(net, SHAPE, 3, **{"clients": 8, **changes})


def bound(scheme: LevelScheme, **changes: Any) -> LevelScheme:
    scheme.bind(context(**changes))
    return scheme


def budget(memory: float, bps: float = 1e12) -> Budget:
    return Budget(int(memory), int(bps), int(bps), True)


def node(partition: int) -> Node:
    return Node(100 + partition, partition)


def kinds(scheme: LevelScheme, server_round: int = 1, clients: int = 8) -> list[str]:
    found = []
    for partition in range(clients):
        spec = scheme.assign(node(partition), None, server_round)
        assert spec is not None
        found.append(spec.kind)
    return found


SCHEMES: list[LevelScheme] = [
    HeteroFL(widths=(1.0, 0.5, 0.25)),
    FjORD(widths=(1.0, 0.5)),
    FedRolex(widths=(0.5, 0.25)),
    FederatedDropout(widths=(1.0, 0.5)),
    Smallest(width=0.25),
    FullOnly(),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: type(s).__name__)
def test_what_is_taken_out_and_put_back_is_the_model_itself(scheme: LevelScheme) -> None:
    bound(scheme)
    model = FlatArrays.of_record(whole())
    scheme.begin_round(model, 3)
    for partition in range(8):
        spec = scheme.assign(node(partition), None, 3)
        assert spec is not None
        part = scheme.extract(model, spec)
        changed = FlatArrays(part.layout, part.vector + 1, part.side)
        restored, covered = scheme.restore(changed, spec, model)
        if covered is None:
            assert spec.kind == "full"
            covered = torch.ones(model.layout.dim, dtype=torch.bool)
        else:
            sizes = Sizes.loads(dict(spec.config)[SIZES])
            assert part.layout.num_params == scheme.context.costs.parameters(sizes)
        np.testing.assert_array_equal(restored.vector, model.vector + covered.numpy())


def whole() -> Any:
    flat = FlatModel(net())
    return FlatArrays(flat.layout, flat.vector.numpy().copy(), flat.side.numpy().copy()).to_record()


def test_the_layout_in_the_context_is_that_of_the_flat_model() -> None:
    for make in (net, small_conv_net, tiny_resnet):
        assert layout_of(make()) == FlatModel(make()).layout


def test_a_device_gets_the_largest_level_that_fits_with_what_its_process_takes() -> None:
    scheme = bound(HeteroFL(widths=(0.25, 1.0, 0.5)), overhead_bytes=1000)
    plan, costs = scheme.context.plan, scheme.context.costs
    for width, name in ((1.0, "full"), (0.5, "width-0.5"), (0.25, "width-0.25")):
        needed = costs.memory(plan.prefix(width).sizes) + 1000
        spec = scheme.assign(node(0), budget(needed), 1)
        assert spec is not None
        assert spec.kind == name
        if width > 0.25:
            smaller = scheme.assign(node(0), budget(needed - 1), 1)
            assert smaller is not None
            assert smaller.kind != name
    assert scheme.assign(node(0), budget(needed - 1), 1) is None
    assert "MB of memory" in scheme.why(node(0))


def test_memory_is_that_of_the_batch_a_client_has() -> None:
    few = bound(HeteroFL(widths=(1.0, 0.5)), samples=lambda client: 1 if client == 0 else 500)
    needed = few.context.costs.memory(few.context.plan.full.sizes, 1)
    small, large = few.assign(node(0), budget(needed), 1), few.assign(node(1), budget(needed), 1)
    assert small == FULL
    assert large != FULL


def test_two_transfers_and_the_training_have_to_fit_into_the_deadline() -> None:
    scheme = HeteroFL(widths=(1.0, 0.5))
    base = context(deadline_s=2.0)
    bits = 8 * base.costs.nbytes(base.plan.full.sizes)
    scheme.bind(base)
    exact = scheme.assign(node(0), budget(1e9, bits), 1)
    assert exact == FULL
    slower = scheme.assign(node(0), budget(1e9, bits * 0.9), 1)
    assert slower is not None
    assert slower.kind == "width-0.5"
    scheme.bind(replace(base, seconds=lambda client, flops: flops / base.costs.flops(base.plan.full.sizes)))
    assert scheme.assign(node(0), budget(1e9, bits), 1) == slower
    assert scheme.assign(node(0), budget(1e9, bits / 8), 1) is None
    assert "2 s" in scheme.why(node(0))


def test_without_devices_levels_are_shared_out_by_the_seed_for_ever_or_anew() -> None:
    fixed = bound(HeteroFL(widths=(1.0, 0.5, 0.25), shares=(1, 1, 2)))
    assert sorted(kinds(fixed)) == ["full"] * 2 + ["width-0.25"] * 4 + ["width-0.5"] * 2
    assert kinds(fixed) == kinds(fixed, server_round=2)
    assert kinds(fixed) != kinds(bound(HeteroFL(widths=(1.0, 0.5, 0.25), shares=(1, 1, 2)), seed=1))
    anew = bound(HeteroFL(widths=(1.0, 0.5, 0.25), dynamic=True))
    assert kinds(anew) == kinds(anew)
    assert kinds(anew) != kinds(anew, server_round=2)


def test_shares_are_what_a_device_gets_at_most() -> None:
    scheme = bound(HeteroFL(widths=(1.0, 0.5), shares=(0, 1)))
    spec = scheme.assign(node(0), budget(1e12), 1)
    assert spec is not None
    assert spec.kind == "width-0.5"


def test_windows_move_on_with_the_rounds_and_are_the_same_for_all() -> None:
    scheme = bound(FedRolex(widths=(0.5,)))
    first, second = scheme.assign(node(0), None, 1), scheme.assign(node(0), None, 2)
    assert first is not None
    assert second is not None
    assert scheme.assign(node(1), None, 1) == first
    assert scheme._cuts[first].units["fc1"] == range(4)
    assert scheme._cuts[second].units["fc1"] == range(1, 5)
    assert dict(first.config)[SIZES] == dict(second.config)[SIZES]
    assert dict(first.config)[KIND] != dict(second.config)[KIND]


def test_random_units_follow_the_seed_the_client_and_the_round() -> None:
    def units(partition: int, server_round: int, seed: int = 0) -> Any:
        scheme = bound(FederatedDropout(widths=(0.5,)), seed=seed)
        spec = scheme.assign(node(partition), None, server_round)
        assert spec is not None
        return scheme._cuts[spec].kept

    assert units(0, 1) == units(0, 1)
    assert len({units(0, 1), units(1, 1), units(0, 2), units(0, 1, 5)}) == 4


def test_only_whole_models_or_the_first_blocks() -> None:
    only = bound(FullOnly())
    assert only.assign(node(0), budget(1), 1) is None
    assert only.assign(node(0), None, 1) == FULL
    with pytest.raises(UserError, match="no stages"):
        bound(Depth())
    depth = Depth(depths=(1.0, 0.5))
    depth.bind(SubModelContext.of(tiny_resnet, (1, 8, 8), 5, clients=2))
    found = {depth.assign(node(i), None, 1) for i in range(2)}
    sizes = [Sizes.loads(dict(spec.config)[SIZES]) for spec in found - {FULL} if spec]
    assert [dict(one.depths) for one in sizes] == [{"stage1": 2, "stage2": 1}]
    # Only the groups inside of blocks that are left out are gone.
    assert {count for name, count in sizes[0].units} - {0} == {8, 16}


def test_scalers_go_with_norms_and_widths_of_ordered_dropout_up_to_the_own_are_told() -> None:
    normed = HeteroFL(widths=(0.5,))
    normed.bind(SubModelContext.of(tiny_resnet, (1, 8, 8), 5))
    spec = normed.assign(node(0), None, 1)
    assert spec is not None
    assert dict(spec.config)[SCALER] == "training"
    plain = bound(HeteroFL(widths=(0.5,))).assign(node(0), None, 1)
    assert plain is not None
    assert SCALER not in dict(plain.config)
    fjord = bound(FjORD(widths=(1.0, 0.5, 0.25), shares=(0, 1, 0))).assign(node(0), None, 1)
    assert fjord is not None
    assert dict(fjord.config)[WIDTHS] == "0.25,0.5"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HeteroFL(widths=(1.0, 1.0)), "different shares"),
        (lambda: HeteroFL(widths=(1.5,)), "at most 1"),
        (lambda: HeteroFL(widths=(1.0, 0.5), shares=(1.0,)), "expected 2 numbers"),
        (lambda: HeteroFL(widths=(1.0,), shares=(0.0,)), "not all 0"),
        (lambda: HeteroFL().assign(node(0), None, 1), "bind"),
    ],
)
def test_wrong_settings_are_explained(make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


def test_static_statistics_need_samples_of_the_server_and_are_theirs() -> None:
    shape, make = (1, 6, 6), functools.partial(seeded, small_conv_net)
    scheme = HeteroFL(widths=(0.5,), batch_norm="static")
    with pytest.raises(UserError, match="public_samples"):
        scheme.bind(SubModelContext.of(make, shape, 3))
    x = torch.arange(360.0).reshape(10, *shape) / 360
    scheme.bind(SubModelContext.of(make, shape, 3, public=lambda: (x, torch.zeros(10, dtype=torch.long))))
    spec = scheme.assign(node(0), None, 1)
    assert spec is not None
    assert dict(spec.config)[STATIC_NORM] is True
    flat = FlatModel(make())
    arrays = FlatArrays(flat.layout, flat.vector.numpy().copy(), flat.side.numpy().copy())
    new = scheme.finish_round(arrays, 1)
    p = arrays.layout.num_params
    np.testing.assert_array_equal(new.vector[:p], arrays.vector[:p])
    before_norm: Any = nn.Sequential(*list(flat.module)[:4])  # type: ignore[arg-type]
    with torch.no_grad():
        inputs = before_norm(x)
    np.testing.assert_allclose(new.view("norm2.running_mean"), inputs.mean((0, 2, 3)), rtol=1e-4)


class OneByOne:
    """A grid of nodes 1, 2, ... that hold partitions 0, 1, ..., and answer as a test says."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_node_ids(self) -> list[int]:
        return list(range(1, self.count + 1))

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
        return [
            Message(RecordDict({"n": ConfigRecord({"partition-id": m.metadata.dst_node_id - 1})}), reply_to=m)
            for m in messages
        ]


def plus(message: Any, amount: float) -> Any:
    sent = message.content["arrays"]
    flat = FlatArrays.of_record(sent, Layout.of_record(sent))
    return FlatArrays(flat.layout, flat.vector + np.float32(amount), flat.side).to_record()


def test_two_clients_of_unlike_size_are_averaged_where_both_train_and_kept_where_none_does() -> None:
    tiny = functools.partial(mlp, (1, 1, 2), 2, hidden=(2,))
    scheme = HeteroFL(widths=(1.0, 0.5), shares=(1, 1))
    scheme.bind(SubModelContext.of(tiny, (1, 1, 2), 2, clients=2))
    strategy = Mean(submodels=scheme, fraction_evaluate=0.0)
    layout = layout_of(tiny())
    start = FlatArrays(layout, np.arange(layout.dim, dtype=np.float32), np.zeros(0, np.uint8))
    messages = list(strategy.configure_train(1, start.to_record(), ConfigRecord(), OneByOne(2)))  # type: ignore[arg-type]
    by_size = sorted(messages, key=lambda m: sum(a.numpy().size for a in m.content["arrays"].values()))
    small, large = (m.metadata.dst_node_id for m in by_size)
    assert by_size[0].content["arrays"]["fc1.weight"].numpy().tolist() == [[0.0, 1.0]]
    models = {small: plus(by_size[0], 1.0), large: plus(by_size[1], 4.0)}
    new, _ = strategy.aggregate_train(1, replies_to(messages, models, {small: 30, large: 10}))
    assert new is not None
    # Both train unit 0 and the output's bias: (30 * 1 + 10 * 4) / 40; unit 1 is the large client's alone.
    change = FlatArrays.of_record(new, layout).vector - start.vector
    expected = {
        "fc1.weight": [1.75, 1.75, 4, 4],
        "fc1.bias": [1.75, 4],
        "fc2.weight": [1.75, 4, 1.75, 4],
        "fc2.bias": [1.75, 1.75],
    }
    for name, values in expected.items():
        entry = layout.by_name[name]
        assert change[entry.start : entry.stop].tolist() == values
    assert {r.node_id: r.submodel for r in strategy.reports} == {small: "width-0.5", large: "full"}
    assert strategy.diagnostics["submodels.width-0.5"] == 1


def test_whom_nothing_fits_sits_out_and_is_named_and_gets_no_message() -> None:
    scheme = bound(HeteroFL(widths=(1.0, 0.5)))
    memory = np.full((4, 1), 10**9)
    memory[2] = 10
    links = np.full((4, 1), 10**9)
    schedule = DeviceSchedule(memory, links, links, np.ones((4, 1), bool))
    strategy = Mean(submodels=scheme, devices=schedule, min_nodes=4)
    messages = list(strategy.configure_train(1, whole(), ConfigRecord(), OneByOne(4)))  # type: ignore[arg-type]
    assert sorted(m.metadata.dst_node_id for m in messages) == [1, 2, 4]
    assert len({id(m.content) for m in messages}) == 1
    models = {m.metadata.dst_node_id: plus(m, 1.0) for m in messages}
    new, _ = strategy.aggregate_train(1, replies_to(messages, models))
    assert new is not None
    left = [r for r in strategy.reports if r.status != "accepted"]
    assert [(r.client, r.status) for r in left] == [(2, "failed")]
    assert left[0].reason.startswith("nothing fits: training takes")


def test_too_few_whom_something_fits_leave_the_model_and_everybody_is_named() -> None:
    scheme = bound(FullOnly())
    memory = np.array([[10**9], [10], [10], [10], [10]])
    links = np.full((5, 1), 10**9)
    schedule = DeviceSchedule(memory, links, links, np.ones((5, 1), bool))
    strategy = Krum(f=1, submodels=scheme, devices=schedule, min_nodes=5)
    assert not list(strategy.configure_train(1, whole(), ConfigRecord(), OneByOne(5)))  # type: ignore[arg-type]
    assert strategy.aggregate_train(1, []) == (None, None)
    assert [r.client for r in strategy.reports] == [0, 1, 2, 3, 4]
    assert all(r.reason for r in strategy.reports)


def test_a_reply_of_another_size_than_was_sent_is_refused() -> None:
    scheme = bound(HeteroFL(widths=(0.5,)))
    strategy = Mean(submodels=scheme, fraction_evaluate=0.0)
    messages = list(strategy.configure_train(1, whole(), ConfigRecord(), OneByOne(2)))  # type: ignore[arg-type]
    models = {1: plus(messages[0], 1.0), 2: whole()}
    strategy.aggregate_train(1, replies_to(messages, models))
    assert [r.status for r in strategy.reports] == ["accepted", "refused"]


def test_the_whole_model_is_what_a_strategy_sends_by_default() -> None:
    assert isinstance(Mean().submodels, FullModel)
    assert FullModel().parts_to_test(1) == {}


def test_what_a_scheme_remembers_and_does_to_the_model_is_part_of_the_strategy() -> None:
    class Counting(FullModel):
        rounds = 0

        def finish_round(self, new_model: FlatArrays, server_round: int) -> FlatArrays:
            self.rounds += 1
            self.diagnostics = {"rounds": float(self.rounds)}
            return FlatArrays(new_model.layout, new_model.vector * 0, new_model.side)

        def state_dict(self) -> dict[str, Any]:
            return {"rounds": self.rounds}

        def load_state_dict(self, state: Any) -> None:
            self.rounds = state["rounds"]

    strategy = Mean(submodels=Counting())
    messages = list(strategy.configure_train(1, whole(), ConfigRecord(), OneByOne(2)))  # type: ignore[arg-type]
    new, _ = strategy.aggregate_train(1, replies_to(messages, {i: whole() for i in (1, 2)}))
    assert new is not None
    assert not FlatArrays.of_record(new).vector.any()
    assert strategy.diagnostics["rounds"] == 1
    other = Counting()
    Mean(submodels=other).load_state_dict(strategy.state_dict())
    assert other.rounds == 1
