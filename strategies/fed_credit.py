"""Fed-Credit: clients are weighted by a credibility that their past behaviour has earned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedplat.spill import row_bytes
from fedplat.updates import ClientUpdates

from .aggregators import Aggregate, Aggregator, RoundPlan, RunningAggregate, median
from .aggregators.coordinatewise import shares_of, weighted_sum
from .aggregators.coverage import Covered, Peers, covered_mean, covered_step, peer_cosines
from .aggregators.credibility import Attitude, History, Mix, attitudes, cosines, mixed, updated
from .composed import FederatedStrategy
from .fed_credit_running import RunningCredit, RunningOldCredit, clipped_to_median, outcome
from .parts import StrategyParts

_START = 1.0


@dataclass(frozen=True)
class CreditSettings:
    """The rule's parameters; :class:`FedCredit` explains them."""

    alpha: float
    decay: float
    attitude: Attitude
    k: float
    rho: float
    gamma: float
    history: History
    mix: Mix
    order: Literal["new", "old"]
    similarity: Literal["model", "update"]
    base: Literal["samples", "equal"]
    clip_norm: bool


class CredibilityRule(Aggregator):
    """Mean weighted by credibility and sample count; remembers each node's credibility."""

    def __init__(self, settings: CreditSettings) -> None:
        self.settings = settings
        self.credibility: dict[int, float] = {}
        self.last_similarity: dict[int, float] = {}

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Judge the clients, update their credibility, and combine their models."""
        nodes, (similarity, peers) = updates.node_ids.tolist(), self._similarity(updates)
        weights, added, after = self.judged(nodes, updates.num_examples, similarity, peers)
        self.remember(nodes, updates.refused, similarity, after)
        return outcome(self._combined(updates, weights), weights, added, similarity, after)

    def judged(
        self,
        nodes: Sequence[int],
        counts: NDArray[np.int64],
        similarity: torch.Tensor,
        peers: Peers | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return weights, what the round adds to the credibilities, and these afterwards, all (n,).

        With ``peers`` a client's similarity is judged by that of others over the same elements.
        """
        before = self.credibilities(nodes)
        last = [self.last_similarity.get(node, math.nan) for node in nodes]
        added = attitudes(
            similarity,
            self.settings.attitude,
            k=self.settings.k,
            rho=self.settings.rho,
            gamma=self.settings.gamma,
            previous=torch.tensor(last, dtype=torch.float64),
            peers=peers,
        )
        after = updated(before, added, self.settings.decay, self.settings.history)
        shares = shares_of(torch.from_numpy(counts) if self.settings.base == "samples" else None, len(nodes))
        weights = mixed(
            shares, after if self.settings.order == "new" else before, self.settings.alpha, self.settings.mix
        )
        return weights, added, after

    def credibilities(self, nodes: Sequence[int]) -> torch.Tensor:
        """Return the credibilities (n,) float64 that the nodes have before the round."""
        return torch.tensor([self.credibility.get(node, _START) for node in nodes], dtype=torch.float64)

    def running(self, plan: RoundPlan) -> RunningAggregate | None:
        """Return the rule for a round in blocks, unless it compares updates with the median of all."""
        if self.settings.similarity == "update":
            return None
        return RunningCredit(self, plan) if self._weighs_late else RunningOldCredit(self, plan)

    def disk_bytes(self, clients: int, dim: int) -> int:
        """Return the size of all models, where the weights are known after the last reply only."""
        return row_bytes(dim, clients) if self._weighs_late and self.settings.similarity == "model" else 0

    @property
    def _weighs_late(self) -> bool:
        return self.settings.order == "new" or self.settings.clip_norm

    def _similarity(self, updates: ClientUpdates) -> tuple[torch.Tensor, Peers | None]:
        covered = Covered.deltas(updates)
        if self.settings.similarity == "model":
            matrix, point = updates.params, updates.reference
        else:
            matrix = updates.deltas()
            point = median(matrix, covered).vector
        if covered is None:
            return cosines(matrix, point), None
        peers = peer_cosines(matrix, point, covered)
        return peers.cosines.diagonal().clone(), peers

    def remember(
        self, nodes: Sequence[int], refused: Sequence[int], similarity: torch.Tensor, after: torch.Tensor
    ) -> None:
        """Note the credibilities; a refused reply counts as dissimilar, an absent client only decays."""
        worst = -self.settings.rho if self.settings.attitude in ("mean", "prev", "signed_mad") else 0.0
        for node in refused:
            self.credibility.setdefault(node, _START)
        for node in self.credibility.keys() - set(nodes):
            old = torch.tensor(self.credibility[node], dtype=torch.float64)
            change = torch.tensor(worst if node in refused else 0.0, dtype=torch.float64)
            self.credibility[node] = float(updated(old, change, self.settings.decay, self.settings.history))
        self.credibility |= zip(nodes, after.tolist(), strict=True)
        self.last_similarity |= zip(nodes, similarity.tolist(), strict=True)

    def _combined(self, updates: ClientUpdates, weights: torch.Tensor) -> torch.Tensor:
        if (covered := Covered.by(updates)) is not None:
            if not self.settings.clip_norm:
                return covered_mean(updates.params, weights, covered)
            lengths = updates.update_norms * covered.stretch.sqrt().numpy()
            clipped = clipped_to_median(weights, lengths)
            return covered_step(updates.params, clipped, weights, covered)
        if not self.settings.clip_norm:
            return weighted_sum(updates.params, weights, torch.float32)
        clipped = clipped_to_median(weights, updates.update_norms)
        moved = weighted_sum(updates.params, clipped) + (1 - clipped.sum()) * updates.reference.double()
        return moved.float()

    def state_bytes(self, clients: int, dim: int) -> int:
        """Return the size of two numbers per client; nothing depends on the model."""
        return 16 * clients

    def state_dict(self) -> dict[str, Any]:
        """Return credibilities and last similarities by node id."""
        return {
            "credibility": {str(node): value for node, value in self.credibility.items()},
            "similarity": {str(node): value for node, value in self.last_similarity.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self.credibility = {int(node): value for node, value in state["credibility"].items()}
        self.last_similarity = {int(node): value for node, value in state["similarity"].items()}


class FedCredit(FederatedStrategy):
    """The mean weighted by sample count and by a credibility c that past rounds have earned.

    sᵢ = cos(wᵢ, w) with w the model sent; vᵢ = max(sᵢ, 0), or −rho if sᵢ is below median − k·MAD;
    cᵢ ← max(0, e^−decay·cᵢ + vᵢ) from 1; qᵢ ∝ dᵢ^(1−alpha)·cᵢ^alpha with dᵢ the sample share; w ← Σ qᵢ wᵢ.
    Needs no number of attackers; O(n·d): one pass for the similarities, one for the sum, between which the
    models of a large round wait in a temporary file. A client that is absent only decays; one whose reply is
    refused counts as dissimilar.

    From the paper's abstract: one credibility per client, from the similarity of local and global model, with
    a time decay and an attitude. Second hand: cosine of the parameters, start at 1, exponential decay, a
    factor alpha between credibility and plain weights. Inferred: every formula above beyond that, all default
    values, and the other choices of ``attitude`` (none, scale, mean, prev), ``history`` (ewma), ``mix``
    (linear, product; under linear with alpha < 1 even a client without credibility keeps a share, so a large
    attack gets through), ``order`` (old weighs by the credibility before this round) and ``similarity``
    (update compares updates with their median, which equal lies of many clients can win).

    It does not see two things. A cosine ignores length, so 100·wᵢ passes for wᵢ (an enlarged update turns the
    model and may be seen): ``clip_norm`` bounds every update by the median length. And sample counts are
    believed: ``base="equal"`` leaves them out. It needs an honest majority in every round.

    Of a sub-model sᵢ is over what client i covers, and median and MAD, or the mean, are those of all clients'
    similarities over the same elements, so that a small sub-model is not judged by larger ones; the sum is
    over those who cover an element (inferred); O(n·d) for every sub-model that differs. Chen et al., 2024,
    arXiv 2405.11758.

        FedCredit().start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        *,
        alpha: Annotated[float, Field(ge=0, le=1, description="0: by samples, 1: by credibility")] = 0.5,
        decay: Annotated[float, Field(ge=0, description="of credibility, per round: e^-decay")] = 0.5,
        attitude: Attitude = "signed_mad",
        k: Annotated[float, Field(ge=0, description="deviations below the median allowed")] = 2.0,
        rho: Annotated[float, Field(ge=0, description="taken off for a bad round")] = 1.0,
        gamma: Annotated[float, Field(ge=0, le=1, description="factor of attitude = scale")] = 0.5,
        history: History = "sum",
        mix: Mix = "geometric",
        order: Literal["new", "old"] = "new",
        similarity: Literal["model", "update"] = "model",
        base: Literal["samples", "equal"] = "samples",
        clip_norm: bool = False,
        **parts: Unpack[StrategyParts],
    ) -> None:
        settings = CreditSettings(
            alpha, decay, attitude, k, rho, gamma, history, mix, order, similarity, base, clip_norm
        )
        super().__init__(CredibilityRule(settings), **parts)
