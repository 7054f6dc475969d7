"""Models made of *fake* tensors, which have shapes and sizes but no numbers: a step played through is free.

Memory and work of training are both told from such a step.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

Model = nn.Module | Callable[[], nn.Module]


@functools.cache
def start_autograd() -> None:
    """Go backward once on real tensors: if fake ones come first, PyTorch starts a thread per device type.

    A process with such threads cannot be forked into one that trains.
    """
    torch.ones(1, requires_grad=True).sum().backward()


def fake_module(model: Model) -> nn.Module:
    """Return a module of fake tensors, in training mode; has to be called inside a FakeTensorMode.

    ``model`` is a module, which is left as it is, or a function that builds one.
    """
    module = model if isinstance(model, nn.Module) else model()
    real = [t for t in (*module.parameters(), *module.buffers()) if not isinstance(t, FakeTensor)]
    if real or module is model:
        # Whatever refers to a tensor of the module, refers in the copy to its fake, and nothing is copied.
        module = copy.deepcopy(module, {id(tensor): _fake_tensor(tensor) for tensor in real})
    return module.train()


def _fake_tensor(tensor: Tensor) -> Tensor:
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
