"""A sub-model as a module: the same classes and names, smaller layers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..errors import UserError, unknown_name
from .cutting_plan import ArrayAxes, CutPlan, Sizes

Scaler = Literal["off", "training", "always"]


def shrink(module: nn.Module, plan: CutPlan, sizes: Sizes, *, scaler: Scaler = "off") -> nn.Module:
    """Return the part of ``module`` with the first units and blocks, as a module of its own.

    The state dict has the names, the order and the shapes of ``plan.index_map(cut, ...).layout`` for all cuts
    of these sizes, so what ``extract`` gives fits. ``module`` is left as it is; it may be on torch's meta
    device or, inside their mode, of fake tensors: then so is the part, and it takes no memory.

    GroupNorm gets as many groups as leave no fewer channels in each than before; so a cut along groups keeps
    them as they were, and one narrower than a group has one.

    With ``scaler="training"``, every layer whose outputs are cut divides them by the share of them that is
    kept, while it trains (HeteroFL); behind an LSTM the linear layer does so that reads it. The classes of
    these layers then are subclasses of torch's. A norm behind each layer makes up for the other scale in a
    test; a part without norms is tested with ``scaler="always"``, or it does not compute what it learned.

    Raises UserError for sizes that the model has not, and if ``plan`` is another model's.
    """
    if scaler not in get_args(Scaler):
        raise unknown_name("scaler", str(scaler), get_args(Scaler))
    counts, depths = plan.check(sizes)
    tensors: dict[str, Tensor] = module.state_dict(keep_vars=True)
    if {array.name: array.shape for array in plan.arrays} != {n: tuple(t.shape) for n, t in tensors.items()}:
        raise UserError("the cut plan belongs to another model: make it with plan_of of this one")
    # Whatever refers to a tensor or layer of the module, refers in the copy to its replacement.
    memo: dict[int, Any] = {}
    for array in plan.arrays:
        if array.stays(depths):
            memo[id(tensors[array.name])] = _first(tensors[array.name], array, counts)
    absent: list[tuple[str, str]] = []
    for stage, depth in depths.items():
        home = module.get_submodule(stage)
        if isinstance(home, nn.LSTM):
            continue
        for child, block in list(home.named_children())[depth:]:
            memo[id(block)] = nn.Identity()
            absent.append((stage, child))
    for name, layer in module.named_modules():
        if isinstance(layer, nn.LSTM) and id(layer) not in memo:
            memo[id(layer)] = _lstm(layer, depths.get(name, layer.num_layers), memo)
    small = copy.deepcopy(module, memo)
    for stage, child in absent:
        delattr(small.get_submodule(stage), child)
    for layer in small.modules():
        _resize(layer)
    if scaler != "off":
        _add_scalers(small, plan, counts, scaler == "always")
    return small


class _Scaled(nn.Module):
    """A layer that divides what it reads and what it gives by constants.

    A subclass instead of a hook or a module behind the layer: names stay, and code that knows the layer's
    class, and would pass by its forward pass, does not take it for one.
    """

    rate_in: float = 1.0
    rate_out: float = 1.0
    always: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs, scaled in training mode or always."""
        if not (self.training or self.always):
            return super().forward(x)
        if self.rate_in != 1:
            x = x / self.rate_in
        out: Tensor = super().forward(x)
        return out / self.rate_out if self.rate_out != 1 else out


class ScaledLinear(_Scaled, nn.Linear):
    """A linear layer with HeteroFL's scaler."""


class ScaledConv1d(_Scaled, nn.Conv1d):
    """A convolution with HeteroFL's scaler."""


class ScaledConv2d(_Scaled, nn.Conv2d):
    """A convolution with HeteroFL's scaler."""


class ScaledEmbedding(_Scaled, nn.Embedding):
    """An embedding with HeteroFL's scaler."""


_SCALED: dict[type, type[_Scaled]] = {
    nn.Linear: ScaledLinear,
    nn.Conv1d: ScaledConv1d,
    nn.Conv2d: ScaledConv2d,
    nn.Embedding: ScaledEmbedding,
}


def _add_scalers(module: nn.Module, plan: CutPlan, counts: Mapping[str, int], always: bool) -> None:
    shares = {group.name: counts[group.name] / group.units for group in plan.groups}
    arrays = {array.name: array for array in plan.arrays}

    def share(array: str, axis: int) -> float:
        where = arrays[array].axes[axis] if array in arrays else None
        return shares[where.group] if where is not None else 1.0

    layers = dict(module.named_modules())
    hidden = [
        arrays[f"{name}.weight_hh_l0"].axes[1] for name, one in layers.items() if isinstance(one, nn.LSTM)
    ]
    for name, layer in layers.items():
        if type(layer) not in _SCALED or (isinstance(layer, (nn.Conv1d, nn.Conv2d)) and layer.groups > 1):
            continue  # a filter per channel reads channels that are scaled already
        weight = f"{name}.weight" if name else "weight"
        rate_out = share(weight, 1 if isinstance(layer, nn.Embedding) else 0)
        behind_lstm = isinstance(layer, nn.Linear) and arrays[weight].axes[1] in hidden
        rate_in = share(weight, 1) if behind_lstm else 1.0
        if rate_in != 1 or rate_out != 1:
            layer.__class__ = _SCALED[type(layer)]
            layer.rate_in, layer.rate_out, layer.always = rate_in, rate_out, always


def _first(tensor: Tensor, array: ArrayAxes, counts: Mapping[str, int]) -> Tensor:
    """Return a copy of the first units along each axis."""
    part = tensor.detach()
    for dim, axis in enumerate(array.axes):
        if axis is not None:
            parts = part.unflatten(dim, (axis.blocks, -1, axis.repeat))
            part = parts.narrow(dim + 1, 0, counts[axis.group]).flatten(dim, dim + 2)
    part = part.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else part


def _lstm(layer: nn.LSTM, depth: int, memo: Mapping[int, Any]) -> nn.LSTM:
    """Return an LSTM of fewer layers with the parameters in ``memo``; torch cannot take layers off one."""
    parameters = {
        name: memo[id(parameter)] for name, parameter in layer.named_parameters() if id(parameter) in memo
    }
    recurrent, first = parameters["weight_hh_l0"], parameters["weight_ih_l0"]
    small = nn.LSTM(
        first.shape[1],
        recurrent.shape[1],
        num_layers=depth,
        bias=layer.bias,
        batch_first=layer.batch_first,
        dropout=layer.dropout if depth > 1 else 0.0,
        device="meta",  # no memory, and no random numbers drawn
    )
    for name, parameter in parameters.items():
        setattr(small, name, parameter)
    return small.train(layer.training)


def _resize(layer: nn.Module) -> None:
    """Make a layer's own numbers agree with its weights."""
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        layer.out_channels = layer.weight.shape[0]
        if layer.groups > 1:
            layer.groups = layer.out_channels
        layer.in_channels = layer.groups * layer.weight.shape[1]
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.Embedding):
        layer.embedding_dim = layer.weight.shape[1]
    elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
        known = layer.weight if layer.weight is not None else layer.running_mean
        layer.num_features = layer.num_features if known is None else len(known)
    elif isinstance(layer, nn.GroupNorm) and layer.weight is not None:
        per_group, channels = layer.num_channels // layer.num_groups, len(layer.weight)
        layer.num_groups = next(g for g in range(max(1, channels // per_group), 0, -1) if channels % g == 0)
        layer.num_channels = channels
    elif isinstance(layer, nn.LayerNorm) and layer.weight is not None:
        layer.normalized_shape = tuple(layer.weight.shape)
