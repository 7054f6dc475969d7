"""A contextual bandit: who delivers in time is learnt from who did.

In the manner of COCS (Qu et al., context-aware online client selection for hierarchical federated learning):
the context of a pair of client and edge is cut into cells, each cell of each pair has a success rate, and
cells that were tried too seldom are tried first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from fedplat.rng import generator

from .announcing import Announcing
from .base import NOWHERE, Bools, Costs, Decision, EdgeWorld, Floats, Ints, Limits, Prices, RoundState


def picked(value: Floats, price: Floats, allowed: Bools, budget: Floats, room: Ints) -> Ints:
    """Return an assignment that takes pairs in order of value per price, while edges can pay and have room.

    ``value``, ``price`` and ``allowed`` are (N, M), ``budget`` and ``room`` (M,). Worthless pairs are left
    out. Each edge's first client may cost more than its budget, so that no edge stays without.

    >>> one = np.ones((3, 1))
    >>> picked(np.array([[0.1], [0.9], [0.5]]), one, one > 0, np.array([2.0]), np.array([9])).tolist()
    [-1, 0, 0]
    """
    edge_of = np.full(len(value), NOWHERE)
    spent, left, opened = np.zeros(len(budget)), room.copy(), np.zeros(len(budget), bool)
    rate = value / np.maximum(price, 1e-12)
    clients, edges = np.nonzero(allowed & (value > 0))
    for i in np.argsort(-rate[clients, edges], kind="stable"):
        client, edge = clients[i], edges[i]
        fits = spent[edge] + price[client, edge] <= budget[edge] * (1 + 1e-9) or not opened[edge]
        if edge_of[client] == NOWHERE and left[edge] > 0 and fits:
            edge_of[client] = edge
            spent[edge] += price[client, edge]
            left[edge] -= 1
            opened[edge] = True
    return edge_of


class Cocs(Announcing):
    """Learns which clients deliver before a deadline at which edge, and picks those within a budget.

    The context of a pair is how long a round would take it, in ``cells`` steps up to the ``deadline``
    (seconds of a round; default: what three quarters of all pairs keep on average), and one cell beyond it.
    A cell tried fewer than ``explore · √t · ln(t + 1)`` times by round t counts as a sure success. ``budget``
    is in joules per edge and round; default: the least number of clients at the mean price. Everybody present
    in reach is asked. Labels play no part. O(N·M·log(N·M)).
    """

    def __init__(
        self,
        *,
        deadline: Annotated[float, Field(gt=0, description="seconds of a round")] | None = None,
        budget: Annotated[float, Field(gt=0, description="joules per edge and round")] | None = None,
        cells: Annotated[int, Field(ge=1, le=100, description="of context before the deadline")] = 3,
        explore: Annotated[float, Field(ge=0, description="how often each cell is tried first")] = 0.1,
    ) -> None:
        self.deadline, self.budget, self.cells, self.explore = deadline, budget, cells, explore

    def prepare(self, world: EdgeWorld, limits: Limits, prices: Prices, seed: int) -> None:
        """Set the deadline and the budget; nothing is known of anybody."""
        super().prepare(world, limits, prices, seed)
        covered = world.covered
        seconds = self._seconds(world.mean)[covered]
        joules = world.edge_rounds * world.mean.joules[covered]
        usual = float(np.quantile(seconds, 0.75)) if seconds.size else 1.0
        self.limit = self.deadline if self.deadline is not None else max(usual, 1e-12)
        mean = float(joules.mean()) if joules.size else 0.0
        budget = limits.least * mean if self.budget is None else np.full(world.edges, self.budget)
        self.purse = np.asarray(budget, np.float64)
        shape = (*covered.shape, self.cells + 1)
        self.tried, self.kept = np.zeros(shape, np.int64), np.zeros(shape, np.int64)

    def _seconds(self, costs: Costs) -> Floats:
        return self.world.edge_rounds * costs.seconds + self.world.cloud_seconds

    def _context(self, costs: Costs) -> Ints:
        """Return the cell of each pair, (N, M); the last is beyond the deadline."""
        share = self._seconds(costs) / self.limit
        inside = np.minimum(np.floor(np.minimum(share, 1.0) * self.cells), self.cells - 1)
        return np.where(share <= 1, inside, self.cells).astype(np.int64)

    def decide(self, state: RoundState) -> Decision:
        """Pick pairs by their estimated chance of success per joule."""
        world, rng = self.world, generator(self.seed, "association-cocs", state.number)
        cell = self._context(state.costs)[..., None]
        tried = np.take_along_axis(self.tried, cell, 2)[..., 0]
        kept = np.take_along_axis(self.kept, cell, 2)[..., 0]
        enough = self.explore * np.sqrt(state.number) * np.log(state.number + 1)
        unknown = (tried == 0) | (tried < enough)
        chance = np.where(unknown, 1.0, kept / np.maximum(tried, 1))
        # Among equals in value and price, chance and not the client's number decides.
        chance = chance * (1 + 1e-9 * rng.random(chance.shape))
        allowed = world.covered & state.present[:, None]
        price = world.edge_rounds * state.costs.joules
        edge_of = picked(chance, price, allowed, self.purse, self.limits.most)
        used = np.flatnonzero(edge_of != NOWHERE)
        notes = {"explored": float(unknown[used, edge_of[used]].sum())}
        return self.decided(edge_of, int(allowed.any(axis=1).sum()), **notes)

    def observe(self, state: RoundState, decision: Decision, delivered: Bools) -> None:
        """Count who delivered, and in time."""
        used = np.flatnonzero(decision.edge_of != NOWHERE)
        edge = decision.edge_of[used]
        cell = self._context(state.costs)[used, edge]
        in_time = self._seconds(state.costs)[used, edge] <= self.limit
        np.add.at(self.tried, (used, edge, cell), 1)
        np.add.at(self.kept, (used, edge, cell), (delivered[used] & in_time).astype(np.int64))

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt."""
        learnt = {"tried": torch.from_numpy(self.tried.copy()), "kept": torch.from_numpy(self.kept.copy())}
        return super().state_dict() | learnt

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.tried = torch.as_tensor(state["tried"]).numpy().astype(np.int64)
        self.kept = torch.as_tensor(state["kept"]).numpy().astype(np.int64)
