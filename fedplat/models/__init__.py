"""Models: builders named in the registry, seeded construction, the loss, and flat parameter storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from ..rng import seeded_torch


def build(
    target: Callable[..., nn.Module],
    input_shape: tuple[int, ...],
    num_classes: int,
    seed: int,
    **settings: Any,
) -> nn.Module:
    """Build a model whose initial weights depend on ``seed`` alone; torch's own generators stay as they were.

    ``target`` is called as ``target(input_shape, num_classes, **settings)``, with ``input_shape`` (C, H, W)
    for images and (T,) for token sequences. Raises UserError where the builder cannot take such input.
    """
    with seeded_torch(seed, "model-init"):
        return target(input_shape, num_classes, **settings)


def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (n, C) and labels (n,), or (n, T, V) and (n, T).

    For sequences the mean is over all n · T positions. The result is a scalar on the logits' device.
    """
    if logits.ndim > 2:
        logits, y = logits.flatten(0, -2), y.flatten()
    return functional.cross_entropy(logits, y)


def count_parameters(module: nn.Module) -> int:
    """Return the number of trainable numbers of a module (shared ones once, buffers not)."""
    return sum(parameter.numel() for parameter in module.parameters())
