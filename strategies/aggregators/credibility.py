"""The four steps of credibility weighting, as pure functions on one round's clients."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedplat.updates import (
    TILE_ROWS,
    added,
    column_chunks,
    large_float32,
    out_of_range,
    run_products,
    run_squares,
    tiles,
)

from .coverage import Peers

Attitude = Literal["none", "scale", "mean", "prev", "signed_mad"]
Mix = Literal["linear", "geometric", "product"]
History = Literal["sum", "ewma"]

_NORMAL_MAD = 1.4826  # the median absolute deviation of a normal law, times this, is its standard deviation
_LEAST_MAD = 1e-6  # so that nearly identical clients are not flagged by rounding


def cosines(matrix: torch.Tensor, point: torch.Tensor) -> torch.Tensor:
    """Return the cosine of each row of (n, d) with ``point`` (d,), (n,) float64; 0 where either is zero.

    One pass over the matrix: clients that differ in behaviour may differ in the third decimal only, so sums
    are accumulated in float64; over large matrices in float32 within runs of 512 elements, which is good to 8
    decimals at least. On the CPU wherever the matrix is. O(n·d).

    >>> cosines(torch.tensor([[3.0, 0.0], [-1.0, 0.0], [0.0, 0.0]]), torch.tensor([2.0, 0.0])).tolist()
    [1.0, -1.0, 0.0]
    """
    n, d = matrix.shape
    device = matrix.device
    if large_float32(matrix, point):
        products, squares, length = _quick_products(matrix, point)
    else:
        products = torch.zeros(n, dtype=torch.float64, device=device)
        squares, length = torch.zeros_like(products), torch.zeros((), dtype=torch.float64, device=device)
        for start, stop in column_chunks(n, d, device):
            chunk, part = matrix[:, start:stop].double(), point[start:stop].to(device).double()
            products += chunk @ part
            squares += chunk.square().sum(dim=1)
            length += part @ part
    norms = squares.sqrt() * length.sqrt()
    return torch.where(norms > 0, products / norms.clamp(min=1e-300), 0.0).clamp(-1, 1).cpu()


def _quick_products(
    matrix: torch.Tensor, point: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ⟨xᵢ, point⟩ (n,), ‖xᵢ‖² (n,) and ‖point‖², in float32 within runs of 512 elements."""
    x, p = matrix.numpy(), point.numpy()
    n, d = x.shape

    def piece(bounds: tuple[int, int]) -> NDArray[np.float64]:
        start, stop = bounds
        part = p[start:stop]
        sums = np.empty((2, n + 1))
        for row in range(0, n, TILE_ROWS):
            tile = x[row : row + TILE_ROWS, start:stop]
            # The second reading of the tile comes from the cache.
            sums[0, row : row + len(tile)] = run_products(tile, part)
            sums[1, row : row + len(tile)] = run_squares(tile)
        sums[:, n] = run_squares(part[None])
        return sums

    sums = torch.from_numpy(added(piece, tiles(n, d), 2, n + 1))
    if out_of_range(sums[1, n:]):
        sums[1, n] = point.double().square().sum()
        wild = list(range(n))
    else:
        wild = sorted(
            {*out_of_range(sums[1, :n]), *torch.nonzero(~sums[0, :n].isfinite()).flatten().tolist()}
        )
    for row in wild:
        exact = matrix[row].double()
        sums[0, row], sums[1, row] = exact @ point.double(), exact @ exact
    return sums[0, :n], sums[1, :n], sums[1, n]


def attitudes(
    similarity: torch.Tensor,
    kind: Attitude,
    *,
    k: float = 2.0,
    rho: float = 1.0,
    gamma: float = 0.5,
    previous: torch.Tensor | None = None,
    peers: Peers | None = None,
) -> torch.Tensor:
    """Return what this round's behaviour adds to each client's credibility, (n,) float64.

    With s⁺ = max(s, 0): ``none`` s⁺ for everybody; ``scale`` gamma·s⁺ for those below the mean similarity;
    the others −rho for those judged badly: below the mean (``mean``), below their own last similarity
    (``prev``, from ``previous`` (n,), nan where there is none), or below median − k·MAD (``signed_mad``), the
    MAD scaled to a standard deviation and at least 1e-6. With ``peers`` mean, median and MAD are those of all
    clients over what the client covers. All five are inferred.

    >>> attitudes(torch.tensor([0.9, 0.91, 0.9, 0.1]), "signed_mad").tolist()
    [0.8999999761581421, 0.9100000262260437, 0.8999999761581421, -1.0]
    """
    s = similarity.double()
    positive = s.clamp(min=0)
    if kind == "none":
        return positive
    if peers is not None:
        average, middle, deviation = peers.usual()
    else:
        average = s.mean()
    if kind == "scale":
        return torch.where(s >= average, positive, gamma * positive)
    if kind == "mean":
        good = s >= average
    elif kind == "prev":
        good = torch.ones(len(s), dtype=torch.bool) if previous is None else ~(s < previous)
    elif peers is not None:
        good = s >= middle - k * (_NORMAL_MAD * deviation).clamp(min=_LEAST_MAD)
    else:
        middle = s.quantile(0.5)
        spread = max(_NORMAL_MAD * float((s - middle).abs().quantile(0.5)), _LEAST_MAD)
        good = s >= middle - k * spread
    return torch.where(good, positive, -rho)


def updated(credibility: torch.Tensor, added: torch.Tensor, decay: float, history: History) -> torch.Tensor:
    """Return max(0, e^−decay·c + v) for ``sum``, or max(0, g·c + (1 − g)·v) with g = e^−decay for ``ewma``.

    >>> updated(torch.tensor([1.0, 1.0]), torch.tensor([0.9, -1.0]), 0.5, "sum").tolist()
    [1.5065306425094604, 0.0]
    """
    kept = math.exp(-decay)
    return (kept * credibility + (added if history == "sum" else (1 - kept) * added)).clamp(min=0)


def mixed(shares: torch.Tensor, credibility: torch.Tensor, alpha: float, mix: Mix) -> torch.Tensor:
    """Return aggregation weights (n,) that sum to 1, from sample shares and credibilities.

    ``linear``: (1 − alpha)·d + alpha·c / Σc; ``geometric``: ∝ d^(1−alpha)·c^alpha with 0⁰ = 1; ``product``:
    ∝ d·c. If nobody has any credibility, or no weight is left, the shares themselves.
    """
    if not bool(credibility.sum() > 0):
        return shares
    if mix == "linear":
        return (1 - alpha) * shares + alpha * credibility / credibility.sum()
    weights = shares * credibility if mix == "product" else shares ** (1 - alpha) * credibility**alpha
    return weights / weights.sum() if bool(weights.sum() > 0) else shares
