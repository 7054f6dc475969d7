"""BatchNorm of sub-models: running statistics of unlike models mean nothing, so they are estimated anew."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def reestimate_batch_norm(module: nn.Module, batches: Iterable[Tensor]) -> int:
    """Set the running statistics of all BatchNorm layers to those of ``batches``, and return their number.

    ``batches`` are inputs (n, ...) as the module takes them, and each counts by its samples, so that a pass
    over data that is one batch gives exactly that batch's statistics. Only these layers are in training mode
    meanwhile: dropout is off. Weights, modes and momenta are afterwards as they were. Without such layers no
    batch is drawn; without batches nothing changes.

    Source: static batch normalisation of Diao et al., "HeteroFL", ICLR 2021; there all batches count alike.
    """
    layers = [one for one in module.modules() if isinstance(one, _BatchNorm) and one.running_mean is not None]
    if not layers:
        return 0
    modes = {one: one.training for one in module.modules()}
    momenta = [layer.momentum for layer in layers]
    count = samples = 0
    try:
        module.eval()
        for layer in layers:
            layer.train()
        with torch.no_grad():
            for x in batches:
                if not count:
                    for layer in layers:
                        layer.reset_running_stats()
                count, samples = count + 1, samples + len(x)
                for layer in layers:
                    layer.momentum = len(x) / samples
                module(x)
    finally:
        for one, mode in modes.items():
            one.training = mode
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    return count


def freeze_batch_norm(module: nn.Module) -> nn.Module:
    """Make all BatchNorm layers train on their batches and keep their running statistics; return ``module``.

    This is how HeteroFL's clients train. The counters of batches go on. It is done by momenta of 0, so it
    lasts in copies too.
    """
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.momentum = 0.0
    return module
