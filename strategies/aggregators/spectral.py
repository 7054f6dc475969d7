"""Divide and conquer: who sticks out along the direction in which updates differ most; on (n, d)."""

from __future__ import annotations

import math

import numpy as np
import torch

from fedplat.updates import column_chunks

from .base import Aggregate, InfeasibleError
from .coordinatewise import mean
from .coverage import Covered

_LEAST_PART = 1e-12  # of the squares of a direction below which what a client covers of it is rounding


def removal_count(c: float, f: int) -> int:
    """Return ⌈c·f⌉, the number of clients left out in one pass.

    >>> removal_count(1.0, 3), removal_count(1.5, 3), removal_count(0.0, 3)
    (3, 5, 0)
    """
    return math.ceil(round(c * f, 9))


def check_dnc(clients: int, f: int, c: float = 1.0) -> None:
    """Raise InfeasibleError unless ⌈c·f⌉ < n."""
    out = removal_count(c, f)
    if f < 0 or out >= clients:
        raise InfeasibleError(f"DnC: c x f = {c:g} x {f} = {out} must be less than n = {clients}")


def outlier_scores(matrix: torch.Tensor, covered: Covered | None = None) -> torch.Tensor:
    """Return ⟨xᵢ − mean, v⟩² (n,) float64, with v the top right singular vector of the centred matrix (n, d).

    From the eigenvectors of the (n, n) products of centred rows, in float64, so nothing is left to chance and
    v needs no sign. O(n²·d + n³). With ``covered`` columns are centred over those who cover them, and a score
    is taken along the part of v that a client covers, scaled to length 1: chance alone sticks out no farther
    along a short part than along a long one (inferred). 0 for who covers nothing of v.

    >>> outlier_scores(torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 0.0]])).round(decimals=6).tolist()
    [1.0, 1.0, 4.0]
    """
    n, d = matrix.shape
    if covered is not None:
        return _covered_scores(matrix, covered)
    gram = torch.zeros(n, n, dtype=torch.float64)
    for start, stop in column_chunks(n, d):
        chunk = matrix[:, start:stop].double()
        chunk -= chunk.mean(dim=0)
        gram += chunk @ chunk.t()
    values, vectors = torch.linalg.eigh(gram)
    return values[-1].clamp(min=0) * vectors[:, -1].square()


def _covered_scores(matrix: torch.Tensor, covered: Covered) -> torch.Tensor:
    n, d = matrix.shape
    plain = Covered(covered.mask)

    def centred(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, mask = map(torch.from_numpy, plain.block(matrix, start, stop))
        return x - mask * (x.sum(dim=0) / mask.sum(dim=0).clamp(min=1)), mask

    gram = torch.zeros(n, n, dtype=torch.float64)
    for start, stop in column_chunks(n, d):
        chunk, _ = centred(start, stop)
        gram += chunk @ chunk.t()
    _, vectors = torch.linalg.eigh(gram)
    along, lengths = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for start, stop in column_chunks(n, d):
        chunk, mask = centred(start, stop)
        v = vectors[:, -1] @ chunk
        along += chunk @ v
        lengths += mask @ v.square()
    known = lengths > _LEAST_PART * float(lengths.max())
    return torch.where(known, along.square() / lengths.clamp(min=1e-300), 0.0)


def dnc(
    matrix: torch.Tensor,
    f: int,
    rng: np.random.Generator,
    *,
    c: float = 1.0,
    iterations: int = 1,
    subset: int = 10_000,
    covered: Covered | None = None,
) -> Aggregate:
    """Return the mean of the updates that stick out least along the direction of largest spread.

    In each of ``iterations`` passes, ``subset`` of the d coordinates are drawn from ``rng`` and the ⌈c·f⌉
    clients with the highest outlier scores are left out, of equals the later. The mean is over those kept in
    every pass or, if there are none, in the most passes (inferred). Tolerates ``f`` liars. Raises
    InfeasibleError unless ⌈c·f⌉ < n, ValueError unless iterations and subset are at least 1.
    O(iterations·n²·subset + n·d). Shejwalkar and Houmansadr, NDSS 2021.

    >>> dnc(torch.tensor([[0.0], [1.0], [2.0], [50.0]]), 1, np.random.default_rng(0)).vector
    tensor([1.])
    """
    n, d = matrix.shape
    check_dnc(n, f, c)
    if iterations < 1 or subset < 1:
        raise ValueError(f"iterations and subset must be at least 1, got {iterations} and {subset}")
    kept = torch.zeros(n, dtype=torch.float64)
    scores = torch.zeros(n, dtype=torch.float64)
    for _ in range(iterations):
        part, mask = matrix, None if covered is None else covered.mask
        if subset < d:
            columns = torch.from_numpy(np.sort(rng.choice(d, subset, replace=False, shuffle=False)))
            part = matrix[:, columns]
            mask = None if mask is None else mask[:, columns]
        found = outlier_scores(part, None if mask is None else Covered(mask))
        kept[found.sort(stable=True).indices[: n - removal_count(c, f)]] += 1
        scores += found / iterations
    result = mean(matrix, (kept == kept.max()).double(), covered)
    return Aggregate(result.vector, result.weights, result.accepted, scores={"outlier": scores})
