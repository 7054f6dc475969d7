"""What a server remembers of its clients' updates: their sum, and the last few of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedplat.updates import ClientUpdates

from .coverage import Block, Covered, pairs_of
from .distances import scalar_products

HistoryDtype = Literal["float32", "float16", "bfloat16"]


class Histories:
    """Per node the sum of all its updates (long history) and its last ``window`` updates (short history).

    An update is wᵢ − w. The sum is kept in float32; the last updates in ``dtype``, since half the digits are
    enough for a mean of a few, while in a sum of hundreds of rounds they would lose the new terms. Numbers
    that would leave the type's range are cut, so that sums and means stay finite. A node that is absent keeps
    what it has; a new one gets a slot, and room for slots doubles when it is used up. With ``frozen`` the
    last updates are those of the first ``window`` rounds for ever.

    Of a sub-model only what it covers is added and counted: a mean is over the rounds in which an element was
    trained. From the first sub-model on that takes 4 + ``window`` bytes more per client and element.
    """

    def __init__(self, window: int, dtype: HistoryDtype = "float32", *, frozen: bool = False) -> None:
        self.window = window
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.frozen = frozen
        self._slots: dict[int, int] = {}
        self._counts = torch.zeros(0, dtype=torch.int64)
        self._long = torch.zeros(0, 0)
        self._recent = torch.zeros(0, window, 0, dtype=self.dtype)
        # In how many rounds an element was trained (slots, d), and in which of the last (slots, window, d).
        self._times: torch.Tensor | None = None
        self._trained: torch.Tensor | None = None

    def record(self, updates: ClientUpdates) -> torch.Tensor:
        """Add the updates of a round and return the slots (n,) of its clients, in their order.

        Raises ValueError if the number of parameters differs from that of the rounds before.
        """
        slots = self._reserve(updates.node_ids.tolist(), updates.params.shape[1])
        if updates.partial is not None:
            self._count_elements()
        # Row by row: the updates are never a second matrix.
        for row, slot in enumerate(slots):
            delta = updates.params[row] - updates.reference
            _add(self._long[slot], delta)
            count = int(self._counts[slot])
            if not (self.frozen and count >= self.window):
                limit = torch.finfo(self.dtype).max / self.window
                self._recent[slot, count % self.window] = delta.clamp_(-limit, limit)
                if self._trained is not None:
                    mask = True if updates.partial is None else updates.partial[row]
                    self._trained[slot, count % self.window] = mask
            if self._times is not None:
                self._times[slot] += 1 if updates.partial is None else updates.partial[row]
            self._counts[slot] += 1
        return torch.tensor(slots, dtype=torch.int64)

    def short(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the means of the last ``window`` updates, or of as many as there are, (n, d) float32."""
        means = torch.empty(len(slots), self._long.shape[1])
        for row, slot in enumerate(slots.tolist()):
            filled = min(int(self._counts[slot]), self.window)
            recent = self._recent[slot, :filled]
            if self._trained is None:
                torch.mean(recent, dim=0, dtype=torch.float32, out=means[row])
            else:
                rounds = self._trained[slot, :filled].sum(dim=0).clamp(min=1)
                torch.div(recent.sum(dim=0, dtype=torch.float32), rounds, out=means[row])
        return means

    def short_covered(self, slots: torch.Tensor) -> Covered | None:
        """Return what the means of the last updates cover; None if that is everything."""
        if self._trained is None:
            return None
        mask = torch.empty(len(slots), self._long.shape[1], dtype=torch.bool)
        for row, slot in enumerate(slots.tolist()):
            filled = min(int(self._counts[slot]), self.window)
            torch.any(self._trained[slot, :filled], dim=0, out=mask[row])
        return None if mask.all() else Covered(mask)

    def long_products(self, slots: torch.Tensor) -> NDArray[np.float64]:
        """Return the products (n, n) of the sums of all updates.

        With sub-models, of the means over the rounds in which an element was trained, times the number of
        the client's rounds, over what two clients share; lengths are stretched to d.
        """
        times = self._times
        if times is None:
            gram: NDArray[np.float64] = scalar_products(self._long, slots).numpy()
            return gram
        counts = self._counts[slots].double()[:, None]

        def block(start: int, stop: int) -> Block:
            rounds = times[slots, start:stop].double()
            values = self._long[slots, start:stop].double() * (counts / rounds.clamp(min=1))
            return values.numpy(), (rounds > 0).double().numpy()

        return pairs_of(len(slots), self._long.shape[1], block).gram()

    @property
    def long(self) -> torch.Tensor:
        """The sums of all updates, (slots, d) float32, by slot; not a copy."""
        return self._long

    @property
    def nodes(self) -> list[int]:
        """The nodes seen so far, by slot."""
        return list(self._slots)

    def state_bytes(self, clients: int, dim: int) -> int:
        """Return the bytes kept: per client and parameter 4 for the sum and an element for each round."""
        return clients * dim * (4 + self.window * self.dtype.itemsize)

    def state_dict(self) -> dict[str, Any]:
        """Return nodes, counts, sums and last updates."""
        used = len(self._slots)
        state = {
            "nodes": self.nodes,
            "counts": self._counts[:used].clone(),
            "long": self._long[:used].clone(),
            "recent": self._recent[:used].clone(),
        }
        if self._times is not None and self._trained is not None:
            state |= {"times": self._times[:used].clone(), "trained": self._trained[:used].clone()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned; raises ValueError for another window or type."""
        recent = state["recent"]
        if recent.shape[1] != self.window or recent.dtype != self.dtype:
            raise ValueError(
                f"histories: the state has {recent.shape[1]} updates as {recent.dtype}, "
                f"expected {self.window} as {self.dtype}"
            )
        self._slots = {int(node): slot for slot, node in enumerate(state["nodes"])}
        self._counts = state["counts"].clone()
        self._long = state["long"].clone()
        self._recent = recent.clone()
        self._times = state["times"].clone() if "times" in state else None
        self._trained = state["trained"].clone() if "trained" in state else None

    def _reserve(self, nodes: list[int], dim: int) -> list[int]:
        """Return the slots of the nodes, new ones where needed."""
        if self._slots and dim != self._long.shape[1]:
            raise ValueError(f"histories: {dim} parameters where there were {self._long.shape[1]}")
        slots = [self._slots.setdefault(node, len(self._slots)) for node in nodes]
        have, wanted = len(self._counts), len(self._slots)
        if wanted > have:
            room = max(wanted, 2 * have)
            self._counts = _enlarged(self._counts, torch.zeros(room, dtype=torch.int64))
            self._long = _enlarged(self._long, torch.zeros(room, dim))
            self._recent = _enlarged(self._recent, torch.zeros(room, self.window, dim, dtype=self.dtype))
            if self._times is not None and self._trained is not None:
                self._times = _enlarged(self._times, torch.zeros(room, dim, dtype=torch.int32))
                self._trained = _enlarged(self._trained, torch.zeros(self._recent.shape, dtype=torch.bool))
        return slots

    def _count_elements(self) -> None:
        """From now on count element by element; so far everybody has trained everything."""
        if self._times is None:
            self._times = self._counts.to(torch.int32)[:, None].repeat(1, self._long.shape[1])
            self._trained = torch.ones(self._recent.shape, dtype=torch.bool)


def _enlarged(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    if len(old):
        new[: len(old)] = old
    return new


def _add(total: torch.Tensor, delta: torch.Tensor) -> None:
    # Infinity minus infinity would be NaN a few rounds later, so a sum stops at the largest number.
    limit = torch.finfo(total.dtype).max
    total.add_(delta).clamp_(-limit, limit)
