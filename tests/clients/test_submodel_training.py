from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn
from torch.nn import functional

from fedplat import experiment
from fedplat.arrays import FlatArrays
from fedplat.clients.app import ExperimentApp, make_client_app
from fedplat.clients.stacked.execution import Execution
from fedplat.clients.submodel_training import OrderedDropout, PartModels, masked_loss
from fedplat.clients.task import ClientTask
from fedplat.clients.training import train_one
from fedplat.compat import MessageType
from fedplat.config import load
from fedplat.errors import UserError
from fedplat.models import loss_fn
from fedplat.models.cutting import plan_of, shrink
from fedplat.models.flat import FlatModel, channels_last_works
from fedplat.rng import generator
from fedplat.runtime.local import LocalGrid
from fedplat.submodel_options import (
    KIND,
    MASKED_LOSS,
    SCALER,
    SIZES,
    STATIC_NORM,
    WIDTHS,
    Shape,
    SubModelOptions,
)

from ..models.cutting_nets import seeded, small_conv_net, tiny_resnet, zoo_model
from ..models.zoo import plain_models

SCENARIO: dict[str, Any] = {
    "name": "parts",
    "rounds": 1,
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 4},
    "model": {"name": "mlp", "hidden": [16, 8]},
    "training": {"batch_size": 64, "lr": 0.1, "momentum": 0.9, "keep_optimizer": True},
}


def task_of(**changes: Any) -> ClientTask:
    return experiment.build_situation(load({**SCENARIO, **changes}, "parts"), "cpu").task


def part_of(task: ClientTask, width: float) -> tuple[FlatArrays, str]:
    flat = FlatModel(task.build_model())
    model = FlatArrays(flat.layout, flat.vector.numpy().copy(), flat.side.numpy().copy())
    cut = task.plan.prefix(width)
    return task.plan.index_map(cut, flat.layout).extract(model), cut.sizes.dumps()


def message(record: ArrayRecord, node: int, server_round: int = 1, **config: Any) -> Message:
    told = ConfigRecord({"server-round": server_round, **{k: v for k, v in config.items() if v is not None}})
    return Message(RecordDict({"arrays": record, "config": told}), node, MessageType.TRAIN)


def said(sizes: str, kind: str = "a", **more: Any) -> dict[str, Any]:
    return {SIZES: sizes, KIND: kind, **more}


def test_a_client_trains_the_part_it_was_sent_as_a_module_of_that_size_would_be() -> None:
    task = task_of()
    part, sizes = part_of(task, 0.5)
    small = FlatModel(shrink(task.build_model(), task.plan, task.plan.prefix(0.5).sizes))
    small.load(part)
    train_one(small, task.training, *task.samples(2), generator(task.seed, "batches", 2, 1))
    with LocalGrid(make_client_app(task, Execution(False, 1, True, "given", {})), 4, workers=0) as grid:
        node = list(grid.get_node_ids())[2]
        (reply,) = grid.send_and_receive([message(part.to_record(), node, **said(sizes))])
    np.testing.assert_array_equal(FlatArrays.of_record(reply.content["arrays"]).vector, small.vector.numpy())


def test_groups_of_mixed_sizes_are_trained_by_size_and_agree_with_one_after_another() -> None:
    task = task_of()
    whole = FlatModel(task.build_model())
    full = FlatArrays(whole.layout, whole.vector.numpy().copy(), whole.side.numpy().copy())
    half, sizes = part_of(task, 0.5)
    app = ExperimentApp(task, Execution(True, 16, True, "given", {}))
    single = ExperimentApp(task, Execution(False, 1, True, "given", {}))
    messages, contexts = [], []
    for i in range(4):
        record, config = (half.to_record(), said(sizes)) if i % 2 else (full.to_record(), {})
        messages.append(message(record, i, **config))
        contexts.append(Context(0, i, {"partition-id": i}, RecordDict(), {}))
    together = app.run_group(messages, contexts)
    for i, reply in enumerate(together):
        assert reply is not None
        alone = single(messages[i], Context(0, i, {"partition-id": i}, RecordDict(), {}))
        ours, theirs = (FlatArrays.of_record(r.content["arrays"]).vector for r in (reply, alone))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_part_that_changes_bits_when_stacked_is_not_stacked_where_bits_must_not_depend_on_groups() -> None:
    task = task_of()
    sizes = task.plan.prefix(0.5).sizes.dumps()
    parts = PartModels(task)
    assert parts.trainer(Shape(sizes), exact=True) is not None
    scaled = Shape(sizes, "training")
    assert parts.trainer(scaled, exact=False) is not None
    assert parts.trainer(scaled, exact=True) is None


def test_momentum_is_kept_while_the_part_stays_the_same_and_dropped_when_it_changes() -> None:
    task = task_of()
    half, sizes = part_of(task, 0.5)
    quarter, fewer = part_of(task, 0.25)
    app = make_client_app(task, Execution(False, 1, True, "given", {}))

    def second(kind: str, first: tuple[FlatArrays, dict[str, Any]] | None) -> np.ndarray:
        context = Context(0, 1, {"partition-id": 0}, RecordDict(), {})
        if first is not None:
            app(message(first[0].to_record(), 1, 1, **first[1]), context)
        reply = app(message(half.to_record(), 1, 2, **said(sizes, kind)), context)
        assert len([key for key in context.state if "optimizer" in key]) == 1
        return FlatArrays.of_record(reply.content["arrays"]).vector.copy()

    fresh = second("a", None)
    assert not np.array_equal(second("a", (half, said(sizes, "a"))), fresh)
    np.testing.assert_array_equal(second("b", (half, said(sizes, "a"))), fresh)
    np.testing.assert_array_equal(second("a", (quarter, said(fewer, "a"))), fresh)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({SIZES: "nonsense"}, "sizes of a sub-model"),
        ({SIZES: '{"units":{"fc1":99,"fc2":1},"depths":{}}'}, "99 units"),
        ({WIDTHS: "wide"}, "numbers"),
        ({SCALER: "sometimes"}, "scaler"),
        ({WIDTHS: "0.5,2"}, "at most 1"),
    ],
)
def test_a_message_that_makes_no_sense_is_an_error_of_that_client(config: dict[str, Any], words: str) -> None:
    task = task_of()
    app = make_client_app(task, Execution(False, 1, True, "given", {}))
    whole = FlatModel(task.build_model())
    record = FlatArrays(whole.layout, whole.vector.numpy().copy(), whole.side.numpy().copy()).to_record()
    with pytest.raises(UserError, match=words):
        app(message(record, 1, **config), Context(0, 1, {"partition-id": 0}, RecordDict(), {}))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "conv": (small_conv_net, (1, 6, 6), 3),
    "resnet": (tiny_resnet, (1, 8, 8), 5),
    "resnet-batch": (functools.partial(tiny_resnet, "batch"), (1, 8, 8), 5),
}


class _Task:
    """As much of a task as ordered dropout looks at."""

    def __init__(self, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
        with torch.device("meta"):
            self.shapes = make()
        self.plan = plan_of(self.shapes, shape)


class _Draws:
    def __init__(self, *values: int) -> None:
        self.values = list(values)

    def integers(self, high: int) -> int:
        return min(self.values.pop(0), high - 1)


@pytest.mark.parametrize("name", NETS)
def test_a_drawn_width_computes_and_learns_as_the_first_units_of_the_clients_own_model(name: str) -> None:
    make, shape, classes = NETS[name]
    task: Any = _Task(make, shape)
    whole = seeded(make)
    own = task.plan.prefix(0.75)
    model = FlatModel(shrink(whole, task.plan, own.sizes))
    small = FlatModel(shrink(whole, task.plan, task.plan.prefix(0.5).sizes))
    options = SubModelOptions(Shape(own.sizes.dumps()), "", (0.5, 0.75, 1.0))
    rng: Any = _Draws(1, 0)
    ordered = OrderedDropout(model, task, options, rng)
    assert len(ordered._parts) == 2  # its own, and the one of half the units; the whole is not its
    x, y = torch.rand(6, *shape), torch.arange(6) % classes
    for flat in (model, small):
        flat.module.train()
    loss = ordered.loss(x, y)
    loss.backward()
    reference = loss_fn(small(x), y)
    reference.backward()
    torch.testing.assert_close(loss, reference)
    inside = plan_of(model.module, shape)
    cut = inside.of_sizes(task.plan.prefix(0.5).sizes)
    where = inside.index_map(cut, model.layout)
    p, k = model.layout.num_params, small.layout.num_params
    expected = torch.zeros(model.layout.dim)
    expected[torch.from_numpy(where.index.copy())[:k]] = small.grad
    torch.testing.assert_close(model.grad, expected[:p], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ordered.loss(x, y), loss_fn(model(x), y))


def test_ordered_dropout_of_an_lstm_reads_the_right_gates() -> None:
    names = plain_models()
    flat = zoo_model(names.index("char-lstm"))
    task: Any = _Task.__new__(_Task)
    task.shapes, task.plan = flat.module, plan_of(flat.module, (6,))
    sizes = task.plan.prefix(0.5).sizes
    small = FlatModel(shrink(flat.module, task.plan, sizes))
    rng: Any = _Draws(1)
    ordered = OrderedDropout(flat, task, SubModelOptions(widths=(0.5, 1.0)), rng)
    x, y = torch.randint(0, 10, (3, 6)), torch.randint(0, 10, (3, 6))
    loss = ordered.loss(x, y)
    loss.backward()
    torch.testing.assert_close(loss, loss_fn(small(x), y))
    flat.zero_grad()


def test_distillation_adds_the_wide_models_loss_and_pulls_the_narrow_one_to_its_outputs() -> None:
    make, shape, classes = NETS["resnet"]
    task: Any = _Task(make, shape)
    model = FlatModel(seeded(make))
    half = FlatModel(shrink(model.module, task.plan, task.plan.prefix(0.5).sizes))
    x, y = torch.rand(6, *shape), torch.arange(6) % classes
    rng: Any = _Draws(1)
    ordered = OrderedDropout(model, task, SubModelOptions(widths=(0.5, 1.0), distillation=0.25), rng)
    wide, narrow = model(x), half(x)
    divergence = (wide.softmax(1) * (wide.log_softmax(1) - narrow.log_softmax(1))).sum(1).mean()
    expected = loss_fn(wide, y) + 0.75 * loss_fn(narrow, y) + 0.25 * divergence
    torch.testing.assert_close(ordered.loss(x, y), expected)


def test_masked_loss_sets_logits_of_classes_that_the_client_has_not_to_zero() -> None:
    model = FlatModel(nn.Sequential(nn.Flatten(), nn.Linear(2, 4)))
    x, y = torch.rand(5, 2), torch.tensor([0, 2, 2, 0, 2])
    logits = model(x).clone()
    logits[:, [1, 3]] = 0
    torch.testing.assert_close(masked_loss(model, y, 4)(x, y), functional.cross_entropy(logits, y))


def test_masked_and_static_options_reach_the_training() -> None:
    task = task_of(partition={"name": "shards", "clients": 4, "classes_per_client": 2})
    app = make_client_app(task, Execution(True, 4, True, "given", {}))
    half, sizes = part_of(task, 0.5)

    def reply(**more: Any) -> np.ndarray:
        context = Context(0, 1, {"partition-id": 0}, RecordDict(), {})
        answer = app(message(half.to_record(), 1, **said(sizes), **more), context)
        return FlatArrays.of_record(answer.content["arrays"]).vector.copy()

    assert not np.array_equal(reply(), reply(**{MASKED_LOSS: True}))
    np.testing.assert_array_equal(reply(), reply(**{STATIC_NORM: True}))  # there is no norm


def test_static_statistics_stay_as_they_were_sent() -> None:
    task: Any = replace(task_of(), build_model=functools.partial(tiny_resnet, "batch"))
    parts = PartModels(task)
    sizes = task.plan.prefix(0.5).sizes.dumps()
    model = parts.model(Shape(sizes, "training", static_norm=True))
    model.vector.fill_(0.5)
    before = model.vector.clone()
    model.module.train()
    model(torch.rand(4, 1, 8, 8))
    torch.testing.assert_close(model.vector, before)
    assert parts.model(Shape(sizes, "training", static_norm=True)) is model
    parts.forget()
    assert parts.model(Shape(sizes, "training", static_norm=True)) is not model


def test_what_the_message_says_of_sizes_is_one_line_of_json() -> None:
    options = SubModelOptions.of({SIZES: '{"units":{"a":1},"depths":{}}', WIDTHS: "0.5,1.0", "x": 1})
    assert json.loads(options.shape.sizes) == {"units": {"a": 1}, "depths": {}}
    assert options.widths == (0.5, 1.0)
    assert not options.plain
    assert SubModelOptions.of({"server-round": 3}) == SubModelOptions()


def test_narrow_strided_shortcuts_are_not_given_channels_last_which_torch_would_crash_on() -> None:
    whole = tiny_resnet()
    plan = plan_of(whole, (1, 8, 8))
    assert channels_last_works(whole)
    assert not channels_last_works(shrink(whole, plan, plan.prefix(0.5).sizes))
    assert channels_last_works(small_conv_net())
