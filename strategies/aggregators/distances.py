"""Distances between clients, accurate enough to rank them by."""

from __future__ import annotations

import torch

from fedplat.updates import column_chunks


def squared_distances(matrix: torch.Tensor) -> torch.Tensor:
    """Return ‖xᵢ − xⱼ‖² (n, n) float64, symmetric, zero on the diagonal, never negative.

    The products of a·a + b·b − 2a·b are formed in float64: in float32 they cancel, and models that differ
    by a ten-thousandth of their length come out at distances of zero and below. O(n²·d) time; a few
    megabytes besides the input.
    """
    n, d = matrix.shape
    gram = torch.zeros(n, n, dtype=torch.float64)
    for start, stop in column_chunks(n, d):
        chunk = matrix[:, start:stop].double()
        gram += chunk @ chunk.t()
    norms = gram.diagonal()
    squared = (norms[:, None] + norms[None, :] - 2 * gram).clamp_(min=0)
    squared = (squared + squared.t()) / 2
    squared.fill_diagonal_(0)
    return squared


def distances_to(matrix: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Return ‖xᵢ − point‖ (n,) float64, from differences."""
    squared = torch.zeros(len(matrix), dtype=torch.float64)
    for start, stop in column_chunks(*matrix.shape):
        squared += (matrix[:, start:stop].double() - point[start:stop]).square_().sum(dim=1)
    return squared.sqrt_()
