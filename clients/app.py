"""The Flower ``ClientApp`` of an experiment: local training and evaluation of one client's samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn

from fedplat.arrays import FlatArrays
from fedplat.datasets.base import Dataset
from fedplat.models.flat import FlatModel
from fedplat.rng import generator, seeded_torch
from fedplat.training_config import LocalTraining

from .attacks import Attack, dispatch
from .training import evaluate, train_one

_OPTIMIZER_KEY = "fedplat.optimizer"


@dataclass(frozen=True)
class ClientTask:
    """What all clients of an experiment share: data, who holds which samples, model, training, who attacks.

    ``parts[i]`` are the indices of the training samples of partition i; ``attacks`` is keyed by partition.
    """

    dataset: Dataset
    parts: Sequence[NDArray[np.int64]]
    build_model: Callable[[], nn.Module]
    training: LocalTraining
    seed: int
    attacks: Mapping[int, Attack] = field(default_factory=dict)
    device: str = "cpu"

    def samples(self, partition: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a client's prepared samples and labels."""
        index = self.parts[partition]
        x = self.dataset.prepare(self.dataset.train.x[index])
        y = torch.from_numpy(np.ascontiguousarray(self.dataset.train.y[index]))
        return x.to(self.device), y.to(self.device)

    def attack_of(self, partition: int, server_round: int) -> Attack:
        """Return how a client behaves in a round; an attack that does nothing for an honest one."""
        attack = self.attacks.get(partition)
        return attack if attack and attack.schedule.active(server_round) else Attack()


def make_client_app(task: ClientTask) -> ClientApp:
    """Return the ``ClientApp`` for a task; every process that runs it builds the model once."""
    models: list[FlatModel] = []

    def model_with(arrays: ArrayRecord) -> FlatModel:
        if not models:
            models.append(FlatModel(task.build_model(), task.device))
        models[0].load(FlatArrays.of_record(arrays, models[0].layout))
        return models[0]

    app = ClientApp(mods=[dispatch(task.attacks)] if task.attacks else None)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition, server_round = _who_and_when(message, context)
        keys = partition, server_round
        model = model_with(message.content["arrays"])  # type: ignore[arg-type]
        x, y = task.samples(partition)
        # An attack without effect on the training leaves an honest client's: same batches, same bits.
        attack = task.attack_of(partition, server_round)
        training = attack.on_training(task.training)
        x, y = attack.on_data(x, y, generator(task.seed, "attack-data", *keys))
        on_batch = functools.partial(attack.on_batch, rng=generator(task.seed, "attack-batch", *keys))
        state = _load_optimizer(context) if task.training.keep_optimizer else None
        with seeded_torch(task.seed, "client", *keys):
            result = train_one(
                model,
                training,
                x,
                y,
                generator(task.seed, "batches", *keys),
                state,
                on_batch=on_batch,
                loss_factor=attack.loss_factor(),
            )
        if result.optimizer_state is not None:
            _save_optimizer(context, result.optimizer_state)
        metrics = MetricRecord({"num-examples": len(task.parts[partition]), "train-loss": result.loss})
        return Message(RecordDict({"arrays": _record_of(model), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate_locally(message: Message, context: Context) -> Message:
        partition, _ = _who_and_when(message, context)
        model = model_with(message.content["arrays"])  # type: ignore[arg-type]
        x, y = task.samples(partition)
        result = evaluate(model, x, y, task.dataset.num_classes)
        metrics = MetricRecord(
            {
                "num-examples": len(task.parts[partition]),
                "eval-loss": result.loss,
                "eval-acc": result.accuracy,
            }
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    @app.query()
    def which_partition(message: Message, context: Context) -> Message:
        answer = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
        return Message(RecordDict({"node": answer}), reply_to=message)

    return app


def _who_and_when(message: Message, context: Context) -> tuple[int, int]:
    config = message.content["config"]
    return int(context.node_config["partition-id"]), int(config["server-round"])  # type: ignore[arg-type]


def _record_of(model: FlatModel) -> ArrayRecord:
    """Return the model as a record of views: valid until the model is loaded again."""
    return FlatArrays(model.layout, model.vector.cpu().numpy(), model.side.cpu().numpy()).to_record()


def _load_optimizer(context: Context) -> dict[str, NDArray[np.float32]] | None:
    record = context.state.get(_OPTIMIZER_KEY)
    return (
        {name: array.numpy() for name, array in record.items()} if isinstance(record, ArrayRecord) else None
    )


def _save_optimizer(context: Context, state: Mapping[str, NDArray[np.float32]]) -> None:
    context.state[_OPTIMIZER_KEY] = ArrayRecord(
        {name: Array(np.asarray(value)) for name, value in state.items()}
    )
