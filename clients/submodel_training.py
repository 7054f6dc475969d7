"""Training of sub-models on a client: the modules of each size, ordered dropout, the masked loss."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedplat.errors import UserError, unknown_name
from fedplat.models import loss_fn
from fedplat.models.cutting import CutPlan, Sizes, freeze_batch_norm, shrink
from fedplat.models.cutting_plan import ArrayAxes
from fedplat.models.flat import FlatModel, channels_last_works
from fedplat.models.materialise import has_hidden_buffers, with_memory
from fedplat.submodel_options import Shape, SubModelOptions

from .stacked import StackedTrainer
from .stacked.modules import NotStackable
from .task import ClientTask

_MOST_MODELS = 8
_SCALERS = ("off", "training", "always")

LossOf = Callable[[Tensor, Tensor], Tensor]


@dataclass(eq=False)
class Part:
    """A module of one shape, and what trains several of it at once, if that can be."""

    model: FlatModel
    trainer: StackedTrainer | None = None
    tried: bool = False


class PartModels:
    """The modules that the clients of a task train, by shape; those used last are kept."""

    def __init__(self, task: ClientTask) -> None:
        self._task = task
        self._parts: OrderedDict[Shape, Part] = OrderedDict()

    def forget(self) -> None:
        """Drop all modules."""
        self._parts.clear()

    def model(self, shape: Shape) -> FlatModel:
        """Return the model of a shape; raises UserError for one that the task's model has not."""
        return self._part(shape).model

    def trainer(self, shape: Shape, exact: bool) -> StackedTrainer | None:
        """Return what trains several at once; None if nothing can or, if asked for, not to the same bits."""
        part = self._part(shape)
        if not part.tried:
            part.tried, task = True, self._task
            try:
                part.trainer = StackedTrainer(
                    part.model.module, part.model.layout, task.training, task.sample(), part.model.device
                )
            except NotStackable:
                part.trainer = None
        return part.trainer if part.trainer is None or part.trainer.kernel.exact or not exact else None

    def _part(self, shape: Shape) -> Part:
        part = self._parts.pop(shape, None) or Part(FlatModel(self._module(shape), self._task.device))
        self._parts[shape] = part
        while len(self._parts) > _MOST_MODELS:
            self._parts.popitem(last=False)
        return part

    def _module(self, shape: Shape) -> nn.Module:
        task = self._task
        if shape.scaler not in _SCALERS:
            raise unknown_name("scaler", shape.scaler, _SCALERS)
        if not shape.sizes:
            module = task.build_model()
        else:
            hidden = has_hidden_buffers(task.shapes)
            source = task.build_model() if hidden else task.shapes
            sizes = Sizes.loads(shape.sizes)
            module = with_memory(shrink(source, task.plan, sizes, scaler=shape.scaler))  # type: ignore[arg-type]
        return freeze_batch_norm(module) if shape.static_norm else module


class OrderedDropout:
    """The narrower parts of a client's own sub-model, which share its weights; each step trains one of them.

    ``widths`` are shares of the whole model's units. A width whose part is not within the client's own is
    left out; the client's own is always one of them.
    """

    def __init__(
        self,
        model: FlatModel,
        task: ClientTask,
        options: SubModelOptions,
        rng: np.random.Generator,
    ) -> None:
        self._model = model
        self._rng = rng
        self._weight = options.distillation
        if not 0 <= self._weight <= 1:
            raise UserError(f"distillation = {self._weight}: expected 0 to 1")
        plan = task.plan
        own = options.sizes() or plan.full.sizes
        room = dict(own.units)
        self._parts: list[_Slice | None] = [None]
        for width in options.widths:
            sizes = plan.prefix(width, dict(own.depths)).sizes
            if sizes != own and all(count <= room[group] for group, count in sizes.units):
                self._parts.append(_Slice(shrink(task.shapes, plan, sizes), plan, sizes))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a step; its gradient reaches the weights of the part that was drawn."""
        part = self._parts[int(self._rng.integers(len(self._parts)))]
        if part is None or not self._weight:
            logits = self._model(x) if part is None else part(self._model, x)
            return loss_fn(logits.float(), y)
        whole = self._model(x).float()
        teacher = whole.detach().flatten(0, -2).log_softmax(-1)
        logits = part(self._model, x).float()
        student = logits.flatten(0, -2).log_softmax(-1)
        divergence = functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
        narrow = (1 - self._weight) * loss_fn(logits, y) + self._weight * divergence
        return loss_fn(whole, y) + narrow


class _Slice:
    """A narrower module without weights of its own: it computes with views of another's."""

    def __init__(self, module: nn.Module, plan: CutPlan, sizes: Sizes) -> None:
        self._module = module
        counts, depths = plan.check(sizes)
        self._channels_last = channels_last_works(module)
        self._counts = counts
        self._arrays = [array for array in plan.arrays if array.stays(depths)]

    def __call__(self, model: FlatModel, x: Tensor) -> Tensor:
        tensors: dict[str, Tensor] = model.module.state_dict(keep_vars=True)
        views = {array.name: _view(tensors[array.name], array, self._counts) for array in self._arrays}
        if x.ndim == 4 and self._channels_last and model.device.type == "cpu":
            x = x.to(memory_format=torch.channels_last)
        self._module.train(model.module.training)
        output: Tensor = functional_call(self._module, views, (x,))
        return output


def masked_loss(model: FlatModel, y: Tensor, num_classes: int) -> LossOf:
    """Return the loss in which logits of classes that are not in ``y`` are 0, as HeteroFL has it."""
    absent = torch.bincount(y.flatten(), minlength=num_classes)[:num_classes] == 0

    def loss(x: Tensor, labels: Tensor) -> Tensor:
        logits = model(x).float()
        return loss_fn(logits.masked_fill(absent.to(logits.device), 0.0), labels)

    return loss


def loss_of(
    model: FlatModel, task: ClientTask, options: SubModelOptions, y: Tensor, rng: np.random.Generator
) -> LossOf | None:
    """Return the loss that the options ask for; None for the usual one."""
    if len(options.widths) > 1:
        return OrderedDropout(model, task, options, rng).loss
    return masked_loss(model, y, task.dataset.num_classes) if options.masked_loss else None


def _view(tensor: Tensor, array: ArrayAxes, counts: dict[str, int]) -> Tensor:
    """Return the first units along each axis, as part of the tensor's graph; a view where one exists."""
    for dim, axis in enumerate(array.axes):
        if axis is not None:
            parts = tensor.unflatten(dim, (axis.blocks, -1, axis.repeat))
            tensor = parts.narrow(dim + 1, 0, counts[axis.group]).flatten(dim, dim + 2)
    return tensor
