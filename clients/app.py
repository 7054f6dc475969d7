"""The Flower ``ClientApp`` of an experiment: local training and evaluation of one client's samples."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from fedplat.arrays import FlatArrays
from fedplat.grouped import GroupApp
from fedplat.models.flat import FlatModel
from fedplat.rng import generator, seeded_torch, torch_seed

from .attacks import dispatch
from .stacked import Learner, StackedTrainer
from .stacked.execution import Execution, usual_execution
from .task import ClientTask
from .training import TrainResult, evaluate, train_one

_OPTIMIZER_KEY = "fedplat.optimizer"


class ExperimentApp(GroupApp):
    """The ``ClientApp`` of a task; each process that runs it builds the model once.

    Clients whose training is an honest one, on whatever data, are trained together where ``execution`` says
    so; the others by themselves.
    """

    def __init__(self, task: ClientTask, execution: Execution) -> None:
        super().__init__(mods=[dispatch(task.attacks)] if task.attacks else None)
        self._task = task
        self._model: FlatModel | None = None
        self._trainer: StackedTrainer | None = None
        self._stacked = execution.stacked
        self.group_limit = execution.group
        # On a GPU there is one worker, whose groups are therefore always the same.
        self.group_exact = execution.exact or task.device != "cpu"
        self.train()(self._train)
        self.evaluate()(self._evaluate)
        self.query()(self._which_partition)

    def run_group(self, messages: list[Message], contexts: list[Context]) -> list[Message | None]:
        """Train the clients together that can be, and leave the others to be called by themselves."""
        replies: list[Message | None] = [None] * len(messages)
        where = [i for i, pair in enumerate(zip(messages, contexts, strict=True)) if self._stackable(*pair)]
        if where:
            together = self._train_stacked([messages[i] for i in where], [contexts[i] for i in where])
            for i, reply in zip(where, together, strict=True):
                replies[i] = reply
        return replies

    def _stackable(self, message: Message, context: Context) -> bool:
        partition, server_round = _who_and_when(message, context)
        return self._stacked and self._task.attack_of(partition, server_round).only_on_data

    def _train(self, message: Message, context: Context) -> Message:
        if self._stackable(message, context):
            return self._train_stacked([message], [context])[0]
        task, keys = self._task, _who_and_when(message, context)
        model = self._model_with(message)
        # An attack without effect on the training leaves an honest client's: same batches, same bits.
        attack = task.attack_of(*keys)
        x, y = attack.on_data(*task.samples(keys[0]), generator(task.seed, "attack-data", *keys))
        on_batch = functools.partial(attack.on_batch, rng=generator(task.seed, "attack-batch", *keys))
        with seeded_torch(task.seed, "client", *keys):
            result = train_one(
                model,
                attack.on_training(task.training),
                x,
                y,
                generator(task.seed, "batches", *keys),
                _load_optimizer(context) if task.training.keep_optimizer else None,
                on_batch=on_batch,
                loss_factor=attack.loss_factor(),
            )
        trained = FlatArrays(model.layout, model.vector.cpu().numpy(), model.side.cpu().numpy())
        return self._reply(message, context, trained, result)

    def _train_stacked(self, messages: list[Message], contexts: list[Context]) -> list[Message]:
        task, model = self._task, self._built()
        if self._trainer is None:
            self._trainer = StackedTrainer(
                model.module, model.layout, task.training, task.sample(), model.device
            )
        who = [_who_and_when(*pair) for pair in zip(messages, contexts, strict=True)]
        x, y, rows = self._samples(who)
        learners = [
            Learner(
                own,
                generator(task.seed, "batches", *keys),
                self._dropout_generator(keys) if self._trainer.kernel.dropout else None,
                _load_optimizer(context) if task.training.keep_optimizer else None,
            )
            for own, keys, context in zip(rows, who, contexts, strict=True)
        ]
        start = [_arrays_of(message, model) for message in messages]
        trained, results = self._trainer.train(start, x, y, learners)
        return [self._reply(*four) for four in zip(messages, contexts, trained, results, strict=True)]

    def _dropout_generator(self, keys: tuple[int, int]) -> torch.Generator:
        random = torch.Generator(self._task.device)
        return random.manual_seed(torch_seed(self._task.seed, "client", *keys))

    def _samples(self, who: list[tuple[int, int]]) -> tuple[Tensor, Tensor, list[NDArray[np.int64]]]:
        """Return samples and labels that hold all clients' own, and where each client's are."""
        task, attackers = self._task, [keys for keys in who if keys[0] in self._task.attacks]
        if task.resident is not None and not attackers:
            x, y, rows = task.resident
            return x, y, [rows[partition] for partition, _ in who]
        pairs = [
            task.attack_of(*keys).on_data(*task.samples(keys[0]), generator(task.seed, "attack-data", *keys))
            for keys in who
        ]
        ends = np.cumsum([len(y) for _, y in pairs])
        rows = [np.arange(end - len(y), end) for (_, y), end in zip(pairs, ends, strict=True)]
        return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]), rows

    def _reply(self, message: Message, context: Context, trained: FlatArrays, result: TrainResult) -> Message:
        if result.optimizer_state is not None:
            _save_optimizer(context, result.optimizer_state)
        partition, _ = _who_and_when(message, context)
        metrics = MetricRecord({"num-examples": len(self._task.parts[partition]), "train-loss": result.loss})
        return Message(RecordDict({"arrays": trained.to_record(), "metrics": metrics}), reply_to=message)

    def _evaluate(self, message: Message, context: Context) -> Message:
        task, (partition, _) = self._task, _who_and_when(message, context)
        result = evaluate(self._model_with(message), *task.samples(partition), task.dataset.num_classes)
        metrics = MetricRecord(
            {
                "num-examples": len(task.parts[partition]),
                "eval-loss": result.loss,
                "eval-acc": result.accuracy,
            }
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def _which_partition(self, message: Message, context: Context) -> Message:
        answer = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
        return Message(RecordDict({"node": answer}), reply_to=message)

    def _built(self) -> FlatModel:
        if self._model is None:
            self._model = FlatModel(self._task.build_model(), self._task.device)
        return self._model

    def _model_with(self, message: Message) -> FlatModel:
        model = self._built()
        model.load(_arrays_of(message, model))
        return model


def make_client_app(task: ClientTask, execution: Execution | None = None) -> ExperimentApp:
    """Return the ``ClientApp`` of a task; without an ``execution``, the one its model alone suggests."""
    _ = task.resident  # before any process is forked that would prepare the samples for itself
    execution = execution or usual_execution(task.build_model, task.training, task.sample())
    return ExperimentApp(task, execution)


def _who_and_when(message: Message, context: Context) -> tuple[int, int]:
    config = message.content["config"]
    return int(context.node_config["partition-id"]), int(config["server-round"])  # type: ignore[arg-type]


def _arrays_of(message: Message, model: FlatModel) -> FlatArrays:
    return FlatArrays.of_record(message.content["arrays"], model.layout)  # type: ignore[arg-type]


def _load_optimizer(context: Context) -> dict[str, NDArray[np.float32]] | None:
    record = context.state.get(_OPTIMIZER_KEY)
    return (
        {name: array.numpy() for name, array in record.items()} if isinstance(record, ArrayRecord) else None
    )


def _save_optimizer(context: Context, state: Mapping[str, NDArray[np.float32]]) -> None:
    context.state[_OPTIMIZER_KEY] = ArrayRecord(
        {name: Array(np.asarray(value)) for name, value in state.items()}
    )
