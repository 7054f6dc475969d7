"""The contextual bandit: what it learns, and what it may spend."""

from __future__ import annotations

import numpy as np
import pytest

from fedplat.strategies.association.bandit import Cocs, picked
from fedplat.strategies.association.base import NOWHERE, Bools, Costs, Prices, RoundState

from .hand_made import all_there, hand_made


def played(policy: Cocs, rounds: int, delivers: Bools) -> np.ndarray:
    """Return how often each client is used in each half of so many rounds, (2, N)."""
    used = np.zeros((rounds, policy.world.clients))
    for number in range(1, rounds + 1):
        state = all_there(policy.world, number)
        decision = policy.decide(state)
        used[number - 1] = decision.edge_of != NOWHERE
        policy.observe(state, decision, delivers & (decision.edge_of != NOWHERE))
    return np.stack([used[: rounds // 2].sum(axis=0), used[rounds // 2 :].sum(axis=0)])


def test_a_client_that_never_delivers_is_given_up() -> None:
    world, limits = hand_made(np.ones((5, 1)), least=4)
    policy = Cocs(deadline=2.0)
    policy.prepare(world, limits, Prices(), 1)
    delivers = np.array([False, True, True, True, True])
    halves = played(policy, 40, delivers)
    assert halves[1, 0] <= 3
    assert halves[1, 1:].min() >= 15


def test_a_client_that_is_too_late_counts_as_one_that_did_not_deliver() -> None:
    seconds = [[3.0], [1.0], [1.0]]
    world, limits = hand_made(seconds, least=2)
    policy = Cocs(deadline=2.0)
    policy.prepare(world, limits, Prices(), 1)
    assert played(policy, 40, np.ones(3, bool))[1, 0] <= 3
    assert policy.kept[0].sum() == 0
    assert policy.tried[0, 0, -1] == policy.tried[0].sum()  # all in the cell beyond the deadline


def test_success_is_learnt_for_each_cell_of_context_apart() -> None:
    world, limits = hand_made(np.full((2, 1), 1.0))
    policy = Cocs(deadline=4.0, cells=4, budget=9.0)
    policy.prepare(world, limits, Prices(), 1)
    for number, seconds in enumerate([0.5, 1.5, 1.5, 3.9, 4.0, 7.0], start=1):
        state = RoundState(number, np.ones(2, bool), Costs(np.full((2, 1), seconds), np.ones((2, 1))))
        decision = policy.decide(state)
        policy.observe(state, decision, decision.edge_of != NOWHERE)
    assert policy.tried[0, 0].tolist() == [1, 2, 0, 2, 1]
    assert policy.kept[0, 0].tolist() == [1, 2, 0, 2, 0]


def test_edge_rounds_and_the_way_to_the_cloud_count_towards_the_deadline() -> None:
    world, limits = hand_made([[1.0]], edge_rounds=3, cloud_seconds=0.5)
    for deadline, kept in ((3.4, 0), (3.5, 1)):
        policy = Cocs(deadline=deadline)
        policy.prepare(world, limits, Prices(), 1)
        played(policy, 1, np.ones(1, bool))
        assert policy.kept.sum() == kept


def test_edges_spend_no_more_than_their_budget_but_for_their_first_client() -> None:
    joules = [[4.0], [3.0], [3.0], [2.0]]
    world, limits = hand_made(np.ones((4, 1)), joules, edge_rounds=2)
    policy = Cocs(budget=10.0, deadline=9.0)
    policy.prepare(world, limits, Prices(), 1)
    edge_of = policy.decide(all_there(world)).edge_of
    assert edge_of[3] == 0  # 4 J, the most chance per joule
    assert (edge_of != NOWHERE).sum() == 2  # and one of 6 J
    poor = Cocs(budget=0.1, deadline=9.0)
    poor.prepare(world, limits, Prices(), 1)
    assert (poor.decide(all_there(world)).edge_of != NOWHERE).sum() == 1


def test_pairs_are_taken_by_value_per_price() -> None:
    value = np.array([[0.9, 0.8], [0.5, 0.9], [0.0, 0.0]])
    price = np.array([[3.0, 1.0], [1.0, 9.0], [1.0, 1.0]])
    edge_of = picked(value, price, np.ones((3, 2), bool), np.array([5.0, 5.0]), np.array([2, 2]))
    assert edge_of.tolist() == [1, 0, NOWHERE]


@pytest.mark.parametrize("least", [0, 2])
def test_the_usual_budget_is_the_least_number_of_clients_at_the_mean_price(least: int) -> None:
    world, limits = hand_made(np.ones((6, 2)), least=least, edge_rounds=4)
    policy = Cocs()
    policy.prepare(world, limits, Prices(), 1)
    assert policy.purse.tolist() == [4.0 * least] * 2


@pytest.mark.parametrize(("explore", "often"), [(0.0, 1), (1.0, 4)])
def test_a_cell_is_tried_as_often_as_exploring_asks_before_it_is_judged(explore: float, often: int) -> None:
    world, limits = hand_made(np.ones((2, 1)), least=2)
    policy = Cocs(explore=explore, deadline=2.0)
    policy.prepare(world, limits, Prices(), 1)
    played(policy, 4, np.array([False, True]))
    assert policy.tried[0].sum() == often
