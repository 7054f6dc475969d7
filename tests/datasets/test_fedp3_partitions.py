"""FedP3's two partitions, and the test part that each client keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedplat.datasets.base import Dataset, Split
from fedplat.datasets.fedp3_partitions import (
    classwise,
    dirichlet_equal,
    pooled,
    split_clients,
    with_clients_tests,
)
from fedplat.datasets.labels import Labels, check_parts, class_counts
from fedplat.datasets.partition import partition
from fedplat.errors import UserError


def view_of(per_class: int, classes: int) -> Labels:
    return Labels(np.tile(np.arange(classes), per_class), classes)


@pytest.mark.parametrize(
    ("per_class", "classes", "own", "each"),
    [(6000, 10, 5, 120), (600, 100, 15, 40), (7000, 10, 5, 140), (5600, 10, 5, 112)],
    ids=["cifar10", "cifar100", "fashion", "emnist-letters"],
)
def test_class_wise_clients_have_the_papers_numbers(
    per_class: int, classes: int, own: int, each: int
) -> None:
    view = view_of(per_class, classes)
    parts = classwise(view, 100, np.random.default_rng(0), classes_per_client=own)
    counts = class_counts(view.labels, parts, classes)
    for client in range(100):
        wanted = np.zeros(classes, int)
        wanted[[(client + j) % classes for j in range(own)]] = each
        assert counts[client].tolist() == wanted.tolist()
    check_parts(parts, len(view), "s1", complete=True)
    train, test = split_clients(parts, 0.3, seed=1)
    size = own * each
    assert {(len(a), len(b)) for a, b in zip(train, test, strict=True)} == {(size * 7 // 10, size * 3 // 10)}


def test_uneven_classes_leave_some_out_and_too_few_are_refused() -> None:
    view = Labels(np.repeat([0, 1, 2], [90, 60, 45]), 3)
    parts = classwise(view, 6, np.random.default_rng(0), classes_per_client=2)
    assert {len(part) for part in parts} == {22}  # 45 // 4 of each
    check_parts(parts, len(view), "s1", complete=False)
    for settings, words in (({"classes_per_client": 4}, "3 classes"), ({"min_samples": 30}, "scarcest")):
        with pytest.raises(UserError, match=words):
            classwise(view, 6, np.random.default_rng(0), **{"classes_per_client": 2, **settings})


def test_dirichlet_clients_are_of_equal_size_and_follow_their_mixes() -> None:
    view = view_of(600, 10)
    parts = dirichlet_equal(view, 100, np.random.default_rng(0), alpha=0.5)
    assert {len(part) for part in parts} == {60}
    check_parts(parts, len(view), "s2", complete=True)
    counts = np.sort(class_counts(view.labels, parts, 10), axis=1)[:, ::-1]
    # As the paper says of 0.5: about 80 % of a client's samples are of four classes.
    assert counts[:, :4].sum() / counts.sum() == pytest.approx(0.8, abs=0.06)
    even = dirichlet_equal(view, 100, np.random.default_rng(0), alpha=1000.0)
    assert class_counts(view.labels, even, 10).std() < 3
    one = dirichlet_equal(view, 7, np.random.default_rng(0), alpha=1e-3)
    assert {len(part) for part in one} == {6000 // 7}


@pytest.mark.parametrize("name", ["classwise", "dirichlet_equal"])
def test_the_seed_decides_and_a_scenario_can_name_them(name: str) -> None:
    view, where = view_of(100, 10), f"fedplat.datasets.fedp3_partitions:{name}"
    first, again, other = (partition(where, view, 10, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def data_set() -> Dataset:
    train = Split(np.arange(24, dtype=np.uint8).reshape(6, 2, 2), np.arange(6) % 3)
    test = Split(np.full((2, 2, 2), 99, np.uint8), np.array([1, 2]))
    return Dataset("d", train, test, ("a", "b", "c"), (1, 2, 2), (0.0,), (1.0,), groups=np.arange(6))


def test_pooling_puts_the_test_samples_last_and_clients_hold_their_own_out() -> None:
    both = pooled(data_set())
    assert len(both.train) == 8
    assert both.train.y.tolist() == [0, 1, 2, 0, 1, 2, 1, 2]
    assert (both.train.x[6:] == 99).all()
    assert both.groups is None
    assert "pooled" in both.note
    parts = [np.array([0, 1, 6, 7]), np.array([2, 3, 4, 5])]
    train, test = split_clients(parts, 0.25, seed=0)
    for part, a, b in zip(parts, train, test, strict=True):
        assert sorted([*a, *b]) == part.tolist()
        assert len(b) == 1
    tested = with_clients_tests(both, test)
    assert tested.test.y.tolist() == both.train.y[np.concatenate(test)].tolist()
    again = split_clients(parts, 0.25, seed=0)
    assert all(np.array_equal(a, b) for a, b in zip(test, again[1], strict=True))


def test_bad_shares_are_refused_and_something_is_left_to_train_on() -> None:
    parts: list[Any] = [np.arange(1), np.arange(0), np.arange(3)]
    train, test = split_clients(parts, 0.9, 0)
    assert [len(part) for part in train] == [1, 0, 1]
    assert [len(part) for part in test] == [0, 0, 2]
    for share in (1.0, -0.1, float("nan")):
        with pytest.raises(UserError, match="own_test"):
            split_clients(parts, share, 0)
    with pytest.raises(UserError, match="no client holds"):
        with_clients_tests(replace(data_set()), split_clients(parts, 0.0, 0)[1])
