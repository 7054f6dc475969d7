from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian, Strategy

from fedplat.arrays import FlatArrays
from fedplat.clients.mods.privacy import LocalPrivacyMod
from fedplat.errors import UserError
from fedplat.runtime.local import LocalGrid
from fedplat.security.privacy import gaussian_epsilon
from fedplat.strategies import (
    FederatedStrategy,
    Krum,
    Mean,
    Median,
    RandomFraction,
    TrimmedMean,
)
from fedplat.strategies.aggregators import Aggregate, Aggregator, mean
from fedplat.strategies.differential_privacy import CentralPrivacy, LocalPrivacyAccount
from fedplat.strategies.sensitivity import sensitivity_of
from fedplat.strategies.wrapper import load_state, state_of
from fedplat.updates import ClientUpdates

from ..flower_apps import plain_app, record, replies_to, with_partition_query
from .test_composed import SilentGrid

QUIET = 1e-9
"""A noise multiplier that shows what is under the noise."""

START = {
    "w": np.zeros(6, np.float32),
    "t": np.array(0.0, np.float32),
    "bn.running_mean": np.zeros(3, np.float32),
    "bn.num_batches_tracked": np.array(7, np.int64),
}


def model(value: float = 0.0, scalar: float = 0.0, counter: int = 100) -> ArrayRecord:
    arrays = {
        **START,
        "w": np.array([value, 0, 0, 0, 0, 0], np.float32),
        "t": np.array(scalar, np.float32),
        "bn.num_batches_tracked": np.array(counter, np.int64),
    }
    return record(**arrays)


def ask(strategy: Strategy, nodes: Iterable[int], server_round: int = 1, start: Any = None) -> list[Message]:
    arrays = record(**START) if start is None else start
    return list(strategy.configure_train(server_round, arrays, ConfigRecord(), SilentGrid(list(nodes))))


def one_round(
    strategy: Strategy,
    models: Mapping[int, ArrayRecord | Error],
    counts: Mapping[int, object] | None = None,
    server_round: int = 1,
) -> dict[str, np.ndarray] | None:
    messages = ask(strategy, models, server_round)
    arrays, _ = strategy.aggregate_train(server_round, replies_to(messages, models, counts))
    return None if arrays is None else {name: array.numpy() for name, array in arrays.items()}


def central(strategy: Strategy, noise: float = QUIET, clip: float = 1.0, **others: Any) -> CentralPrivacy:
    return CentralPrivacy(strategy, clip=clip, noise_multiplier=noise, delta=1e-5, seed=3, **others)


# What becomes of the replies ---------------------------------------------------------------------------


@pytest.mark.parametrize("inner", [Mean, FedAvg])
def test_updates_are_clipped_as_one_vector_and_count_alike_whatever_they_claim(inner: Any) -> None:
    # Trap: a scalar moved by 100 passes Flower's clipping at 1.
    models = {11: model(scalar=100.0), 12: model(3.0, 4.0), 13: model(0.25), 14: model()}
    out = one_round(central(inner()), models, {11: 10**6, 12: 1, 13: 5, 14: 40})
    assert out is not None
    assert out["t"] == pytest.approx((1 + 0.8) / 4)
    assert out["w"][0] == pytest.approx((0.6 + 0.25) / 4)
    assert out["bn.num_batches_tracked"] == 7
    assert {k: (v.dtype, v.shape) for k, v in out.items()} == {
        k: (v.dtype, v.shape) for k, v in START.items()
    }
    assert list(out) == list(START)


def test_types_of_the_model_are_kept() -> None:
    start = {"d": np.ones(2, np.float64), "h": np.ones(2, np.float16), "flag": np.array([True])}
    for inner in (Mean(), FedAvg(), FedMedian()):
        strategy = central(inner)
        messages = ask(strategy, (11, 12, 13), start=record(**start))
        moved = record(d=np.full(2, 2.0), h=np.ones(2, np.float16), flag=np.array([False]))
        arrays, _ = strategy.aggregate_train(1, replies_to(messages, dict.fromkeys((11, 12, 13), moved)))
        assert arrays is not None
        out = {name: array.numpy() for name, array in arrays.items()}
        assert {name: a.dtype for name, a in out.items()} == {name: a.dtype for name, a in start.items()}
        assert out["d"].tolist() == pytest.approx([1 + 0.5**0.5] * 2)
        assert out["h"].tolist() == [1, 1]
        assert out["flag"].tolist() == [True]


def test_replies_are_not_changed_and_the_inner_strategy_gets_rows_of_one_matrix() -> None:
    seen: list[Message] = []

    class Watching(Mean):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
            seen.extend(replies)
            return super().aggregate_train(server_round, seen)

    strategy = central(Watching(), sensitivity=lambda n: 1 / n)
    messages = ask(strategy, range(11, 15))
    replies = replies_to(messages, {n: model(float(n)) for n in range(11, 15)}, {n: n for n in range(11, 15)})
    before = [[a.data for a in r.content["arrays"].values()] for r in replies]
    strategy.aggregate_train(1, replies)
    assert [[a.data for a in r.content["arrays"].values()] for r in replies] == before
    assert [r.content["metrics"]["num-examples"] for r in replies] == [11, 12, 13, 14]
    rows = [FlatArrays.behind(m.content["arrays"]) for m in seen]
    assert [row.row for row in rows if row] == [0, 1, 2, 3]
    assert len({id(row.block) for row in rows if row}) == 1
    assert [dict(m.content["metrics"]) for m in seen] == [{"num-examples": 1}] * 4


def test_only_released_metrics_come_through() -> None:
    def told(strategy: CentralPrivacy) -> dict[str, Any]:
        messages = ask(strategy, (11, 12))
        replies = [
            Message(
                RecordDict(
                    {"arrays": model(), "m": MetricRecord({"num-examples": 9 * i + 1, "loss": float(i)})}
                ),
                reply_to=m,
            )
            for i, m in enumerate(messages)
        ]
        return dict(strategy.aggregate_train(1, replies)[1] or {})

    assert told(central(Mean())) == {}
    assert told(central(FedAvg())) == {}
    assert told(central(Mean(), release_metrics=True)) == {"loss": 0.5}


@pytest.mark.parametrize("inner", [Mean, FedAvg, Median, FedMedian])
def test_bad_replies_are_left_out_and_the_noise_is_for_those_used(inner: Any) -> None:
    # Traps: one error discards the round in Flower's wrapper; one NaN spoils its model.
    models: dict[int, ArrayRecord | Error] = {
        11: model(0.5),
        12: model(float("nan")),
        13: Error(2, "lost"),
        14: record(w=np.zeros(2, np.float32)),
        15: model(0.5),
    }
    strategy = central(inner())
    out = one_round(strategy, models)
    assert out is not None
    assert out["w"][0] == pytest.approx(0.5)
    assert strategy.diagnostics["noise-std"] == pytest.approx(QUIET * sensitivity_of(inner())(2))
    if isinstance(strategy.strategy, FederatedStrategy):
        status = {r.node_id: r.status for r in strategy.reports}
        assert status == {11: "accepted", 12: "refused", 13: "failed", 14: "refused", 15: "accepted"}


def test_a_second_reply_and_one_that_nobody_asked_for_count_for_nothing() -> None:
    for inner in (Mean(), FedAvg()):
        strategy = central(inner)
        messages = ask(strategy, (11, 12))
        stranger = ask(Mean(), (13,))
        models = {11: model(0.5), 12: model(0.25), 13: model(0.9)}
        replies = replies_to([messages[0], *messages, *stranger], models)
        arrays, _ = strategy.aggregate_train(1, replies)
        assert arrays is not None
        assert arrays["w"].numpy()[0] == pytest.approx(0.375)
        assert strategy.diagnostics["noise-std"] == pytest.approx(QUIET / 2)


def test_what_the_inner_strategy_leaves_out_itself_is_not_counted() -> None:
    class Picky(Aggregator):
        def __call__(self, updates: ClientUpdates) -> Aggregate:
            return mean(updates.params)

        def sensitivity(self, clients: int) -> float:
            return 1 / clients

    strategy = central(FederatedStrategy(Picky()), noise=1.0)
    one_round(strategy, {n: model() for n in range(11, 16)})
    assert strategy.diagnostics["noise-std"] == pytest.approx(1 / 5)


def test_without_a_valid_reply_the_model_stays_and_nothing_is_spent() -> None:
    for inner in (Mean(), FedAvg()):
        strategy = central(inner, noise=1.0)
        assert one_round(strategy, {11: Error(2, "x"), 12: model(float("inf"))}) is None
        assert strategy.diagnostics == {"epsilon": 0.0}
        ask(strategy, (11, 12))
        assert strategy.aggregate_train(1, []) == (None, None)
        assert strategy.own_state() == {"releases": []}


def test_the_order_of_arrival_changes_no_bit() -> None:
    rng = np.random.default_rng(2)
    models = {n: record(**{**START, "w": rng.normal(size=6).astype(np.float32)}) for n in range(1, 21)}
    for inner in (Mean, Median, FedAvg):
        results = []
        for turn in (1, -1):
            strategy = central(inner(), noise=0.5)
            messages = ask(strategy, models)
            arrays, _ = strategy.aggregate_train(1, replies_to(messages[::turn], models))
            assert arrays is not None
            results.append({name: array.data for name, array in arrays.items()})
        assert results[0] == results[1]


# The noise ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "change"),
    [
        (Mean, 1 / 5),
        (FedAvg, 1 / 5),
        (Median, 2.0),
        (FedMedian, 2.0),
        (Krum, 2.0),
        (TrimmedMean, 2 / 3 * 2**0.5),
    ],
)
def test_noise_has_the_stated_deviation_when_5_of_10_replies_arrive(inner: Any, change: float) -> None:
    # Trap: Flower's wrapper calibrates for those asked, here half of the noise that 5 need.
    start = record(w=np.ones((50, 40), np.float32), t=np.array(1.0, np.float32))
    strategy = central(inner(), noise=1.5, clip=0.7)
    draws = []
    for server_round in range(1, 21):
        messages = ask(strategy, range(10), server_round, start)
        arrays, _ = strategy.aggregate_train(
            server_round, replies_to(messages[::2], dict.fromkeys(range(10), start))
        )
        assert arrays is not None
        draws.append(np.append(arrays["w"].numpy().ravel(), arrays["t"].numpy()) - 1)
    noise = np.stack(draws)
    stated = 1.5 * 0.7 * change
    assert strategy.diagnostics["noise-std"] == pytest.approx(stated)
    assert noise.std() == pytest.approx(stated, rel=0.015)  # 40,020 draws: deviation known to 0.35 %
    assert abs(noise.mean()) < 4 * stated / 200
    assert len(set(noise[:, -1].tolist())) == 20  # scalars too


def test_noise_is_secret_without_a_seed_and_differs_by_round_with_one() -> None:
    def noise(seed: int | None, server_round: int = 1) -> bytes:
        strategy = CentralPrivacy(Mean(), clip=1.0, noise_multiplier=1.0, delta=1e-5, seed=seed)
        out = one_round(strategy, {11: model(), 12: model()}, server_round=server_round)
        assert out is not None
        return out["w"].tobytes()

    assert noise(None) != noise(None)
    assert noise(5) == noise(5)
    assert len({noise(5), noise(6), noise(5, 2)}) == 3


def test_a_seed_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    central(Mean())
    assert "whoever knows it can take the noise off" in caplog.text


# The account -------------------------------------------------------------------------------------------


def test_epsilon_adds_up_over_releases_and_goes_on_after_a_resumed_run() -> None:
    models = {11: model(), 12: model()}
    strategy = central(Mean(), noise=2.0)
    for n in (1, 2, 3):
        one_round(strategy, models, server_round=n)
        assert strategy.diagnostics["epsilon"] == gaussian_epsilon({2.0: n}, 1e-5)
    again = central(Mean(), noise=2.0)
    load_state(again, state_of(strategy))
    assert again.diagnostics["epsilon"] == strategy.diagnostics["epsilon"]
    one_round(again, models, server_round=4)
    assert again.diagnostics["epsilon"] == gaussian_epsilon({2.0: 4}, 1e-5)
    other = central(Mean(), noise=4.0)
    load_state(other, state_of(strategy))
    one_round(other, models, server_round=4)
    assert other.diagnostics["epsilon"] == gaussian_epsilon({2.0: 3, 4.0: 1}, 1e-5)


def test_the_round_that_would_exceed_the_budget_is_not_begun() -> None:
    budget = gaussian_epsilon({1.0: 3}, 1e-5)
    strategy = central(Mean(), noise=1.0, budget=budget)
    for n in (1, 2, 3):
        assert one_round(strategy, {11: model(), 12: model()}, server_round=n) is not None
    with pytest.raises(UserError, match=r"round 4 would bring epsilon from .* above the budget"):
        ask(strategy, (11, 12), 4)
    assert strategy.diagnostics["epsilon"] == budget


def test_a_client_is_charged_for_the_rounds_in_which_it_is_asked() -> None:
    strategy = LocalPrivacyAccount(
        Mean(selector=RandomFraction(fraction=0.5), seed=1), noise_multiplier=2.0, delta=1e-5
    )
    asked: dict[int, int] = {}
    for n in range(1, 6):
        messages = ask(strategy, range(10), n)
        for message in messages:
            asked[message.metadata.dst_node_id] = asked.get(message.metadata.dst_node_id, 0) + 1
        strategy.aggregate_train(n, replies_to(messages[1:], dict.fromkeys(range(10), model())))
    assert len(set(asked.values())) > 1
    for node in range(10):
        expected = gaussian_epsilon({2.0: asked[node]}, 1e-5) if node in asked else 0.0
        assert strategy.epsilon(node) == expected
    assert strategy.diagnostics["epsilon"] == max(map(strategy.epsilon, range(10)))
    assert all(r.scores["epsilon"] == strategy.epsilon(r.node_id) for r in strategy.reports)
    again = LocalPrivacyAccount(Mean(), noise_multiplier=2.0, delta=1e-5)
    load_state(again, state_of(strategy))
    assert [again.epsilon(node) for node in range(10)] == [strategy.epsilon(node) for node in range(10)]


def test_a_client_that_has_spent_its_budget_is_asked_no_more() -> None:
    strategy = LocalPrivacyAccount(
        FedAvg(), noise_multiplier=1.0, delta=1e-5, budget=gaussian_epsilon({1.0: 2}, 1e-5)
    )
    ask(strategy, (11, 12), 1)
    assert len(ask(strategy, (11, 12, 13), 2)) == 3
    assert [m.metadata.dst_node_id for m in ask(strategy, (11, 12, 13), 3)] == [13]
    with pytest.raises(UserError, match="every client asked would exceed its epsilon budget"):
        ask(strategy, (11, 12, 13), 4)


def test_a_client_is_known_by_its_identity_not_its_node() -> None:
    inner = Mean()
    inner.identities = {11: 77, 12: 78, 21: 77}
    strategy = LocalPrivacyAccount(inner, noise_multiplier=1.0, delta=1e-5)
    ask(strategy, (11, 12), 1)
    ask(strategy, (21, 12), 2)
    assert strategy.epsilon(21) == strategy.epsilon(12) == gaussian_epsilon({1.0: 2}, 1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip": 0.0}, "clip must be above 0"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be above 0"),
        ({"delta": 1.0}, "delta must be between 0 and 1"),
        ({"budget": 0.0}, "budget must be an epsilon above 0"),
        ({"sensitivity": 0.0}, "sensitivity must be above 0"),
        ({"sensitivity": float("inf")}, "sensitivity must be above 0 and finite"),
    ],
)
def test_settings_that_protect_nothing_are_refused(changes: dict[str, Any], words: str) -> None:
    settings = {"clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-5, **changes}
    with pytest.raises(UserError, match=words):
        CentralPrivacy(Mean(), **settings)


# Whole runs --------------------------------------------------------------------------------------------


def run(workers: int, inner: Strategy, app: ClientApp | None = None, rounds: int = 3) -> dict[str, bytes]:
    with LocalGrid(app or with_partition_query(plain_app()), 6, workers=workers) as grid:
        start = ArrayRecord([np.zeros(50, np.float32), np.ones((2, 2), np.float32)])
        result = inner.start(grid, start, num_rounds=rounds)
    return {name: array.data for name, array in result.arrays.items()}


@pytest.mark.parametrize("inner", [Mean, Median])
def test_the_same_seed_gives_the_same_bits_with_one_worker_and_with_two(inner: Any) -> None:
    assert run(1, central(inner(), noise=0.3)) == run(2, central(inner(), noise=0.3))


def test_flowers_fedavg_runs_inside_with_secret_noise() -> None:
    strategy = CentralPrivacy(FedAvg(), clip=1.0, noise_multiplier=0.1, delta=1e-5)
    run(1, strategy)
    assert strategy.diagnostics["epsilon"] == gaussian_epsilon({0.1: 3}, 1e-5)


def test_a_run_with_local_privacy_repeats_with_its_seed_and_is_accounted_for() -> None:
    def app() -> ClientApp:
        private = with_partition_query(ClientApp())
        private.train(mods=[LocalPrivacyMod(clip=1.0, noise_multiplier=0.5, seed=2)])(plain_app())
        return private

    def strategy() -> LocalPrivacyAccount:
        return LocalPrivacyAccount(Mean(fraction_evaluate=0.0), noise_multiplier=0.5, delta=1e-5)

    first = strategy()
    assert run(1, first, app()) == run(2, strategy(), app())
    assert first.diagnostics["epsilon"] == gaussian_epsilon({0.5: 3}, 1e-5)
    assert [report.num_examples for report in first.reports] == [1] * 6
