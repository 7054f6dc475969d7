from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from fedplat.emulation.hardware import path_gain, shannon_rate
from fedplat.emulation.wireless import (
    client_positions,
    coverage,
    distances,
    edge_positions,
    fading,
    fading_of,
    mean_gains,
    mean_rate,
)
from fedplat.errors import UserError


def test_more_clients_only_append() -> None:
    few, many = client_positions(3, 500.0, 7), client_positions(5, 500.0, 7)
    assert np.array_equal(few, many[:3])
    assert ((many >= 0) & (many < 500)).all()
    assert not np.array_equal(client_positions(3, 500.0, 8), few)


def test_four_edges_are_at_the_centres_of_the_quadrants() -> None:
    assert edge_positions(4, 100.0).tolist() == [[25, 25], [75, 25], [25, 75], [75, 75]]


@pytest.mark.parametrize("edges", range(1, 31))
def test_regular_edges_are_inside_apart_and_fair_to_both_sides(edges: int) -> None:
    places = edge_positions(edges, 1.0)
    assert places.shape == (edges, 2)
    assert ((places > 0) & (places < 1)).all()
    assert places[:, 0].mean() == pytest.approx(0.5)
    apart = distances(places, places) + np.eye(edges)
    assert apart.min() > 0.5 / math.sqrt(edges)


def test_drawn_edges_depend_on_the_seed_and_more_only_append() -> None:
    few, many = (edge_positions(n, 10.0, "drawn", 1) for n in (2, 4))
    assert np.array_equal(few, many[:2])
    assert not np.array_equal(many, edge_positions(4, 10.0, "drawn", 2))


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(UserError, match="0 edges"):
        edge_positions(0, 10.0)
    with pytest.raises(UserError, match="size above 0"):
        edge_positions(2, 0.0)
    with pytest.raises(UserError, match="layout"):
        edge_positions(2, 1.0, "hexagons")  # type: ignore[arg-type]


def test_distances_are_as_computed_by_hand() -> None:
    assert distances(np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[3.0, 0.0]])).tolist() == [[3.0], [4.0]]


def test_who_is_out_of_range_reaches_the_nearest_edge_alone() -> None:
    metres = np.array([[1.0, 9.0, 5.0], [8.0, 7.0, 9.0], [5.1, 5.2, 5.0]])
    assert coverage(metres, 5.0).tolist() == [[True, False, True], [False, True, False], [False, False, True]]


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(1, 5), st.floats(0, 3), st.integers(0, 100))
def test_everybody_is_covered_and_a_longer_range_covers_more(n: int, m: int, span: float, seed: int) -> None:
    metres = np.random.default_rng(seed).random((n, m)) * 2
    near, far = coverage(metres, span), coverage(metres, span + 0.3)
    assert near.any(axis=1).all()
    assert (far | ~near).all()


def test_gains_fall_with_distance_and_shadowing_spreads_them_around_that() -> None:
    metres = np.full((4000, 1), 300.0)
    assert mean_gains(metres[:1], 0.0, 1)[0, 0] == path_gain(0.3)
    shift = 10 * np.log10(mean_gains(metres, 8.0, 1) / path_gain(0.3))
    assert abs(shift.mean()) < 3 * 8 / math.sqrt(4000)
    assert shift.std() == pytest.approx(8.0, rel=0.05)
    assert np.array_equal(mean_gains(metres[:2], 8.0, 1), mean_gains(metres, 8.0, 1)[:2])


def test_fading_has_mean_one_and_is_drawn_anew_each_round() -> None:
    draws = np.stack([fading(50, 4, g, 3) for g in range(1, 51)])
    assert draws.mean() == pytest.approx(1.0, abs=3 / math.sqrt(draws.size))
    assert draws.var() == pytest.approx(1.0, abs=0.1)
    assert (draws >= 0).all()
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.05


def test_fading_does_not_depend_on_who_else_is_there() -> None:
    whole = fading(5, 4, 2, 3)
    assert np.array_equal(fading(3, 4, 2, 3), whole[:3])
    assert np.array_equal(fading(5, 2, 2, 3), whole[:, :2])
    assert [[fading_of(n, m, 2, 3) for m in range(4)] for n in range(5)] == whole.tolist()


@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0, 20.0, 1e4])
def test_the_mean_rate_is_the_integral_over_fading(ratio: float) -> None:
    expected, _ = quad(lambda h: math.exp(-h) * math.log2(1 + ratio * h), 0, 60)
    # Noise of 1 W in a band of 1 Hz, so that the gain is the signal-to-noise ratio.
    assert mean_rate(1.0, 1.0, ratio, 1.0) == pytest.approx(expected, rel=1e-6)


def test_the_mean_rate_is_below_the_rate_of_the_mean_and_never_breaks() -> None:
    gains = np.array([0.0, 1e-300, 1e-9, 1 / 501, 1 / 499, 1.0, 1e12])
    mean, at_mean = mean_rate(1e6, 1.0, gains, 1e-6), shannon_rate(1e6, 1.0, gains, 1e-6)
    assert np.isfinite(mean).all()
    assert (np.diff(mean) > 0).all()
    assert (mean[2:] < at_mean[2:]).all()
    assert mean[3] == pytest.approx(at_mean[3], rel=0.01)
