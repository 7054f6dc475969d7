"""SGD and Adam on models that are rows of a matrix, with each row's own state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedplat.training_config import LocalTraining

from .kernels import Stack, aligned

State = dict[str, NDArray[np.float32]]
# backward(target, beta, alpha): target ← beta·target + alpha·gradient, as one step where the layers can.
Backward = Callable[[Tensor, float, float], None]

_BETAS = 0.9, 0.999
_EPSILON = 1e-8


class StackedOptimizer(Protocol):
    """One optimiser step for some rows of a stack."""

    def step(self, rows: slice, stack: Stack, backward: Backward) -> None:
        """Change the parameters of the rows."""
        ...

    def load(self, row: int, state: Mapping[str, NDArray[np.float32]] | None) -> None:
        """Start a row from an earlier state, or afresh."""
        ...

    def state(self, row: int) -> State:
        """Return a row's state, a copy."""
        ...


def optimizer_for(training: LocalTraining, rows: int, size: int, device: torch.device) -> StackedOptimizer:
    """Return the optimiser of the settings for (rows, size) parameters."""
    kind = _Adam if training.optimizer == "adam" else _SGD
    return kind(training, rows, size, device)


class _SGD:
    def __init__(self, training: LocalTraining, rows: int, size: int, device: torch.device) -> None:
        self._settings = training
        self._buffer = aligned(rows, size, device) if training.momentum else None

    def step(self, rows: slice, stack: Stack, backward: Backward) -> None:
        s, params = self._settings, stack.params[rows]
        buffer = None if self._buffer is None else self._buffer[rows]
        if s.max_grad_norm is None and not s.nesterov:
            # The products that make the gradient add to the weights or the momentum as they are formed.
            if buffer is None:
                backward(params, 1 - s.lr * s.weight_decay, -s.lr)
                return
            backward(buffer, s.momentum, 1.0)
            if s.weight_decay:
                buffer.add_(params, alpha=s.weight_decay)
            params.add_(buffer, alpha=-s.lr)
            return
        grads = stack.grads[rows]
        backward(grads, 0.0, 1.0)
        _clip(grads, s.max_grad_norm)
        if s.weight_decay:
            grads.add_(params, alpha=s.weight_decay)
        if buffer is not None:
            buffer.mul_(s.momentum).add_(grads)
            grads = grads.add_(buffer, alpha=s.momentum) if s.nesterov else buffer
        params.add_(grads, alpha=-s.lr)

    def load(self, row: int, state: Mapping[str, NDArray[np.float32]] | None) -> None:
        if self._buffer is not None:
            _fill(self._buffer[row], state, "momentum_buffer")

    def state(self, row: int) -> State:
        return {} if self._buffer is None else {"momentum_buffer": _copy(self._buffer[row])}


class _Adam:
    def __init__(self, training: LocalTraining, rows: int, size: int, device: torch.device) -> None:
        self._settings = training
        self._mean, self._square = aligned(rows, size, device), aligned(rows, size, device)
        self._steps = torch.zeros(rows, 1, dtype=torch.float64, device=device)

    def step(self, rows: slice, stack: Stack, backward: Backward) -> None:
        s, params, grads = self._settings, stack.params[rows], stack.grads[rows]
        mean, square, steps = self._mean[rows], self._square[rows], self._steps[rows]
        backward(grads, 0.0, 1.0)
        _clip(grads, s.max_grad_norm)
        if s.weight_decay:
            grads.add_(params, alpha=s.weight_decay)
        steps.add_(1)
        mean.lerp_(grads, 1 - _BETAS[0])
        square.mul_(_BETAS[1]).addcmul_(grads, grads, value=1 - _BETAS[1])
        size = (s.lr / (1 - _BETAS[0] ** steps)).float()
        scale = (1 - _BETAS[1] ** steps).sqrt_().float()
        torch.sqrt(square, out=grads)
        params.sub_(torch.div(mean, grads.div_(scale).add_(_EPSILON), out=grads).mul_(size))

    def load(self, row: int, state: Mapping[str, NDArray[np.float32]] | None) -> None:
        _fill(self._mean[row], state, "exp_avg")
        _fill(self._square[row], state, "exp_avg_sq")
        _fill(self._steps[row, 0], state, "step")

    def state(self, row: int) -> State:
        return {
            "step": _copy(self._steps[row, 0].float()),
            "exp_avg": _copy(self._mean[row]),
            "exp_avg_sq": _copy(self._square[row]),
        }


def _clip(grads: Tensor, bound: float | None) -> None:
    """Scale rows down to an L2 norm of ``bound``, with the small term of ``torch.nn.utils``."""
    if bound is not None:
        norms = torch.linalg.vector_norm(grads, dim=1, keepdim=True)
        grads.mul_((bound / (norms + 1e-6)).clamp(max=1))


def _fill(target: Tensor, state: Mapping[str, NDArray[np.float32]] | None, name: str) -> None:
    if state:
        target.copy_(torch.tensor(state[name]))
    else:
        target.zero_()


def _copy(tensor: Tensor) -> NDArray[np.float32]:
    copied: NDArray[np.float32] = tensor.cpu().numpy().copy()
    return copied
