from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp.strategy import FedAvg, FedMedian, Strategy
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.arrays import FlatArrays, Layout
from fedplat.compat import records_from_bytes, records_to_bytes
from fedplat.errors import UserError
from fedplat.runtime.local import LocalGrid
from fedplat.security.fixed_point import FixedPoint
from fedplat.security.secure_messages import KEYS, SHARES, UNMASK
from fedplat.security.validation import refusal
from fedplat.strategies import FedCredit, Krum, Mean, Median
from fedplat.strategies.aggregators import InfeasibleError
from fedplat.strategies.secure_aggregation import SecureAggregation, grouped
from fedplat.strategies.wrapper import load_state, state_of

from ..flower_apps import record, with_partition_query
from ..secure_apps import START, bits, lost, means, play, secure_app

# The result ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("width", "cap"), [(32, 1), (64, 1), (64, 1000)])
def test_the_model_is_bit_for_bit_that_of_sums_without_masks(workers: int, width: int, cap: int) -> None:
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=3, bits=width, max_weight=cap)
    arrays = play(strategy, 8, workers=workers)
    groups = strategy.members
    assert sorted(len(group) for group in groups.values()) == [2, 3, 3]
    codec = FixedPoint(clip=8.0, bits=width, summands=3, max_weight=cap)

    def weight(partition: int) -> int:
        return 1 if cap == 1 else 10 * partition + 1

    models = means(groups.values(), codec, weight)
    total = [sum(map(weight, group)) for group in groups.values()]
    stacked = np.stack([model.vector for model in models]).astype(np.float64)
    expected = (np.array(total) / sum(total)) @ stacked
    got = FlatArrays.of_record(arrays, Layout.of_record(START, promote=True))
    np.testing.assert_allclose(got.vector, expected, rtol=3e-7, atol=1e-7)
    # The same bits from the same strategy with the same means as replies of three plain clients.
    again = play(SecureAggregation(Mean(fraction_evaluate=0.0), groups=3, bits=width, max_weight=cap), 8)
    assert bits(again) == bits(arrays)
    plain = Mean(fraction_evaluate=0.0)

    class Three(LocalGrid):
        def get_node_ids(self) -> list[int]:
            return [0, 1, 2]

        def send_and_receive(self, messages, *, timeout=None):
            return []

    messages = list(plain.configure_train(1, START, ConfigRecord(), Three(ClientApp(), 1, workers=0)))
    replies = [
        Message(
            RecordDict({"arrays": model.to_record(), "metrics": MetricRecord({"num-examples": count})}),
            reply_to=message,
        )
        for message, model, count in zip(messages, models, total, strict=True)
    ]
    assert bits(plain.aggregate_train(1, replies)[0]) == bits(arrays)


@pytest.mark.parametrize(
    "make", [lambda: FedAvg(fraction_evaluate=0.0), lambda: FedMedian(fraction_evaluate=0.0)]
)
def test_flowers_own_strategies_work_on_groups_too(make: Callable[[], Strategy]) -> None:
    strategy = SecureAggregation(make(), groups=3)
    arrays = play(strategy, 9, rounds=1, release_metrics=True)
    models = means(
        [[node_id - 1000 for node_id in group] for group in strategy.members.values()],
        FixedPoint(clip=8.0, bits=32, summands=3),
        lambda p: 1,
    )
    stacked = np.stack([model.view("w") for model in models])
    expected = (
        np.mean(stacked, axis=0) if "Avg" in type(strategy.strategy).__name__ else np.median(stacked, 0)
    )
    np.testing.assert_allclose(arrays["w"].numpy(), expected, atol=1e-6)
    assert strategy.reports == []


def test_several_rounds_leave_nothing_behind_at_the_clients_and_keep_the_groups() -> None:
    strategy = SecureAggregation(FedCredit(fraction_evaluate=0.0), groups=4, seed=5)
    first: dict[int, list[int]] = {}
    with LocalGrid(secure_app(), 12, workers=0) as grid:
        arrays = START
        for number in (1, 2, 3):
            messages = list(strategy.configure_train(number, arrays, ConfigRecord(), grid))
            first = first or strategy.members
            arrays, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
            assert strategy.members == first
            assert grid.node_states() == {}
    assert {len(r.scores) for r in strategy.reports} == {len(strategy.strategy.reports[0].scores)} != {0}


def test_every_message_survives_flowers_wire_format() -> None:
    class Wire(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            for message in messages:
                message.content = records_from_bytes(records_to_bytes(message.content))
            replies = super().send_and_receive(messages, timeout=timeout)
            for reply in replies:
                reply.content = records_from_bytes(records_to_bytes(reply.content))
            return replies

    results = []
    for kind in (LocalGrid, Wire):
        with kind(secure_app(), 4, workers=0) as grid:
            strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=1)
            messages = list(strategy.configure_train(1, START, ConfigRecord(), grid))
            results.append(bits(strategy.aggregate_train(1, grid.send_and_receive(messages))[0]))
    assert results[0] == results[1]


# Who drops out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [KEYS, SHARES, "train", UNMASK])
def test_a_client_may_drop_out_at_any_step(at: str) -> None:
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=1, threshold=0.6)
    arrays = play(strategy, 5, lost(at, 1, 3))
    gone = [] if at == UNMASK else [1, 3]
    models = means([[p for p in range(5) if p not in gone]], FixedPoint(8.0, 32, 5), lambda p: 1)
    assert bits(arrays) == bits(models[0].to_record())
    assert sorted(strategy.dropped) == gone
    by_client = {report.client: report for report in strategy.reports}
    assert sorted(by_client) == [0, 1, 2, 3, 4]
    assert all(by_client[p].status == "failed" and "lost" in by_client[p].reason for p in gone)
    weights = [by_client[p].weight for p in range(5)]
    assert weights == pytest.approx([0 if p in gone else 1 / (5 - len(gone)) for p in range(5)])


@pytest.mark.parametrize("at", [KEYS, SHARES, "train", UNMASK])
def test_a_group_with_too_few_left_is_left_out_and_the_others_go_on(at: str) -> None:
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=2, threshold=1.0, seed=1)
    groups = grouped(range(6), 2, 1, {})
    spoilt = groups[0]
    arrays = play(strategy, 6, lost(at, spoilt[0]))
    models = means([groups[1]], FixedPoint(8.0, 32, 3), lambda p: 1)
    assert bits(arrays) == bits(models[0].to_record())
    assert sorted(strategy.dropped) == spoilt
    assert "2 of at least 3 members" in strategy.dropped[spoilt[1]]
    reports = {report.client: report for report in strategy.reports}
    assert [reports[p].status for p in spoilt] == ["failed"] * 3
    assert [reports[p].weight for p in groups[1]] == pytest.approx([1 / 3] * 3)
    assert strategy.diagnostics["groups-summed"] == 1
    assert strategy.diagnostics["dropped"] == 3


@pytest.mark.parametrize("make", [Mean, FedAvg])
def test_with_no_group_left_the_model_stays_as_it_is(make: type) -> None:
    strategy = SecureAggregation(make(fraction_evaluate=0.0), groups=1)
    for at in (KEYS, "train"):
        with LocalGrid(secure_app(behave=lost(at, *range(4))), 4, workers=0) as grid:
            messages = list(strategy.configure_train(1, START, ConfigRecord(), grid))
            assert strategy.aggregate_train(1, grid.send_and_receive(messages))[0] is None
        assert sorted(map(bool, strategy.dropped.values())) == [True] * 4


def test_silent_clients_are_waited_for_so_long_and_named() -> None:
    def sleeps(message: Message, partition: int, call_next: ClientAppCallable, context: Context) -> None:
        if message.metadata.message_type == SHARES and partition == 2:
            time.sleep(30)

    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=1, timeout=0.4)
    play(strategy, 4, sleeps, workers=2)
    assert strategy.dropped == {2: "no answer to query.secure_shares within 0.4 s"}


def test_an_app_without_the_mod_is_told_what_is_missing() -> None:
    app = with_partition_query(ClientApp())
    with LocalGrid(app, 4, workers=0) as grid:
        strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=1)
        assert list(strategy.configure_train(1, START, ConfigRecord(), grid)) == []
    assert "no SecureAggregationMod, or it was not registered" in strategy.dropped[0]


@pytest.mark.parametrize("at", [KEYS, SHARES, "train", UNMASK])
@pytest.mark.parametrize("reason", ["", " \n", "why\nand where"])
def test_whatever_error_a_client_sends_the_round_goes_on(at: str, reason: str) -> None:
    def fails(
        message: Message, partition: int, call_next: ClientAppCallable, context: Context
    ) -> Message | None:
        wrong = partition == 1 and message.metadata.message_type == at
        return Message(Error(7, reason), reply_to=message) if wrong else None

    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=1)
    play(strategy, 4, fails)
    assert sum(report.status == "accepted" for report in strategy.reports) == 3 + (at == UNMASK)
    assert all(told.endswith(("why", "error code 7")) for told in strategy.dropped.values())


@pytest.mark.parametrize("at", [KEYS, SHARES, UNMASK])
def test_whatever_answer_a_client_makes_up_the_round_goes_on(at: str) -> None:
    junk: list[dict] = [
        {},
        {
            "fedplat.secure-aggregation": ConfigRecord(
                {"ids": b"123", "sealed": [b""], "encryption-key": b"k"}
            )
        },
        {"fedplat.secure-aggregation": ConfigRecord({"ids": 5, "shares": "x", "mask-key": 1.5})},
        {"fedplat.secure-aggregation": MetricRecord({"ids": 1})},
    ]
    for made_up in junk:

        def lies(
            message: Message, partition: int, call_next: ClientAppCallable, context: Context
        ) -> Message | None:
            wrong = partition == 1 and message.metadata.message_type == at
            return Message(RecordDict(made_up), reply_to=message) if wrong else None  # noqa: B023

        strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=1)
        play(strategy, 4, lies)
        accepted = sum(report.status == "accepted" for report in strategy.reports)
        assert accepted == 3 + (at == UNMASK)
        assert {r.status for r in strategy.reports} - {"accepted"} == (set() if at == UNMASK else {"refused"})


def test_a_refused_reply_counts_as_refused() -> None:
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=1)
    with LocalGrid(secure_app(), 4, workers=0) as grid:
        messages = list(strategy.configure_train(1, START, ConfigRecord(), grid))
        replies = grid.send_and_receive(messages)
        replies[0] = refusal(replies[0], "bad signature")
        strategy.aggregate_train(1, replies)
    assert next((r.status, r.reason) for r in strategy.reports) == (
        "refused",
        "no masked update: bad signature",
    )
    assert [r.weight for r in strategy.reports] == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])


# Groups and settings ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_groups_are_balanced_and_a_client_moves_only_to_keep_them_so(data) -> None:
    groups = data.draw(st.integers(1, 6))
    clients = data.draw(st.sets(st.integers(0, 2**64 - 1), max_size=25))
    seed = data.draw(st.integers(0, 5))
    first = grouped(sorted(clients), groups, seed, {})
    assert first == grouped(sorted(clients, reverse=True), groups, seed, {})
    homes = {client: number for number, group in enumerate(first) for client in group}
    assert grouped(sorted(clients), groups, seed, homes) == first
    present = {client for client in clients if data.draw(st.booleans())}
    later = grouped(sorted(present), groups, seed, homes)
    for placed in (first, later):
        sizes = [len(group) for group in placed]
        assert max(sizes) - min(sizes) <= 1
    assert sorted(client for group in later for client in group) == sorted(present)


def test_the_seed_draws_the_groups() -> None:
    assert grouped(range(20), 4, 1, {}) != grouped(range(20), 4, 2, {})


def test_a_resumed_run_keeps_its_groups() -> None:
    strategy = SecureAggregation(FedCredit(fraction_evaluate=0.0), groups=3, seed=1)
    play(strategy, 9)
    again = SecureAggregation(FedCredit(fraction_evaluate=0.0), groups=3, seed=99)
    load_state(again, state_of(strategy))
    play(again, 9)
    assert again.members == strategy.members


def test_a_rule_is_checked_against_the_number_of_groups_before_anybody_trains() -> None:
    krum = Krum(f=2, fraction_evaluate=0.0)
    rule = krum.aggregator
    with pytest.raises(InfeasibleError, match="n = 5"):
        play(SecureAggregation(krum, groups=5), 20)
    assert krum.aggregator is rule


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"groups": 0}, "groups must be at least 1"),
        ({"groups": 2, "threshold": 0.5}, "threshold must be above 0.5"),
        ({"groups": 2, "threshold": 1.1}, "at most 1"),
        ({"groups": 2, "timeout": 0}, "timeout must be above 0"),
        ({"groups": 2, "clip": -1}, "clip must be a number above 0"),
        ({"groups": 2, "bits": 16}, "bits must be 32 or 64"),
        ({"groups": 2, "max_weight": 0}, "at least one term of weight 1"),
        ({"groups": 3}, "5 clients are too few for 3 groups of at least 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        play(SecureAggregation(Median(fraction_evaluate=0.0), **wrong), 5)


def test_models_of_different_parts_are_refused() -> None:
    class Parts(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            messages = list(super().configure_train(server_round, arrays, config, grid))
            for message in messages[1:]:
                message.content = RecordDict({**message.content, "arrays": record(w=np.zeros(3, np.float32))})
            return messages

    with pytest.raises(UserError, match="updates of one model"):
        play(SecureAggregation(Parts(fraction_evaluate=0.0), groups=1), 4)


@pytest.mark.parametrize(
    ("size", "threshold", "least"),
    [(2, 2 / 3, 2), (3, 2 / 3, 2), (4, 2 / 3, 3), (6, 2 / 3, 4), (9, 2 / 3, 6), (4, 0.51, 3), (5, 1.0, 5)],
)
def test_the_threshold_is_a_part_of_the_group_and_always_more_than_half(
    size: int, threshold: float, least: int
) -> None:
    assert SecureAggregation(Mean(), groups=1, threshold=threshold)._least(size) == least
