"""A module of shapes alone, on torch's meta device, given memory."""

from __future__ import annotations

import copy

from torch import nn


def with_memory(module: nn.Module, device: str = "cpu") -> nn.Module:
    """Return a copy with memory for every tensor; those of the meta device come without their numbers."""
    tensors = (*module.parameters(), *module.buffers())
    made = copy.deepcopy(module)
    return made.to_empty(device=device) if any(tensor.is_meta for tensor in tensors) else made.to(device)


def has_hidden_buffers(module: nn.Module) -> bool:
    """Return whether a module has buffers that its state dict leaves out, which no message brings."""
    known = module.state_dict(keep_vars=True).keys()
    return any(name not in known for name, _ in module.named_buffers())
