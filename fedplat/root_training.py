"""Training on a few clean samples that the server holds itself, for rules that compare with it."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import ArrayRecord

from .arrays import FlatArrays
from .clients.task import ClientTask
from .clients.training import train_one
from .errors import UserError
from .models.flat import FlatModel
from .rng import generator, seeded_torch
from .strategies.similarity import RootTraining


def root_training(task: ClientTask, samples: int) -> RootTraining:
    """Return the training on ``samples`` clean training samples, drawn with the run's seed once.

    Clients may hold these samples too. The settings are those of the clients, without a momentum carried
    over. Raises UserError if there are fewer samples.
    """
    if samples > len(task.dataset.train):
        raise UserError(f"root_samples: {samples} wanted, the training set has {len(task.dataset.train)}")
    drawn = generator(task.seed, "root-samples").permutation(len(task.dataset.train))[:samples]
    index = np.sort(drawn)
    x = task.dataset.prepare(task.dataset.train.x[index]).to(task.device)
    y = torch.from_numpy(np.ascontiguousarray(task.dataset.train.y[index])).to(task.device)
    settings = task.training.model_copy(update={"keep_optimizer": False})
    model = FlatModel(task.build_model(), task.device)

    def train(arrays: ArrayRecord, server_round: int) -> ArrayRecord:
        model.load(FlatArrays.of_record(arrays, model.layout))
        with seeded_torch(task.seed, "root", server_round):
            train_one(model, settings, x, y, generator(task.seed, "root-batches", server_round))
        return FlatArrays(model.layout, model.vector.cpu().numpy(), model.side.cpu().numpy()).to_record()

    return train
