"""Rules that find the clients who agree best; each comment names the trap that a value guards against."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch

from fedplat import updates as updates_module
from fedplat.arrays import FlatArrays, Layout
from fedplat.strategies.aggregators import Aggregate, InfeasibleError, mean
from fedplat.strategies.aggregators.residuals import residual_reweighting
from fedplat.strategies.aggregators.subsets import (
    covariance_filter,
    minimum_diameter,
    monna,
    most_mda,
    most_smea,
    smallest_eigenvalue,
)
from fedplat.strategies.subset_rules import (
    CovarianceFilter,
    MinimumDiameter,
    Monna,
    ResidualReweighting,
    SmallestEigenvalue,
)
from fedplat.updates import ClientUpdates

Rule = Callable[[torch.Tensor, int], Aggregate]

DECLARED: dict[str, Rule] = {
    "MDA": minimum_diameter,
    "MoNNA": monna,
    "CAF": covariance_filter,
    "SMEA": smallest_eigenvalue,
}
RULES: dict[str, Rule] = {**DECLARED, "residuals": lambda x, f: residual_reweighting(x)}
STRATEGIES = [MinimumDiameter, Monna, CovarianceFilter, SmallestEigenvalue]


@pytest.fixture(params=list(RULES))
def rule(request: pytest.FixtureRequest) -> Rule:
    return RULES[request.param]


@pytest.fixture(params=list(DECLARED))
def declared(request: pytest.FixtureRequest) -> Rule:
    return DECLARED[request.param]


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def matrix(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32))


def updates_of(x: torch.Tensor) -> ClientUpdates:
    layout = Layout.of({"w": ((x.shape[1],), "float32")})
    side = np.zeros(0, np.uint8)
    models = [FlatArrays(layout, row.numpy().copy(), side) for row in x]
    start = FlatArrays(layout, np.zeros(x.shape[1], np.float32), side)
    return ClientUpdates.stack(models, start, range(50, 50 + len(x)), [1] * len(x))


def chosen(result: Aggregate) -> list[int]:
    return result.weights.nonzero().flatten().tolist()


# Minimum diameter averaging ------------------------------------------------------------------------------


def test_the_smallest_diameter_by_hand() -> None:
    # Of three of these, 2, 3, 4 are nearest together; of five, 0 … 4 has diameter 4, 2 … 9 has 7.
    x = column(0, 2, 3, 4, 9)
    assert minimum_diameter(x, 1).vector.item() == 2.25
    result = minimum_diameter(x, 2)
    assert (result.vector.item(), result.diagnostics["diameter"]) == (3, 2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("n", "f"), [(7, 1), (8, 3), (9, 4)])
def test_the_search_finds_what_trying_all_subsets_finds(n: int, f: int, seed: int) -> None:
    x = matrix(n, (1, 2, 6)[seed % 3], seed)
    d = np.linalg.norm(x[:, None].double() - x[None].double(), axis=2)

    def from_the_largest(rows: tuple[int, ...]) -> list[float]:
        return sorted((d[i, j] for i, j in combinations(rows, 2)), reverse=True)

    best = min(combinations(range(n), n - f), key=from_the_largest)
    result = minimum_diameter(x, f)
    assert chosen(result) == list(best)
    assert result.diagnostics["diameter"] == pytest.approx(from_the_largest(best)[0])


def test_of_equal_diameters_the_tighter_subset_wins() -> None:
    # The first two are farthest apart; either of the others fits between them, but not both together.
    x = torch.tensor([[0.0, 0.0], [10.0, 0.0], [5.0, 8.0], [5.0, -7.0]])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        result = minimum_diameter(x[order], 1)
        assert {order[i] for i in chosen(result)} == {0, 1, 3}


def test_many_liars_are_found_among_many_clients_exactly() -> None:
    # Trap: trying all C(60, 25) subsets would take longer than the universe has had.
    honest = matrix(35, 20)
    liars = torch.cat([matrix(13, 20, 1) * 3 + 4, matrix(12, 20, 2) * 3 - 4])
    assert chosen(minimum_diameter(torch.cat([liars, honest]), 25)) == list(range(25, 60))


# MoNNA ---------------------------------------------------------------------------------------------------


def test_monna_averages_the_nearest_to_the_trusted_row() -> None:
    x = column(0, 1, 2, 6, 20)
    assert monna(x, 2, pivot=3).vector.item() == 3
    assert monna(x, 2).vector.item() == 1  # the median is 2; of 0 and 4 away, 1 and 0
    assert chosen(monna(x, 0, pivot=4)) == [0, 1, 2, 3, 4]
    with pytest.raises(IndexError):
        monna(x, 1, pivot=5)


def test_the_trusted_row_is_used_even_among_equals() -> None:
    # Trap: sorting distances alone would take the first three of five equal clients.
    assert chosen(monna(torch.ones(5, 2), 2, pivot=4)) == [0, 1, 4]


@pytest.mark.parametrize(("n", "f"), [(6, 2), (9, 4)])
def test_monna_agrees_with_numpy(n: int, f: int) -> None:
    x = matrix(n, 30)
    exact = x.numpy().astype(np.float64)
    for pivot, point in ((2, exact[2]), (None, np.median(exact, axis=0))):
        near = np.linalg.norm(exact - point, axis=1).argsort(kind="stable")[: n - f]
        np.testing.assert_allclose(monna(x, f, pivot).vector, exact[near].mean(0), rtol=1e-5, atol=1e-6)


def test_a_trusted_node_is_found_by_its_id_and_its_absence_survived() -> None:
    x = torch.cat([matrix(4, 10), 5 + matrix(5, 10)])  # most lie, but node 51 is trusted
    updates = updates_of(x)
    trusting = Monna(f=4, trusted=51).aggregator
    result = trusting(updates)
    assert torch.equal(result.vector, monna(x, 4, pivot=1).vector)
    assert result.diagnostics["f"] == 4
    without = updates.select(updates.node_ids != 51)
    assert torch.equal(trusting(without).vector, monna(x[[0, 2, 3, 4, 5, 6, 7, 8]], 3).vector)
    assert torch.equal(Monna(f=4).aggregator(updates).vector, monna(x, 4).vector)


# SMEA ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "f", "d"), [(5, 1, 3), (7, 3, 20), (8, 2, 2), (6, 0, 4)])
def test_the_smallest_eigenvalue_is_that_of_numpys_covariances(n: int, f: int, d: int) -> None:
    # Trap: one power step from a random start, as in ByzFL, differs between equal calls.
    x = matrix(n, d)
    exact = x.numpy().astype(np.float64)

    def top(rows: tuple[int, ...]) -> float:
        return float(np.linalg.eigvalsh(np.cov(exact[list(rows)].T, bias=True))[-1])

    best = min(combinations(range(n), n - f), key=top)
    result = smallest_eigenvalue(x, f)
    assert chosen(result) == list(best)
    assert result.diagnostics["eigenvalue"] == pytest.approx(top(best))


def test_eigenvalues_are_the_same_in_any_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix(9, 10)
    whole = smallest_eigenvalue(x, 3)
    monkeypatch.setattr("fedplat.strategies.aggregators.subsets._BATCH_ELEMENTS", 200)
    small = smallest_eigenvalue(x, 3)
    assert torch.equal(whole.weights, small.weights)


def test_the_smallest_diameter_can_have_a_larger_eigenvalue() -> None:
    # Two pairs at the ends of a line of length 2 vary by 1 along it; a square of diameter 2.2 by 0.6.
    line, side = [[-1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], 1.55
    x = torch.tensor([*line, [1.0, side], [1 + side, 0.0], [1 + side, side]])
    assert chosen(minimum_diameter(x, 3)) == [0, 1, 2, 3]
    result = smallest_eigenvalue(x, 3)
    assert chosen(result) != [0, 1, 2, 3]
    assert result.diagnostics["eigenvalue"] <= side**2 / 4 + 1e-9


# CAF -----------------------------------------------------------------------------------------------------


def test_the_covariance_filter_by_hand() -> None:
    # From the mean 3: τ = 9, 4, 1, 36, so the weights become 3/4, 8/9, 35/36, 0; the next add up to less
    # than n − 2f = 2 and do not count.
    result = covariance_filter(column(0, 1, 2, 9), 1)
    c = np.array([3 / 4, 8 / 9, 35 / 36, 0])
    np.testing.assert_allclose(result.weights, c / c.sum(), rtol=1e-12)
    assert result.vector.item() == pytest.approx((8 / 9 + 70 / 36) / c.sum())
    assert result.diagnostics["steps"] == 2


@pytest.mark.parametrize(("n", "f", "d"), [(6, 1, 4), (9, 3, 30), (12, 5, 7)])
def test_the_covariance_filter_agrees_with_numpy_on_parameters(n: int, f: int, d: int) -> None:
    x = matrix(n, d)
    x[:f] += 4
    exact, c, best = x.numpy().astype(np.float64), np.ones(n), (np.inf, np.zeros(d))
    while c.sum() > n - 2 * f:
        mu = c @ exact / c.sum()
        values, vectors = np.linalg.eigh((exact - mu).T * c @ (exact - mu) / c.sum())
        best = min(best, (values[-1], mu), key=lambda pair: pair[0])
        tau = ((exact - mu) @ vectors[:, -1]) ** 2
        c = c * np.clip(1 - tau / tau[c > 0].max(), 0, None)
    result = covariance_filter(x, f)
    np.testing.assert_allclose(result.vector, best[1], rtol=1e-4, atol=1e-5)
    assert result.diagnostics["eigenvalue"] == pytest.approx(best[0])


# Residual-based reweighting ------------------------------------------------------------------------------


def test_residual_weights_by_hand() -> None:
    # Values 0, 1, 2, 3, 14 over ranks 0 … 4. Slopes from each point: 1, 1, 1, 1 (of 1, 1, 1, 11: 1) and from
    # the last 14/4, 13/3, 12/2, 11: 31/6; their median is 1, and the line is 2 + (rank − 2), off by 0, 0, 0,
    # 0, 10. Then τ = 0: whoever is on the line has weight 1, the last 0, and is put onto the line, at 4.
    result = residual_reweighting(column(0, 1, 2, 3, 14))
    assert result.weights.tolist() == [0.25, 0.25, 0.25, 0.25, 0]
    assert result.vector.item() == 1.5


def repeated_median_oracle(x: np.ndarray, scale: float, threshold: float) -> np.ndarray:
    n, d = x.shape
    sums, fixed = np.zeros(n), np.empty_like(x)
    for k in range(d):
        order = np.argsort(x[:, k])
        y, ranks = x[order, k], np.arange(n)
        slope = np.median(
            [np.median([(y[j] - y[i]) / (j - i) for j in range(n) if j != i]) for i in range(n)]
        )
        line = np.median(y) + slope * (ranks - (n - 1) / 2)
        r = y - line
        tau = 1.4826 * (1 + 5 / (n - 1)) * np.median(np.sort(abs(r))[1:])
        h = np.diag((m := np.c_[np.ones(n), ranks]) @ np.linalg.inv(m.T @ m) @ m.T)
        e, allowed, root = np.where(r == 0, 1e-9, r / tau), scale * np.sqrt(2 / n), np.sqrt(1 - h)
        w = root / e * np.clip(e / root, -allowed, allowed)
        fixed[order, k] = np.where(w < threshold, line, y)
        sums[order] += w * w.std(ddof=1)
    shares = (sums / sums.max()) ** 2
    return shares / shares.sum() @ fixed


@pytest.mark.parametrize(("n", "scale"), [(5, 2.0), (8, 1.0)])
def test_residual_reweighting_agrees_with_numpy(
    n: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = matrix(n, 25)
    x[0] *= 20
    expected = repeated_median_oracle(x.numpy().astype(np.float64), scale, 0.1)
    for _ in range(2):
        np.testing.assert_allclose(residual_reweighting(x, scale).vector, expected, rtol=1e-4, atol=1e-5)
        monkeypatch.setattr(updates_module, "_CHUNK_ELEMENTS", 4 * n * n)


def test_equal_values_share_their_rank() -> None:
    # Trap: ranks by position give equal clients different residuals, so their order would matter.
    x = torch.tensor([[1.0, 5.0], [1.0, 7.0], [1.0, 6.0], [2.0, 1.0], [9.0, 6.0]])
    order = [4, 2, 0, 3, 1]
    a, b = residual_reweighting(x), residual_reweighting(x[order])
    torch.testing.assert_close(a.weights[order], b.weights)
    torch.testing.assert_close(a.vector, b.vector)


def test_two_clients_cannot_tell_who_is_off() -> None:
    assert residual_reweighting(column(0, 6)).vector.item() == 3


@pytest.mark.parametrize(("scale", "threshold"), [(0.0, 0.1), (-1.0, 0.1), (1.0, 1.5), (1.0, float("nan"))])
def test_settings_without_meaning_are_refused(scale: float, threshold: float) -> None:
    with pytest.raises(ValueError, match="scale must be above 0"):
        residual_reweighting(matrix(4, 2), scale, threshold)


# All of them ---------------------------------------------------------------------------------------------


def test_equal_updates_and_a_single_one_give_that_update(rule: Rule) -> None:
    # Trap: ByzFL's CAF returns None for equal vectors.
    x = matrix(1, 30)
    assert torch.equal(rule(x.repeat(7, 1), 2).vector, x[0])
    assert torch.equal(rule(x, 0).vector, x[0])


def test_order_of_clients_does_not_matter(rule: Rule) -> None:
    x = matrix(9, 40)
    order = torch.from_numpy(np.random.default_rng(3).permutation(9))
    one, other = rule(x, 3), rule(x[order], 3)
    torch.testing.assert_close(one.vector, other.vector, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.weights[order], other.weights, rtol=1e-6, atol=1e-9)


def test_rules_follow_shifts_and_scaling(rule: Rule) -> None:
    x = matrix(9, 40)
    torch.testing.assert_close(rule(x * 3 + 2, 3).vector, rule(x, 3).vector * 3 + 2, rtol=1e-4, atol=1e-4)


def test_tiny_updates_of_large_models_are_told_apart(declared: Rule) -> None:
    # Trap: in float32, a·a + b·b − 2a·b gives distances of zero and below.
    x = 4096 + torch.tensor([0.0, 0.5, 1.25, 1.0, 8.0])[:, None].repeat(1, 4)
    assert declared(x, 1).weights[4] == 0


def test_inputs_stay_and_a_second_call_is_equal(rule: Rule) -> None:
    x = matrix(9, 40)
    before = x.clone()
    first, second = rule(x, 3), rule(x, 3)
    assert torch.equal(x, before)
    assert torch.equal(first.vector, second.vector)
    assert first.weights.sum().item() == pytest.approx(1)


def test_suspecting_nobody_is_the_mean(declared: Rule) -> None:
    # Trap: ByzFL's CAF returns None for f = 0.
    x = matrix(6, 30)
    torch.testing.assert_close(declared(x, 0).vector, mean(x).vector)


@pytest.mark.parametrize(("n", "f"), [(4, 2), (1, 1), (6, -1)])
def test_half_the_clients_are_too_many_liars(declared: Rule, n: int, f: int) -> None:
    with pytest.raises(InfeasibleError, match=f"2f = {2 * f} must be less than n = {n}"):
        declared(matrix(n, 3), f)


@pytest.mark.parametrize("bad", [1e30, float("nan"), float("inf")])
def test_wild_clients_are_never_used(declared: Rule, bad: float) -> None:
    honest = matrix(9, 30)
    vector = declared(torch.cat([torch.full((2, 30), bad), honest]), 2).vector
    assert bool(((vector >= honest.amin(0)) & (vector <= honest.amax(0))).all())


@pytest.mark.parametrize("bad", [1e30, -1e30])
def test_residuals_put_wild_values_onto_the_line(bad: float) -> None:
    honest = matrix(9, 30)
    result = residual_reweighting(torch.cat([torch.full((2, 30), bad), honest]))
    assert float((result.vector - honest.mean(0)).norm()) < 2
    assert float(result.weights[:2].sum()) < 1e-6


@pytest.mark.parametrize(
    ("strategy", "n", "words"),
    [
        (MinimumDiameter(f=4), 8, "MDA: 2f = 8 must be less than n = 8"),
        (MinimumDiameter(f=31), 90, "MDA: f = 31 must be at most 30"),
        (Monna(f=5), 9, "MoNNA: 2f = 10 must be less than n = 9"),
        (CovarianceFilter(f=2), 4, "CAF: 2f = 4 must be less than n = 4"),
        (SmallestEigenvalue(f=4), 40, "C(40, 4) = 91,390 subsets must be at most 20,000"),
        (SmallestEigenvalue(f=3), 6, "SMEA: 2f = 6 must be less than n = 6"),
    ],
)
def test_an_f_that_does_not_fit_is_refused_before_training(strategy, n: int, words: str) -> None:
    with pytest.raises(InfeasibleError) as error:
        strategy.aggregator.check(n)
    assert words in str(error.value)


def test_without_a_declared_f_a_rule_assumes_the_most_it_allows() -> None:
    for kind in STRATEGIES:
        strategy = kind()
        strategy.aggregator.check(9)
        assert strategy.aggregator(updates_of(matrix(9, 20))).diagnostics["f"] == 4
    assert (most_mda(100), most_smea(17), most_smea(18), most_smea(100)) == (30, 7, 6, 2)
    SmallestEigenvalue().aggregator.check(30_000)  # f = 0, the mean


def test_a_short_round_uses_the_f_that_still_fits() -> None:
    x = matrix(5, 20)
    for kind, rule in zip(STRATEGIES, DECLARED.values(), strict=True):
        result = kind(f=4).aggregator(updates_of(x))
        assert result.diagnostics["f"] == 2
        assert torch.equal(result.vector, rule(x, 2).vector)


@pytest.mark.parametrize("kind", [*STRATEGIES, ResidualReweighting])
def test_every_rule_keeps_the_model_nearer_the_honest_mean_than_the_mean_does(kind) -> None:
    honest = matrix(9, 50) * 0.1 + 0.2
    attacked = torch.cat([honest, -10 * honest[:2]])
    strategy = kind() if kind is ResidualReweighting else kind(f=2)
    result = strategy.aggregator(updates_of(attacked))
    target = honest.mean(0)
    assert (result.vector - target).norm() < 0.1 * (mean(attacked).vector - target).norm()
    assert float(result.weights[9:].sum()) < 0.01


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_little_of_many_moves_the_rules_less_than_the_mean(kind) -> None:
    # Four of twelve lie together, three deviations off in every coordinate.
    honest = matrix(8, 200)
    attacked = torch.cat([honest, honest.mean(0) + 3 * honest.std(0).repeat(4, 1)])
    result = kind(f=4).aggregator(updates_of(attacked))
    target = honest.mean(0)
    assert (result.vector - target).norm() < (mean(attacked).vector - target).norm()
