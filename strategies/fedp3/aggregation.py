"""FedP3's rules, layer by layer over those who trained a layer: simple, weighted by layers, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Unpack, get_args

import torch
from pydantic import Field

from fedplat.errors import UserError
from fedplat.layer_map import LayerMap, ranges_of
from fedplat.updates import ClientUpdates

from ..aggregators import Aggregate, Aggregator, RoundPlan, RunningAggregate, mean
from ..aggregators.coverage import Covered, covered_distances, covered_step
from ..aggregators.running import RunningMean
from ..composed import FederatedStrategy
from ..parts import StrategyParts
from .settings import Rule

Ranges = Sequence[tuple[int, int]]


def layers_trained(updates: ClientUpdates) -> torch.Tensor:
    """Return how many hidden layers each client covers any of, N_i (n,) float64."""
    layers = LayerMap.of(updates.layout).hidden
    if updates.partial is None:
        return torch.full((len(updates),), float(len(layers)), dtype=torch.float64)
    count = torch.zeros(len(updates), dtype=torch.float64)
    for layer in layers:
        covered = torch.zeros(len(updates), dtype=torch.bool)
        for start, stop in ranges_of(updates.layout, layer.arrays):
            covered |= updates.partial[:, start:stop].any(dim=1)
        count += covered
    return count


def attention(
    params: torch.Tensor,
    reference: torch.Tensor,
    layers: Sequence[Ranges],
    mask: torch.Tensor | None = None,
    prior: torch.Tensor | None = None,
    *,
    step: float = 1.0,
    temperature: float | None = None,
) -> Aggregate:
    """Return, for each layer l, W + step · Σ aᵢ (Wᵢ − W) over the clients that cover it.

    a = softmax(−s/τ), times ``prior`` (n,) if given, of the distances s = ‖W − Wᵢ‖; τ is ``temperature``
    times the mean of s, 1 without. Who went far from the model counts less. ``layers`` are ranges of the d
    columns, ``mask`` (n, d) tells who covers what. Ours, after FedAtt (Ji et al., IJCNN 2019): FedP3 names an
    attention layer and does not say how it learns.

    >>> two = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    >>> attention(two, torch.tensor([2.0, 5.0]), [[(0, 1)], [(1, 2)]]).vector
    tensor([2., 5.])
    """
    n = len(params)
    out = reference.clone()
    total = torch.zeros(n, dtype=torch.float64)
    for ranges in layers:
        squares = torch.zeros(n, dtype=torch.float64)
        there = torch.zeros(n, dtype=torch.bool)
        for start, stop in ranges:
            part = _covered(mask, reference, n, start, stop)
            squares += covered_distances(params[:, start:stop], reference[start:stop], part).square()
            there |= part.mask.any(dim=1)
        if not bool(there.any()):
            continue
        shares = _softmax(squares.sqrt(), there, prior, temperature)
        for start, stop in ranges:
            part = _covered(mask, reference, n, start, stop)
            out[start:stop] = covered_step(params[:, start:stop], step * shares, shares, part)
            total += shares * (stop - start)
    weights = total / total.sum() if bool(total.sum() > 0) else total
    return Aggregate(out, weights, weights > 0)


def _softmax(
    distances: torch.Tensor, there: torch.Tensor, prior: torch.Tensor | None, temperature: float | None
) -> torch.Tensor:
    scale = float(distances[there].mean()) * (1.0 if temperature is None else temperature)
    logits = -distances / scale if scale > 0 else torch.zeros_like(distances)
    logits[~there] = -torch.inf
    shares = torch.softmax(logits, dim=0)
    if prior is not None:
        shares = shares * prior
    return shares / shares.sum()


def _covered(mask: torch.Tensor | None, reference: torch.Tensor, n: int, start: int, stop: int) -> Covered:
    own = (
        torch.ones((1, 1), dtype=torch.bool).expand(n, stop - start) if mask is None else mask[:, start:stop]
    )
    return Covered(own, reference[start:stop])


class LayerwiseRule(Aggregator):
    """The mean of each layer over those who trained it, in one of the paper's three forms.

    ================= ====================================================================================
    ``simple``        equal shares
    ``weighted``      shares in proportion to N_i, the number of layers a client trains, over those who train
                      the layer; the paper's sum over all clients would shrink layers
    ``attention``     see :func:`attention`
    ================= ====================================================================================

    ``by_samples`` multiplies by sample counts. What nobody trained stays bit for bit. Raises UserError for
    another name.
    """

    def __init__(
        self, rule: Rule, by_samples: bool = False, step: float = 1.0, temperature: float | None = None
    ) -> None:
        if rule not in get_args(Rule):
            raise UserError(f"aggregation = {rule!r}: expected one of {', '.join(get_args(Rule))}")
        self.rule: Rule = rule
        self.by_samples = by_samples
        self.step = step
        self.temperature = temperature

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Return the new model."""
        samples = torch.from_numpy(updates.num_examples) if self.by_samples else None
        if self.rule == "attention":
            layout = updates.layout
            layers = [ranges_of(layout, layer.arrays) for layer in LayerMap.of(layout).by_name.values()]
            prior = None if samples is None else samples.double() / float(samples.sum())
            return attention(
                updates.params,
                updates.reference,
                layers,
                updates.partial,
                prior,
                step=self.step,
                temperature=self.temperature,
            )
        weights = samples
        # With equal counts of layers the weights are those of the plain mean, to the bit.
        if self.rule == "weighted" and updates.partial is not None:
            count = layers_trained(updates)
            weights = count if samples is None else count * samples
        return mean(updates.params, weights, Covered.by(updates))

    def running(self, plan: RoundPlan) -> RunningAggregate | None:
        """Return the mean as a sum that grows, where all clients train everything."""
        return None if self.rule == "attention" else RunningMean(plan, self.by_samples)


class FedP3(FederatedStrategy):
    """FedP3's aggregation: each layer over the clients that trained it.

    Give it the sub-models of :class:`.scheme.FedP3Scheme`. ``aggregation`` is ``simple`` or ``weighted`` as
    in the paper, or ``attention``, which is ours. Sample counts play no part unless ``by_samples`` is set:
    the paper's clients have equal ones. Where all train all layers, it is federated averaging. Yi et al.,
    ICLR 2024.

        FedP3(submodels=scheme).start(grid, initial_arrays, num_rounds=500)
    """

    def __init__(
        self,
        *,
        aggregation: Annotated[Rule, Field(description="how clients' layers are combined")] = "simple",
        by_samples: Annotated[bool, Field(description="weigh by sample counts too")] = False,
        step: Annotated[float, Field(gt=0, description="of attention")] = 1.0,
        temperature: Annotated[float | None, Field(gt=0, description="of attention, over the mean")] = None,
        **parts: Unpack[StrategyParts],
    ) -> None:
        super().__init__(LayerwiseRule(aggregation, by_samples, step, temperature), **parts)
