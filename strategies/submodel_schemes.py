"""Schemes of fixed levels: a client gets the widest of a few sub-models that its device can train in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedplat.arrays import FlatArrays
from fedplat.emulation.schedule import Budget
from fedplat.errors import UserError
from fedplat.models.cutting import Cut
from fedplat.rng import generator

from .nodes import Node
from .submodel_fit import misfit
from .submodel_norms import has_batch_norm, has_norm, with_statistics_of
from .submodels import (
    DISTILLATION,
    MASKED_LOSS,
    SCALER,
    STATIC_NORM,
    WIDTHS,
    CutScheme,
    SubModelContext,
    SubModelSpec,
)

Width = Annotated[float, Field(gt=0, le=1)]
Widths = Annotated[tuple[Width, ...], Field(min_length=1, description="shares of the units, one per level")]
Shares = Annotated[
    tuple[Annotated[float, Field(ge=0)], ...] | None,
    Field(description="of the clients, by level; without devices and shares: equal ones"),
]
Dynamic = Annotated[bool, Field(description="draw levels by the shares anew in each round")]
ScalerSetting = Annotated[
    Literal["auto", "off", "training", "always"],
    Field(description="divide what cut layers give by their width; auto: in training, if there are norms"),
]
MaskedLoss = Annotated[bool, Field(description="the loss is over the classes that a client has, alone")]
BatchNorm = Annotated[
    Literal["averaged", "static"],
    Field(description="running statistics: clients' ones averaged, or found by the server on public samples"),
]

_DEFAULT = (1.0, 0.5, 0.25, 0.125, 0.0625)


class LevelScheme(CutScheme):
    """Base of the schemes with levels; a level is a share of the units (or blocks) in (0, 1].

    With a budget, a client gets the largest level whose training memory, with the process's own, fits into
    it and that can be sent, trained and sent back before the deadline, if there is one. ``shares`` of the
    clients, drawn with the run's seed once or, if ``dynamic``, in each round, are what levels they get at
    most; without shares and devices the levels get equal ones.
    """

    label = "width"

    def __init__(
        self, widths: Sequence[float] = _DEFAULT, shares: Sequence[float] | None = None, dynamic: bool = False
    ) -> None:
        super().__init__()
        if not widths or len(set(widths)) < len(widths) or not all(0 < width <= 1 for width in widths):
            raise UserError(f"widths = {list(widths)}: expected different shares above 0 and at most 1")
        if shares is not None and (
            len(shares) != len(widths) or min(shares) < 0 or not np.isfinite(shares).all() or sum(shares) <= 0
        ):
            raise UserError(
                f"shares = {list(shares)}: expected {len(widths)} numbers, as many as widths, 0 or more and "
                f"not all 0"
            )
        order = sorted(range(len(widths)), key=lambda i: -widths[i])
        self.levels = tuple(widths[i] for i in order)
        self.shares = None if shares is None else tuple(shares[i] for i in order)
        self.dynamic = dynamic
        self._why: dict[int, str] = {}
        self._given: list[float] = []

    @property
    def diagnostics(self) -> Mapping[str, float]:  # type: ignore[override]
        """How many clients got each level, and how many none that fits."""
        counts = Counter(f"submodels.{self._name(level)}" for level in self._given)
        return {**dict(sorted(counts.items())), "submodels.none-fits": float(len(self._why))}

    def begin_round(self, model: FlatArrays, server_round: int) -> None:
        """Forget the last round."""
        super().begin_round(model, server_round)
        self._why, self._given = {}, []

    def assign(self, node: Node, budget: Budget | None, server_round: int) -> SubModelSpec | None:
        """Return the largest level that fits, at most the one that is the client's; None if none does."""
        why = ""
        for level in self._allowed(node, budget, server_round):
            cut = self.cut(level, node, server_round)
            why = misfit(self.context, node, budget, cut.sizes)
            if not why:
                self._given.append(level)
                kind = self._name(level) + self.variant(node, server_round)
                return self.spec_of(kind, cut, self.config(level))
        self._why[node.node_id] = why
        return None

    def why(self, node: Node) -> str:
        """Return what is too much about the smallest level."""
        return self._why.get(node.node_id, "")

    def parts_to_test(self, server_round: int) -> Mapping[str, SubModelSpec]:
        """Return the levels below the whole model, of the first units and blocks."""
        specs = {}
        for level in self.levels:
            cut, name = self.cut_to_test(level, server_round), self._name(level)
            if cut != self.context.plan.full:
                static = {key: value for key, value in self.config(level).items() if key == STATIC_NORM}
                specs[name] = self.spec_of(f"test/{name}", cut, {SCALER: self._scaler(), **static})
        return specs

    def cut(self, level: float, node: Node, server_round: int) -> Cut:
        """Return what a client keeps at a level."""
        return self.context.plan.prefix(level)

    def cut_to_test(self, level: float, server_round: int) -> Cut:
        """Return what is kept at a level in a test."""
        return self.context.plan.prefix(level)

    def variant(self, node: Node, server_round: int) -> str:
        """Return what tells different cuts of one level apart."""
        return ""

    def config(self, level: float) -> dict[str, Any]:
        """Return what clients of a level are told besides their sizes."""
        return {}

    def _scaler(self) -> str:
        return "off"

    def _name(self, level: float) -> str:
        return f"{self.label}-{level:g}"

    def _allowed(self, node: Node, budget: Budget | None, server_round: int) -> tuple[float, ...]:
        """Return the levels that a client may get, the largest first."""
        if self.shares is None and budget is not None and not self.dynamic:
            return self.levels
        shares = np.array(self.shares or [1.0] * len(self.levels), np.float64)
        shares /= shares.sum()
        seed, clients = self.context.seed, self.context.clients
        if self.dynamic:
            rng = generator(seed, "submodel-level", node.key, server_round)
        elif node.partition is not None and node.partition < clients:
            ends = np.cumsum(shares) * clients
            place = int(generator(seed, "submodel-levels").permutation(clients)[node.partition])
            # As many clients as the shares say, to the nearest.
            own = min(int(np.searchsorted(ends, place + 0.5)), len(self.levels) - 1)
            return self.levels[own:] if budget is not None else self.levels[own : own + 1]
        else:
            rng = generator(seed, "submodel-level", node.key)
        own = int(rng.choice(len(self.levels), p=shares))
        return self.levels[own:] if budget is not None else self.levels[own : own + 1]


class HeteroFL(LevelScheme):
    """Sub-models of the first units of each layer: narrower ones are part of wider ones.

    Every element is averaged over the clients that have it. ``batch_norm`` "static" needs public samples.
    Diao, Ding and Tarokh, "HeteroFL", ICLR 2021. There a norm follows on each scaler; a
    model without norms has no scaler by default, as it learned far worse with one ("always") on digits.
    """

    def __init__(
        self,
        *,
        widths: Widths = _DEFAULT,
        shares: Shares = None,
        dynamic: Dynamic = False,
        scaler: ScalerSetting = "auto",
        masked_loss: MaskedLoss = False,
        batch_norm: BatchNorm = "averaged",
    ) -> None:
        super().__init__(widths, shares, dynamic)
        self.scaler = scaler
        self.masked_loss = masked_loss
        self.batch_norm = batch_norm
        self._static = False

    def bind(self, context: SubModelContext) -> None:
        """Take part in a run; raises UserError for static norms if the server has no data for them."""
        super().bind(context)
        self._static = self.batch_norm == "static" and has_batch_norm(context.module)
        if self._static and context.public is None:
            raise UserError(
                "batch_norm = 'static': the server finds the statistics on samples of its own; give their "
                "number as public_samples, or use batch_norm = 'averaged'"
            )

    def config(self, level: float) -> dict[str, Any]:
        """Return how a client trains."""
        more: dict[str, Any] = {}
        if (scaler := self._scaler()) != "off" and level < 1:
            more[SCALER] = scaler
        if self.masked_loss:
            more[MASKED_LOSS] = True
        if self._static:
            more[STATIC_NORM] = True
        return more

    def finish_round(self, new_model: FlatArrays, server_round: int) -> FlatArrays:
        """Return the model with statistics of the server's own samples, if they are to be static."""
        if not self._static or self.context.public is None:
            return new_model
        return with_statistics_of(self.context.module, new_model, self.context.public()[0])

    def _scaler(self) -> str:
        if self.scaler != "auto":
            return self.scaler
        return "training" if has_norm(self.context.module) else "off"


class FedRolex(HeteroFL):
    """Windows of units that move on by one in each round, so that all are trained by narrow clients too.

    Alam et al., "FedRolex", NeurIPS 2022.
    """

    def cut(self, level: float, node: Node, server_round: int) -> Cut:
        """Return the window of a round."""
        return self.context.plan.window(level, server_round - 1)

    def cut_to_test(self, level: float, server_round: int) -> Cut:
        """Return the window of a round."""
        return self.context.plan.window(level, server_round - 1)

    def variant(self, node: Node, server_round: int) -> str:
        """Return the offset, for what is kept of momentum."""
        return f"@{server_round - 1}"


class FederatedDropout(HeteroFL):
    """Units drawn at random for each client and round.

    Caldas et al., "Expanding the Reach of Federated Learning", 2018; the scaler, as in dropout, is inferred.
    """

    def cut(self, level: float, node: Node, server_round: int) -> Cut:
        """Return units drawn with the run's seed for a client and a round."""
        rng = generator(self.context.seed, "federated-dropout", node.key, server_round)
        return self.context.plan.random(level, rng)

    def variant(self, node: Node, server_round: int) -> str:
        """Return whose units they are."""
        return f"@{node.key},{server_round}"


class FjORD(LevelScheme):
    """Ordered dropout: each step trains the first units of a width drawn among the client's own and below.

    The widths share the client's weights. With ``distillation`` α, a step trains the client's whole model,
    and the drawn width by (1 − α) cross-entropy + α KL from the whole one's outputs. A client's memory and
    FLOPs are counted as those of its whole model. Horvath et al., NeurIPS 2021; the sum of the two losses is
    inferred. BatchNorm's statistics are common to all widths, where the paper has some for each.
    """

    def __init__(
        self,
        *,
        widths: Widths = (1.0, 0.8, 0.6, 0.4, 0.2),
        shares: Shares = None,
        dynamic: Dynamic = False,
        distillation: Annotated[float, Field(ge=0, le=1, description="weight; 0: none")] = 0.0,
    ) -> None:
        super().__init__(widths, shares, dynamic)
        self.distillation = distillation

    def config(self, level: float) -> dict[str, Any]:
        """Return the widths up to the client's own."""
        own = sorted(width for width in self.levels if width <= level)
        more: dict[str, Any] = {WIDTHS: ",".join(map(repr, own))}
        return more | ({DISTILLATION: self.distillation} if self.distillation else {})


class Smallest(HeteroFL):
    """Everyone on the smallest level: what a federation gets that goes by its weakest client."""

    def __init__(
        self, *, width: Width = 0.0625, scaler: ScalerSetting = "auto", masked_loss: MaskedLoss = False
    ) -> None:
        super().__init__(widths=(width,), scaler=scaler, masked_loss=masked_loss)


class FullOnly(LevelScheme):
    """Only clients that can train the whole model take part: what leaving the others out costs."""

    def __init__(self) -> None:
        super().__init__((1.0,))


class Depth(LevelScheme):
    """Sub-models of the first blocks of each stage, all of them as wide as the model.

    One output layer serves all depths, and there is no distillation between them. After the depths of Ilhan,
    Su and Liu, "ScaleFL", CVPR 2023, and Kim et al., "DepthFL", ICLR 2023, whose outputs are one per depth.
    """

    label = "depth"

    def __init__(
        self,
        *,
        depths: Annotated[
            tuple[Width, ...], Field(min_length=1, description="shares of each stage's blocks")
        ] = (1.0, 0.75, 0.5, 0.25),
        shares: Shares = None,
        dynamic: Dynamic = False,
    ) -> None:
        super().__init__(depths, shares, dynamic)

    def bind(self, context: SubModelContext) -> None:
        """Take part in a run; raises UserError for a model without stages."""
        super().bind(context)
        if not any(stage.depth > 1 for stage in context.plan.stages):
            raise UserError(
                "submodels 'depth': the model has no stages of several blocks; take a ResNet or the LSTM, or "
                "a scheme that cuts widths, such as 'heterofl'"
            )

    def cut(self, level: float, node: Node, server_round: int) -> Cut:
        """Return the first blocks."""
        return self.cut_to_test(level, server_round)

    def cut_to_test(self, level: float, server_round: int) -> Cut:
        """Return the first blocks."""
        stages = self.context.plan.stages
        depths = {stage.name: max(1, int(np.ceil(level * stage.depth - 1e-9))) for stage in stages}
        return self.context.plan.prefix(depth=depths)
