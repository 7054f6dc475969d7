"""What secure aggregation costs: seconds and bytes per client, by the size of its group and of the model.

Whole rounds run in one process, with clients that train nothing; what a client's mod takes is measured in it,
what the server takes is the rest of the strategy's work. Bytes are those of the messages in Flower's format.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedplat.clients.mods.secure_aggregation import SecureAggregationMod
from fedplat.compat import records_to_bytes
from fedplat.runtime.local import LocalGrid
from fedplat.strategies import Mean
from fedplat.strategies.secure_aggregation import SecureAggregation

from .common import Report, Section, chosen, middle, quiet
from .scale import PARAMETERS

_QUESTIONS = ("keys", "shares", "unmask")
COLUMNS = (
    "group size",
    "parameters",
    "lost",
    *("client ms, keys", "shares", "masking", "unmask"),
    "server ms per client",
    "x copies of model",
    "KB up",
    "KB down",
    "x model up",
)


@dataclass(frozen=True)
class Options:
    """What to measure: rounds of one group of every size with every model."""

    clients: tuple[int, ...] = (3, 5, 10, 30)
    models: tuple[str, ...] = ("cnn-hfl", "cnn-fedavg")
    repeats: int = 3
    seed: int = 1


QUICK: dict[str, Any] = {"clients": (3, 10), "models": ("softmax",), "repeats": 2}


@dataclass
class _Clock:
    """Stands around a mod and notes how long its own work takes, by message type."""

    mod: SecureAggregationMod
    seconds: dict[str, list[float]] = field(default_factory=dict)
    lost: int = 0

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        kind = message.metadata.message_type.split("_")[-1]
        if kind == "train" and int(context.node_config["partition-id"]) < self.lost:
            raise RuntimeError("lost on purpose")
        inside = 0.0

        def trained(message: Message, context: Context) -> Message:
            nonlocal inside
            start = time.perf_counter()
            reply = call_next(message, context)
            inside = time.perf_counter() - start
            return reply

        start = time.perf_counter()
        reply = self.mod(message, context, trained)
        self.seconds.setdefault(kind, []).append(time.perf_counter() - start - inside)
        return reply


class _CountingGrid(LocalGrid):
    """A grid in this process that adds up what messages carry in Flower's format, and its own seconds."""

    def __init__(self, app: ClientApp, nodes: int) -> None:
        super().__init__(app, nodes, workers=0)
        self.up = self.down = 0
        self.busy = 0.0

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        start = time.perf_counter()
        asked = list(messages)
        self.down += sum(_protocol_bytes(message) for message in asked)
        replies = super().send_and_receive(asked, timeout=timeout)
        self.up += sum(_protocol_bytes(reply) for reply in replies)
        self.busy += time.perf_counter() - start
        return replies


def _protocol_bytes(message: Message) -> int:
    """Return the bytes of all records but arrays, which are told by themselves."""
    if message.has_error():
        return 0
    rest = RecordDict()
    for name, record in message.content.items():
        if not isinstance(record, ArrayRecord):
            rest[name] = record
    return len(records_to_bytes(rest))


def run_round(clients: int, parameters: int, lost: int, seed: int) -> dict[str, float]:
    """Return the seconds and bytes of one round, per client; raises RuntimeError if it gives no model."""
    clock = _Clock(SecureAggregationMod(), lost=lost)
    app = ClientApp(mods=[clock])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"]
        metrics = MetricRecord({"num-examples": 10})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    clock.mod.register(app)
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0, seed=seed), groups=1, seed=seed)
    model = np.random.default_rng(seed).normal(size=parameters).astype(np.float32)
    grid = _CountingGrid(app, clients)
    with grid:
        start = time.perf_counter()
        messages = list(strategy.configure_train(1, ArrayRecord([model]), ConfigRecord(), grid))
        replies = grid.send_and_receive(messages)
        arrays, _ = strategy.aggregate_train(1, replies)
        server = time.perf_counter() - start - grid.busy
    if arrays is None:
        raise RuntimeError(f"no model came out: {strategy.dropped}")
    copy = _copy_seconds(model)
    masking = middle(clock.seconds["train"])
    return {
        **{kind: middle(clock.seconds[kind]) for kind in _QUESTIONS},
        "masking": masking,
        "copies": masking / copy,
        "server": server / clients,
        "up": grid.up / clients,
        "down": grid.down / clients,
        "masked": (parameters + 1) / parameters,
    }


def _copy_seconds(model: np.ndarray) -> float:
    """Return how long a copy of a model takes, on average over at least 20 ms."""
    start, copies = time.perf_counter(), 0
    target = np.empty_like(model)
    while (passed := time.perf_counter() - start) < 0.02:
        np.copyto(target, model)
        copies += 1
    return passed / copies


def check(options: Options) -> None:
    """Raise UserError for a model that does not exist."""
    chosen("model", options.models, PARAMETERS)


def measure(options: Options, report: Report) -> None:
    """Fill the report, one section per model."""
    quiet()
    report.options = asdict(options)
    for model in options.models:
        rows = []
        for clients in sorted(options.clients):
            # Less than a third may go; a group of two can spare nobody.
            for lost in (0, 1) if clients > 2 else (0,):
                report.say(f"{model}, groups of {clients}, {lost} lost")
                turns = [
                    run_round(clients, PARAMETERS[model], lost, options.seed) for _ in range(options.repeats)
                ]
                rows.append(_row(clients, PARAMETERS[model], lost, turns))
        notes = [
            "one process, clients one after another; masking includes rounding to fixed point",
            "KB: keys, shares and settings, besides the model; lost: after sharing, before sending",
        ]
        report.add(Section(f"secure aggregation: {model}", COLUMNS, rows, notes))


def _row(clients: int, parameters: int, lost: int, turns: list[dict[str, float]]) -> dict[str, Any]:
    of = {name: middle([turn[name] for turn in turns]) for name in turns[0]}
    values = (
        *(clients, parameters, lost),
        *(1000 * of[name] for name in ("keys", "shares", "masking", "unmask", "server")),
        *(of["copies"], of["up"] / 1000, of["down"] / 1000, of["masked"]),
    )
    return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    """Measure and print the tables."""
    from rich.console import Console

    from .common import machine_line, table_of

    screen = Console(width=140)
    screen.print(machine_line())

    def show(section: Section) -> None:
        screen.print(table_of(section), *section.notes, sep="\n")

    measure(Options(), Report("secure-aggregation", {}, show))


if __name__ == "__main__":
    main()
