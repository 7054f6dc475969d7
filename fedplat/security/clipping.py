"""Updates of bounded length: what differential privacy rests on."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ..updates import column_chunks, update_norms


def clipped(
    matrix: torch.Tensor, reference: torch.Tensor, bound: float
) -> tuple[torch.Tensor, NDArray[np.float64]]:
    """Return models whose updates are at most ``bound`` long, a new matrix, and the norms (n,) they had.

    ``matrix`` (n, d) float32 holds finite models, ``reference`` (d,) the model they were sent. An update,
    model − reference, is one vector over all d elements; a longer one is scaled down to an L2 norm of
    ``bound``, others, a zero update among them, keep every bit. Norms and products are formed in float64; the
    rounding of the models to float32 may lengthen an update by 6e-8 of the model's norm. Raises ValueError
    unless 0 < bound < infinity. O(n·d).

    >>> models, norms = clipped(torch.tensor([[3.0, 4.0], [0.0, 0.5]]), torch.zeros(2), 1.0)
    >>> norms.tolist(), [[round(x, 6) for x in row] for row in models.tolist()]
    ([5.0, 0.5], [[0.6, 0.8], [0.0, 0.5]])
    """
    out = matrix.clone()
    return out, clip_(out, reference, bound)


def clip_(matrix: torch.Tensor, reference: torch.Tensor, bound: float) -> NDArray[np.float64]:
    """Do what :func:`clipped` does to the matrix itself, for one that nobody else holds; return the norms."""
    if not 0 < bound < float("inf"):
        raise ValueError(f"bound must be above 0 and finite, got {bound}")
    norms = update_norms(matrix, reference)
    rows = torch.from_numpy(np.flatnonzero(norms > bound))
    factors = bound / torch.from_numpy(norms)[rows]
    if len(rows):
        for start, stop in column_chunks(len(rows), matrix.shape[1]):
            base = reference[start:stop].double()
            update = matrix[rows, start:stop].double() - base
            matrix[rows, start:stop] = (base + factors[:, None] * update).float()
    return norms
