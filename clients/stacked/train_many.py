"""Many clients trained in one call, whatever their model is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedplat.arrays import FlatArrays
from fedplat.models.flat import FlatModel
from fedplat.training_config import LocalTraining

from ..training import TrainResult, train_one
from .modules import NotStackable
from .trainer import Learner, StackedTrainer


def train_many(
    model: FlatModel,
    training: LocalTraining,
    models: Sequence[FlatArrays],
    x: Tensor,
    y: Tensor,
    learners: Sequence[Learner],
) -> tuple[list[FlatArrays], list[TrainResult]]:
    """Train each of ``models`` on its learner's samples of ``x`` (n, ...) and labels ``y`` (n,) or (n, T).

    ``model`` is the architecture; its own weights are left as they are where all layers can be trained
    together, and overwritten where the clients have to go one after another. Each client's result is what
    ``train_one`` gives, up to rounding: its own batches, dropout masks, and BatchNorm statistics.

    For group after group, make a :class:`StackedTrainer` once.
    """
    x, y = x.to(model.device), y.to(model.device)
    try:
        trainer = StackedTrainer(model.module, model.layout, training, x[:1], model.device)
    except NotStackable:
        return _one_by_one(model, training, models, x, y, learners)
    return trainer.train(models, x, y, learners)


def _one_by_one(
    model: FlatModel,
    training: LocalTraining,
    models: Sequence[FlatArrays],
    x: Tensor,
    y: Tensor,
    learners: Sequence[Learner],
) -> tuple[list[FlatArrays], list[TrainResult]]:
    trained, results = [], []
    device = torch.cuda.current_device() if model.device.type == "cuda" else None
    for start, one in zip(models, learners, strict=True):
        model.load(start)
        samples = torch.from_numpy(one.samples).to(model.device)
        with torch.random.fork_rng(devices=[] if device is None else [device]):
            if one.dropout is not None:
                default = torch.default_generator if device is None else torch.cuda.default_generators[device]
                default.set_state(one.dropout.get_state())
            own = x.index_select(0, samples), y.index_select(0, samples)
            results.append(train_one(model, training, *own, one.rng, one.optimizer_state))
        trained.append(
            FlatArrays(model.layout, model.vector.cpu().numpy().copy(), model.side.cpu().numpy().copy())
        )
    return trained, results
