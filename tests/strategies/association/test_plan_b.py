from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedplat.strategies.association.base import (
    NOWHERE,
    Costs,
    Decision,
    EdgeWorld,
    Ints,
    Limits,
    Prices,
    RoundState,
    healthy_edges,
)
from fedplat.strategies.association.checks import check_decision
from fedplat.strategies.association.filling import Filling
from fedplat.strategies.association.plan_b import Backup, Mode, plan_b
from fedplat.strategies.association.problem import Terms

from .worlds import renumbered, small_world

MODES: tuple[Mode, ...] = ("repair", "replace", "match")


def hand_made(
    seconds: list[list[float]], labels: list[int], least: int, most: int, divergence: float = 0.1
) -> tuple[EdgeWorld, Limits, RoundState]:
    """Return a world of two labels, ten samples of one label per client, and a round with everybody there."""
    table = np.array(seconds)
    clients, edges = table.shape
    costs = Costs(np.where(np.isfinite(table), table, 0.0), np.where(np.isfinite(table), table / 10, 0.0))
    world = EdgeWorld(
        np.isfinite(table),
        np.eye(2)[labels] * 10,
        np.full(clients, 10),
        np.ones((clients, 4), np.bool_),
        costs,
        np.zeros(edges),
        np.zeros(edges),
    )
    limits = Limits(np.full(edges, least), np.full(edges, most), divergence, np.full(2, 0.5))
    return world, limits, RoundState(1, np.ones(clients, np.bool_), costs)


def away(state: RoundState, *clients: int) -> RoundState:
    present = state.present.copy()
    present[list(clients)] = False
    return replace(state, present=present)


def drawn(seed: int, rounds: int = 6) -> tuple[EdgeWorld, list[RoundState], Limits, Prices, Ints]:
    """Return a world with seats for half of the clients, at random edges in reach, at most 7 each."""
    world, states, limits, prices = small_world(seed, rounds=rounds)
    rng = np.random.default_rng(seed)
    seats = np.full(60, NOWHERE)
    for client in rng.permutation(60)[:35]:
        edge = rng.choice(np.flatnonzero(world.covered[client]))
        if (seats == edge).sum() < 7:
            seats[client] = edge
    return world, states, limits, prices, seats


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_done_and_nobody_asked_where_the_plan_suffices(mode: Mode) -> None:
    world, limits, state = hand_made([[1], [2], [3], [1]], [0, 1, 0, 1], 2, 4)
    # Client 2 could be spared, but nobody looks as long as the edge is well.
    seats = np.array([0, 0, NOWHERE, NOWHERE])
    found = plan_b(world, limits, Prices(), state, seats, mode=mode)
    assert found.edge_of.tolist() == seats.tolist()
    assert (found.probed, found.added, found.removed, found.short, found.lacking) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_missing_client_is_replaced_by_one_with_its_label(mode: Mode) -> None:
    world, limits, state = hand_made([[1], [2], [1], [3]], [0, 1, 0, 1], 2, 4)
    seats = np.array([0, 0, NOWHERE, NOWHERE])
    found = plan_b(world, limits, Prices(seconds_ref=10, joules_ref=10), away(state, 1), seats, mode=mode)
    assert found.edge_of.tolist() == [0, NOWHERE, NOWHERE, 0]
    assert (found.probed, found.added, found.lacking) == (2, 1, 0)


def test_of_equal_labels_the_cheaper_client_of_this_round_is_taken() -> None:
    world, limits, state = hand_made([[1], [2], [5], [3]], [0, 1, 1, 1], 2, 4)
    seats = np.array([0, 0, NOWHERE, NOWHERE])
    for mode in MODES:
        assert plan_b(world, limits, Prices(), away(state, 1), seats, mode=mode).edge_of[3] == 0
        now = Costs(state.costs.seconds.copy(), state.costs.joules.copy())
        now.seconds[3] = 50.0  # a bad channel today, which the mean does not show
        today = replace(away(state, 1), costs=now)
        assert plan_b(world, limits, Prices(), today, seats, mode=mode).edge_of[2] == 0


def test_scores_are_the_cost_and_the_distance_that_a_pair_adds() -> None:
    world, limits, state = hand_made([[1], [2], [5]], [0, 1, 0], 2, 4)
    filling = Filling(
        world, limits, Prices(0.5, 0.5, 2.0, 4.0), Terms(gamma=3.0), world.mean, np.array([0, -1, -1])
    )
    filling.open_pool(np.array([1, 2]), state.costs)
    # Beside client 0 (1 s, one label): client 1 adds 1 s, 0.2 J and takes ln 2 off; client 2 4 s, 0.5 J.
    assert filling.scores[0].tolist() == pytest.approx(
        [0.5 * 1 / 2 + 0.5 * 0.2 / 4 - 3 * np.log(2), 0.5 * 4 / 2 + 0.5 * 0.5 / 4]
    )


def test_a_full_quorum_takes_only_who_brings_the_mix_nearer() -> None:
    world, limits, state = hand_made([[1], [1], [1], [9]], [0, 0, 0, 1], 2, 4)
    found = plan_b(world, limits, Prices(), state, np.array([0, 0, NOWHERE, NOWHERE]), prune=False)
    # The mix of 2 : 1 is 0.057 nats away, within 0.1; the cheap client 2 would make it worse.
    assert found.edge_of.tolist() == [0, 0, NOWHERE, 0]


def test_pruning_removes_the_costliest_that_can_be_spared() -> None:
    world, limits, state = hand_made([[1], [7], [8], [2], [1]], [0, 0, 1, 1, 0], 2, 5)
    seats = np.array([0, 0, 0, NOWHERE, NOWHERE])
    # A second edge is out of the question: make the only one lack a label by sending client 2 away.
    kept = plan_b(world, limits, Prices(), away(state, 2), seats, prune=False)
    pruned = plan_b(world, limits, Prices(), away(state, 2), seats)
    assert kept.edge_of.tolist() == [0, 0, NOWHERE, 0, NOWHERE]
    assert pruned.edge_of.tolist() == [0, NOWHERE, NOWHERE, 0, NOWHERE]
    assert (kept.removed, pruned.removed) == (0, 1)


def test_replacing_is_one_for_one() -> None:
    world, limits, state = hand_made([[1]] * 6, [0, 1, 0, 1, 0, 1], 4, 6)
    seats = np.array([0, 0, NOWHERE, NOWHERE, NOWHERE, NOWHERE])
    # The plan itself is two clients short; only the missing one gets a stand-in.
    found = plan_b(world, limits, Prices(), away(state, 1), seats, mode="replace", prune=False)
    assert found.added == 1
    assert found.short == 2


def test_matching_gives_a_client_to_the_edge_where_it_costs_least() -> None:
    # Both edges need one client; 0 can serve either, cheaper at edge 1; 1 reaches edge 0 only.
    world, limits, state = hand_made([[2.0, 1.0], [3.0, np.inf]], [0, 1], 1, 2, divergence=1.0)
    found = plan_b(world, limits, Prices(), state, np.full(2, NOWHERE), mode="match")
    assert found.edge_of.tolist() == [1, 0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_decisions_can_be_carried_out_and_leave_no_edge_worse(mode: Mode, seed: int) -> None:
    world, states, limits, prices, seats = drawn(seed)
    for state, prune in [(state, prune) for state in states for prune in (True, False)]:
        found = plan_b(world, limits, prices, state, seats, mode=mode, prune=prune)
        check_decision(world, state, limits, Decision(found.edge_of, found.probed))
        planned = np.where(state.present, seats, NOWHERE)
        before, after = healthy_edges(world, limits, planned), healthy_edges(world, limits, found.edge_of)
        assert after[before].all()
        assert found.lacking == (~after).sum()
        # Long-term clients are at their own edge or spared, and nowhere else.
        seated = seats != NOWHERE
        assert np.isin(found.edge_of[seated] - seats[seated], [0, *(NOWHERE - seats[seated])]).all()
        assert ((found.edge_of == seats) | (found.edge_of == NOWHERE))[seated].all()


@pytest.mark.parametrize("seed", range(3))
def test_only_clients_in_reach_of_an_edge_that_lacks_something_are_asked(seed: int) -> None:
    world, states, limits, prices, seats = drawn(seed)
    for state in states:
        found = plan_b(world, limits, prices, state, seats)
        planned = np.where(state.present, seats, NOWHERE)
        lacking = ~healthy_edges(world, limits, planned)
        lacking &= np.bincount(planned[planned >= 0], minlength=5) < limits.most
        pool = state.present & (seats == NOWHERE) & world.covered[:, lacking].any(axis=1)
        assert found.probed == pool.sum()
        assert not (found.edge_of[~pool & (seats == NOWHERE)] != NOWHERE).any()


def test_costs_of_clients_that_were_not_asked_do_not_matter() -> None:
    world, states, limits, prices, seats = drawn(1)
    for state in states:
        once = plan_b(world, limits, prices, state, seats)
        lied = Costs(state.costs.seconds.copy(), state.costs.joules.copy())
        lied.seconds[seats != NOWHERE] = 1e6
        again = plan_b(world, limits, prices, replace(state, costs=lied), seats)
        assert np.array_equal(once.edge_of, again.edge_of)


@pytest.mark.parametrize("mode", MODES)
def test_relabelled_clients_give_the_relabelled_decision(mode: Mode) -> None:
    world, states, limits, prices, seats = drawn(2)
    order = np.random.default_rng(9).permutation(60)
    moved = renumbered(world, order)
    for state in states:
        other = RoundState(
            state.number, state.present[order], Costs(state.costs.seconds[order], state.costs.joules[order])
        )
        found = plan_b(world, limits, prices, state, seats, mode=mode)
        same = plan_b(moved, limits, prices, other, seats[order], mode=mode)
        assert np.array_equal(found.edge_of[order], same.edge_of)


def plainly(world: EdgeWorld, limits: Limits, prices: Prices, state: RoundState, seats: Ints) -> Ints:
    """Return the decision of step 5 of the rule, every score computed anew by plain loops."""
    from fedplat.strategies.association.base import divergences

    costs, k2 = state.costs, world.edge_rounds
    edge_of = np.where(state.present, seats, NOWHERE)
    pool = [n for n in range(world.clients) if state.present[n] and seats[n] == NOWHERE]

    def seconds(n: int, m: int) -> float:
        return float((costs if seats[n] == NOWHERE else world.mean).seconds[n, m])

    def delay(edges: Ints) -> float:
        return max(
            (k2 * seconds(n, m) + world.cloud_seconds[m] for n, m in enumerate(edges) if m >= 0), default=0.0
        )

    def away(members: list[int]) -> float:
        return float(divergences(world.counts[members].sum(axis=0), limits.target))

    while True:
        best: tuple[float, int, int] | None = None
        for m in range(world.edges):
            members = np.flatnonzero(edge_of == m).tolist()
            lacks = len(members) < limits.least[m] or away(members) > limits.divergence
            if not lacks or len(members) >= limits.most[m]:
                continue
            for n in pool:
                if not world.covered[n, m] or edge_of[n] != NOWHERE:
                    continue
                gained = away([*members, n]) - min(away(members), float(np.log(10)))
                if len(members) >= limits.least[m] and gained >= 0:
                    continue
                tried = edge_of.copy()
                tried[n] = m
                joules = k2 * costs.joules[n, m] + (0 if members else world.cloud_joules[m])
                score = prices.cost(delay(tried) - delay(edge_of), joules) + gained
                if best is None or score < best[0] - 1e-12:
                    best = (score, n, m)
        if best is None:
            return edge_of
        edge_of[best[1]] = best[2]


def test_incremental_scores_decide_as_scores_computed_anew() -> None:
    world, states, limits, prices = small_world(7, 24, 3, 3, least=3, most=6)
    seats = np.where(np.arange(24) % 3 == 0, world.covered.argmax(axis=1), NOWHERE)
    for state in states:
        found = plan_b(world, limits, prices, state, seats, prune=False)
        assert found.edge_of.tolist() == plainly(world, limits, prices, state, seats).tolist()


@pytest.mark.parametrize("mode", MODES)
def test_poor_worlds_get_the_best_that_can_be_had(mode: Mode) -> None:
    def decide(world: EdgeWorld, limits: Limits, state: RoundState, seats: Ints) -> Backup:
        return plan_b(world, limits, Prices(), state, seats, mode=mode)

    world, limits, state = hand_made([[1, np.inf], [2, np.inf]], [0, 1], 3, 4)
    seats = np.array([0, NOWHERE])
    nobody = decide(world, limits, away(state, 0, 1), seats)
    assert (nobody.edge_of == NOWHERE).all()
    assert (nobody.probed, nobody.short, nobody.lacking) == (0, 6, 2)
    assert decide(world, limits, state, seats).edge_of[0] == 0
    without_classes = replace(world, counts=np.zeros((2, 0)))
    found = decide(without_classes, limits, away(state, 0), seats)
    assert found.edge_of.tolist() == [NOWHERE, 0]


def test_inputs_are_left_as_they_were_and_a_second_call_decides_the_same() -> None:
    world, states, limits, prices, seats = drawn(3, 2)
    for mode in MODES:
        copies = [a.copy() for a in (seats, states[0].costs.seconds, world.mean.seconds, world.counts)]
        once = plan_b(world, limits, prices, states[0], seats, mode=mode)
        again = plan_b(world, limits, prices, states[0], seats, mode=mode)
        assert np.array_equal(once.edge_of, again.edge_of)
        for array, copy in zip(
            (seats, states[0].costs.seconds, world.mean.seconds, world.counts), copies, strict=True
        ):
            assert np.array_equal(array, copy)
