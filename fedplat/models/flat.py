"""A module whose weights are one vector: loaded, sent, averaged and optimised as one array."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..arrays import FlatArrays, Layout, LayoutError
from ..errors import UserError


class FlatModel:
    """Keeps all float32 parameters and buffers of a module as views of one vector, in the order of a Layout.

    ========== ===================================================================================
    ``vector`` (d,) float32 on ``device``: parameters, then float buffers (BatchNorm's statistics)
    ``params`` (p,) the parameters as one leaf tensor: ``torch.optim.SGD([flat.params], lr=0.1)``
    ``grad``   (p,) its gradient; ``backward`` accumulates into it in place
    ``side``   bytes of all other buffers (BatchNorm's batch counters)
    ========== ===================================================================================

    A change of ``vector`` in place is a change of the module, and the other way round. The module is moved to
    ``device`` and taken over, not copied. Clear gradients with ``zero_grad()`` of this class: an optimiser's
    own ``zero_grad()`` drops them instead, and its next step then does nothing.

    Raises UserError for weights that are not float32, shared between layers, or frozen: one flat optimiser
    could not honour any of these. Buffers that are not part of the state dict stay as they are.
    """

    def __init__(self, module: nn.Module, device: str | torch.device = "cpu") -> None:
        self.module = module.to(device)
        self.device = torch.device(device)
        state: dict[str, Tensor] = module.state_dict(keep_vars=True)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        _check(state, parameters)
        self.layout = Layout.of(
            {name: (tuple(tensor.shape), _dtype_name(tensor)) for name, tensor in state.items()},
            buffers=state.keys() - parameters.keys(),
        )
        self.vector = torch.empty(self.layout.dim, device=self.device)
        self.side = torch.zeros(self.layout.side_bytes, dtype=torch.uint8, device=self.device)
        self.grad = torch.zeros(self.layout.num_params, device=self.device)
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        for entry in self.layout.entries:
            tensor = state[entry.name]
            part = slice(entry.start, entry.stop)
            home = self.vector[part] if entry.in_vector else self.side[part].view(tensor.dtype)
            home = home.view(entry.shape)
            home.copy_(tensor.detach())
            # Not a new Parameter: recurrent layers keep references to their weights outside the module dict.
            tensor.data = home
            if entry.name in parameters:
                self._gradients.append((parameters[entry.name], self.grad[part].view(entry.shape)))
        self.params = nn.Parameter(self.vector[: self.layout.num_params])
        self.channels_last = self.device.type == "cpu" and channels_last_works(module)
        self.bind_grad()

    def __call__(self, x: Tensor) -> Tensor:
        """Run the module's forward pass; on a CPU, images go in channels last, which is faster."""
        if x.ndim == 4 and self.channels_last:
            x = x.to(memory_format=torch.channels_last)
        output: Tensor = self.module(x)
        return output

    def zero_grad(self) -> None:
        """Set the gradient to zero in place."""
        self.grad.zero_()

    def bind_grad(self) -> None:
        """Make ``grad`` the gradient of ``params`` and of all parameters again, if something cut it off."""
        self.params.grad = self.grad
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def load(self, arrays: FlatArrays) -> None:
        """Overwrite weights and buffers by ``arrays``; raises LayoutError if they are laid out otherwise."""
        self._check_layout(arrays)
        self.vector.copy_(_readable(arrays.vector))
        self.side.copy_(_readable(arrays.side))

    def store(self, into: FlatArrays) -> None:
        """Copy weights and buffers to ``into``; raises LayoutError if it is laid out otherwise."""
        self._check_layout(into)
        torch.from_numpy(into.vector).copy_(self.vector)
        torch.from_numpy(into.side).copy_(self.side)

    def _check_layout(self, arrays: FlatArrays) -> None:
        if arrays.layout is not self.layout and arrays.layout != self.layout:
            names = {entry.name for entry in set(arrays.layout.entries) ^ set(self.layout.entries)}
            raise LayoutError(f"the arrays do not fit the model: {', '.join(sorted(names)) or 'other order'}")


def channels_last_works(module: nn.Module) -> bool:
    """Return whether a module can be trained with images in channels last on a CPU.

    With torch 2.14, the backward pass of a strided 1x1 convolution of up to 6 channels then writes beyond its
    memory, which ends the process sooner or later; narrow parts of ResNets have such shortcuts.
    """
    return not any(
        isinstance(layer, nn.Conv2d)
        and layer.in_channels < 8
        and layer.kernel_size == (1, 1)
        and layer.stride != (1, 1)
        for layer in module.modules()
    )


def _check(state: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    first_at: dict[int, str] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"model: '{name}' of the state dict is not a tensor, so it cannot be sent")
        is_parameter = name in parameters
        is_counter = not (is_parameter or tensor.is_floating_point() or tensor.is_complex())
        if tensor.dtype != torch.float32 and not is_counter:
            raise UserError(f"model: '{name}' is {_dtype_name(tensor)}; build the model in float32")
        if tensor.numel() and tensor.data_ptr() in first_at:
            pair = f"'{name}' and '{first_at[tensor.data_ptr()]}'"
            raise UserError(f"model: {pair} share their memory; tied weights are not supported")
        if is_parameter and not tensor.requires_grad:
            raise UserError(f"model: '{name}' is frozen (requires_grad is False); make it a buffer instead")
        first_at[tensor.data_ptr()] = name


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _readable(array: NDArray[Any]) -> Tensor:
    """View an array that is only going to be read: torch would warn about read-only ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
