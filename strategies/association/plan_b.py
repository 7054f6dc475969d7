"""Plan B: stand-ins for long-term clients that are not there, found in the round itself and only if needed.

Wu et al., arXiv 2502.09303: that there is such a stage, light and online, is in the abstract; all three rules
are inferred. The greedy rule of ``repair`` has the form of SHARE's (Deng et al., ICDCS 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from .base import NOWHERE, Bools, Costs, EdgeWorld, Floats, Ints, Limits, Prices, RoundState
from .filling import Filling
from .problem import Terms
from .quality import mixes

Mode = Literal["repair", "replace", "match"]
_NEVER = 1e9


@dataclass(frozen=True, eq=False)
class Backup:
    """The edges of a round (N,), how many clients were asked, added and removed, and what is still lacking.

    ``short`` is how many clients the edges have less than their least, together; ``lacking`` how many edges
    have too few or too bad a mix.
    """

    edge_of: Ints
    probed: int
    added: int
    removed: int
    short: int
    lacking: int


def plan_b(
    world: EdgeWorld,
    limits: Limits,
    prices: Prices,
    state: RoundState,
    seats: Ints,
    *,
    mode: Mode = "repair",
    prune: bool = True,
    terms: Terms | None = None,
) -> Backup:
    """Return who serves in a round, given the ``seats`` (N,) of the long-term clients.

    If those present suffice, they serve as planned, and nobody is asked. Otherwise the clients present,
    without a seat and in reach of an edge that lacks something and has room, are asked for their costs of
    this round (of long-term clients the mean costs are used), and

    - ``repair`` adds, as long as an edge lacks something, the pair of the lowest score;
    - ``replace`` puts one stand-in in the place of each client missing there: the one of nearest label mix
      and lowest cost, for all together;
    - ``match`` lets edges propose to the clients they score best, and clients keep the cheapest proposal.

    Then ``prune`` removes the costliest that can be spared. O(pool * (K + M)) for each client added.
    """
    terms = terms or Terms()
    serving = np.where(state.present, seats, NOWHERE)
    filling = Filling(world, limits, prices, terms, world.mean, serving)
    if not filling.lacking.any():
        return Backup(serving, 0, 0, 0, 0, 0)
    needy = filling.lacking & (filling.size < limits.most)
    free = state.present & (seats == NOWHERE)
    pool = np.flatnonzero(free & world.covered[:, needy].any(axis=1))
    known = world.mean
    if len(pool):
        known = Costs(world.mean.seconds.copy(), world.mean.joules.copy())
        known.seconds[pool], known.joules[pool] = state.costs.seconds[pool], state.costs.joules[pool]
    filling.open_pool(pool, known)
    before = int(filling.size.sum())
    if len(pool):
        if mode == "repair":
            _repair(filling)
        elif mode == "replace":
            _replace(filling, seats, state.present)
        else:
            _match(filling)
    added = int(filling.size.sum()) - before
    removed = filling.prune() if prune else 0
    still = int(filling.lacking.sum())
    return Backup(filling.edge_of, len(pool), added, removed, filling.short(), still)


def _repair(filling: Filling) -> None:
    while filling.scores.size:
        row, place = divmod(int(np.argmin(filling.scores)), len(filling.pool))
        if not np.isfinite(filling.scores[row, place]):
            return
        filling.add(row, place)


def _replace(filling: Filling, seats: Ints, present: Bools) -> None:
    """Fill the places of those missing at edges that lack something; least total of price and distance."""
    world, edges = filling.world, filling.edges
    missing = np.flatnonzero(~present & np.isin(seats, edges))
    rows = np.searchsorted(edges, seats[missing])
    # Half of the L1 distance is the share of labels that differ, from 0 to 1.
    unlike = cdist(mixes(world.counts[missing]), mixes(filling.pool_counts), "cityblock") / 2
    price: Floats = filling.own_costs()[rows] + filling.terms.gamma * unlike
    price = np.where(filling.open[rows], price, _NEVER)
    for seat, place in zip(*linear_sum_assignment(price), strict=True):
        edge = edges[rows[seat]]
        # The plan has at most U seats per edge; who already was there and who comes are no more than those.
        if price[seat, place] < _NEVER and filling.size[edge] < filling.limits.most[edge]:
            filling.add(rows[seat], place)


def _match(filling: Filling) -> None:
    """Deferred acceptance: a client taken over by a cheaper edge leaves the old one lacking, to go on."""
    own = filling.own_costs()
    offered = filling.open.copy()
    holder = np.full(len(filling.pool), NOWHERE)
    waiting = list(range(len(filling.edges)))
    while waiting:
        row = waiting.pop(0)
        while True:
            # Those that refused, or left for another edge, are not asked again: so this ends.
            filling.open[row] = offered[row]
            filling.weigh(row)
            scores = filling.scores_of(row)
            place = int(np.argmin(scores))
            if not np.isfinite(scores[place]):
                break
            offered[row, place] = False
            old = holder[place]
            if old != NOWHERE:
                if own[old, place] <= own[row, place]:
                    continue
                filling.give_up(old, place)
                if old not in waiting:
                    waiting.append(old)
            holder[place] = row
            filling.add(row, place)
