"""FLAME: the largest group of like-minded clients, clipped, with noise; on the matrix (n, d) of updates."""

from __future__ import annotations

import numpy as np
import torch

from .base import Aggregate
from .coverage import Covered, covered_distances
from .distances import distances_to
from .foolsgold import pairwise_cosines
from .geometric import clipped_sum, with_noise


def majority_cluster(distances: torch.Tensor) -> torch.Tensor:
    """Return who (n,) bool belongs to the one cluster of more than half the clients, by HDBSCAN.

    ``distances`` is (n, n), symmetric. Clusters have at least ⌊n/2⌋ + 1 members, so there is one at most; of
    clients that are much alike it holds the densest and may leave out as many as fit. If there is none,
    everybody is in (inferred). O(n²). The paper's min_samples = 1 does not count the client itself, which
    scikit-learn does.

    >>> majority_cluster(torch.tensor([[0.0, 0.1, 0.9], [0.1, 0.0, 0.9], [0.9, 0.9, 0.0]])).tolist()
    [True, True, False]
    """
    from sklearn.cluster import HDBSCAN

    n = len(distances)
    if n == 1:
        return torch.ones(1, dtype=torch.bool)
    clustering = HDBSCAN(
        metric="precomputed",
        min_cluster_size=n // 2 + 1,
        min_samples=2,
        allow_single_cluster=True,
        copy=True,
    )
    inside = torch.from_numpy(clustering.fit_predict(distances.double().numpy()) >= 0)
    return inside if bool(inside.any()) else ~inside


def flame(
    matrix: torch.Tensor,
    compared: torch.Tensor | None = None,
    *,
    noise: float = 0.0,
    rng: np.random.Generator | None = None,
    covered: Covered | None = None,
) -> Aggregate:
    """Return the mean of the majority's updates, cut to the median length, plus noise.

    ``matrix`` (n, d) holds updates. Clients are clustered by 1 − cosine of ``compared`` (n, d), by default
    the updates; the paper takes the models. With S the median of all n lengths, the mean is over xᵢ·min(1, S
    / ‖xᵢ‖) of the cluster, and noise from ``rng`` has a standard deviation of ``noise``·S per coordinate.
    With ``covered`` cosines are over what two clients share (0 if nothing), lengths are times √(d/N), and the
    mean is over those of the cluster who cover an element (inferred). ``diagnostics`` has both as ``bound``
    and ``sigma``. Raises ValueError unless noise ≥ 0, and for noise without ``rng``. O(n²·d). Nguyen et al.,
    USENIX Security 2022.

    >>> flame(torch.tensor([[2.0, 0.0], [2.0, 0.1], [4.0, 0.1], [-9.0, 1.0]])).accepted.tolist()
    [True, True, True, False]
    """
    inside = majority_cluster(1 - pairwise_cosines(matrix if compared is None else compared, covered))
    if covered is None:
        lengths = distances_to(matrix, torch.zeros(matrix.shape[1]))
    else:
        lengths = covered_distances(matrix, None, covered) * covered.stretch.sqrt()
    bound = float(lengths.quantile(0.5))
    # A zero update is shorter than any bound: its factor is 1.
    factors = torch.where(lengths > bound, bound / lengths, 1.0)
    shares = inside * factors / inside.sum()
    sigma = noise * bound
    summed = clipped_sum(matrix, shares, inside.double() / inside.sum(), covered)
    vector = with_noise(summed, sigma, rng, covered).float()
    total = shares.sum()
    weights = shares / total if bool(total > 0) else inside / inside.sum()
    return Aggregate(vector, weights, inside, diagnostics={"bound": bound, "sigma": sigma})
