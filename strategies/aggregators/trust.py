"""FLTrust: updates are trusted as far as they point where the server's own does; on the matrix (n, d)."""

from __future__ import annotations

import torch

from .base import Aggregate
from .coordinatewise import weighted_sum
from .credibility import cosines
from .distances import distances_to


def fltrust(matrix: torch.Tensor, root: torch.Tensor) -> Aggregate:
    """Return the mean of updates (n, d), weighted by trust and scaled to the length of ``root`` (d,).

    Trust is max(0, cos(xᵢ, root)), where ``root`` is the update of the server's own clean data; the result is
    Σ tᵢ·(‖root‖ / ‖xᵢ‖)·xᵢ / Σ tᵢ, so it is never longer than ``root``. If nobody is trusted it is zero, and
    so are the weights (inferred; the paper does not say). ``scores["trust"]`` has t. O(n·d).
    Cao et al., NDSS 2021.

    >>> fltrust(torch.tensor([[0.0, 5.0], [-9.0, 0.0]]), torch.tensor([0.0, 2.0])).vector
    tensor([0., 2.])
    """
    trust = cosines(matrix, root).clamp(min=0)
    used = trust > 0
    weights = trust / trust.sum() if used.any() else trust
    lengths = distances_to(matrix, torch.zeros(matrix.shape[1]))
    factors = torch.where(used, float(root.double().norm()) / torch.where(used, lengths, 1.0), 0.0)
    vector = weighted_sum(matrix, weights * factors, torch.float32)
    return Aggregate(
        vector, weights, used, diagnostics={"trusted": float(used.sum())}, scores={"trust": trust}
    )
