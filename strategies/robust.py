"""Byzantine-robust rules from the literature, as ready strategies.

Rules that are told how many clients may lie take ``f``; None means the most that the rule allows for the
number of clients. A declared ``f`` that does not fit is refused before the first round. A round with fewer
replies than planned uses the largest ``f`` that still fits (``diagnostics["f"]`` tells), and the
coordinate-wise median if none does.

Clients with sub-models are compared on what two of them share, and combined where they cover, see
:mod:`fedplat.strategies.aggregators.coverage`. A rule that takes one client's model then changes only what
that client covers. Over few elements chance moves a distance more: if honest clients differ by little else,
the lowest score of all is often that of a small sub-model, and so is, a little more often, one of the
highest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Unpack

import torch
from pydantic import Field

from fedplat.rng import generator
from fedplat.updates import ClientUpdates

from .aggregators import Aggregate, Aggregator, RoundPlan, RunningAggregate, median
from .aggregators.coverage import Covered, moved
from .aggregators.geometric import centered_clipping, geometric_median, norm_clipping, smoothed_weiszfeld
from .aggregators.krum import bulyan, check_bulyan, check_krum, check_meamed, meamed, multi_krum
from .aggregators.running import RunningClipping
from .composed import FederatedStrategy
from .parts import StrategyParts

Liars = Annotated[int, Field(ge=0)] | None
Positive = Annotated[float, Field(gt=0)]


class DeclaredRule(Aggregator):
    """A rule that is told the number of lying clients.

    ``combine(matrix, f)`` is the rule; where clients have sub-models it gets ``covered`` too, see
    :class:`fedplat.strategies.aggregators.coverage.Covered`. ``refuse(n, f)`` raises InfeasibleError where it
    does not work, and ``most(n)`` is the largest f it allows, negative if there is none.
    """

    def __init__(
        self,
        f: int | None,
        combine: Callable[..., Aggregate],
        refuse: Callable[[int, int], None],
        most: Callable[[int], int],
    ) -> None:
        self.f = f
        self._combine = combine
        self._refuse = refuse
        self._most = most

    def check(self, clients: int) -> None:
        """Raise InfeasibleError if the declared f does not fit, or if no f does."""
        self._refuse(clients, max(self._most(clients), 0) if self.f is None else self.f)

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Apply the rule with the declared f, or the largest that fits this round."""
        most, covered = self._most(len(updates)), Covered.by(updates)
        if most < 0:
            return median(updates.params, covered)
        f = most if self.f is None else min(self.f, most)
        parts = {} if covered is None else {"covered": covered}
        result = self._combine(updates.params, f, **parts)
        return replace(result, diagnostics={**result.diagnostics, "f": float(f)})


def krum_rule(f: int | None, m: int | None) -> DeclaredRule:
    """Return the mean of the m updates with the lowest Krum scores; in a short round of all there are."""

    def combine(matrix: torch.Tensor, f: int, covered: Covered | None = None) -> Aggregate:
        return multi_krum(matrix, f, None if m is None else min(m, len(matrix)), covered)

    return DeclaredRule(f, combine, partial(check_krum, m=m), lambda n: (n - 3) // 2)


class GeometricMedianRule(Aggregator):
    """The point with the least sum of distances to the clients' models."""

    def __init__(self, tolerance: float) -> None:
        self.tolerance = tolerance

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Return the geometric median."""
        covered = Covered.by(updates)
        return geometric_median(updates.params, tolerance=self.tolerance, covered=covered)


class SmoothedWeiszfeldRule(Aggregator):
    """A few of Weiszfeld's steps from the mean, weighted by sample count or not."""

    def __init__(self, steps: int, nu: float, weighted: bool) -> None:
        self.steps, self.nu, self.weighted = steps, nu, weighted

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Return the point after the steps."""
        weights = torch.from_numpy(updates.num_examples) if self.weighted else None
        covered = Covered.by(updates)
        return smoothed_weiszfeld(updates.params, weights, steps=self.steps, nu=self.nu, covered=covered)


class ClippingRule(Aggregator):
    """Mean of updates clipped to a radius, with noise, or centred clipping around the last model."""

    def __init__(self, radius: float, steps: int | None, noise: float = 0.0, seed: int = 0) -> None:
        self.radius = radius
        self.steps = steps
        self.noise = noise
        self.seed = seed

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Clip the updates, combine them, and add the result to the model they started from."""
        deltas, covered = updates.deltas(), Covered.deltas(updates)
        if self.steps is None:
            result = norm_clipping(
                deltas,
                self.radius,
                torch.from_numpy(updates.num_examples),
                noise=self.noise,
                rng=generator(self.seed, "clipping-noise", updates.server_round),
                covered=covered,
            )
        else:
            result = centered_clipping(deltas, self.radius, steps=self.steps, covered=covered)
        vector = moved(updates.reference, result.vector, covered)
        return Aggregate(vector, result.weights, result.accepted)

    def running(self, plan: RoundPlan) -> RunningAggregate | None:
        """Return norm clipping as a sum that grows; centred clipping looks at all updates in every step."""
        if self.steps is not None:
            return None
        return RunningClipping(plan, self.radius, self.noise, self.seed)


class Krum(FederatedStrategy):
    """The one client's model that is closest to its n − f − 2 nearest others.

    Score Σ ‖wᵢ − wⱼ‖², lowest wins, the first on a tie; needs 2f + 2 < n. Sample counts play no part.
    Distances are exact to float64. Of sub-models the winner may be a small one, and then little of the model
    moves: take MultiKrum there. O(n²·d). Blanchard et al., NeurIPS 2017.

        Krum(f=2).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(self, *, f: Liars = None, **parts: Unpack[StrategyParts]) -> None:
        super().__init__(krum_rule(f, 1), **parts)


class MultiKrum(FederatedStrategy):
    """The plain mean of the ``m`` clients with the lowest Krum scores, by default n − f of them.

    Needs 2f + 2 < n. Sample counts play no part. O(n²·d). Blanchard et al., NeurIPS 2017.

        MultiKrum(f=2).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        *,
        f: Liars = None,
        m: Annotated[int, Field(ge=1)] | None = None,
        **parts: Unpack[StrategyParts],
    ) -> None:
        super().__init__(krum_rule(f, m), **parts)


class Bulyan(FederatedStrategy):
    """n − 2f clients chosen by repeated Krum; per coordinate the mean of the n − 4f nearest their median.

    Needs n ≥ 4f + 3. Sample counts play no part. O(n²·d). El Mhamdi et al., ICML 2018.

        Bulyan(f=1).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(self, *, f: Liars = None, **parts: Unpack[StrategyParts]) -> None:
        super().__init__(DeclaredRule(f, bulyan, check_bulyan, lambda n: (n - 3) // 4), **parts)


class Meamed(FederatedStrategy):
    """Per coordinate, the mean of the n − f values nearest the median.

    Needs 2f < n. Sample counts play no part. O(n log n · d). Xie et al., 2018.

        Meamed(f=2).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(self, *, f: Liars = None, **parts: Unpack[StrategyParts]) -> None:
        super().__init__(DeclaredRule(f, meamed, check_meamed, lambda n: (n - 1) // 2), **parts)


class GeometricMedian(FederatedStrategy):
    """The model with the least sum of L2 distances to the clients' models; sample counts play no part.

    Withstands fewer than half the clients. O(n·d) a step. Pillutla et al., 2019 (RFA), computed to
    ``tolerance`` instead of a few smoothed steps.

        GeometricMedian().start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(self, *, tolerance: Positive = 1e-6, **parts: Unpack[StrategyParts]) -> None:
        super().__init__(GeometricMedianRule(tolerance), **parts)


class RFA(FederatedStrategy):
    """A few of Weiszfeld's smoothed steps from the mean towards the geometric median, by sample count.

    z ← Σ βᵢ wᵢ / Σ βᵢ, βᵢ = nᵢ / max(nu, ‖wᵢ − z‖), ``steps`` times. Cheaper than GeometricMedian and as
    robust only once it has converged; ``weighted=False`` leaves claimed sample counts out. The defaults of
    steps and nu are ours. O(n·d) a step. Pillutla et al., 2019.

        RFA().start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        *,
        steps: Annotated[int, Field(ge=1)] = 3,
        nu: Positive = 1e-6,
        weighted: bool = True,
        **parts: Unpack[StrategyParts],
    ) -> None:
        super().__init__(SmoothedWeiszfeldRule(steps, nu, weighted), **parts)


class CenteredClipping(FederatedStrategy):
    """The model moved by the clients' updates, each clipped to a ball of radius ``tau`` around the guess.

    Starts every round from the last model, ``steps`` times. tau must suit the length of honest updates:
    compare with ``update_norm`` in clients.jsonl. The paper keeps momentum on the clients and starts from the
    last aggregate; here updates are clipped as they come. O(n·d) a step. Karimireddy et al., ICML 2021.

        CenteredClipping(tau=1.0).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        *,
        tau: Positive = 1.0,
        steps: Annotated[int, Field(ge=1)] = 3,
        **parts: Unpack[StrategyParts],
    ) -> None:
        super().__init__(ClippingRule(tau, steps), **parts)


class NormClipping(FederatedStrategy):
    """The mean, weighted by sample count, of updates scaled down to an L2 norm of ``bound``, with ``noise``.

    w ← w + Σᵢ nᵢ Δᵢ·min(1, bound / ‖Δᵢ‖) / Σᵢ nᵢ + N(0, noise²) per coordinate. Bounds how far a client can
    move the model by scaling; it does not look at directions. Noise, 0 by default, weakens backdoors further
    and costs accuracy; it carries no privacy guarantee by itself. O(n·d). Sun et al., 2019.

        NormClipping(bound=1.0, noise=0.001).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        *,
        bound: Positive = 1.0,
        noise: Annotated[float, Field(ge=0, description="standard deviation per coordinate")] = 0.0,
        **parts: Unpack[StrategyParts],
    ) -> None:
        super().__init__(ClippingRule(bound, None, noise, parts.get("seed", 0)), **parts)
