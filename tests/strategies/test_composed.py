from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian, Strategy

from fedplat.errors import UserError
from fedplat.runtime.local import LocalGrid
from fedplat.security.validation import ReplyRules
from fedplat.strategies import Krum, Mean, Median, RandomFraction, TrimmedMean

from ..flower_apps import plain_app, record, replies_to, with_partition_query


class SilentGrid(LocalGrid):
    """A grid whose nodes are asked for their ids only."""

    def __init__(self, node_ids: list[int]) -> None:
        super().__init__(ClientApp(), 1, workers=0)
        self._ids_shown = node_ids

    def get_node_ids(self) -> list[int]:
        return self._ids_shown

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return []


NODES = [11, 12, 13, 14]
START = {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}


def model(w: float, b: float | None = None) -> ArrayRecord:
    return record(w=np.full(2, w, np.float32), b=np.full(1, w if b is None else b, np.float32))


def aggregate(strategy: Strategy, models: dict, counts: dict | None = None):
    messages = strategy.configure_train(1, record(**START), ConfigRecord(), SilentGrid(list(models)))
    return strategy.aggregate_train(1, replies_to(messages, models, counts))


def reasons(strategy: Mean) -> dict[int, str]:
    return {r.node_id: f"{r.status}: {r.reason}" for r in strategy.reports if r.status != "accepted"}


def test_arrays_are_matched_by_name_whatever_their_order() -> None:
    # Trap: Flower's Bulyan, Krum and QFedAvg match by position.
    turned = ArrayRecord(dict(reversed(list(model(3, 9).items()))))
    arrays, _ = aggregate(Mean(), {11: model(1, 5), 12: turned})
    assert arrays is not None
    assert arrays["w"].numpy().tolist() == [2, 2]
    assert arrays["b"].numpy().tolist() == [7]
    assert list(arrays) == ["w", "b"]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (record(w=np.zeros(3, np.float32), b=np.zeros(1, np.float32)), "shape (3,)"),
        (record(w=np.zeros(2, np.float64), b=np.zeros(1, np.float32)), "float64"),
        (record(w=np.zeros(2, np.float32)), "missing arrays ['b']"),
        (model(float("nan")), "not finite"),
        (model(1, float("inf")), "not finite"),
        (Error(2, "ValueError: boom\ntraceback"), "failed: ValueError: boom"),
    ],
)
def test_a_bad_reply_is_left_out_and_named_and_the_round_goes_on(bad, words: str) -> None:
    for strategy in (Mean(), Median(), TrimmedMean(beta=0.3)):
        arrays, _ = aggregate(strategy, {11: model(1), 12: bad, 13: model(3)})
        assert arrays is not None
        assert arrays["w"].numpy().tolist() == [2, 2]
        assert list(reasons(strategy)) == [12]
        assert words in reasons(strategy)[12]
        assert {r.node_id for r in strategy.reports} == {11, 12, 13}


@pytest.mark.parametrize("count", [10**12, 0, -5, 2.5, float("nan"), float("inf"), [3, 4]])
def test_an_unbelievable_sample_count_is_refused(count) -> None:
    # Trap: Flower's FedAvg lets a client that claims 10^12 samples take over, and takes negative counts.
    strategy = Mean()
    arrays, _ = aggregate(strategy, {11: model(1), 12: model(100), 13: model(3)}, {12: count})
    assert arrays is not None
    assert arrays["w"].numpy().tolist() == [2, 2]
    assert "num-examples" in reasons(strategy)[12]


def test_sample_counts_are_bounded_by_what_the_rules_say() -> None:
    strategy = Mean(rules=ReplyRules(max_examples=60))
    arrays, _ = aggregate(strategy, {11: model(1), 12: model(4)}, {11: 30, 12: 60})
    assert arrays is not None
    assert arrays["w"].numpy().tolist() == [3, 3]
    assert strategy.reports[1].weight == pytest.approx(2 / 3)
    assert strategy.reports[1].update_norm == pytest.approx(4 * 3**0.5)


def test_huge_finite_updates_are_no_error_and_their_norm_does_not_overflow() -> None:
    # Trap: the float32 norm of [2e19, 2e19] is infinite.
    strategy = Median()
    arrays, _ = aggregate(strategy, {11: model(1), 12: model(2e19, 0), 13: model(3)})
    assert arrays is not None
    assert reasons(strategy) == {}
    assert strategy.reports[1].update_norm == pytest.approx(2.828427e19)


def test_node_ids_of_64_bits_as_flower_draws_them_are_fine() -> None:
    strategy = Mean()
    large = 2**64 - 1
    arrays, _ = aggregate(strategy, {large: model(1), 5: model(3)})
    assert arrays is not None
    assert {r.node_id for r in strategy.reports} == {5, large}


def test_with_no_valid_reply_the_model_stays_and_nothing_is_returned() -> None:
    strategy = Mean()
    assert aggregate(strategy, {11: model(float("nan")), 12: Error(2, "x")}) == (None, None)
    assert len(strategy.reports) == 2
    silent = Median()
    list(silent.configure_train(1, record(**START), ConfigRecord(), SilentGrid(NODES)))
    assert silent.aggregate_train(1, []) == (None, None)


def test_trimmed_mean_refuses_before_training_what_it_cannot_do_and_copes_with_a_short_round() -> None:
    with pytest.raises(UserError, match=r"2 x 1 trimmed clients must be fewer than n = 2"):
        aggregate(TrimmedMean(beta=0.4), {11: model(1), 12: model(2)})
    lost = Error(2, "lost")
    arrays, _ = aggregate(TrimmedMean(beta=0.4), {11: model(1), 12: model(5), 13: lost, 14: lost, 15: lost})
    assert arrays is not None
    assert arrays["w"].numpy().tolist() == [3, 3]


def test_replies_and_the_callers_config_are_not_changed() -> None:
    strategy, config = Median(), ConfigRecord({"lr": 0.1})
    messages = list(strategy.configure_train(1, record(**START), config, SilentGrid(NODES)))
    assert dict(config) == {"lr": 0.1}
    assert dict(messages[0].content["config"]) == {"lr": 0.1, "server-round": 1}
    replies = replies_to(messages, {n: model(n) for n in NODES})
    before = [{k: a.data for k, a in r.content["arrays"].items()} for r in replies]
    strategy.aggregate_train(1, replies)
    assert [{k: a.data for k, a in r.content["arrays"].items()} for r in replies] == before


def test_types_of_the_model_are_kept_and_counters_are_never_averaged_as_floats() -> None:
    # Traps: Flower returns int64 counters as float64; float32 loses 16,777,217.
    def batch_norm(mean: float, var: float, count: int, half: float) -> ArrayRecord:
        return record(
            **{
                "w": np.array([1.0], np.float32),
                "bn.running_mean": np.array([mean], np.float32),
                "bn.running_var": np.array([var], np.float32),
                "bn.num_batches_tracked": np.array(count, np.int64),
                "h": np.array([half], np.float16),
                "d": np.array([1e-9], np.float64),
            }
        )

    start = batch_norm(0, 1, 0, 0)
    strategy = Mean(weighted=False)
    messages = strategy.configure_train(1, start, ConfigRecord(), SilentGrid(NODES[:3]))
    replies = replies_to(
        messages,
        {11: batch_norm(0, 1, 10, 0.5), 12: batch_norm(4, 1, 16_777_217, 1.0), 13: batch_norm(8, 4, 31, 1.5)},
    )
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    assert {k: a.numpy().dtype for k, a in arrays.items()} == {k: a.numpy().dtype for k, a in start.items()}
    assert arrays["bn.running_mean"].numpy().tolist() == [4]
    assert arrays["bn.running_var"].numpy().tolist() == [2]
    assert arrays["bn.num_batches_tracked"].numpy() == 31
    assert arrays["h"].numpy().tolist() == [1.0]


def test_a_negative_variance_never_reaches_the_model() -> None:
    def with_variance(value: float) -> ArrayRecord:
        return record(**{"w": np.zeros(1, np.float32), "bn.running_var": np.array([value], np.float32)})

    strategy = Mean()
    messages = strategy.configure_train(1, with_variance(1), ConfigRecord(), SilentGrid(NODES[:2]))
    arrays, _ = strategy.aggregate_train(
        1, replies_to(messages, {11: with_variance(1), 12: with_variance(-9)})
    )
    assert arrays is not None
    assert arrays["bn.running_var"].numpy().tolist() == [0]


@pytest.mark.parametrize(("ours", "flowers"), [(Mean, FedAvg), (Median, FedMedian)])
def test_same_replies_give_the_arrays_of_flowers_own_strategy(ours, flowers) -> None:
    rng = np.random.default_rng(5)

    def random_model() -> ArrayRecord:
        return record(w=rng.normal(size=(20, 30)).astype(np.float32), b=rng.normal(size=7).astype(np.float32))

    start = random_model()
    models, counts = {n: random_model() for n in NODES}, {n: n for n in NODES}
    strategy = ours()
    replies = replies_to(
        strategy.configure_train(1, start, ConfigRecord(), SilentGrid(NODES)), models, counts
    )
    arrays, _ = strategy.aggregate_train(1, replies)
    expected, _ = flowers().aggregate_train(1, replies)
    assert arrays is not None
    for name in ("w", "b"):
        np.testing.assert_allclose(arrays[name].numpy(), expected[name].numpy(), rtol=1e-5, atol=1e-6)


def test_order_of_arrival_changes_no_bit() -> None:
    rng = np.random.default_rng(7)
    models = {
        n: record(w=rng.normal(size=200).astype(np.float32), b=np.zeros(1, np.float32)) for n in range(20, 30)
    }
    start = record(w=np.zeros(200, np.float32), b=np.zeros(1, np.float32))
    results = []
    for turn in (1, -1):
        strategy = Mean()
        messages = list(strategy.configure_train(1, start, ConfigRecord(), SilentGrid(list(models))))
        arrays, _ = strategy.aggregate_train(1, replies_to(messages[::turn], models))
        assert arrays is not None
        results.append(arrays["w"].data)
    assert results[0] == results[1]


def test_nodes_that_tell_their_partition_are_ordered_by_it() -> None:
    class Shuffled(LocalGrid):
        def get_node_ids(self) -> list[int]:
            return list(reversed(super().get_node_ids()))

    with Shuffled(with_partition_query(plain_app()), 4, workers=0) as grid:
        strategy = Mean()
        strategy.start(grid, ArrayRecord([np.zeros(1, np.float32)]), num_rounds=1)
    assert [r.client for r in strategy.reports] == [0, 1, 2, 3]
    assert [r.num_examples for r in strategy.reports] == [10, 11, 12, 13]


def test_a_strategy_is_a_flower_strategy_and_evaluates_on_the_clients() -> None:
    with LocalGrid(plain_app(), 4, workers=0) as grid:
        strategy = Median(selector=RandomFraction(fraction=0.5), fraction_evaluate=1.0)
        result = strategy.start(grid, ArrayRecord([np.zeros(2, np.float32)]), num_rounds=2)
    assert isinstance(strategy, Strategy)
    assert len(strategy.reports) == 2
    assert result.arrays["0"].numpy().tolist() == [2, 2]
    assert result.evaluate_metrics_clientapp[2]["total"] == 4
    assert "num-examples" not in result.evaluate_metrics_clientapp[2]


def test_selection_follows_the_seed_and_changes_from_round_to_round() -> None:
    def chosen(seed: int) -> list[list[int]]:
        strategy = Mean(selector=RandomFraction(fraction=0.3), seed=seed)
        grid = SilentGrid(list(range(100, 120)))
        return [
            [
                m.metadata.dst_node_id
                for m in strategy.configure_train(r, record(**START), ConfigRecord(), grid)
            ]
            for r in (1, 2, 3)
        ]

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)
    assert chosen(1)[0] != chosen(1)[1]


def test_waiting_for_clients_has_an_end_and_says_how_many_are_there() -> None:
    strategy = Mean(min_nodes=5, node_wait=0.0)
    with pytest.raises(UserError, match="4 of at least 5 clients are connected after 0 s"):
        strategy.configure_train(1, record(**START), ConfigRecord(), SilentGrid(NODES))


def test_metrics_are_averaged_by_sample_count_over_those_who_sent_them_if_most_did() -> None:
    strategy = Mean()
    messages = list(strategy.configure_train(1, record(**START), ConfigRecord(), SilentGrid(NODES[:3])))
    replies = [
        Message(RecordDict({"arrays": model(1), "metrics": MetricRecord(metrics)}), reply_to=m)
        for m, metrics in zip(
            messages,
            [
                {"num-examples": 1, "loss": 4.0, "a": 1.0},
                {"num-examples": 3, "loss": 0.0, "b": 1.0},
                {"num-examples": 9, "loss": float("nan")},
            ],
            strict=True,
        )
    ]
    _, metrics = strategy.aggregate_train(1, replies)
    assert dict(metrics or {}) == {"loss": 1.0}


def test_a_dropped_reply_takes_its_weight_along() -> None:
    # Trap: MUD-HoG's released code drops the vector of a NaN client and keeps its weight: 1.1.
    strategy = Mean()
    arrays, _ = aggregate(
        strategy, {11: model(float("nan")), 12: model(1), 13: model(5)}, {11: 1, 12: 2, 13: 7}
    )
    assert arrays is not None
    assert arrays["w"].numpy().tolist() == pytest.approx([37 / 9] * 2)  # 4.1111


def test_counters_and_statistics_play_no_part_in_distances() -> None:
    # Trap: counters of 100 and 5000 add 24,010,000 to a squared distance and decide Krum alone.
    def with_counter(w: float, count: int, mean: float) -> ArrayRecord:
        return record(
            **{
                "w": np.full(2, w, np.float32),
                "bn.running_mean": np.array([mean], np.float32),
                "bn.num_batches_tracked": np.array(count, np.int64),
            }
        )

    strategy = Krum(f=1)
    nodes = (11, 12, 13, 14, 15)
    start = with_counter(0, 0, 0)
    messages = list(strategy.configure_train(1, start, ConfigRecord(), SilentGrid(nodes)))
    sent = dict(
        zip(nodes, [(0, 100, 0), (1, 5000, 900), (1.1, 100, 0), (0.9, 100, 5), (9, 100, 0)], strict=True)
    )
    arrays, _ = strategy.aggregate_train(
        1, replies_to(messages, {n: with_counter(*v) for n, v in sent.items()})
    )
    assert arrays is not None
    assert arrays["w"].numpy().tolist() == [1, 1]
