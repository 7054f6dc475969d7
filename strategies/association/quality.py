"""How far an edge's mix of labels is from the one wanted: three measures, their cuts, and noisy counts.

An edge whose mix is near the target drifts less from the common goal between two rounds of the cloud. The
Kullback-Leibler divergence is what SHARE (Deng et al., ICDCS 2021) shapes edges by; Jensen-Shannon is used
for coalitions in FedCure, and the L1 distance is the "earth mover's distance" of Zhao et al., 2018. Which one
stage-wise decisions (Wu et al., arXiv 2502.09303) use is not known; ``kl`` is inferred.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log
from typing import Literal

import numpy as np

from fedplat.errors import UserError
from fedplat.rng import generator

from .base import Floats, divergences

Measure = Literal["kl", "js", "l1"]
TINY = 1e-12
"""Stands for a share of 0 of the target where its logarithm has to be finite."""


def mixes(counts: Floats) -> Floats:
    """Return label counts (..., K) as shares that sum to 1; zeros for those of nothing."""
    sums = counts.sum(axis=-1, keepdims=True)
    return np.divide(counts, sums, out=np.zeros(counts.shape), where=sums > 0)


def distances(counts: Floats, target: Floats, measure: Measure = "kl") -> Floats:
    """Return how far each mix of ``counts`` (..., K) is from ``target`` (K,).

    ``kl``: Kullback-Leibler divergence in nats; ``js``: Jensen-Shannon divergence in nats, at most ln 2;
    ``l1``: sum of absolute differences of the shares, at most 2. Infinite for a mix of nothing, 0 if K = 0.

    >>> counts = np.array([[6.0, 0.0], [3.0, 3.0], [0.0, 0.0]])
    >>> distances(counts, np.array([0.5, 0.5]), "js").round(4).tolist()
    [0.2158, 0.0, inf]
    >>> distances(counts, np.array([0.5, 0.5]), "l1").tolist()
    [1.0, 0.0, inf]
    """
    if measure == "kl" or not counts.shape[-1]:
        return divergences(counts, target)
    shares = mixes(counts)
    if measure == "l1":
        found = np.abs(shares - target).sum(axis=-1)
    else:
        middle = (shares + target) / 2
        found = 0.5 * (divergences(shares, middle) + _divergence_from(target, middle))
    return np.where(counts.sum(axis=-1) > 0, found, np.inf)


def farthest(target: Floats, measure: Measure = "kl") -> float:
    """Return the distance of the worst mix, of one label alone; ln K for a uniform target. 0 if K = 0.

    It stands for an edge without clients where a finite number is needed.
    """
    if not len(target):
        return 0.0
    worst = np.zeros((1, len(target)))
    worst[0, int(np.argmin(target))] = 1.0
    return float(distances(worst, np.maximum(target, TINY), measure)[0])


def cut(mix: Floats, target: Floats, measure: Measure = "kl") -> Floats:
    """Return coefficients a (K,) such that sum_k a_k c_k <= sum(c) * distance(c) for all counts c >= 0.

    Equality holds at c = ``mix`` (K,), a distribution (positive everywhere for ``kl`` and ``js``). So a set
    of clients whose mix is within a limit d satisfies the linear sum_k (a_k - d) c_k <= 0: all measures are
    convex and, times the sum of the counts, homogeneous of degree 1. For ``kl`` this is Gibbs' inequality.

    >>> cut(np.array([0.5, 0.5]), np.array([0.5, 0.5])).tolist()
    [0.0, 0.0]
    """
    if measure == "kl":
        return np.log(mix / np.maximum(target, TINY))
    if measure == "l1":
        sign = np.sign(mix - target)
        return sign - sign @ target
    middle = (mix + target) / 2
    return 0.5 * (np.log(mix / middle) + _divergence_from(target, middle))


def _divergence_from(target: Floats, other: Floats) -> Floats:
    """Return the Kullback-Leibler divergence of ``target`` (K,) from each of ``other`` (..., K)."""
    known = target > 0
    return (target[known] * np.log(target[known] / other[..., known])).sum(axis=-1)


def one_distance(target: Floats, measure: Measure) -> Callable[[list[float], float], float]:
    """Return :func:`distances` for one mix as plain numbers, ``(counts, their sum)``, without NumPy's toll.

    The search evaluates half a million single mixes of a few labels, where an array costs more than the sum.
    """
    wanted = target.tolist()
    if not wanted:
        return lambda counts, total: 0.0
    logs = [log(q) if q > 0 else -inf for q in wanted]

    def kl(counts: list[float], total: float) -> float:
        if total <= 0:
            return inf
        found = 0.0
        for count, log_q in zip(counts, logs, strict=True):
            if count > 0:
                found += count * (log(count) - log_q)
        return max(found / total - log(total), 0.0)

    def js(counts: list[float], total: float) -> float:
        if total <= 0:
            return inf
        found = 0.0
        for count, q in zip(counts, wanted, strict=True):
            p = max(count, 0.0) / total
            middle = (p + q) / 2
            found += (p * log(p / middle) if p > 0 else 0.0) + (q * log(q / middle) if q > 0 else 0.0)
        return max(found / 2, 0.0)

    def l1(counts: list[float], total: float) -> float:
        if total <= 0:
            return inf
        return sum(abs(count / total - q) for count, q in zip(counts, wanted, strict=True))

    return {"kl": kl, "js": js, "l1": l1}[measure]


def noisy_histograms(counts: Floats, epsilon: float, seed: int) -> Floats:
    """Return label counts (N, K) with Laplace noise of scale 1/epsilon on each, negative ones set to 0.

    Each client's histogram is then epsilon-differentially private for one sample more or less (sensitivity 1
    in the L1 norm; replacing a sample by one of another class moves two counts and costs 2 epsilon). The
    number of samples itself, which clients tell for the weights, is not hidden. Client n's noise depends on
    the seed and n only. Raises UserError unless epsilon > 0.
    """
    if not 0 < epsilon < inf:
        raise UserError(f"epsilon of noisy label histograms is {epsilon}, but has to be positive and finite")
    noise = np.zeros(counts.shape)
    for client in range(len(counts)):
        noise[client] = generator(seed, "noisy histogram", client).laplace(
            0.0, 1.0 / epsilon, counts.shape[1]
        )
    return np.maximum(counts + noise, 0.0)
