"""Differential privacy of single samples: the account of noisy gradients on random batches.

Two data sets are neighbours if one has a sample more than the other (add or remove one). A step takes each of
a client's m samples with probability q, independently (Poisson sampling), clips every sample's gradient to an
L2 norm of ``clip``, and adds noise of standard deviation noise·clip to their sum. How many samples a client
has is taken to be known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..training_config import LocalTraining
from .privacy import _accounting

ORDERS = np.array([*range(2, 65), 72, 80, 96, 128, 192, 256, 384, 512], np.float64)
"""Rényi orders of which the best counts; whole ones, at which the divergence is a finite sum."""

_STEPS = 40
_PRECISION = 1e-3


def sampling_of(samples: int, training: LocalTraining) -> tuple[float, int]:
    """Return the probability with which a step takes a sample, and the steps of one round.

    So many steps, of so many samples on average, as the settings ask for without privacy.

    >>> sampling_of(490, LocalTraining(epochs=10, batch_size=49))
    (0.1, 100)
    """
    if samples < 1:
        return 0.0, 0
    size = min(training.batch_size, samples)
    return size / samples, training.steps or training.epochs * -(-samples // size)


@lru_cache(maxsize=4096)
def sampled_epsilon(rate: float, noise: float, steps: int, delta: float) -> float:
    """Return the epsilon at ``delta`` of so many steps; infinity if there is no bound.

    By Rényi differential privacy of the sampled Gaussian mechanism, and dp-accounting's conversion. Raises
    UserError without that package, and for numbers that make no sense.

    >>> round(sampled_epsilon(0.01, 4.0, 10_000, 1e-5), 1)
    1.0
    """
    check_delta(delta)
    if not 0 <= rate <= 1 or steps < 0:
        raise UserError(f"a step takes a sample with probability 0 to 1, {rate} is none; steps = {steps}")
    if not noise >= 0:
        raise UserError(f"noise has to be 0 or more, got {noise}")
    if steps == 0 or rate == 0:
        return 0.0
    if not 0 < noise < math.inf:
        return 0.0 if noise > 0 else math.inf
    _, _, rdp = _accounting()
    epsilon, _ = rdp.compute_epsilon(ORDERS, steps * sampled_rdp(rate, noise), delta)
    return float(epsilon)


@lru_cache(maxsize=4096)
def sampled_rdp(rate: float, noise: float) -> NDArray[np.float64]:
    """Return the Rényi divergence of one step at each of :data:`ORDERS`; infinite where it is too large.

    ln Σₖ C(α, k) (1 − q)^(α−k) qᵏ exp(k(k − 1) / 2z²) / (α − 1), which is exact for whole orders. Mironov,
    Talwar and Zhang, 2019, section 3.3.

    >>> bool(np.allclose(sampled_rdp(1.0, 2.0), ORDERS / 8))
    True
    """
    if rate == 1:
        with np.errstate(over="ignore", divide="ignore"):
            return np.asarray(ORDERS / (2 * np.float64(noise) ** 2), np.float64)
    k = np.arange(int(ORDERS[-1]) + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, len(k))))])  # of factorials
    found = np.empty(len(ORDERS))
    for place, order in enumerate(ORDERS.astype(int).tolist()):
        some = k[: order + 1]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            growth = np.where(some > 1, some * (some - 1) / (2 * np.float64(noise) ** 2), 0.0)
        chosen = logs[order] - logs[some] - logs[order - some]
        terms = chosen + some * math.log(rate) + (order - some) * math.log1p(-rate) + growth
        # Rounding may leave less than nothing of next to nothing.
        found[place] = max(np.logaddexp.reduce(terms), 0.0) / (order - 1)
    return found


def noise_for(epsilon: float, delta: float, uses: Iterable[tuple[float, int]]) -> float:
    """Return the least noise multiplier, to 0.1 %, at which no use costs more than ``epsilon``.

    ``uses`` are pairs of sampling probability and number of steps, such as of every client. Raises UserError
    if there is none below a million.
    """
    if not 0 < epsilon < math.inf:
        raise UserError(f"an epsilon to reach has to be above 0 and finite, got {epsilon}")
    # The one that costs most as a rule comes first, and then little is left to do for the others.
    order = sorted({use for use in uses if use[1] and use[0]}, key=lambda use: -(use[0] ** 2) * use[1])
    least = 0.0
    for rate, steps in order:
        if not least or sampled_epsilon(rate, least, steps, delta) > epsilon:
            least = _least_noise(epsilon, delta, rate, steps)
    return least


def _least_noise(epsilon: float, delta: float, rate: float, steps: int) -> float:
    low, high = 0.0, 1.0
    while sampled_epsilon(rate, high, steps, delta) > epsilon:
        low, high = high, 2 * high
        if high > 1e6:
            raise UserError(
                f"no noise below a million keeps {steps} steps within epsilon = {epsilon:g} at delta = "
                f"{delta:g}; ask for fewer rounds, or allow more"
            )
    for _ in range(_STEPS):
        if high - low <= _PRECISION * high:
            break
        middle = (low + high) / 2
        if sampled_epsilon(rate, middle, steps, delta) > epsilon:
            low = middle
        else:
            high = middle
    return high


def check_delta(delta: float) -> None:
    """Raise UserError unless delta is between 0 and 1."""
    if not 0 < delta < 1:
        raise UserError(f"delta must be between 0 and 1, such as 1e-5, got {delta}")
