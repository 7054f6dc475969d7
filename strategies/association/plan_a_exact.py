"""Plan A as a 0-1 integer program, solved by HiGHS with cuts for the mix of labels added when needed.

Variables are one x per allowed pair and T. The limit on an edge's mix is convex and, in the label counts,
homogeneous; so for any distribution p it implies the linear constraint of :func:`quality.cut`, which is tight
at p. The program is solved, mixes beyond their limit are cut off at all edges, and so on until there are
none. RISK is a condition on sets of clients: a set that is too unreliable, made as large as it can be, needs
one client from outside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import coo_array, csr_array, vstack

from .base import NOWHERE, Floats, Ints
from .problem import Problem, chance_of_fewer
from .quality import cut, distances, mixes

SMOOTHING = 0.02
TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Exact:
    """What the solver found: the edges (N,), or None where nothing keeps the limits or time was up."""

    edge_of: Ints | None
    rounds: int
    cuts: int


def solve(problem: Problem, time_limit: float = 20.0) -> Exact:
    """Return the assignment with the lowest U = w_T T / T_ref + w_E E / E_ref that keeps all limits.

    Meant for 20 clients or so: each round is an integer program. ``time_limit`` is in seconds, for all of
    them together; the answer is within HiGHS' gap of 0.01 % of the best.
    """
    program = _Program(problem)
    until, solved = monotonic() + time_limit, 0
    while program.pairs.size and (left := until - monotonic()) > 0:
        chosen = program.solve(left)
        solved += 1
        if chosen is None:
            break
        if not program.cut_off(chosen):
            return Exact(problem.spread(chosen), solved, program.cuts)
    return Exact(None, solved, program.cuts)


class _Program:
    """The integer program, growing by cuts; columns are the pairs in order of client and edge, then T."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.pairs = np.argwhere(problem.allowed)
        self.cuts = 0
        self.client, self.edge = self.pairs[:, 0], self.pairs[:, 1]
        count = len(self.pairs)
        column = np.arange(count)
        shape = (len(problem.clients), count + 1)
        seconds = problem.seconds[self.client, self.edge]
        ones = np.ones(count)
        one_edge = _matrix(ones, self.client, column, shape)
        # A client has one edge at most, so its delays may be summed: tighter than a row per pair.
        last = _matrix(-np.ones(shape[0]), np.arange(shape[0]), np.full(shape[0], count), shape)
        delay = _matrix(seconds, self.client, column, shape) + last
        shape = (problem.edges, count + 1)
        size = _matrix(ones, self.edge, column, shape)
        expected = _matrix(problem.chance[self.client], self.edge, column, shape)
        self.constraints = [
            LinearConstraint(one_edge, -np.inf, 1),
            LinearConstraint(delay, -np.inf, 0),
            LinearConstraint(size, -np.inf, problem.limits.most),
            LinearConstraint(expected, problem.limits.least, np.inf),
        ]
        prices = problem.prices
        self.price = np.append(
            prices.joules_weight / prices.joules_ref * problem.joules[self.client, self.edge],
            prices.seconds_weight / prices.seconds_ref,
        )

    def solve(self, seconds: float) -> Ints | None:
        """Return the candidates' edges (C,), or None if there is no solution in time."""
        whole = np.append(np.ones(len(self.pairs)), 0)
        upper = np.append(np.ones(len(self.pairs)), np.inf)
        found = milp(
            self.price,
            integrality=whole,
            bounds=Bounds(0, upper),
            constraints=self.constraints,
            options={"time_limit": seconds, "mip_rel_gap": 1e-4},
        )
        if found.status != 0 or found.x is None:
            return None
        chosen = np.full(len(self.problem.clients), NOWHERE)
        used = found.x[:-1] > 0.5
        chosen[self.client[used]] = self.edge[used]
        return chosen

    def cut_off(self, chosen: Ints) -> bool:
        """Add cuts that exclude a solution; False if it keeps all limits."""
        problem = self.problem
        here = chosen[:, None] == np.arange(problem.edges)
        counts = here.T.astype(np.float64) @ problem.counts
        away = distances(counts, problem.limits_target, problem.measure)
        rows, least, most = [], [], []
        # An edge may be empty, which it is only where its least is 0: no mix, nothing to cut off.
        for edge in np.flatnonzero((away > problem.limit + TOLERANCE) & here.any(axis=0)).tolist():
            slope = self._slope(counts[edge])
            if slope is not None:
                for each in range(problem.edges):
                    rows.append(self._row(problem.counts @ slope, each))
                    least.append(-np.inf)
                    most.append(0.0)
        if problem.risk is not None:
            for edge in range(problem.edges):
                outside = self._unreliable(edge, np.flatnonzero(here[:, edge]))
                if outside is not None:
                    rows.append(self._row(outside.astype(np.float64), edge))
                    least.append(1.0)
                    most.append(np.inf)
        if rows:
            self.cuts += len(rows)
            self.constraints.append(LinearConstraint(vstack(rows), np.array(least), np.array(most)))
        return bool(rows)

    def _slope(self, counts: Floats) -> Floats | None:
        """Return the coefficients (K,) of a cut that excludes ``counts``."""
        problem = self.problem
        target, shares, smoothing = problem.limits_target, mixes(counts), SMOOTHING
        while smoothing > 1e-12:  # logarithms need every label; the less of it, the tighter is the cut
            slope = cut((1 - smoothing) * shares + smoothing / len(shares), target, problem.measure)
            slope = slope - problem.limit
            if slope @ shares > TOLERANCE / 2:
                return slope
            smoothing /= 8
        return None

    def _unreliable(self, edge: int, members: Ints) -> Ints | None:
        """Return who (C,) is outside a set of clients too unreliable for an edge; None for a reliable set."""
        problem, least = self.problem, int(self.problem.limits.least[edge])
        chances = problem.chance[members].tolist()
        allowed = problem.risk or 0.0
        if chance_of_fewer(chances, least) <= allowed:
            return None
        outside = problem.allowed[:, edge].copy()
        outside[members] = False
        for other in np.flatnonzero(outside)[np.argsort(problem.chance[outside], kind="stable")]:
            more = [*chances, float(problem.chance[other])]
            if chance_of_fewer(more, least) <= allowed:
                break
            chances = more
            outside[other] = False
        return outside.astype(np.int64)

    def _row(self, by_client: Floats, edge: int) -> csr_array:
        columns = np.flatnonzero(self.edge == edge)
        return _matrix(
            by_client[self.client[columns]],
            np.zeros(len(columns), np.int64),
            columns,
            (1, len(self.pairs) + 1),
        )


def lacking(problem: Problem) -> float:
    """Return how many clients the edges lack in expectation if everybody helps, clients being divisible.

    A linear program: edges take at most their most, and each client is at one edge.
    """
    pairs = np.argwhere(problem.allowed)
    least = problem.limits.least.astype(np.float64)
    if not len(pairs):
        return float(least.sum())
    client, edge = pairs[:, 0], pairs[:, 1]
    count, edges = len(pairs), problem.edges
    column, width = np.arange(count), count + edges
    missing = _matrix(-np.ones(edges), np.arange(edges), count + np.arange(edges), (edges, width))
    expected = _matrix(-problem.chance[client], edge, column, (edges, width))
    ones = np.ones(count)
    rows = vstack([
        _matrix(ones, client, column, (len(problem.clients), width)),
        _matrix(ones, edge, column, (edges, width)),
        expected + missing,
    ])  # fmt: skip
    most = np.concatenate([np.ones(len(problem.clients)), problem.limits.most.astype(np.float64), -least])
    price = np.concatenate([np.zeros(count), np.ones(edges)])
    found = linprog(price, A_ub=rows, b_ub=most, bounds=(0, None), method="highs")
    return float(found.fun) if found.status == 0 else float(least.sum())


def _matrix(values: Floats, rows: Ints, columns: Ints, shape: tuple[int, int]) -> csr_array:
    return coo_array((values, (rows, columns)), shape=shape).tocsr()
