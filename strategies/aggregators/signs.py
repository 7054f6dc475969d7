"""Rules that look at the signs of updates: SignGuard and the majority vote, on the matrix (n, d)."""

from __future__ import annotations

import numpy as np
import torch

from fedplat.updates import column_chunks

from .base import Aggregate
from .coordinatewise import weighted_sum
from .coverage import Covered, covered_distances, covered_step, pair_sums
from .distances import distances_to
from .foolsgold import pairwise_cosines

_LEAST_BANDWIDTH = 1e-6  # so that nearly identical clients are not told apart by rounding


def sign_shares(
    matrix: torch.Tensor, columns: torch.Tensor | None = None, covered: Covered | None = None
) -> torch.Tensor:
    """Return each client's shares of positive, zero and negative coordinates, (n, 3) float64.

    Only the coordinates ``columns`` (k,) of ``matrix`` (n, d) are looked at, by default all; with
    ``covered``, all those that a client covers. O(n·k).

    >>> sign_shares(torch.tensor([[1.0, 0.0, -2.0, 3.0]])).tolist()
    [[0.5, 0.25, 0.25]]
    """
    if covered is not None:
        return _covered_sign_shares(matrix, covered)
    k = matrix.shape[1] if columns is None else len(columns)
    counts = torch.zeros(len(matrix), 3, dtype=torch.float64)
    for start, stop in column_chunks(len(matrix), k):
        chunk = matrix[:, start:stop] if columns is None else matrix[:, columns[start:stop]]
        parts = [chunk > 0, chunk == 0, chunk < 0]
        counts += torch.stack([part.sum(dim=1) for part in parts], dim=1)
    return counts / k


def _covered_sign_shares(matrix: torch.Tensor, covered: Covered) -> torch.Tensor:
    counts = torch.zeros(len(matrix), 3, dtype=torch.float64)
    for start, stop in column_chunks(*matrix.shape):
        chunk, mask = matrix[:, start:stop], covered.mask[:, start:stop]
        up, down = ((chunk > 0) & mask).sum(dim=1), ((chunk < 0) & mask).sum(dim=1)
        counts += torch.stack([up, mask.sum(dim=1) - up - down, down], dim=1)
    return counts / covered.sizes.clamp(min=1)[:, None]


def largest_cluster(features: torch.Tensor) -> torch.Tensor:
    """Return who (n,) bool is in the largest cluster that mean shift finds among ``features`` (n, k).

    The radius is the mean distance, over the clients, within which half of them lie, the client itself among
    them, and at least one other. Of equally large clusters the densest is taken. O(n²) a step.

    >>> largest_cluster(torch.tensor([[0.5], [0.51], [0.49], [0.1]])).tolist()
    [True, True, True, False]
    """
    from sklearn.cluster import MeanShift

    n = len(features)
    if n == 1:
        return torch.ones(1, dtype=torch.bool)
    points = features.double()
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    # A hair more, so that rounding does not part two clients at this very distance.
    radius = float(distances.sort(dim=1).values[:, max(1, n // 2 - 1)].mean()) * (1 + 1e-9)
    shift = MeanShift(bandwidth=max(radius, _LEAST_BANDWIDTH), cluster_all=False)
    labels = shift.fit_predict(points.numpy())
    # Clusters are numbered from the densest; a label of −1 means none is near.
    return torch.from_numpy(labels == np.bincount(labels[labels >= 0]).argmax())


def signguard(
    matrix: torch.Tensor,
    rng: np.random.Generator,
    *,
    lower: float = 0.1,
    upper: float = 3.0,
    sample: float = 0.1,
    similarity: bool = False,
    covered: Covered | None = None,
) -> Aggregate:
    """Return the mean of the updates of usual length and usual signs, cut to the median length.

    With M the median length, who is shorter than ``lower``·M or longer than ``upper``·M is out. So is who is
    not in the largest cluster by shares of positive, zero and negative values among a random part ``sample``
    of the coordinates; ``similarity`` adds each client's median cosine with the others, over all coordinates,
    to the features. The mean is over xᵢ·min(1, M / ‖xᵢ‖). If nobody passes both filters, the first decides
    (inferred). O(n·d), with ``similarity`` O(n²·d). Raises ValueError unless 0 < sample ≤ 1 and
    0 ≤ lower ≤ 1 and upper ≥ 2, below which an even number of clients could all be out.
    Xu et al., ICDCS 2022.

    With ``covered`` (inferred) lengths are times √(d/N), shares are over all that a client covers, since a
    part of a small sub-model would be few coordinates, cosines over what two clients share, and the mean is
    over those who cover an element.

    >>> x = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 1.0], [-1.0, -1.0], [90.0, 90.0]])
    >>> signguard(x, np.random.default_rng(0), sample=1.0).accepted.tolist()
    [True, True, True, False, False]
    """
    n, d = matrix.shape
    if not (0 < sample <= 1 and 0 <= lower <= 1 and upper >= 2):
        raise ValueError(
            f"need 0 < sample <= 1, 0 <= lower <= 1 and upper >= 2, got {sample}, {lower} and {upper}"
        )
    if covered is None:
        lengths = distances_to(matrix, torch.zeros(d))
    else:
        lengths = covered_distances(matrix, None, covered) * covered.stretch.sqrt()
    middle = float(lengths.quantile(0.5))
    usual = (lengths >= lower * middle) & (lengths <= upper * middle)
    columns = np.sort(rng.choice(d, max(1, round(sample * d)), replace=False, shuffle=False))
    features = sign_shares(matrix, torch.from_numpy(columns), covered)
    if similarity and n > 1:
        others = _cosines_with_others(matrix, covered)
        features = torch.cat([features, others.nanquantile(0.5, dim=1, keepdim=True).nan_to_num()], dim=1)
    alike = largest_cluster(features)
    kept = usual & alike if bool((usual & alike).any()) else usual
    factors = torch.where(lengths > middle, middle / lengths, 1.0)
    shares = kept * factors / kept.sum()
    total = shares.sum()
    if covered is None:
        vector = weighted_sum(matrix, shares, torch.float32)
    else:
        vector = covered_step(matrix, shares, kept / kept.sum(), covered)
    return Aggregate(
        vector,
        shares / total if bool(total > 0) else kept / kept.sum(),
        kept,
        diagnostics={"unusual length": float((~usual).sum()), "unusual signs": float((~alike).sum())},
    )


def _cosines_with_others(matrix: torch.Tensor, covered: Covered | None) -> torch.Tensor:
    """Return cosines (n, n − 1), nan with those who share nothing."""
    n = len(matrix)
    if covered is None:
        cosines = pairwise_cosines(matrix)
    else:
        pairs = pair_sums(matrix, covered)
        cosines = pairs.cosines().masked_fill_(torch.from_numpy(pairs.overlap == 0), torch.nan)
    return cosines[~torch.eye(n, dtype=torch.bool)].view(n, n - 1)


def sign_vote(matrix: torch.Tensor, covered: Covered | None = None) -> Aggregate:
    """Return, per coordinate, the sign (1, 0 or −1) that most updates have; 0 on a tie.

    ``weights`` are the clients' shares of coordinates where they agree with the vote, scaled to sum to 1; a
    vote is no mean, so they only tell who it followed. With ``covered`` a client votes, and agrees, only
    where it covers. O(n·d). Bernstein et al., ICLR 2019.

    >>> sign_vote(torch.tensor([[0.5, -1.0], [7.0, -2.0], [-100.0, 3.0]])).vector
    tensor([ 1., -1.])
    """
    n, d = matrix.shape
    vote = torch.empty(d, dtype=torch.float32)
    agreed = torch.zeros(n, dtype=torch.float64)
    for start, stop in column_chunks(n, d):
        signs = matrix[:, start:stop].sign()
        if covered is not None:
            signs *= covered.mask[:, start:stop]
        vote[start:stop] = signs.sum(dim=0).sign()
        same = signs == vote[start:stop]
        agreed += (same if covered is None else same & covered.mask[:, start:stop]).sum(dim=1)
    if covered is not None:
        agreed *= covered.stretch
    weights = agreed / agreed.sum() if bool(agreed.sum() > 0) else torch.full_like(agreed, 1 / n)
    return Aggregate(vote, weights, torch.ones(n, dtype=torch.bool), scores={"agreement": agreed / d})
