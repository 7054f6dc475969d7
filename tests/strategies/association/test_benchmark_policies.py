"""The policies that others are measured against: what holds for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedplat.errors import UserError
from fedplat.strategies.association.bandit import Cocs
from fedplat.strategies.association.base import (
    NOWHERE,
    AssociationPolicy,
    Costs,
    EdgeWorld,
    Limits,
    Prices,
    RoundState,
)
from fedplat.strategies.association.checks import check_decision
from fedplat.strategies.association.cloud import Cloud, cloud_costs, cloud_states, cloud_world
from fedplat.strategies.association.exchange import Hfel
from fedplat.strategies.association.greedy import CostGreedy, QualityGreedy, Share
from fedplat.strategies.association.online_search import OnlineSearch
from fedplat.strategies.association.random_choice import AllOnline, RandomLeast, RandomMost
from fedplat.strategies.association.simulate import simulate

from .hand_made import all_there, hand_made
from .worlds import small_world

POLICIES: dict[str, Callable[[], AssociationPolicy]] = {
    "random-least": RandomLeast,
    "random-most": RandomMost,
    "all-online": AllOnline,
    "cost-greedy": CostGreedy,
    "quality-greedy": QualityGreedy,
    "share": Share,
    "cocs": Cocs,
    "hfel": Hfel,
    "hfel, least": lambda: Hfel(start="least"),
    "online-search": lambda: OnlineSearch(proposals=500),
}
every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


def prepared(
    policy: AssociationPolicy, world: EdgeWorld, limits: Limits, prices: Prices | None = None, seed: int = 1
) -> AssociationPolicy:
    policy.prepare(world, limits, prices or Prices(), seed)
    return policy


@every_policy
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_only_present_covered_clients_within_the_edges_room_are_used(
    make: Callable[[], AssociationPolicy], seed: int
) -> None:
    world, states, limits, prices = small_world(seed, clients=25, edges=4, rounds=4, most=6)
    policy = prepared(make(), world, limits, prices, seed)
    for state in states:
        decision = policy.decide(state)
        check_decision(world, state, limits, decision)
        assert (decision.edge_of != NOWHERE).any()
        policy.observe(state, decision, decision.edge_of != NOWHERE)


@every_policy
def test_the_same_seed_decides_the_same(make: Callable[[], AssociationPolicy]) -> None:
    world, states, limits, prices = small_world(5, rounds=4)
    first, second = (simulate(world, states, limits, prices, make(), 7) for _ in range(2))
    np.testing.assert_array_equal(first.edge_of, second.edge_of)
    np.testing.assert_array_equal(first.changed, second.changed)


@every_policy
def test_a_policy_that_was_put_back_goes_on_as_if_nothing_had_happened(
    make: Callable[[], AssociationPolicy],
) -> None:
    world, states, limits, prices = small_world(6, clients=30, rounds=6)
    through, halted = (prepared(make(), world, limits, prices) for _ in range(2))
    for state in states[:3]:
        for policy in (through, halted):
            decision = policy.decide(state)
            policy.observe(state, decision, (decision.edge_of != NOWHERE) & (np.arange(30) % 3 > 0))
    resumed = prepared(make(), world, limits, prices)
    resumed.load_state_dict(halted.state_dict())
    for state in states[3:]:
        one, other = through.decide(state), resumed.decide(state)
        np.testing.assert_array_equal(one.edge_of, other.edge_of)
        assert one.changed == other.changed
        for policy, decision in ((through, one), (resumed, other)):
            policy.observe(state, decision, decision.edge_of != NOWHERE)


@every_policy
def test_nothing_given_to_a_policy_is_changed(make: Callable[[], AssociationPolicy]) -> None:
    world, states, limits, prices = small_world(8, clients=20, rounds=2)
    for thing in (world, world.mean, limits, *states, *(state.costs for state in states)):
        for value in vars(thing).values():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
    simulate(world, states, limits, prices, make(), 1)


@every_policy
def test_rounds_and_worlds_without_anybody_pass(make: Callable[[], AssociationPolicy]) -> None:
    world, states, limits, prices = small_world(9, clients=12, edges=3, rounds=3)
    nobody = [replace(state, present=np.zeros(12, bool)) for state in states[:2]]
    result = simulate(world, [*nobody, states[2]], limits, prices, make(), 1)
    assert (result.edge_of[:2] == NOWHERE).all()
    assert result.clients[2] > 0
    alone = replace(world, covered=world.covered & (np.arange(3) != 1))
    assert (simulate(alone, states, limits, prices, make(), 1).edge_of != 1).all()


@every_policy
def test_without_classes_clients_are_still_used(make: Callable[[], AssociationPolicy]) -> None:
    world, states, limits, prices = small_world(10, clients=20, edges=2, rounds=2)
    bare = replace(world, counts=np.zeros((20, 0)))
    unlimited = replace(limits, target=np.zeros(0))
    result = simulate(bare, states, unlimited, prices, make(), 1)
    assert (result.clients > 0).all()


@every_policy
def test_clients_are_told_of_an_edge_only_if_it_is_another_than_they_know(
    make: Callable[[], AssociationPolicy],
) -> None:
    world, states, limits, prices = small_world(11, rounds=5)
    result = simulate(world, states, limits, prices, make(), 1)
    known = np.full(world.clients, NOWHERE)
    for edge_of, changed in zip(result.edge_of, result.changed, strict=True):
        used = edge_of != NOWHERE
        assert changed == (edge_of != known)[used].sum()
        known = np.where(used, edge_of, known)


def test_random_least_stops_at_the_least_and_random_most_at_the_most() -> None:
    world, limits = hand_made(np.ones((20, 2)), least=3, most=7)
    state = all_there(world)
    for policy, size in ((RandomLeast(), 3), (RandomMost(), 7)):
        edge_of = prepared(policy, world, limits).decide(state).edge_of
        assert np.bincount(edge_of + 1).tolist() == [20 - 2 * size, size, size]


def test_random_edges_change_from_round_to_round_and_from_seed_to_seed() -> None:
    world, limits = hand_made(np.ones((20, 2)), least=5)
    policy = prepared(RandomLeast(), world, limits)
    first, second = (policy.decide(all_there(world, number)).edge_of for number in (1, 2))
    other = prepared(RandomLeast(), world, limits, seed=2).decide(all_there(world)).edge_of
    assert (first != second).any()
    assert (first != other).any()


def test_all_online_gives_everybody_the_fastest_edge_and_moves_on_the_slowest_of_a_full_one() -> None:
    seconds = [[1, 4], [2, 5], [3, 6], [9, 8]]
    world, limits = hand_made(seconds, most=2)
    state = all_there(world)
    assert prepared(AllOnline(), world, limits).decide(state).edge_of.tolist() == [0, 0, 1, 1]
    free = prepared(AllOnline(limited=False), world, limits).decide(state)
    assert free.edge_of.tolist() == [0, 0, 0, 1]
    check_decision(world, state, limits, free, beyond_most=True)


def test_all_online_without_limits_passes_the_simulation() -> None:
    world, states, limits, prices = small_world(3, rounds=3, most=5)
    result = simulate(world, states, limits, prices, AllOnline(limited=False), 1)
    assert result.clients.tolist() == [int(state.present.sum()) for state in states]


def test_share_makes_its_association_whoever_is_there_and_uses_those_present() -> None:
    world, states, limits, prices = small_world(12, rounds=6)
    policy = Share()
    result = simulate(world, states, limits, prices, policy, 1)
    seats = policy.seats
    for state, edge_of in zip(states, result.edge_of, strict=True):
        np.testing.assert_array_equal(edge_of, np.where(state.present, seats, NOWHERE))
    never = replace(world, history=np.zeros_like(world.history))
    np.testing.assert_array_equal(prepared(Share(), never, limits, prices).seats, seats)  # type: ignore[attr-defined]
    assert result.churn.max() == 0
    assert result.probed.max() == 0


def test_share_places_all_clients_that_edges_have_room_for() -> None:
    world, limits = hand_made(np.ones((7, 2)), most=3)
    seats = prepared(Share(), world, limits).seats  # type: ignore[attr-defined]
    assert np.bincount(seats + 1).tolist() == [1, 3, 3]


def test_the_cloud_takes_ten_times_as_long_to_reach_over_the_best_channel() -> None:
    whole = Costs(np.array([[3.0, 2.5]]), np.array([[1.0, 0.9]]))
    upload = Costs(np.array([[1.0, 0.5]]), np.array([[0.2, 0.1]]))
    costs = cloud_costs(whole, upload)  # training: 2 s and 0.8 J
    np.testing.assert_allclose(costs.seconds, [[7.0]])
    np.testing.assert_allclose(costs.joules, [[1.8]])


def test_the_cloud_draws_as_many_clients_as_all_edges_need_together() -> None:
    world, states, limits, prices = small_world(13, clients=40, rounds=3)
    part = Costs(0.1 * world.mean.seconds, 0.1 * world.mean.joules)
    flat, bounds = cloud_world(world, limits, part)
    parts = [Costs(0.1 * state.costs.seconds, 0.1 * state.costs.joules) for state in states]
    result = simulate(flat, cloud_states(states, parts), bounds, prices, Cloud(), 1)
    assert flat.edges == 1
    expected = [min(25, int(state.present.sum())) for state in states]
    assert result.clients.tolist() == expected
    slowest = cloud_costs(states[0].costs, parts[0]).seconds[result.edge_of[0] == 0].max()
    assert result.seconds[0] == pytest.approx(4 * slowest)


def test_the_cloud_is_refused_where_there_are_edges() -> None:
    world, limits = hand_made(np.ones((4, 2)))
    with pytest.raises(UserError, match="set edges = 1"):
        prepared(Cloud(), world, limits)


def test_the_availability_of_a_round_is_the_same_for_every_policy() -> None:
    # Also who would fail after training: drawn from the seed and the round, not from who takes part.
    world, states, limits, prices = small_world(14, rounds=4)
    failed = np.zeros((4, world.clients), bool)
    lasted = np.zeros((4, world.clients), bool)
    for make in POLICIES.values():
        seen: list[tuple[RoundState, np.ndarray, np.ndarray]] = []
        policy = make()
        learn = policy.observe

        def observe(state, decision, delivered, seen=seen, learn=learn):  # type: ignore[no-untyped-def]
            seen.append((state, decision.edge_of != NOWHERE, delivered))
            learn(state, decision, delivered)

        policy.observe = observe  # type: ignore[method-assign]
        simulate(world, states, limits, prices, policy, 3, drop=0.3)
        for index, (state, used, delivered) in enumerate(seen):
            assert state is states[index]
            failed[index] |= used & ~delivered
            lasted[index] |= delivered
    assert failed.any()
    assert not (failed & lasted).any()
