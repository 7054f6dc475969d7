"""The plain rules every defence is compared with, as ready strategies."""

from __future__ import annotations

from typing import Annotated, Unpack

import torch
from pydantic import Field

from fedplat.updates import ClientUpdates

from .aggregators import (
    Aggregate,
    CoordinateWise,
    RoundPlan,
    RunningAggregate,
    mean,
    median,
    trimmed_mean,
    weighted_median,
)
from .aggregators.coordinatewise import check_trim, trim_count
from .aggregators.coverage import Covered
from .aggregators.running import RunningMean
from .composed import FederatedStrategy
from .parts import StrategyParts


class MeanRule(CoordinateWise):
    """Mean of the clients' models, weighted by their sample counts or not."""

    def __init__(self, weighted: bool) -> None:
        self.weighted = weighted

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Return the mean."""
        weights = torch.from_numpy(updates.num_examples) if self.weighted else None
        return mean(updates.params, weights, Covered.by(updates))

    def running(self, plan: RoundPlan) -> RunningAggregate:
        """Return the mean as a sum that grows."""
        return RunningMean(plan, self.weighted)


class MedianRule(CoordinateWise):
    """Coordinate-wise median of the clients' models, weighted by their sample counts or not."""

    def __init__(self, weighted: bool = False) -> None:
        self.weighted = weighted

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Return the median."""
        if self.weighted:
            weights = torch.from_numpy(updates.num_examples)
            return weighted_median(updates.params, weights, Covered.by(updates))
        return median(updates.params, Covered.by(updates))


class TrimmedMeanRule(CoordinateWise):
    """Coordinate-wise mean of the clients' models without the ⌈beta·n⌉ extremes on either side."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def check(self, clients: int) -> None:
        """Raise InfeasibleError unless 2·⌈beta·n⌉ < n."""
        check_trim(clients, trim_count(self.beta, clients))

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Return the trimmed mean; with fewer replies than planned, trim as many as leave one."""
        n = len(updates)
        trim = min(trim_count(self.beta, n), (n - 1) // 2)
        return trimmed_mean(updates.params, trim, Covered.by(updates))


class Mean(FederatedStrategy):
    """Federated averaging: the mean of the clients' models, weighted by sample count.

    w ← Σᵢ nᵢ wᵢ / Σᵢ nᵢ, of sub-models over those who cover an element. One bad client moves it as far as it
    likes. ``weighted=False`` gives every client the same weight. O(n·d). McMahan et al., AISTATS 2017.

        Mean().start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(self, *, weighted: bool = True, **parts: Unpack[StrategyParts]) -> None:
        super().__init__(MeanRule(weighted), **parts)


class Median(FederatedStrategy):
    """The coordinate-wise median of the clients' models; sample counts play no part by default.

    Withstands fewer than half the clients; with ``weighted=True`` those who claim less than half of all
    samples, and a liar may claim them all. O(n log n · d). Yin et al., ICML 2018, option I.

        Median().start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(self, *, weighted: bool = False, **parts: Unpack[StrategyParts]) -> None:
        super().__init__(MedianRule(weighted), **parts)


class TrimmedMean(FederatedStrategy):
    """The coordinate-wise mean without the ⌈beta·n⌉ smallest and largest values; sample counts play no part.

    Withstands a fraction beta of the clients; beta is rounded up to whole clients. Refused before the first
    round unless 2·⌈beta·n⌉ < n. O(n log n · d). Yin et al., ICML 2018, option II.

        TrimmedMean(beta=0.3).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self, *, beta: Annotated[float, Field(ge=0, lt=0.5)] = 0.2, **parts: Unpack[StrategyParts]
    ) -> None:
        super().__init__(TrimmedMeanRule(beta), **parts)


__all__ = ["Mean", "MeanRule", "Median", "MedianRule", "TrimmedMean", "TrimmedMeanRule"]
