from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from fedplat.errors import UserError
from fedplat.registry import settings
from fedplat.strategies.association.base import (
    NOWHERE,
    AssociationPolicy,
    Bools,
    Costs,
    EdgeWorld,
    Limits,
    Prices,
    RoundState,
    healthy_edges,
)
from fedplat.strategies.association.checks import check_decision
from fedplat.strategies.association.plan_policies import PlanA, PlanAB, PlanB

from .worlds import small_world

FAST: dict[str, Any] = {"proposals": 3000, "runs": 1}


def prepared(policy: AssociationPolicy, drawn: tuple[EdgeWorld, list[RoundState], Limits, Prices]) -> Any:
    world, _, limits, prices = drawn
    policy.prepare(world, limits, prices, 7)
    return policy


@pytest.mark.parametrize("policy", [PlanA(**FAST), PlanAB(**FAST), PlanB()])
def test_the_same_seed_decides_the_same_and_every_decision_can_be_carried_out(
    policy: AssociationPolicy,
) -> None:
    drawn = small_world(1, rounds=4)
    world, states, limits, _ = drawn
    runs = []
    for _ in range(2):
        prepared(policy, drawn)
        decisions = [policy.decide(state) for state in states]
        for state, decision in zip(states, decisions, strict=True):
            check_decision(world, state, limits, decision)
        runs.append(np.stack([decision.edge_of for decision in decisions]))
    assert np.array_equal(*runs)


def test_plan_a_misses_those_away_and_asks_nobody() -> None:
    drawn = small_world(2, rounds=3)
    policy = prepared(PlanA(**FAST), drawn)
    for state in drawn[1]:
        decision = policy.decide(state)
        assert np.array_equal(decision.edge_of, np.where(state.present, policy.seats, NOWHERE))
        assert decision.probed == 0


def test_an_absent_long_term_client_comes_back_to_its_seat_without_being_told() -> None:
    drawn = small_world(3, rounds=1)
    states = drawn[1]
    policy = prepared(PlanAB(prune=False, **FAST), drawn)
    everybody = np.ones(60, np.bool_)
    seated = np.flatnonzero(policy.seats != NOWHERE)
    away = everybody.copy()
    away[seated[0]] = False
    first, gap, back = (
        policy.decide(RoundState(number, present, states[0].costs))
        for number, present in ((1, everybody), (2, away), (3, everybody))
    )
    assert first.changed == (first.edge_of != NOWHERE).sum()
    assert gap.edge_of[seated[0]] == NOWHERE
    assert back.edge_of[seated[0]] == policy.seats[seated[0]]
    assert back.changed == 0


def test_everybody_there_and_edges_well_leaves_plan_a_as_it_is() -> None:
    drawn = small_world(4, presence=(0.8, 0.98), rounds=1, divergence=0.4)
    world, states, limits, _ = drawn
    policy = prepared(PlanAB(**FAST), drawn)
    assert healthy_edges(world, limits, policy.seats).all()
    decision = policy.decide(RoundState(1, np.ones(60, np.bool_), states[0].costs))
    assert np.array_equal(decision.edge_of, policy.seats)
    assert decision.probed == 0
    assert decision.notes["stand_ins"] == 0


def test_plan_b_alone_asks_everybody_in_reach() -> None:
    drawn = small_world(5, rounds=3)
    policy = prepared(PlanB(), drawn)
    for state in drawn[1]:
        assert policy.decide(state).probed == state.present.sum()


def test_both_plans_keep_the_limits_more_often_than_plan_a_alone() -> None:
    drawn = small_world(6, rounds=12)
    world, states, limits, _ = drawn
    well = {}
    for policy in (PlanA(**FAST), PlanAB(**FAST)):
        prepared(policy, drawn)
        kept = [healthy_edges(world, limits, policy.decide(state).edge_of).mean() for state in states]
        well[type(policy)] = np.mean(kept)
    assert well[PlanAB] > 1.5 * well[PlanA]


def moved_presence(rounds: int) -> list[Bools]:
    """Return presence in which the even clients stop coming and the odd ones always come."""
    return [np.arange(60) % 2 == 1] * rounds


def test_a_new_plan_follows_those_who_come_now_and_counts_who_moved() -> None:
    drawn = small_world(7, rounds=1, history=20)
    states = [RoundState(i + 1, there, drawn[1][0].costs) for i, there in enumerate(moved_presence(11))]
    fixed, fresh = prepared(PlanA(**FAST), drawn), prepared(PlanA(refresh_every=10, window=10, **FAST), drawn)
    planned, before = fixed.seats.copy(), fresh.seats.copy()
    notes = [(fixed.decide(state).notes, fresh.decide(state).notes)[1] for state in states]
    assert np.array_equal(fixed.seats, planned)
    assert notes[10]["reseated"] == (fresh.seats != before).sum() > 0
    assert "reseated" not in notes[9]
    assert (fresh.seats[::2] == NOWHERE).all()


def test_a_restored_policy_goes_on_as_the_first_would_have() -> None:
    drawn = small_world(8, rounds=8, history=20)
    states = drawn[1]
    one = prepared(PlanAB(refresh_every=3, **FAST), drawn)
    for state in states[:5]:
        one.decide(state)
    saved = one.state_dict()
    two = prepared(PlanAB(refresh_every=3, **FAST), drawn)
    two.load_state_dict(saved)
    for state in states[5:]:
        first, second = one.decide(state), two.decide(state)
        assert np.array_equal(first.edge_of, second.edge_of)
        assert (first.changed, dict(first.notes)) == (second.changed, dict(second.notes))


def test_noisy_histograms_are_all_that_a_policy_gets_to_see() -> None:
    drawn = small_world(9, rounds=2)
    true = drawn[0].counts.copy()
    policy = prepared(PlanAB(noise=0.1, **FAST), drawn)
    assert not np.array_equal(policy.world.counts, true)
    assert np.array_equal(drawn[0].counts, true)
    for state in drawn[1]:
        check_decision(drawn[0], state, drawn[2], policy.decide(state))


@pytest.mark.parametrize("policy", [PlanA(**FAST), PlanAB(**FAST), PlanAB(mode="match", **FAST), PlanB()])
def test_poor_worlds_are_no_errors(policy: AssociationPolicy) -> None:
    def seconds(clients: int) -> Costs:
        return Costs(np.arange(1.0, 2 * clients + 1).reshape(clients, 2), np.ones((clients, 2)))

    for clients, classes, history in ((1, 2, 5), (3, 0, 5), (3, 2, 0)):
        covered = np.tile([True, False], (clients, 1))  # nobody is in reach of the second edge
        world = EdgeWorld(
            covered,
            np.ones((clients, classes)),
            np.ones(clients, np.int64),
            np.ones((clients, history), np.bool_),
            seconds(clients),
            np.ones(2),
            np.ones(2),
        )
        limits = Limits(np.full(2, 5), np.full(2, 10), 0.3, np.full(classes, 1 / max(classes, 1)))
        policy.prepare(world, limits, Prices(), 1)
        for number, present in enumerate((np.ones(clients, np.bool_), np.zeros(clients, np.bool_)), 1):
            state = RoundState(number, present, seconds(clients))
            decision = policy.decide(state)
            check_decision(world, state, limits, decision)
            assert (decision.edge_of == NOWHERE).all() == (number == 2)


@pytest.mark.parametrize(
    ("policy", "name", "value"),
    [
        (PlanA, "c_min", 1.5), (PlanA, "solver", "genetic"), (PlanA, "horizon", 0), (PlanA, "eps", 1.0),
        (PlanA, "refresh_every", -1), (PlanA, "time_limit", 0), (PlanA, "continuity", "often"),
        (PlanAB, "mode", "mend"), (PlanAB, "gamma", -1), (PlanAB, "noise", 0), (PlanB, "measure", "l2"),
        (PlanB, "within", 0), (PlanB, "deadline", 0), (PlanB, "joules", 0),
    ],
)  # fmt: skip
def test_settings_out_of_bounds_are_refused(policy: type, name: str, value: object) -> None:
    annotation = {setting.name: setting.annotation for setting in settings(policy)}[name]
    with pytest.raises(ValidationError):
        TypeAdapter(annotation).validate_python(value)


def test_plan_ab_takes_every_setting_of_plan_a() -> None:
    both = {setting.name: (setting.annotation, setting.default) for setting in settings(PlanAB)}
    for setting in settings(PlanA):
        assert both[setting.name] == (setting.annotation, setting.default)


def test_there_is_nobody_to_replace_without_a_plan() -> None:
    with pytest.raises(UserError, match="no long-term clients"):
        PlanB(mode="replace")


def test_a_target_of_other_labels_than_the_clients_have_is_refused() -> None:
    world, _, limits, prices = small_world(1, 12, 2, 1)
    wrong = Limits(limits.least, limits.most, 0.3, np.full(3, 1 / 3))
    with pytest.raises(UserError, match="3 labels but clients have 10"):
        PlanB().prepare(world, wrong, prices, 0)
