"""Krum and the rules built on it: pure functions on the matrix (n, d) of the clients' updates."""

from __future__ import annotations

import torch

from .base import Aggregate, InfeasibleError
from .coordinatewise import mean, mean_around_median
from .coverage import Covered
from .distances import squared_distances


def check_krum(clients: int, f: int, m: int | None = 1) -> None:
    """Raise InfeasibleError unless 2f + 2 < n, and 1 ≤ m ≤ n where ``m`` is given."""
    if f < 0 or 2 * f + 2 >= clients:
        raise InfeasibleError(f"Krum: 2f + 2 = {2 * f + 2} must be less than n = {clients}")
    if m is not None and not 1 <= m <= clients:
        raise InfeasibleError(f"Multi-Krum: m = {m} must be from 1 to n = {clients}")


def check_bulyan(clients: int, f: int) -> None:
    """Raise InfeasibleError unless n ≥ 4f + 3."""
    if f < 0 or clients < 4 * f + 3:
        raise InfeasibleError(f"Bulyan: n = {clients} must be at least 4f + 3 = {4 * f + 3}")


def check_meamed(clients: int, f: int) -> None:
    """Raise InfeasibleError unless 2f < n."""
    if f < 0 or 2 * f >= clients:
        raise InfeasibleError(f"Meamed: 2f = {2 * f} must be less than n = {clients}")


def krum_scores(squared: torch.Tensor, neighbours: int) -> torch.Tensor:
    """Return each client's sum of squared distances to its nearest ``neighbours`` others, (n,) float64."""
    others = squared.clone().fill_diagonal_(float("inf"))
    return others.sort(dim=1).values[:, :neighbours].sum(dim=1)


def krum(matrix: torch.Tensor, f: int, covered: Covered | None = None) -> Aggregate:
    """Return the update closest to its n − f − 2 nearest others; on a tie the first of them.

    The score is Σ ‖xᵢ − xⱼ‖² over those neighbours. Tolerates ``f`` arbitrary clients. Raises InfeasibleError
    unless 2f + 2 < n. O(n²·d). Blanchard et al., NeurIPS 2017.

    >>> krum(torch.tensor([[0.0], [2], [3], [4], [9], [11], [13]]), 2).vector
    tensor([2.])
    """
    return multi_krum(matrix, f, 1, covered)


def multi_krum(
    matrix: torch.Tensor, f: int, m: int | None = None, covered: Covered | None = None
) -> Aggregate:
    """Return the plain mean of the ``m`` updates with the lowest Krum scores, by default m = n − f.

    With ``covered`` distances are over what two clients share, and the mean is over the chosen who cover an
    element; where none of them does, nothing changes (inferred, as in all rules here that choose clients).
    Raises InfeasibleError unless 2f + 2 < n and 1 ≤ m ≤ n. O(n²·d). Blanchard et al., NeurIPS 2017.
    """
    n = len(matrix)
    check_krum(n, f, m)
    m = n - f if m is None else m
    scores = krum_scores(squared_distances(matrix, covered), n - f - 2)
    weights = torch.zeros(n, dtype=torch.float64)
    weights[torch.sort(scores, stable=True).indices[:m]] = 1
    return mean(matrix, weights, covered)


def bulyan(matrix: torch.Tensor, f: int, covered: Covered | None = None) -> Aggregate:
    """Choose n − 2f updates by repeated Krum; average, per coordinate, the n − 4f nearest their median.

    Krum's scores are computed anew among those left after every choice, with n' − f − 2 neighbours of n'
    left, and none once that is below 1. With one neighbour or none, clients tie by construction; then the
    one closest to all that are left is taken, and only then the first (the paper does not say). Raises
    InfeasibleError unless n ≥ 4f + 3. O(n²·d). El Mhamdi et al., ICML 2018.
    """
    n = len(matrix)
    check_bulyan(n, f)
    squared = squared_distances(matrix, covered).nan_to_num(nan=float("inf"))
    left = list(range(n))
    chosen: list[int] = []
    while len(chosen) < n - 2 * f:
        among = squared[left][:, left]
        scores = krum_scores(among, max(len(left) - f - 2, 0)).tolist()
        ranks = zip(scores, among.sum(dim=1).tolist(), range(len(left)), strict=True)
        chosen.append(left.pop(min(ranks)[2]))
    # The matrix keeps its order, so that equally near values are taken in the order of the clients.
    rows = torch.tensor(sorted(chosen))
    nearest = mean_around_median(matrix, n - 4 * f, rows, covered)
    weights = torch.zeros(n, dtype=torch.float64)
    weights[rows] = nearest.weights
    return Aggregate(nearest.vector, weights, weights > 0)


def meamed(matrix: torch.Tensor, f: int, covered: Covered | None = None) -> Aggregate:
    """Return, per coordinate, the mean of the n − f values nearest the median.

    Raises InfeasibleError unless 0 ≤ 2f < n. Xie et al., 2018.

    >>> meamed(torch.tensor([[0.0], [1.0], [2.0], [100.0]]), 1).vector
    tensor([1.])
    """
    n = len(matrix)
    check_meamed(n, f)
    return mean_around_median(matrix, n - f, covered=covered)
