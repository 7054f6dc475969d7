"""Layers as ``torch.vmap`` can take them: random masks come from outside, recurrence is written out."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

_FEATURE_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_UNSUPPORTED = (nn.RNNBase, nn.modules.dropout._DropoutNd)


class NotStackable(ValueError):
    """A module has a layer that cannot be trained for many clients at once."""


class MaskedDropout(nn.Module):
    """Dropout whose mask is handed in as the buffer ``mask``, drawn by whoever knows the client's generator.

    ``sample_shape`` is the shape of one sample's mask, known once a sample has passed through.
    """

    mask: Tensor

    def __init__(self, layer: nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d) -> None:
        super().__init__()
        self.p = layer.p
        self.per_feature = isinstance(layer, _FEATURE_DROPOUTS)
        self.sample_shape: tuple[int, ...] = ()
        self.register_buffer("mask", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input times the mask."""
        shape = tuple(x.shape[1:])
        self.sample_shape = (shape[0], *[1] * (len(shape) - 1)) if self.per_feature else shape
        return x * self.mask

    def draw(self, samples: int, random: torch.Generator) -> Tensor:
        """Return the mask (samples, ...) of one client's batch: what torch's own layer would have drawn."""
        # Drawn on the generator's device, which is the model's.
        mask = torch.empty((samples, *self.sample_shape), device=random.device)
        return mask.bernoulli_(1 - self.p, generator=random).div_(1 - self.p)


class UnrolledLSTM(nn.Module):
    """``nn.LSTM`` of one direction, step by step, with the same parameters; for which vmap has no rule."""

    def __init__(self, layer: nn.LSTM) -> None:
        super().__init__()
        self.layers, self.hidden, self.batch_first = layer.num_layers, layer.hidden_size, layer.batch_first
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return what ``nn.LSTM`` does, from a state of zeros."""
        steps = x.transpose(0, 1) if self.batch_first else x
        last: list[tuple[Tensor, Tensor]] = []
        for number in range(self.layers):
            ahead = getattr(self, f"weight_ih_l{number}"), getattr(self, f"bias_ih_l{number}", None)
            inputs = functional.linear(steps, *ahead)  # of all steps at once: they do not wait
            state = cell = torch.zeros_like(inputs[0, :, : self.hidden])
            outputs = []
            for gates in inputs:
                again = getattr(self, f"weight_hh_l{number}"), getattr(self, f"bias_hh_l{number}", None)
                let_in, forget, new, let_out = (gates + functional.linear(state, *again)).chunk(4, dim=-1)
                cell = forget.sigmoid() * cell + let_in.sigmoid() * new.tanh()
                state = let_out.sigmoid() * cell.tanh()
                outputs.append(state)
            steps = torch.stack(outputs)
            last.append((state, cell))
        states, cells = (torch.stack(part) for part in zip(*last, strict=True))
        return (steps.transpose(0, 1) if self.batch_first else steps), (states, cells)


def stackable(module: nn.Module) -> nn.Module:
    """Return a copy of a module, with the same names in its state dict, that vmap can run in training mode.

    Raises NotStackable for layers that have no such form: recurrent ones other than a plain LSTM, and
    dropout other than ``nn.Dropout`` and that of whole features; and for a model with a loss of its own.
    """
    if hasattr(module, "training_loss"):
        raise NotStackable("the model has a loss of its own")
    copied = copy.deepcopy(module)
    for name, layer in list(copied.named_modules()):
        replacement = _replacement(name, layer)
        if replacement is not None:
            parent = copied.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], replacement)
    return copied.train()


def has_batch_statistics(module: nn.Module) -> bool:
    """Whether what a sample gives depends on the other samples of its batch."""
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules())


def masked_layers(module: nn.Module, sample: Tensor) -> dict[str, MaskedDropout]:
    """Return the dropout layers by name, in the order of their use, which a ``sample`` (1, ...) shows."""
    names = {
        layer: name for name, layer in module.named_modules() if isinstance(layer, MaskedDropout) and layer.p
    }
    used: dict[str, MaskedDropout] = {}

    def note(layer: nn.Module, *_: object) -> None:
        assert isinstance(layer, MaskedDropout)
        used[names[layer]] = layer

    handles = [layer.register_forward_hook(note) for layer in names]
    if names:
        with torch.no_grad(), _statistics_kept(module):
            module(sample)
    for handle in handles:
        handle.remove()
    return used


@contextmanager
def _statistics_kept(module: nn.Module) -> Iterator[None]:
    module.eval()
    yield
    module.train()


def _replacement(name: str, layer: nn.Module) -> nn.Module | None:
    if isinstance(layer, (nn.Dropout, *_FEATURE_DROPOUTS)):
        return nn.Identity() if layer.p == 0 else _checked(MaskedDropout(layer), name)
    if isinstance(layer, nn.LSTM):
        if layer.bidirectional or layer.proj_size or (layer.dropout and layer.num_layers > 1):
            raise NotStackable(f"'{name}' is an LSTM with two directions, projections or dropout")
        return UnrolledLSTM(layer)
    if isinstance(layer, _UNSUPPORTED):
        raise NotStackable(f"'{name}' is a {type(layer).__name__}")
    return None


def _checked(layer: MaskedDropout, name: str) -> MaskedDropout:
    if not math.isclose(layer.p, 1):
        return layer
    raise NotStackable(f"'{name}' drops everything")
