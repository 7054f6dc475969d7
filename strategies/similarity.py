"""Defences that weigh clients by the direction of their updates, as ready strategies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Unpack

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from pydantic import Field

from fedplat.arrays import FlatArrays, Layout
from fedplat.updates import ClientUpdates

from .aggregators import Aggregate, Aggregator
from .aggregators.coordinatewise import shares_of
from .aggregators.coverage import Covered, covered_cosines, moved
from .aggregators.credibility import cosines
from .aggregators.foolsgold import foolsgold
from .aggregators.geometric import norm_clipping
from .aggregators.reputation import reputations
from .aggregators.trust import fltrust
from .composed import FederatedStrategy
from .parts import StrategyParts

log = logging.getLogger("fedplat")

RootTraining = Callable[[ArrayRecord, int], ArrayRecord]
"""Given the model's record and the round, returns the record of the model trained on clean data."""


class SteadyRule(Aggregator):
    """A rule that may trust nobody in a round; then the model, buffers included, stays as it is."""

    def buffers(self, updates: ClientUpdates, aggregate: Aggregate) -> torch.Tensor:
        """Combine the buffers by the shares just found, or keep the old ones if nobody has any."""
        if not bool(aggregate.accepted.any()):
            return updates.reference
        return super().buffers(updates, aggregate)


class FoolsGoldRule(Aggregator):
    """Mean weighted by distinctness; remembers the sum of each node's updates."""

    def __init__(self, history: bool) -> None:
        self.history = history
        self._sums: dict[int, torch.Tensor] = {}
        self._trained: dict[int, torch.Tensor] = {}  # where a node's sum has any term, if not everywhere

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Add the updates to the nodes' histories, compare these, and combine the models."""
        sums, covered, compared = updates.deltas(), Covered.by(updates), Covered.deltas(updates)
        if self.history:
            compared = self._covered_so_far(updates)
            for row, node in enumerate(updates.node_ids.tolist()):
                if node in self._sums:
                    sums[row] += self._sums[node]
                    self._sums[node].copy_(sums[row])
                else:
                    # A copy: a view would keep the whole matrix of the round alive.
                    self._sums[node] = sums[row].clone()
        return foolsgold(updates.params, sums, covered, compared)

    def _covered_so_far(self, updates: ClientUpdates) -> Covered | None:
        """Return what the clients' histories cover with this round; None if that is everything."""
        mask, d = updates.partial, updates.params.shape[1]
        if mask is None and not self._trained:
            return None
        rows = []
        for row, node in enumerate(updates.node_ids.tolist()):
            now = torch.ones(d, dtype=torch.bool) if mask is None else mask[row]
            if node in self._trained:
                now = now | self._trained[node]
            elif node in self._sums:
                now = torch.ones(d, dtype=torch.bool)
            if now.all():
                self._trained.pop(node, None)
            else:
                self._trained[node] = now.clone()
            rows.append(now)
        return Covered(torch.stack(rows))

    def state_bytes(self, clients: int, dim: int) -> int:
        """Return the size of a float32 vector per client, if histories are kept; sub-models add a quarter."""
        return 4 * clients * dim if self.history else 0

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of updates by node id."""
        state: dict[str, Any] = {"history": {str(node): total.clone() for node, total in self._sums.items()}}
        if self._trained:
            state["trained"] = {str(node): mask.clone() for node, mask in self._trained.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self._sums = {int(node): total.clone() for node, total in state["history"].items()}
        self._trained = {int(node): mask.clone() for node, mask in state.get("trained", {}).items()}


class FoolsGold(FederatedStrategy):
    """The mean of the clients' models, where those whose updates point the same way lose their weight.

    Histories Hᵢ = Σ updates of client i so far; vᵢ = max(0, maxⱼ cos(Hᵢ, Hⱼ)), cosines pardoned by vᵢ/vⱼ
    where vⱼ > vᵢ; aᵢ = 1 − maxⱼ, divided by the largest; weight ∝ ln(aᵢ / (1 − aᵢ)) + 0.5 cut to [0, 1].
    ``history=False`` compares this round's updates only, as the baseline in MUD-HoG's released code does.

    From the paper: all of it, with kappa = 1 and without its weighting of the output layer's features.
    Inferred: weights are scaled to sum to 1, and all clients count alike if every one has a twin. Sample
    counts play no part. It is made for many clients with one goal (sybils) among honest ones of different
    data; a lone attacker, and honest clients of equal data, are judged wrongly. O(n²·d); keeps n·d numbers.
    Fung et al., RAID 2020.

        FoolsGold().start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(self, *, history: bool = True, **parts: Unpack[StrategyParts]) -> None:
        super().__init__(FoolsGoldRule(history), **parts)


class ReputationRule(SteadyRule):
    """Mean of clipped updates weighted by reputation; remembers reputations, and who lost theirs for good.

    Reputations are kept relative to the average client's, so that those of absent clients keep their meaning.
    """

    def __init__(self, alpha: float, threshold: float, clip: float) -> None:
        self.alpha = alpha
        self.threshold = threshold
        self.clip = clip
        self.reputation: dict[int, float] = {}
        self.dropped: set[int] = set()

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Combine the updates by the reputations of earlier rounds, and judge the clients by the result."""
        nodes = updates.node_ids.tolist()
        live = torch.tensor([node not in self.dropped for node in nodes])
        none = torch.zeros(len(nodes), dtype=torch.float64)
        if not live.any():
            return self._outcome(updates.reference, none, live, none, none)
        # A newcomer among clients of known reputation starts as the average one.
        start = 1.0 if any(self.reputation.get(node, 0.0) > 0 for node in nodes) else 0.0
        old = torch.tensor([self.reputation.get(node, start) for node in nodes], dtype=torch.float64) * live
        counts = torch.from_numpy(updates.num_examples) * live
        deltas, covered = updates.deltas(), Covered.deltas(updates)
        start_shares = shares_of(old if bool(old.sum() > 0) else counts, len(nodes))
        step = norm_clipping(deltas, self.clip, start_shares, covered=covered)
        if covered is None:
            agreement = cosines(deltas, step.vector)
        else:
            agreement = covered_cosines(deltas, step.vector, covered)
        rows = live.nonzero().flatten()
        total = float(old.sum())
        before = old[rows] / total if total > 0 else old[rows]
        new, kept = reputations(before, agreement[rows], alpha=self.alpha, threshold=self.threshold)
        new = new * (total / len(rows) if total > 0 else 1.0) * int(kept.sum())
        after = none.index_put((rows,), new)
        if bool(new.sum() > 0):  # else nobody could be judged
            self._remember([nodes[row] for row in rows.tolist()], new, kept)
        vector = moved(updates.reference, step.vector, covered)
        return self._outcome(vector, step.weights, step.accepted, agreement, after)

    def _outcome(
        self,
        vector: torch.Tensor,
        weights: torch.Tensor,
        accepted: torch.Tensor,
        agreement: torch.Tensor,
        after: torch.Tensor,
    ) -> Aggregate:
        return Aggregate(
            vector,
            weights,
            accepted,
            diagnostics={"dropped": float(len(self.dropped))},
            scores={"agreement": agreement, "reputation": after},
        )

    def _remember(self, nodes: list[int], new: torch.Tensor, kept: torch.Tensor) -> None:
        for node, value, stays in zip(nodes, new.tolist(), kept.tolist(), strict=True):
            self.reputation[node] = value
            if not stays:
                self.dropped.add(node)

    def state_bytes(self, clients: int, dim: int) -> int:
        """Return the size of a number and a flag per client; nothing depends on the model."""
        return 9 * clients

    def state_dict(self) -> dict[str, Any]:
        """Return reputations by node id, and the nodes dropped."""
        return {
            "reputation": {str(node): value for node, value in self.reputation.items()},
            "dropped": sorted(map(str, self.dropped)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self.reputation = {int(node): value for node, value in state["reputation"].items()}
        self.dropped = set(map(int, state["dropped"]))


class RFFL(FederatedStrategy):
    """The mean of clipped updates weighted by reputation r, which agreement with that mean earns.

    Δ = Σ rᵢ·clip(Δᵢ), in the first round with sample shares for r; then r ← alpha·r + (1 − alpha)·cos(Δᵢ, Δ)
    from 0, scaled to sum to 1. Who is below ``threshold`` / n is left out for good. A client that is dropped
    trains on but is not heard. If only dropped clients reply, the model stays as it is. ``clip`` must suit
    honest updates: the authors take 0.5 for MNIST and 0.15 for CIFAR-10.

    From the authors' code: every formula and all default values. Left out: the sparser models that it sends
    to clients of low reputation, its fair part. Inferred: what happens with absent clients (they keep
    their reputation), newcomers after the first round (they start as the average client), and a round whose
    reputations do not add up to anything positive (nobody is judged). Their code lets a dropped client gain
    weight again; here it does not. Needs a majority in the first rounds, by samples. O(n·d).
    Xu and Lyu, 2020, arXiv 2011.10464.

        RFFL(clip=0.5).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        *,
        alpha: Annotated[float, Field(ge=0, lt=1, description="share of the past in a reputation")] = 0.95,
        threshold: Annotated[float, Field(ge=0, lt=1, description="of the average reputation")] = 1 / 3,
        clip: Annotated[float, Field(gt=0, description="largest L2 norm of an update")] = 0.5,
        **parts: Unpack[StrategyParts],
    ) -> None:
        super().__init__(ReputationRule(alpha, threshold, clip), **parts)


class TrustRule(SteadyRule):
    """FLTrust's weighted mean around the model that ``root`` holds, one trained on clean data this round."""

    def __init__(self) -> None:
        self.root: torch.Tensor | None = None

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Combine the updates. Raises RuntimeError if no root model was given."""
        if self.root is None:
            raise RuntimeError("FLTrust needs a model trained on the server's own data before it can combine")
        root = self.root - updates.reference
        length = float(root.double().norm())
        if not bool(root.isfinite().all()):
            log.warning("round %d: the root model is not finite, nobody is trusted", updates.server_round)
            root, length = torch.zeros_like(root), float("nan")
        covered = Covered.deltas(updates)
        result = fltrust(updates.deltas(), root, covered)
        return Aggregate(
            moved(updates.reference, result.vector, covered),
            result.weights,
            result.accepted,
            diagnostics={**result.diagnostics, "root norm": length},
            scores=result.scores,
        )


class FLTrust(FederatedStrategy):
    """The mean of the clients' updates, weighted by how far each points where the server's own update does.

    tᵢ = max(0, cos(Δᵢ, Δ₀)) with Δ₀ the update of a few clean samples at the server; w ← w + Σ tᵢ·Δᵢ·‖Δ₀‖ /
    ‖Δᵢ‖ / Σ tᵢ. ``root`` gets the model's record and the round and returns the record of the model trained on
    the clean data; give it the clients' own training settings. Sample counts play no part. No majority is
    needed, but clean data like the clients' is.

    From the paper: all of it, with a server step of 1. Inferred: if nobody is trusted, or the root model is
    not finite, the model stays as it is. O(n·d), and the training. Cao et al., NDSS 2021.

    ``root_samples`` says how many clean samples, drawn from the training set, ``fedplat run`` gives the
    server; a root of one's own ignores it.

        FLTrust(root).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        root: RootTraining,
        *,
        root_samples: Annotated[int, Field(ge=1, description="clean samples at the server")] = 100,
        **parts: Unpack[StrategyParts],
    ) -> None:
        self.root = root
        self.root_samples = root_samples
        self._rule = TrustRule()
        super().__init__(self._rule, **parts)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Write the messages as every strategy does, and train the root model.

        Raises LayoutError if the root training returns other arrays than it was given.
        """
        messages = super().configure_train(server_round, arrays, config, grid)
        layout = Layout.of_record(arrays, promote=True)
        trained = FlatArrays.of_record(self.root(arrays, server_round), layout)
        # A copy: the training may hand out memory that it uses again, or that is read-only.
        self._rule.root = torch.from_numpy(trained.vector[: layout.num_params].copy())
        return messages
