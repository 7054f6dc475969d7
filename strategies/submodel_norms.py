"""What norms a model has, and the statistics of BatchNorm where the server finds them itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedplat.arrays import FlatArrays
from fedplat.models.cutting import reestimate_batch_norm
from fedplat.models.flat import FlatModel
from fedplat.models.materialise import with_memory

_BATCH = 500


def has_norm(module: nn.Module) -> bool:
    """Return whether any layer norms what it gets."""
    norms = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)
    return any(isinstance(layer, norms) for layer in module.modules())


def has_batch_norm(module: nn.Module) -> bool:
    """Return whether any layer norms by the statistics of a batch."""
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())


def with_statistics_of(module: nn.Module, arrays: FlatArrays, x: Tensor) -> FlatArrays:
    """Return a model with the running statistics of samples; ``module``, perhaps without memory, is left."""
    model = FlatModel(with_memory(module))
    model.load(arrays)
    reestimate_batch_norm(model.module, x.cpu().split(_BATCH))
    new = FlatArrays(arrays.layout, arrays.vector.copy(), arrays.side.copy())
    p = arrays.layout.num_params
    with torch.no_grad():
        new.vector[p:] = model.vector[p:].numpy()
    return new
