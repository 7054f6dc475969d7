"""Fed-Credit on replies that come block by block: which models are summed when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedplat.spill import RowFile
from fedplat.updates import ClientUpdates

from .aggregators import Aggregate, RoundPlan, RunningAggregate
from .aggregators.credibility import cosines
from .aggregators.running import RunningSum

if TYPE_CHECKING:
    from .fed_credit import CredibilityRule


class RunningCredit(RunningAggregate):
    """The rule over blocks: models wait in a file, O(n·d) on disk, until all similarities are known."""

    def __init__(self, rule: CredibilityRule, plan: RoundPlan) -> None:
        self.rule, self.plan = rule, plan
        self.nodes: list[int] = []
        self._counts: list[NDArray[np.int64]] = []
        self._norms: list[NDArray[np.float64]] = []
        self._similarity: list[torch.Tensor] = []
        self._file: RowFile | None = None
        self._at_a_time = 1

    def add(self, updates: ClientUpdates) -> None:
        """Measure the similarity of the models to the one that was sent, and put them aside."""
        p = self.plan.num_params
        self.nodes += updates.node_ids.tolist()
        self._counts.append(updates.num_examples)
        self._norms.append(updates.update_norms)
        self._similarity.append(cosines(updates.params[:, :p], self.plan.reference[:p]))
        self.put(updates)

    def put(self, updates: ClientUpdates) -> None:
        """Put a block of models into the file."""
        if self._file is None:
            self._file = RowFile(len(self.plan.reference), self.plan.clients)
        self._file.append(updates.params)
        self._at_a_time = max(self._at_a_time, len(updates))

    def finish(self, refused: tuple[int, ...]) -> Aggregate:
        """Judge the clients, and read their models once more for the sum."""
        similarity, counts = torch.cat(self._similarity), np.concatenate(self._counts)
        weights, added, after = self.rule.judged(self.nodes, counts, similarity)
        vector = self.combined(weights, np.concatenate(self._norms), counts)
        self.rule.remember(self.nodes, refused, similarity, after)
        return outcome(vector, weights, added, similarity, after)

    def combined(
        self, weights: torch.Tensor, norms: NDArray[np.float64], counts: NDArray[np.int64]
    ) -> torch.Tensor:
        """Return the new model (d,) by the weights (n,)."""
        p, start, clip = self.plan.num_params, self.plan.reference.double(), self.rule.settings.clip_norm
        factors = clipped_to_median(weights, norms) if clip else weights
        params, buffers = RunningSum(p), RunningSum(len(start) - p)
        done = 0
        for block in self._file.blocks(self._at_a_time) if self._file else ():
            rows = slice(done, done := done + len(block))
            params.add(block[:, :p], factors[rows])
            buffers.add(block[:, p:], weights[rows])
        if clip:
            params.total += (1 - factors.sum()) * start[:p]
        return torch.cat([params.total, buffers.total]).float()

    def close(self) -> None:
        """Delete the file."""
        if self._file is not None:
            self._file.close()


class RunningOldCredit(RunningCredit):
    """The rule over blocks where last round's credibilities are the weights: two sums, and no file."""

    def __init__(self, rule: CredibilityRule, plan: RoundPlan) -> None:
        super().__init__(rule, plan)
        self._by_samples, self._by_credit = RunningSum(len(plan.reference)), RunningSum(len(plan.reference))
        self._sample_factors: list[torch.Tensor] = []
        self._credit_factors: list[torch.Tensor] = []

    def put(self, updates: ClientUpdates) -> None:
        """Add a block of models to the sums; the factors lack only what all clients have in common."""
        settings, credibility = self.rule.settings, self.rule.credibilities(updates.node_ids.tolist())
        plain = torch.from_numpy(updates.num_examples).double()
        plain = plain if settings.base == "samples" else torch.ones_like(plain)
        if settings.mix == "geometric":
            factors = plain ** (1 - settings.alpha) * credibility**settings.alpha
        else:
            factors = credibility * (plain if settings.mix == "product" else 1)
        self._sample_factors.append(plain)
        self._credit_factors.append(factors)
        self._by_samples.add(updates.params, plain)
        self._by_credit.add(updates.params, factors)

    def combined(
        self, weights: torch.Tensor, norms: NDArray[np.float64], counts: NDArray[np.int64]
    ) -> torch.Tensor:
        """Return the new model (d,) as a mixture of the two sums, as :func:`mixed` has the weights."""
        plain, factors = torch.cat(self._sample_factors).sum(), torch.cat(self._credit_factors).sum()
        credit = self.rule.settings.alpha if self.rule.settings.mix == "linear" else 1.0
        if not bool(factors > 0):
            return (self._by_samples.total / plain).float()
        vector = (credit / factors) * self._by_credit.total + ((1 - credit) / plain) * self._by_samples.total
        return vector.float()


def clipped_to_median(weights: torch.Tensor, norms: NDArray[np.float64]) -> torch.Tensor:
    """Return weights (n,) scaled down where a norm is above the median of all norms (n,)."""
    return weights * (float(np.median(norms)) / torch.from_numpy(norms).clamp(min=1e-300)).clamp(max=1)


def outcome(
    vector: torch.Tensor,
    weights: torch.Tensor,
    added: torch.Tensor,
    similarity: torch.Tensor,
    credibility: torch.Tensor,
) -> Aggregate:
    """Return a round's outcome with the figures that are recorded."""
    return Aggregate(
        vector,
        weights,
        weights > 0,
        diagnostics={"suspects": float((added < 0).sum())},
        scores={"similarity": similarity, "credibility": credibility},
    )
