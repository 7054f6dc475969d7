"""Scheduling without training: figures by hand, checks of decisions, and the scale of costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fedplat.strategies.association.base import (
    NOWHERE,
    AssociationPolicy,
    Decision,
    Prices,
    RoundState,
)
from fedplat.strategies.association.checks import DecisionError, check_decision
from fedplat.strategies.association.random_choice import RandomLeast
from fedplat.strategies.association.reference import reference_prices
from fedplat.strategies.association.simulate import simulate

from .hand_made import all_there, hand_made
from .worlds import small_world


class Scripted(AssociationPolicy):
    """Decides what it was given, round after round."""

    def __init__(self, *decisions: Decision) -> None:
        self.script = list(decisions)
        self.delivered: list[list[bool]] = []

    def decide(self, state: RoundState) -> Decision:
        return self.script[state.number - 1]

    def observe(self, state: RoundState, decision: Decision, delivered: np.ndarray) -> None:
        self.delivered.append(delivered.tolist())


def decision(edges: Sequence[int], probed: int = 0, changed: int = 0) -> Decision:
    return Decision(np.array(edges), probed, changed)


def test_the_figures_of_rounds_are_those_worked_out_by_hand() -> None:
    world, limits = hand_made(
        [[1, 2], [3, 4], [5, 6]],
        [[1, 2], [3, 4], [5, 6]],
        [[4, 0], [0, 4], [4, 4]],
        least=1,
        divergence=0.1,
        edge_rounds=2,
        cloud_seconds=0.5,
        cloud_joules=0.25,
    )
    states = [all_there(world, 1), all_there(world, 2, absent=(2,)), all_there(world, 3)]
    policy = Scripted(
        decision([0, 0, 1], probed=2, changed=3),
        decision([0, 1, NOWHERE], changed=1),
        decision([1, 1, 1], probed=1, changed=1),
    )
    prices = Prices(0.5, 0.5, 10.0, 20.0)
    result = simulate(world, states, limits, prices, policy, 1, probe_seconds=0.5, probe_joules=2.0)
    assert result.seconds.tolist() == [12.5, 8.5, 12.5]
    assert result.joules.tolist() == [2 * 10 + 0.5, 2 * 5 + 0.5, 2 * 12 + 0.25]
    np.testing.assert_allclose(result.cost, [0.625 + 0.5125, 0.425 + 0.2625, 0.625 + 0.60625])
    np.testing.assert_allclose(result.cost_asked - result.cost, [0.05 + 0.1, 0, 0.025 + 0.05])
    np.testing.assert_allclose(
        result.cost_decided - result.cost_asked, 0.05 * result.decision_seconds, rtol=1e-6
    )
    assert result.healthy.tolist() == [1.0, 0.0, 0.5]
    assert result.quorum.tolist() == [1.0, 1.0, 0.5]
    np.testing.assert_allclose(result.divergence_mean, [0, np.log(2), 0])
    np.testing.assert_allclose(result.divergence_max, [0, np.log(2), 0])
    assert result.signals.tolist() == [3 + 4 + 3, 2 + 1, 3 + 2 + 1]
    np.testing.assert_allclose(result.churn, [0, 1 / 2, 1 / 3])  # client 1, then client 0
    assert result.clients.tolist() == [3, 2, 3]
    assert result.means()["clients"] == pytest.approx(8 / 3)


def test_a_round_without_anybody_costs_nothing_and_the_run_goes_on() -> None:
    world, limits = hand_made(np.ones((2, 2)), cloud_seconds=1.0, cloud_joules=1.0)
    states = [all_there(world, 1, absent=(0, 1)), all_there(world, 2)]
    policy = Scripted(decision([NOWHERE, NOWHERE]), decision([0, 1]))
    result = simulate(world, states, limits, Prices(), policy, 1)
    assert result.seconds.tolist() == [0.0, 2.0]
    assert result.joules.tolist() == [0.0, 4.0]
    assert np.isnan(result.divergence_mean[0])
    assert result.healthy.tolist() == [0.0, 1.0]
    assert not any(np.isnan(value) for value in result.means().values())


def test_no_rounds_at_all_give_no_figures() -> None:
    world, limits = hand_made(np.ones((2, 2)))
    result = simulate(world, [], limits, Prices(), RandomLeast(), 1)
    assert result.edge_of.shape == (0, 2)
    assert np.isnan(result.means()["cost"])


def test_clients_that_fail_are_paid_for_but_their_labels_do_not_count() -> None:
    world, limits = hand_made(np.ones((3, 1)), counts=[[4, 0], [0, 4], [4, 0]], least=2, divergence=0.1)
    policy = Scripted(decision([0, 0, NOWHERE]), decision([0, 0, NOWHERE]))
    fails = np.array([[False, True, True], [False, False, True]])
    states = [all_there(world, 1), all_there(world, 2)]
    result = simulate(world, states, limits, Prices(), policy, 1, drop=fails)
    assert result.joules.tolist() == [2.0, 2.0]
    assert result.delivered.tolist() == [1, 2]
    assert result.healthy.tolist() == [0.0, 1.0]
    np.testing.assert_allclose(result.divergence_mean, [np.log(2), 0])
    assert policy.delivered == [[True, False, False], [True, True, False]]


def test_clients_fail_as_often_as_said() -> None:
    world, states, limits, prices = small_world(1, rounds=40)
    result = simulate(world, states, limits, prices, RandomLeast(), 1, drop=0.25)
    assert result.delivered.sum() / result.clients.sum() == pytest.approx(0.75, abs=0.06)


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        ([0, 0, 1, NOWHERE], "clients 2 uncovered"),
        ([NOWHERE, NOWHERE, NOWHERE, 0], "clients 3 absent"),
        ([0, 2, -2, NOWHERE], "clients 1, 2 out of range"),
        ([0, 0, 0, NOWHERE], "edges 0 above the most"),
        ([0, 0], r"expected 4 whole numbers, got shape \(2,\)"),
        ([0.0, 0.0, 0.0, 0.0], "of float64"),
    ],
)
def test_a_decision_that_cannot_be_is_named(edges: list[int], message: str) -> None:
    world, limits = hand_made(np.ones((4, 2)), covered=[[1, 1], [1, 1], [1, 0], [1, 1]], most=2)
    with pytest.raises(DecisionError, match=f"round 7: .*{message}"):
        check_decision(world, all_there(world, 7, absent=(3,)), limits, decision(edges))


def test_more_clients_asked_than_there_are_is_an_error_too() -> None:
    world, limits = hand_made(np.ones((2, 1)))
    with pytest.raises(DecisionError, match="3 probed"):
        check_decision(world, all_there(world), limits, decision([0, 0], probed=3))


def test_the_simulation_refuses_such_a_decision() -> None:
    world, limits = hand_made(np.ones((2, 1)))
    with pytest.raises(DecisionError, match="clients 1 absent"):
        simulate(world, [all_there(world, absent=(1,))], limits, Prices(), Scripted(decision([0, 0])), 1)


def test_random_clients_cost_one_on_the_scale_made_of_them() -> None:
    world, states, limits, _ = small_world(2, rounds=20)
    prices = reference_prices(world, states, limits, 5, Prices(0.3, 0.7))
    assert (prices.seconds_weight, prices.joules_weight) == (0.3, 0.7)
    result = simulate(world, states, limits, prices, RandomLeast(), 5)
    assert result.cost.mean() == pytest.approx(1.0)
    assert prices == reference_prices(world, states, limits, 5, Prices(0.3, 0.7))


def test_the_scale_leaves_out_rounds_without_clients_and_is_one_where_nothing_costs() -> None:
    world, states, limits, _ = small_world(2, rounds=4)
    nobody = replace(states[0], present=np.zeros(world.clients, bool))
    assert reference_prices(world, [nobody, *states], limits, 5) == reference_prices(world, states, limits, 5)
    assert reference_prices(world, [nobody], limits, 5) == Prices()
