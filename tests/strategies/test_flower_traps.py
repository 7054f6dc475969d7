"""What goes wrong around Flower 1.42 and must not go wrong here, a test for each trap.

Others are in test_composed.py (names, shapes, counts), test_against_flower.py (beside Flower's own rules),
test_flower_apps.py (handlers without an answer) and tests/runtime/test_local.py (workers that die).
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedplat import strategies
from fedplat.arrays import peek
from fedplat.compat import SERVER_NODE_ID, make_error_message, make_message
from fedplat.errors import UserError
from fedplat.rounds import rounds
from fedplat.runtime.local import LocalGrid
from fedplat.strategies import (
    FedCredit,
    FederatedStrategy,
    Mean,
    Median,
    NormClipping,
    RandomFraction,
)

from ..flower_apps import plain_app, record, replies_to, with_partition_query
from .test_composed import SilentGrid

NODES = list(range(21, 29))
EVERY = sorted(
    name
    for name in strategies.__all__
    if inspect.isclass(kind := getattr(strategies, name))
    and issubclass(kind, FederatedStrategy)
    and kind is not FederatedStrategy
)


def moved(arrays: ArrayRecord, server_round: int) -> ArrayRecord:
    """Return what FLTrust's clean data make of the model."""
    return record(
        **{
            name: np.asarray(array.numpy() + 1).astype(array.numpy().dtype)
            if array.dtype[0] == "f"
            else array.numpy()
            for name, array in arrays.items()
        }
    )


def build(name: str, **parts: Any) -> FederatedStrategy:
    kind = getattr(strategies, name)
    made: FederatedStrategy = kind(moved, **parts) if name == "FLTrust" else kind(**parts)
    return made


def model(step: float, count: int = 4, flag: bool = True) -> ArrayRecord:
    """Return a model of all the types there are, ``step`` from zero in its floats."""
    grid = np.arange(1, 7).reshape(3, 2)
    return record(
        **{
            "w": (step * grid).astype(np.float32),
            "scale": np.array(step, np.float32),
            "half": np.array([step, -step], np.float16),
            "double": np.array([step / 3], np.float64),
            "bn.num_batches_tracked": np.array(count, np.int64),
            "mask": np.array([flag, True]),
            "bytes": np.array([count, 0], np.uint8),
        }
    )


START = model(0.0, 0, False)


def honest() -> dict[int, ArrayRecord | Error]:
    rng = np.random.default_rng(6)
    return {node: model(1 + 0.1 * rng.normal(), 4 + node % 2) for node in NODES}


def asked_by(strategy: FederatedStrategy, nodes: list[int] = NODES) -> list[Message]:
    return list(strategy.configure_train(1, START, ConfigRecord(), SilentGrid(nodes)))


def bytes_of(messages: Iterable[Message]) -> list[Any]:
    return [
        [(name, array.dtype, array.shape, array.data) for name, array in message.content["arrays"].items()]
        + [dict(message.content["metrics"])]
        for message in messages
    ]


# Whatever the rule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_every_array_comes_back_with_its_name_shape_and_type(name: str) -> None:
    # Traps: int64 and bool come back as float64, float16 is summed in float16, float64 comes for float32.
    strategy = build(name)
    arrays, _ = strategy.aggregate_train(1, replies_to(asked_by(strategy), honest()))
    assert arrays is not None
    assert [(n, a.numpy().dtype, a.numpy().shape) for n, a in arrays.items()] == [
        (n, a.numpy().dtype, a.numpy().shape) for n, a in START.items()
    ]
    assert all(np.isfinite(a.numpy()).all() for a in arrays.values())
    assert int(arrays["bn.num_batches_tracked"].numpy()) in (4, 5)
    assert arrays["mask"].numpy().all()
    assert float(arrays["scale"].numpy()) > 0


@pytest.mark.parametrize("name", EVERY)
def test_replies_settings_and_global_generators_are_as_they_were(name: str) -> None:
    # Traps: FedMedian empties the replies, FedAvg writes into the caller's config, sampling is Python's own.
    strategy, config = build(name), ConfigRecord({"lr": 0.1})
    before = random.getstate(), str(np.random.get_state())  # noqa: NPY002
    messages = list(strategy.configure_train(1, START, config, SilentGrid(NODES)))
    replies = replies_to(messages, honest())
    sent = bytes_of(replies)
    strategy.aggregate_train(1, replies)
    assert bytes_of(replies) == sent
    assert dict(config) == {"lr": 0.1}
    assert (random.getstate(), str(np.random.get_state())) == before  # noqa: NPY002


@pytest.mark.parametrize("name", EVERY)
def test_one_odd_client_is_left_out_of_any_rule_and_ends_no_round(name: str) -> None:
    # Traps: NaN spreads to the model, another set of keys ends the run, another shape raises from NumPy.
    bad: dict[int, Any] = {
        21: model(float("nan")),
        22: record(w=np.zeros(3, np.float32)),
        23: Error(8, "ClientApp stopped responding."),
        24: record(**{n: a.numpy() for n, a in model(1.0).items()} | {"scale": np.zeros(1, np.float32)}),
    }
    nodes = list(range(21, 33))
    strategy = build(name)
    messages = asked_by(strategy, nodes)
    everyone = {n: bad.get(n) or model(1.0) for n in nodes}
    arrays, _ = strategy.aggregate_train(1, replies_to(messages, everyone))
    assert arrays is not None
    assert np.isfinite(arrays["w"].numpy()).all()
    assert {r.node_id: r.status for r in strategy.reports if r.status != "accepted"} == {
        21: "refused",
        22: "refused",
        23: "failed",
        24: "refused",
    }


@pytest.mark.parametrize("name", EVERY)
def test_nothing_to_aggregate_is_none_and_never_an_empty_model(name: str) -> None:
    # Trap: an empty record is sent to the clients of the next round as the model.
    for replies in ([], [Error(2, "x")] * 8, [model(float("inf"))] * 8):
        strategy = build(name)
        messages = asked_by(strategy)
        answers = replies_to(messages, dict(zip(NODES, replies, strict=True))) if replies else []
        assert strategy.aggregate_train(1, answers) == (None, None)


# Settings of a round ---------------------------------------------------------------------------------------


def test_messages_of_a_round_still_tell_that_round_in_the_next() -> None:
    # Trap: all messages share one config, in which FedAvg writes the number of the round.
    strategy, config = Mean(), ConfigRecord({"lr": 0.1})
    first = list(strategy.configure_train(1, START, config, SilentGrid(NODES)))
    second = list(strategy.configure_train(2, START, config, SilentGrid(NODES)))
    assert {m.content["config"]["server-round"] for m in first} == {1}
    assert {m.content["config"]["server-round"] for m in second} == {2}
    assert {m.metadata.group_id for m in first} == {"1"}


def test_a_run_in_which_nobody_ever_answers_keeps_the_model_it_began_with() -> None:
    # Trap: the result of Flower's own loop is then an empty record.
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        raise ValueError("no data")

    with LocalGrid(app, 3, workers=0) as grid:
        last = list(rounds(Mean(fraction_evaluate=0.0), grid, START, 2))[-1]
    assert {n: a.data for n, a in last.arrays.items()} == {n: a.data for n, a in START.items()}
    assert all("no data" in reason for reason in last.failures.values())


# Who takes part, and who is who ----------------------------------------------------------------------------


class Restless(LocalGrid):
    """Gives nodes other ids in every run, lists them in another order at every call, and so their replies."""

    def __init__(self, app: ClientApp, num_nodes: int, seed: int) -> None:
        super().__init__(app, num_nodes, workers=0)
        self._random = random.Random(seed)
        own = list(super().get_node_ids())
        self._shown = {node: self._random.getrandbits(64) | 1 << 63 for node in own}
        self._own = {shown: node for node, shown in self._shown.items()}

    def get_node_ids(self) -> list[int]:
        ids = list(self._own)
        self._random.shuffle(ids)
        return ids

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        inner = [
            Message(m.content, self._own[m.metadata.dst_node_id], m.metadata.message_type) for m in messages
        ]
        replies = super().send_and_receive(inner, timeout=timeout)
        for reply in replies:
            reply.metadata.__dict__["_src_node_id"] = self._shown[reply.metadata.src_node_id]
        self._random.shuffle(replies)
        return replies


def noisy_app() -> ClientApp:
    """Add noise that only the partition decides on, so that sums depend on their order in the last bits."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        noise = np.random.default_rng(partition).normal(size=500)
        arrays = [(a + noise).astype(np.float32) for a in message.content["arrays"].to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": 3 + partition, "loss": float(noise[0])})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

    return with_partition_query(app)


@pytest.mark.parametrize("kind", [Mean, Median, FedCredit])
def test_the_seed_decides_a_run_whatever_ids_nodes_have_and_whoever_answers_first(kind: type) -> None:
    # Traps: random ids, nodes in no order, sampling by the process's own generator, replies as they come.
    results = []
    for seed in (1, 2):
        random.seed(seed)
        with Restless(noisy_app(), 12, seed) as grid:
            strategy = kind(seed=5, selector=RandomFraction(fraction=0.5), fraction_evaluate=0.0)
            start = ArrayRecord([np.zeros(500, np.float32)])
            result = strategy.start(grid, start, num_rounds=3)
        chosen = [report.client for report in strategy.reports]
        results.append((result.arrays["0"].data, chosen, dict(result.train_metrics_clientapp[3])))
    assert results[0] == results[1]
    assert len(results[0][1]) == 6
    assert max(results[0][1]) < 12


def test_nodes_that_claim_one_partition_both_go_by_their_ids() -> None:
    app = plain_app()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        claimed = min(int(context.node_config["partition-id"]), 2)
        return Message(RecordDict({"node": ConfigRecord({"partition-id": claimed})}), reply_to=message)

    with LocalGrid(app, 4, workers=0) as grid:
        strategy = Mean(fraction_evaluate=0.0)
        strategy.start(grid, ArrayRecord([np.zeros(1, np.float32)]), num_rounds=1)
        ids = grid.get_node_ids()
    assert [r.client for r in strategy.reports] == [0, 1, *ids[2:]]


def test_a_lost_nodes_error_counts_as_that_nodes_though_the_superlink_sends_it() -> None:
    # Trap: such an error has 1, the SuperLink, as its source; only the message it answers tells whose it is.
    strategy = FedCredit()
    messages = asked_by(strategy)
    for number, message in enumerate(messages):
        message.metadata.__dict__["_message_id"] = f"message {number}"
    replies = replies_to(messages, honest())
    gone = Message(Error(5, "node unavailable"), reply_to=messages[3])
    gone.metadata.__dict__["_src_node_id"] = SERVER_NODE_ID
    replies[3] = make_error_message(gone.metadata, gone.error)
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert [(r.node_id, r.reason) for r in strategy.reports if r.status == "failed"] == [
        (NODES[3], "node unavailable")
    ]
    assert {r.node_id for r in strategy.reports} == set(NODES)


def test_a_node_that_answers_twice_counts_once() -> None:
    strategy = Mean()
    nodes = NODES[:2]
    messages = asked_by(strategy, nodes)
    replies = replies_to([*messages, messages[1]], {nodes[0]: model(1), nodes[1]: model(3)})
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert arrays["w"].numpy()[0, 0] == 2
    told = sorted((r.node_id, r.status, r.reason) for r in strategy.reports)
    assert told == [
        (nodes[0], "accepted", ""),
        (nodes[1], "accepted", ""),
        (nodes[1], "refused", "a second reply to one message"),
    ]


def test_a_federation_that_shrinks_goes_on_or_ends_with_a_sentence_and_never_waits_for_ever() -> None:
    # Trap: with two of two nodes required and one of them lost, FedAvg waits without an end.
    strategy = Mean(min_nodes=1)
    asked_by(strategy)
    left = list(strategy.configure_train(2, START, ConfigRecord(), SilentGrid(NODES[:1])))
    assert [m.metadata.dst_node_id for m in left] == NODES[:1]
    strict = Mean(min_nodes=2, node_wait=0.0)
    with pytest.raises(UserError, match="1 of at least 2 clients are connected"):
        strict.configure_train(2, START, ConfigRecord(), SilentGrid(NODES[:1]))


# What a reply may look like --------------------------------------------------------------------------------


def good(metrics: dict[str, Any] | None = None, **more: Any) -> RecordDict:
    counted = MetricRecord({"num-examples": 1, **(metrics or {})})
    return RecordDict({"arrays": model(5.0), "metrics": counted, **more})


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (good({"only-mine": 2.0}), "accepted"),
        (good({"curve": [1.0, 2.0]}), "accepted"),
        (good(note=ConfigRecord({"text": "hello"})), "accepted"),
        (good(more=MetricRecord({"time": 3.0})), "accepted"),
        (good(more=model(5.0)), "refused"),
        (good(more=MetricRecord({"num-examples": 2})), "refused"),
        (RecordDict({"arrays": model(5.0)}), "refused"),
        (RecordDict({"metrics": MetricRecord({"num-examples": 1})}), "refused"),
        (RecordDict({"arrays": ArrayRecord(), "metrics": MetricRecord({"num-examples": 1})}), "refused"),
        (RecordDict(), "refused"),
    ],
)
def test_a_reply_of_another_make_is_taken_or_refused_and_never_ends_the_run(
    content: RecordDict, status: str
) -> None:
    # Trap: FedAvg wants the same records and metrics of all, or ends the run for all.
    strategy = Mean()
    messages = asked_by(strategy, NODES[:3])
    replies = replies_to(messages, dict.fromkeys(NODES[:3], model(2.0)))
    replies[1] = Message(content, reply_to=messages[1])
    arrays, metrics = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert metrics is not None
    assert [r.status for r in strategy.reports if r.node_id == NODES[1]] == [status]
    assert arrays["w"].numpy()[0, 0] == (3 if status == "accepted" else 2)


def test_arrays_that_are_no_arrays_are_refused() -> None:
    strategy = Mean()
    messages = asked_by(strategy, NODES[:3])
    replies = replies_to(messages, dict.fromkeys(NODES[:3], model(2.0)))
    broken = ArrayRecord(dict(model(5.0)))
    good_array = broken["w"]
    broken["w"] = Array(good_array.dtype, good_array.shape, "numpy.ndarray", b"not an array")
    replies[1].content["arrays"] = broken
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert arrays["w"].numpy()[0, 0] == 2
    assert [r.node_id for r in strategy.reports if r.status == "refused"] == [NODES[1]]


# Numbers of one element, and updates of none ---------------------------------------------------------------


def test_a_lone_number_is_clipped_like_everything_else() -> None:
    # Trap: Flower's clipping passes 0-d arrays through: a scalar moved by 100 is sent as 100.
    start, far = record(t=np.array(0.0, np.float32)), record(t=np.array(100.0, np.float32))
    strategy = NormClipping(bound=1.0)
    messages = list(strategy.configure_train(1, start, ConfigRecord(), SilentGrid(NODES)))
    arrays, _ = strategy.aggregate_train(1, replies_to(messages, dict.fromkeys(NODES, far)))
    assert arrays is not None
    assert float(arrays["t"].numpy()) == pytest.approx(1)


@pytest.mark.parametrize("name", EVERY)
def test_clients_that_change_nothing_are_no_division_by_zero(name: str) -> None:
    # Trap: an update of zeros divides by its length in Flower's clipping.
    strategy = build(name)
    arrays, _ = strategy.aggregate_train(1, replies_to(asked_by(strategy), dict.fromkeys(NODES, START)))
    assert arrays is not None
    assert np.abs(arrays["w"].numpy()).max() < 0.1
    assert {r.status for r in strategy.reports} == {"accepted"}


def test_a_peek_is_no_copy_and_what_is_decoded_of_a_reply_is_its_own() -> None:
    array = Array(np.arange(3, dtype=np.float32))
    view = peek(array)
    assert not view.flags.owndata
    array.numpy()[0] = 9
    assert view[0] == 0
    reply = make_message(
        Message(RecordDict(), 1, "train").metadata, RecordDict({"a": ArrayRecord({"w": array})})
    )
    assert reply.content["a"]["w"].numpy().tolist() == [0, 1, 2]
