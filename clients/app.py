"""The Flower ``ClientApp`` of an experiment: training, own tests, and models of the clients' own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import Mod

from fedplat.arrays import FlatArrays, Layout
from fedplat.layer_map import part_layout, part_of, with_part
from fedplat.models.flat import FlatModel

from .fedp3_app import FedP3App
from .personal import AFTER, PERSONAL, OwnWork, Personal, personal_of
from .stacked.execution import Execution
from .task import ClientTask
from .training import TrainResult, evaluate
from .training_app import STRATEGY_KEY, keys_of, through

__all__ = ["STRATEGY_KEY", "ExperimentApp", "make_client_app", "through"]

_OWN_KEY = "fedplat.own-model"


class ExperimentApp(FedP3App):
    """The ``ClientApp`` of a task.

    Clients that hold out samples evaluate on these, and say in their training replies how good the model is
    there that they trained. Where a message asks for models of the clients' own, see :mod:`.personal`, they
    keep in their state what these need, and tell how good these are when they are asked.
    """

    def _reply(self, message: Message, context: Context, trained: FlatArrays, result: TrainResult) -> Message:
        personal = _personal_in(message)
        sent = trained
        if personal is not None:
            sent = self._kept_and_sent(personal, message, context, trained)
        reply = super()._reply(message, context, sent, result)
        if self._task.held_out and personal is None and trained.layout == self._own_model.layout:
            metrics = reply.content["metrics"]
            assert isinstance(metrics, MetricRecord)
            metrics[AFTER] = self._measured(trained, context)[0]
        return reply

    def _start(self, message: Message, context: Context, model: FlatModel) -> FlatArrays:
        personal = _personal_in(message)
        if personal is None or model.layout != self._own_model.layout:
            return super()._start(message, context, model)
        return personal.start(self._received(personal, message), self._own(personal, message, context))

    def _evaluate(self, message: Message, context: Context) -> Message:
        personal = _personal_in(message)
        if personal is None or self._least_privacy is not None:
            return super()._evaluate(message, context)
        received = FlatArrays.of_record(_arrays_in(message), self._own_model.layout)
        own = self._own(personal, message, context)
        mine = personal.model(received, own, self._work(message, context))
        accuracy, loss, count = self._measured(mine, context)
        metrics = MetricRecord({"num-examples": count, AFTER: accuracy, f"{AFTER}-loss": loss})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    # Models of the clients' own ----------------------------------------------------------------------------

    @cached_property
    def _own_model(self) -> FlatModel:
        """A model besides that of training, whose memory a reply may still be using."""
        return FlatModel(self._task.build_model(), self._task.device)

    @cached_property
    def _initial(self) -> FlatArrays:
        model = FlatModel(self._task.build_model())
        return FlatArrays(model.layout, model.vector.numpy().copy(), model.side.numpy().copy())

    def _work(self, message: Message, context: Context) -> OwnWork:
        task, keys = self._task, keys_of(message, context)
        return OwnWork(self._own_model, task.training, lambda: task.samples(keys[0]), task.seed, keys)

    def _kept_and_sent(
        self, personal: Personal, message: Message, context: Context, trained: FlatArrays
    ) -> FlatArrays:
        """Remember what is the client's own after a training, and return what leaves the client."""
        whole = self._own_model.layout
        if trained.layout != whole:
            return trained
        received, own = self._received(personal, message), self._own(personal, message, context)
        kept = personal.remembered(received, trained, own, self._work(message, context))
        if kept is not None:
            context.state[_own_key(message)] = kept.to_record()
        return part_of(trained, names) if (names := _shared(personal, whole)) else trained

    def _received(self, personal: Personal, message: Message) -> FlatArrays:
        """Return the whole model that a training message is about; layers that it lacks are the initial."""
        whole = self._own_model.layout
        if not (names := _shared(personal, whole)):
            return FlatArrays.of_record(_arrays_in(message), whole)
        part = FlatArrays.of_record(_arrays_in(message), part_layout(whole, names))
        return with_part(self._initial, part)

    def _own(self, personal: Personal, message: Message, context: Context) -> FlatArrays | None:
        record = context.state.get(_own_key(message))
        if not isinstance(record, ArrayRecord):
            return None
        return FlatArrays.of_record(record, personal.memory(self._own_model.layout))

    def _measured(self, arrays: FlatArrays, context: Context) -> tuple[float, float, int]:
        """Return accuracy and loss of a model on the client's own test samples, and how many these are."""
        x, y = self._task.own_tests(int(context.node_config["partition-id"]))
        self._own_model.load(arrays)
        result = evaluate(self._own_model, x, y, self._task.dataset.num_classes)
        return result.accuracy, result.loss, len(y)


def make_client_app(
    task: ClientTask,
    execution: Execution | None = None,
    inner: Sequence[Mod] = (),
    outer: Sequence[Mod] = (),
) -> ExperimentApp:
    """Return the ``ClientApp`` of a task; without an ``execution``, the one its model alone suggests."""
    _ = task.resident  # before any process is forked that would prepare the samples for itself
    return ExperimentApp(task, execution, inner, outer)


def _personal_in(message: Message) -> Personal | None:
    return personal_of(str(message.content["config"].get(PERSONAL, "")))


def _arrays_in(message: Message) -> ArrayRecord:
    record = message.content["arrays"]
    assert isinstance(record, ArrayRecord)
    return record


def _shared(personal: Personal, layout: Layout) -> frozenset[str]:
    """Return the arrays that travel, where that is not all of them."""
    local = personal.local(layout)
    return frozenset(entry.name for entry in layout.entries if entry.name not in local) if local else local


def _own_key(message: Message) -> str:
    """Return where a client keeps what is its own: strategies share a run's clients, but not that."""
    return _OWN_KEY + str(message.content["config"].get(STRATEGY_KEY, ""))
