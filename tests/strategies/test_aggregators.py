from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedplat import updates
from fedplat.strategies.aggregators import InfeasibleError, mean, median, trimmed_mean, weighted_median
from fedplat.strategies.aggregators.coordinatewise import trim_count

RULES = {
    "mean": lambda x: mean(x),
    "weighted mean": lambda x: mean(x, torch.arange(1, len(x) + 1)),
    "median": median,
    "trimmed mean": lambda x: trimmed_mean(x, (len(x) - 1) // 3),
}


@pytest.fixture(params=list(RULES))
def rule(request: pytest.FixtureRequest):
    return RULES[request.param]


@pytest.fixture(params=["whole", "chunked"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "chunked":
        monkeypatch.setattr(updates, "_CHUNK_ELEMENTS", 40)


def matrix(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32))


def test_mean_weighs_by_sample_count() -> None:
    # Trap: FedScale averages without weights.
    assert mean(torch.tensor([[1.0], [5.0]]), torch.tensor([3, 1])).vector.tolist() == [2.0]
    liar = mean(torch.tensor([[0.0], [0.0], [0.0], [10.0]]), torch.tensor([10, 10, 10, 10**9]))
    assert liar.vector.item() == pytest.approx(9.9999997, abs=1e-6)  # one liar owns the mean


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1]])
def test_mean_refuses_weights_that_mean_nothing(weights: list[float]) -> None:
    # Trap: Flower's legacy aggregate returns NaN for a total weight of zero.
    with pytest.raises(ValueError, match="not all zero"):
        mean(torch.zeros(2, 3), torch.tensor(weights))


def test_median_of_an_even_number_is_the_midpoint() -> None:
    # Trap: torch.median returns the lower middle value, 2.
    assert median(torch.tensor([[1.0], [2.0], [3.0], [4.0]])).vector.tolist() == [2.5]
    assert median(torch.tensor([[3.0], [1.0], [10.0]])).vector.tolist() == [3.0]


def test_median_of_the_largest_floats_does_not_overflow() -> None:
    assert median(torch.tensor([[3e38], [3e38]])).vector.item() == pytest.approx(3e38)


def test_trimmed_mean_keeps_ties_and_survives_huge_values() -> None:
    ties = torch.tensor([[1.0], [1], [1], [1], [5], [5], [9]])
    assert trimmed_mean(ties, 2).vector.item() == pytest.approx(7 / 3)
    # Trap: subtracting the extremes from the sum gives -1/3 here.
    assert trimmed_mean(torch.tensor([[1.0], [2], [3], [4], [1e30]]), 1).vector.item() == 3.0


@pytest.mark.parametrize(
    ("beta", "n", "count"), [(0.2, 4, 1), (0.1, 9, 1), (0.29, 100, 29), (0.57, 100, 57), (0.0, 7, 0)]
)
def test_a_fraction_is_rounded_up_to_whole_clients(beta: float, n: int, count: int) -> None:
    # Trap: int() of these gives 0, 0, 28, 56: a defence that is none.
    assert trim_count(beta, n) == count


@pytest.mark.parametrize(("n", "trim"), [(4, 2), (1, 1), (5, 3), (3, -1)])
def test_trimming_everybody_is_refused_with_the_inequality(n: int, trim: int) -> None:
    # Trap: beta = 0.5 with four clients gave NaN.
    with pytest.raises(InfeasibleError, match=f"fewer than n = {n}"):
        trimmed_mean(torch.zeros(n, 2), trim)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_rules_agree_with_numpy_and_scipy(n: int) -> None:
    x = matrix(n, 33)
    exact = x.numpy().astype(np.float64)
    weights = np.arange(1, n + 1)
    np.testing.assert_allclose(mean(x).vector, exact.mean(0), rtol=1e-6, atol=1e-7)
    expected = np.average(exact, axis=0, weights=weights)
    np.testing.assert_allclose(mean(x, torch.from_numpy(weights)).vector, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(median(x).vector, np.median(exact, 0), rtol=1e-6, atol=1e-7)
    trim = (n - 1) // 3
    trimmed = stats.trim_mean(exact, trim / n + 1e-9, axis=0)
    np.testing.assert_allclose(trimmed_mean(x, trim).vector, trimmed, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("_chunks")
def test_one_client_and_equal_clients_give_that_clients_model(rule) -> None:
    x = matrix(1, 50)
    assert torch.equal(rule(x).vector, x[0])
    assert torch.equal(rule(x.repeat(7, 1)).vector, x[0])


@pytest.mark.usefixtures("_chunks")
def test_order_of_clients_does_not_matter_to_unweighted_rules() -> None:
    x = matrix(9, 60)
    order = torch.from_numpy(np.random.default_rng(1).permutation(9))
    for name in ("mean", "median", "trimmed mean"):
        a, b = RULES[name](x), RULES[name](x[order])
        torch.testing.assert_close(a.vector, b.vector, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(a.weights[order], b.weights)


def test_inputs_stay_as_they_are_and_a_second_call_gives_the_same(rule) -> None:
    x = matrix(6, 40)
    before = x.clone()
    first, second = rule(x), rule(x)
    assert torch.equal(x, before)
    assert torch.equal(first.vector, second.vector)
    assert torch.equal(first.weights, second.weights)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 9),
    st.floats(-100, 100),
    st.floats(0.1, 50),
    st.sampled_from(sorted(RULES)),
    st.integers(0, 99),
)
def test_rules_follow_shifts_and_positive_scaling(
    n: int, shift: float, scale: float, name: str, seed: int
) -> None:
    x = matrix(n, 8, seed)
    moved = RULES[name](x * scale + shift).vector
    torch.testing.assert_close(moved, RULES[name](x).vector * scale + shift, rtol=1e-4, atol=1e-3)


def test_result_lies_between_the_smallest_and_the_largest_value(rule) -> None:
    x = matrix(7, 100)
    vector = rule(x).vector
    assert bool(((vector >= x.amin(0)) & (vector <= x.amax(0))).all())


@pytest.mark.parametrize("bad", [1e30, -1e30, float("inf")])
def test_robust_rules_stay_within_the_honest_range_under_the_attackers_they_allow(bad: float) -> None:
    honest = matrix(7, 30)
    attacked = torch.cat([honest, torch.full((3, 30), bad)])
    for vector in (median(attacked).vector, trimmed_mean(attacked, 3).vector):
        assert bool(((vector >= honest.amin(0)) & (vector <= honest.amax(0))).all())


def test_trimming_nobody_is_the_mean() -> None:
    x = matrix(6, 40)
    torch.testing.assert_close(trimmed_mean(x, 0).vector, mean(x).vector)


def test_shares_tell_whose_values_were_used() -> None:
    # The outlier is never in the middle; equal values share alike.
    assert median(torch.tensor([[1.0], [2], [100]])).weights.tolist() == [0, 1, 0]
    assert median(torch.tensor([[1.0], [2], [3], [100]])).weights.tolist() == [0, 0.5, 0.5, 0]
    assert median(torch.ones(4, 5)).weights.tolist() == [0.25] * 4
    assert trimmed_mean(torch.tensor([[1.0], [2], [3], [4], [100]]), 1).weights.tolist() == [
        0,
        pytest.approx(1 / 3),
        pytest.approx(1 / 3),
        pytest.approx(1 / 3),
        0,
    ]
    shares = trimmed_mean(matrix(10, 20_000), 2).weights
    assert shares.sum().item() == pytest.approx(1)
    torch.testing.assert_close(shares, torch.full((10,), 0.1, dtype=torch.float64), atol=0.02, rtol=0)


def test_a_weighted_median_is_where_half_of_the_weight_is_reached() -> None:
    # Trap: a midpoint is due only if exactly half lies on either side.
    column = torch.tensor([[1.0], [2.0], [10.0]])
    assert weighted_median(column, torch.tensor([1, 1, 3])).vector.item() == 10
    assert median(column).vector.item() == 2
    assert weighted_median(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1, 1, 2])).vector.item() == 2.5
    assert weighted_median(torch.tensor([[3.0], [1.0]]), torch.tensor([0, 5])).vector.item() == 1
    with pytest.raises(ValueError, match="not all zero"):
        weighted_median(column, torch.zeros(3))


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("n", [1, 4, 7])
def test_equal_weights_give_the_plain_median_and_whole_weights_repeated_clients(n: int) -> None:
    x = matrix(n, 33)
    torch.testing.assert_close(weighted_median(x, torch.full((n,), 0.25)).vector, median(x).vector)
    counts = torch.arange(1, n + 1)
    repeated = median(x.repeat_interleave(counts, dim=0)).vector
    torch.testing.assert_close(weighted_median(x, counts).vector, repeated)
