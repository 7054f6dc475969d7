"""What a sub-model costs its client: counted on the sub-model itself, without data, memory or arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from ..emulation.compute import sample_flops
from ..emulation.memory import training_memory
from ..training_config import LocalTraining
from .cutting_plan import CutPlan, Sizes
from .cutting_shrink import Scaler, shrink


@dataclass(frozen=True)
class CutCost:
    """Costs of a sub-model.

    ============== =============================================================================
    ``parameters`` trainable numbers
    ``nbytes``     bytes of the arrays sent to the client, and as many back; buffers too
    ``flops``      floating-point operations of training on one sample, forward and backward
    ``memory``     bytes that training takes at its peak (``emulation.memory.training_memory``)
    ============== =============================================================================
    """

    parameters: int
    nbytes: int
    flops: int
    memory: int


class CutCosts:
    """Tells what the sub-models of one model cost, and remembers it.

    ``model`` is a module, whose weights are not looked at, or a function that builds one, which is called on
    torch's meta device; so a model too large for this machine can be planned for. ``constant`` are the bytes
    of memory that a client's process takes before it trains.

    Raises UserError, when asked, for sizes that the model has not and samples that the part cannot take.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        plan: CutPlan,
        sample_shape: tuple[int, ...],
        training: LocalTraining,
        *,
        scaler: Scaler = "off",
        constant: int = 0,
    ) -> None:
        self.plan = plan
        self.sample_shape = sample_shape
        self.training = training
        self.scaler = scaler
        self.constant = constant
        self._module = on_meta(model)
        self._trainable = {name for name, one in self._module.named_parameters() if one.requires_grad}
        self._itemsize = {name: one.element_size() for name, one in self._module.state_dict().items()}
        self._uses: dict[str, int] | None = None
        self._flops: dict[Sizes, int] = {}
        self._memory: dict[tuple[Sizes, int], int] = {}

    def __call__(self, sizes: Sizes, batch_size: int | None = None) -> CutCost:
        """Return the costs; ``batch_size`` is the training's unless given (a client may have fewer)."""
        return CutCost(
            self.parameters(sizes),
            self.nbytes(sizes),
            self.flops(sizes),
            self.memory(sizes, batch_size),
        )

    def parameters(self, sizes: Sizes) -> int:
        """Return the number of trainable numbers."""
        return sum(n for name, n in self._numbers(sizes).items() if name in self._trainable)

    def nbytes(self, sizes: Sizes) -> int:
        """Return the bytes of all parameters and buffers, one way."""
        return sum(n * self._itemsize[name] for name, n in self._numbers(sizes).items())

    def flops(self, sizes: Sizes) -> int:
        """Return the FLOPs of training on one sample.

        They are in proportion to the numbers of each weight, if the model's layers explain all the FLOPs of
        the whole model; if they do not (products outside of layers), each part is played through.
        """
        if self._uses is None:
            self._uses = weight_uses(self._module, self.sample_shape)
            whole = self.plan.full.sizes
            self._flops[whole] = sample_flops(self._module, self.sample_shape)
            if self._explained(whole) != self._flops[whole]:
                self._uses = {}
        if sizes not in self._flops:
            self._flops[sizes] = (
                self._explained(sizes) if self._uses else sample_flops(self._part(sizes), self.sample_shape)
            )
        return self._flops[sizes]

    def memory(self, sizes: Sizes, batch_size: int | None = None) -> int:
        """Return the bytes that training takes at its peak."""
        size = self.training.batch_size if batch_size is None else batch_size
        if (sizes, size) not in self._memory:
            estimate = training_memory(
                self._part(sizes), self.sample_shape, size, self.training, self.constant
            )
            self._memory[sizes, size] = estimate.total
        return self._memory[sizes, size]

    def _numbers(self, sizes: Sizes) -> dict[str, int]:
        """Return how many numbers each array of the part has."""
        counts, depths = self.plan.check(sizes)
        return {
            array.name: prod(
                length if axis is None else counts[axis.group] * axis.repeat * axis.blocks
                for axis, length in zip(array.axes, array.shape, strict=True)
            )
            for array in self.plan.arrays
            if array.stays(depths)
        }

    def _explained(self, sizes: Sizes) -> int:
        uses = self._uses or {}
        return sum(n * uses.get(name, 0) for name, n in self._numbers(sizes).items())

    def _part(self, sizes: Sizes) -> nn.Module:
        return shrink(self._module, self.plan, sizes, scaler=self.scaler)


def on_meta(model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Return a module, or what a function builds, with tensors on the meta device: shapes without numbers."""
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            return model()
    memo: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        meta = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
        )
    return copy.deepcopy(model, memo)


def weight_uses(module: nn.Module, sample_shape: tuple[int, ...]) -> dict[str, int]:
    """Return, by weight, how many FLOPs of training on a sample each of its numbers takes part in.

    A convolution uses its weights at each pixel of its output, an LSTM at each step; two FLOPs forward, two
    for the weight's gradient, two for the input's, unless that is not needed. ``module`` is on the meta
    device. Empty if the module cannot be run there.
    """
    uses: dict[str, int] = {}
    names = {layer: name for name, layer in module.named_modules()}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        recurrent = isinstance(layer, nn.LSTM)
        first = output[0] if isinstance(output, tuple) else output
        places = first[0].numel() // (layer.hidden_size if isinstance(layer, nn.LSTM) else _channels(layer))
        passes = 6 if recurrent or inputs[0].requires_grad else 4
        for weight, parameter in layer.named_parameters(prefix=names[layer]):
            if parameter.ndim > 1:
                uses[weight] = uses.get(weight, 0) + passes * places

    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LSTM)
    handles = [layer.register_forward_hook(note) for layer in names if isinstance(layer, kinds)]
    x = torch.zeros(2, *sample_shape, dtype=torch.int64 if len(sample_shape) == 1 else None, device="meta")
    was_training = module.training
    try:
        module.eval()(x)
    except (RuntimeError, ValueError, NotImplementedError):
        return {}  # whatever the reason, playing it through will tell
    finally:
        module.train(was_training)
        for handle in handles:
            handle.remove()
    return uses


def _channels(layer: nn.Module) -> int:
    return layer.weight.shape[0] if isinstance(layer.weight, Tensor) else 1
