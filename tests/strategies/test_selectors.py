from __future__ import annotations

import numpy as np
import pytest

from fedplat.strategies.nodes import Node
from fedplat.strategies.selectors import AllClients, RandomFraction

NODES = [Node(100 + i, i) for i in range(7)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_all_clients_selects_everyone_in_order() -> None:
    assert AllClients().select(NODES, rng(), 1) == NODES


@pytest.mark.parametrize(("fraction", "count"), [(0.1, 1), (0.3, 3), (0.5, 4), (1.0, 7), (0.01, 1)])
def test_fraction_is_rounded_up_and_never_empty(fraction: float, count: int) -> None:
    selector = RandomFraction(fraction=fraction)
    chosen = selector.select(NODES, rng(), 1)
    assert selector.count(len(NODES)) == len(chosen) == len(set(chosen)) == count
    assert chosen == sorted(chosen, key=lambda node: node.key)


def test_fraction_of_ten_by_a_tenth_is_one_despite_binary_fractions() -> None:
    assert RandomFraction(fraction=0.1).count(30) == 3


def test_same_generator_gives_the_same_clients_and_every_client_gets_its_turn() -> None:
    selector = RandomFraction(fraction=0.4)
    assert selector.select(NODES, rng(3), 1) == selector.select(NODES, rng(3), 9)
    seen = {node for seed in range(40) for node in selector.select(NODES, rng(seed), 1)}
    assert seen == set(NODES)
