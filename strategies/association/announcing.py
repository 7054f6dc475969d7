"""Policies that count whom they have to tell of an edge: clients remember the one they were told last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from .base import NOWHERE, AssociationPolicy, Decision, EdgeWorld, Ints, Limits, Prices


class Announcing(AssociationPolicy):
    """A policy that remembers which edge each client knows of, ``known`` (N,).

    A client that sits a round out forgets nothing, so it costs no message to bring it back to the same edge.
    """

    known: Ints

    def prepare(self, world: EdgeWorld, limits: Limits, prices: Prices, seed: int) -> None:
        """Get to know the world; nobody knows of an edge yet."""
        super().prepare(world, limits, prices, seed)
        self.known = np.full(world.clients, NOWHERE)

    def decided(self, edge_of: Ints, probed: int = 0, **notes: float) -> Decision:
        """Return the decision, with how many clients are told another edge than they knew."""
        told = (edge_of != NOWHERE) & (edge_of != self.known)
        self.known = np.where(told, edge_of, self.known)
        return Decision(edge_of, probed, int(told.sum()), notes)

    def state_dict(self) -> dict[str, Any]:
        """Return which edge each client knows of."""
        return {"known": torch.from_numpy(self.known.copy())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned."""
        self.known = torch.as_tensor(state["known"]).numpy().astype(np.int64)
