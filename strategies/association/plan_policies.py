"""Plan A, Plan B and both as policies: long-term clients, and stand-ins for those that are away.

In the manner of Wu et al., "Towards Seamless Hierarchical Federated Learning under Intermittent Client
Participation", arXiv 2502.09303: its body could not be read, so formulas, rules and defaults are inferred.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from fedplat.errors import UserError
from fedplat.rng import generator

from .announcing import Announcing
from .base import NOWHERE, Decision, EdgeWorld, Ints, Limits, Prices, RoundState
from .continuity import Mode as ContinuityMode
from .continuity import SlidingWindow, continuity
from .plan_a import Solver, plan_a
from .plan_b import Mode, plan_b
from .problem import Terms
from .quality import Measure, noisy_histograms

Chance = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
CMin = Annotated[float, Field(ge=0, le=1, description="least continuity of long-term clients")]
Horizon = Annotated[int, Field(ge=1, description="rounds without a break, for continuity by run")]
Within = Annotated[
    float | None, Field(gt=0, description="largest distance of labels; none: the edges' limit")
]
Risk = Annotated[bool, Field(description="keep an edge from being short of clients more often than eps")]
Eps = Annotated[float, Field(ge=0, lt=1, description="with risk: how often an edge may be short")]
Refresh = Annotated[int, Field(ge=0, description="rounds between plans; 0: one plan for all")]
Window = Annotated[int, Field(ge=0, description="rounds looked back at; 0: as many as the history has")]
Proposals = Annotated[int, Field(ge=0, description="changes tried by each search; 0: 500 per candidate")]
Runs = Annotated[int, Field(ge=1, description="searches, of which the best counts")]
TimeLimit = Annotated[float, Field(gt=0, description="seconds for the exact solver")]
Gamma = Annotated[float, Field(ge=0, description="of distance of labels, per unit of cost")]
Deadline = Annotated[float | None, Field(gt=0, description="seconds of a round; pairs beyond are left out")]
Budget = Annotated[float | None, Field(gt=0, description="joules per client and round, likewise")]
Noise = Annotated[float | None, Field(gt=0, description="epsilon of noisy label histograms; none: true ones")]


class _Planning(Announcing):
    """What the policies share: terms, and label histograms that may be noisy."""

    terms: Terms
    noise: float | None

    def prepare(self, world: EdgeWorld, limits: Limits, prices: Prices, seed: int) -> None:
        if limits.target.shape != (world.counts.shape[1],) and world.counts.shape[1]:
            raise UserError(
                f"the wanted mix has {len(limits.target)} labels but clients have {world.counts.shape[1]}"
            )
        if self.noise is not None:
            world = replace(world, counts=noisy_histograms(world.counts, self.noise, seed))
        super().prepare(world, limits, prices, seed)


class PlanA(_Planning):
    """Long-term clients by their continuity, at fixed edges; those absent are missed. Asks nobody.

    Continuity q is the smoothed share of past rounds (``freq``), or the chance to stay for ``horizon`` rounds
    of a chain fitted to them (``run``). Of clients with q >= c_min, those and their edges are chosen that
    minimise w_T T / T_ref + w_E E / E_ref in expectation, with least and most clients per edge and a mix of
    labels within a limit: by annealing (``search``) or as an integer program (``exact``, for 20 clients).
    Every ``refresh_every`` rounds the plan is made anew from the last ``window`` rounds. All of it is
    inferred; see :mod:`fedplat.strategies.association.plan_a`. Usage: ``PlanA(c_min=0.4)``.
    """

    def __init__(
        self,
        *,
        solver: Solver = "search",
        continuity: ContinuityMode = "freq",
        horizon: Horizon = 5,
        c_min: CMin = 0.6,
        risk: Risk = False,
        eps: Eps = 0.1,
        refresh_every: Refresh = 0,
        window: Window = 0,
        proposals: Proposals = 0,
        runs: Runs = 3,
        time_limit: TimeLimit = 20.0,
        measure: Measure = "kl",
        within: Within = None,
        deadline: Deadline = None,
        joules: Budget = None,
        noise: Noise = None,
    ) -> None:
        self.solver, self.mode, self.horizon, self.c_min = solver, continuity, horizon, c_min
        self.risk = eps if risk else None
        self.refresh_every, self.window = refresh_every, window
        self.proposals, self.runs, self.time_limit = proposals, runs, time_limit
        self.terms = Terms(measure, within, deadline=deadline, joules=joules)
        self.noise = noise

    def prepare(self, world: EdgeWorld, limits: Limits, prices: Prices, seed: int) -> None:
        """Get to know the world, and plan."""
        super().prepare(world, limits, prices, seed)
        self.seen = SlidingWindow(world.history, self.window or world.history.shape[1])
        self.seats: Ints = np.full(world.clients, NOWHERE)
        self.figures: dict[str, float] = {}
        self._plan(0)

    def _plan(self, number: int) -> None:
        chance = continuity(self.seen.table, self.mode, self.horizon)
        found = plan_a(
            self.world,
            self.limits,
            self.prices,
            chance,
            generator(self.seed, "plan a", number),
            c_min=self.c_min,
            terms=self.terms,
            risk=self.risk,
            solver=self.solver,
            proposals=self.proposals,
            runs=self.runs,
            time_limit=self.time_limit,
        )
        moved = int((self.seats != found.edge_of).sum())
        self.seats = found.edge_of
        self.figures = {
            "long_term": float((found.edge_of != NOWHERE).sum()),
            "threshold": found.threshold,
            "worth": found.worth,
            "penalty": found.penalty,
            "exact": float(found.exact),
            "reseated": float(moved if number else 0),
        }

    def decide(self, state: RoundState) -> Decision:
        """Return the long-term clients that are there; after a new plan, its figures are in the notes."""
        notes = {**self.figures} if state.number == 1 else {}
        if self.refresh_every and state.number > 1 and (state.number - 1) % self.refresh_every == 0:
            self._plan(state.number)
            notes = {**self.figures}
        self.seen.add(state.present)
        return self._serve(state, notes)

    def _serve(self, state: RoundState, notes: dict[str, float]) -> Decision:
        return self.decided(np.where(state.present, self.seats, NOWHERE), 0, **notes)

    def state_dict(self) -> dict[str, Any]:
        """Return the seats, who was seen, and which edge each client knows of."""
        return {
            **super().state_dict(),
            "seats": torch.from_numpy(self.seats.copy()),
            "seen": torch.from_numpy(self.seen.table.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.seats = state["seats"].numpy().copy()
        self.seen.table = state["seen"].numpy().copy()


class PlanAB(PlanA):
    """Long-term clients (see :class:`PlanA`), and stand-ins where those present do not suffice.

    Absent long-term clients keep their seats; a stand-in serves for one round. Only clients in reach of an
    edge that lacks something are asked; nobody if none does. ``mode`` is ``repair`` (greedily by cost and
    ``gamma`` times distance of labels), ``replace`` (one for one) or ``match`` (deferred acceptance), and
    ``prune`` drops who is not needed, see :func:`fedplat.strategies.association.plan_b.plan_b`.
    Usage: ``PlanAB(mode="match")``.
    """

    def __init__(
        self,
        *,
        mode: Mode = "repair",
        gamma: Gamma = 1.0,
        prune: bool = True,
        solver: Solver = "search",
        continuity: ContinuityMode = "freq",
        horizon: Horizon = 5,
        c_min: CMin = 0.6,
        risk: Risk = False,
        eps: Eps = 0.1,
        refresh_every: Refresh = 0,
        window: Window = 0,
        proposals: Proposals = 0,
        runs: Runs = 3,
        time_limit: TimeLimit = 20.0,
        measure: Measure = "kl",
        within: Within = None,
        deadline: Deadline = None,
        joules: Budget = None,
        noise: Noise = None,
    ) -> None:
        super().__init__(
            solver=solver,
            continuity=continuity,
            horizon=horizon,
            c_min=c_min,
            risk=risk,
            eps=eps,
            refresh_every=refresh_every,
            window=window,
            proposals=proposals,
            runs=runs,
            time_limit=time_limit,
        )
        self.backup, self.prune, self.noise = mode, prune, noise
        self.terms = Terms(measure, within, gamma, deadline, joules)

    def _serve(self, state: RoundState, notes: dict[str, float]) -> Decision:
        found = plan_b(
            self.world,
            self.limits,
            self.prices,
            state,
            self.seats,
            mode=self.backup,
            prune=self.prune,
            terms=self.terms,
        )
        notes |= {
            "stand_ins": float(found.added),
            "spared": float(found.removed),
            "short": float(found.short),
            "lacking": float(found.lacking),
        }
        return self.decided(found.edge_of, found.probed, **notes)


class PlanB(_Planning):
    """The greedy rule of Plan B from nobody, every round: all clients present and in reach are asked.

    The control without a plan ("online greedy"); the rule is that of :class:`PlanAB` in mode ``repair``, or
    ``match``; there is nobody to ``replace``. Usage: ``PlanB(gamma=0.3)``.
    """

    def __init__(
        self,
        *,
        mode: Mode = "repair",
        gamma: Gamma = 1.0,
        prune: bool = True,
        measure: Measure = "kl",
        within: Within = None,
        deadline: Deadline = None,
        joules: Budget = None,
        noise: Noise = None,
    ) -> None:
        if mode == "replace":
            raise UserError(
                "plan-b has no long-term clients to replace: use mode 'repair' or 'match', or plan-ab"
            )
        self.mode, self.prune, self.noise = mode, prune, noise
        self.terms = Terms(measure, within, gamma, deadline, joules)

    def decide(self, state: RoundState) -> Decision:
        """Return the clients chosen for a round."""
        nobody = np.full(self.world.clients, NOWHERE)
        found = plan_b(
            self.world,
            self.limits,
            self.prices,
            state,
            nobody,
            mode=self.mode,
            prune=self.prune,
            terms=self.terms,
        )
        notes = {
            "spared": float(found.removed),
            "short": float(found.short),
            "lacking": float(found.lacking),
        }
        return self.decided(found.edge_of, found.probed, **notes)
