"""Policies run through rounds without any training: what they would cost, and how good their edges are.

All policies meet the same rounds, drawn beforehand, so differences between them are not luck.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from fedplat.rng import generator

from .base import (
    NOWHERE,
    AssociationPolicy,
    Bools,
    Decision,
    EdgeWorld,
    Floats,
    Ints,
    Limits,
    Prices,
    RoundState,
    at_edges,
    edge_divergences,
    round_joules,
    round_seconds,
)
from .checks import check_decision

PER_BEACON, PER_PROBE, PER_CHANGE = 1, 2, 1
"""Messages for a client that says it is there, one that is asked for its costs, one told of another edge."""


@dataclass(frozen=True, eq=False)
class ScheduleResult:
    """What each of G rounds came to. Only ``decision_seconds`` and ``cost_decided`` differ between runs.

    ==================== ===================================================================================
    ``seconds``          (G,) T, and ``joules`` (G,) E, of clients and edges alone
    ``cost``             (G,) U of those
    ``cost_asked``       (G,) U with the seconds and joules of asking clients added
    ``cost_decided``     (G,) U with the seconds of deciding added as well
    ``divergence_mean``  (G,) of the edges' mixes of delivered labels, over edges with any; NaN without
    ``divergence_max``   (G,) likewise, of the worst such edge
    ``healthy``          (G,) share of all edges with their least number of clients and a good mix
    ``quorum``           (G,) share of all edges with their least number of clients
    ``clients``          (G,) how many took part, and ``delivered`` (G,) how many of them delivered
    ``probed``           (G,) how many were asked, and ``changed`` (G,) told another edge than they knew
    ``signals``          (G,) messages: 1 per client present, 2 per one asked, 1 per one told of another edge
    ``churn``            (G,) of the clients that took part before, the share that is at another edge now than
                         the last time; 0 if there are none
    ``decision_seconds`` (G,) real time of deciding, on this machine
    ``prepare_seconds``  real time of what is done once before the first round
    ``edge_of``          (G, N) the decisions
    ==================== ===================================================================================
    """

    seconds: Floats
    joules: Floats
    cost: Floats
    cost_asked: Floats
    cost_decided: Floats
    divergence_mean: Floats
    divergence_max: Floats
    healthy: Floats
    quorum: Floats
    clients: Ints
    delivered: Ints
    probed: Ints
    changed: Ints
    signals: Ints
    churn: Floats
    decision_seconds: Floats
    prepare_seconds: float
    edge_of: Ints

    def means(self) -> dict[str, float]:
        """Return the mean over rounds of each figure, without rounds in which it is not a number."""
        found = {"prepare_seconds": self.prepare_seconds}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name not in ("edge_of", "prepare_seconds"):
                there = value[~np.isnan(value)]
                found[name] = float(there.mean()) if len(there) else float("nan")
        return found


def simulate(
    world: EdgeWorld,
    states: Sequence[RoundState],
    limits: Limits,
    prices: Prices,
    policy: AssociationPolicy,
    seed: int,
    *,
    drop: float | Bools = 0.0,
    probe_seconds: float = 0.01,
    probe_joules: float = 0.005,
) -> ScheduleResult:
    """Run a policy through rounds, in their order.

    ``drop`` is the chance that a client fails after training, drawn from the seed and the round alone, or
    (G, N) booleans saying who does. Such a client costs its time and energy, but its labels do not count.
    Raises DecisionError for a decision that cannot be carried out.
    """
    start = time.perf_counter()
    policy.prepare(world, limits, prices, seed)
    prepared = time.perf_counter() - start
    rows: list[dict[str, float]] = []
    chosen: list[Ints] = []
    last = np.full(world.clients, NOWHERE)
    for index, state in enumerate(states):
        start = time.perf_counter()
        decision = policy.decide(state)
        took = time.perf_counter() - start
        check_decision(
            world, state, limits, decision, beyond_most=bool(getattr(policy, "beyond_most", False))
        )
        used = decision.edge_of != NOWHERE
        delivered = used & ~failing(drop, world.clients, seed, index, state.number)
        policy.observe(state, decision, delivered)
        row = outcome(world, state, limits, decision, delivered)
        asked = (decision.probed * probe_seconds, decision.probed * probe_joules)
        again = used & (last != NOWHERE)
        rows.append(
            row
            | {
                "cost": prices.cost(row["seconds"], row["joules"]),
                "cost_asked": prices.cost(row["seconds"] + asked[0], row["joules"] + asked[1]),
                "cost_decided": prices.cost(row["seconds"] + asked[0] + took, row["joules"] + asked[1]),
                "churn": float((decision.edge_of != last)[again].mean()) if again.any() else 0.0,
                "decision_seconds": took,
            }
        )
        last = np.where(used, decision.edge_of, last)
        chosen.append(decision.edge_of)
    whole = {"clients", "delivered", "probed", "changed", "signals"}
    columns = {
        field.name: np.array(
            [row[field.name] for row in rows], np.int64 if field.name in whole else np.float64
        )
        for field in fields(ScheduleResult)
        if field.name not in ("edge_of", "prepare_seconds")
    }
    edge_of = np.array(chosen, np.int64).reshape(len(states), world.clients)
    return ScheduleResult(prepare_seconds=prepared, edge_of=edge_of, **columns)  # type: ignore[arg-type]


def failing(drop: float | Bools, clients: int, seed: int, index: int, number: int) -> Bools:
    """Return who would fail in a round (N,), the same for every policy."""
    if isinstance(drop, np.ndarray):
        return np.asarray(drop[index], bool)
    return generator(seed, "association-drop", number).random(clients) < drop


def outcome(
    world: EdgeWorld, state: RoundState, limits: Limits, decision: Decision, delivered: Bools
) -> dict[str, float]:
    """Return a round's figures, by name of :class:`ScheduleResult`."""
    edge_of = decision.edge_of
    arrived = np.where(delivered, edge_of, NOWHERE)
    size = at_edges(arrived, world.edges).sum(axis=0)
    divergence = edge_divergences(world, limits, arrived)
    quorum = size >= limits.least
    there = divergence[(size > 0) & np.isfinite(divergence)]
    return {
        "seconds": round_seconds(world, state.costs, edge_of),
        "joules": round_joules(world, state.costs, edge_of),
        "divergence_mean": float(there.mean()) if len(there) else float("nan"),
        "divergence_max": float(there.max()) if len(there) else float("nan"),
        "healthy": float((quorum & (divergence <= limits.divergence)).mean()),
        "quorum": float(quorum.mean()),
        "clients": int((edge_of != NOWHERE).sum()),
        "delivered": int(delivered.sum()),
        "probed": decision.probed,
        "changed": decision.changed,
        "signals": PER_BEACON * int(state.present.sum())
        + PER_PROBE * decision.probed
        + PER_CHANGE * decision.changed,
    }
