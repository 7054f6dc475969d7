"""FLAME: the largest group of like-minded clients, clipped, with noise; on the matrix (n, d) of updates."""

from __future__ import annotations

import numpy as np
import torch

from .base import Aggregate
from .coordinatewise import weighted_sum
from .distances import distances_to
from .foolsgold import pairwise_cosines
from .geometric import with_noise


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
) -> Aggregate:
    """Return the mean of the majority's updates, cut to the median length, plus noise.

    ``matrix`` (n, d) holds updates. Clients are clustered by 1 − cosine of ``compared`` (n, d), by default
    the updates; the paper takes the models. With S the median of all n lengths, the mean is over
    xᵢ·min(1, S / ‖xᵢ‖) of the cluster, and noise from ``rng`` has a standard deviation of ``noise``·S per
    coordinate. ``diagnostics`` has both as ``bound`` and ``sigma``. Raises ValueError unless noise ≥ 0, and
    for noise without ``rng``. O(n²·d). Nguyen et al., USENIX Security 2022.

    >>> flame(torch.tensor([[2.0, 0.0], [2.0, 0.1], [4.0, 0.1], [-9.0, 1.0]])).accepted.tolist()
    [True, True, True, False]
    """
    inside = majority_cluster(1 - pairwise_cosines(matrix if compared is None else compared))
    lengths = distances_to(matrix, torch.zeros(matrix.shape[1]))
    bound = float(lengths.quantile(0.5))
    # A zero update is shorter than any bound: its factor is 1.
    factors = torch.where(lengths > bound, bound / lengths, 1.0)
    shares = inside * factors / inside.sum()
    sigma = noise * bound
    vector = with_noise(weighted_sum(matrix, shares), sigma, rng).float()
    total = shares.sum()
    weights = shares / total if bool(total > 0) else inside / inside.sum()
    return Aggregate(vector, weights, inside, diagnostics={"bound": bound, "sigma": sigma})
