"""Attackers that act together and know the honest replies of the round; and the simplest of such attacks.

None of them can run on a client, which knows its own reply alone: there they train honestly, and what they
send is forged by ``CollusionGrid`` of :mod:`fedplat.clients.collusion_grid`, between strategy and engine.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field

from fedplat.rng import generator
from fedplat.updates import column_chunks

from .base import Attack

log = logging.getLogger("fedplat")

Knowledge = Literal["all", "own"]


@dataclass(frozen=True)
class RoundView:
    """What one group of colluders sees of a round, among the clients that were sent the same model as they.

    The rows ``honest`` (h,) and ``own`` (m,) of ``models`` (r, p) float32 are the parameters that the honest
    clients and the colluders trained, by node id; other rows are not theirs to look at. ``honest_ids`` and
    ``own_ids`` are the clients' numbers, ``reference`` (p,) the parameters they were sent. ``clients`` counts
    all who replied, so also those who follow another attack. ``memory`` is what the attack may keep from
    round to round, as plain values and tensors. All arrays are left as they are.
    """

    models: torch.Tensor
    reference: torch.Tensor
    honest: torch.Tensor
    own: torch.Tensor
    honest_ids: tuple[int, ...]
    own_ids: tuple[int, ...]
    clients: int
    server_round: int = 1
    rng: np.random.Generator = field(default_factory=lambda: generator(0, "collusion"))
    memory: dict[str, Any] = field(default_factory=dict)

    def known(self, knowledge: Knowledge = "all") -> torch.Tensor:
        """Return the rows to learn from: the honest ones, or the colluders' own, as honestly trained models.

        Where no honest reply is to be had, the colluders' own serve for ``"all"`` as well.
        """
        return self.honest if knowledge == "all" and len(self.honest) else self.own

    def deltas(self, rows: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the updates of some rows in chunks of columns: where, and a new (k, columns) float64."""
        for start, stop in column_chunks(len(rows), self.models.shape[1]):
            at = slice(start, stop)
            yield at, self.models[rows, at].double().sub_(self.reference[at])

    def same(self, model: torch.Tensor) -> torch.Tensor:
        """Return one model (p,) as what every colluder sends, (m, p), without a copy."""
        return model.expand(len(self.own), -1)


class Collusion(Attack):
    """An attack of several clients together. ``collude`` says what they send instead of what they trained.

    ``knowledge`` is what they learn from: ``"all"`` honest replies of the round, or only their ``"own"``,
    honestly trained models. Buffers and sample counts are sent as they are. An instance keeps no state.
    """

    def __init__(self, *, knowledge: Knowledge = "all") -> None:
        self.knowledge: Knowledge = knowledge

    @abstractmethod
    def collude(self, view: RoundView) -> torch.Tensor:
        """Return the parameters (m, p) float32 to send, one row for each of ``view.own``."""


class ALittleIsEnough(Collusion):
    """Send μ − z·σ of the known updates, per coordinate: within their spread, yet all to one side.

    ``z`` defaults to the most that still lets a majority lie further out, see :func:`largest_hidden_z`; that
    is 0 and harmless where there are few colluders, such as 2 of 10, which is logged. σ has the denominator
    n. O(n·d). Baruch et al., NeurIPS 2019, whose attackers know their ``"own"`` models alone.

    >>> attack = ALittleIsEnough(z=1.5)
    """

    def __init__(self, *, z: float | None = None, knowledge: Knowledge = "all") -> None:
        super().__init__(knowledge=knowledge)
        self.z = z

    def collude(self, view: RoundView) -> torch.Tensor:
        """Return the shifted mean for every colluder."""
        z = largest_hidden_z(view.clients, len(view.own)) if self.z is None else self.z
        if z <= 0 and not view.memory.get("warned"):
            view.memory["warned"] = True
            log.warning(
                "%s: z = %.3g with %d colluders among %d clients does no harm; set z or take more colluders",
                self.label or "alie",
                z,
                len(view.own),
                view.clients,
            )
        out = torch.empty_like(view.reference)
        for at, deltas in view.deltas(view.known(self.knowledge)):
            shifted = deltas.mean(dim=0) - z * deltas.std(dim=0, correction=0)
            out[at] = view.reference[at] + shifted
        return view.same(out)


def largest_hidden_z(clients: int, colluders: int) -> float:
    """Return Φ⁻¹((n − m − s) / (n − m)) with s = ⌊n/2⌋ + 1 − m, for n clients of whom m collude.

    s honest clients with values further out make a majority with the colluders. Colluders who are a majority
    by themselves are taken to need one (inferred); where the formula has no value the result is 0. Baruch et
    al., NeurIPS 2019, algorithm 3.

    >>> round(largest_hidden_z(50, 24), 7), largest_hidden_z(10, 2)
    (1.4260769, 0.0)
    """
    honest = clients - colluders
    supporters = max(clients // 2 + 1 - colluders, 1)
    return NormalDist().inv_cdf((honest - supporters) / honest) if 0 < supporters < honest else 0.0


class InnerProduct(Collusion):
    """Send −ε times the mean of the known updates: small and plausible, but pointing backwards.

    The plain mean turns around once ε·m exceeds the number of honest clients; a smaller ε slows it down and
    passes rules that look at lengths and distances. ε = 0.5 is Blades' default (its authors' benchmark, not
    the paper's); Karimireddy et al., ICLR 2022, use 0.1. O(n·d). Xie et al., UAI 2019.

    >>> attack = InnerProduct(epsilon=0.1)
    """

    def __init__(self, *, epsilon: Annotated[float, Field(gt=0)] = 0.5, knowledge: Knowledge = "all") -> None:
        super().__init__(knowledge=knowledge)
        self.epsilon = epsilon

    def collude(self, view: RoundView) -> torch.Tensor:
        """Return the scaled negative mean for every colluder."""
        out = torch.empty_like(view.reference)
        for at, deltas in view.deltas(view.known(self.knowledge)):
            out[at] = view.reference[at] - self.epsilon * deltas.mean(dim=0)
        return view.same(out)


class Mimic(Collusion):
    """All send what one honest client sends, who so gets the weight of many; nothing sent is conspicuous.

    ``victim`` is that client's number. By default it is the one whose update lies furthest from the mean
    along the direction in which the honest updates vary most, in the first round attacked, and it is kept
    (the paper averages over a few first rounds). In a round without it, or if it is no honest client, one
    is chosen in that way for this round alone (inferred). O(n²·d) where a client is chosen, else O(d).
    Karimireddy et al., ICLR 2022.

    >>> attack = Mimic(victim=3)
    """

    def __init__(self, *, victim: Annotated[int, Field(ge=0)] | None = None) -> None:
        super().__init__()
        self.victim = victim

    def collude(self, view: RoundView) -> torch.Tensor:
        """Return the victim's model for every colluder."""
        kept = view.memory.get("victim", self.victim)
        rows = view.known()
        if kept in view.honest_ids:
            return view.same(view.models[rows[view.honest_ids.index(kept)]])
        chosen = furthest_out(view, rows)
        if kept is None and view.honest_ids:
            view.memory["victim"] = view.honest_ids[chosen]
        elif kept is not None and not view.memory.get("warned"):
            view.memory["warned"] = True
            log.warning(
                "%s: client %d is not among the honest ones of round %d, another is copied",
                self.label or "mimic",
                kept,
                view.server_round,
            )
        return view.same(view.models[rows[chosen]])


def furthest_out(view: RoundView, rows: torch.Tensor) -> int:
    """Return which of the rows has the longest projection on the first principal direction of their updates.

    The projections follow from the top eigenvector of the (k, k) scalar products of the centred updates,
    whose sign is arbitrary, so lengths are compared. On a tie the first.
    """
    products = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for _, deltas in view.deltas(rows):
        deltas -= deltas.mean(dim=0)
        products += deltas @ deltas.t()
    values, vectors = torch.linalg.eigh(products)
    lengths = vectors[:, -1].abs() * values[-1].clamp(min=0).sqrt()
    # Equal but for rounding is a tie: of two clients, both are equally far from their mean.
    return int((lengths >= lengths.max() * (1 - 1e-9)).nonzero()[0])
