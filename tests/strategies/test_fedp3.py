"""Who trains which layers, what is sent for that and what comes back, to the byte."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn

from fedplat.arrays import FlatArrays, Layout, payload_bytes, peek
from fedplat.compression.base import EncodingError
from fedplat.emulation.schedule import Budget
from fedplat.errors import UserError
from fedplat.fedp3_options import FEDP3, PartOptions
from fedplat.layer_map import LayerMap, part_layout, part_of, with_part
from fedplat.models.dense import mlp
from fedplat.models.fedp3_nets import fedp3_cnn, fedp3_mlp
from fedplat.models.flat import FlatModel
from fedplat.models.resnet import resnet18
from fedplat.sparse_payload import packed, unpacked
from fedplat.strategies import Krum, Mean
from fedplat.strategies.fedp3 import FedP3, FedP3Scheme
from fedplat.strategies.fedp3.layers import LayerSets, covering
from fedplat.strategies.fedp3.masks import RoundMasks, kept_count, magnitude_mask
from fedplat.strategies.nodes import Node
from fedplat.strategies.submodels import FULL, SubModelContext, layout_of

from ..flower_apps import replies_to
from ..models.cutting_nets import tiny_resnet
from .test_composed import SilentGrid

SHAPE = (1, 4, 4)
net = functools.partial(mlp, SHAPE, 3, hidden=(8, 6, 5))
KINDS = ("lower-b", "opu2", "opu3", "opu-1-2-3", "opu-2-3", "full")


def model_of(build: Any = net, seed: int = 0) -> FlatArrays:
    flat = FlatModel(build())
    rng = np.random.default_rng(seed)
    vector = rng.standard_normal(flat.layout.dim).astype(np.float32)
    return FlatArrays(flat.layout, vector, flat.side.numpy().copy())


def bound(scheme: FedP3Scheme, **changes: Any) -> FedP3Scheme:
    scheme.bind(SubModelContext.of(net, SHAPE, 3, **{"clients": 6, **changes}))
    return scheme


def node(partition: int) -> Node:
    return Node(100 + partition, partition)


def on_meta(build: Any) -> Layout:
    with torch.device("meta"):
        return layout_of(build())


# Layers --------------------------------------------------------------------------------------------------


def test_a_layer_is_a_module_with_its_norm_and_a_resnet18_has_the_papers_18() -> None:
    layout = on_meta(functools.partial(resnet18, (3, 32, 32), 10))
    layers = LayerMap.of(layout)
    assert len(layers.hidden) + 1 == 18
    assert all(len(layer.weights) in (1, 2) for layer in layers.hidden)  # two: with a shortcut's
    everything = [name for layer in layers.by_name.values() for name in layer.arrays]
    assert sorted(everything) == sorted(layout.by_name)
    first = layers.hidden[0].arrays
    assert any(name.endswith("running_mean") or "norm" in name for name in first)


def test_the_nets_have_the_layers_and_sizes_of_the_papers_table() -> None:
    for build, sizes in (
        (functools.partial(fedp3_cnn, (3, 32, 32), 10), (4_864, 102_464, 1_639_424, 1_049_600, 10_250)),
        (functools.partial(fedp3_cnn, (1, 28, 28), 10), (1_664, 102_464, 1_639_424, 1_049_600, 10_250)),
        (functools.partial(fedp3_mlp, (1, 28, 28), 10), (803_840, 1_049_600, 1_049_600, 10_250)),
    ):
        layout = on_meta(build)
        layers = LayerMap.of(layout).by_name.values()
        found = [sum(layout.by_name[n].stop - layout.by_name[n].start for n in one.arrays) for one in layers]
        assert tuple(found) == sizes
    assert nn.Module.__call__(fedp3_cnn((1, 28, 28), 10), torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert fedp3_cnn((3, 36, 40), 7, norm="group")(torch.zeros(2, 3, 36, 40)).shape == (2, 7)
    with pytest.raises(UserError, match="alike on all sides"):
        fedp3_cnn((1, 27, 28), 10)
    with pytest.raises(UserError, match="tokens"):
        fedp3_mlp((8,), 10)


def test_a_model_without_hidden_layers_is_refused() -> None:
    with pytest.raises(UserError, match="no hidden layer"):
        LayerMap.of(Layout.of({"fc.weight": ((2, 3), "float32"), "fc.bias": ((2,), "float32")}))
    with pytest.raises(UserError, match="layer of the model"):
        LayerMap.of(on_meta(net)).named(["fc9"])


def test_a_part_goes_out_and_in_and_nothing_else_changes() -> None:
    model = model_of(tiny_resnet)
    model.side[:] = 7
    layers = LayerMap.of(model.layout)
    names = layers.arrays_of([layers.hidden[3].name, layers.head.name])
    part = part_of(model, names)
    assert part.layout == part_layout(model.layout, names)
    changed = FlatArrays(part.layout, part.vector + 1, part.side + np.uint8(1))
    new = with_part(model, changed)
    for entry in model.layout.entries:
        same = np.array_equal(new.view(entry.name), model.view(entry.name))
        assert same == (entry.name not in names)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draw", ["rotation", "random", "each-round"])
@pytest.mark.parametrize("clients", [5, 8, 100])
def test_every_layer_is_some_clients_in_every_round(kind: Any, draw: Any, clients: int) -> None:
    sets = LayerSets(kind, draw, clients, 4, seed=3)
    for server_round in (1, 2):
        found = [sets(client, server_round) for client in range(clients)]
        assert set().union(*found) == set(range(4))
        assert {len(one) for one in found} <= set(sets.counts)
        again = LayerSets(kind, draw, clients, 4, seed=3)
        assert found == [again(client, server_round) for client in range(clients)]
    if draw != "each-round":
        assert [sets(c, 1) for c in range(clients)] == [sets(c, 2) for c in range(clients)]


def test_the_rotation_is_that_of_the_released_code() -> None:
    for kind, size in (("lower-b", 1), ("opu2", 2), ("opu3", 3)):
        sets = LayerSets(kind, "rotation", 100, 4)  # type: ignore[arg-type]
        for client in range(100):
            group = client // 25
            assert sets(client, 1) == tuple(sorted((group + j) % 4 for j in range(size)))


def test_layers_drawn_each_round_change_and_too_few_clients_are_refused() -> None:
    sets = LayerSets("opu2", "each-round", 20, 4)
    assert [sets(c, 1) for c in range(20)] != [sets(c, 2) for c in range(20)]
    with pytest.raises(UserError, match="cannot"):
        LayerSets("lower-b", "rotation", 3, 4)
    with pytest.raises(UserError, match="cannot cover"):
        covering([(0,), (0,)], 3, np.random.default_rng(0))
    assert sorted(sum(covering([(0, 1), (0, 1)], 4, np.random.default_rng(0)), ())) == [0, 1, 2, 3]
    # Without a number of clients the rotation is by their own.
    assert [LayerSets("lower-b", "rotation", 0, 4)(c, 1) for c in range(5)] == [(0,), (1,), (2,), (3,), (0,)]


# Pruning and the wire ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.9, 0.7, 0.5, 0.29])
def test_masks_keep_the_largest_and_exactly_so_many(share: float) -> None:
    weights = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    mask = magnitude_mask(weights, share)
    assert mask.sum() == round(share * 100) == kept_count(100, share)
    if share < 1:
        assert np.abs(weights[mask]).min() > np.abs(weights[~mask]).max()
    ties = magnitude_mask(np.zeros(10, np.float32), share)
    assert ties.tolist() == [i < kept_count(10, share) for i in range(10)]


def test_a_payload_comes_back_to_the_bit_and_has_only_what_is_kept() -> None:
    model = model_of(tiny_resnet)
    model.vector[5] = -0.0
    names = LayerMap.of(model.layout).hidden[2].weights
    keep = RoundMasks(model)(names, 0.5)
    arrays = packed(model, keep)
    size = sum(kept.size for kept in keep.values())
    left = size - sum(kept_count(kept.size, 0.5) for kept in keep.values())
    assert arrays["values"].nbytes == 4 * (model.layout.dim - left)
    assert arrays["mask"].nbytes == -(-size // 8)
    back = unpacked(arrays, model.layout, names)
    for entry in model.layout.entries:
        kept = keep[entry.name].reshape(entry.shape) if entry.name in names else True
        wanted = np.where(kept, model.view(entry.name), 0).astype(model.view(entry.name).dtype)
        assert back.view(entry.name).tobytes() == wanted.tobytes()


def test_payloads_that_do_not_fit_are_refused() -> None:
    model = model_of()
    names = LayerMap.of(model.layout).weights_of(["fc1"])
    good = packed(model, RoundMasks(model)(names, 0.5))
    for bad in (
        {**good, "values": good["values"][:-1]},
        {**good, "mask": good["mask"][:-1]},
        {**good, "mask": good["mask"] | np.uint8(255)},
        {"values": good["values"]},
        {**good, "more": good["mask"]},
        {**good, "values": good["values"].astype(np.float64)},
    ):
        with pytest.raises(EncodingError):
            unpacked(bad, model.layout, names)
    with pytest.raises(EncodingError, match="no floating"):
        unpacked(good, model.layout, ["nothing"])


def test_what_travels_is_counted_by_hand_and_clients_of_one_kind_share_it() -> None:
    scheme = bound(FedP3Scheme(layers="lower-b", p=0.5))
    strategy = Mean(submodels=scheme)
    model = model_of()
    messages = list(strategy.configure_train(1, model.to_record(), ConfigRecord(), SilentGrid(range(6))))
    # fc1 8x16+8, fc2 6x8+6, fc3 5x6+5, head 3x5+3; client 0 and 1 have fc1 whole.
    first = {m.metadata.dst_node_id: m for m in messages}[0]
    arrays = first.content["arrays"]
    assert set(arrays) == {"values", "mask"}
    values = 136 + (24 + 6) + (15 + 5) + 18
    assert payload_bytes(arrays) == 4 * values + -(-(48 + 30) // 8)
    assert payload_bytes(arrays) == sum(peek(array).nbytes for array in arrays.values())
    assert len({id(m.content) for m in messages}) == 3
    for message in messages:
        spec, layout = strategy._assigned[message.metadata.dst_node_id]
        assert {e.name.split(".")[0] for e in layout.entries} == {*spec.kind.split("@")[0].split("+"), "fc4"}
    replies = {
        to: part_of(model, layout.by_name).to_record() for to, (_, layout) in strategy._assigned.items()
    }
    strategy.aggregate_train(1, replies_to(messages, replies))
    figures = strategy.diagnostics
    down = [4 * values + 10, 4 * (136 - 64 + 54 + 20 + 18) + 20, 4 * (72 + 30 + 35 + 18) + 22]
    assert figures["fedp3.bytes-down"] == sum(down) / 3
    assert figures["fedp3.bytes-up"] == 4 * ((136 + 54 + 35) / 3 + 18)
    assert figures["fedp3.mask-bytes"] == (10 + 20 + 22) / 3
    assert figures["fedp3.trained-by.fc2"] == 2
    assert figures["fedp3.density.fc2"] == pytest.approx((1 + 0.5 + 0.5) / 3)


def test_the_papers_uploads_of_one_layer_and_the_head() -> None:
    """Figure 6, to which the biases of linear layers are added that it does not count."""
    build = functools.partial(fedp3_cnn, (3, 32, 32), 10)
    scheme = FedP3Scheme(layers="lower-b", p=0.9)
    scheme.bind(SubModelContext.of(build, (3, 32, 32), 10, clients=4))
    uploads, downs = [], []
    for client in range(4):
        spec = scheme.assign(node(client), None, 1)
        assert spec is not None
        options = PartOptions.of(dict(spec.config))
        assert options is not None
        down, up = scheme._planned_bytes(options)
        uploads.append(up // 4)
        downs.append(down)
    assert uploads == [15_104 + 10, 112_704 + 10, 1_648_640 + 1024 + 10, 1_058_816 + 1024 + 10]
    # Deployed with conv1 without biases of linear layers; the figure says 2,525,600, with other rounding.
    deployed = 4_864 + (92_160 + 64) + 1_474_560 + 943_718 + 10_240
    assert abs(deployed - 2_525_600) < 10
    mask_bits = 102_400 + 1_638_400 + 1_048_576
    assert downs[0] == 4 * (deployed + 2 * 1024 + 10) + mask_bits // 8


def test_the_planned_bytes_are_those_that_are_sent() -> None:
    for kind in KINDS:
        scheme = bound(FedP3Scheme(layers=kind, p=0.7, local_head=True))
        model = model_of()
        scheme.begin_round(model, 1)
        for client in range(6):
            spec = scheme.assign(node(client), None, 1)
            assert spec is not None
            sent = scheme.extract(model, spec)
            down, up = scheme._planned_bytes(scheme._options[spec])
            assert payload_bytes(sent.to_record()) == down
            assert sent.layout.nbytes == up


def test_full_sets_are_the_whole_model_itself_and_p_1_needs_no_mask() -> None:
    full = bound(FedP3Scheme(layers="full"))
    assert full.assign(node(0), None, 1) == FULL
    model = model_of()
    assert full.extract(model, FULL) is model
    scheme = bound(FedP3Scheme(layers="lower-b", p=1.0))
    scheme.begin_round(model, 1)
    spec = scheme.assign(node(0), None, 1)
    assert spec is not None
    record = scheme.extract(model, spec).to_record()
    assert set(record) == {"values"}
    np.testing.assert_array_equal(peek(record["values"]), model.vector)


def test_what_comes_back_covers_its_layers_and_the_head_alone() -> None:
    scheme = bound(FedP3Scheme(layers="opu2"))
    model = model_of()
    scheme.begin_round(model, 1)
    spec = scheme.assign(node(3), None, 1)
    assert spec is not None
    part = scheme.extract(model, spec)
    reply = FlatArrays(part.layout, np.full(part.layout.dim, 9, np.float32), np.zeros(0, np.uint8))
    restored, covered = scheme.restore(reply, spec, model)
    assert covered is not None
    inside = covered.numpy()
    assert (restored.vector[inside] == 9).all()
    assert restored.vector[~inside].tobytes() == model.vector[~inside].tobytes()
    options = PartOptions.of(dict(spec.config))
    assert options is not None
    assert inside.sum() == part.layout.dim
    assert {e.name for e in part.layout.entries} == LayerMap.of(model.layout).arrays_of(
        (*options.trained, "fc4")
    )


@pytest.mark.parametrize("make", [FedP3, Mean, functools.partial(Krum, f=1)])
def test_layers_that_nobody_trains_stay_bit_for_bit_under_any_rule(make: Any) -> None:
    strategy = make(submodels=bound(FedP3Scheme(layers="lower-b", p=0.5)))
    model = model_of()
    messages = list(strategy.configure_train(1, model.to_record(), ConfigRecord(), SilentGrid(range(6))))
    replies = {}
    for message in messages:
        to = message.metadata.dst_node_id
        layout = strategy._assigned[to][1]
        replies[to] = FlatArrays(
            layout, np.full(layout.dim, to, np.float32), np.zeros(0, np.uint8)
        ).to_record()
    silent = [m for m in messages if "fc2" not in strategy._assigned[m.metadata.dst_node_id][0].kind]
    arrays, _ = strategy.aggregate_train(1, replies_to(silent, replies))
    new = FlatArrays.of_record(arrays)
    for name in ("fc2.weight", "fc2.bias"):
        assert new.view(name).tobytes() == model.view(name).tobytes()
    assert not np.array_equal(new.view("fc4.weight"), model.view("fc4.weight"))


def test_replies_with_more_than_was_asked_for_are_refused() -> None:
    strategy = FedP3(submodels=bound(FedP3Scheme(layers="lower-b")))
    model = model_of()
    messages = list(strategy.configure_train(1, model.to_record(), ConfigRecord(), SilentGrid(range(6))))
    arrays, _ = strategy.aggregate_train(1, replies_to(messages, dict.fromkeys(range(6), model.to_record())))
    assert arrays is None
    assert {report.status for report in strategy.reports} == {"refused"}


# Settings ------------------------------------------------------------------------------------------------


def test_shares_are_drawn_once_per_client_and_pruning_all_includes_the_trained() -> None:
    scheme = bound(FedP3Scheme(layers="lower-b", p=(0.5, 0.7, 0.9)), clients=40)
    kinds = [scheme.assign(node(c), None, 1) for c in range(40)]
    assert kinds == [scheme.assign(node(c), None, 2) for c in range(40)]
    assert {spec.kind.split("@")[1] for spec in kinds if spec} == {"0.5", "0.7", "0.9"}
    spec = bound(FedP3Scheme(layers="full", p=0.9, prune_all=True)).assign(node(0), None, 1)
    assert spec is not None
    options = PartOptions.of(dict(spec.config))
    assert options is not None
    assert options.trained == options.pruned == ("fc1", "fc2", "fc3")


def test_a_budget_gives_as_many_layers_as_the_deadline_allows_and_none_sits_out() -> None:
    scheme = FedP3Scheme(layers="budget", p=(0.5, 0.9))
    scheme.bind(SubModelContext.of(net, SHAPE, 3, clients=6, deadline_s=1.0))
    scheme.begin_round(model_of(), 1)

    def spec_of(bps: float) -> Any:
        return scheme.assign(node(0), Budget(10**9, int(bps), int(bps), True), 1)

    assert spec_of(1e9) == FULL
    kinds = []
    for bps in range(7_000, 18_000, 50):
        spec = spec_of(bps)
        kinds += [spec.kind] if spec is not None and spec.kind not in kinds else []
        if spec is not None and spec != FULL:
            assert 8 * sum(scheme._planned_bytes(scheme._options[spec])) / bps <= 1
    # More layers come before more of the others, and nothing is pruned once all are trained.
    assert kinds == ["fc1@0.5", "fc1@0.9", "fc1+fc2@0.5", "fc1+fc2@0.9", "full"]
    assert spec_of(100) is None
    assert "of 1 s" in scheme.why(node(0))
    few = FedP3Scheme(layers="opu3")
    few.bind(SubModelContext.of(net, SHAPE, 3, clients=6))
    assert few.assign(node(0), Budget(10, 10**9, 10**9, True), 1) is None
    assert "memory" in few.why(node(0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FedP3Scheme(p=0.0), "above 0"),
        (lambda: FedP3Scheme(p=()), "above 0"),
        (lambda: FedP3Scheme(dp_noise=1.0), "dp_clip"),
        (lambda: FedP3Scheme().context, "bind"),
        (lambda: FedP3(aggregation="best"), "simple, weighted, attention"),
        (lambda: bound(FedP3Scheme(), clients=1), None),
        (lambda: bound(FedP3Scheme(layers="lower-b"), clients=2), "cannot"),
    ],
)
def test_wrong_settings_are_explained(make: Any, words: str | None) -> None:
    if words is None:
        make()
        return
    with pytest.raises(UserError, match=words):
        make()


def test_models_without_a_head_of_classes_or_without_ordered_units_are_refused() -> None:
    with pytest.raises(UserError, match="has to be the head"):
        FedP3Scheme().bind(SubModelContext.of(net, SHAPE, 4))
    from fedplat.models.lstm import char_lstm

    build = functools.partial(char_lstm, (5,), 7)
    with pytest.raises(UserError, match="Take 'uniform'"):
        FedP3Scheme(local_pruning="ordered").bind(SubModelContext.of(build, (5,), 7))
    FedP3Scheme(layers="opu2", draw="random").bind(SubModelContext.of(build, (5,), 7, clients=4))


def test_options_travel_as_text_and_nonsense_is_refused() -> None:
    options = PartOptions(("fc1",), ("fc2",), 0.5, "uniform", 0.7, True, False, True, True, 1.0, 2.0)
    assert PartOptions.of({FEDP3: options.dumps()}) == options
    assert PartOptions.of({}) is None
    for text in (
        "{}",
        "[1]",
        "x",
        options.dumps().replace("0.5", "0"),
        options.dumps().replace("uniform", "u"),
    ):
        with pytest.raises(UserError):
            PartOptions.of({FEDP3: text})
    with pytest.raises(UserError, match="both"):
        PartOptions((), clip=1.0)


def test_what_is_tested_besides_is_the_model_pruned_throughout() -> None:
    scheme = bound(FedP3Scheme(layers="lower-b", p=(0.5, 1.0)))
    model = model_of()
    specs = scheme.parts_to_test(1)
    assert set(specs) == {"pruned-0.5"}
    pruned = scheme.extract(model, specs["pruned-0.5"])
    assert np.count_nonzero(pruned.view("fc1.weight")) == 64
    assert pruned.view("fc4.weight").tobytes() == model.view("fc4.weight").tobytes()
    assert pruned.view("fc1.bias").tobytes() == model.view("fc1.bias").tobytes()
