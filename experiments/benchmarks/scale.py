"""``fedplat benchmark scale``: seconds per client and peak memory of rounds with many clients.

Clients return the model they got with a change of their own, without training, so what is measured is the
engine and the strategy: the model goes out, the replies come back, and the rule combines them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

from fedplat.rounds import rounds
from fedplat.runtime.local import LocalGrid
from fedplat.strategies import FedCredit, Mean

from .children import Child, in_child
from .common import Report, Section, chosen, cores, middle, quiet, spread, take_turns
from .workload import before_forks

# Sizes of the README's models on MNIST.
PARAMETERS = {"softmax": 7_850, "mlp": 199_210, "cnn-hfl": 21_840, "cnn-fedavg": 1_663_370}
STRATEGIES: dict[str, Callable[..., Strategy]] = {"mean": Mean, "fed-credit": FedCredit}
COLUMNS = (
    "strategy",
    "clients",
    "parameters",
    "ms per client",
    "s train",
    "s aggregate",
    "spread",
    "server peak MB",
    "all peak MB",
    "replies MB",
)


@dataclass(frozen=True)
class Options:
    """What to measure: rounds of every strategy with every number of clients and every model's size."""

    strategies: tuple[str, ...] = tuple(STRATEGIES)
    clients: tuple[int, ...] = (100, 1_000, 10_000)
    models: tuple[str, ...] = ("cnn-hfl",)
    rounds: int = 3
    repeats: int = 2
    seed: int = 1
    limit: float = 1_800.0


QUICK: dict[str, Any] = {"clients": (100, 1_000), "models": ("softmax",), "repeats": 2, "rounds": 2}


def changing_app(seed: int) -> ClientApp:
    """Return an app whose clients add a small number of their own to every parameter."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        change = np.float32(1e-3 * ((int(context.node_config["partition-id"]) + seed) % 17 - 8))
        received = cast(ArrayRecord, message.content["arrays"]).to_numpy_ndarrays()
        for values in received:  # copies, which are the client's own
            values += change
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": ArrayRecord(received), "metrics": metrics}), reply_to=message)

    return app


def run_rounds(strategy: str, clients: int, parameters: int, options: Options) -> list[dict[str, float]]:
    """Return the seconds by phase of every round but the first; raises RuntimeError for a lost reply."""
    rule = STRATEGIES[strategy](fraction_evaluate=0.0, seed=options.seed)
    initial = ArrayRecord([np.ones(size, np.float32) for size in _layers(parameters)])
    found = []
    with LocalGrid(changing_app(options.seed), clients) as grid:
        for current in rounds(rule, grid, initial, options.rounds, timeout=options.limit):
            if current.failures:
                raise RuntimeError(f"{len(current.failures)} of {clients} clients failed")
            found.append(dict(current.seconds))
    return found[1:]


def _layers(parameters: int) -> list[int]:
    """Cut a model into a few layers, the first of them large.

    >>> sum(_layers(21_840)), len(_layers(21_840))
    (21840, 4)
    """
    small = parameters // 10
    return [parameters - 3 * small, small, small, small]


def check(options: Options) -> None:
    """Raise UserError for a strategy or model that does not exist."""
    chosen("strategy", options.strategies, STRATEGIES)
    chosen("model", options.models, PARAMETERS)


def measure(options: Options, report: Report) -> None:
    """Fill the report, one section per model."""
    quiet()
    before_forks()
    report.options = asdict(options)
    for model in options.models:
        report.add(_section(model, PARAMETERS[model], options, report))


def _section(model: str, parameters: int, options: Options, report: Report) -> Section:
    rows, skipped = [], []
    for clients in sorted(options.clients):
        report.say(f"{model}, {clients:,} clients")
        things = {
            name: functools.partial(
                in_child,
                functools.partial(run_rounds, name, clients, parameters, options),
                options.limit,
                watch_memory=True,
            )
            for name in options.strategies
        }
        turns, failures = take_turns(things, options.repeats, report.say)
        skipped += [f"{name}, {clients:,} clients: {why}" for name, why in failures.items()]
        rows += [_row(name, clients, parameters, of) for name, of in turns.items()]
    notes = [
        f"{cores()} worker processes; peaks are proportional set sizes, in which shared pages count once",
        "above 1 GiB of replies they are combined as they come: then s train is what was waited for them",
    ]
    return Section(f"scale: {model}", COLUMNS, rows, notes, skipped)


def _row(strategy: str, clients: int, parameters: int, turns: list[Child]) -> dict[str, Any]:
    every = [seconds for turn in turns for seconds in turn.value]
    whole = [sum(seconds.values()) for seconds in every]
    values = (
        *(strategy, clients, parameters, 1000 * middle(whole) / clients),
        middle([seconds.get("train", 0.0) for seconds in every]),
        middle([seconds.get("aggregate", 0.0) for seconds in every]),
        spread(whole),
        max(turn.own_peak for turn in turns) / 1e6,
        max(turn.tree_peak for turn in turns) / 1e6,
        4 * parameters * clients / 1e6,
    )
    return dict(zip(COLUMNS, values, strict=True))
