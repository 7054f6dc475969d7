"""The server's half of FedIns: the mean of the clients' pools, member by member, and what images selected.

Averaging is index-aligned because the pools are: all start from one. The model, :mod:`fedplat.models.pool`,
is an ordinary one, so every other strategy can combine pools too; this one also tells which members are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Unpack, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord

from fedplat.arrays import FlatArrays
from fedplat.emulation.schedule import Budget
from fedplat.models.ssf import spread

from .baselines import Mean, MeanRule
from .composed import FederatedStrategy
from .nodes import Node
from .parts import StrategyParts
from .reports import ClientReport
from .submodels import FullModel, SubModelScheme, SubModelSpec

SELECTED, ENTROPY = "selected.", "selection-entropy"


class FedIns(Mean):
    """The plain mean of the clients' pools, as released; ``weighted=True`` weighs by sample count.

    ``diagnostics`` has what the clients' images selected, all clients together: ``selection-entropy`` in nats
    (ln M at best), ``client-entropy``, the mean of the clients' own, ``unused-members``, selected by nobody,
    and ``mostly-one``, the largest share of one member. A member that a client never selects comes back from
    it as it was, and slows the others down; see these figures for keys that collapse. Each client's report
    has its own entropy and shares among its scores. They are there for models that tell, other ones are only
    averaged. Feng et al., ICCV 2023.

        FedIns().start(grid, initial_arrays, num_rounds=50)
    """

    def __init__(self, *, weighted: bool = False, **parts: Unpack[StrategyParts]) -> None:
        super().__init__(weighted=weighted, **parts)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the pools, and sum up what was selected."""
        done = super().aggregate_train(server_round, replies)
        self.reports = [_with_selection(report) for report in self.reports]
        self.diagnostics = {**self.diagnostics, **selection_figures(self.reports)}
        return done


def selection_figures(reports: Iterable[ClientReport]) -> dict[str, float]:
    """Return what the accepted clients' images selected together, by client weight; empty if none tells."""
    rows, weights, entropies = [], [], []
    for report in reports:
        shares = {k: v for k, v in report.metrics.items() if k.startswith(SELECTED)}
        if report.status == "accepted" and shares:
            rows.append([value for _, value in sorted(shares.items())])
            weights.append(float(report.num_examples or 0))
            entropies.append(report.metrics.get(ENTROPY, float("nan")))
    if not rows or len({len(row) for row in rows}) > 1 or not sum(weights):
        return {}
    mixed = np.average(np.array(rows), axis=0, weights=weights)
    shares_of_all, entropy = spread(torch.from_numpy(mixed))
    return {
        "selection-entropy": entropy,
        "client-entropy": float(np.mean(entropies)),
        "unused-members": float((mixed == 0).sum()),
        "mostly-one": float(shares_of_all.max()),
    }


class LocalNorms(SubModelScheme):
    """Every client keeps normalisation layers of its own: their weights and statistics are not averaged.

    They are told by name, ``norm`` or ``bn`` in it. A client's are kept here, with the server, and sent to it
    again: its numbers are what they would be had they stayed with the client, while the bytes of a round are
    a little more. ``accuracy-of.client-K`` is that of the new model with a client's norms.
    """

    def __init__(self, *, most_tested: int = 16) -> None:
        self.norms: dict[int, np.ndarray] = {}
        self._most_tested = most_tested
        self._client_of: dict[SubModelSpec, int] = {}

    def assign(self, node: Node, budget: Budget | None, server_round: int) -> SubModelSpec:
        """Return the client's own kind."""
        spec = SubModelSpec(f"client-{node.key}")
        self._client_of[spec] = node.key
        return spec

    def extract(self, model: FlatArrays, spec: SubModelSpec) -> FlatArrays:
        """Return the model with the client's norms, if it has trained before."""
        own = self.norms.get(self._client_of[spec])
        if own is None:
            return model
        vector = model.vector.copy()
        vector[norm_mask(model)] = own
        return FlatArrays(model.layout, vector, model.side)

    def restore(
        self, arrays: FlatArrays, spec: SubModelSpec, model: FlatArrays
    ) -> tuple[FlatArrays, torch.Tensor | None]:
        """Keep the reply's norms for its client; it covers everything else."""
        mask = norm_mask(arrays)
        own = arrays.vector[mask].copy()
        if np.isfinite(own).all():
            self.norms[self._client_of[spec]] = own
        vector = arrays.vector.copy()
        vector[mask] = model.vector[mask]
        return FlatArrays(arrays.layout, vector, arrays.side), torch.from_numpy(~mask)

    def parts_to_test(self, server_round: int) -> Mapping[str, SubModelSpec]:
        """Return the clients whose norms are known, the first few of them."""
        clients = sorted(self.norms)[: self._most_tested]
        self._client_of |= {SubModelSpec(f"client-{client}"): client for client in clients}
        return {f"client-{client}": SubModelSpec(f"client-{client}") for client in clients}

    def state_dict(self) -> dict[str, Any]:
        """Return the clients' norms."""
        return {"norms": {str(client): torch.from_numpy(own) for client, own in self.norms.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the clients' norms back."""
        self.norms = {int(client): own.numpy().copy() for client, own in state.get("norms", {}).items()}


class FedBN(FederatedStrategy):
    """Federated averaging of everything but normalisation layers, of which every client has its own.

    The global model keeps the norms it began with; what a client predicts with is the new model and its own
    norms, and the accuracies of these are among a round's ``submodels``. ``weighted=False`` gives every
    client the same weight. Only for whole models. Li et al., ICLR 2021.

        FedBN().start(grid, initial_arrays, num_rounds=50)
    """

    def __init__(self, *, weighted: bool = True, **parts: Unpack[StrategyParts]) -> None:
        if not isinstance(parts.get("submodels", FullModel()), FullModel):
            raise ValueError("FedBN gives every client the whole model; it does not go with sub-models")
        own = cast(StrategyParts, {**parts, "submodels": LocalNorms()})
        super().__init__(MeanRule(weighted), **own)


def norm_mask(arrays: FlatArrays) -> np.ndarray:
    """Return which elements (d,) belong to normalisation layers, by name."""
    mask = np.zeros(arrays.layout.dim, bool)
    for entry in arrays.layout.entries:
        layers = entry.name.lower().split(".")[:-1]
        if entry.in_vector and any("norm" in layer or layer.startswith("bn") for layer in layers):
            mask[entry.start : entry.stop] = True
    return mask


def _with_selection(report: ClientReport) -> ClientReport:
    own = {k: v for k, v in report.metrics.items() if k == ENTROPY or k.startswith(SELECTED)}
    return replace(report, scores={**report.scores, **own}) if own else report
