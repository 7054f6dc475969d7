"""HFEL-like exchanges: every step counted right, and none left that would help."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.strategies.association.base import (
    NOWHERE,
    Costs,
    EdgeWorld,
    Ints,
    Limits,
    Prices,
    round_joules,
    round_seconds,
)
from fedplat.strategies.association.exchange import Exchanges, Hfel, others
from fedplat.strategies.association.random_choice import random_edges

from .hand_made import all_there, hand_made
from .worlds import small_world


def cost_of(world: EdgeWorld, costs: Costs, prices: Prices, edge_of: Ints) -> float:
    return prices.cost(round_seconds(world, costs, edge_of), round_joules(world, costs, edge_of))


def steps_from(world: EdgeWorld, limits: Limits, edge_of: Ints) -> dict[tuple[int, ...], Ints]:
    """Return every single move and exchange allowed, one after the other."""
    size = np.bincount(edge_of[edge_of >= 0], minlength=world.edges)
    used, found = np.flatnonzero(edge_of != NOWHERE), {}
    for client, edge in itertools.product(used, range(world.edges)):
        here = edge_of[client]
        room = size[edge] < limits.most[edge] and size[here] > limits.least[here]
        if edge != here and world.covered[client, edge] and room:
            found[client, -1, edge] = np.where(np.arange(world.clients) == client, edge, edge_of)
    for one, other in itertools.combinations(used, 2):
        there, here = edge_of[other], edge_of[one]
        if there != here and world.covered[one, there] and world.covered[other, here]:
            swapped = edge_of.copy()
            swapped[[one, other]] = there, here
            found[one, other, -1] = swapped
    return found


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    edges=st.integers(1, 5),
    least=st.integers(0, 2),
    clients=st.sampled_from([3, 9, 14]),
)
def test_the_cost_after_every_step_is_that_of_the_changed_assignment(
    seed: int, edges: int, least: int, clients: int
) -> None:
    world, states, limits, prices = small_world(seed, clients, edges, rounds=1, least=least, most=5)
    room = np.random.default_rng(seed).integers(0, 6, edges)
    edge_of = random_edges(world.covered, states[0].present, room, np.random.default_rng(seed))
    costs = states[0].costs
    search = Exchanges(world, costs, limits, prices, edge_of)
    if not len(search.clients):
        assert not search.step()
        return
    assert search.cost == pytest.approx(cost_of(world, costs, prices, edge_of))
    moves, swaps = search.transfers(), search.exchanges()
    row_of = {client: row for row, client in enumerate(search.clients)}
    found = steps_from(world, limits, edge_of)
    for (one, other, edge), changed in found.items():
        told = moves[row_of[one], edge] if other < 0 else swaps[row_of[one], row_of[other]]
        assert told == pytest.approx(cost_of(world, costs, prices, changed))
    assert np.isfinite(moves).sum() + np.isfinite(swaps).sum() / 2 == len(found)


@pytest.mark.parametrize("start", ["least", "most"])
@pytest.mark.parametrize("seed", range(4))
def test_it_ends_where_no_single_step_lowers_the_cost(seed: int, start: str) -> None:
    world, states, limits, prices = small_world(seed, clients=24, edges=4, rounds=1, least=3, most=6)
    policy = Hfel(start=start)  # type: ignore[arg-type]
    policy.prepare(world, limits, prices, seed)
    decision = policy.decide(states[0])
    ended = cost_of(world, states[0].costs, prices, decision.edge_of)
    for changed in steps_from(world, limits, decision.edge_of).values():
        assert cost_of(world, states[0].costs, prices, changed) >= ended - 1e-9
    assert decision.notes["steps"] > 0 or start == "least"  # few are there to choose from
    assert decision.probed == states[0].present.sum()


def test_two_clients_at_the_wrong_edges_are_exchanged() -> None:
    world, limits = hand_made([[1, 9], [9, 1]], [[1, 9], [9, 1]], most=1)
    search = Exchanges(world, world.mean, limits, Prices(), np.array([1, 0]))
    assert search.step()
    assert search.edge_of.tolist() == [0, 1]
    assert not search.step()


def test_a_client_moves_to_the_edge_with_room_unless_its_own_needs_it() -> None:
    world, limits = hand_made([[9, 1], [1, 9]], least=1, most=2)
    start = np.array([0, 0])
    search = Exchanges(world, world.mean, limits, Prices(), start)
    while search.step():
        pass
    assert search.edge_of.tolist() == [1, 0]
    assert start.tolist() == [0, 0]
    kept = Exchanges(world, world.mean, hand_made(np.ones((2, 2)), least=2)[1], Prices(), start)
    assert not kept.step()


def test_exchanges_never_change_who_takes_part() -> None:
    world, states, limits, prices = small_world(3, rounds=1)
    policy = Hfel()
    policy.prepare(world, limits, prices, 1)
    assert policy.decide(states[0]).edge_of.max() < world.edges
    assert policy.decide(all_there(world, absent=tuple(range(60)))).edge_of.tolist() == [NOWHERE] * 60


def test_the_largest_of_the_others_is_found() -> None:
    rng = np.random.default_rng(1)
    for edges in (1, 2, 3, 7):
        ends = rng.integers(0, 5, edges).astype(np.float64)
        for one, other in itertools.product(range(edges), repeat=2):
            rest = [end for edge, end in enumerate(ends) if edge not in (one, other)]
            assert others(ends)[one, other] == max(rest, default=0.0)
