"""Sub-model schemes: which part of the model a client gets, and how its reply becomes full-size again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fedplat.arrays import FlatArrays

from .nodes import Node


@dataclass(frozen=True)
class SubModelSpec:
    """What a client gets: ``kind`` names the scheme's choice; clients with equal specs get the same arrays.

    ``config`` travels to the client in the message's configuration.
    """

    kind: str
    config: tuple[tuple[str, Any], ...] = ()


class SubModelScheme(Protocol):
    """Cuts a client's model out of the global one and puts its reply back."""

    def assign(self, node: Node, budget: Any, server_round: int) -> SubModelSpec:
        """Choose the sub-model for a node, given the budget of its device (None: no limit)."""
        ...

    def extract(self, model: FlatArrays, spec: SubModelSpec) -> FlatArrays:
        """Return the arrays that a client with this spec gets."""
        ...

    def restore(
        self, arrays: FlatArrays, spec: SubModelSpec, model: FlatArrays
    ) -> tuple[FlatArrays, torch.Tensor | None]:
        """Return a reply in the global layout and which elements (d,) it covers, None for all of them.

        ``model`` is the global model that the round started from; uncovered elements keep its values.
        """
        ...


FULL = SubModelSpec("full")


class FullModel:
    """Every client gets the whole model."""

    def assign(self, node: Node, budget: Any, server_round: int) -> SubModelSpec:
        """Return the spec of the whole model."""
        return FULL

    def extract(self, model: FlatArrays, spec: SubModelSpec) -> FlatArrays:
        """Return the model itself."""
        return model

    def restore(
        self, arrays: FlatArrays, spec: SubModelSpec, model: FlatArrays
    ) -> tuple[FlatArrays, torch.Tensor | None]:
        """Return the reply itself, which covers everything."""
        return arrays, None
