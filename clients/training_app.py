"""Local training and evaluation of one client's samples, as a Flower ``ClientApp``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import Mod
from numpy.typing import NDArray
from torch import Tensor

from fedplat.arrays import FlatArrays
from fedplat.compat import MessageType
from fedplat.grouped import GroupApp
from fedplat.models.flat import FlatModel
from fedplat.rng import generator, seeded_torch, torch_seed
from fedplat.submodel_options import Shape, SubModelOptions

from .attacks import dispatch
from .attacks.base import when
from .mods.memory_cap import MemoryCapMod
from .mods.secure_aggregation import SecureAggregationMod
from .stacked import Learner
from .stacked.execution import Execution
from .submodel_training import PartModels, loss_of
from .task import ClientTask
from .training import TrainResult, evaluate, train_one

STRATEGY_KEY = "fedplat.strategy"
"""Under which a training message may name the strategy it comes from."""

_OPTIMIZER_KEY = "fedplat.optimizer"


class TrainingApp(GroupApp):
    """Trains and evaluates for a task; each process that runs it builds the model once.

    Clients whose training is an honest one, on whatever data, are trained together where ``execution`` says
    so and they have models of one shape; the others by themselves. A message may bring a sub-model, see
    :mod:`.submodel_options`. Every training reply passes through the ``inner`` mods, then through the
    client's attack if it has one, then through the ``outer`` mods, the first of which is the last to see it.
    """

    def __init__(
        self, task: ClientTask, execution: Execution, inner: Sequence[Mod] = (), outer: Sequence[Mod] = ()
    ) -> None:
        super().__init__(mods=[*outer, *([dispatch(task.attacks)] if task.attacks else ()), *inner])
        self._task = task
        # Clients trained together have no attack on their replies.
        self._mods_of_honest = [*outer, *inner]
        self._parts = PartModels(task)
        caps = [mod for mod in inner if isinstance(mod, MemoryCapMod)]
        for cap in caps:
            # A model that is there already would cost the client nothing.
            cap.forget = self._parts.forget
        # Memory is limited for one client, and estimated for one that is trained by itself.
        self._stacked = execution.stacked and not caps
        self._exact = execution.exact
        self.group_limit = 1 if caps else execution.group
        # On a GPU there is one worker, whose groups are therefore always the same.
        self.group_exact = execution.exact or task.device != "cpu"
        self.train()(self._train)
        self.evaluate()(self._evaluate)
        self.query()(self._which_partition)
        for mod in outer:
            if isinstance(mod, SecureAggregationMod):
                mod.register(self)

    def run_group(self, messages: list[Message], contexts: list[Context]) -> list[Message | None]:
        """Train the clients together that can be, and leave the others to be called by themselves."""
        replies: list[Message | None] = [None] * len(messages)
        where: dict[Shape, list[int]] = {}
        for i, pair in enumerate(zip(messages, contexts, strict=True)):
            if self._stackable(*pair):
                where.setdefault(_options(messages[i]).shape, []).append(i)
        for shape, rows in where.items():
            together = self._train_stacked([messages[i] for i in rows], [contexts[i] for i in rows], shape)
            for i, reply in zip(rows, together, strict=True):
                replies[i] = through(self._mods_of_honest, messages[i], contexts[i], reply)
        return replies

    def _stackable(self, message: Message, context: Context) -> bool:
        # A unit of short messages may be of questions, which come without settings.
        if not self._stacked or message.metadata.message_type != MessageType.TRAIN:
            return False
        options = _options(message)
        if not options.plain or self._parts.trainer(options.shape, self._exact) is None:
            return False
        partition, server_round = _who_and_when(message, context)
        return self._task.attack_of(partition, server_round).only_on_data

    def _train(self, message: Message, context: Context) -> Message:
        if self._stackable(message, context):
            return self._train_stacked([message], [context], _options(message).shape)[0]
        task, keys, options = self._task, keys_of(message, context), _options(message)
        model = self._model_with(message, context)
        # An attack without effect on the training leaves an honest client's: same batches, same bits.
        attack = task.attack_of(*keys[:2])
        x, y = attack.on_data(*task.samples(keys[0]), generator(task.seed, "attack-data", *keys))
        on_batch = functools.partial(attack.on_batch, rng=generator(task.seed, "attack-batch", *keys))
        with seeded_torch(task.seed, "client", *keys):
            result = train_one(
                model,
                attack.on_training(task.training),
                x,
                y,
                generator(task.seed, "batches", *keys),
                load_optimizer(message, context) if task.training.keep_optimizer else None,
                on_batch=on_batch,
                loss_factor=attack.loss_factor(),
                loss_of=loss_of(model, task, options, y, generator(task.seed, "widths", *keys)),
            )
        trained = FlatArrays(model.layout, model.vector.cpu().numpy(), model.side.cpu().numpy())
        return self._reply(message, context, trained, result)

    def _train_stacked(self, messages: list[Message], contexts: list[Context], shape: Shape) -> list[Message]:
        task, model, trainer = self._task, self._parts.model(shape), self._parts.trainer(shape, self._exact)
        assert trainer is not None
        who = [keys_of(*pair) for pair in zip(messages, contexts, strict=True)]
        x, y, rows = self._samples(who)
        learners = [
            Learner(
                own,
                generator(task.seed, "batches", *keys),
                self._dropout_generator(keys) if trainer.kernel.dropout else None,
                load_optimizer(message, context) if task.training.keep_optimizer else None,
            )
            for own, keys, message, context in zip(rows, who, messages, contexts, strict=True)
        ]
        start = [self._start(*pair, model) for pair in zip(messages, contexts, strict=True)]
        trained, results = trainer.train(start, x, y, learners)
        return [self._reply(*four) for four in zip(messages, contexts, trained, results, strict=True)]

    def _dropout_generator(self, keys: tuple[int, ...]) -> torch.Generator:
        random = torch.Generator(self._task.device)
        return random.manual_seed(torch_seed(self._task.seed, "client", *keys))

    def _samples(self, who: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, list[NDArray[np.int64]]]:
        """Return samples and labels that hold all clients' own, and where each client's are."""
        task, attackers = self._task, [keys for keys in who if keys[0] in self._task.attacks]
        if task.resident is not None and not attackers:
            x, y, rows = task.resident
            return x, y, [rows[keys[0]] for keys in who]
        pairs = [
            task.attack_of(*keys[:2]).on_data(
                *task.samples(keys[0]), generator(task.seed, "attack-data", *keys)
            )
            for keys in who
        ]
        ends = np.cumsum([len(y) for _, y in pairs])
        rows = [np.arange(end - len(y), end) for (_, y), end in zip(pairs, ends, strict=True)]
        return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]), rows

    def _reply(self, message: Message, context: Context, trained: FlatArrays, result: TrainResult) -> Message:
        if result.optimizer_state is not None:
            _save_optimizer(message, context, result.optimizer_state)
        partition, _ = _who_and_when(message, context)
        count = len(self._task.parts[partition])
        metrics = MetricRecord({"num-examples": count, "train-loss": result.loss, **result.metrics})
        return Message(RecordDict({"arrays": trained.to_record(), "metrics": metrics}), reply_to=message)

    def _evaluate(self, message: Message, context: Context) -> Message:
        x, y = self._task.own_tests(int(context.node_config["partition-id"]))
        result = evaluate(self._model_with(message, context), x, y, self._task.dataset.num_classes)
        metrics = MetricRecord(
            {"num-examples": len(y), "eval-loss": result.loss, "eval-acc": result.accuracy}
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def _which_partition(self, message: Message, context: Context) -> Message:
        answer = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
        return Message(RecordDict({"node": answer}), reply_to=message)

    def _model_with(self, message: Message, context: Context) -> FlatModel:
        model = self._parts.model(_options(message).shape)
        model.load(self._start(message, context, model))
        return model

    def _start(self, message: Message, context: Context, model: FlatModel) -> FlatArrays:
        """Return the arrays that a client starts from when it gets this message."""
        return FlatArrays.of_record(message.content["arrays"], model.layout)  # type: ignore[arg-type]


def through(mods: Sequence[Mod], message: Message, context: Context, reply: Message) -> Message:
    """Return what mods make of a reply on its way out; the first of them is the last to see it."""

    if not mods:
        return reply
    first, *others = mods
    return first(message, context, lambda message, context: through(others, message, context, reply))


def _who_and_when(message: Message, context: Context) -> tuple[int, int]:
    config = message.content["config"]
    return int(context.node_config["partition-id"]), int(config["server-round"])  # type: ignore[arg-type]


def keys_of(message: Message, context: Context) -> tuple[int, ...]:
    """Return what draws of a training are keyed by: partition, round and, from its second on, the edge's."""
    return int(context.node_config["partition-id"]), *when(message)


def _options(message: Message) -> SubModelOptions:
    return SubModelOptions.of(message.content["config"])


def _optimizer_key(message: Message) -> str:
    """Return where a client keeps its optimizer: strategies that share a run's clients do not share that.

    Nor do different parts of the model: what was gathered for other weights is dropped.
    """
    config, options = message.content["config"], _options(message)
    part = f"/{options.kind}/{options.shape.sizes}" if options.shape.sizes else ""
    return _OPTIMIZER_KEY + str(config.get(STRATEGY_KEY, "")) + part


def load_optimizer(message: Message, context: Context) -> dict[str, NDArray[np.float32]] | None:
    """Return what a client keeps of its optimizer; None if there is nothing for such a message."""
    record = context.state.get(_optimizer_key(message))
    return (
        {name: array.numpy() for name, array in record.items()} if isinstance(record, ArrayRecord) else None
    )


def _save_optimizer(message: Message, context: Context, state: Mapping[str, NDArray[np.float32]]) -> None:
    for key in [key for key in context.state if key.startswith(_OPTIMIZER_KEY)]:
        del context.state[key]
    context.state[_optimizer_key(message)] = ArrayRecord(
        {name: Array(np.asarray(value)) for name, value in state.items()}
    )
