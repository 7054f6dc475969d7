"""Fitting on the server's own data: several independent problems at once, the best epoch of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedplat.errors import UserError

Schedule = Literal["none", "cosine"]
Logits = Callable[[Tensor, Tensor], Tensor]
Penalty = Callable[[Tensor], Tensor]

_AT_ONCE = 512


@dataclass(frozen=True)
class PublicSplit:
    """The server's labelled samples in two parts: one to fit on, one to choose epochs by."""

    x: Tensor
    y: Tensor
    choose_x: Tensor
    choose_y: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor, rng: np.random.Generator, choose: float = 0.2) -> PublicSplit:
        """Draw the parts, the second of a share ``choose``; raises UserError for fewer than two samples."""
        if len(y) < 2:
            raise UserError(
                f"the server has {len(y)} samples of its own; fitting on them needs two at least, one to fit "
                "on and one to choose by. Give it more"
            )
        order = torch.from_numpy(rng.permutation(len(y))).to(x.device)
        kept = min(max(1, round(choose * len(y))), len(y) - 1)
        chosen, fitted = order[:kept].sort().values, order[kept:].sort().values
        return cls(x[fitted], y[fitted], x[chosen], y[chosen])


@dataclass(frozen=True)
class FitPlan:
    """Adam over ``epochs`` passes; "cosine" moves the rate between ``lr`` and ``min_lr`` and back.

    One way takes ``t_max`` epochs. A ``cautious`` fit keeps its start unless that is beaten on the choosing
    part by two standard errors: the best of many epochs always looks better on a few samples.
    """

    epochs: int = 20
    lr: float = 1e-3
    batch_size: int = 32
    schedule: Schedule = "none"
    t_max: int = 4
    min_lr: float = 1e-5
    cautious: bool = False

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0.

        >>> [round(FitPlan(schedule="cosine", lr=1.0, min_lr=0.0).rate(epoch), 3) for epoch in range(6)]
        [1.0, 0.854, 0.5, 0.146, 0.0, 0.146]
        """
        if self.schedule == "none":
            return self.lr
        return self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * epoch / self.t_max)) / 2

    def steps(self, samples: int) -> int:
        """Return the number of steps on so many samples."""
        return self.epochs * -(-samples // self.batch_size)


@dataclass(frozen=True)
class Fitted:
    """What came of m problems: ``values`` (m, q), and their loss, accuracy and epoch (m,).

    Loss and accuracy are those on the choosing part; epoch 0 is the start, infinite is a loss that never was
    a number. ``steps`` were taken.
    """

    values: Tensor
    loss: Tensor
    accuracy: Tensor
    epoch: Tensor
    steps: int


def fit(
    logits: Logits,
    start: Tensor,
    data: PublicSplit,
    plan: FitPlan,
    rng: np.random.Generator,
    penalty: Penalty | None = None,
) -> Fitted:
    """Minimise the cross-entropy of m problems by Adam from ``start`` (m, q), independent of each other.

    ``logits`` gets values (m, q) and samples (n, ...) and returns (m, n, classes), or (m, n, T, V) for
    tokens; ``penalty`` gets values and returns what is added to the loss (m,). All problems see the same
    batches, whose order ``rng`` draws. Each keeps the values of the epoch with the least loss on the choosing
    part; the start counts as one, and wins close calls if the plan is ``cautious``. Nothing but ``values``
    gets gradients.
    """
    values = start.detach().clone().requires_grad_()
    best = start.detach().clone()
    loss, accuracy = first = judged(logits, best, data)
    loss = loss.nan_to_num(nan=math.inf)
    epochs = torch.zeros(len(start), dtype=torch.int64)
    optimizer = torch.optim.Adam([values], lr=plan.lr, fused=True)
    for epoch in range(plan.epochs):
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(epoch)
        order = torch.from_numpy(rng.permutation(len(data.y))).to(data.y.device)
        for batch in order.split(plan.batch_size):
            objective = losses(logits(values, data.x[batch]), data.y[batch])
            if penalty is not None:
                objective = objective + penalty(values)
            values.grad = torch.autograd.grad(objective.sum(), values)[0]
            optimizer.step()
        now, hits = judged(logits, values.detach(), data)
        better = now < loss
        best[better] = values.detach()[better]
        loss, accuracy = torch.where(better, now, loss), torch.where(better, hits, accuracy)
        epochs[better.cpu()] = epoch + 1
    if plan.cautious and plan.epochs:
        close = ~beats(logits, best, start.detach(), data, surely=True)
        best[close] = start.detach()[close]
        loss, accuracy = torch.where(close, first[0], loss), torch.where(close, first[1], accuracy)
        epochs[close.cpu()] = 0
    return Fitted(best, loss, accuracy, epochs, plan.steps(len(data.y)))


def judged(logits: Logits, values: Tensor, data: PublicSplit) -> tuple[Tensor, Tensor]:
    """Return the mean loss and the accuracy (m,) of values (m, q) on the choosing part."""
    total = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    hits = torch.zeros_like(total)
    with torch.no_grad():
        for x, y in zip(data.choose_x.split(_AT_ONCE), data.choose_y.split(_AT_ONCE), strict=True):
            out = logits(values, x)
            total += losses(out, y).double() * len(y)
            hits += (out.argmax(-1) == y).double().flatten(1).mean(1) * len(y)
    return total / len(data.choose_y), hits / len(data.choose_y)


def losses(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy (m,) of logits (m, n, classes), or (m, n, T, V)."""
    return _token_losses(logits, y).mean(1)


def _token_losses(logits: Tensor, y: Tensor) -> Tensor:
    flat = logits.flatten(1, -2)
    labels = y.flatten().expand(len(flat), -1)
    return functional.cross_entropy(flat.transpose(1, 2), labels, reduction="none")


def _each_loss(logits: Logits, values: Tensor, data: PublicSplit) -> Tensor:
    """Return the loss of each sample (m, n) of the choosing part; a text's is the mean over its tokens."""
    parts = []
    with torch.no_grad():
        for x, y in zip(data.choose_x.split(_AT_ONCE), data.choose_y.split(_AT_ONCE), strict=True):
            parts.append(_token_losses(logits(values, x), y).unflatten(1, (len(y), -1)).mean(2))
    return torch.cat(parts, dim=1).double()


def beats(logits: Logits, values: Tensor, others: Tensor, data: PublicSplit, surely: bool) -> Tensor:
    """Return where values (m, q) are better than others (m, q) on the choosing part.

    ``surely`` means by two standard errors of the paired difference of the samples' losses. Finite losses
    beat those that are not.
    """
    mine, theirs = (_each_loss(logits, each, data) for each in (values, others))
    return _less(mine, theirs, 2.0 if surely else 0.0)


def _less(one: Tensor, other: Tensor, errors: float) -> Tensor:
    """Return where losses (m, n) are lower than others by so many standard errors.

    >>> start = torch.tensor([[2.0, 2.0, 2.0, 2.0]])
    >>> fitted = torch.tensor([[1.0, 1.1, 0.9, 1.0], [0.0, 3.0, 0.5, 2.0]])
    >>> _less(fitted, start.expand(2, -1), 2.0).tolist(), _less(fitted, start.expand(2, -1), 0.0).tolist()
    ([True, False], [True, True])
    """
    gain = other - one
    margin: Tensor | float = 0.0
    if errors:
        # The spread of a single sample is unknown, and so is whether it was chance.
        margin = errors * gain.std(dim=1) / gain.shape[1] ** 0.5 if gain.shape[1] > 1 else math.inf
    lower = gain.mean(dim=1) > margin
    return torch.isfinite(one).all(dim=1) & (lower | ~torch.isfinite(other).all(dim=1))


@dataclass(frozen=True)
class Named:
    """Tensors of these names and shapes as one vector, in this order."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Named:
        """Take names and shapes."""
        return cls(tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()))

    def split(self, values: Tensor) -> dict[str, Tensor]:
        """Return the tensors (m, ...) of m vectors (m, q)."""
        parts = values.split([math.prod(shape) for _, shape in self.shapes], dim=1)
        return {
            name: part.reshape(len(values), *shape)
            for (name, shape), part in zip(self.shapes, parts, strict=True)
        }

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the vector (q,) of tensors."""
        return torch.cat([tensors[name].detach().reshape(-1) for name, _ in self.shapes])
