from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedplat.datasets.base import Dataset, Source
from fedplat.datasets.labels import Labels
from fedplat.datasets.partition import partition
from fedplat.datasets.shapes import load as load_shapes
from fedplat.datasets.sub_domains import dirichlet_domains, spread_over, transformed
from fedplat.datasets.subset import held_back_rows, load
from fedplat.errors import UserError

DOMAINS = "fedplat.datasets.sub_domains:dirichlet_domains"


def subset(seed: int = 1, **settings: Any) -> Dataset:
    return load(Source(None, Path("unused"), False, seed), of="digits", **settings)


def test_some_classes_are_taken_numbered_anew_and_keep_their_names() -> None:
    whole, part = subset(), subset(classes=(7, 3))
    assert part.classes == ("7", "3")
    for split in ("train", "test"):
        old, new = getattr(whole, split), getattr(part, split)
        for label, number in ((7, 0), (3, 1)):
            assert np.array_equal(old.x[old.y == label], new.x[new.y == number])
        assert len(new) == int(np.isin(old.y, (3, 7)).sum())
    assert "classes 7, 3 of digits" in part.note
    assert whole.fingerprint != part.fingerprint


def test_few_images_of_each_class_are_drawn_with_the_seed() -> None:
    one, again, other = subset(per_class=5), subset(per_class=5), subset(per_class=5, seed=2)
    assert np.bincount(one.train.y).tolist() == [5] * 10
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert np.bincount(subset(test_per_class=3).test.y).tolist() == [3] * 10
    assert len(subset(per_class=10**6).train) == len(subset().train)


def test_held_back_samples_are_left_out_whatever_the_seed() -> None:
    rows = held_back_rows(1438, 400)
    whole, part = subset(), subset(held_back=400)
    kept = np.setdiff1d(np.arange(1438), rows)
    assert np.array_equal(part.train.x, whole.train.x[kept])
    assert np.array_equal(held_back_rows(1438, 400), rows)
    assert len(np.unique(rows)) == 400


def test_sub_domains_show_the_same_images_in_other_ways_all_equally_often() -> None:
    domains = ("plain", "turned-90", "inverted", "blurred")
    whole, part = subset(), subset(sub_domains=domains)
    which = part.columns["sub-domain"]
    assert np.ptp(np.bincount(which)) <= 1
    for number, domain in enumerate(domains):
        rows = which == number
        assert np.array_equal(part.train.x[rows], transformed(whole.train.x[rows], domain, 16.0))
    assert np.array_equal(part.train.y, whole.train.y)
    assert "sub-domain" not in whole.columns


def test_transformations_by_hand() -> None:
    x = np.array([[[1, 2], [3, 4]]], np.uint8)
    assert transformed(x, "turned-180").tolist() == [[[4, 3], [2, 1]]]
    assert transformed(x, "turned-270").tolist() == [[[3, 1], [4, 2]]]
    assert transformed(x, "inverted", 16.0).tolist() == [[[15, 14], [13, 12]]]
    colour = np.array([[[[0, 30, 60]]]], np.uint8)
    assert transformed(colour, "grey").tolist() == [[[[30, 30, 30]]]]
    spot = np.zeros((1, 3, 3), np.uint8)
    spot[0, 1, 1] = 90
    assert transformed(spot, "blurred")[0].tolist() == [[10] * 3] * 3
    assert x.tolist() == [[[1, 2], [3, 4]]]
    with pytest.raises(UserError, match="not square"):
        transformed(np.zeros((1, 2, 3), np.uint8), "turned-90")
    out, which = spread_over(x, ("plain",), np.random.default_rng(0))
    assert out.tolist() == x.tolist()
    assert which.tolist() == [0]


def mixed(alpha: float, alpha_in: float, clients: int = 6) -> np.ndarray:
    """Return counts (clients, sub-domains) of a split of many samples."""
    rng = np.random.default_rng(1)
    labels, domains = rng.integers(0, 10, 24_000), np.arange(24_000) % 4
    view = Labels(labels, 10, columns={"sub-domain": domains})
    parts = partition(DOMAINS, view, clients, 3, alpha=alpha, alpha_in=alpha_in, min_samples=10)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(24_000))
    return np.stack([np.bincount(domains[part], minlength=4) for part in parts])


def test_clients_mix_sub_domains_by_alpha_in_and_classes_by_alpha() -> None:
    def unevenness(counts: np.ndarray) -> float:
        shares = counts / counts.sum(axis=1, keepdims=True)
        return float(abs(shares - 0.25).mean())

    assert unevenness(mixed(100.0, 1000.0)) < 0.02
    assert unevenness(mixed(100.0, 0.1)) > 0.15
    assert unevenness(mixed(0.2, 1000.0)) < 0.05


def test_the_partition_is_that_of_the_seed_and_needs_sub_domains() -> None:
    view = Labels.of(subset(sub_domains=("plain", "inverted")))
    one, again = (partition(DOMAINS, view, 5, 1, alpha=1.0) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    with pytest.raises(UserError, match="have no sub-domains"):
        dirichlet_domains(Labels.of(subset()), 5, np.random.default_rng(0))
    with pytest.raises(UserError, match="What would fit"):
        dirichlet_domains(view, 40, np.random.default_rng(0), alpha=0.01, min_samples=30, max_tries=2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"classes": (1, 1)}, "names one twice"),
        ({"classes": (10,)}, "10 is none of digits's, 0 to 9"),
        ({"held_back": 5000}, "5000 samples held back"),
        ({"options": {"sise": 1}}, "unknown setting"),
    ],
)
def test_mistakes_are_explained(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        subset(**settings)


def test_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes images"):
        load(Source(tmp_path, tmp_path, False, 1), of="tests.datasets.test_subset:text")


def text(source: Source) -> Dataset:
    from fedplat.datasets.base import Split

    split = Split(np.zeros((4, 5), np.int64), np.zeros((4, 5), np.int64))
    return Dataset("text", split, split, ("a", "b"), (5,))


def test_scales_of_published_backbones_are_at_hand() -> None:
    assert subset(normalise="half").mean == (0.5,)
    assert subset(normalise="imagenet").mean == (pytest.approx(0.449),)


def test_shapes_are_drawn_by_the_seed_and_can_be_told_apart() -> None:
    def shapes(seed: int) -> Dataset:
        return load_shapes(Source(None, Path("unused"), False, seed), image_size=16, per_class=40)

    one, again, other = shapes(1), shapes(1), shapes(2)
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert np.bincount(one.train.y).tolist() == [40] * 12
    # The nearest class mean of edges, which know no colours, is right more often than chance.
    edges = [
        abs(np.diff(split.x.astype(float).mean(3), axis=1)).reshape(len(split), -1)
        for split in (one.train, one.test)
    ]
    means = np.stack([edges[0][one.train.y == label].mean(0) for label in range(12)])
    nearest = ((edges[1][:, None] - means) ** 2).sum(2).argmin(1)
    assert (nearest == one.test.y).mean() > 2 / 12
