from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from fedplat.errors import UserError
from fedplat.strategies.association.base import Floats
from fedplat.strategies.association.quality import (
    Measure,
    cut,
    distances,
    farthest,
    mixes,
    noisy_histograms,
    one_distance,
)

MEASURES: tuple[Measure, ...] = ("kl", "js", "l1")
UNIFORM = np.full(10, 0.1)
ONE = np.eye(10)[:1] * 7
NOTHING = np.zeros((1, 10))


def test_one_class_of_ten_is_ln_10_away() -> None:
    assert distances(ONE, UNIFORM)[0] == pytest.approx(2.3026, abs=5e-5)


@pytest.mark.parametrize("measure", MEASURES)
def test_a_balanced_edge_is_at_the_target_and_an_empty_one_infinitely_far(measure: Measure) -> None:
    found = distances(np.stack([np.full(10, 3.0), np.zeros(10)]), UNIFORM, measure)
    assert found[0] == pytest.approx(0, abs=1e-12)
    assert found[1] == math.inf


@pytest.mark.parametrize("measure", MEASURES)
def test_without_classes_every_mix_is_as_good(measure: Measure) -> None:
    assert distances(np.zeros((3, 0)), np.zeros(0), measure).tolist() == [0, 0, 0]
    assert farthest(np.zeros(0), measure) == 0
    assert one_distance(np.zeros(0), measure)([], 0.0) == 0


def test_jensen_shannon_agrees_with_scipy_and_l1_is_the_sum_of_differences() -> None:
    counts = np.random.default_rng(1).integers(0, 9, (20, 10)).astype(np.float64)
    for row in counts:
        expected = jensenshannon(row, UNIFORM) ** 2
        assert distances(row[None], UNIFORM, "js")[0] == pytest.approx(expected)
    assert distances(ONE, UNIFORM, "l1")[0] == pytest.approx(0.9 + 9 * 0.1)


@pytest.mark.parametrize("measure", MEASURES)
def test_no_mix_is_farther_than_the_farthest(measure: Measure) -> None:
    target = np.array([0.5, 0.3, 0.2])
    counts = np.vstack([np.random.default_rng(2).random((50, 3)), np.eye(3)])
    assert distances(counts, target, measure).max() == pytest.approx(farthest(target, measure))


@pytest.mark.parametrize("measure", MEASURES)
def test_a_target_without_a_label_leaves_finite_numbers_where_they_are_needed(measure: Measure) -> None:
    target = np.array([0.5, 0.5, 0.0])
    assert np.isfinite(farthest(target, measure))
    assert np.isfinite(cut(np.full(3, 1 / 3), target, measure)).all()
    assert distances(np.array([[1.0, 1.0, 0.0]]), target, measure)[0] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("measure", MEASURES)
def test_plain_numbers_give_the_same_distance_as_arrays(measure: Measure) -> None:
    rng = np.random.default_rng(3)
    target = mixes(rng.random(6) + 0.1)
    distance = one_distance(target, measure)
    counts = rng.integers(0, 4, (50, 6)).astype(np.float64)
    one_by_one = [distance(row.tolist(), float(row.sum())) for row in counts]
    assert one_by_one == pytest.approx(distances(counts, target, measure).tolist(), abs=1e-12)
    assert distance([0.0] * 6, 0.0) == math.inf


positive = st.lists(st.floats(0.01, 10), min_size=4, max_size=4)
counted = st.lists(st.floats(0, 100), min_size=4, max_size=4)


@pytest.mark.parametrize("measure", MEASURES)
@given(at=positive, target=positive, counts=counted, limit=st.floats(0, 2))
def test_a_cut_holds_wherever_the_mix_is_within_the_limit(
    measure: Measure, at: list[float], target: list[float], counts: list[float], limit: float
) -> None:
    wanted, point, here = mixes(np.array(target)), mixes(np.array(at)), np.array(counts)
    slope = cut(point, wanted, measure)
    away = float(distances(here, wanted, measure))
    if here.sum() > 0:
        assert slope @ here <= here.sum() * away + 1e-6
        if away <= limit:
            assert (slope - limit) @ here <= 1e-6
    assert slope @ point == pytest.approx(float(distances(point, wanted, measure)), abs=1e-9)


def oracle(counts: Floats, epsilon: float) -> float:
    return float(np.abs(noisy_histograms(counts, epsilon, 5) - counts).mean())


def test_noise_has_the_mean_absolute_value_of_its_scale_and_leaves_no_negative_counts() -> None:
    counts = np.full((300, 10), 1000.0)
    assert oracle(counts, 0.5) == pytest.approx(2.0, rel=0.1)
    assert noisy_histograms(np.zeros((50, 10)), 0.1, 1).min() == 0


def test_a_clients_noise_depends_on_the_seed_and_itself_only() -> None:
    counts = np.full((5, 3), 20.0)
    once = noisy_histograms(counts, 1.0, 4)
    assert np.array_equal(once, noisy_histograms(counts, 1.0, 4))
    assert np.array_equal(once[:2], noisy_histograms(counts[:2], 1.0, 4))
    assert not np.array_equal(once, noisy_histograms(counts, 1.0, 5))
    assert (counts == 20).all()


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.inf, math.nan])
def test_an_epsilon_that_is_not_positive_is_refused(epsilon: float) -> None:
    with pytest.raises(UserError, match="positive and finite"):
        noisy_histograms(np.ones((1, 2)), epsilon, 0)
