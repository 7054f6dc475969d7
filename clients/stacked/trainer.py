"""Clients that start together, step together and leave when their batches are used up."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedplat.arrays import FlatArrays, Layout
from fedplat.training_config import LocalTraining

from ..training import TrainResult, batches
from .kernels import GroupBatch, Kernel, Stack, kernel_for
from .optimizer import StackedOptimizer, optimizer_for


@dataclass(frozen=True, eq=False)
class Learner:
    """One client of a group: which ``samples`` (n,) of the common data are its own, and its randomness.

    ``rng`` orders the samples, as in ``train_one``; ``dropout`` draws the masks, where the model has any, and
    is on the model's device.
    """

    samples: NDArray[np.int64]
    rng: np.random.Generator
    dropout: torch.Generator | None = None
    optimizer_state: Mapping[str, NDArray[np.float32]] | None = None


@dataclass(frozen=True, eq=False)
class _Plan:
    """Batches of a group: ``index`` (s, k, b) into the data, ``shares`` (s, k, b), ``sizes`` (s, k)."""

    index: Tensor
    shares: Tensor
    sizes: NDArray[np.int64]
    active: NDArray[np.int64]


class StackedTrainer:
    """Trains models of one architecture in groups; keeps the memory of the largest group for the next.

    Raises NotStackable for a module with layers that cannot be trained so.
    """

    def __init__(
        self, module: nn.Module, layout: Layout, training: LocalTraining, sample: Tensor, device: torch.device
    ) -> None:
        self.layout = layout
        self.training = training
        self.device = device
        self.kernel: Kernel = kernel_for(module.to(device), sample.to(device), training.precision == "bf16")
        self._stack: Stack | None = None
        self._optimizer: StackedOptimizer | None = None

    def train(
        self, models: Sequence[FlatArrays], x: Tensor, y: Tensor, learners: Sequence[Learner]
    ) -> tuple[list[FlatArrays], list[TrainResult]]:
        """Train one model per learner on its samples of ``x`` and ``y``.

        Returns the trained models, which are valid until the next call, and what training did. Neither
        depends on who else is in the group as long as the kernel is ``exact``; else up to rounding.
        """
        plans = [batches(len(one.samples), self.training, one.rng) for one in learners]
        widths = [_width(len(plan[0]) if plan else 0, self.training) for plan in plans]
        # Whoever has most to do comes first, so that those still at work are always the first rows of a run.
        order = sorted(
            range(len(learners)), key=lambda i: (-widths[i], -len(plans[i]), -len(learners[i].samples))
        )
        stack, optimizer = self._memory(len(learners))
        for row, i in enumerate(order):
            stack.vectors[row].copy_(_tensor(models[i].vector))
            stack.side[row].copy_(_tensor(models[i].side))
            optimizer.load(row, learners[i].optimizer_state if self.training.keep_optimizer else None)
        sorted_learners = [learners[i] for i in order]
        losses = torch.zeros(max((len(plan) for plan in plans), default=0), len(learners), device=self.device)
        sizes = np.zeros(losses.shape, np.int64)
        for rows in _runs([widths[i] for i in order]):
            width = widths[order[rows.start]]
            plan = _plan(
                [plans[i] for i in order[rows]],
                [one.samples for one in sorted_learners[rows]],
                width,
                self.device,
            )
            steps = len(plan.sizes)
            sizes[:steps, rows] = plan.sizes
            self._run(stack, optimizer, rows, plan, x, y, sorted_learners[rows], losses[:steps, rows])
        return self._results(stack, optimizer, order, losses, sizes)

    def _run(
        self,
        stack: Stack,
        optimizer: StackedOptimizer,
        rows: slice,
        plan: _Plan,
        x: Tensor,
        y: Tensor,
        learners: Sequence[Learner],
        losses: Tensor,
    ) -> None:
        for step, active in enumerate(plan.active.tolist()):
            part = slice(rows.start, rows.start + active)

            def backward(target: Tensor, beta: float, alpha: float, step: int = step) -> None:
                for run, size in self._together(plan, step):
                    index, shares = plan.index[step, run, :size], plan.shares[step, run, :size]
                    batch = GroupBatch(
                        stack,
                        slice(rows.start + run.start, rows.start + run.stop),
                        x.index_select(0, index.flatten()).unflatten(0, index.shape),
                        y.index_select(0, index.flatten()).unflatten(0, index.shape),
                        shares,
                        self._masks(learners[run], plan.sizes[step, run], size),
                    )
                    losses[step, run] = self.kernel.backward(batch, target[run], beta, alpha)

            optimizer.step(part, stack, backward)

    def _together(self, plan: _Plan, step: int) -> Iterator[tuple[slice, int]]:
        """Yield which of the active clients go into one call, and their batch's width."""
        active = int(plan.active[step])
        if not self.kernel.equal_batches:
            yield slice(0, active), plan.index.shape[2]
            return
        for run in _runs(plan.sizes[step, :active].tolist()):
            yield run, int(plan.sizes[step, run.start])

    def _masks(self, learners: Sequence[Learner], sizes: NDArray[np.int64], width: int) -> dict[str, Tensor]:
        """Draw each client's dropout masks with its own generator, layer by layer as its own pass would."""
        layers = self.kernel.dropout
        masks = {
            name: torch.zeros(len(learners), width, *layer.sample_shape, device=self.device)
            for name, layer in layers.items()
        }
        if layers:
            for row, (one, size) in enumerate(zip(learners, sizes.tolist(), strict=True)):
                if one.dropout is None:
                    raise ValueError("a model with dropout needs a generator for every learner")
                for name, layer in layers.items():
                    masks[name][row, :size] = layer.draw(size, one.dropout)
        return masks

    def _memory(self, clients: int) -> tuple[Stack, StackedOptimizer]:
        if self._stack is None or self._optimizer is None or len(self._stack) < clients:
            self._stack = Stack(self.layout, clients, self.device)
            self._optimizer = optimizer_for(self.training, clients, self.layout.num_params, self.device)
        return self._stack, self._optimizer

    def _results(
        self,
        stack: Stack,
        optimizer: StackedOptimizer,
        order: list[int],
        losses: Tensor,
        sizes: NDArray[np.int64],
    ) -> tuple[list[FlatArrays], list[TrainResult]]:
        # Read off the device once.
        totals = (losses.double().cpu().numpy() * sizes).sum(axis=0)
        vectors, side = stack.vectors.cpu().numpy(), stack.side.cpu().numpy()
        place = {i: row for row, i in enumerate(order)}
        models, results = [], []
        for row in (place[i] for i in range(len(order))):
            count, steps = int(sizes[:, row].sum()), int((sizes[:, row] > 0).sum())
            state = optimizer.state(row) if self.training.keep_optimizer else None
            models.append(FlatArrays(self.layout, vectors[row], side[row]))
            results.append(TrainResult(totals[row] / count if count else float("nan"), count, steps, state))
        return models, results


def _plan(
    plans: Sequence[list[NDArray[np.int64]]],
    samples: Sequence[NDArray[np.int64]],
    width: int,
    device: torch.device,
) -> _Plan:
    """Lay out the batches of clients that are sorted by their number of steps, each filled up to a width."""
    steps, clients = len(plans[0]), len(plans)
    index = np.zeros((steps, clients, width), np.int64)
    sizes = np.zeros((steps, clients), np.int64)
    for number, (plan, own) in enumerate(zip(plans, samples, strict=True)):
        if not plan:
            continue
        lengths = np.array([len(batch) for batch in plan])
        sizes[: len(plan), number] = lengths
        filled = np.arange(width) < lengths[:, None]
        # What fills up a batch is a sample of the client itself, without a share in the loss.
        index[: len(plan), number] = own[plan[0][0]]
        index[: len(plan), number][filled] = own[np.concatenate(plan)]
    shares = (np.arange(width) < sizes[..., None]) / np.maximum(sizes, 1)[..., None]
    return _Plan(
        torch.from_numpy(index).to(device),
        torch.from_numpy(shares.astype(np.float32)).to(device),
        sizes,
        (sizes > 0).sum(axis=1),
    )


def _width(first: int, training: LocalTraining) -> int:
    """Return the width of a client's batches: a power of two, if it has too few samples for a whole batch.

    It depends on the client alone, so that a client's arithmetic is the same in whatever group it is.
    """
    return min(training.batch_size, 1 << max(first - 1, 0).bit_length()) if first else 0


def _runs(values: Sequence[int]) -> Iterator[slice]:
    """Yield the stretches of equal values.

    >>> list(_runs([5, 5, 3]))
    [slice(0, 2, None), slice(2, 3, None)]
    """
    start = 0
    for _, run in itertools.groupby(values):
        length = len(list(run))
        yield slice(start, start + length)
        start += length


def _tensor(array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(array) if array.flags.writeable else torch.from_numpy(array.copy())
