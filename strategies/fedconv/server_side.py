"""What FedConv and the schemes it is compared with share: the server's data, sizes, training on them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedplat.arrays import FlatArrays, Layout
from fedplat.errors import UserError
from fedplat.models.cutting import Sizes, shrink
from fedplat.models.cutting_costs import on_meta
from fedplat.rng import generator

from ..nodes import Node
from ..submodel_fit import misfit
from ..submodels import SIZES, SubModelContext, SubModelScheme, SubModelSpec
from .fitting import FitPlan, Fitted, Named, PublicSplit, fit
from .settings import checked_shares

if TYPE_CHECKING:
    from fedplat.emulation.schedule import Budget

log = logging.getLogger("fedplat")

TEST = "test/"
_CLIENTS_AT_ONCE = 16


class ServerNet:
    """A module whose weights are given with every call: values (m, d) of m models, samples (n, ...).

    ``layout`` is that of its arrays, all of them parameters.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        if layout.num_params != layout.dim or layout.side_bytes:
            raise UserError(
                "fedconv: the model has running statistics or other buffers (BatchNorm), which filters "
                "cannot make smaller; take a model with GroupNorm, for instance norm = 'group'"
            )
        self.module = on_meta(module).eval()
        self.layout = layout
        self.named = Named(tuple((entry.name, entry.shape) for entry in layout.entries))
        self._together = not any(isinstance(part, nn.RNNBase) for part in module.modules())

    def __call__(self, values: Tensor, x: Tensor) -> Tensor:
        """Return the logits (m, n, classes), or (m, n, T, V) for tokens."""
        return self.of_tensors(self.named.split(values), x)

    def of_tensors(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the logits for arrays by name, (m, ...) each."""

        def one(weights: dict[str, Tensor]) -> Tensor:
            out: Tensor = functional_call(self.module, weights, (x,))
            return out

        count = len(next(iter(tensors.values())))
        if count > 1 and self._together:
            logits: Tensor = vmap(one)(dict(tensors))
            return logits
        # torch has no batched LSTM; and one model alone needs no batch.
        return torch.stack([one({name: each[i] for name, each in tensors.items()}) for i in range(count)])


@dataclass(frozen=True)
class Bound:
    """A run as the schemes here see it."""

    context: SubModelContext

    @cached_property
    def net(self) -> ServerNet:
        """The whole model."""
        return ServerNet(self.context.module, self.context.layout)

    @cached_property
    def split(self) -> PublicSplit:
        """The server's samples; raises UserError if it has none."""
        if self.context.public is None:
            raise UserError(
                "fedconv: the server needs labelled samples of its own, and this run gives it none; set "
                "their number as public_samples"
            )
        x, y = self.context.public()
        return PublicSplit.of(x, y, generator(self.context.seed, "fedconv-split"))

    def tuned(self, net: ServerNet, values: Tensor, plan: FitPlan, rng: np.random.Generator) -> Fitted:
        """Train all weights of m models (m, d) on the server's samples."""
        return fit(net, values.to(self.split.x.device), self.split, plan, rng)


class ServerTrained(SubModelScheme):
    """Base of schemes with sub-models of given widths whose server trains on data of its own.

    ``ratios`` are the widths, from wide to narrow. A device with a budget gets the widest that fits:
    memory, and, if a round has a deadline, both transfers and the training. Without budgets, clients get
    widths by ``shares``, drawn with the run's seed once.

    ``pretrain`` trains the model in the first round before it is sent; ``finetune_global`` every new model.
    """

    def __init__(
        self,
        ratios: Sequence[float],
        shares: Sequence[float] | None,
        pretrain: FitPlan,
        finetune_global: FitPlan,
    ) -> None:
        self.ratios = tuple(ratios)
        self.shares = checked_shares(ratios, shares)
        self.pretrain = pretrain
        self.finetune_global = finetune_global
        self.server_round = 0
        self.diagnostics: dict[str, float] = {}
        self._bound: Bound | None = None
        self._model: FlatArrays | None = None
        self._nets: dict[float, ServerNet] = {}
        self._why: dict[int, str] = {}

    @property
    def bound(self) -> Bound:
        """The run; raises UserError before ``bind``."""
        if self._bound is None:
            raise UserError(
                f"{type(self).__name__} does not know the model yet: call bind(SubModelContext.of(...)) first"
            )
        return self._bound

    @property
    def model(self) -> FlatArrays:
        """The model that sub-models of this round are made of: the global one, or what pre-training made."""
        if self._model is None:
            raise RuntimeError("begin_round has to come first")
        return self._model

    def bind(self, context: SubModelContext) -> None:
        """Take part in a run; raises UserError without server data, or for a model with BatchNorm."""
        bound = Bound(context)
        _ = bound.split, bound.net
        self._bound, self._nets = bound, {}

    def begin_round(self, model: FlatArrays, server_round: int) -> None:
        """Pre-train, in the first round."""
        self.server_round, self.diagnostics, self._why = server_round, {"server.steps": 0.0}, {}
        self._model = self.trained("pre-training", model, self.pretrain) if server_round == 1 else model

    def finish_round(self, new_model: FlatArrays, server_round: int) -> FlatArrays:
        """Train the new model, if that is asked for."""
        return self.trained("fine-tuning", new_model, self.finetune_global)

    def trained(self, what: str, model: FlatArrays, plan: FitPlan) -> FlatArrays:
        """Return a model trained on the server's data; itself for no epochs."""
        if not plan.epochs:
            return model
        rng = self.rng(f"fedconv-{what}")
        fitted = self.bound.tuned(self.bound.net, vector_of(model)[None], plan, rng)
        self.note(what, fitted)
        return arrays_of(fitted.values[0], model.layout)

    def assign(self, node: Node, budget: Budget | None, server_round: int) -> SubModelSpec | None:
        """Choose the widest sub-model that fits."""
        why = ""
        for ratio in self.ratios if budget is not None else (self._given_ratio(node),):
            why = misfit(self.bound.context, node, budget, self.sizes(ratio))
            if not why:
                self._count(f"submodels.width-{ratio:g}", 1)
                return self.spec_of(ratio, node)
        self._why[node.key] = why
        self._count("submodels.none-fits", 1)
        return None

    def why(self, node: Node) -> str:
        """Return what is too much about the smallest sub-model."""
        return self._why.get(node.key, "")

    def spec_of(self, ratio: float, node: Node) -> SubModelSpec:
        """Return the spec of a width."""
        return SubModelSpec(f"width-{ratio:g}", self.config_of(ratio))

    def config_of(self, ratio: float) -> tuple[tuple[str, Any], ...]:
        """Return what the client is told of its size; nothing if it is all of the model."""
        sizes = self.sizes(ratio)
        return () if sizes == self.bound.context.plan.full.sizes else ((SIZES, sizes.dumps()),)

    def sizes(self, ratio: float) -> Sizes:
        """Return the sizes of the sub-model of a width."""
        return self.bound.context.plan.prefix(ratio).sizes

    def parts_to_test(self, server_round: int) -> Mapping[str, SubModelSpec]:
        """Return the widths below the whole model; they are made without fitting anything anew."""
        configs = {f"width-{ratio:g}": self.config_of(ratio) for ratio in self.ratios}
        return {name: SubModelSpec(TEST + name, config) for name, config in configs.items() if config}

    def tested_ratio(self, spec: SubModelSpec) -> float | None:
        """Return the width of a spec of ``parts_to_test``; None for others."""
        return next((one for one in self.ratios if spec.kind == f"{TEST}width-{one:g}"), None)

    def _given_ratio(self, node: Node) -> float:
        """Return the width of a client without a budget; as many clients as the shares say, to the nearest.

        The draw is that of the schemes of fixed levels, so that a client has the same place in all of them.
        """
        context = self.bound.context
        if node.partition is not None and node.partition < context.clients:
            place = int(generator(context.seed, "submodel-levels").permutation(context.clients)[node.key])
            ends = np.cumsum(self.shares) * context.clients
            return self.ratios[min(int(np.searchsorted(ends, place + 0.5)), len(self.ratios) - 1)]
        rng = generator(context.seed, "submodel-level", node.key)
        return self.ratios[int(rng.choice(len(self.ratios), p=self.shares))]

    def small_net(self, ratio: float) -> ServerNet:
        """Return the sub-model of a width."""
        if ratio not in self._nets:
            context = self.bound.context
            cut = context.plan.prefix(ratio)
            layout = context.plan.index_map(cut, context.layout).layout
            self._nets[ratio] = ServerNet(shrink(context.module, context.plan, cut.sizes), layout)
        return self._nets[ratio]

    def rng(self, purpose: str, *keys: int) -> np.random.Generator:
        """Return the generator of a purpose in this round."""
        return generator(self.bound.context.seed, purpose, self.server_round, *keys)

    def note(self, what: str, fitted: Fitted) -> None:
        """Log a fit and put its figures among those of the round."""
        accuracy = float(fitted.accuracy.mean())
        name = what.replace(" ", "-")
        self.diagnostics[f"server.{name}-accuracy"] = accuracy
        self._count("server.steps", fitted.steps * len(fitted.values))
        log.info(
            "round %d: %s of %d: accuracy %.1f %% on the choosing part, epoch %.1f on average, %d steps",
            self.server_round,
            what,
            len(fitted.values),
            100 * accuracy,
            float(fitted.epoch.double().mean()),
            fitted.steps,
        )

    def _count(self, name: str, number: float) -> None:
        self.diagnostics[name] = self.diagnostics.get(name, 0.0) + number


def vector_of(arrays: FlatArrays) -> Tensor:
    """Return a copy of a model's vector (d,)."""
    return torch.from_numpy(arrays.vector.copy())


def arrays_of(vector: Tensor, layout: Layout) -> FlatArrays:
    """Return a model of this vector (d,)."""
    arrays = layout.new()
    arrays.vector[:] = vector.detach().cpu().numpy()
    return arrays


def groups(count: int) -> list[slice]:
    """Cut so many clients into groups that are worked on together."""
    return [slice(first, first + _CLIENTS_AT_ONCE) for first in range(0, count, _CLIENTS_AT_ONCE)]
