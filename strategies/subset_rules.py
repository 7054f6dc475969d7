"""Rules that find the clients who agree best, or the values that fit best, as ready strategies.

How the number ``f`` of lying clients is chosen, checked and lowered is told in
:mod:`fedplat.strategies.robust`.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Unpack

import numpy as np
from pydantic import Field

from fedplat.updates import ClientUpdates

from .aggregators import Aggregate, Aggregator
from .aggregators.coverage import Covered
from .aggregators.residuals import residual_reweighting
from .aggregators.subsets import (
    check_majority,
    check_mda,
    check_smea,
    covariance_filter,
    minimum_diameter,
    monna,
    most_mda,
    most_smea,
    smallest_eigenvalue,
)
from .composed import FederatedStrategy
from .parts import StrategyParts
from .robust import DeclaredRule, Liars


def _minority(clients: int) -> int:
    return (clients - 1) // 2


class MonnaRule(Aggregator):
    """Mean of the n − f models nearest to that of the node ``trusted``, or to the median if it is absent."""

    def __init__(self, f: int | None, trusted: int | None) -> None:
        self.f = f
        self.trusted = trusted

    def check(self, clients: int) -> None:
        """Raise InfeasibleError unless 2f < n."""
        self._around(None).check(clients)

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Apply the rule with the declared f, or the largest that fits this round."""
        rows = [] if self.trusted is None else np.flatnonzero(updates.node_ids == self.trusted).tolist()
        return self._around(rows[0] if rows else None)(updates)

    def _around(self, pivot: int | None) -> DeclaredRule:
        refuse = partial(check_majority, rule="MoNNA")
        return DeclaredRule(self.f, partial(monna, pivot=pivot), refuse, _minority)


class ResidualRule(Aggregator):
    """Mean weighted by how near each client's parameters are to robust lines through all clients'."""

    def __init__(self, scale: float, threshold: float) -> None:
        self.scale = scale
        self.threshold = threshold

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Return the reweighted mean."""
        return residual_reweighting(updates.params, self.scale, self.threshold, Covered.by(updates))


class MinimumDiameter(FederatedStrategy):
    """The plain mean of the n − f clients' models whose largest distance between two is smallest (MDA).

    Needs 2f < n and f ≤ 30. Sample counts play no part. Exact; of several such subsets the one with the
    smallest second largest distance, and so on (inferred). O(n²·d), and O(1.47^f) for the search at worst. El
    Mhamdi et al., PODC 2020.

        MinimumDiameter(f=2).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(self, *, f: Liars = None, **parts: Unpack[StrategyParts]) -> None:
        super().__init__(DeclaredRule(f, minimum_diameter, check_mda, most_mda), **parts)


class Monna(FederatedStrategy):
    """The plain mean of the n − f clients' models nearest to one that is trusted.

    Needs 2f < n. Sample counts play no part. ``trusted`` is a Flower node id. In the paper every participant
    trusts itself; without ``trusted``, or in a round in which that node is absent, the coordinate-wise median
    stands for it (inferred). O(n·d), with the median O(n log n · d). Farhadkhani et al., ICML 2023.

        Monna(f=2).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        *,
        f: Liars = None,
        trusted: Annotated[int, Field(ge=0, description="a node id")] | None = None,
        **parts: Unpack[StrategyParts],
    ) -> None:
        super().__init__(MonnaRule(f, trusted), **parts)


class CovarianceFilter(FederatedStrategy):
    """The clients' models weighted down along the direction in which they differ most, step by step (CAF).

    cᵢ ← cᵢ·(1 − τᵢ / max τ) from 1 while Σ cᵢ > n − 2f, with τᵢ the squared distance from the weighted mean
    along the top eigenvector; of these weights those with the smallest top eigenvalue win. Needs 2f < n, and
    no bound on how much honest clients differ. Sample counts play no part. Inferred: max τ is over clients
    that still have weight. O(n²·d + n⁴). Allouah et al., ICML 2025.

        CovarianceFilter(f=2).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(self, *, f: Liars = None, **parts: Unpack[StrategyParts]) -> None:
        refuse = partial(check_majority, rule="CAF")
        super().__init__(DeclaredRule(f, covariance_filter, refuse, _minority), **parts)


class SmallestEigenvalue(FederatedStrategy):
    """The plain mean of the n − f clients' models whose covariance has the smallest top eigenvalue (SMEA).

    Tries all subsets: needs 2f < n and C(n, f) ≤ 20,000, such as f ≤ 5 for 20 clients and f ≤ 3 for 40.
    Sample counts play no part. O(n²·d + C(n, f)·(n − f)³): a second or so for n = 40, f = 3, a minute for
    n = 200, f = 2. Allouah et al., ICML 2023.

        SmallestEigenvalue(f=2).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(self, *, f: Liars = None, **parts: Unpack[StrategyParts]) -> None:
        super().__init__(DeclaredRule(f, smallest_eigenvalue, check_smea, most_smea), **parts)


class ResidualReweighting(FederatedStrategy):
    """The mean weighted by how well each client's parameters fit a robust line through all clients'.

    Per parameter, a repeated-median line over the ranks of the sorted values; a value off the line by many
    standard residuals has little weight, and below ``threshold`` is put onto the line. The sum of a client's
    weights, squared, is its share. No number of attackers is needed; sample counts play no part. Withstands
    fewer than half the clients. Formula and what is inferred: see
    :func:`fedplat.strategies.aggregators.residuals.residual_reweighting`. O(n² log n · d): 2 seconds a round
    for 40 clients and 100,000 parameters. Fu et al., 2019, arXiv 1912.11464.

        ResidualReweighting().start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        *,
        scale: Annotated[float, Field(gt=0, description="residuals with full weight, times √(2/n)")] = 2.0,
        threshold: Annotated[float, Field(ge=0, le=1, description="weight below which to correct")] = 0.1,
        **parts: Unpack[StrategyParts],
    ) -> None:
        super().__init__(ResidualRule(scale, threshold), **parts)
