from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from flwr.serverapp import strategy as flowers
from flwr.serverapp.strategy import FedAvg, Strategy

from fedplat import registry
from fedplat.errors import UserError
from fedplat.strategies import (
    AdaptiveClipping,
    Bucketing,
    Clipping,
    FederatedStrategy,
    Flame,
    Mean,
    NearestNeighbourMixing,
)
from fedplat.strategies.aggregators import Aggregate, Aggregator, mean
from fedplat.strategies.differential_privacy import CentralPrivacy
from fedplat.strategies.sensitivity import sensitivity_of, trimmed_bound
from fedplat.strategies.wrapper import StrategyWrapper
from fedplat.updates import ClientUpdates

from ..flower_apps import record, replies_to
from .test_differential_privacy import QUIET, START, ask, central, model, one_round

REFUSED = {"fltrust", "sign-vote", "residual-reweighting", "flame", "fedconv-weights", "server-alone"}


def built(name: str) -> Strategy:
    extra = {"root": lambda arrays, server_round: arrays} if name == "fltrust" else {}
    strategy: Strategy = registry.find("strategies", name).load()(**extra)
    return strategy


def central_or_reason(name: str) -> CentralPrivacy | str:
    try:
        return central(built(name))
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("name", registry.entries("strategies"))
def test_every_strategy_runs_under_central_privacy_or_is_refused_with_a_reason(name: str) -> None:
    rng = np.random.default_rng(0)
    models = {n: record(**{**START, "w": rng.normal(size=6).astype(np.float32)}) for n in range(11, 24)}
    strategy = central_or_reason(name)
    if isinstance(strategy, str):
        assert "central privacy cannot say how far one client can move" in strategy
        assert name not in ("mean", "median", "trimmed-mean", "krum", "multi-krum", "fed-credit", "mud-hog")
        return
    assert name not in REFUSED
    for n in (1, 2):
        out = one_round(strategy, models, server_round=n)
        assert out is not None
        # A rule that stays among the updates, whatever it does, stays near the model sent.
        assert np.linalg.norm(np.concatenate([out["w"], out["bn.running_mean"]])) <= 3**0.5 + 1e-5
    assert strategy.diagnostics["epsilon"] > 0


FLOWERS: dict[str, float] = {
    "FedAvg": 1 / 11,
    "FedProx": 1 / 11,
    "FedMedian": 2.0,
    "FedTrimmedAvg": math.sqrt(2 * 10 / 2) / 7,
    "Krum": 2.0,
    "MultiKrum": 2.0,
    "Bulyan": 2 * 3**0.5,
}


@pytest.mark.parametrize("name", sorted(set(flowers.__all__) - {"Strategy", "Result"}))
def test_flowers_strategies_have_a_bound_or_are_refused(name: str) -> None:
    kind = getattr(flowers, name)
    needed: dict[str, dict[str, Any]] = {
        "FedProx": {"proximal_mu": 0.1},
        "QFedAvg": {"client_learning_rate": 0.1},
    }
    arguments = needed.get(name, {})
    if name.startswith("DifferentialPrivacy"):
        arguments = {"strategy": FedAvg(), "num_sampled_clients": 100, "noise_multiplier": 1.0}
        arguments |= {"clipping_norm": 1.0} if "Fixed" in name else {}
    strategy = kind(**arguments)
    if name not in FLOWERS:
        with pytest.raises(UserError, match=f"cannot say how far one client can move {name}"):
            central(strategy)
        return
    wrapped = central(strategy, noise=0.1)
    # Flower's Bulyan collects garbage once per reply.
    nodes = 4 if name == "Bulyan" else 11
    assert one_round(wrapped, {n: model(0.1 * n) for n in range(nodes)}) is not None
    assert wrapped.diagnostics["noise-std"] == pytest.approx(0.1 * FLOWERS[name])


class Enlarged(Mean):
    """A strategy that does more than its rule."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        return super().aggregate_train(server_round, replies)


class Tripled(Aggregator):
    def __call__(self, updates: ClientUpdates) -> Aggregate:
        result = mean(updates.params)
        return Aggregate(
            updates.reference + 3 * (result.vector - updates.reference), result.weights, result.accepted
        )


class Halves:
    """Stands for a scheme that sends everybody half of the model."""


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (lambda: Flame(), "set noise = 0"),
        (lambda: Enlarged(), "it does its own aggregate_train"),
        (lambda: FederatedStrategy(Tripled()), "its rule Tripled does not tell"),
        (lambda: Mean(submodels=Halves()), "whole models and one server only"),
        (lambda: Mean(before=[Tripled()]), "nothing is known of the step Tripled"),
        (lambda: StrategyWrapper(Mean()), "put central privacy directly around that one"),
        (lambda: flowers.Bulyan(selection_rule=lambda replies, f, m: replies), "its own rule of selection"),
    ],
)
def test_a_strategy_without_a_known_bound_is_refused_with_the_reason(strategy: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        central(strategy())


def test_the_user_may_know_better() -> None:
    strategy = central(FederatedStrategy(Tripled()), sensitivity=lambda n: 3 / n)
    out = one_round(strategy, {11: model(1.0), 12: model(1.0), 13: model(9.0)})
    assert out is not None
    assert out["w"][0] == pytest.approx(3)
    assert strategy.diagnostics["noise-std"] == pytest.approx(QUIET)
    assert central(Flame(noise=0.0)).diagnostics == {"epsilon": 0.0}


def test_numbers_that_are_not_finite_are_never_released() -> None:
    class Broken(Aggregator):
        def __call__(self, updates: ClientUpdates) -> Aggregate:
            result = mean(updates.params)
            return Aggregate(result.vector / 0, result.weights, result.accepted)

    strategy = central(FederatedStrategy(Broken()), sensitivity=1.0)
    with pytest.raises(UserError, match="not finite"):
        one_round(strategy, {11: model(1.0), 12: model(1.0)})


def outcome(strategy: Strategy, rows: np.ndarray) -> np.ndarray:
    start = record(w=np.zeros(rows.shape[1] - 2, np.float32), **{"bn.running_mean": np.zeros(2, np.float32)})
    nodes = range(1, len(rows) + 1)
    models = {
        n: record(w=row[:-2].astype(np.float32), **{"bn.running_mean": row[-2:].astype(np.float32)})
        for n, row in zip(nodes, rows, strict=True)
    }
    arrays, _ = strategy.aggregate_train(1, replies_to(ask(strategy, nodes, start=start), models))
    assert arrays is not None
    return np.concatenate([array.numpy() for array in arrays.values()]).astype(np.float64)


def awkward(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    """Return updates of length 1 or less that are to make rules jump: few directions, many zeros and ties."""
    kind = rng.integers(4)
    if kind == 0:
        rows = rng.normal(size=(n, d))
    elif kind == 1:
        rows = rng.choice([-1.0, 0.0, 1.0], size=(n, d))
    elif kind == 2:
        rows = np.where(rng.random((n, 1)) < 0.5, 1.0, -1.0) * np.ones((n, d)) + 0.01 * rng.normal(
            size=(n, d)
        )
    else:
        rows = np.eye(d)[rng.integers(d, size=n)] * rng.choice([-1, 1], size=(n, 1)) + rng.choice(
            [0.0, 0.5], size=(n, d)
        )
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.maximum(lengths, 1)


BOUNDED = sorted(set(registry.entries("strategies")) - REFUSED)
BEFORE = {
    "nnm": NearestNeighbourMixing,
    "bucketing": Bucketing,
    "arc": AdaptiveClipping,
    "clipping": lambda: Clipping(bound=0.5),
}


def built_with(name: str) -> Strategy:
    name, _, before = name.partition("+")
    if not before:
        return built(name)
    strategy: Strategy = registry.find("strategies", name).load()(before=[BEFORE[before]()])
    return strategy


@pytest.mark.parametrize(
    "name", [*BOUNDED, *(f"{rule}+{step}" for rule in ("mean", "median", "trimmed-mean") for step in BEFORE)]
)
def test_no_client_moves_a_strategy_further_than_is_said(name: str) -> None:
    try:
        sensitivity = sensitivity_of(built_with(name))
    except UserError:
        return
    rng = np.random.default_rng(4)
    for _ in range(25):
        n, d = int(rng.integers(7, 12)), int(rng.integers(3, 8))
        rows = awkward(rng, n, d)
        without = rows.copy()
        without[rng.integers(n)] = 0
        moved = np.linalg.norm(outcome(built_with(name), rows) - outcome(built_with(name), without))
        assert moved <= sensitivity(n) + 1e-5


@pytest.mark.parametrize(("n", "trim"), [(3, 1), (4, 1), (7, 2), (12, 5), (9, 4), (20, 4), (10, 4)])
def test_no_client_moves_a_trimmed_mean_further_than_its_bound(n: int, trim: int) -> None:
    bound = trimmed_bound(n, trim)
    rng = np.random.default_rng(5)
    furthest = reach = 0.0
    for _ in range(300):
        rows = awkward(rng, n, int(rng.integers(1, 30)))
        others = np.stack([rows, rows])
        others[1, rng.integers(n)] = awkward(rng, 1, rows.shape[1])[0]
        means = np.sort(others, axis=1)[:, trim : n - trim].mean(axis=1)
        furthest = max(furthest, float(np.linalg.norm(means[0] - means[1])))
        reach = max(reach, float(np.linalg.norm(means[0])))
    assert furthest <= bound.change + 1e-9
    assert reach <= bound.reach + 1e-9


def test_a_median_may_leave_the_ball_and_its_bound_knows() -> None:
    rows = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1]]) / 2**0.5
    assert np.linalg.norm(np.median(rows, axis=0)) == pytest.approx(trimmed_bound(3, 1).reach) == 1.5**0.5
