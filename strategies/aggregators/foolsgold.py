"""FoolsGold: clients that push in the same direction share one vote; pure functions on the matrix (n, d)."""

from __future__ import annotations

from dataclasses import replace

import torch

from .base import Aggregate
from .coordinatewise import mean
from .coverage import Covered, pair_sums
from .distances import scalar_products

_TINY = 1e-300
_ROUNDING = 1e-9  # a client less distinct than this from another has sent the same, up to rounding
_MOST = 0.99  # the largest rescaled value, since the logit of 1 is infinite


def pairwise_cosines(matrix: torch.Tensor, covered: Covered | None = None) -> torch.Tensor:
    """Return the cosine of every pair of rows of (n, d), as (n, n) float64, symmetric; 1 on the diagonal.

    A zero row has a cosine of 0 with all others. Accumulated in float64. O(n²·d) time; a few megabytes
    besides the input. With ``covered``, over what both cover; 0 if that is nothing.

    >>> pairwise_cosines(torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]]))[0].tolist()
    [1.0, 0.0, -1.0]
    """
    if covered is not None:
        return pair_sums(matrix, covered).cosines()
    gram = scalar_products(matrix)
    norms = gram.diagonal().sqrt()
    cosines = (gram / norms[:, None].clamp(min=_TINY) / norms[None, :].clamp(min=_TINY)).clamp_(-1, 1)
    cosines = (cosines + cosines.t()) / 2
    return cosines.fill_diagonal_(1)


def distinctness(cosines: torch.Tensor) -> torch.Tensor:
    """Return how much each client counts, (n,) float64 in [0, 1], given the cosines (n, n) of all pairs.

    With vᵢ = max(0, maxⱼ cᵢⱼ) over the others: pardon, cᵢⱼ ← cᵢⱼ·vᵢ/vⱼ wherever vⱼ > vᵢ, so that an honest
    client that resembles sybils is not taken for one; then aᵢ = 1 − max(0, maxⱼ cᵢⱼ), a ← a / max a with 1
    lowered to 0.99, and ln(aᵢ / (1 − aᵢ)) + 0.5 cut to [0, 1]. Values of a below 1e-9 are rounding and count
    as 0 (inferred). All are 0 if every client has a twin. Fung et al., RAID 2020, with kappa = 1.

    >>> distinctness(torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])).tolist()
    [0.0, 0.0, 1.0]
    """
    others = cosines.double().clone().fill_diagonal_(0)
    nearest = others.amax(dim=1)  # never negative, because of the zero on the diagonal
    mine, theirs = nearest[:, None], nearest[None, :]
    pardoned = torch.where(theirs > mine, others * mine / theirs.clamp(min=_TINY), others)
    distinct = 1 - pardoned.amax(dim=1)
    distinct = torch.where(distinct < _ROUNDING, 0.0, distinct)
    largest = float(distinct.max())
    if largest == 0:
        return distinct
    rescaled = (distinct / largest).clamp(max=_MOST)
    return (torch.logit(rescaled) + 0.5).clamp(0, 1)


def foolsgold(
    matrix: torch.Tensor,
    history: torch.Tensor | None = None,
    covered: Covered | None = None,
    compared: Covered | None = None,
) -> Aggregate:
    """Return the mean of ``matrix`` (n, d), weighted by how distinct each client's ``history`` (n, d) is.

    ``history`` holds the sums of the clients' updates over the rounds, by default ``matrix`` itself, which
    then has to hold updates. Weights sum to 1; if all are 0, the plain mean (both inferred: the paper adds
    the weighted gradients up). ``scores["distinctness"]`` are the weights before that. ``covered`` is about
    the matrix, ``compared``, by default the same mask, about the history: what two clients share of it counts
    (inferred). O(n²·d). Fung et al., RAID 2020.

    >>> foolsgold(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])).vector
    tensor([0., 2.])
    """
    between = Covered(covered.mask) if compared is None and covered is not None else compared
    distinct = distinctness(pairwise_cosines(matrix if history is None else history, between))
    result = mean(matrix, distinct if bool(distinct.sum() > 0) else None, covered)
    return replace(result, scores={"distinctness": distinct})
