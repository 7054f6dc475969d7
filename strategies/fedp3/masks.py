"""Server-to-client pruning: the largest weights of each tensor stay, biases and norms always."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from fedplat.arrays import FlatArrays, Float32Array


def kept_count(size: int, share: float) -> int:
    """Return how many of ``size`` elements a share keeps: rounded down, at least one.

    >>> kept_count(100, 0.29), kept_count(10, 0.7), kept_count(1, 0.5)
    (29, 7, 1)
    """
    return min(size, max(1, int(share * size + 1e-9))) if size else 0


def magnitude_mask(weights: Float32Array, share: float) -> NDArray[np.bool_]:
    """Return which of the weights (n,) are the largest in size; of equal ones, the first are kept.

    >>> magnitude_mask(np.float32([3, -5, 1, 3]), 0.5).tolist()
    [True, True, False, False]
    """
    count, size = kept_count(len(weights), share), np.abs(weights)
    if count == len(size):
        return np.ones(len(size), np.bool_)
    least = np.partition(size, len(size) - count)[len(size) - count]
    kept: NDArray[np.bool_] = size > least
    ties = np.flatnonzero(size == least)[: count - int(np.count_nonzero(kept))]
    kept[ties] = True
    return kept


class RoundMasks:
    """The masks of one global model, each found once: they depend on the array and the share alone."""

    def __init__(self, model: FlatArrays) -> None:
        self.model = model
        self._found: dict[tuple[str, float], NDArray[np.bool_]] = {}

    def __call__(self, names: Iterable[str], share: float) -> dict[str, NDArray[np.bool_]]:
        """Return the masks of some weights by name, flat."""
        return {name: self._mask(name, share) for name in names}

    def _mask(self, name: str, share: float) -> NDArray[np.bool_]:
        if (name, share) not in self._found:
            entry = self.model.layout.by_name[name]
            self._found[name, share] = magnitude_mask(self.model.vector[entry.start : entry.stop], share)
        return self._found[name, share]
