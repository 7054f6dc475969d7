"""Reputation from agreement with the aggregate: pure functions on one round's clients (n,)."""

from __future__ import annotations

import torch


def reputations(
    old: torch.Tensor, agreement: torch.Tensor, *, alpha: float = 0.95, threshold: float = 1 / 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new reputations (n,) float64, which sum to 1, and who keeps one (n,) bool.

    ``old`` (n,) sum to 1, or are all 0 before the first round; ``agreement`` (n,) are the cosines of the
    clients' updates with the aggregate. r = alpha·old + (1 − alpha)·agreement is divided by its sum; whoever
    is below ``threshold`` / n is out with a reputation of 0, and the rest is divided by its sum again. If the
    sum of r is not positive, nothing can be told and ``old`` is returned with everybody in (inferred).
    Xu and Lyu, 2020 (RFFL), as in their code.

    >>> reputations(torch.zeros(3), torch.tensor([0.75, 0.75, -0.5]))[0].tolist()
    [0.5, 0.5, 0.0]
    """
    new = alpha * old.double() + (1 - alpha) * agreement.double()
    total = new.sum()
    if not bool(total > 0):
        return old.double(), torch.ones(len(old), dtype=torch.bool)
    new = new / total
    kept = new >= threshold / len(old)
    new = torch.where(kept, new, 0.0).clamp(min=0)
    return new / new.sum(), kept
