"""Distances between clients, accurate enough to rank them by."""

from __future__ import annotations

import torch

from fedplat.updates import column_chunks


def scalar_products(matrix: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return ⟨xᵢ, xⱼ⟩ (m, m) float64 of the rows of a matrix (n, d), or of some of them (m,), symmetric.

    O(m²·d) time; a few megabytes besides the input.
    """
    m, d = len(matrix) if rows is None else len(rows), matrix.shape[1]
    gram = torch.zeros(m, m, dtype=torch.float64)
    for start, stop in column_chunks(m, d):
        chunk = (matrix[:, start:stop] if rows is None else matrix[rows, start:stop]).double()
        gram += chunk @ chunk.t()
    return (gram + gram.t()) / 2


def squared_distances(matrix: torch.Tensor) -> torch.Tensor:
    """Return ‖xᵢ − xⱼ‖² (n, n) float64, symmetric, zero on the diagonal, never negative.

    The products of a·a + b·b − 2a·b are formed in float64: in float32 they cancel, and models that differ
    by a ten-thousandth of their length come out at distances of zero and below. O(n²·d) time; a few
    megabytes besides the input.
    """
    gram = scalar_products(matrix)
    norms = gram.diagonal()
    return (norms[:, None] + norms[None, :] - 2 * gram).clamp_(min=0).fill_diagonal_(0)


def distances_to(matrix: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Return ‖xᵢ − point‖ (n,) float64, from differences."""
    squared = torch.zeros(len(matrix), dtype=torch.float64)
    for start, stop in column_chunks(*matrix.shape):
        squared += (matrix[:, start:stop].double() - point[start:stop]).square_().sum(dim=1)
    return squared.sqrt_()
