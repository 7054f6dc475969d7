"""Hand-computed values; each comment names the trap that a value guards against."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from flwr.serverapp.strategy import Krum as FlowersKrum
from flwr.serverapp.strategy import MultiKrum as FlowersMultiKrum

from fedplat import updates
from fedplat.arrays import FlatArrays, Layout
from fedplat.strategies import (
    RFA,
    Bulyan,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Meamed,
    MultiKrum,
    NormClipping,
)
from fedplat.strategies.aggregators import (
    InfeasibleError,
    bulyan,
    centered_clipping,
    geometric_median,
    krum,
    meamed,
    mean,
    median,
    multi_krum,
    norm_clipping,
)
from fedplat.strategies.aggregators.distances import squared_distances
from fedplat.strategies.aggregators.geometric import smoothed_weiszfeld
from fedplat.strategies.aggregators.krum import krum_scores
from fedplat.updates import ClientUpdates

from ..flower_apps import record, replies_to
from .test_composed import START, SilentGrid, aggregate, model

RULES = {
    "krum": lambda x: krum(x, (len(x) - 3) // 2),
    "multi-krum": lambda x: multi_krum(x, (len(x) - 3) // 2),
    "bulyan": lambda x: bulyan(x, (len(x) - 3) // 4),
    "meamed": lambda x: meamed(x, (len(x) - 1) // 2),
    "geometric median": geometric_median,
}


@pytest.fixture(params=list(RULES))
def rule(request: pytest.FixtureRequest):
    return RULES[request.param]


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def matrix(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32))


def test_krum_counts_n_minus_f_minus_2_others() -> None:
    # Traps: ByzFL takes one more and picks 4; Plato counts the client itself and picks 3.
    x = column(0, 2, 3, 4, 9, 11, 13)
    assert krum_scores(squared_distances(x), 3).tolist() == [29, 9, 11, 21, 45, 57, 101]
    assert krum(x, 2).vector.item() == 2


def test_krum_squares_distances_once() -> None:
    # Trap: fedlib squares the squared distance and picks 4.
    x = column(0, 1, 4, 7, 8, 12)
    assert krum_scores(squared_distances(x), 3).tolist() == [66, 46, 34, 35, 33, 105]
    assert krum(x, 1).vector.item() == 8


def test_distances_do_not_cancel() -> None:
    # Trap: a·a + b·b − 2a·b in float32 gives scores 0, 0, -16, -16, 368 and picks another client.
    x = (4096 + torch.tensor([0, 0.5, 1.25, 1, 8]))[:, None].repeat(1, 4)
    assert krum_scores(squared_distances(x), 2).tolist() == [5, 2, 2.5, 1.25, 378.25]
    assert krum(x, 1).weights.argmax().item() == 3


def test_distances_are_those_of_numpy_for_any_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix(6, 50) + 1000
    exact = x.numpy().astype(np.float64)
    expected = ((exact[:, None] - exact[None]) ** 2).sum(-1)
    np.testing.assert_allclose(squared_distances(x).numpy(), expected, rtol=1e-9, atol=1e-7)
    monkeypatch.setattr(updates, "_CHUNK_ELEMENTS", 20)
    np.testing.assert_allclose(squared_distances(x).numpy(), expected, rtol=1e-9, atol=1e-7)


@pytest.mark.parametrize(("n", "f"), [(5, 1), (7, 2), (9, 3), (3, 0)])
def test_krum_accepts_what_its_condition_allows(n: int, f: int) -> None:
    krum(matrix(n, 4), f)


@pytest.mark.parametrize(("n", "f"), [(4, 1), (6, 2), (8, 3), (2, 0), (5, -1)])
def test_krum_refuses_the_rest_with_the_inequality(n: int, f: int) -> None:
    # Traps: Flower goes on with max(1, n − f − 2); fedlib allows n = 2f + 2.
    with pytest.raises(InfeasibleError, match=f"must be less than n = {n}"):
        krum(matrix(n, 4), f)


def test_multi_krum_averages_the_best_without_weights() -> None:
    x = column(0, 2, 3, 4, 9, 11, 13)
    assert multi_krum(x, 2, 3).vector.item() == pytest.approx(3)
    chosen = multi_krum(x, 2)
    assert chosen.vector.item() == pytest.approx(18 / 5)
    assert chosen.accepted.tolist() == [True] * 5 + [False] * 2
    with pytest.raises(InfeasibleError, match="m = 8 must be from 1 to n = 7"):
        multi_krum(x, 2, 8)


def test_ties_go_to_the_first_client() -> None:
    assert krum(column(1, 1, 1, 1, 5), 1).weights.tolist() == [1, 0, 0, 0, 0]


def test_bulyan_computes_scores_anew_after_every_choice() -> None:
    # Trap: taking the seven best of one scoring answers 7.0, as Flower 1.42 does.
    result = bulyan(column(4, 5, 6, 10, 15, 16, 18, 29, 34, 42, 49), 2)
    assert result.vector.item() == pytest.approx(41 / 3)
    assert result.weights.nonzero().flatten().tolist() == [3, 4, 5]


@pytest.mark.parametrize(("n", "f"), [(6, 1), (10, 2), (2, 0)])
def test_bulyan_refuses_too_few_clients(n: int, f: int) -> None:
    # Trap: Flower logs and returns nothing, so the run ends with an empty model.
    with pytest.raises(InfeasibleError, match=f"n = {n} must be at least 4f"):
        bulyan(matrix(n, 3), f)


def test_meamed_is_not_the_trimmed_mean() -> None:
    # The three nearest the median 2 of [1, 2, 3, 50, 0] are 1, 2, 3; of [0, 1, 2, 9, 10] they are 0, 1, 2.
    assert meamed(column(1, 2, 3, 50, 0), 2).vector.item() == 2
    assert meamed(column(0, 1, 2, 9, 10), 2).vector.item() == 1
    with pytest.raises(InfeasibleError, match="2f = 4 must be less than n = 4"):
        meamed(column(1, 2, 3, 4), 2)


@pytest.mark.parametrize("n", [3, 6, 9])
def test_meamed_agrees_with_numpy(n: int) -> None:
    x = matrix(n, 40).numpy()
    keep = n - (n - 1) // 2
    order = np.argsort(abs(x - np.median(x, 0)), 0, kind="stable")[:keep]
    expected = np.take_along_axis(x, order, 0).mean(0)
    np.testing.assert_allclose(
        meamed(torch.from_numpy(x), (n - 1) // 2).vector, expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("points", "weights", "answer", "objective"),
    [
        ([(0, 0), (1, 0), (0, 1)], None, ((3 - 3**0.5) / 6,) * 2, 1.9318516526),
        ([(0, 0), (4, 0), (4, 2), (0, 4)], None, (8 / 3, 4 / 3), 10.1289902045),
        ([(0, 0), (1, 0), (0, 1)], [3, 1, 1], (0, 0), 2),  # on a point, exactly
        # Trap: started from the mean, ten plain Weiszfeld steps are still at 0.87, four at 976.
        ([(0, 0), (1, 0), (0, 1), (1, 1), (1e6, 1e6)], None, (0.7886751346,) * 2, 1414215.494),
    ],
)
def test_geometric_median_of_known_points(points, weights, answer, objective) -> None:
    w = None if weights is None else torch.tensor(weights)
    result = geometric_median(torch.tensor(points, dtype=torch.float32), w)
    np.testing.assert_allclose(result.vector, answer, atol=1e-5)
    assert result.diagnostics["objective"] == pytest.approx(objective, rel=1e-7)


def test_geometric_median_moves_with_its_points() -> None:
    # Trap: ByzFL's smoothed steps from zero give 0.1209, and 0.2527 for the same triangle moved by 1000.
    triangle = torch.tensor([[0.0, 0], [1, 0], [0, 1]])
    moved = geometric_median(triangle + 1000).vector - 1000
    np.testing.assert_allclose(moved, (3 - 3**0.5) / 6, atol=1e-3)


def test_geometric_median_of_one_place_needs_no_division_by_zero() -> None:
    assert geometric_median(torch.ones(5, 3)).vector.tolist() == [1, 1, 1]
    assert geometric_median(torch.ones(1, 3)).vector.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("steps", "answer"), [(1, (0.45, 0.6)), (2, (0.675, 0.9)), (3, (0.7875, 1.05))])
def test_centred_clipping_step_by_step(steps: int, answer: tuple[float, float]) -> None:
    x = torch.tensor([[3, 4], [0.3, 0.4]])
    np.testing.assert_allclose(centered_clipping(x, 1.0, steps=steps).vector, answer, rtol=1e-6)
    shifted = centered_clipping(x + 5, 1.0, center=torch.full((2,), 5.0), steps=steps).vector - 5
    np.testing.assert_allclose(shifted, answer, rtol=1e-5)


def test_a_zero_update_is_clipped_by_a_factor_of_one() -> None:
    # Trap: tau / 0 is infinite, and infinity times zero is NaN.
    assert centered_clipping(torch.zeros(2, 3), 1.0).vector.tolist() == [0, 0, 0]
    assert norm_clipping(torch.zeros(2, 3), 1.0).vector.tolist() == [0, 0, 0]


def test_norm_clipping_weighs_by_sample_count_and_bounds_every_client() -> None:
    x = torch.tensor([[30.0, 40.0], [0.3, 0.4]])
    np.testing.assert_allclose(norm_clipping(x, 1.0).vector, (0.45, 0.6), rtol=1e-6)
    weighted = norm_clipping(x, 1.0, torch.tensor([3, 1])).vector
    np.testing.assert_allclose(weighted, (0.525, 0.7), rtol=1e-6)
    assert norm_clipping(matrix(9, 20) * 1e20, 2.0).vector.norm() <= 2.0


@pytest.mark.parametrize("clip", [lambda x, b: centered_clipping(x, b), lambda x, b: norm_clipping(x, b)])
def test_a_radius_that_is_not_positive_is_refused(clip) -> None:
    for bound in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be above 0"):
            clip(matrix(3, 2), bound)


def test_equal_updates_give_that_update(rule) -> None:
    x = matrix(1, 30)
    assert torch.equal(rule(x.repeat(7, 1)).vector, x[0])


def test_order_of_clients_does_not_matter(rule) -> None:
    x = matrix(11, 40)
    order = torch.from_numpy(np.random.default_rng(3).permutation(11))
    torch.testing.assert_close(rule(x).vector, rule(x[order]).vector, rtol=1e-5, atol=1e-6)


def test_rules_follow_shifts_and_scaling(rule) -> None:
    x = matrix(11, 40)
    torch.testing.assert_close(rule(x * 3 + 2).vector, rule(x).vector * 3 + 2, rtol=1e-4, atol=1e-4)


def test_inputs_stay_and_a_second_call_is_equal(rule) -> None:
    x = matrix(11, 40)
    before = x.clone()
    first, second = rule(x), rule(x)
    assert torch.equal(x, before)
    assert torch.equal(first.vector, second.vector)
    assert first.weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("bad", [1e30, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["krum", "multi-krum", "bulyan"])
def test_choosing_rules_never_choose_a_wild_client(name: str, bad: float) -> None:
    # Trap: np.argmin([1, nan, 0.5]) is 1, so a client of NaN wins ByzFL's Krum.
    honest = matrix(9, 30)
    attacked = torch.cat([torch.full((2, 30), bad), honest])
    vector = {"krum": krum, "multi-krum": multi_krum, "bulyan": bulyan}[name](attacked, 2).vector
    assert bool(((vector >= honest.amin(0)) & (vector <= honest.amax(0))).all())


def test_geometric_median_stays_within_the_honest_spread_of_far_outliers() -> None:
    honest = matrix(7, 30)
    vector = geometric_median(torch.cat([honest, torch.full((3, 30), 1e30)])).vector
    spread = max(float((a - b).norm()) for a in honest for b in honest)
    assert float((vector - honest.mean(0)).norm()) < spread


@pytest.mark.parametrize(
    ("ours", "flowers"), [(Krum(f=1), FlowersKrum), (MultiKrum(f=1, m=3), FlowersMultiKrum)]
)
def test_choices_are_those_of_flowers_where_it_is_right(ours, flowers) -> None:
    models = {20 + i: model(v) for i, v in enumerate((1.0, 1.5, 1.2, 9.0, 1.1, 1.4))}
    arrays, _ = aggregate(ours, models)
    theirs = flowers(num_malicious_nodes=1, **({} if flowers is FlowersKrum else {"num_nodes_to_select": 3}))
    messages = ours.configure_train(1, record(**START), ConfigRecord(), SilentGrid(list(models)))
    expected, _ = theirs.aggregate_train(1, replies_to(messages, models))
    np.testing.assert_allclose(arrays["w"].numpy(), expected["w"].numpy(), rtol=1e-6)


def updates_of(x: torch.Tensor, reference: torch.Tensor) -> ClientUpdates:
    layout = Layout.of({"w": ((x.shape[1],), "float32")})
    side = np.zeros(0, np.uint8)
    models = [FlatArrays(layout, row.numpy().copy(), side) for row in x]
    return ClientUpdates.stack(
        models, FlatArrays(layout, reference.numpy(), side), range(len(x)), [1] * len(x)
    )


def test_clipping_is_applied_to_the_updates_not_to_the_models() -> None:
    reference = torch.full((2,), 100.0)
    x = reference + torch.tensor([[3, 4], [0.3, 0.4]])
    for strategy in (NormClipping(bound=1.0), CenteredClipping(tau=1.0, steps=1)):
        result = strategy.aggregator(updates_of(x, reference)).vector
        np.testing.assert_allclose(result, (100.45, 100.6), rtol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "n", "words"),
    [
        (Krum(f=3), 8, "2f + 2 = 8"),
        (MultiKrum(f=3), 8, "2f + 2 = 8"),
        (MultiKrum(f=1, m=9), 8, "m = 9 must be from 1 to n = 8"),
        (Bulyan(f=2), 10, "4f + 3 = 11"),
        (Meamed(f=4), 8, "2f = 8"),
        (Krum(), 2, "2f + 2 = 2"),
    ],
)
def test_an_f_that_does_not_fit_is_refused_before_training(strategy, n: int, words: str) -> None:
    with pytest.raises(InfeasibleError) as error:
        strategy.aggregator.check(n)
    assert words in str(error.value)


def test_without_a_declared_f_a_rule_assumes_the_most_it_allows() -> None:
    x = matrix(11, 20)
    start = torch.zeros(20)
    for strategy, f in ((Krum(), 4), (MultiKrum(), 4), (Bulyan(), 2), (Meamed(), 5)):
        strategy.aggregator.check(11)
        assert strategy.aggregator(updates_of(x, start)).diagnostics["f"] == f


def test_a_short_round_uses_the_f_that_still_fits_and_at_last_the_median() -> None:
    start, x = torch.zeros(20), matrix(5, 20)
    rule = Krum(f=3).aggregator
    rule.check(9)
    result = rule(updates_of(x, start))
    assert result.diagnostics["f"] == 1
    assert torch.equal(result.vector, krum(x, 1).vector)
    assert torch.equal(rule(updates_of(x[:2], start)).vector, median(x[:2]).vector)


@pytest.mark.parametrize(
    "strategy",
    [
        Krum(f=2),
        MultiKrum(f=2),
        Bulyan(f=2),
        Meamed(f=2),
        GeometricMedian(),
        CenteredClipping(),
        NormClipping(),
    ],
)
def test_every_rule_keeps_the_model_nearer_the_honest_mean_than_the_mean_does(strategy) -> None:
    honest = matrix(9, 50) * 0.1 + 0.2
    attacked = torch.cat([honest, -10 * honest[:2]])
    result = strategy.aggregator(updates_of(attacked, torch.zeros(50))).vector
    target = honest.mean(0)
    assert (result - target).norm() < 0.6 * (mean(attacked).vector - target).norm()


def test_a_few_smoothed_steps_have_not_arrived_and_many_have() -> None:
    # Trap: stopping after a few of Weiszfeld's steps leaves a far outlier in charge.
    square = torch.tensor([[0.0, 0.0], [1, 0], [0, 1], [1, 1], [1e6, 1e6]])
    assert smoothed_weiszfeld(square, steps=1).vector[0].item() == pytest.approx(58824, abs=0.5)
    assert smoothed_weiszfeld(square, steps=3).vector[0].item() == pytest.approx(3891.5, abs=0.1)
    assert smoothed_weiszfeld(square, steps=10).vector[0].item() == pytest.approx(0.8727, abs=1e-4)
    exact = geometric_median(matrix(9, 5), torch.arange(1, 10)).vector
    near = smoothed_weiszfeld(matrix(9, 5), torch.arange(1, 10), steps=500).vector
    torch.testing.assert_close(near, exact, rtol=0, atol=1e-4)


def test_smoothed_steps_count_samples_or_not() -> None:
    x = updates_of(column(0, 1, 5), torch.zeros(1))
    x = replace(x, num_examples=np.array([1, 1, 98]))
    assert RFA(steps=50).aggregator(x).vector.item() == pytest.approx(5, abs=1e-3)
    assert RFA(steps=50, weighted=False).aggregator(x).vector.item() == pytest.approx(1, abs=1e-3)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        smoothed_weiszfeld(column(1, 2), steps=0)
