"""Residual-based reweighting: clients whose parameters lie off a robust line lose weight."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fedplat.updates import column_chunks

from .base import Aggregate
from .coordinatewise import mean, shares_of
from .coverage import Covered

# The median absolute deviation of a normal variable is 1 / 1.4826 of its standard deviation.
_TO_DEVIATIONS = 1.4826


def residual_reweighting(
    matrix: torch.Tensor, scale: float = 2.0, threshold: float = 0.1, covered: Covered | None = None
) -> Aggregate:
    """Return the mean weighted by how well each client's parameters fit the others'.

    Per parameter, the sorted values are a line over their ranks 0 … n − 1: its slope is the repeated median
    (the median over i of the medians over j of the slopes from i to j), and it passes through the medians.
    With residuals rᵢ, leverages hᵢ and τ = 1.4826·(1 + 5/(n − 1))·median |r|, the weight of client i is
    min(1, scale·√(2/n)·√(1 − hᵢ)·τ / |rᵢ|). A value whose weight is below ``threshold`` is put onto the line.
    The client's weight is the sum over all parameters, each counted by the standard deviation of its
    weights, divided by the largest sum and squared.

    ``matrix`` is (n, d). One step of reweighting, as the authors' code has it; from there too are the
    smallest |r| being left out of the median, the square, and counting by deviation. Inferred: equal values
    share their mean rank, τ gets no constant added, with no deviation anywhere all clients count alike, and
    fewer than three give their mean. With ``covered`` a parameter's line is through those who cover it, where
    that is three or more, and a client's weight is the mean over its own parameters (inferred). Raises
    ValueError unless scale > 0 and 0 ≤ threshold ≤ 1.
    O(n² log n · d). Fu et al., 2019, arXiv 1912.11464.

    >>> residual_reweighting(torch.tensor([[1.0], [2.0], [3.0], [4.0], [90.0]])).vector < 4
    tensor([True])
    """
    n, d = matrix.shape
    if not scale > 0 or not 0 <= threshold <= 1:
        raise ValueError(
            f"scale must be above 0 and threshold from 0 to 1, got scale = {scale}, threshold = {threshold}"
        )
    if n < 3:
        return mean(matrix, None, covered)
    if covered is not None:
        return _covered_reweighting(matrix, scale, threshold, covered)
    slopes = torch.empty(d, dtype=torch.float64)
    sums = torch.zeros(n, dtype=torch.float64)
    # A column needs n x n slopes.
    for start, stop in column_chunks(n * n, d):
        values = matrix[:, start:stop].t().contiguous()
        slopes[start:stop] = _repeated_median(_sorted(values))
        weights, _ = _fit(values.double(), slopes[start:stop], scale)
        sums += (weights * weights.std(dim=1, keepdim=True)).sum(dim=0)
    if not bool(sums.sum() > 0):
        sums = torch.ones(n, dtype=torch.float64)
    shares = shares_of((sums / sums.max()).square(), n)
    out = torch.empty(d, dtype=torch.float32)
    for start, stop in column_chunks(n, d):
        values = matrix[:, start:stop].t().contiguous().double()
        weights, line = _fit(values, slopes[start:stop], scale)
        out[start:stop] = torch.where(weights < threshold, line, values) @ shares
    return Aggregate(out, shares, shares > 0)


def _covered_reweighting(matrix: torch.Tensor, scale: float, threshold: float, covered: Covered) -> Aggregate:
    """Do the same where m of the n clients cover a column, for all columns of one m together."""
    n, d = matrix.shape
    sums, seen = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    slopes = torch.zeros(d, dtype=torch.float64)
    for columns, clients, values in _by_cover(matrix, covered, n * n):
        if clients.shape[1] >= 3:
            slopes[columns] = _repeated_median(_sorted(values.float()))
            weights, _ = _fit(values, slopes[columns], scale)
            counted = weights * weights.std(dim=1, keepdim=True)
            sums.index_add_(0, clients.flatten(), counted.flatten())
            seen.index_add_(0, clients.flatten(), torch.ones(clients.numel(), dtype=torch.float64))
    means = sums / seen.clamp(min=1)
    if not bool(means.sum() > 0):
        means = torch.ones(n, dtype=torch.float64)
    # Of whom nothing could be judged, nothing is thought.
    means = torch.where(seen > 0, means, means[seen > 0].quantile(0.5) if seen.any() else 1.0)
    shares = shares_of((means / means.max()).square(), n)
    out = torch.from_numpy(covered.kept(0, d))
    for columns, clients, values in _by_cover(matrix, covered, n):
        fitted = values
        if clients.shape[1] >= 3:
            weights, line = _fit(values, slopes[columns], scale)
            fitted = torch.where(weights < threshold, line, values)
        factors = shares[clients]
        total = factors.sum(dim=1)
        some = total > 0
        out[columns[some]] = ((fitted * factors).sum(dim=1)[some] / total[some]).float()
    return Aggregate(out, shares, shares > 0)


def _by_cover(
    matrix: torch.Tensor, covered: Covered, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield columns (b,) covered by m clients each, who they are (b, m), and their values (b, m) float64."""
    for start, stop in column_chunks(rows, matrix.shape[1]):
        mask = covered.mask[:, start:stop].t()
        counts = mask.sum(dim=1)
        for m in counts.unique().tolist():
            if m > 0:
                columns = (counts == m).nonzero().flatten()
                clients = mask[columns].nonzero()[:, 1].view(-1, m)
                values = matrix[clients, start + columns[:, None]].double()
                yield start + columns, clients, values


def _repeated_median(ordered: torch.Tensor) -> torch.Tensor:
    """Return the repeated median slope (b,) of sorted values (b, n) over their ranks."""
    n = ordered.shape[1]
    ranks = torch.arange(n, dtype=ordered.dtype)
    # Sorted last and left out: a point has no slope to itself.
    steps = (ranks[None, :] - ranks[:, None]).fill_diagonal_(1)
    slopes = (ordered[:, None, :] - ordered[:, :, None]).div_(steps)
    slopes.diagonal(dim1=1, dim2=2).fill_(float("inf"))
    return _median(_middle(_sorted(slopes)[..., : n - 1]).double())


def _median(values: torch.Tensor) -> torch.Tensor:
    """Return the median along the last dimension, the midpoint of the middle two if their number is even."""
    return _middle(_sorted(values))


def _sorted(values: torch.Tensor) -> torch.Tensor:
    # Along short rows numpy sorts ten times faster than torch.
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))


def _middle(ordered: torch.Tensor) -> torch.Tensor:
    n = ordered.shape[-1]
    return (ordered[..., (n - 1) // 2] + ordered[..., n // 2]) / 2


def _fit(values: torch.Tensor, slopes: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the points on the line of values (b, n); both (b, n)."""
    n = values.shape[1]
    ordered = _sorted(values)
    below = torch.searchsorted(ordered, values)
    ranks = (below + torch.searchsorted(ordered, values, right=True) - 1).double() / 2
    from_middle = ranks - (n - 1) / 2
    line = _middle(ordered)[:, None] + slopes[:, None] * from_middle
    residuals = (values - line).abs()
    tau = _TO_DEVIATIONS * (1 + 5 / (n - 1)) * _middle(_sorted(residuals)[:, 1:])
    # The sum of (rank − middle)² is n(n² − 1)/12.
    leverage = 1 / n + from_middle.square() / (n * (n * n - 1) / 12)
    allowed = scale * (2 / n) ** 0.5 * (1 - leverage).clamp(min=0).sqrt() * tau[:, None]
    return torch.where(residuals > allowed, allowed / residuals, 1.0), line
