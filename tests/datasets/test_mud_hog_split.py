import numpy as np
import pytest

from fedplat.datasets.partition import Labels, class_counts, mud_hog, partition
from fedplat.datasets.torchvision_sets import load_fashion_mnist, load_mnist
from fedplat.errors import UserError
from tests.datasets import real_data, source

MNIST = """
    1378 1801 1350 3223 1214 2204 1859 1327 2061 1223 1791 1628 1325 1106 741 1050 2271 1787 671 1208
    1056 1226 2196 1261 1357 933 1901 1783 1306 1037 1611 986 1031 2363 2108 1503 1396 1509 920 1299
"""
FASHION = """
    1651 1551 584 2064 1212 2372 1607 3576 2121 1398 907 1295 1138 1815 863 1158 1284 2103 602 1949
    1352 1315 1161 1804 661 1006 860 1327 2899 1286 1454 2208 1384 1745 1346 1049 2132 870 1386 1505
"""
# Clients whose label-1 samples the attack scenarios rely on, with their numbers.
RICH_MNIST = dict(zip([3, 1, 17, 24, 11, 31, 30, 13], [1072, 815, 700, 353, 336, 311, 308, 307], strict=True))
RICH_FASHION = dict(zip([17, 29, 6, 8, 23, 39, 31, 1], [438, 433, 428, 372, 310, 296, 292, 288], strict=True))


@pytest.mark.parametrize(
    ("load", "folder", "expected", "rich"),
    [(load_mnist, "MNIST", MNIST, RICH_MNIST), (load_fashion_mnist, "FashionMNIST", FASHION, RICH_FASHION)],
)
def test_the_published_split_is_reproduced_client_by_client(tmp_path, load, folder, expected, rich):
    data = load(source(tmp_path, real_data(f"{folder}/raw")))
    parts = partition("mud-hog", Labels.of(data), 40, 99)
    assert [len(part) for part in parts] == [int(n) for n in expected.split()]
    counts = class_counts(np.asarray(data.train.y), parts, 10)
    assert {client: int(counts[client, 1]) for client in rich} == rich
    assert sum(len(part) // 128 for part in parts) == {"MNIST": 449, "FashionMNIST": 450}[folder]


def oracle(labels, clients, alpha, seed):
    stream = np.random.RandomState(seed)
    parts = [[] for _ in range(clients)]
    for c in sorted(set(labels.tolist())):
        members = [i for i, label in enumerate(labels.tolist()) if label == c]
        stream.shuffle(members)
        cumulative = np.cumsum(stream.dirichlet([alpha] * clients))
        for i in members:
            parts[
                int(np.searchsorted(cumulative / cumulative[-1], stream.random_sample(), side="right"))
            ].append(i)
    return [sorted(part) for part in parts]


@pytest.mark.parametrize(("alpha", "seed", "clients"), [(0.9, 1, 7), (0.2, 5, 3), (5.0, 0, 12)])
def test_the_split_equals_one_drawn_sample_by_sample(alpha, seed, clients):
    labels = np.random.default_rng(0).integers(0, 4, 200)
    labels[labels == 2] = 3
    parts = mud_hog(Labels(labels, 4), clients, np.random.default_rng(0), alpha=alpha, seed=seed)
    assert [part.tolist() for part in parts] == oracle(labels, clients, alpha, seed)


def test_the_split_does_not_depend_on_the_seed_of_the_run():
    labels = Labels(np.arange(100) % 5, 5)
    first, other = (partition("mud-hog", labels, 4, seed) for seed in (0, 1))
    assert [p.tolist() for p in first] == [p.tolist() for p in other]


def test_an_alpha_too_small_for_the_legacy_draw_is_refused():
    with pytest.raises(UserError, match="too small to draw from"):
        partition("mud-hog", Labels(np.arange(100) % 5, 5), 4, 0, alpha=1e-8)
