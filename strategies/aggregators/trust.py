"""FLTrust: updates are trusted as far as they point where the server's own does; on the matrix (n, d)."""

from __future__ import annotations

import torch

from .base import Aggregate
from .coordinatewise import weighted_sum
from .coverage import Covered, covered_cosines, covered_distances, covered_step
from .credibility import cosines
from .distances import distances_to


def fltrust(matrix: torch.Tensor, root: torch.Tensor, covered: Covered | None = None) -> Aggregate:
    """Return the mean of updates (n, d), weighted by trust and scaled to the length of ``root`` (d,).

    Trust is max(0, cos(xᵢ, root)), where ``root`` is the update of the server's own clean data; the result is
    Σ tᵢ·(‖root‖ / ‖xᵢ‖)·xᵢ / Σ tᵢ, so it is never longer than ``root``. If nobody is trusted it is zero, and
    so are the weights (inferred; the paper does not say). ``scores["trust"]`` has t. With ``covered`` the
    root's update is cut to what a client covers, for its trust and for its length (inferred). O(n·d). Cao et
    al., NDSS 2021.

    >>> fltrust(torch.tensor([[0.0, 5.0], [-9.0, 0.0]]), torch.tensor([0.0, 2.0])).vector
    tensor([0., 2.])
    """
    if covered is not None:
        return _covered_fltrust(matrix, root, covered)
    trust = cosines(matrix, root).clamp(min=0)
    used = trust > 0
    weights = trust / trust.sum() if used.any() else trust
    lengths = distances_to(matrix, torch.zeros(matrix.shape[1]))
    factors = torch.where(used, float(root.double().norm()) / torch.where(used, lengths, 1.0), 0.0)
    vector = weighted_sum(matrix, weights * factors, torch.float32)
    return Aggregate(
        vector, weights, used, diagnostics={"trusted": float(used.sum())}, scores={"trust": trust}
    )


def _covered_fltrust(matrix: torch.Tensor, root: torch.Tensor, covered: Covered) -> Aggregate:
    trust = covered_cosines(matrix, root, covered).clamp(min=0)
    used = trust > 0
    weights = trust / trust.sum() if used.any() else trust
    lengths = covered_distances(matrix, None, covered)
    roots = covered_distances(root[None].expand(matrix.shape), None, covered)
    factors = torch.where(used, roots / torch.where(used, lengths, 1.0), 0.0)
    vector = covered_step(matrix, weights * factors, weights, covered)
    return Aggregate(
        vector, weights, used, diagnostics={"trusted": float(used.sum())}, scores={"trust": trust}
    )
