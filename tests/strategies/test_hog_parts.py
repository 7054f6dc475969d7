"""MUD-HoG's histories, detectors and standings, each by itself; B1 to B8 name faults of the released code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.cluster import DBSCAN, KMeans
from sklearn.metrics import silhouette_samples

from fedplat.strategies.aggregators import hog_detection as detect
from fedplat.strategies.aggregators import median
from fedplat.strategies.aggregators.distances import scalar_products
from fedplat.strategies.aggregators.history import Histories
from fedplat.strategies.aggregators.hog_standing import (
    ADDITIVE_NOISE,
    SIGN_FLIP,
    TARGETED,
    Delays,
    Standing,
    convict,
    convict_as_released,
    note_quality,
    note_quality_as_released,
)

from .test_mud_hog import rule, unit, updates

# Histories -------------------------------------------------------------------------------------------------


def test_the_window_slides_and_the_frozen_one_of_the_released_code_does_not() -> None:
    # B1: one object stored three times over, so that the short history stays at its first mean.
    right, frozen = Histories(3), Histories(3, frozen=True)
    seen = []
    for value in (1.0, 2.0, 3.0, 10.0, 20.0, 30.0):
        one = updates([[value]])
        seen.append((right.short(right.record(one)).item(), frozen.short(frozen.record(one)).item()))
    assert seen == [(1, 1), (1.5, 1.5), (2, 2), (5, 2), (11, 2), (20, 2)]
    assert right.long[0].item() == frozen.long[0].item() == 66


def test_short_is_the_mean_of_the_last_three_and_long_the_sum_of_all() -> None:
    rng = np.random.default_rng(0)
    stream = rng.normal(size=(8, 5, 7)).astype(np.float32)
    histories, frozen = Histories(3), Histories(3, frozen=True)
    start = torch.from_numpy(rng.normal(size=7).astype(np.float32))
    for t in range(8):
        slots = histories.record(updates(stream[t], reference=start))
        np.testing.assert_allclose(histories.short(slots), stream[max(t - 2, 0) : t + 1].mean(0), atol=1e-6)
        np.testing.assert_allclose(histories.long[slots], stream[: t + 1].sum(0), atol=1e-5)
        slots = frozen.record(updates(stream[t], reference=start))
    np.testing.assert_allclose(frozen.short(slots), stream[:3].mean(0), atol=1e-6)


def test_an_absent_client_keeps_its_history_and_a_new_one_begins_with_what_it_sent() -> None:
    histories = Histories(2)
    histories.record(updates([[1.0], [2.0]], [7, 8]))
    slots = histories.record(updates([[30.0], [5.0]], [2**64 - 1, 8]))
    assert histories.short(slots).flatten().tolist() == [30, 3.5]
    slots = histories.record(updates([[3.0]], [7]))
    assert histories.short(slots).item() == 2
    assert histories.nodes == [7, 8, 2**64 - 1]
    assert histories.long[:3].flatten().tolist() == [4, 7, 30]


def test_room_doubles_and_the_state_has_only_what_is_used() -> None:
    histories = Histories(2)
    for nodes in ([0, 1, 2], [0, 3], [4, 5, 6]):
        histories.record(updates(np.ones((len(nodes), 4)), nodes))
    assert [len(histories.long), len(histories.nodes)] == [12, 7]
    assert histories.state_dict()["recent"].shape == (7, 2, 4)


@pytest.mark.parametrize(("dtype", "each"), [("float32", 16), ("float16", 10), ("bfloat16", 10)])
def test_state_bytes_are_those_of_the_tensors(dtype: str, each: int) -> None:
    made = rule(history_dtype=dtype)
    made(updates(np.ones((5, 11))))
    state = made.state_dict()["histories"]
    assert made.state_bytes(5, 11) == 5 * 11 * each == state["long"].nbytes + state["recent"].nbytes


def test_half_types_lose_no_small_update_in_the_sum_and_overflow_nowhere() -> None:
    # In float16 a sum of 4,096 swallows every further 1.
    histories = Histories(3, "float16")
    for value in (4096.0, 1.0, 1.0):
        slots = histories.record(updates([[value]]))
    assert histories.long[0].item() == 4098
    huge = Histories(3, "bfloat16")
    for _ in range(5):
        slots = huge.record(updates([[3e38, -3e38]]))
    assert bool(torch.isfinite(huge.short(slots)).all() and torch.isfinite(huge.long[slots]).all())


def test_another_number_of_parameters_is_refused() -> None:
    histories = Histories(3)
    histories.record(updates([[1.0]]))
    with pytest.raises(ValueError, match="2 parameters where there were 1"):
        histories.record(updates([[1.0, 2.0]]))
    with pytest.raises(ValueError, match="expected 2 as"):
        Histories(2).load_state_dict(histories.state_dict())


# Detectors -------------------------------------------------------------------------------------------------


def gram(x: np.ndarray) -> np.ndarray:
    return scalar_products(torch.from_numpy(x)).numpy()


def test_the_gap_is_cut_in_its_middle_and_needs_two_values() -> None:
    assert detect.gap_midpoint(np.array([3.0, 1.0, 10.0])) == 6.5
    assert detect.gap_midpoint(np.array([1.0])) == detect.gap_midpoint(np.array([])) == 0
    assert detect.gap_midpoint(np.array([2.0, 2.0])) == 2


def test_a_gap_below_the_floor_accuses_nobody_where_the_largest_gap_always_does() -> None:
    # B4: the largest gap splits any set of different values.
    fine = np.array([0.90, 0.91, 0.93, 0.92, 0.95])
    assert not detect.low_outliers(fine, 0.05).any()
    assert (fine < detect.gap_midpoint(fine)).any()
    assert detect.low_outliers(np.array([0.9, 0.1, 0.5, 0.91, 0.92, 0.93]), 0.2).tolist()[:3] == [0, 1, 1]
    assert not detect.low_outliers(np.array([0.1, 0.2, 0.9]), 0.3).any()  # never more than half
    assert not detect.low_outliers(np.array([0.1]), 0.3).any()


@pytest.mark.parametrize("seed", range(6))
def test_two_means_on_the_products_groups_as_scikit_learn_does_on_the_vectors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(23, 400)).astype(np.float32)
    x[:7] += rng.normal(size=400) * (0.0 if seed < 3 else 0.6)
    labels = detect.two_groups(gram(x))
    expected = KMeans(n_clusters=2, n_init=10, random_state=0, tol=0).fit(x.astype(np.float64))
    assert labels is not None
    # The draws of its starts are of the distances, so that even the names of the groups are equal.
    assert labels.tolist() == expected.labels_.tolist()
    inertia = sum(((x[labels == k] - x[labels == k].mean(0)) ** 2).sum() for k in (0, 1))
    assert inertia == pytest.approx(expected.inertia_, rel=1e-5)


def test_dbscan_on_distances_labels_as_on_the_vectors() -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(size=(12, 50)), rng.normal(size=(7, 50)) + 3, 9 * unit(rng, 3)[:, :50]])
    for eps in (1.0, 9.5, 10.5, 30.0):
        labels = detect.clusters(detect.distances(gram(x)), eps, 5)
        assert labels.tolist() == DBSCAN(eps=eps, min_samples=5).fit_predict(x).tolist()


def test_silhouettes_agree_with_scikit_learn() -> None:
    x = np.random.default_rng(2).normal(size=(15, 20))
    x[:4] += 1
    between, group = detect.distances(gram(x)), np.arange(15) < 4
    ours = detect.silhouettes(between, group)
    np.testing.assert_allclose(ours[:4], silhouette_samples(x, group)[:4])
    np.testing.assert_allclose(ours[4:], silhouette_samples(x, group)[4:])
    assert detect.silhouettes(between, np.arange(15) < 1)[0] == 0
    assert not detect.silhouettes(between, np.ones(15, bool)).any()


def test_a_dense_middle_is_no_group_apart_and_a_distant_group_is() -> None:
    # Trap: clients with much data lie close together in the middle of the others, and stand out as a group.
    rng = np.random.default_rng(6)
    common, aim = unit(rng, 2)
    scattered, middle = common + 0.8 * unit(rng, 14), common + 0.05 * unit(rng, 6)
    assert not detect.apart(gram(np.concatenate([scattered, middle])))[0].any()
    group, shown = detect.apart(gram(np.concatenate([scattered, middle + aim])))
    assert np.flatnonzero(group).tolist() == list(range(14, 20))
    assert shown[group].min() > 0.5
    assert not shown[:14].any()


def test_distances_and_directions_by_hand() -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0], [6.0, 8.0]])
    np.testing.assert_allclose(detect.distances(gram(x)), [[0, 5, 5], [5, 0, 10], [5, 10, 0]])
    # A zero vector has no direction; its cosine is 0, not NaN.
    np.testing.assert_allclose(detect.directions(gram(x)), [[1, 0, 1], [0, 0, 0], [1, 0, 1]])


def test_the_natural_radius_scales_and_makes_half_of_the_points_cores() -> None:
    x = np.random.default_rng(3).normal(size=(20, 30))
    x[:6] *= 50
    between = detect.distances(gram(x))
    eps = detect.natural_eps(between, 5)
    assert detect.natural_eps(7 * between, 5) == pytest.approx(7 * eps)
    assert ((between <= eps).sum(axis=1) >= 5).sum() >= 10
    assert detect.natural_eps(between[:4, :4], 5) == 0


def test_noise_is_never_the_normal_cluster_but_in_the_released_code() -> None:
    # B2: with a radius too small everybody is noise, noise wins, and nobody can be accused.
    labels = np.array([-1, -1, -1, 0, 0, 1])
    assert detect.normal_cluster(labels, noise_too=False).tolist() == [False, False, False, True, True, False]
    assert detect.normal_cluster(labels, noise_too=True).tolist() == [True, True, True, False, False, False]
    assert not detect.normal_cluster(np.array([-1, -1]), noise_too=False).any()


def test_groups_of_the_same_size_accuse_label_one_only_in_the_released_code() -> None:
    labels = np.array([0, 1, 1, 0])
    assert detect.minority(labels, 4, even=True).tolist() == [False, True, True, False]
    assert not detect.minority(labels, 4, even=False).any()
    assert detect.minority(np.array([0, 1, 1]), 3, even=False).tolist() == [True, False, False]
    assert not detect.minority(None, 4, even=True).any()


def test_equal_vectors_are_no_two_groups() -> None:
    assert detect.two_groups(gram(np.ones((6, 4)))) is None
    assert detect.two_groups(gram(np.zeros((6, 4)))) is None
    assert detect.two_groups(gram(np.ones((1, 4)))) is None
    assert detect.clusters(np.zeros((6, 6)), 0.0, 5).tolist() == [0] * 6


def test_the_median_of_members_needs_no_copy_of_them() -> None:
    x = torch.from_numpy(np.random.default_rng(4).normal(size=(9, 5000)).astype(np.float32))
    members = np.arange(9) % 2 == 0
    assert torch.equal(detect.centre(x, members), median(x[torch.from_numpy(members)]).vector)


# Standings -------------------------------------------------------------------------------------------------


def by_kind(*kinds: int) -> np.ndarray:
    return np.array([[kind in kinds for kind in range(3)]])


ALL = by_kind(0, 1, 2)


@pytest.mark.parametrize("released", [False, True])
def test_two_clean_rounds_lift_a_conviction_and_one_does_not(released: bool) -> None:
    standing = Standing.clean(1)

    def count(*kinds: int) -> bool:
        if released:
            convict_as_released(standing, by_kind(*kinds), Delays())
        else:
            convict(standing, by_kind(*kinds), ALL, Delays())
        return bool(standing.malicious[0])

    flip = SIGN_FLIP
    assert [count(flip), count(flip), count(), count(flip), count(), count()] == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]


def test_kinds_are_counted_apart_where_the_released_code_adds_them_up() -> None:
    # B7: suspected of an aim once and of noise once is confirmed as noise.
    ours, theirs = Standing.clean(1), Standing.clean(1)
    for kind in (TARGETED, ADDITIVE_NOISE):
        convict(ours, by_kind(kind), ALL, Delays())
        convict_as_released(theirs, by_kind(kind), Delays())
    assert not ours.malicious[0]
    assert theirs.confirmed[0].tolist() == [False, True, False]


def test_a_kind_that_was_not_judged_is_left_as_it_was() -> None:
    standing = Standing.clean(1)
    for _ in range(2):
        convict(standing, by_kind(ADDITIVE_NOISE), ALL, Delays())
    for _ in range(5):
        convict(standing, by_kind(), by_kind(SIGN_FLIP), Delays())
    assert standing.confirmed[0].tolist() == [False, True, False]


def test_the_released_code_turns_a_convict_of_noise_into_an_unreliable_client() -> None:
    # B8: it is freed of everything.
    standing = Standing.clean(1)
    for kinds in ((ADDITIVE_NOISE,), (ADDITIVE_NOISE, SIGN_FLIP), (), (SIGN_FLIP,)):
        convict_as_released(standing, by_kind(*kinds), Delays())
    assert standing.hits[0] == 1
    convict_as_released(standing, by_kind(), Delays())
    assert standing.confirmed[0].tolist() == [True, False, False]
    assert [bool(standing.malicious[0]), bool(standing.unreliable[0])] == [False, True]


def test_as_many_good_rounds_as_the_delay_undo_any_number_of_poor_ones() -> None:
    ours, theirs = Standing.clean(1), Standing.clean(1)
    yes, no = np.array([True]), np.array([False])
    seen = []
    for poor in [yes] * 6 + [no] * 5:
        note_quality(ours, poor, yes, 3)
        note_quality_as_released(theirs, poor, 3)
        seen.append((bool(ours.unreliable[0]), bool(theirs.unreliable[0])))
    assert [a for a, _ in seen] == [False] * 2 + [True] * 6 + [False] * 3
    assert all(b for _, b in seen[2:])
