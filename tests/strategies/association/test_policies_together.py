"""Plan A with Plan B beside the policies that others are measured against, in the same drawn worlds."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from fedplat.strategies.association.base import AssociationPolicy
from fedplat.strategies.association.greedy import CostGreedy, QualityGreedy
from fedplat.strategies.association.online_search import OnlineSearch
from fedplat.strategies.association.plan_policies import PlanA, PlanAB, PlanB
from fedplat.strategies.association.random_choice import RandomLeast
from fedplat.strategies.association.reference import reference_prices
from fedplat.strategies.association.simulate import simulate

from .worlds import small_world

SEEDS, ROUNDS = (1, 2, 3, 4, 5), 60
pytestmark = pytest.mark.slow


@cache
def mean_of(policy: type[AssociationPolicy], rounds: int = ROUNDS) -> dict[str, float]:
    """Return a policy's figures, means over rounds and worlds of 60 clients and 5 edges."""
    found = []
    for seed in SEEDS:
        world, states, limits, _ = small_world(seed, rounds=rounds)
        prices = reference_prices(world, states, limits, seed)
        found.append(simulate(world, states, limits, prices, policy(), seed).means())
    return {name: float(np.mean([means[name] for means in found])) for name in found[0]}


def test_both_plans_keep_the_limits_three_times_as_often_as_chance_at_no_more_than_its_cost() -> None:
    ours, chance = mean_of(PlanAB), mean_of(RandomLeast)
    assert chance["cost"] == pytest.approx(1.0)
    assert ours["healthy"] >= 3 * chance["healthy"]
    assert ours["cost"] <= 1.05 * chance["cost"]


def test_plan_a_alone_leaves_edges_short_that_plan_b_mends() -> None:
    alone, both = mean_of(PlanA), mean_of(PlanAB)
    assert alone["healthy"] < 0.5 * both["healthy"]
    assert both["healthy"] > 0.7


def test_both_plans_ask_fewer_clients_and_change_fewer_edges_than_a_fresh_greedy_choice() -> None:
    both, fresh = mean_of(PlanAB), mean_of(PlanB)
    assert both["probed"] < fresh["probed"]
    assert both["churn"] < 0.5 * fresh["churn"]
    assert both["signals"] < fresh["signals"]


def test_each_greedy_choice_is_best_at_what_it_looks_at() -> None:
    cheap, mixed, both = mean_of(CostGreedy), mean_of(QualityGreedy), mean_of(PlanAB)
    assert cheap["cost"] < both["cost"]
    assert cheap["healthy"] < 0.5 * both["healthy"]
    assert mixed["divergence_mean"] < mean_of(RandomLeast)["divergence_mean"]
    assert mixed["probed"] == 0


def test_a_search_every_round_is_better_than_any_of_them_in_cost_and_labels() -> None:
    searched = mean_of(OnlineSearch, 3)
    for policy in (PlanAB, PlanB, RandomLeast):
        other = mean_of(policy, 3)
        assert searched["cost"] <= other["cost"]
        assert searched["healthy"] >= other["healthy"]
