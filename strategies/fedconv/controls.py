"""What FedConv has to be compared with: slices, and whole models, trained as long on the server's data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedplat.arrays import FlatArrays
from fedplat.models.cutting import IndexMaps

from ..nodes import Node
from ..submodels import FULL, SubModelContext, SubModelSpec
from .fitting import FitPlan, judged
from .scheme import WIDTHS
from .server_side import ServerTrained, arrays_of, groups, vector_of
from .settings import Ratio, Ratios, Shares

Passes = Annotated[int, Field(ge=0, description="passes over the server's data")]
LearningRate = Annotated[float, Field(gt=0, description="learning rate of Adam")]


class PrefixFinetuned(ServerTrained):
    """A control: HeteroFL's slices, with all their weights trained on the server's data.

    Each round, the sub-model of each width is the first units of the model, trained for ``submodel_epochs``;
    what a client changed in it is put to the model's own numbers, and the new model is trained for
    ``global_epochs``. What FedConv's filters gain over slicing has to be gained over this, with the same
    numbers of passes: one fit per width, as FedConv has; its fits per client have their like in the training
    of the new model. ``pretrain_epochs`` are those of the first round.
    """

    def __init__(
        self,
        *,
        widths: Ratios = WIDTHS,
        shares: Shares = None,
        submodel_epochs: Passes = 20,
        global_epochs: Passes = 20,
        pretrain_epochs: Passes = 5,
        lr: LearningRate = 1e-3,
    ) -> None:
        super().__init__(widths, shares, FitPlan(pretrain_epochs, lr), FitPlan(global_epochs, lr))
        self.submodel = FitPlan(submodel_epochs, lr)
        self._ratio_of: dict[SubModelSpec, float] = {}
        self._sent: dict[float, FlatArrays] = {}
        self._maps: IndexMaps | None = None

    def bind(self, context: SubModelContext) -> None:
        """Take part in a run."""
        super().bind(context)
        self._maps = IndexMaps(context.plan, context.layout)

    def begin_round(self, model: FlatArrays, server_round: int) -> None:
        """Pre-train in the first round; sub-models are made when they are asked for."""
        super().begin_round(model, server_round)
        self._ratio_of, self._sent = {}, {}

    def spec_of(self, ratio: float, node: Node) -> SubModelSpec:
        """Return the spec of a width, the same for all clients."""
        config = self.config_of(ratio)
        spec = SubModelSpec(f"width-{ratio:g}", config) if config else FULL
        self._ratio_of[spec] = ratio
        return spec

    def extract(self, model: FlatArrays, spec: SubModelSpec) -> FlatArrays:
        """Return the trained slice of the spec's width, made once a round; the model itself if it is all."""
        tested = self.tested_ratio(spec)
        if tested is not None:
            return self._map(tested).extract(model)
        if not spec.config:
            return self.model
        ratio = self._ratio_of[spec]
        if ratio not in self._sent:
            part = self._map(ratio).extract(self.model)
            if self.submodel.epochs:
                net, rng = self.small_net(ratio), self.rng("fedconv-slice", self.ratios.index(ratio))
                fitted = self.bound.tuned(net, vector_of(part)[None], self.submodel, rng)
                self.note(f"slice {ratio:g}", fitted)
                part = arrays_of(fitted.values[0], net.layout)
            self._sent[ratio] = part
        return self._sent[ratio]

    def restore(
        self, arrays: FlatArrays, spec: SubModelSpec, model: FlatArrays
    ) -> tuple[FlatArrays, Tensor | None]:
        """Return the model with the client's slice put in, and which numbers those are."""
        if not spec.config:
            return arrays, None
        return self._map(self._ratio_of[spec]).restore(arrays, model)

    def _map(self, ratio: float) -> Any:
        if self._maps is None:
            raise RuntimeError("bind has to come first")
        return self._maps(self.bound.context.plan.prefix(ratio))


class FullFinetuned(PrefixFinetuned):
    """A control: federated averaging of one size, with the new model trained on the server's data.

    ``width`` is that of all clients: 1 is the whole model, less is FedAvg on the first units. A device that
    it does not fit sits out.
    """

    def __init__(
        self,
        *,
        width: Annotated[Ratio, Field(description="width of every client's model")] = 1.0,
        global_epochs: Passes = 20,
        pretrain_epochs: Passes = 5,
        lr: LearningRate = 1e-3,
    ) -> None:
        super().__init__(
            widths=(width,),
            shares=(1.0,),
            submodel_epochs=0,
            global_epochs=global_epochs,
            pretrain_epochs=pretrain_epochs,
            lr=lr,
        )


class Standalone(PrefixFinetuned):
    """A control: every client trains a model of its own, which nobody ever combines.

    A client's model, a slice of the first one of its width, goes to and fro unchanged, so that it needs no
    memory of its own between rounds. The global model stays as it is. ``server.standalone-accuracy`` among a
    round's figures is the mean over the clients' models on the server's samples (those that choose), not on
    test data of the clients; ``models`` has them for other measures.
    """

    def __init__(self, *, widths: Ratios = WIDTHS, shares: Shares = None) -> None:
        super().__init__(widths=widths, shares=shares, submodel_epochs=0, global_epochs=0, pretrain_epochs=0)
        self.models: dict[tuple[int, float], FlatArrays] = {}
        self._clients: dict[SubModelSpec, tuple[int, float]] = {}

    def begin_round(self, model: FlatArrays, server_round: int) -> None:
        """Forget who gets what."""
        super().begin_round(model, server_round)
        self._clients = {}

    def spec_of(self, ratio: float, node: Node) -> SubModelSpec:
        """Return the spec of a client's own model."""
        spec = SubModelSpec(f"width-{ratio:g}/client-{node.key}", self.config_of(ratio))
        self._clients[spec], self._ratio_of[spec] = (node.key, ratio), ratio
        return spec

    def extract(self, model: FlatArrays, spec: SubModelSpec) -> FlatArrays:
        """Return the client's model, or the slice it starts from."""
        own = self.models.get(self._clients[spec]) if spec in self._clients else None
        return super().extract(model, spec) if own is None else own

    def restore(
        self, arrays: FlatArrays, spec: SubModelSpec, model: FlatArrays
    ) -> tuple[FlatArrays, Tensor | None]:
        """Keep the client's model, and return the global one in its place: there is nothing to combine."""
        if bool(torch.isfinite(vector_of(arrays)).all()):
            self.models[self._clients[spec]] = arrays_of(vector_of(arrays), arrays.layout)
        return model, None

    def finish_round(self, new_model: FlatArrays, server_round: int) -> FlatArrays:
        """Measure the clients' models, and keep the global one."""
        accuracies = []
        for ratio in self.ratios:
            whole = not self.config_of(ratio)
            net = self.bound.net if whole else self.small_net(ratio)
            own = [model for (_, width), model in sorted(self.models.items(), key=_first) if width == ratio]
            for part in groups(len(own)):
                values = torch.stack([vector_of(model) for model in own[part]])
                split = self.bound.split
                accuracies += judged(net, values.to(split.x.device), split)[1].tolist()
        if accuracies:
            self.diagnostics["server.standalone-accuracy"] = sum(accuracies) / len(accuracies)
        return new_model

    def state_dict(self) -> dict[str, Any]:
        """Return the clients' models."""
        return {"models": {f"{key} {ratio:g}": vector_of(m) for (key, ratio), m in self.models.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the clients' models back."""
        self.models = {}
        for name, vector in state.get("models", {}).items():
            key, width = name.split()
            ratio = next((one for one in self.ratios if f"{one:g}" == width), None)
            if ratio is not None:
                whole = not self.config_of(ratio)
                layout = self.bound.context.layout if whole else self.small_net(ratio).layout
                self.models[int(key), ratio] = arrays_of(vector, layout)


def _first(item: tuple[tuple[int, float], FlatArrays]) -> tuple[int, float]:
    return item[0]
