"""Who reports to which edge in each round of a run: a policy at work, and what its decisions come to."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..association.base import (
    NOWHERE,
    AssociationPolicy,
    Bools,
    Costs,
    Decision,
    EdgeWorld,
    Floats,
    Limits,
    Prices,
    RoundState,
    at_edges,
    edge_divergences,
)
from ..association.checks import check_decision

log = logging.getLogger("fedplat")


@dataclass(frozen=True, eq=False)
class EdgeFigures:
    """What each edge got (M,): clients that delivered, how their labels diverge, whether that is enough."""

    clients: np.ndarray
    divergence: Floats
    quorum: Bools
    healthy: Bools


class Deciding:
    """Asks a policy once per round, checks what it decides, and times it.

    ``state_of`` returns what is so in a round, from 1. ``decided`` is the last decision and ``state`` that of
    its round. Raises DecisionError for a decision that cannot be carried out.
    """

    def __init__(
        self,
        policy: AssociationPolicy,
        world: EdgeWorld,
        limits: Limits,
        prices: Prices,
        state_of: Callable[[int], RoundState],
        seed: int = 0,
        *,
        true_counts: Floats | None = None,
    ) -> None:
        self.policy, self.world, self.limits, self.prices = policy, world, limits, prices
        self._state_of = state_of
        self._true = world if true_counts is None else replace(world, counts=true_counts)
        self.seconds = 0.0
        self.state: RoundState | None = None
        self.decided: Decision | None = None
        self.delivered = np.zeros(world.clients, np.bool_)
        start = time.perf_counter()
        policy.prepare(world, limits, prices, seed)
        if (took := time.perf_counter() - start) > 1:
            log.info("the association was prepared in %.3g s", took)

    def decide(self, server_round: int) -> Decision:
        """Return the decision of a round, for which the policy is asked once."""
        if self.decided is not None and self.state is not None and self.state.number == server_round:
            return self.decided
        self.state = state = self._state_of(server_round)
        start = time.perf_counter()
        decision = self.policy.decide(state)
        self.seconds = time.perf_counter() - start
        beyond = bool(getattr(self.policy, "beyond_most", False))
        check_decision(self.world, state, self.limits, decision, beyond_most=beyond)
        self.decided = decision
        return decision

    def observe(self, delivered: Bools) -> None:
        """Let the policy learn who delivered in the round just over (N,)."""
        assert self.state is not None
        assert self.decided is not None
        self.delivered = delivered
        self.policy.observe(self.state, self.decided, delivered)

    def edges(self) -> EdgeFigures:
        """Return what each edge got in the round just over: from those that delivered."""
        assert self.decided is not None
        limits, edge_of = self.limits, np.where(self.delivered, self.decided.edge_of, NOWHERE)
        clients = at_edges(edge_of, self.world.edges).sum(axis=0)
        divergence = edge_divergences(self._true, limits, edge_of)
        quorum = clients >= limits.least
        return EdgeFigures(clients, divergence, quorum, quorum & (divergence <= limits.divergence))

    def figures(self) -> dict[str, Any]:
        """Return figures of the round just over for the records; divergences are over edges with clients.

        ``used`` is how many clients were to take part, ``healthy`` and ``quorum`` the share of the edges that
        had enough, and good ones. ``signals`` counts messages: a beacon of each client that is there, a
        question and an answer for each that was probed, and one to each that is told another edge.
        """
        assert self.state is not None
        assert self.decided is not None
        edges, decision = self.edges(), self.decided
        known = edges.divergence[edges.clients > 0]
        return {
            "divergence_mean": float(known.mean()) if len(known) else None,
            "divergence_max": float(known.max()) if len(known) else None,
            "healthy": float(edges.healthy.mean()),
            "quorum": float(edges.quorum.mean()),
            "used": int((decision.edge_of != NOWHERE).sum()),
            "probed": int(decision.probed),
            "changed": int(decision.changed),
            "signals": int(self.state.present.sum()) + 2 * int(decision.probed) + int(decision.changed),
            **({"notes": {k: float(v) for k, v in decision.notes.items()}} if decision.notes else {}),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what the policy remembers from round to round."""
        return self.policy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned; the next round to be decided is a new one."""
        self.policy.load_state_dict(state)
        self.state = self.decided = None


def everywhere(clients: int, edges: int, *, edge_rounds: int = 1, samples: Any = None) -> EdgeWorld:
    """Return a world in which every client reaches every edge, nothing costs, and labels are unknown."""
    nothing = np.zeros((clients, edges))
    return EdgeWorld(
        covered=np.ones((clients, edges), np.bool_),
        counts=np.zeros((clients, 0)),
        samples=np.ones(clients, np.int64) if samples is None else np.asarray(samples, np.int64),
        history=np.zeros((clients, 0), np.bool_),
        mean=Costs(nothing, nothing),
        cloud_seconds=np.zeros(edges),
        cloud_joules=np.zeros(edges),
        edge_rounds=edge_rounds,
    )


def no_limits(clients: int, edges: int, labels: int = 0) -> Limits:
    """Return limits that any decision keeps."""
    target = np.full(labels, 1 / labels) if labels else np.zeros(0)
    return Limits(np.ones(edges, np.int64), np.full(edges, clients), np.inf, target)
