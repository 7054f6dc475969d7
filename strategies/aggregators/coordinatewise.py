"""Mean, median and trimmed mean: pure functions on the matrix (n, d) of the clients' models or updates.

All three commute with adding a constant, so they may be given models or updates alike. They work through
the columns in chunks: besides the input they hold a few megabytes and the result.

With ``covered`` a coordinate is that of the clients who cover it, see
:mod:`fedplat.strategies.aggregators.coverage`; weights are then those a client has where it covers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedplat.updates import added, column_chunks, column_ranges, large_float32, plain_float32, spread

from .base import Aggregate, InfeasibleError
from .coverage import Covered, covered_mean
from .coverage_sorted import (
    covered_around_median,
    covered_median,
    covered_trimmed_mean,
    covered_weighted_median,
)

_SHARE_SAMPLE = 4096

_GROUP = 4
_STRIP = 2048  # times a group, this is too little for BLAS to start threads of its own
_PIECE_ELEMENTS = 1 << 21
_LEAST_FACTOR = 1e-30  # smaller ones, or the inverse of larger, might leave the range of float32


def mean(
    matrix: torch.Tensor, weights: torch.Tensor | None = None, covered: Covered | None = None
) -> Aggregate:
    """Return the mean Σᵢ wᵢ xᵢ / Σᵢ wᵢ, accumulated in float64.

    ``matrix`` is (n, d), ``weights`` (n,) are non-negative, by default equal. Raises ValueError if the
    weights are negative, not finite, or all zero. McMahan et al., AISTATS 2017, with sample counts.

    >>> mean(torch.tensor([[0.0], [4.0]]), torch.tensor([3.0, 1.0])).vector
    tensor([1.])
    """
    shares = shares_of(weights, len(matrix))
    if covered is not None:
        return Aggregate(covered_mean(matrix, shares, covered), shares, shares > 0)
    return Aggregate(weighted_sum(matrix, shares, torch.float32), shares, shares > 0)


def shares_of(weights: torch.Tensor | None, clients: int) -> torch.Tensor:
    """Return weights (n,) as float64 shares that sum to 1, equal ones for None.

    Raises ValueError if the weights are negative, not finite, or all zero.
    """
    shares = torch.ones(clients, dtype=torch.float64) if weights is None else weights.to(torch.float64)
    total = shares.sum()
    if bool((shares < 0).any()) or not bool(total > 0) or not bool(torch.isfinite(total)):
        raise ValueError("weights must be finite, not negative, and not all zero")
    return shares / total


def weighted_sum(
    matrix: torch.Tensor, shares: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Return Σ sharesᵢ xᵢ (d,), as ``dtype`` and on the matrix's device.

    Accumulated in float64. Where float32 is asked for and the matrix is large, four clients at a time are
    added in float32 and only these sums in float64: off by at most 5·2⁻²⁴·Σ|sharesᵢ xᵢ|, as a rule by less
    than the rounding of the result, in half the time. Equal values give exactly that value either way.
    """
    n, d = matrix.shape
    used = shares != 0
    # Whoever has no share is not multiplied by it: zero times NaN is NaN.
    rows = slice(None) if used.all() else used.nonzero().flatten()
    factors = shares[rows].double()
    if dtype == torch.float32 and len(factors) >= _GROUP and large_float32(matrix):
        sizes = factors.abs()
        if float(sizes.min()) > _LEAST_FACTOR and float(sizes.max()) < 1 / _LEAST_FACTOR:
            return _grouped_sum(matrix, rows, factors)
    out = torch.empty(d, dtype=dtype, device=matrix.device)
    factors = factors.to(matrix.device)
    for start, stop in column_chunks(n, d, matrix.device):
        out[start:stop] = factors @ matrix[rows, start:stop].double()
    return out


def _grouped_sum(matrix: torch.Tensor, rows: slice | torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    x, exact, rough = matrix.numpy(), factors.numpy(), factors.float().numpy()
    chosen = rows if isinstance(rows, slice) else rows.numpy()
    out = np.empty(x.shape[1], np.float32)

    def piece(bounds: tuple[int, int]) -> None:
        start, stop = bounds
        block = x[chosen, start:stop]
        # Only where the first two agree can all agree; there the sum is that of float64.
        equal = np.flatnonzero((block[0] == block[1]) & (block[0] == block[-1]))
        if 4 * len(equal) > stop - start:
            out[start:stop] = exact @ block.astype(np.float64)
            return
        sums = _sum_in_groups(block, rough)
        if len(equal):
            sums[equal] = exact @ block[:, equal].astype(np.float64)
        if not np.isfinite(sums).all():
            sums = exact @ block.astype(np.float64)
        out[start:stop] = sums

    # Pieces of 8 MB: with smaller ones threads wait for Python.
    strips = max(1, _PIECE_ELEMENTS // (len(factors) * _STRIP))
    for _ in spread(piece, column_ranges(x.shape[1], strips * _STRIP)):
        pass
    return torch.from_numpy(out)


def _sum_in_groups(block: NDArray[np.float32], factors: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return Σ factorsᵢ xᵢ (c,) of a block (m, c): groups of four in float32, their sums in float64."""
    m, c = block.shape
    total = np.zeros(c)
    grouped, whole = m - m % _GROUP, c - c % _STRIP
    for first, last, size in ((0, grouped, _GROUP), (grouped, m, m - grouped)):
        if first == last:
            continue
        f = factors[first:last].reshape(-1, 1, size)
        for left, right, width in ((0, whole, _STRIP), (whole, c, c - whole)):
            if left == right:
                continue
            strips = block[first:last, left:right].reshape(len(f), size, -1, width).transpose(2, 0, 1, 3)
            sums = np.matmul(f, strips)[:, :, 0]
            total[left:right] += np.add.reduce(sums, axis=1, dtype=np.float64).ravel()
    return total


def median(matrix: torch.Tensor, covered: Covered | None = None) -> Aggregate:
    """Return the coordinate-wise median; for an even number of clients the midpoint of the middle two.

    ``matrix`` is (n, d). Sample counts play no part, since a client could claim any. Tolerates fewer than n/2
    arbitrary clients. Yin et al., ICML 2018, option I.

    >>> median(torch.tensor([[1.0], [2.0], [3.0], [100.0]])).vector
    tensor([2.5000])
    """
    if covered is not None:
        return covered_median(matrix, covered)
    return _mean_of_middle(matrix, (matrix.shape[0] - 1) // 2)


def weighted_median(matrix: torch.Tensor, weights: torch.Tensor, covered: Covered | None = None) -> Aggregate:
    """Return, per coordinate, the value at which half of the weight is reached; the midpoint if exactly half.

    ``matrix`` is (n, d), ``weights`` (n,) are non-negative. A client that claims half of all samples decides
    alone, so the robust rules leave claimed counts out unless told otherwise. The weights returned are the
    shares given. Raises ValueError if the weights are negative, not finite, or all zero.

    >>> weighted_median(torch.tensor([[1.0], [2.0], [10.0]]), torch.tensor([1, 1, 3])).vector
    tensor([10.])
    """
    n, d = matrix.shape
    shares = shares_of(weights, n)
    if covered is not None:
        return Aggregate(covered_weighted_median(matrix, weights, covered), shares, shares > 0)
    # Whole counts stay whole, so that "exactly half" is told without rounding.
    plain, half = weights.to(matrix.device, torch.float64), float(weights.double().sum()) / 2
    out = torch.empty(d, dtype=torch.float32, device=matrix.device)
    for start, stop in column_chunks(n, d, matrix.device):
        values, order = matrix[:, start:stop].t().contiguous().sort(dim=1)
        reached = plain[order].cumsum(dim=1)
        low = (reached >= half).int().argmax(dim=1, keepdim=True)
        high = (reached > half).int().argmax(dim=1, keepdim=True)
        middle = (values.gather(1, low).double() + values.gather(1, high).double()) / 2
        out[start:stop] = middle.squeeze(1)
    return Aggregate(out, shares, shares > 0)


def trimmed_mean(matrix: torch.Tensor, trim: int, covered: Covered | None = None) -> Aggregate:
    """Return, per coordinate, the mean without the ``trim`` smallest and the ``trim`` largest values.

    ``matrix`` is (n, d). Tolerates ``trim`` arbitrary clients. Raises InfeasibleError unless 2·trim < n.
    Where m of the n clients cover a coordinate, ⌈trim·m/n⌉ are cut off, at most ⌊(m − 1)/2⌋ (inferred). Yin
    et al., ICML 2018, option II.

    >>> trimmed_mean(torch.tensor([[1.0], [1], [1], [1], [5], [5], [9]]), 2).vector
    tensor([2.3333])
    """
    n = matrix.shape[0]
    check_trim(n, trim)
    if covered is not None:
        return covered_trimmed_mean(matrix, trim, covered)
    return _mean_of_middle(matrix, trim)


def mean_around_median(
    matrix: torch.Tensor,
    keep: int,
    rows: torch.Tensor | None = None,
    covered: Covered | None = None,
) -> Aggregate:
    """Return, per coordinate, the mean of the ``keep`` values nearest the median; on a tie the smaller ones.

    ``matrix`` is (n, d), 1 ≤ keep ≤ n; with ``rows`` (m,) only those count, and the weights are theirs. The
    values nearest any number are neighbours once sorted, so it is the mean of a window of the sorted values.
    """
    if covered is not None:
        return covered_around_median(matrix, keep, covered, rows)
    n, d = len(matrix) if rows is None else len(rows), matrix.shape[1]
    if plain_float32(matrix):
        return _mean_around_median(matrix.numpy(), keep, slice(None) if rows is None else rows.numpy())
    chosen = slice(None) if rows is None else rows
    out = torch.empty(d, dtype=torch.float32, device=matrix.device)
    counts = torch.zeros(n, dtype=torch.float64, device=matrix.device)
    for start, stop in column_chunks(n, d, matrix.device):
        chunk = matrix[chosen, start:stop]
        ordered = _sorted_columns(chunk).double()
        middle = (ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2
        windows = ordered.unfold(1, keep, 1)
        # The window whose farther end is nearest; the first of equals has the smaller values.
        reach = torch.maximum(middle[:, None] - windows[..., 0], windows[..., -1] - middle[:, None])
        first = reach.argmin(dim=1, keepdim=True)
        inside = first + torch.arange(keep, device=matrix.device)
        out[start:stop] = ordered.gather(1, inside).mean(dim=1)
        low, high = ordered.gather(1, first).t(), ordered.gather(1, first + keep - 1).t()
        kept = ((chunk >= low) & (chunk <= high)).double()
        counts += (kept / kept.sum(dim=0)).sum(dim=1)
    return Aggregate(out, (counts / d).cpu(), torch.ones(n, dtype=torch.bool))


def _mean_around_median(x: NDArray[np.float32], keep: int, rows: slice | NDArray[np.int64]) -> Aggregate:
    """Do the same on the CPU, on several threads."""
    n, d = x[rows, :1].shape[0], x.shape[1]
    out = np.empty(d, np.float32)
    places = np.arange(n)

    def piece(bounds: tuple[int, int]) -> NDArray[np.float64]:
        start, stop = bounds
        block = x[rows, start:stop]
        ordered = _sorted_rows(block)
        low, high = ordered[:, (n - 1) // 2].astype(np.float64), ordered[:, n // 2].astype(np.float64)
        middle = ((low + high) / 2)[:, None]
        reach = np.maximum(middle - ordered[:, : n - keep + 1], ordered[:, keep - 1 :] - middle)
        first = np.argmin(reach, axis=1)[:, None]
        window = (places >= first) & (places < first + keep)
        out[start:stop] = np.einsum("ij->i", np.where(window, ordered, 0), dtype=np.float64) / keep
        low = np.take_along_axis(ordered, first, axis=1)[:, 0]
        high = np.take_along_axis(ordered, first + keep - 1, axis=1)[:, 0]
        kept = (block >= low) & (block <= high)
        shared = 1 / np.add.reduce(kept, axis=0, dtype=np.float64)
        return np.einsum("ij,j->i", kept, shared, dtype=np.float64)

    counts = added(piece, column_chunks(n, d), n)
    return Aggregate(torch.from_numpy(out), torch.from_numpy(counts / d), torch.ones(n, dtype=torch.bool))


def check_trim(clients: int, trim: int) -> None:
    """Raise InfeasibleError unless a trimmed mean of that many clients has anything left."""
    if trim < 0 or 2 * trim >= clients:
        raise InfeasibleError(f"trimmed mean: 2 x {trim} trimmed clients must be fewer than n = {clients}")


def trim_count(beta: float, clients: int) -> int:
    """Return ⌈beta·n⌉, so that a positive share always trims somebody (a floor of 0.2 x 4 would trim none).

    >>> trim_count(0.2, 4), trim_count(0.3, 20), trim_count(0.0, 9)
    (1, 6, 0)
    """
    return math.ceil(round(beta * clients, 9))


def _mean_of_middle(matrix: torch.Tensor, trim: int) -> Aggregate:
    n, d = matrix.shape
    everybody = torch.ones(n, dtype=torch.bool)
    if plain_float32(matrix):
        return Aggregate(_sorted_middle(matrix.numpy(), trim), _shares(matrix, trim), everybody)
    out = torch.empty(d, dtype=torch.float32, device=matrix.device)
    for start, stop in column_chunks(n, d, matrix.device):
        middle = _sorted_columns(matrix[:, start:stop])[:, trim : n - trim]
        out[start:stop] = middle.double().mean(dim=1)
    return Aggregate(out, _shares(matrix, trim), everybody)


def _sorted_middle(x: NDArray[np.float32], trim: int) -> torch.Tensor:
    """Do the same on the CPU, on several threads."""
    n, d = x.shape
    out = np.empty(d, np.float32)

    def piece(bounds: tuple[int, int]) -> None:
        start, stop = bounds
        middle = _sorted_rows(x[:, start:stop])[:, trim : n - trim]
        out[start:stop] = np.einsum("ij->i", middle, dtype=np.float64) / middle.shape[1]

    for _ in spread(piece, column_chunks(n, d)):
        pass
    return torch.from_numpy(out)


def _sorted_rows(block: NDArray[Any]) -> NDArray[Any]:
    """Return the values of each column of a block (n, c) in order, as rows (c, n)."""
    # NumPy sorts short rows with vector instructions: measured 5 to 10 times faster than torch, and than a
    # sorting network of minimum and maximum on whole rows of the block. The block itself is left as it is.
    rows = np.array(block.T, order="C", copy=True)
    rows.sort(axis=1)
    return rows


def _sorted_columns(matrix: torch.Tensor) -> torch.Tensor:
    """Return the values of each column (d, n), sorted; sorting runs along contiguous memory."""
    if matrix.device.type == "cpu":
        return torch.from_numpy(_sorted_rows(matrix.numpy()))
    return matrix.t().contiguous().sort(dim=1).values


def _shares(matrix: torch.Tensor, trim: int) -> torch.Tensor:
    """Estimate each client's share: how often its value is among the middle ones, equal values alike.

    Looks at up to 4,096 evenly spaced coordinates, which costs little and gives about two decimals.
    """
    n, d = matrix.shape
    sample = matrix[:, :: max(1, -(-d // _SHARE_SAMPLE))]
    ordered = _sorted_columns(sample)
    inside = ((sample >= ordered[:, trim]) & (sample <= ordered[:, n - trim - 1])).double()
    return (inside / inside.sum(dim=0)).mean(dim=1).cpu()
