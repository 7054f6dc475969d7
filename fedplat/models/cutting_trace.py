"""The cut plan of a model, read off its layers: who makes the channels that another layer reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from ..errors import UserError
from .cutting_plan import ArrayAxes, Axis, CutPlan, Stage
from .lstm import CharLSTM
from .resnet import ResidualBlock

_CONVS = (nn.Conv1d, nn.Conv2d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm)
_WITHOUT_WEIGHTS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid),
    *(nn.Softplus, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
)
_UNDERSTOOD = (
    "nn.Sequential of Conv1d, Conv2d, Linear, BatchNorm, GroupNorm, LayerNorm of one axis, activations, "
    "pooling, dropout and Flatten; the residual blocks and the LSTM of fedplat.models"
)
_WHOLE = ""  # the group of inputs, of the last layer's outputs and of whatever is added to them


def plan_of(module: nn.Module, sample_shape: tuple[int, ...]) -> CutPlan:
    """Return what can be left out of ``module``, found from its layers; nothing is computed.

    ``sample_shape`` is (C, H, W) for images and (T,) for tokens or features. One group each are: the output
    channels of a layer with all that follows them (norms, the next layer's inputs, after a flatten layer
    h · w of those per channel); all channels that skip connections add up; the hidden units of all layers of
    an LSTM, whose number PyTorch has equal. Stages are: rows of residual blocks that, but for the first, have
    no convolution in the shortcut; the layers of an LSTM. Whole stay: the inputs of the first layer and the
    outputs of the last one.

    A module with a method ``cut_plan()`` is asked instead; ``CutPlan.declare`` helps to write one.

    Raises UserError for layers it does not understand, and where layers do not fit each other.

    >>> from fedplat.models.dense import mlp
    >>> plan_of(mlp((1, 4, 4), 3, hidden=(8, 6)), (1, 4, 4)).groups
    (Group(name='fc1', units=8), Group(name='fc2', units=6))
    """
    own = getattr(module, "cut_plan", None)
    if callable(own):
        plan = own()
        if not isinstance(plan, CutPlan):
            raise UserError(f"model: cut_plan() returned a {type(plan).__name__}; it has to return a CutPlan")
        return plan
    if not sample_shape or min(sample_shape) < 1:
        raise UserError(f"samples of shape {sample_shape} have no numbers; give (C, H, W), or (T,)")
    trace = _Trace()
    flow = trace.through("", module, _Flow(_WHOLE, sample_shape[0], spatial=len(sample_shape) > 1))
    trace.join(flow.group, _WHOLE)
    return trace.plan(module)


@dataclass(frozen=True)
class _Flow:
    """What arrives at a layer: ``units`` of a group, each ``repeat`` numbers (None: not known yet)."""

    group: str
    units: int
    spatial: bool
    repeat: int | None = 1


class _Trace:
    """Goes through a module once and notes the group of each axis."""

    def __init__(self) -> None:
        self._leader: dict[str, str] = {}
        self._axes: dict[str, tuple[Axis | None, ...]] = {}
        self._blocks: dict[str, tuple[str, int]] = {}
        self._stages: list[Stage] = []

    def plan(self, module: nn.Module) -> CutPlan:
        """Return the plan, once all is noted."""
        arrays = []
        for name, tensor in module.state_dict().items():
            axes = self._axes.get(name, (None,) * tensor.ndim)
            arrays.append(
                ArrayAxes(
                    name,
                    tuple(tensor.shape),
                    tuple(self._resolved(axis) for axis in axes),
                    *self._blocks.get(name, (None, 0)),
                )
            )
        return CutPlan.of(arrays, self._stages)

    def join(self, first: str, second: str) -> None:
        """Make two groups one, under the name of the one met first."""
        first, second = self._find(first), self._find(second)
        if first != second:
            order = [_WHOLE, *self._leader]
            lead, follow = sorted((first, second), key=order.index)
            self._leader[follow] = lead

    def through(self, name: str, module: nn.Module, flow: _Flow) -> _Flow:
        """Note a module's axes and return what leaves it."""
        kind = type(module)
        if kind is nn.Sequential:
            return self._sequence(name, module, flow)
        if isinstance(module, ResidualBlock):
            return self._residual(name, module, flow)
        if isinstance(module, CharLSTM):
            return self._char_lstm(name, module)
        if isinstance(module, _CONVS) and kind in _CONVS:
            return self._conv(name, module, flow)
        if isinstance(module, nn.Linear) and kind is nn.Linear:
            return self._linear(name, module, flow)
        if isinstance(module, (*_NORMS, nn.LayerNorm)) and kind in (*_NORMS, nn.LayerNorm):
            return self._norm(name, module, flow)
        if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            return replace(flow, spatial=False, repeat=None) if flow.spatial else flow
        if kind in _WITHOUT_WEIGHTS:
            return flow
        raise _not_understood(name, module)

    def _sequence(self, name: str, module: nn.Module, flow: _Flow) -> _Flow:
        children = list(module.named_children())
        for child, layer in children:
            flow = self.through(_joined(name, child), layer, flow)
        blocks = [layer for _, layer in children if isinstance(layer, ResidualBlock)]
        removable = all(isinstance(block.shortcut, nn.Identity) for block in blocks[1:])
        if name and removable and 1 < len(blocks) == len(children):
            self._stages.append(Stage(name, len(blocks)))
            for number, (child, layer) in enumerate(children):
                for array in layer.state_dict():
                    self._blocks[_joined(name, f"{child}.{array}")] = (name, number)
        return flow

    def _residual(self, name: str, block: ResidualBlock, flow: _Flow) -> _Flow:
        start = flow
        for child in ("conv1", "norm1", "conv2", "norm2"):
            flow = self.through(_joined(name, child), block.get_submodule(child), flow)
        shortcut = self.through(_joined(name, "shortcut"), block.shortcut, start)
        if shortcut.units != flow.units:
            raise UserError(f"model: '{name}' adds {shortcut.units} channels to {flow.units}")
        self.join(shortcut.group, flow.group)
        return flow

    def _char_lstm(self, name: str, module: CharLSTM) -> _Flow:
        lstm, hidden = _joined(name, "lstm"), self._group(_joined(name, "lstm"))
        if module.lstm.bidirectional or module.lstm.proj_size or type(module.fc) is not nn.Linear:
            raise _not_understood(lstm, module.lstm)
        embedding = self._group(_joined(name, "embedding"))
        self._axes[_joined(name, "embedding.weight")] = (None, Axis(embedding))
        gates, units = Axis(hidden, blocks=4), Axis(hidden)
        layers = module.lstm.num_layers
        for layer in range(layers):
            shapes: dict[str, tuple[Axis | None, ...]] = {
                f"weight_ih_l{layer}": (gates, units if layer else Axis(embedding)),
                f"weight_hh_l{layer}": (gates, units),
                f"bias_ih_l{layer}": (gates,),
                f"bias_hh_l{layer}": (gates,),
            }
            for array, axes in shapes.items():
                self._axes[f"{lstm}.{array}"] = axes
                if layers > 1:
                    self._blocks[f"{lstm}.{array}"] = (lstm, layer)
        if layers > 1:
            self._stages.append(Stage(lstm, layers))
        flow = _Flow(hidden, module.lstm.hidden_size, spatial=False)
        return self.through(_joined(name, "fc"), module.fc, flow)

    def _conv(self, name: str, layer: nn.Conv1d | nn.Conv2d, flow: _Flow) -> _Flow:
        _expect(name, flow.units, layer.in_channels, flow.spatial)
        kernel = (None,) * len(layer.kernel_size)
        if layer.groups == 1:
            group = self._group(name)
            self._axes[_joined(name, "weight")] = (Axis(group), Axis(flow.group), *kernel)
        elif layer.groups == layer.in_channels == layer.out_channels:
            group = flow.group  # a filter per channel
            self._axes[_joined(name, "weight")] = (Axis(group), None, *kernel)
        else:
            raise _not_understood(name, layer)
        self._axes[_joined(name, "bias")] = (Axis(group),)
        return replace(flow, group=group, units=layer.out_channels)

    def _linear(self, name: str, layer: nn.Linear, flow: _Flow) -> _Flow:
        flow = _flat(name, flow, layer.in_features)
        group = self._group(name)
        self._axes[_joined(name, "weight")] = (Axis(group), Axis(flow.group, flow.repeat or 1))
        self._axes[_joined(name, "bias")] = (Axis(group),)
        return _Flow(group, layer.out_features, spatial=False)

    def _norm(self, name: str, layer: nn.Module, flow: _Flow) -> _Flow:
        size = layer.normalized_shape if isinstance(layer, nn.LayerNorm) else None
        if isinstance(layer, nn.LayerNorm):
            known = len(layer.normalized_shape) == 1 and not flow.spatial and layer.elementwise_affine
        else:
            known = not isinstance(layer, nn.GroupNorm) or layer.affine
        if not known:
            raise _not_understood(name, layer)
        features = size[0] if size else int(getattr(layer, "num_features", getattr(layer, "num_channels", 0)))
        if flow.spatial:
            _expect(name, flow.units, features, True)
        else:
            flow = _flat(name, flow, features)
        for array in ("weight", "bias", "running_mean", "running_var"):
            self._axes[_joined(name, array)] = (Axis(flow.group, flow.repeat or 1),)
        return flow

    def _group(self, name: str) -> str:
        # A layer may be all of the module, and then has no name.
        self._leader.setdefault(name or "weight", name or "weight")
        return name or "weight"

    def _find(self, group: str) -> str:
        while (leader := self._leader.get(group, group)) != group:
            group = leader
        return group

    def _resolved(self, axis: Axis | None) -> Axis | None:
        if axis is None:
            return None
        group = self._find(axis.group)
        return None if group == _WHOLE else replace(axis, group=group)


def _flat(name: str, flow: _Flow, features: int) -> _Flow:
    """Return the flow once it is known how many features a flattened channel became."""
    if flow.spatial:
        raise UserError(f"model: '{name}' reads images that are not flattened; put nn.Flatten() before it")
    repeat = flow.repeat if flow.repeat is not None else max(1, features // flow.units)
    _expect(name, flow.units * repeat, features, True)
    return replace(flow, repeat=repeat)


def _expect(name: str, found: int, expected: int, spatial: bool) -> None:
    if found != expected or not spatial:
        what = f"{found} of them" if spatial else "samples that are flat"
        raise UserError(f"model: '{name}' reads {expected} channels or features, but gets {what}")


def _not_understood(name: str, module: nn.Module) -> UserError:
    where = f"'{name}' is a {type(module).__name__}" if name else f"a {type(module).__name__}"
    return UserError(
        f"model: {where}, or has options, of which no part can be cut out. Understood are {_UNDERSTOOD}. "
        "A module of your own may say what can be left out in a method cut_plan()"
    )


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
