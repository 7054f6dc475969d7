"""The scale of costs: what a round costs if random clients sit at random edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .base import EdgeWorld, Limits, Prices, RoundState, round_joules, round_seconds
from .random_choice import RandomLeast


def reference_prices(
    world: EdgeWorld,
    states: Sequence[RoundState],
    limits: Limits,
    seed: int,
    weights: Prices | None = None,
) -> Prices:
    """Return prices at which random clients, each edge's least number of them, cost 1 a round on average.

    T_ref and E_ref are the means of :class:`RandomLeast` over the rounds given, those without any client left
    out; 1 where that costs nothing. Compute them once per scenario: all policies are measured on the same
    scale. The ``weights`` of seconds and joules are kept.
    """
    weights = weights or Prices()
    policy = RandomLeast()
    policy.prepare(world, limits, weights, seed)
    chosen = [(state.costs, policy.decide(state).edge_of) for state in states]
    chosen = [(costs, edge_of) for costs, edge_of in chosen if (edge_of >= 0).any()]
    seconds = [round_seconds(world, costs, edge_of) for costs, edge_of in chosen]
    joules = [round_joules(world, costs, edge_of) for costs, edge_of in chosen]
    return replace(weights, seconds_ref=_mean(seconds), joules_ref=_mean(joules))


def _mean(values: list[float]) -> float:
    mean = float(np.mean(values)) if values else 0.0
    return mean if mean > 0 else 1.0
