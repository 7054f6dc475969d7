"""Loss and gradient of many clients' models on their own batches, in one call.

Rows of a :class:`Stack` are models. A kernel is given a range of rows, a batch for each of them, and how much
each sample counts (0 for one that only fills up the batch), and adds the gradients of these rows to a target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedplat.arrays import Entry, Layout

from .modules import MaskedDropout, has_batch_statistics, masked_layers, stackable


def aligned(rows: int, size: int, device: torch.device) -> Tensor:
    """Return memory (rows, size) whose rows all begin at a multiple of 64 bytes.

    A matrix product adds up in another order where its operands lie differently; so they lie alike.
    """
    return torch.empty(rows, -(-size // 16) * 16, device=device)[:, :size]


class Stack:
    """Memory for k models: ``vectors`` (k, d), ``side`` bytes (k, s), and ``grads`` (k, p)."""

    def __init__(self, layout: Layout, rows: int, device: torch.device) -> None:
        self.layout = layout
        self.vectors = aligned(rows, layout.dim, device)
        self.side = torch.empty(rows, layout.side_bytes, dtype=torch.uint8, device=device)
        self._device = device
        self._grads: Tensor | None = None

    def __len__(self) -> int:
        return len(self.vectors)

    @property
    def params(self) -> Tensor:
        """The parameters of all rows, (k, p)."""
        return self.vectors[:, : self.layout.num_params]

    @property
    def grads(self) -> Tensor:
        """Memory for gradients (k, p), made when it is first asked for."""
        if self._grads is None:
            self._grads = aligned(len(self.vectors), self.layout.num_params, self._device)
        return self._grads


@dataclass(frozen=True, eq=False)
class GroupBatch:
    """What some rows of a stack train on in one step.

    Samples ``x`` (a, b, ...) and labels ``y`` (a, b) or (a, b, T), each row its own; ``shares`` (a, b) sum to
    1 per row, 0 for a sample that only fills up; ``masks`` (a, b, ...) by the name of the dropout layer.
    """

    stack: Stack
    rows: slice
    x: Tensor
    y: Tensor
    shares: Tensor
    masks: Mapping[str, Tensor]


class Kernel(Protocol):
    """Computes gradients for the rows of a stack."""

    exact: bool
    """Whether a row's bits are the same in whatever company it is computed."""
    equal_batches: bool
    """Whether filling up a batch would change the result, so that only batches of one size go together."""

    dropout: Mapping[str, MaskedDropout]
    """Layers that need a mask, by name, in the order they are used in."""

    def backward(self, batch: GroupBatch, target: Tensor, beta: float, alpha: float) -> Tensor:
        """Set target ← beta·target + alpha·gradient, (a, p), for the a rows; return their losses (a,)."""
        ...


def kernel_for(module: nn.Module, sample: Tensor, bf16: bool = False) -> Kernel:
    """Return the fastest kernel that knows all layers; ``sample`` (1, ...) is one prepared sample.

    Raises NotStackable if no kernel does.
    """
    layers = dense_layers(module)
    return DenseKernel(layers) if layers and not bf16 else VmapKernel(module, sample, bf16)


class VmapKernel:
    """Any module, by ``torch.vmap`` over its parameters and buffers; the loss is the cross-entropy."""

    exact = False

    def __init__(self, module: nn.Module, sample: Tensor, bf16: bool = False) -> None:
        self._module = stackable(module)
        self.equal_batches = has_batch_statistics(module)
        self.dropout: Mapping[str, MaskedDropout] = masked_layers(self._module, sample)
        self._bf16 = bf16
        self._parameters = {name for name, _ in module.named_parameters()}
        self._forward = torch.vmap(self._one, randomness="error")
        self._bound: tuple[Stack, slice, dict[str, Tensor], dict[str, Tensor]] | None = None

    def _one(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = functional_call(self._module, tensors, (x,))
        return output

    def backward(self, batch: GroupBatch, target: Tensor, beta: float, alpha: float) -> Tensor:
        """Add the rows' gradients to the target and return their losses, as :class:`Kernel` says."""
        stack, rows, x, y, shares = batch.stack, batch.rows, batch.x, batch.y, batch.shares
        parameters, homes = self._tensors(stack, rows)
        # vmap changes buffers in place only where they are contiguous.
        buffers = {name: home.contiguous() for name, home in homes.items()}
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._bf16):
            given = {f"{name}.mask": mask for name, mask in batch.masks.items()}
            logits = self._forward({**parameters, **buffers, **given}, x)
        each = functional.cross_entropy(logits.flatten(0, -2).float(), y.flatten(), reduction="none")
        losses = (each.view(*shares.shape, -1).mean(dim=2) * shares).sum(dim=1)
        grads = torch.autograd.grad(losses.sum(), list(parameters.values()))
        for name, home in homes.items():
            home.copy_(buffers[name])
        for name, grad in zip(parameters, grads, strict=True):
            _accumulate(_part(target, stack.layout.by_name[name]), grad, beta, alpha)
        return losses.detach()

    def _tensors(self, stack: Stack, rows: slice) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return views of the rows by name: parameters, which are leaves, and buffers."""
        if self._bound and self._bound[0] is stack and self._bound[1] == rows:
            return self._bound[2:]
        parameters, buffers = {}, {}
        for entry in stack.layout.entries:
            view = view_of(stack, entry, rows)
            if entry.name in self._parameters:
                parameters[entry.name] = view.detach().requires_grad_()
            else:
                buffers[entry.name] = view
        self._bound = stack, rows, parameters, buffers
        return parameters, buffers


class DenseKernel:
    """Fully connected layers with ReLU between them, written out: batched products and nothing else.

    The gradient of a weight is one batched product that adds to its target as it is formed; for plain SGD
    the target is the weight itself, so no gradient is ever stored. A batched product computes each matrix
    as if it were alone.
    """

    exact = True
    equal_batches = False

    def __init__(self, layers: list[tuple[str, bool]]) -> None:
        self._layers = layers
        self.dropout: Mapping[str, MaskedDropout] = {}

    def backward(self, batch: GroupBatch, target: Tensor, beta: float, alpha: float) -> Tensor:
        """Add the rows' gradients to the target and return their losses, as :class:`Kernel` says."""
        stack, rows, x, y, shares = batch.stack, batch.rows, batch.x, batch.y, batch.shares
        inputs = [_laid_out(x.flatten(2))]
        weights, biases = self._tensors(stack, rows)
        for weight, bias in zip(weights, biases, strict=True):
            out = _product(inputs[-1], weight.transpose(1, 2))
            if bias is not None:
                out += bias[:, None]
            inputs.append(out if weight is weights[-1] else out.relu_())
        logits = inputs.pop()
        norm = logits.logsumexp(dim=2, keepdim=True)
        true = y[..., None]
        losses = ((norm - logits.gather(2, true)).squeeze(2) * shares).sum(dim=1)
        delta = logits.sub_(norm).exp_()
        delta.scatter_add_(2, true, torch.full_like(norm, -1.0))
        delta *= shares[..., None]
        by_name = stack.layout.by_name
        for number in reversed(range(len(weights))):
            name, has_bias = self._layers[number]
            before = _product(delta, weights[number]) if number else None
            _part(target, by_name[f"{name}.weight"]).baddbmm_(
                delta.transpose(1, 2), inputs[number], beta=beta, alpha=alpha
            )
            if has_bias:
                _accumulate(_part(target, by_name[f"{name}.bias"]), delta.sum(dim=1), beta, alpha)
            if before is not None:
                # What ReLU let through is above zero, and is not needed any more.
                delta = before.mul_(inputs[number].sign_())
        return losses

    def _tensors(self, stack: Stack, rows: slice) -> tuple[list[Tensor], list[Tensor | None]]:
        by_name = stack.layout.by_name
        weights = [view_of(stack, by_name[f"{name}.weight"], rows) for name, _ in self._layers]
        biases = [
            view_of(stack, by_name[f"{name}.bias"], rows) if has_bias else None
            for name, has_bias in self._layers
        ]
        return weights, biases


def dense_layers(module: nn.Module) -> list[tuple[str, bool]]:
    """Return name and "has a bias" of each linear layer, or nothing if there is any other layer than ReLU."""
    if type(module) is not nn.Sequential:
        return []
    layers = list(module.named_children())
    if not layers or not isinstance(layers[0][1], nn.Flatten) or layers[0][1].start_dim != 1:
        return []
    kinds = [type(layer) for _, layer in layers[1:]]
    if kinds != [nn.Linear, *[nn.ReLU, nn.Linear] * (len(kinds) // 2)]:
        return []
    return [(name, layer.bias is not None) for name, layer in layers if isinstance(layer, nn.Linear)]


def view_of(stack: Stack, entry: Entry, rows: slice) -> Tensor:
    """Return one named tensor of some rows, (a, *shape); a view."""
    if entry.in_vector:
        return _part(stack.vectors[rows], entry)
    kind = getattr(torch, entry.dtype)
    return stack.side[rows, entry.start : entry.stop].view(kind).view(-1, *entry.shape)


def _laid_out(x: Tensor) -> Tensor:
    """Return (a, b, c) with each of the a matrices aligned; itself where it is so."""
    clients, rows, columns = x.shape
    if rows * columns % 16 == 0:
        return x
    return aligned(clients, rows * columns, x.device).unflatten(1, (rows, columns)).copy_(x)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the batched product (a, b, d) of (a, b, c) and (a, c, d), each matrix aligned."""
    clients, rows, columns = len(left), left.shape[1], right.shape[2]
    out = aligned(clients, rows * columns, left.device).unflatten(1, (rows, columns))
    return out.baddbmm_(left, right, beta=0)


def _part(matrix: Tensor, entry: Entry) -> Tensor:
    return matrix[:, entry.start : entry.stop].view(len(matrix), *entry.shape)


def _accumulate(target: Tensor, value: Tensor, beta: float, alpha: float) -> None:
    # Memory that is not to count may hold anything, and zero times NaN is NaN.
    if beta == 0:
        torch.mul(value, alpha, out=target)
    else:
        target.mul_(beta).add_(value, alpha=alpha)
