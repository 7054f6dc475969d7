"""Distances between clients, accurate enough to rank them by."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedplat.updates import column_chunks, large_float32, squares_from

from .coverage import Covered, pair_sums

_WIDER = 4  # than other chunks, so that it pays for BLAS to start its threads


def scalar_products(
    matrix: torch.Tensor, rows: torch.Tensor | None = None, centre: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ⟨xᵢ, xⱼ⟩ (m, m) float64 of the rows of a matrix (n, d), or of some of them (m,), symmetric.

    With ``centre`` (d,), of what is left once it has been taken off. O(m²·d) time; a few megabytes besides
    the input. On the CPU wherever the matrix is.
    """
    m, d = len(matrix) if rows is None else len(rows), matrix.shape[1]
    if matrix.device.type == "cpu":
        return torch.from_numpy(_products(matrix.numpy(), rows, centre))
    gram = torch.zeros(m, m, dtype=torch.float64, device=matrix.device)
    for start, stop in column_chunks(m, d, matrix.device):
        chunk = (matrix[:, start:stop] if rows is None else matrix[rows, start:stop]).double()
        if centre is not None:
            chunk -= centre[start:stop].to(matrix.device)
        gram += chunk @ chunk.t()
    return ((gram + gram.t()) / 2).cpu()


def _products(x: NDArray[Any], rows: torch.Tensor | None, centre: torch.Tensor | None) -> NDArray[np.float64]:
    """Do the same on the CPU: torch multiplies twice as much, and other bits come out on more threads.

    Nothing of torch is called between two products, since its threads and BLAS's would wait for each other.
    """
    chosen = slice(None) if rows is None else rows.numpy()
    m, d = x[chosen, :1].shape[0], x.shape[1]
    gram = np.zeros((m, m))
    with np.errstate(all="ignore"):
        for start, stop in column_chunks(-(-m // _WIDER), d):
            chunk = x[chosen, start:stop].astype(np.float64)
            if centre is not None:
                chunk -= centre[start:stop].numpy()
            gram += chunk @ chunk.T  # NumPy sees that this is symmetric
    return gram


def squared_distances(matrix: torch.Tensor, covered: Covered | None = None) -> torch.Tensor:
    """Return ‖xᵢ − xⱼ‖² (n, n) float64, symmetric, zero on the diagonal, never negative.

    The products of a·a + b·b − 2a·b are formed in float64: in float32 they cancel, and models that differ
    by a ten-thousandth of their length come out at distances of zero and below. O(n²·d) time; a few
    megabytes besides the input. With ``covered``, over what both clients cover, see
    :meth:`fedplat.strategies.aggregators.coverage.Pairs.squared_distances`.
    """
    if covered is not None:
        return pair_sums(matrix, covered).squared_distances()
    gram = scalar_products(matrix)
    norms = gram.diagonal()
    return (norms[:, None] + norms[None, :] - 2 * gram).clamp_(min=0).fill_diagonal_(0)


def distances_to(matrix: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Return ‖xᵢ − point‖ (n,) float64 on the CPU, from differences.

    In float64; where the matrix is large and both are float32, as in :func:`fedplat.updates.squares_from`.
    """
    if large_float32(matrix, point):
        return squares_from(matrix, point).sqrt_()
    n, d = matrix.shape
    squared = torch.zeros(n, dtype=torch.float64, device=matrix.device)
    point = point.to(matrix.device)
    for start, stop in column_chunks(n, d, matrix.device):
        squared += (matrix[:, start:stop].double() - point[start:stop]).square_().sum(dim=1)
    return squared.sqrt_().cpu()
