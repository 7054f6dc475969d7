"""What a client does with its data: some steps of SGD or Adam, and the measuring of a model.

Both keep every number on the model's device until the end; one flat optimiser tensor stands for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedplat.models import loss_fn
from fedplat.models.flat import FlatModel
from fedplat.training_config import LocalTraining

OnBatch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]
OptimizerState = dict[str, NDArray[np.float32]]

_STATE_NAMES = {"sgd": {"momentum_buffer"}, "adam": {"step", "exp_avg", "exp_avg_sq"}}


@dataclass(frozen=True)
class TrainResult:
    """What training did: mean loss over the samples seen, how many those were (each epoch counts), and steps.

    ``loss`` is measured before each step, as the gradient is; it is nan for a client without samples and may
    be nan or inf if training diverged. ``optimizer_state`` is None unless ``keep_optimizer`` is set.
    ``metrics`` are what the model itself tells of its training, by its ``training_metrics()`` if it has one.
    """

    loss: float
    samples: int
    steps: int
    optimizer_state: OptimizerState | None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Mean loss, share predicted right, ``confusion`` (C, C) with true classes as rows, ``support`` (C,).

    For token sequences every position counts as a sample. A sample with a NaN among its logits is counted as
    wrong and has no predicted class: it is in ``support``, the number of samples per true class, but in no
    column of ``confusion``; so take rates per class relative to ``support``, not to the row's sum. For an
    empty set loss and accuracy are nan.
    """

    loss: float
    accuracy: float
    confusion: NDArray[np.int64]
    support: NDArray[np.int64]

    @property
    def samples(self) -> int:
        """Number of predictions that were judged."""
        return int(self.support.sum())

    @property
    def undecided(self) -> int:
        """Number of samples whose logits contained NaN."""
        return self.samples - int(self.confusion.sum())


def batches(num_samples: int, training: LocalTraining, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Return the sample indices of every step of one call, in order.

    Each epoch is one ``rng.permutation(num_samples)``, cut every ``batch_size``; with ``steps``, permutations
    are drawn until there are enough batches. ``drop_last`` leaves out the smaller batch at an epoch's end,
    but a client with fewer samples than a batch trains on that one rather than on nothing.

    >>> [len(batch) for batch in batches(7, LocalTraining(batch_size=3), np.random.default_rng(0))]
    [3, 3, 1]
    """
    size = training.batch_size
    end = num_samples // size * size if training.drop_last and num_samples >= size else num_samples
    plan: list[NDArray[np.int64]] = []
    if num_samples == 0:
        return plan
    wanted = training.steps or training.epochs * -(-end // size)
    while len(plan) < wanted:
        order = rng.permutation(num_samples)
        plan += [order[start : min(start + size, end)] for start in range(0, end, size)]
    return plan[:wanted]


def train_one(
    model: FlatModel,
    training: LocalTraining,
    x: Tensor,
    y: Tensor,
    rng: np.random.Generator,
    optimizer_state: Mapping[str, NDArray[np.float32]] | None = None,
    on_batch: OnBatch | None = None,
    loss_factor: float = 1.0,
    loss_of: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> TrainResult:
    """Train ``model`` in place on samples ``x`` (n, ...) with labels ``y`` (n,), or (n, T) for tokens.

    ``rng`` decides the order of samples and nothing else; dropout draws from torch's generator, so a caller
    who uses dropout runs this inside ``seeded_torch``. ``optimizer_state`` is what the last call returned. It
    is used only with ``keep_optimizer``: calls that hand it on equal one uninterrupted optimiser to the bit.
    Raises ValueError for a state that is of another optimiser or model.

    ``on_batch`` may change the samples and labels of a step, or return None to leave the step out;
    ``loss_factor`` multiplies the loss that is descended, so −1 climbs it. The loss reported is the plain.
    ``loss_of`` gives the loss of a step's samples and labels in place of the model's cross-entropy on them;
    without it, a module's own ``training_loss(x, y)`` does, if it has one.

    The arithmetic is that of ``torch.optim`` over the separate parameters, up to rounding.
    """
    plan = batches(len(y), training, rng)
    sizes = [len(batch) for batch in plan]
    optimizer = _optimizer(model, training)
    if training.keep_optimizer and optimizer_state:
        _restore(optimizer, model, training, optimizer_state)
    model.module.train()
    model.bind_grad()
    loss_of = loss_of or getattr(model.module, "training_loss", None)
    losses = []
    taken: list[int] = []
    if plan:
        x, y = x.to(model.device), y.to(model.device)
        order = torch.from_numpy(np.concatenate(plan)).to(model.device)
        for batch in order.split(sizes):
            samples: tuple[Tensor, Tensor] | None = x.index_select(0, batch), y.index_select(0, batch)
            if on_batch is not None and samples is not None:
                samples = on_batch(*samples)
            if samples is None:
                continue
            model.zero_grad()
            with torch.autocast(model.device.type, torch.bfloat16, enabled=training.precision == "bf16"):
                loss = loss_of(*samples) if loss_of else loss_fn(model(samples[0]).float(), samples[1])
            (loss if loss_factor == 1 else loss_factor * loss).backward()
            if training.max_grad_norm is not None:
                nn.utils.clip_grad_norm_([model.params], training.max_grad_norm)
            optimizer.step()
            losses.append(loss.detach())
            taken.append(len(batch))
    count = sum(taken)
    # Summed once at the end: reading a number off the device in every step would make the device wait.
    total = float(np.dot(torch.stack(losses).double().cpu().numpy(), taken)) if losses else float("nan")
    kept = _state(optimizer, model) if training.keep_optimizer else None
    told: Mapping[str, float] = getattr(model.module, "training_metrics", dict)()
    return TrainResult(total / max(count, 1), count, len(taken), kept, told)


def evaluate(
    model: FlatModel | nn.Module, x: Tensor, y: Tensor, num_classes: int, batch_size: int = 1000
) -> Evaluation:
    """Measure a model on samples ``x`` (n, ...) and labels ``y`` (n,), or (n, T) for tokens; changes nothing.

    Never raises for NaN or infinite logits: the loss says so, and Evaluation tells how they are counted.
    Raises ValueError if the model has more outputs than there are classes.
    """
    module = model.module if isinstance(model, FlatModel) else model
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    in_training = [part for part in module.modules() if part.training]
    # One column more than there are classes, for the samples without a prediction.
    table = torch.zeros(num_classes * (num_classes + 1), dtype=torch.int64, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    module.eval()
    try:
        with torch.inference_mode():
            for x_batch, y_batch in zip(x.split(batch_size), y.split(batch_size), strict=True):
                if len(y_batch) == 0:
                    continue
                logits, true = model(x_batch.to(device)).flatten(0, -2), y_batch.to(device).flatten()
                if logits.shape[-1] > num_classes:
                    raise ValueError(f"the model has {logits.shape[-1]} outputs for {num_classes} classes")
                total += loss_fn(logits, true).double() * len(true)
                largest, predicted = logits.max(dim=-1)
                predicted = torch.where(largest.isnan(), num_classes, predicted)
                table += torch.bincount(true * (num_classes + 1) + predicted, minlength=len(table))
    finally:
        for part in in_training:
            part.training = True
    counts = table.view(num_classes, num_classes + 1).cpu().numpy()
    confusion, support = counts[:, :num_classes].copy(), counts.sum(axis=1)
    if (samples := int(support.sum())) == 0:
        return Evaluation(float("nan"), float("nan"), confusion, support)
    return Evaluation(float(total) / samples, int(confusion.trace()) / samples, confusion, support)


def _optimizer(model: FlatModel, training: LocalTraining) -> torch.optim.Optimizer:
    # The fused kernels read and write each number once instead of once per term of the formula, which pays
    # as soon as there is more than one term.
    if training.optimizer == "adam":
        return torch.optim.Adam(
            [model.params], lr=training.lr, weight_decay=training.weight_decay, fused=True
        )
    return torch.optim.SGD(
        [model.params],
        lr=training.lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        nesterov=training.nesterov,
        fused=bool(training.momentum or training.weight_decay),
    )


def _state(optimizer: torch.optim.Optimizer, model: FlatModel) -> OptimizerState:
    state = optimizer.state[model.params]
    return {name: value.cpu().numpy().copy() for name, value in state.items() if isinstance(value, Tensor)}


def _restore(
    optimizer: torch.optim.Optimizer,
    model: FlatModel,
    training: LocalTraining,
    state: Mapping[str, NDArray[np.float32]],
) -> None:
    if set(state) != _STATE_NAMES[training.optimizer]:
        raise ValueError(f"optimizer state {sorted(state)} does not belong to '{training.optimizer}'")
    for name, value in state.items():
        expected = () if name == "step" else tuple(model.params.shape)
        if np.shape(value) != expected:
            raise ValueError(f"optimizer state '{name}' has shape {np.shape(value)}, expected {expected}")
        optimizer.state[model.params][name] = torch.tensor(value, dtype=torch.float32, device=model.device)
