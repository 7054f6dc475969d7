"""The engines that run a Flower ``ClientApp``: ours, Flower's Ray simulation, and the barest of grids."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from fedplat.clients.app import make_client_app
from fedplat.clients.stacked.execution import Execution, measured_execution
from fedplat.clients.task import ClientTask
from fedplat.compat import set_task_identity
from fedplat.datasets.cache import default_cache
from fedplat.runtime.local import LocalGrid
from fedplat.strategies import Mean

from .common import quiet
from .workload import Turn, Workload, vector_of

Serve = Callable[[Grid], Any]
Sets = Sequence[tuple[int, int]]


# Training --------------------------------------------------------------------------------------------------


class LazyApp(ClientApp):
    """Our ``ClientApp``, built in each process from the workload instead of being sent with its data."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.work = work

    def __call__(self, message: Message, context: Context) -> Message:
        """Handle a message as fedplat's own app does."""
        return _built_app(self.work)(message, context)


@functools.cache
def _built_app(work: Workload) -> ClientApp:
    torch.set_num_threads(1)
    return make_client_app(work.task)


class TimedMean(Mean):
    """The mean, which notes the seconds of every round and the model after the first."""

    def __init__(self, clients: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_nodes=clients)
        self.turn, self._begin = Turn(), 0.0

    def configure_train(self, *args: Any) -> Iterable[Message]:
        """Note the time and go on."""
        self._begin = time.perf_counter()
        return super().configure_train(*args)

    def aggregate_train(self, *args: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Go on and note the time; raises RuntimeError if a client failed, for then nothing compares."""
        arrays, metrics = super().aggregate_train(*args)
        self.turn.seconds.append(time.perf_counter() - self._begin)
        left_out = [report for report in self.reports if report.status != "accepted"]
        if arrays is None or left_out:
            raise RuntimeError(f"clients failed, so there is nothing to compare: {left_out[:1]}")
        if self.turn.model is None:
            named = zip(arrays.keys(), arrays.to_numpy_ndarrays(), strict=True)
            self.turn.model = vector_of(dict(named))
        return arrays, metrics


def local_engine(work: Workload, rounds: int, timeout: float) -> Turn:
    """Train on fedplat's engine: worker processes on a CPU, this process on a GPU, groups as in a run."""
    situation = work.situation()
    app = make_client_app(situation.task, execution_of(situation.task))
    strategy = TimedMean(situation.num_clients)
    workers = None if work.device == "cpu" else 0
    with LocalGrid(app, situation.num_clients, workers=workers) as grid:
        strategy.start(grid, situation.initial, num_rounds=rounds, timeout=timeout)
    return strategy.turn


def execution_of(task: ClientTask) -> Execution:
    """Return how ``fedplat run`` would train the clients: by a trial, or what an earlier one found."""
    return measured_execution(task.build_model, task.training, task.sample(), task.device, default_cache())


def ray_simulation(work: Workload, rounds: int, timeout: float) -> Turn:
    """Train the same ``ClientApp`` under the same strategy on Flower's simulation engine."""
    situation = work.situation()
    strategy = TimedMean(situation.num_clients)
    run_on_ray(
        LazyApp(work),
        situation.num_clients,
        lambda grid: strategy.start(grid, situation.initial, num_rounds=rounds, timeout=timeout),
    )
    return strategy.turn


def run_on_ray(app: ClientApp, clients: int, serve: Serve) -> None:
    """Run ``serve`` as a server on Flower's simulation engine with one client per core at a time."""
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid)

    quiet()
    config: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"log_to_driver": False},
    }
    run_simulation(server, app, num_supernodes=clients, backend_config=config)


# Clients that do nothing -----------------------------------------------------------------------------------


def idle_app() -> ClientApp:
    """Return an app whose clients send back the arrays they got."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        content = RecordDict(
            {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
        )
        return Message(content, reply_to=message)

    return app


class BareGrid(Grid):
    """The least a grid can do: call the ``ClientApp`` in this process, message by message, with no copies."""

    def __init__(self, app: ClientApp, clients: int) -> None:
        set_task_identity(1)
        self._app, self._clients, self._done = app, clients, dict[str, Message]()

    def set_run(self, run: Any) -> None:
        """Do nothing: the clients do not ask."""

    @property
    def run(self) -> Any:
        """There is no run."""
        return None

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message to a node, as Flower's grids do."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the ids 1..clients."""
        return list(range(1, self._clients + 1))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Run the clients at once."""
        replies = list(self.send_and_receive(messages))
        ids = [str(len(self._done) + number) for number in range(len(replies))]
        self._done.update(zip(ids, replies, strict=True))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies, each once."""
        return [self._done.pop(i) for i in message_ids if i in self._done]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Call the client of every message, one after another."""
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            node = message.metadata.dst_node_id
            context = Context(1, node, {"partition-id": node - 1}, RecordDict(), {})
            try:
                replies.append(self._app(message, context))
            except Exception as error:
                replies.append(Message(Error(2, str(error)), reply_to=message))
        return replies


class Carrier(FedAvg):
    """Sends the model to the first ``clients`` nodes, takes the replies, and keeps the seconds in between."""

    def __init__(self, clients: int, nodes: int) -> None:
        # Ray's nodes turn up one after another: wait for all of them.
        super().__init__(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
        self.clients, self.seconds, self._sent = clients, list[float](), 0.0

    def configure_train(self, *args: Any) -> Iterable[Message]:
        """Make the messages, then note the time."""
        messages = list(super().configure_train(*args))[: self.clients]
        self._sent = time.perf_counter()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Note the time; raises RuntimeError for a missing reply or one that is not what was sent."""
        arrived = list(replies)
        self.seconds.append(time.perf_counter() - self._sent)
        good = [reply for reply in arrived if not reply.has_error()]
        if len(good) != self.clients:
            reasons = {str(reply.error.reason) for reply in arrived if reply.has_error()}
            lost = self.clients - len(good)
            raise RuntimeError(f"{lost} of {self.clients} replies are missing: {', '.join(reasons)[:300]}")
        for reply in (good[0], good[-1]):
            for values in cast(ArrayRecord, reply.content["arrays"]).to_numpy_ndarrays():
                if not np.array_equal(values, np.arange(len(values), dtype=np.float32)):
                    raise RuntimeError("a reply is not what was sent")
        return None, None


def carry(engine: str, sizes: Sets, rounds: int, timeout: float) -> list[list[float]]:
    """Return, for each (parameters, clients), the seconds from sending to the last reply in every round."""
    quiet()
    app, most, found = idle_app(), max(clients for _, clients in sizes), list[list[float]]()

    def serve(grid: Grid) -> None:
        for parameters, clients in sizes:
            strategy = Carrier(clients, most)
            initial = ArrayRecord([np.arange(parameters // 10, dtype=np.float32) for _ in range(10)])
            strategy.start(grid, initial, num_rounds=rounds, timeout=timeout)
            found.append(strategy.seconds)

    if engine == "ray":
        run_on_ray(app, most, serve)
    elif engine == "bare":
        serve(BareGrid(app, most))
    else:
        with LocalGrid(app, most) as grid:
            serve(grid)
    return found


def copy_seconds(parameters: int, repeats: int = 9) -> float:
    """Return the seconds of one memory copy of a model: the median of several into the same place."""
    source, target = np.ones(parameters, np.float32), np.zeros(parameters, np.float32)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return float(np.median(times))
