"""Rules on the sorted values of each coordinate, over the clients who cover it: pure functions on (n, d).

Of the m clients that cover a coordinate, as many are cut off or kept as the rule's numbers for n clients say
for m in proportion, rounded up, and at least one or two in the middle stay. What nobody covers is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedplat.updates import added, column_chunks

from .base import Aggregate
from .coverage import Covered, Floats

Counts = NDArray[np.int64]
# Where a column's window of sorted values starts and how many values it has.
Window = Callable[[NDArray[Any], Counts], tuple[Counts, Counts]]

_LAST = np.float32(np.inf)
_SHARE_SAMPLE = 4096


def covered_trimmed_mean(matrix: torch.Tensor, trim: int, covered: Covered) -> Aggregate:
    """Return, per coordinate, the mean without the min(⌈trim·m/n⌉, ⌊(m − 1)/2⌋) values at either end.

    >>> some = Covered(torch.tensor([[True, False], [True, False], [True, True], [True, False]]))
    >>> covered_trimmed_mean(torch.tensor([[1.0, 0], [2, 0], [9, 5], [3, 0]]), 1, some).vector
    tensor([2.5000, 5.0000])
    """
    n = len(matrix)

    def window(_: NDArray[Any], m: Counts) -> tuple[Counts, Counts]:
        cut = np.minimum(-(-trim * m // n), np.maximum(m - 1, 0) // 2)
        return cut, m - 2 * cut

    return _windowed(matrix, window, covered, every=_every(covered))


def covered_median(matrix: torch.Tensor, covered: Covered) -> Aggregate:
    """Return, per coordinate, the median of those who cover it; for an even number the midpoint."""

    def window(_: NDArray[Any], m: Counts) -> tuple[Counts, Counts]:
        cut = np.maximum(m - 1, 0) // 2
        return cut, m - 2 * cut

    return _windowed(matrix, window, covered, every=_every(covered))


def covered_around_median(
    matrix: torch.Tensor, keep: int, covered: Covered, rows: torch.Tensor | None = None
) -> Aggregate:
    """Return, per coordinate, the mean of the ⌈keep·m/n⌉ nearest the median, no fewer than make the median.

    With ``rows`` (n,) only those of the matrix count, and the weights are theirs.
    """
    n = len(matrix) if rows is None else len(rows)

    def window(ordered: NDArray[Any], m: Counts) -> tuple[Counts, Counts]:
        size = np.where(m > 0, np.maximum(-(-keep * m // n), 2 - m % 2), 0)
        last = np.maximum(m - 1, 0)[:, None]
        middle = (_at(ordered, last // 2).astype(np.float64) + _at(ordered, (last + 1) // 2)) / 2
        ends = np.minimum(np.arange(n) + np.maximum(size, 1)[:, None] - 1, n - 1)
        reach = np.maximum(middle - ordered, _at(ordered, ends) - middle)
        # A window that would reach beyond the m values is no candidate.
        reach[np.arange(n) > (m - size)[:, None]] = np.inf
        return np.argmin(reach, axis=1), size

    return _windowed(matrix, window, covered, slice(None) if rows is None else rows.numpy())


def _windowed(
    matrix: torch.Tensor,
    window: Window,
    covered: Covered,
    rows: slice | Counts = slice(None),
    every: int = 1,
) -> Aggregate:
    """Return the means of windows of the sorted values, and how often a client's value was in the window.

    The latter is counted over every so many columns.
    """
    x, masks, d = matrix.numpy(), covered.mask.numpy(), covered.dim
    n = len(masks[rows, :1])
    out = np.empty(d, np.float32)
    places = np.arange(n)

    def piece(bounds: tuple[int, int]) -> Floats:
        start, stop = bounds
        block, mask = x[rows, start:stop], masks[rows, start:stop]
        ordered = np.array(np.where(mask, block, _LAST).T, order="C", copy=True)
        ordered.sort(axis=1)  # in float32, which NumPy sorts with vector instructions
        m = mask.sum(axis=0)
        first, size = window(ordered, m)
        inside = (places >= first[:, None]) & (places < (first + size)[:, None])
        total = np.einsum("ij->i", np.where(inside, ordered, 0), dtype=np.float64)
        out[start:stop] = np.divide(
            total, size, out=covered.kept(start, stop).astype(np.float64), where=m > 0
        )
        some = slice(-start % every, None, every)
        low = _at(ordered[some], first[some, None])[:, 0]
        high = _at(ordered[some], (first + np.maximum(size, 1) - 1)[some, None])[:, 0]
        kept = mask[:, some] & (block[:, some] >= low) & (block[:, some] <= high)
        shared = 1 / np.maximum(kept.sum(axis=0), 1)
        return np.append(kept @ shared, float((m[some] > 0).sum()))

    sums = torch.from_numpy(added(piece, column_chunks(n, d), n + 1))
    weights = sums[:n] / sums[n] if bool(sums[n] > 0) else sums[:n]
    return Aggregate(torch.from_numpy(out), weights, torch.from_numpy(covered.sizes.numpy()[rows] > 0))


def covered_weighted_median(matrix: torch.Tensor, weights: torch.Tensor, covered: Covered) -> torch.Tensor:
    """Return, per coordinate, where half of the weight of those who cover it is reached; midpoint if exactly.

    ``weights`` (n,) are not negative; a coordinate covered by nobody with weight keeps its value.
    """
    n, d = matrix.shape
    out = np.empty(d, np.float32)
    w = weights.double().numpy()
    for start, stop in column_chunks(n, d):
        mask = covered.mask[:, start:stop].numpy() & (w > 0)[:, None]
        values = np.where(mask, matrix[:, start:stop].numpy(), np.inf).T.astype(np.float64)
        order = np.argsort(values, axis=1, kind="stable")
        reached = np.cumsum(_at((mask * w[:, None]).T, order), axis=1)
        half = reached[:, -1:] / 2
        ordered = _at(values, order)
        low = _at(ordered, (reached >= half).argmax(axis=1)[:, None])[:, 0]
        high = _at(ordered, (reached > half).argmax(axis=1)[:, None])[:, 0]
        out[start:stop] = np.where(mask.any(axis=0), (low + high) / 2, covered.kept(start, stop))
    return torch.from_numpy(out)


def _every(covered: Covered) -> int:
    """Return which columns give a share to about two decimals, as for clients who cover everything."""
    return max(1, -(-covered.dim // _SHARE_SAMPLE))


def _at(values: NDArray[Any], places: Counts) -> NDArray[Any]:
    return np.take_along_axis(values, places, axis=1)
