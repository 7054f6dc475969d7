"""Colluding attacks that go as far as a rule lets them: Min-Max, Min-Sum, and Fang's against median and Krum.

Where a length is searched for, all conditions are written in scalar products of the known updates, which are
formed once; the search itself touches numbers only.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from fedplat.updates import column_chunks

from .collusion import Collusion, Knowledge, RoundView

Perturbation = Literal["std", "unit", "sign"]


class _WithinTheHonest(Collusion):
    """Send μ + γ·u with the largest γ for which the result is no outlier among the known updates."""

    def __init__(self, *, perturbation: Perturbation = "std", knowledge: Knowledge = "all") -> None:
        super().__init__(knowledge=knowledge)
        self.perturbation: Perturbation = perturbation

    @abstractmethod
    def largest(self, squared: float, along: torch.Tensor, products: torch.Tensor) -> float:
        """Return γ ≥ 0, from ‖u‖² > 0, the products (k,) of u with the centred updates, and theirs (k, k)."""

    def collude(self, view: RoundView) -> torch.Tensor:
        """Return the perturbed mean for every colluder."""
        rows = view.known(self.knowledge)
        squared = 0.0
        along = torch.zeros(len(rows), dtype=torch.float64)
        products = torch.zeros(len(rows), len(rows), dtype=torch.float64)
        for _, deltas in view.deltas(rows):
            mean, push = self._push(deltas)
            deltas -= mean
            squared += float(push @ push)
            along += deltas @ push
            products += deltas @ deltas.t()
        gamma = self.largest(squared, along, products) if squared > 0 else 0.0
        out = torch.empty_like(view.reference)
        for at, deltas in view.deltas(rows):
            mean, push = self._push(deltas)
            out[at] = view.reference[at] + mean + gamma * push
        return view.same(out)

    def _push(self, deltas: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean of some columns and the direction to push it in; γ makes up for its length."""
        mean = deltas.mean(dim=0)
        if self.perturbation == "std":
            return mean, -deltas.std(dim=0, correction=0)
        return mean, -mean if self.perturbation == "unit" else -mean.sign()


class MinMax(_WithinTheHonest):
    """Send μ + γ·u, as far out as the two honest updates that lie furthest apart.

    The largest γ with maxᵢ ‖μ + γu − xᵢ‖ ≤ maxᵢⱼ ‖xᵢ − xⱼ‖, where u is −σ (``perturbation="std"``), −μ/‖μ‖
    (``"unit"``) or −sign(μ) (``"sign"``), of the known updates xᵢ. The paper searches for γ by halving; here
    it is the least root of k quadratics. O(n²·d). Shejwalkar and Houmansadr, NDSS 2021.

    >>> attack = MinMax(perturbation="unit")
    """

    def largest(self, squared: float, along: torch.Tensor, products: torch.Tensor) -> float:
        """Return the least of the γ at which the distance to some update reaches the bound."""
        norms = products.diagonal()
        bound = (norms[:, None] + norms[None, :] - 2 * products).max()
        # ‖γu − y‖² = γ²‖u‖² − 2γ·u·y + ‖y‖² for y = xᵢ − μ; the mean itself, γ = 0, is always within.
        room = (bound - norms).clamp(min=0)
        return float(((along + (along.square() + squared * room).sqrt()) / squared).min())


class MinSum(_WithinTheHonest):
    """Send μ + γ·u with no larger a sum of squared distances to the honest than some honest update has.

    The largest γ with Σᵢ ‖μ + γu − xᵢ‖² ≤ maxᵢ Σⱼ ‖xᵢ − xⱼ‖²; the rest as in :class:`MinMax`. So it lies
    as far from μ as the honest update furthest from it. O(n²·d). Shejwalkar and Houmansadr, NDSS 2021.

    >>> attack = MinSum(perturbation="sign")
    """

    def largest(self, squared: float, along: torch.Tensor, products: torch.Tensor) -> float:
        """Return the γ at which the sum reaches the bound."""
        norms = products.diagonal()
        # Centred updates sum to zero: Σⱼ ‖xᵢ − xⱼ‖² = k‖yᵢ‖² + Σ‖y‖², and Σ ‖γu − y‖² = kγ²‖u‖² + Σ‖y‖².
        return math.sqrt(float(norms.max()) / squared)


class FangMedian(Collusion):
    """Send, per coordinate, values just beyond all honest ones, on the side that they move away from.

    Where the honest mean rises above the model sent, a colluder draws its value below their minimum, from
    [min/b, min] for a positive minimum and [b·min, min] else; where it falls, above their maximum in the same
    way; where it stays, the colluder sends the mean (inferred). Made for the coordinate-wise median and
    trimmed mean; the paper has b = 2. O(n·d). Fang et al., USENIX Security 2020.

    >>> attack = FangMedian()
    """

    def __init__(self, *, b: Annotated[float, Field(gt=1)] = 2.0, knowledge: Knowledge = "all") -> None:
        super().__init__(knowledge=knowledge)
        self.b = b

    def collude(self, view: RoundView) -> torch.Tensor:
        """Return values beyond the honest, drawn for each colluder."""
        rows = view.known(self.knowledge)
        # Drawn row by row, so that the result does not hang on how columns are cut into chunks.
        out = torch.from_numpy(view.rng.random((len(view.own), view.models.shape[1]), dtype=np.float32))
        for start, stop in column_chunks(len(rows), view.models.shape[1]):
            at = slice(start, stop)
            models = view.models[rows, at].double()
            mean = models.mean(dim=0)
            rising = (mean - view.reference[at]).sign()
            edge = torch.where(rising > 0, models.amin(dim=0), models.amax(dim=0))
            # Away from zero is outwards for a minimum below zero and for a maximum above it.
            outwards = (edge > 0) == (rising < 0)
            far = torch.where(outwards, edge * self.b, edge / self.b)
            values = edge + out[:, at].double() * (far - edge)
            out[:, at] = torch.where(rising == 0, mean, values).float()
        return out


class FangKrum(Collusion):
    """Send w − λ·s, s the sign of the honest mean update, with the largest λ tried at which Krum chooses it.

    λ starts at the paper's upper bound and is halved until Krum, told the true number of colluders, prefers
    the crafted model to every honest one, or until λ < ``threshold``. The first colluder sends it exactly,
    the others at a distance of ``spread`` times its own from w, in random directions (inferred: the paper has
    an absolute 0.01); the choice is checked for the worst such directions. With ``"own"`` knowledge Krum is
    played among the known models and the crafted ones (inferred). O(n²·d). Fang et al., USENIX Security 2020.

    >>> attack = FangKrum()
    """

    def __init__(
        self,
        *,
        threshold: Annotated[float, Field(gt=0)] = 1e-5,
        spread: Annotated[float, Field(ge=0, lt=1)] = 0.01,
        knowledge: Knowledge = "all",
    ) -> None:
        super().__init__(knowledge=knowledge)
        self.threshold = threshold
        self.spread = spread

    def collude(self, view: RoundView) -> torch.Tensor:
        """Return the crafted model and others close to it."""
        rows = view.known(self.knowledge)
        moved = 0.0
        along = torch.zeros(len(rows), dtype=torch.float64)
        products = torch.zeros(len(rows), len(rows), dtype=torch.float64)
        signs = torch.empty_like(view.reference)
        for at, deltas in view.deltas(rows):
            signs[at] = deltas.mean(dim=0).sign()
            chosen = signs[at].double()
            moved += float(chosen.abs().sum())
            along += deltas @ chosen
            products += deltas @ deltas.t()
        step = self.largest(along, products, moved, len(view.own)) if moved > 0 else 0.0
        crafted = view.reference - step * signs
        out = crafted.repeat(len(view.own), 1)
        for row in out[1:]:
            noise = torch.from_numpy(view.rng.standard_normal(len(crafted), dtype=np.float32))
            row += noise * (self.spread * step * math.sqrt(moved) / float(noise.double().norm()))
        return out

    def largest(self, along: torch.Tensor, products: torch.Tensor, moved: float, colluders: int) -> float:
        """Return λ, from the products (k,) of s with the updates, theirs (k, k), ‖s‖², and m."""
        norms = products.diagonal()
        between = (norms[:, None] + norms[None, :] - 2 * products).clamp(min=0)
        step = largest_step(between.sqrt(), norms.sqrt(), moved, colluders)
        while step >= self.threshold:
            away = (norms + 2 * step * along + step**2 * moved).clamp(min=0)
            if krum_prefers(between, away, colluders, self.spread * step * math.sqrt(moved)):
                break
            step /= 2
        return step


def largest_step(between: torch.Tensor, lengths: torch.Tensor, dim: float, colluders: int) -> float:
    """Return the upper bound of λ: min Σ ‖xᵢ − xⱼ‖ / ((n − 2m − 1)√d) + max ‖xᵢ − w‖ / √d.

    ``between`` (k, k) and ``lengths`` (k,) are distances among k honest models and to the one they were sent;
    the sum is over the n − m − 2 nearest others, n = k + m. ``dim`` counts the coordinates that move, in the
    place of the paper's d, since the others are not attacked. A factor n − 2m − 1 below 1 is taken as 1
    (inferred). Fang et al., USENIX Security 2020, theorem 1.
    """
    k = len(lengths)
    nearest = between.sort(dim=1).values[:, 1 : max(k - 1, 1)].sum(dim=1).min()
    return float(nearest / max(k - colluders - 1, 1) + lengths.max()) / math.sqrt(dim)


def krum_prefers(between: torch.Tensor, away: torch.Tensor, colluders: int, apart: float) -> bool:
    """Whether Krum, for k honest and m colluding models and f = m, chooses a colluding one.

    ``between`` (k, k) are squared distances among the honest, ``away`` (k,) from them to the crafted model;
    the other m − 1 lie ``apart`` from it, so at worst by that much nearer to each honest one.
    """
    k = len(away)
    neighbours = max(k - 2, 0)
    near = torch.full((colluders - 1,), apart**2, dtype=torch.float64)
    crafted = torch.cat([near, away]).sort().values[:neighbours].sum()
    closest = (away.sqrt() - apart).clamp(min=0).square()[:, None].expand(k, colluders - 1)
    others = between.clone().fill_diagonal_(math.inf)
    honest = torch.cat([others, away[:, None], closest], dim=1).sort(dim=1).values[:, :neighbours].sum(dim=1)
    return bool(crafted < honest.min())
