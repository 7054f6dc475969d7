"""What comes before a rule: mixing and clipping, as pure functions on the matrix (n, d) of a round.

Every step is linear once the updates are known. It is described by factors (n,), one per client, or by a
mixing matrix (k, n) whose rows sum to 1; both are float64. So the shares of the rule behind it can be led
back to the clients: ``shares @ mixing``.
"""

from __future__ import annotations

import numpy as np
import torch

from fedplat.updates import column_chunks

from .base import InfeasibleError
from .coverage import Covered
from .distances import squared_distances

_TINY = 1e-300


def check_neighbours(clients: int, f: int) -> None:
    """Raise InfeasibleError unless 0 ≤ 2f < n."""
    if f < 0 or 2 * f >= clients:
        raise InfeasibleError(f"nearest-neighbour mixing: 2f = {2 * f} must be less than n = {clients}")


def check_adaptive(clients: int, f: int) -> None:
    """Raise InfeasibleError unless 0 ≤ 2f < n."""
    if f < 0 or 2 * f >= clients:
        raise InfeasibleError(f"adaptive clipping: 2f = {2 * f} must be less than n = {clients}")


def bucketing(clients: int, size: int, rng: np.random.Generator) -> torch.Tensor:
    """Return the mixing matrix (⌈n/size⌉, n) of random buckets; a row is the mean of its bucket.

    Buckets are listed by their first member; if ``size`` does not divide n, one of them is smaller. Raises
    ValueError unless size ≥ 1. Karimireddy et al., ICLR 2022.

    >>> bucketing(3, 2, np.random.default_rng(0)).sum(dim=1).tolist()
    [1.0, 1.0]
    """
    if size < 1:
        raise ValueError(f"a bucket needs at least one client, got size = {size}")
    order = rng.permutation(clients).tolist()
    buckets = sorted(sorted(order[start : start + size]) for start in range(0, clients, size))
    mixing = torch.zeros(len(buckets), clients, dtype=torch.float64)
    for row, members in enumerate(buckets):
        mixing[row, members] = 1 / len(members)
    return mixing


def nearest_neighbours(matrix: torch.Tensor, f: int, covered: Covered | None = None) -> torch.Tensor:
    """Return the mixing matrix (n, n) that replaces a client by the mean of the n − f nearest to it.

    The client itself is one of them; of equally near ones the first are taken. ``matrix`` is (n, d); with
    ``covered`` distances are over what two clients share. Raises
    InfeasibleError unless 2f < n. O(n²·d). Allouah et al., AISTATS 2023.

    >>> nearest_neighbours(torch.tensor([[0.0], [1.0], [9.0]]), 1) @ torch.tensor([0.0, 1, 9]).double()
    tensor([0.5000, 0.5000, 5.0000], dtype=torch.float64)
    """
    n = len(matrix)
    check_neighbours(n, f)
    # Below zero, so that a client comes before others at the same place.
    squared = squared_distances(matrix, covered).nan_to_num(nan=float("inf")).fill_diagonal_(-1)
    nearest = squared.sort(dim=1, stable=True).indices[:, : n - f]
    return torch.zeros(n, n, dtype=torch.float64).scatter_(1, nearest, 1 / (n - f))


def clip_factors(norms: torch.Tensor, bound: float) -> torch.Tensor:
    """Return the factors (n,) that bring updates with L2 norms ``norms`` (n,) down to ``bound``.

    A zero update has a factor of 1. Raises ValueError unless bound ≥ 0.

    >>> clip_factors(torch.tensor([0.0, 1.0, 5.0]), 2.0).tolist()
    [1.0, 1.0, 0.4]
    """
    if not bound >= 0:
        raise ValueError(f"bound must not be negative, got {bound}")
    norms = norms.double()
    return torch.where(norms > bound, bound / norms.clamp(min=_TINY), 1.0)


def adaptive_bound(norms: torch.Tensor, f: int) -> float:
    """Return the norm to clip to: the largest of ``norms`` (n,) once the ⌊2f(n − f)/n⌋ largest are left out.

    Raises InfeasibleError unless 2f < n. Allouah et al., 2024, arXiv 2405.14432 (ARC).

    >>> adaptive_bound(torch.tensor([5.0, 1.0, 4.0, 2.0]), 1)
    4.0
    """
    n = len(norms)
    check_adaptive(n, f)
    # In whole numbers: in floats 2 · f / n · (n − f) falls short for n = 242, f = 33.
    return float(norms.sort().values[n - 2 * f * (n - f) // n - 1])


def mixed(
    matrix: torch.Tensor,
    mixing: torch.Tensor,
    origin: torch.Tensor | None = None,
    coverage: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return origin + mixing · (matrix − origin) as a new float32 matrix, accumulated in float64.

    ``matrix`` is (n, d) of finite numbers, ``origin`` (d,) zero by default, ``mixing`` factors (n,) or a
    matrix (k, n). With ``coverage`` (n, d) an element is the mean over those clients of its row that trained
    it, and stays at the origin if none did. O(k·n·d) for a matrix, O(n·d) for factors.

    >>> mixed(torch.tensor([[2.0], [4.0]]), torch.tensor([[0.5, 0.5]]).double())
    tensor([[3.]])
    """
    d = matrix.shape[1]
    out = torch.empty(len(mixing), d, dtype=torch.float32)
    for start, stop in column_chunks(*matrix.shape):
        base = torch.zeros(stop - start) if origin is None else origin[start:stop]
        part = matrix[:, start:stop].double() - base
        if mixing.ndim == 1:
            part *= mixing[:, None]
        elif coverage is None:
            part = mixing @ part
        else:
            trained = coverage[:, start:stop].double()
            part = mixing @ part.mul_(trained) / (mixing @ trained).clamp(min=_TINY)
        out[:, start:stop] = part + base
    return out


def mixed_coverage(coverage: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Return which elements (k, d) some client of each row of ``mixing`` (k, n) trained."""
    out = torch.empty(len(mixing), coverage.shape[1], dtype=torch.bool)
    for start, stop in column_chunks(*coverage.shape):
        out[:, start:stop] = mixing @ coverage[:, start:stop].double() > 0
    return out
