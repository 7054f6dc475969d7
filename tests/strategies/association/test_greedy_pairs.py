"""Greedy pairing of clients and edges: by cost, and by labels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.strategies.association.base import (
    NOWHERE,
    Costs,
    Prices,
    RoundState,
    divergences,
    edge_divergences,
    healthy_edges,
    round_joules,
    round_seconds,
)
from fedplat.strategies.association.greedy import CostGreedy, Pairing, QualityGreedy, Share
from fedplat.strategies.association.random_choice import RandomLeast
from fedplat.strategies.association.simulate import simulate

from .hand_made import all_there, hand_made
from .worlds import renumbered, small_world


def test_cost_greedy_takes_the_cheapest_clients() -> None:
    joules = [[5.0], [1.0], [4.0], [2.0], [3.0]]
    world, limits = hand_made(np.ones((5, 1)), joules, least=2)
    policy = CostGreedy()
    policy.prepare(world, limits, Prices(), 1)
    assert policy.decide(all_there(world)).edge_of.tolist() == [NOWHERE, 0, NOWHERE, 0, NOWHERE]
    decision = policy.decide(all_there(world, 2, absent=(1,)))
    assert decision.edge_of.tolist() == [NOWHERE, NOWHERE, NOWHERE, 0, 0]
    assert decision.probed == 4
    assert decision.changed == 1  # client 4; client 3 knows its edge from the first round


def test_cost_greedy_does_not_mind_a_client_that_others_make_wait_anyway() -> None:
    # Client 0 is the only one at edge 0 and takes 10 s; then 9 s at edge 1 cost no time, and least energy.
    seconds, joules = [[10, 99], [99, 9], [99, 1]], [[1, 9], [9, 1], [9, 2]]
    covered = [[1, 0], [0, 1], [0, 1]]
    world, limits = hand_made(seconds, joules, covered=covered)
    policy = CostGreedy()
    policy.prepare(world, limits, Prices(seconds_weight=1.0, joules_weight=0.1), 1)
    # Alone, client 2 is the cheapest; it comes first, before client 0 makes all others free of delay.
    assert policy.decide(all_there(world)).edge_of.tolist() == [0, NOWHERE, 1]
    # With client 0 there already, the order of energy decides.
    pairing = Pairing(world, world.mean, limits, np.ones(3, bool), prices=Prices(1.0, 0.1), gamma=0.0)
    pairing.add(0, 0)
    assert pairing.fill("least").tolist() == [0, 1, NOWHERE]


def test_quality_greedy_balances_labels_whatever_they_cost() -> None:
    counts = [[9, 0], [8, 0], [0, 9], [0, 8]]
    joules = [[1.0], [1.0], [900.0], [900.0]]
    world, limits = hand_made(np.ones((4, 1)), joules, counts, least=2, divergence=0.001)
    policy = QualityGreedy()
    policy.prepare(world, limits, Prices(), 1)
    edge_of = policy.decide(all_there(world)).edge_of
    assert edge_of.tolist() == [0, NOWHERE, 0, NOWHERE]
    assert edge_divergences(world, limits, edge_of)[0] == 0


def test_quality_greedy_goes_on_above_the_least_only_while_the_mix_gets_better() -> None:
    counts = [[9, 0], [9, 0], [0, 4], [0, 5], [9, 0]]
    world, limits = hand_made(np.ones((5, 1)), counts=counts, least=1, divergence=0.0)
    policy = QualityGreedy()
    policy.prepare(world, limits, Prices(), 1)
    # 9 : 0, then 9 : 5, then 9 : 9, which is as good as it gets.
    assert policy.decide(all_there(world)).edge_of.tolist() == [0, NOWHERE, 0, 0, NOWHERE]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), gamma=st.sampled_from([0.0, 0.7]))
def test_scores_are_what_cost_and_divergence_grow_by(seed: int, gamma: float) -> None:
    world, states, limits, prices = small_world(seed, clients=12, edges=3, rounds=1)
    costs, everybody = states[0].costs, np.ones(12, bool)
    pairing = Pairing(world, costs, limits, everybody, prices=prices, gamma=gamma)
    rng = np.random.default_rng(seed)
    for _ in range(4):
        scores = pairing.scores()
        before = prices.cost(
            round_seconds(world, costs, pairing.edge_of), round_joules(world, costs, pairing.edge_of)
        )
        for row, edge in np.argwhere(pairing.open):
            grown = pairing.edge_of.copy()
            grown[pairing.pool[row]] = edge
            after = prices.cost(round_seconds(world, costs, grown), round_joules(world, costs, grown))
            mix = edge_divergences(world, limits, pairing.edge_of)[edge]
            gained = edge_divergences(world, limits, grown)[edge] - min(mix, np.log(10))
            assert scores[row, edge] == pytest.approx(after - before + gamma * gained, abs=1e-9)
        row, edge = rng.permutation(np.argwhere(pairing.open))[0]
        pairing.add(int(row), int(edge))


def test_cost_greedy_is_cheaper_and_quality_greedy_better_mixed_than_random_edges() -> None:
    world, states, limits, prices = small_world(4, rounds=15)
    results = {
        policy: simulate(world, states, limits, prices, policy(), 1).means()
        for policy in (RandomLeast, CostGreedy, QualityGreedy)
    }
    assert results[CostGreedy]["cost"] < 0.95 * results[RandomLeast]["cost"]
    assert results[QualityGreedy]["healthy"] > 3 * results[RandomLeast]["healthy"]
    assert results[QualityGreedy]["divergence_mean"] < results[RandomLeast]["divergence_mean"]


def test_relabelled_clients_get_the_relabelled_decision() -> None:
    world, states, limits, prices = small_world(15, clients=20, edges=3, rounds=1)
    order = np.random.default_rng(1).permutation(20)
    costs = states[0].costs
    moved = renumbered(world, order)
    state = RoundState(1, states[0].present[order], Costs(costs.seconds[order], costs.joules[order]))
    for make in (CostGreedy, QualityGreedy, Share):
        one, other = make(), make()
        one.prepare(world, limits, prices, 1)
        other.prepare(moved, limits, prices, 1)
        expected = one.decide(states[0]).edge_of[order]
        np.testing.assert_array_equal(other.decide(state).edge_of, expected)


def test_share_weighs_labels_by_gamma() -> None:
    # Edge 0 is cheaper for both; only labels keep the two equal clients apart.
    counts, joules = [[9, 0], [9, 0], [0, 9], [0, 9]], [[1.0, 1.5]] * 4
    world, limits = hand_made(np.ones((4, 2)), joules, counts, most=2)
    mixed, cheap = Share(gamma=5.0), Share(gamma=0.0)
    for policy in (mixed, cheap):
        policy.prepare(world, limits, Prices(), 1)
    assert edge_divergences(world, limits, mixed.seats).max() == 0
    assert cheap.seats.tolist() == [0, 0, 1, 1]
    assert healthy_edges(world, limits, mixed.seats).all()


def test_a_mix_of_nothing_is_no_reason_to_stop() -> None:
    world, limits = hand_made(np.ones((3, 1)), counts=[[0, 0], [0, 0], [4, 4]], least=3)
    policy = CostGreedy()
    policy.prepare(world, limits, Prices(), 1)
    assert policy.decide(all_there(world)).edge_of.tolist() == [0, 0, 0]
    quality = QualityGreedy()
    quality.prepare(world, limits, Prices(), 1)
    assert quality.decide(all_there(world)).edge_of.tolist() == [0, 0, 0]
    assert divergences(np.zeros(2), limits.target) == np.inf


def test_quality_greedy_stops_at_the_most_clients_and_where_the_mix_would_get_worse() -> None:
    counts = [[9, 0], [0, 1], [0, 1], [0, 1]]
    world, limits = hand_made(np.ones((4, 1)), counts=counts, least=1, most=3, divergence=0.0)
    policy = QualityGreedy()
    policy.prepare(world, limits, Prices(), 1)
    assert policy.decide(all_there(world)).edge_of.tolist() == [0, 0, 0, NOWHERE]
    one_sided, bounds = hand_made(np.ones((3, 1)), counts=[[3, 1], [5, 0], [6, 0]], divergence=0.01)
    policy.prepare(one_sided, bounds, Prices(), 1)
    assert policy.decide(all_there(one_sided)).edge_of.tolist() == [0, NOWHERE, NOWHERE]


def test_clients_in_reach_of_no_edge_are_not_asked() -> None:
    world, limits = hand_made(np.ones((3, 2)), covered=[[1, 0], [0, 0], [1, 1]])
    policy = CostGreedy()
    policy.prepare(world, limits, Prices(), 1)
    assert policy.decide(all_there(world)).probed == 2
