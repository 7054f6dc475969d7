"""The server's half of FedPer: the first layers are shared, and the last ones never seen."""

from __future__ import annotations

import torch

from fedplat.arrays import FlatArrays
from fedplat.emulation.schedule import Budget
from fedplat.layer_map import elements_of, part_of, with_part

from .nodes import Node
from .submodels import FULL, SubModelScheme, SubModelSpec

BODY = SubModelSpec("shared-layers")


class SharedLayers(SubModelScheme):
    """Everybody gets and returns all arrays but those of ``local``, which no reply covers.

    The global model keeps these as it began, bit for bit. Arivazhagan et al., 2019 (arXiv 1912.00818); needs
    clients that have them, see :class:`fedplat.clients.personal.FedPer`.

        shared = SharedLayers(local=frozenset({"fc2.weight", "fc2.bias"}))
        Mean(submodels=shared).start(grid, initial_arrays, num_rounds=50)
    """

    def __init__(self, local: frozenset[str]) -> None:
        self.local = local

    def assign(self, node: Node, budget: Budget | None, server_round: int) -> SubModelSpec:
        """Return what is the same for all."""
        return BODY if self.local else FULL

    def extract(self, model: FlatArrays, spec: SubModelSpec) -> FlatArrays:
        """Return the shared arrays."""
        return model if spec == FULL else part_of(model, self._shared(model))

    def restore(
        self, arrays: FlatArrays, spec: SubModelSpec, model: FlatArrays
    ) -> tuple[FlatArrays, torch.Tensor | None]:
        """Return the model with a client's shared arrays, and which elements (d,) these are."""
        if spec == FULL:
            return arrays, None
        covered = elements_of(model.layout, self._shared(model))
        return with_part(model, arrays), torch.from_numpy(covered)

    def _shared(self, model: FlatArrays) -> frozenset[str]:
        return frozenset(entry.name for entry in model.layout.entries if entry.name not in self.local)
