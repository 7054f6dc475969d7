"""The geometric median, and rules that clip updates to a ball: pure functions on the matrix (n, d)."""

from __future__ import annotations

import numpy as np
import torch

from .base import Aggregate
from .coordinatewise import median, shares_of, weighted_sum
from .coverage import Covered, covered_distances, covered_mean, covered_step
from .distances import distances_to, scalar_products

_TINY = 1e-300
_GRAM_CLIENTS = 128  # beyond, the products cost more than the ten or so steps they save
_NEAR = 1e-3  # of the tolerance: where clients cover parts, a step that lands on one is not told from nearby
_CANCELLED = 1e-8  # of the squares they are a difference of: below, distances are not good to 8 digits


def geometric_median(
    matrix: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    tolerance: float = 1e-6,
    max_steps: int = 1000,
    covered: Covered | None = None,
) -> Aggregate:
    """Return the point z with the least Σ wᵢ ‖xᵢ − z‖, by Weiszfeld's steps in Vardi and Zhang's form.

    Starts from the coordinate-wise median, so that a far outlier cannot slow it down, and stops when a step
    is shorter than ``tolerance`` times the median distance to the clients. A step that lands on a client's
    point is defined. ``weights`` (n,) are equal by default; ``diagnostics`` has the number of steps and the
    objective. Up to 128 clients O(n²·d) for their scalar products and then O(n²) a step; otherwise, and from
    where a step comes very close to a client, O(n·d) a step. Vardi and Zhang, PNAS 2000; for aggregation
    Pillutla et al., 2019 (RFA).

    With ``covered`` a distance is over the N elements that a client covers and counts √(N/d) times, so that
    clients equally far off per element pull every element equally hard (inferred); O(n·d) a step, and
    distances below a thousandth of the tolerance count as that.

    >>> geometric_median(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])).vector
    tensor([0.2113, 0.2113])
    """
    n = len(matrix)
    w = torch.ones(n, dtype=torch.float64) if weights is None else weights.to("cpu", torch.float64)
    shares = shares_of(w, n)
    if covered is not None:
        return _covered_median(matrix, w, tolerance, max_steps, covered)
    point = median(matrix).vector.double()
    steps, arrived = 0, False
    if 1 < n <= _GRAM_CLIENTS:
        gram = scalar_products(matrix, centre=point)
        place, steps, arrived = _walk(gram, w, tolerance, max_steps)
        if steps:
            shares, point = place, weighted_sum(matrix, place)
    while not arrived and steps < max_steps:
        steps += 1
        distances = distances_to(matrix, point)
        on = distances == 0
        inverse = torch.where(on, 0.0, w / distances.clamp(min=_TINY))
        if not bool(inverse.sum() > 0):
            break  # everybody is here already
        shares = inverse / inverse.sum()
        target = weighted_sum(matrix, shares)
        # How strongly the clients elsewhere pull, against the weight of those who sit on this very point.
        pull = float((target - point).norm() * inverse.sum())
        stay = min(1.0, float(w[on].sum()) / pull) if pull > 0 else float(on.any())
        new = (1 - stay) * target + stay * point
        if stay > 0:
            shares = (1 - stay) * shares + stay * torch.where(on, w, 0.0) / w[on].sum()
        arrived = bool((new - point).norm() <= tolerance * distances.median())
        point = new
    objective = float((w * distances_to(matrix, point)).sum())
    accepted = torch.ones(n, dtype=torch.bool)
    return Aggregate(point.float(), shares, accepted, diagnostics={"steps": steps, "objective": objective})


def _walk(
    gram: torch.Tensor, w: torch.Tensor, tolerance: float, max_steps: int
) -> tuple[torch.Tensor, int, bool]:
    """Take Weiszfeld's steps on scalar products (n, n) about the start; O(n²) each.

    Returns the clients' shares (n,) in the point reached, the number of steps, and whether it has arrived;
    if not, then it came so close to a client that products do not tell the distance any more.
    """
    norms = gram.diagonal()
    shares = torch.zeros_like(w)
    for step in range(1, max_steps + 1):
        towards = gram @ shares
        own = shares @ towards
        squared = norms - 2 * towards + own
        if not bool((squared > _CANCELLED * torch.maximum(norms, own)).all()):
            return shares, step - 1, False
        distances = squared.sqrt()
        inverse = w / distances
        moved = inverse / inverse.sum() - shares
        shares = inverse / inverse.sum()
        if bool((moved @ gram @ moved).clamp(min=0).sqrt() <= tolerance * distances.median()):
            return shares, step, True
    return shares, max_steps, False


def _covered_median(
    matrix: torch.Tensor, w: torch.Tensor, tolerance: float, max_steps: int, covered: Covered
) -> Aggregate:
    everywhere = covered.sizes > 0
    point, shares, steps = median(matrix, covered).vector, shares_of(w, len(w)), 0
    while steps < max_steps:
        # Stretched: dividing by these is what the weight √(N/d) comes to.
        distances = covered_distances(matrix, point, covered) * covered.stretch.sqrt()
        scale = float(distances[everywhere].quantile(0.5)) or float(distances.max())
        if not scale > 0:
            break  # everybody is here already
        steps += 1
        inverse = w / distances.clamp(min=_NEAR * tolerance * scale)
        shares = inverse / inverse.sum()
        new = covered_mean(matrix, shares, covered)
        step, point = float((new.double() - point).norm()), new
        if step <= tolerance * scale:
            break
    distances = covered_distances(matrix, point, covered)
    objective = float((w * distances / covered.stretch.sqrt()).sum())
    return Aggregate(point, shares, everywhere, diagnostics={"steps": steps, "objective": objective})


def smoothed_weiszfeld(
    matrix: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    steps: int = 3,
    nu: float = 1e-6,
    covered: Covered | None = None,
) -> Aggregate:
    """Return z after ``steps`` of z ← Σ βᵢ xᵢ / Σ βᵢ with βᵢ = wᵢ / max(nu, ‖xᵢ − z‖), begun at the mean.

    The geometric median to within a few steps, each as cheap as a mean, so that it can be done without seeing
    single updates. A far outlier needs more: one at 10⁶ among points at 1 still moves z by thousands after 3
    steps. ``weights`` (n,) are equal by default. With ``covered`` distances are over what a client covers,
    times √(d/N) (inferred). O(n·d) a step. Pillutla et al., 2019 (RFA).

    >>> square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1e6, 1e6]])
    >>> [round(smoothed_weiszfeld(square, steps=n).vector[0].item(), 2) for n in (1, 3, 10)]
    [58824.0, 3891.55, 0.87]
    """
    if steps < 1 or not nu > 0:
        raise ValueError(f"steps must be at least 1 and nu above 0, got {steps} and {nu}")
    plain = shares = shares_of(weights, len(matrix))
    if covered is not None:
        near = covered_mean(matrix, shares, covered)
        for _ in range(steps):
            distances = covered_distances(matrix, near, covered) * covered.stretch.sqrt()
            factors = plain / distances.clamp(min=nu)
            shares = factors / factors.sum()
            near = covered_mean(matrix, shares, covered)
        return Aggregate(near, shares, shares > 0)
    point = weighted_sum(matrix, shares)
    for _ in range(steps):
        factors = plain / distances_to(matrix, point).clamp(min=nu)
        shares = factors / factors.sum()
        point = weighted_sum(matrix, shares)
    return Aggregate(point.float(), shares, shares > 0)


def centered_clipping(
    matrix: torch.Tensor,
    tau: float,
    *,
    center: torch.Tensor | None = None,
    steps: int = 1,
    covered: Covered | None = None,
) -> Aggregate:
    """Return v after ``steps`` of v ← v + mean((xᵢ − v)·min(1, tau / ‖xᵢ − v‖)), begun at ``center``.

    ``matrix`` (n, d) holds updates; ``center`` (d,) is zero by default. A client moves v by tau/n at most in
    a step. With ``covered`` lengths are over what a client covers, and the mean is over those who cover an
    element: where m do, a client moves v by tau/m. O(n·d) a step. Karimireddy et al., ICML 2021.

    >>> centered_clipping(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0).vector
    tensor([0.4500, 0.6000])
    """
    n, d = matrix.shape
    if not tau > 0:
        raise ValueError(f"tau must be above 0, got {tau}")
    point = torch.zeros(d, dtype=torch.float64, device=matrix.device) if center is None else center.double()
    factors = torch.ones(n, dtype=torch.float64)
    if covered is not None:
        near, everybody = point.float(), torch.ones(n, dtype=torch.float64)
        for _ in range(steps):
            factors = (tau / covered_distances(matrix, near, covered).clamp(min=_TINY)).clamp(max=1)
            near = covered_step(matrix, factors, everybody, Covered(covered.mask, near))
        return Aggregate(near, factors / factors.sum(), covered.sizes > 0)
    for _ in range(steps):
        factors = (tau / distances_to(matrix, point).clamp(min=_TINY)).clamp(max=1)
        shares = factors / n
        point = weighted_sum(matrix, shares) + (1 - shares.sum()) * point
    weights = factors / factors.sum()
    return Aggregate(point.float(), weights, torch.ones(n, dtype=torch.bool))


def norm_clipping(
    matrix: torch.Tensor,
    bound: float,
    weights: torch.Tensor | None = None,
    *,
    noise: float = 0.0,
    rng: np.random.Generator | None = None,
    covered: Covered | None = None,
) -> Aggregate:
    """Return the mean of updates scaled down to an L2 norm of ``bound`` where they are longer.

    ``noise`` is the standard deviation of normal noise from ``rng`` that every coordinate of the mean gets.
    Bounds what a client can do by scaling, not by direction; noise drowns what small changes are left. With
    ``covered`` the norm is that of the part a client covers, and the mean is over those who cover an element;
    there is no noise where nobody does. O(n·d). Raises ValueError unless bound > 0 and noise ≥ 0, and for
    noise without ``rng``. Sun et al., 2019.

    >>> norm_clipping(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0).vector
    tensor([0.4500, 0.6000])
    """
    if not bound > 0:
        raise ValueError(f"bound must be above 0, got {bound}")
    if covered is None:
        norms = distances_to(matrix, torch.zeros(matrix.shape[1], device=matrix.device))
    else:
        norms = covered_distances(matrix, None, covered)
    factors = (bound / norms.clamp(min=_TINY)).clamp(max=1)
    plain = shares_of(weights, len(matrix))
    clipped = plain * factors
    vector = with_noise(clipped_sum(matrix, clipped, plain, covered), noise, rng, covered).float()
    return Aggregate(vector, clipped / clipped.sum(), plain > 0)


def clipped_sum(
    matrix: torch.Tensor, clipped: torch.Tensor, plain: torch.Tensor, covered: Covered | None
) -> torch.Tensor:
    """Return Σ clippedᵢ xᵢ (d,); with ``covered`` divided by Σ plainᵢ over those who cover an element."""
    return weighted_sum(matrix, clipped) if covered is None else covered_step(matrix, clipped, plain, covered)


def with_noise(
    vector: torch.Tensor,
    noise: float,
    rng: np.random.Generator | None,
    covered: Covered | None = None,
) -> torch.Tensor:
    """Return ``vector`` (d,) plus normal noise of standard deviation ``noise`` per coordinate.

    Without noise it is the same tensor, and nothing is drawn. With ``covered`` only elements that somebody
    covers get noise. Raises ValueError unless noise ≥ 0, and for
    noise without ``rng``.
    """
    if not noise >= 0:
        raise ValueError(f"noise must not be negative, got {noise}")
    if noise == 0:
        return vector
    if rng is None:
        raise ValueError("noise needs a random generator")
    drawn = noise * torch.from_numpy(rng.standard_normal(len(vector)))
    return vector + (drawn if covered is None else drawn * covered.mask.any(dim=0))
