"""Rules at work on replies that come block by block, for rounds whose matrix would not fit into memory."""

from __future__ import annotations

import numpy as np
import torch

from fedplat.rng import generator
from fedplat.updates import ClientUpdates, column_chunks

from .base import Aggregate, RoundPlan, RunningAggregate
from .coordinatewise import shares_of
from .geometric import with_noise


class RunningSum:
    """Σ gᵢ xᵢ (d,) over blocks of rows, accumulated in float64; holds nothing but the sum."""

    def __init__(self, dim: int) -> None:
        self.total = torch.from_numpy(np.zeros(dim))  # takes no memory until it is used

    def add(self, matrix: torch.Tensor, factors: torch.Tensor) -> None:
        """Add rows (k, d) with factors (k,) float64."""
        for start, stop in column_chunks(*matrix.shape):
            self.total[start:stop] += factors @ matrix[:, start:stop].double()


class RunningMean(RunningAggregate):
    """The mean, weighted by sample count or not. One pass; holds one vector in float64."""

    def __init__(self, plan: RoundPlan, weighted: bool) -> None:
        self._weighted = weighted
        self._sum = RunningSum(len(plan.reference))
        self._counts: list[torch.Tensor] = []

    def add(self, updates: ClientUpdates) -> None:
        """Add the models, each as often as it counts."""
        counts = torch.from_numpy(updates.num_examples).double()
        self._counts.append(counts if self._weighted else torch.ones_like(counts))
        self._sum.add(updates.params, self._counts[-1])

    def finish(self, refused: tuple[int, ...]) -> Aggregate:
        """Divide by the sum of the counts."""
        counts = torch.cat(self._counts)
        shares = shares_of(counts, len(counts))
        return Aggregate((self._sum.total / counts.sum()).float(), shares, shares > 0)


class RunningClipping(RunningAggregate):
    """The mean, weighted by sample count, of updates clipped to a fixed norm. One pass, one vector."""

    def __init__(self, plan: RoundPlan, bound: float, noise: float, seed: int) -> None:
        self._plan = plan
        self._bound, self._noise, self._seed = bound, noise, seed
        self._sum = RunningSum(len(plan.reference))
        self._counts: list[torch.Tensor] = []
        self._clipped: list[torch.Tensor] = []

    def add(self, updates: ClientUpdates) -> None:
        """Add the models, each as often as it counts, scaled as its update is."""
        norms = torch.from_numpy(updates.update_norms)
        counts = torch.from_numpy(updates.num_examples).double()
        self._counts.append(counts)
        self._clipped.append(counts * (self._bound / norms.clamp(min=1e-300)).clamp(max=1))
        self._sum.add(updates.params, self._clipped[-1])

    def finish(self, refused: tuple[int, ...]) -> Aggregate:
        """Give the model that was sent the part that clipping took away."""
        plan, p = self._plan, self._plan.num_params
        clipped, everything = torch.cat(self._clipped), float(torch.cat(self._counts).sum())
        start = plan.reference[:p]
        moved = (self._sum.total[:p] - clipped.sum() * start.double()) / everything
        rng = generator(self._seed, "clipping-noise", plan.server_round)
        params = start + with_noise(moved, self._noise, rng).float()
        buffers = (self._sum.total[p:] / clipped.sum()).float()
        accepted = torch.ones(len(clipped), dtype=torch.bool)
        return Aggregate(torch.cat([params, buffers]), clipped / clipped.sum(), accepted)
