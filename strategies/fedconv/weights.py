"""FedConv's aggregation: a weight per client and array, or number, learned on the server's own data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Unpack

import torch
from pydantic import Field
from torch import Tensor

from fedplat.arrays import Layout
from fedplat.errors import UserError
from fedplat.rng import generator
from fedplat.updates import ClientUpdates

from ..aggregators import Aggregate, Aggregator, mean
from ..composed import FederatedStrategy
from ..parts import StrategyParts
from ..submodels import SubModelContext
from .fitting import FitPlan, Schedule, fit
from .server_side import Bound

log = logging.getLogger("fedplat")

Per = Literal["tensor", "element"]
Start = Literal["ones", "normal"]


class ServerDataRule(Aggregator):
    """A rule that trains on data of the server's own, which it is given by :meth:`bind`."""

    name: ClassVar[str]
    _given: Bound | None = None

    def bind(self, context: SubModelContext) -> None:
        """Take part in a run; raises UserError without server data, or for a model with BatchNorm."""
        bound = Bound(context)
        _ = bound.split, bound.net
        self._given = bound

    @property
    def bound(self) -> Bound:
        """The run; raises UserError before it is known."""
        if self._given is None:
            raise UserError(
                f"{self.name} does not know the model yet: call bind(SubModelContext.of(...)) first"
            )
        return self._given


class LearnedWeightsRule(ServerDataRule):
    """W_l = Σⱼ v_jl · sⱼ · w_jl / Σⱼ sⱼ with v fitted on the server's data; kept by node."""

    name = "fedconv-weights"

    def __init__(
        self,
        per: Per,
        start: Start,
        normalise: bool,
        kld_lambda: float,
        kld_temperature: float | None,
        plan: FitPlan,
        seed: int,
    ) -> None:
        self.per = per
        self.start = start
        self.normalise = normalise
        self.kld_lambda = kld_lambda
        self.kld_temperature = kld_temperature
        self.plan = plan
        self.seed = seed
        self.kept: dict[int, Tensor] = {}

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Fit the weights of this round's clients from where they were, and combine."""
        bound, p = self.bound, updates.layout.num_params
        order = torch.from_numpy(updates.node_ids.argsort())  # so that the order of clients is no matter
        rows = updates.params[order, :p].double()
        claimed = torch.from_numpy(updates.num_examples)[order].double()
        shares = self._shares(updates, order, claimed)
        if not (shares > 0).any():
            return mean(updates.params, None)
        blend = Blend(updates.layout, rows, shares, updates.reference[:p].double(), self.normalise, self.per)
        nodes = [int(node) for node in updates.node_ids[order.numpy()]]
        values = torch.stack([self._of_node(node, updates, blend) for node in nodes])
        if self.kld_temperature is not None and not any(node in self.kept for node in nodes):
            values = self._prior(blend, claimed, updates).float()
        device = bound.split.x.device
        rng = generator(self.seed, "fedconv-weights", updates.server_round)
        fitted = fit(
            lambda v, x: bound.net(blend(v[0].view(len(nodes), -1)).float()[None].to(device), x),
            values.reshape(1, -1),
            bound.split,
            self.plan,
            rng,
            self._penalty(blend, len(nodes)) if self.kld_lambda else None,
        )
        values = fitted.values[0].view(len(nodes), -1)
        if bool(torch.isfinite(fitted.loss[0])):
            self.kept.update({node: row.clone() for node, row in zip(nodes, values, strict=True)})
        else:
            values = torch.ones_like(values)
        log.info(
            "round %d: aggregation weights of %d clients: accuracy %.1f %% on the choosing part, epoch %d",
            updates.server_round,
            len(nodes),
            100 * float(fitted.accuracy[0]),
            int(fitted.epoch[0]),
        )
        with torch.no_grad():
            vector = blend(values).float()
        effect = blend.effect(values)
        back = torch.argsort(order)
        weights = (effect / effect.sum() if effect.sum() > 0 else claimed / claimed.sum())[back]
        figures = {
            "weights-accuracy": float(fitted.accuracy[0]),
            "weights-steps": float(fitted.steps),
        }
        scores = {"mean-weight": values.double().mean(1)[back]}
        return Aggregate(vector, weights, weights > 0, diagnostics=figures, scores=scores)

    def _shares(self, updates: ClientUpdates, order: Tensor, claimed: Tensor) -> Tensor:
        """Return sⱼ / Σ sⱼ, (n, 1), or (n, p) over those who cover each number."""
        claimed = claimed[:, None]
        if updates.coverage is None:
            return claimed / claimed.sum().clamp(min=1e-300)
        covered = updates.coverage[order, : updates.layout.num_params].double() * claimed
        total = covered.sum(0)
        return covered / torch.where(total > 0, total, 1.0)

    def _of_node(self, node: int, updates: ClientUpdates, blend: Blend) -> Tensor:
        if node in self.kept and len(self.kept[node]) == blend.width:
            return self.kept[node]
        if self.start == "ones":
            return torch.ones(blend.width)
        drawn = generator(self.seed, "fedconv-weights-start", node, updates.server_round)
        return torch.from_numpy(drawn.standard_normal(blend.width)).float()

    def _prior(self, blend: Blend, claimed: Tensor, updates: ClientUpdates) -> Tensor:
        """Return v ∝ exp(-KL(W_G ‖ w_j) / T) per array, so that the weighted mean of each is 1."""
        p = updates.layout.num_params
        old = updates.reference[:p].double()
        distances = torch.stack([blend.divergences(old, row) for row in blend.rows])
        v = torch.exp(-(distances - distances.min(0).values) / (self.kld_temperature or 1.0))
        v = v / ((v * claimed[:, None]).sum(0) / claimed.sum()).clamp(min=1e-12)
        return v if self.per == "tensor" else v.repeat_interleave(torch.tensor(blend.lengths), dim=1)

    def _penalty(self, blend: Blend, clients: int) -> Callable[[Tensor], Tensor]:
        return lambda v: (
            self.kld_lambda * blend.divergences(blend.old, blend(v[0].view(clients, -1))).sum()[None].float()
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the weights by node."""
        return {"weights": {str(node): row for node, row in self.kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the weights back."""
        self.kept = {int(node): row for node, row in state.get("weights", {}).items()}


class Blend:
    """Weighted sums of models: ``rows`` (n, p) times ``shares`` (n, 1) or (n, p) times weights (n, width).

    With ``normalise``, each array is first mapped to 0..1 by its least and largest number over all clients,
    and the sum is mapped back, so that weights of 1 give the mean either way.
    """

    def __init__(
        self, layout: Layout, rows: Tensor, shares: Tensor, old: Tensor, normalise: bool, per: Per
    ) -> None:
        own = [entry for entry in layout.entries if entry.in_vector and entry.start < layout.num_params]
        self.lengths = [entry.stop - entry.start for entry in sorted(own, key=lambda entry: entry.start)]
        self.width = len(self.lengths) if per == "tensor" else layout.num_params
        self.per = per
        self.rows, self.shares, self.old = rows, shares, old
        self.low: Tensor | float = 0.0
        if normalise:
            low = [part.min() for part in rows.split(self.lengths, dim=1)]
            self.low = torch.stack(low).repeat_interleave(torch.tensor(self.lengths))
        # What nobody covers keeps its value.
        self.rest = old * (shares.sum(0) == 0) - (self.low * (shares.sum(0) == 0))
        self._base = (rows - self.low) * shares

    def __call__(self, weights: Tensor) -> Tensor:
        """Return the sum (p,) float64 for weights (n, width). Spans divide out; least numbers do not."""
        weights = weights.double()
        if self.per == "element":
            total = (weights * self._base).sum(0)
        else:
            parts = self._base.split(self.lengths, dim=1)
            total = torch.cat([weights[:, i] @ part for i, part in enumerate(parts)])
        return total + self.rest + self.low

    def effect(self, weights: Tensor) -> Tensor:
        """Return each client's share in the sum (n,): negative weights count as none."""
        positive = weights.double().clamp(min=0)
        if self.per == "tensor":
            positive = positive.repeat_interleave(torch.tensor(self.lengths), dim=1)
        return (positive * self.shares).mean(1)

    def divergences(self, first: Tensor, second: Tensor) -> Tensor:
        """Return KL(first ‖ second) per array (l,), each array being a distribution by softmax."""
        pairs = zip(first.split(self.lengths), second.split(self.lengths), strict=True)
        terms = [(a.log_softmax(0), b.log_softmax(0)) for a, b in pairs]
        return torch.stack([(a.exp() * (a - b)).sum() for a, b in terms])


class LearnedWeights(FederatedStrategy):
    """FedConv's mean, whose weights are learned on a few labelled samples of the server's.

    W_l = Σⱼ v_jl · sⱼ · w_jl / Σⱼ sⱼ for array l, client j with sⱼ samples: v is fitted by Adam to the
    cross-entropy on the server's samples, of which a fifth chooses the epoch. It starts as 1, which is
    federated averaging, and is kept from round to round by node. ``per = "element"`` learns one weight per
    client and number, as the released code does (from ``start = "normal"``).

    ``normalise`` maps each array to 0..1 over all clients first. ``kld_lambda`` adds λ Σ_l KL(W_G,l ‖ W_l);
    ``kld_temperature`` T instead starts v in proportion to exp(-KL(W_G,l ‖ w_jl) / T).

    From the paper: the sum, the objective, rate and epochs. Inferred: the range of the normalisation, the
    softmax that makes arrays distributions, and that the divergence is that of the new model: the published
    one does not depend on v. Shen et al., MobiSys 2024 (arXiv 2502.20639).

    ``fedplat run`` gives the server the ``public_samples`` of the table ``[submodels]``.
    """

    def __init__(
        self,
        *,
        per: Annotated[Per, Field(description="one weight per client and array, or number")] = "tensor",
        start: Annotated[Start, Field(description="first weights: 1, or drawn")] = "ones",
        normalise: Annotated[bool, Field(description="map arrays to 0..1 first")] = False,
        kld_lambda: Annotated[float, Field(ge=0, description="weight of the divergence")] = 0.0,
        kld_temperature: Annotated[
            float | None, Field(gt=0, description="start from weights by divergence")
        ] = None,
        epochs: Annotated[int, Field(ge=0, description="passes over the server's data")] = 20,
        lr: Annotated[float, Field(gt=0, description="learning rate of Adam")] = 1e-3,
        schedule: Schedule = "none",
        **parts: Unpack[StrategyParts],
    ) -> None:
        rule = LearnedWeightsRule(
            per,
            start,
            normalise,
            kld_lambda,
            kld_temperature,
            FitPlan(epochs, lr, schedule=schedule),
            parts.get("seed", 0),
        )
        self._rule = rule
        super().__init__(rule, **parts)

    def bind(self, context: SubModelContext) -> None:
        """Take part in a run; the model and the server's data come from ``context``."""
        self._rule.bind(context)


class ServerAloneRule(ServerDataRule):
    """The model sent, trained on the server's data; the clients' play no part."""

    name = "server-alone"

    def __init__(self, plan: FitPlan, seed: int) -> None:
        self.plan = plan
        self.seed = seed

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Train; nobody has a share in the outcome."""
        rng = generator(self.seed, "server-alone", updates.server_round)
        start = updates.reference[None, : updates.layout.num_params].clone()
        fitted = self.bound.tuned(self.bound.net, start, self.plan, rng)
        nobody = torch.zeros(len(updates), dtype=torch.float64)
        figures = {"server-accuracy": float(fitted.accuracy[0]), "server-steps": float(fitted.steps)}
        return Aggregate(fitted.values[0].cpu(), nobody, nobody > 0, diagnostics=figures)


class ServerAlone(FederatedStrategy):
    """A control: the server trains on its own few samples alone, and what clients send is thrown away.

    What a method with server data gains has to be gained over this. Clients are asked all the same, so that
    rounds, traffic and clocks are those of the others.

    ``fedplat run`` gives the server the ``public_samples`` of the table ``[submodels]``.
    """

    def __init__(
        self,
        *,
        epochs: Annotated[int, Field(ge=1, description="passes over the server's data per round")] = 20,
        lr: Annotated[float, Field(gt=0, description="learning rate of Adam")] = 1e-3,
        **parts: Unpack[StrategyParts],
    ) -> None:
        rule = ServerAloneRule(FitPlan(epochs, lr), parts.get("seed", 0))
        self._rule = rule
        super().__init__(rule, **parts)

    def bind(self, context: SubModelContext) -> None:
        """Take part in a run; the model and the server's data come from ``context``."""
        self._rule.bind(context)
