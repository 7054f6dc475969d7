"""Membership inference: was this sample among those that a client trained on?

Every score is higher for a sample that looks more like a member.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata
from torch import Tensor
from torch.nn import functional

from fedplat.arrays import FlatArrays
from fedplat.errors import UserError
from fedplat.models.flat import FlatModel

Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Membership:
    """How well scores tell members from others: AUC and true positives at a false-positive rate.

    ``auc_range`` and ``tpr_range`` hold 95 % of the values over bootstrap draws of the samples. The models
    stay as they are, so what another training would have given is not in them.
    """

    auc: float
    auc_range: tuple[float, float]
    tpr: float
    tpr_range: tuple[float, float]


def sample_losses(
    model: FlatModel, weights: FlatArrays, x: Tensor, y: Tensor, batch_size: int = 500
) -> Scores:
    """Return the cross-entropy (n,) of every sample under some weights, which ``model`` then has."""
    model.load(weights)
    model.module.eval()
    with torch.inference_mode():
        parts = [
            functional.cross_entropy(model(a).double(), b, reduction="none")
            for a, b in zip(x.split(batch_size), y.split(batch_size), strict=True)
        ]
    return torch.cat(parts).numpy()


def loss_scores(losses: ArrayLike) -> Scores:
    """Return minus the loss (n,). Yeom et al., CSF 2018.

    >>> loss_scores([0.5, 2.0]).tolist()
    [-0.5, -2.0]
    """
    return -np.asarray(losses, np.float64)


def calibrated_scores(losses: ArrayLike, reference: ArrayLike) -> Scores:
    """Return how far the losses (n,) fall below the mean of those under reference models (k, n), or one (n,).

    References have seen none of the samples; they tell how hard each one is. It is the logarithm of a ratio
    of likelihoods, with the geometric mean of the references' below. Watson et al., ICLR 2022.

    >>> calibrated_scores([0.5, 2.0], [[1.0, 2.0], [2.0, 2.0]]).tolist()
    [1.0, 0.0]
    """
    target, others = np.asarray(losses, np.float64), np.atleast_2d(np.asarray(reference, np.float64))
    if target.ndim != 1 or others.ndim != 2 or others.shape[1] != len(target) or not len(others):
        raise UserError(f"losses {target.shape} need references (k, {len(target)}), got {others.shape}")
    mean: Scores = others.mean(axis=0)
    return mean - target


def auc(members: ArrayLike, others: ArrayLike) -> float:
    """Return the probability that a member scores above another sample, ties counted half.

    >>> auc([2, 3], [1, 2])
    0.875
    """
    a, b = _checked(members), _checked(others)
    ranks = rankdata(np.concatenate([a, b]))[: len(a)].sum()
    return float((ranks - len(a) * (len(a) + 1) / 2) / (len(a) * len(b)))


def tpr_at(members: ArrayLike, others: ArrayLike, fpr: float = 0.01) -> float:
    """Return the share of members above a threshold that at most a share ``fpr`` of the others exceeds.

    Raises UserError if there are fewer others than one per false positive allowed, 100 for 1 %.

    >>> tpr_at([5, 7, 9], [1, 2, 6, 8], fpr=0.25)
    0.6666666666666666
    """
    a, b = _checked(members), _checked(others)
    _check_rate(fpr, len(b))
    threshold = np.sort(b)[len(b) - 1 - int(fpr * len(b) + 1e-9)]
    return float((a > threshold).mean())


def membership(
    members: ArrayLike,
    others: ArrayLike,
    rng: np.random.Generator,
    fpr: float = 0.01,
    draws: int = 500,
) -> Membership:
    """Return both figures with bootstrap ranges; raises UserError as they do."""
    a, b = _checked(members), _checked(others)
    _check_rate(fpr, len(b))
    if draws < 1:
        raise UserError("a bootstrap takes 1 or more draws")
    aucs, tprs = _drawn(a, b, rng, fpr, draws)
    return Membership(auc(a, b), _middle(aucs), tpr_at(a, b, fpr), _middle(tprs))


def _drawn(a: Scores, b: Scores, rng: np.random.Generator, fpr: float, draws: int) -> tuple[Scores, Scores]:
    """Return both figures of samples drawn with replacement, which are counts of the distinct scores."""
    values = np.unique(np.concatenate([a, b]))
    own, others = (
        rng.multinomial(
            len(side), np.bincount(np.searchsorted(values, side), minlength=len(values)) / len(side), draws
        )
        for side in (a, b)
    )
    below = others.cumsum(axis=1)
    aucs = (own * (below - others / 2)).sum(axis=1) / (len(a) * len(b))
    threshold = (below >= len(b) - int(fpr * len(b) + 1e-9)).argmax(axis=1)
    tprs = 1 - np.take_along_axis(own.cumsum(axis=1), threshold[:, None], axis=1)[:, 0] / len(a)
    return aucs, tprs


def _middle(values: Scores) -> tuple[float, float]:
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)


def same_labels(
    labels: NDArray[np.int64], count: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw ``count`` members and as many others of the same label mix, no sample twice; return their rows.

    Otherwise a label alone would tell something. Raises UserError if a class has too few samples.
    """
    order = rng.permutation(len(labels))
    if not 1 <= count <= len(labels) // 2:
        raise UserError(f"{count} members and as many others cannot be drawn from {len(labels)} samples")
    members, rest = order[:count], order[count:]
    others = []
    for label, wanted in zip(*np.unique(labels[members], return_counts=True), strict=True):
        free = rest[labels[rest] == label]
        if len(free) < wanted:
            raise UserError(f"class {label} has too few samples for {wanted} members and as many others")
        others.append(free[:wanted])
    return members, np.concatenate(others)


def _checked(values: ArrayLike) -> Scores:
    scores = np.asarray(values, np.float64)
    if scores.ndim != 1 or not len(scores) or np.isnan(scores).any():
        raise UserError("membership needs scores (n,) of at least one member and one other, none of them NaN")
    return scores


def _check_rate(fpr: float, others: int) -> None:
    if not 0 < fpr < 1 or int(fpr * others + 1e-9) < 1:
        raise UserError(
            f"a false-positive rate of {fpr:g} cannot be told from {others} samples that are no members; it "
            f"has to be between 0 and 1 and allow at least one"
        )
