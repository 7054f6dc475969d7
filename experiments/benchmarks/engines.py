"""Seconds per round of the same work on several engines, as ratios from one run.

    python experiments/benchmarks/engines.py [--clients 40] [--rounds 3] [--model cnn-hfl] [--repeats 3]

``training`` trains the same clients on the same batches by our local engine, by a plain PyTorch loop (one
process with all cores; one process per core), and by Flower's Ray simulation running our ``ClientApp``.
``transport`` moves models of 1 and 10 MB through clients that only return new arrays, against a bare
in-process ``Grid`` and Ray. The engines take turns; medians are printed and written as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from fedplat.clients.app import ClientTask, make_client_app
from fedplat.config import load
from fedplat.experiment import build_situation
from fedplat.rng import generator
from fedplat.runtime.local import LocalGrid, available_cores
from fedplat.strategies import Mean

Seconds = list[float]

# Training --------------------------------------------------------------------------------------------------


class LazyApp(ClientApp):
    """Our ``ClientApp``, built in each process from its configuration instead of being sent with its data."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    def __call__(self, message: Message, context: Context) -> Message:
        return built_app(json.dumps(self.config))(message, context)


@functools.cache
def built_app(config: str) -> ClientApp:
    return make_client_app(task_of(config))


@functools.cache
def task_of(config: str) -> ClientTask:
    torch.set_num_threads(1)
    return build_situation(load(json.loads(config), "benchmark"), "cpu").task


def timed(strategy_class: type) -> tuple[Any, Seconds]:
    """Return a strategy that notes when its rounds begin and end."""
    marks: Seconds = []

    class Timed(strategy_class):
        def configure_train(self, *args: Any) -> Iterable[Message]:
            marks.append(time.perf_counter())
            return super().configure_train(*args)

        def aggregate_train(self, *args: Any) -> Any:
            arrays, metrics = super().aggregate_train(*args)
            marks.append(time.perf_counter())
            refused = [r for r in getattr(self, "reports", []) if r.status != "accepted"]
            if arrays is None or refused:
                raise RuntimeError(f"clients failed, so there is nothing to compare: {refused[:1]}")
            return arrays, metrics

    return Timed(fraction_evaluate=0.0), marks


def rounds_of(marks: Seconds) -> Seconds:
    return [end - start for start, end in zip(marks[::2], marks[1::2], strict=True)]


def local_engine(config: dict[str, Any], rounds: int) -> Seconds:
    situation = build_situation(load(config, "benchmark"), "cpu")
    strategy, marks = timed(Mean)
    with LocalGrid(make_client_app(situation.task), situation.num_clients) as grid:
        strategy.start(grid, situation.initial, num_rounds=rounds)
    return rounds_of(marks)


def ray_simulation(config: dict[str, Any], rounds: int) -> Seconds:
    situation = build_situation(load(config, "benchmark"), "cpu")
    strategy, marks = timed(Mean)
    run_on_ray(
        LazyApp(config), situation.num_clients, lambda grid: strategy.start(grid, situation.initial, rounds)
    )
    return rounds_of(marks)


def run_on_ray(app: ClientApp, clients: int, serve: Callable[[Any], Any]) -> None:
    from flwr.simulation import run_simulation

    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Context) -> None:
        serve(grid)

    config: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"log_to_driver": False},
    }
    run_simulation(server, app, num_supernodes=clients, backend_config=config)


def plain_client(task: ClientTask, partition: int, server_round: int, state: dict[str, torch.Tensor]) -> dict:
    """Train one client the way a tutorial does."""
    training, model = task.training, task.build_model()
    model.load_state_dict(state)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=training.lr, momentum=training.momentum, weight_decay=training.weight_decay
    )
    x, y = task.samples(partition)
    for _ in range(training.epochs):
        order = torch.from_numpy(generator(task.seed, "batches", partition, server_round).permutation(len(y)))
        for batch in order.split(training.batch_size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.state_dict()


def average(states: list[dict[str, torch.Tensor]], sizes: list[int]) -> dict[str, torch.Tensor]:
    mean = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    for state, size in zip(states, sizes, strict=True):
        for name, tensor in state.items():
            mean[name] += tensor * (size / sum(sizes))
    return mean


def plain_loop(config: dict[str, Any], rounds: int) -> Seconds:
    task = build_situation(load(config, "benchmark"), "cpu").task
    state, sizes, seconds = task.build_model().state_dict(), [len(p) for p in task.parts], []
    for number in range(1, rounds + 1):
        start = time.perf_counter()
        states = [plain_client(task, i, number, state) for i in range(len(task.parts))]
        state = average(states, sizes)
        seconds.append(time.perf_counter() - start)
    return seconds


_TASK: ClientTask | None = None


def _one_thread() -> None:
    torch.set_num_threads(1)


def _pooled_client(job: tuple[int, int, dict[str, Any]]) -> dict[str, Any]:
    partition, server_round, state = job
    assert _TASK is not None
    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    trained = plain_client(_TASK, partition, server_round, tensors)
    return {name: value.numpy() for name, value in trained.items()}


def plain_pool(config: dict[str, Any], rounds: int) -> Seconds:
    global _TASK
    _TASK = build_situation(load(config, "benchmark"), "cpu").task
    sizes, seconds = [len(p) for p in _TASK.parts], []
    state = {k: v.numpy() for k, v in _TASK.build_model().state_dict().items()}
    with multiprocessing.get_context("fork").Pool(available_cores(), initializer=_one_thread) as pool:
        for number in range(1, rounds + 1):
            start = time.perf_counter()
            jobs = [(i, number, state) for i in range(len(sizes))]
            states = [
                {k: torch.from_numpy(v) for k, v in s.items()}
                for s in pool.imap(_pooled_client, jobs, chunksize=1)
            ]
            state = {k: v.numpy() for k, v in average(states, sizes).items()}
            seconds.append(time.perf_counter() - start)
    return seconds


# Transport -------------------------------------------------------------------------------------------------


def moving_app() -> ClientApp:
    """Return new arrays of the received shapes and do nothing else."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        received = cast(ArrayRecord, message.content["arrays"])
        arrays = [array + np.float32(1) for array in received.to_numpy_ndarrays()]
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), reply_to=message)

    return app


class BareGrid(LocalGrid):
    """The least a Grid can do: call the ``ClientApp`` in this process, message by message."""

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(number)
            node = message.metadata.dst_node_id
            context = Context(1, node, self._node_configs[node], RecordDict(), {})
            try:
                replies.append(self._app(message, context))
            except Exception as error:
                replies.append(Message(Error(2, str(error)), reply_to=message))
        return replies


def transport(engine: str, clients: int, megabytes: int, rounds: int) -> Seconds:
    initial = ArrayRecord([np.zeros(megabytes * 25_000, np.float32) for _ in range(10)])
    strategy, marks = timed(FedAvg)
    if engine == "ray":
        run_on_ray(moving_app(), clients, lambda grid: strategy.start(grid, initial, num_rounds=rounds))
    else:
        kind = BareGrid if engine == "bare grid" else LocalGrid
        with kind(moving_app(), clients) as grid:
            strategy.start(grid, initial, num_rounds=rounds)
    return rounds_of(marks)


# Running and printing --------------------------------------------------------------------------------------


def take_turns(engines: Mapping[str, Callable[[], Seconds]], repeats: int) -> dict[str, float]:
    """Return the median over all rounds but the first of each turn, which also starts things."""
    seconds: dict[str, Seconds] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, engine in engines.items():
            seconds[name] += engine()[1:]
    return {name: statistics.median(values) for name, values in seconds.items()}


def print_table(title: str, results: dict[str, float], ours: str) -> None:
    print(f"\n{title}\n{'engine':<28}{'s per round':>12}{'relative to ours':>18}")
    for name, seconds in results.items():
        print(f"{name:<28}{seconds:>12.4f}{seconds / results[ours]:>17.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="cnn-hfl")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--only", choices=["training", "transport"])
    parser.add_argument("--json", type=Path, default=Path("runs/benchmark-engines.json"))
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    config = {
        "name": "benchmark",
        "rounds": options.rounds,
        "data": {"name": options.data},
        "partition": {"name": "iid", "clients": options.clients},
        "model": {"name": options.model},
        "training": {"batch_size": options.batch_size, "lr": 0.05, "momentum": 0.9},
    }
    facts = {"cores": available_cores(), "python": platform.python_version(), "torch": torch.__version__}
    results: dict[str, Any] = {"options": vars(options) | {"json": str(options.json)}, "machine": facts}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    if options.only != "transport":
        engines: dict[str, Callable[[], Seconds]] = {
            "fedplat local engine": lambda: local_engine(config, options.rounds),
            "plain loop, all cores": lambda: plain_loop(config, options.rounds),
            "plain loop, process per core": lambda: plain_pool(config, options.rounds),
        }
        if not options.no_ray:
            engines["Flower Ray simulation"] = lambda: ray_simulation(config, options.rounds)
        results["training"] = take_turns(engines, options.repeats)
        work = f"{options.clients} clients, {options.data}, {options.model}, batch {options.batch_size}"
        print_table(f"training: {work}", results["training"], "fedplat local engine")
    if options.only != "training":
        names = ["fedplat local engine", "bare grid", *([] if options.no_ray else ["ray"])]
        for clients, megabytes in ((10, 1), (100, 1), (10, 10), (100, 10)):
            turns = {
                name: functools.partial(transport, name, clients, megabytes, options.rounds + 3)
                for name in names
            }
            measured = take_turns(turns, options.repeats)
            results[f"transport {clients} x {megabytes} MB"] = measured
            print_table(f"transport: {clients} clients x {megabytes} MB", measured, "fedplat local engine")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwritten to {options.json}")


if __name__ == "__main__":
    # As a module that other processes can import, which is how Ray's workers find the client.
    from fedplat.experiments.benchmarks import engines

    engines.main()
