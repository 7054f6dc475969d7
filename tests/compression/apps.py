"""The client app, the messages and the broken grid that the tests of compression share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedplat.clients.app import STRATEGY_KEY
from fedplat.compat import make_message, records_from_bytes
from fedplat.compression import (
    QSGD,
    Compressor,
    HalfPrecision,
    Sparse,
    TopK,
    Uncompressed,
)
from fedplat.rng import generator
from fedplat.runtime.around import GridWrapper
from fedplat.runtime.local import LocalGrid

from ..flower_apps import record, with_partition_query

COMPRESSORS: dict[str, Compressor] = {
    "none": Uncompressed(),
    "fp16": HalfPrecision(),
    "bf16": HalfPrecision(format="bf16"),
    "top-k": TopK(fraction=0.1),
    "qsgd": QSGD(bucket=16),
    "sparse": Sparse(),
}
PARTS = {
    "layer.weight": np.linspace(-1, 1, 60, dtype=np.float32).reshape(6, 10),
    "layer.bias": np.zeros(7, np.float32),
    "scale": np.float32(2.0),
    "bn.running_mean": np.full(5, 0.5, np.float32),
    "bn.num_batches_tracked": np.int64(3),
}
OTHER_FLOATS = {"half": np.ones(9, np.float16), "double": np.linspace(0, 1, 8), "flags": np.ones(3, np.bool_)}
FLOATS = 68


def trained(value: np.ndarray, partition: int, server_round: int, name: str) -> np.ndarray:
    """Return what a client makes of an array: noise that is its own, for floats."""
    if value.dtype.kind != "f":
        return np.asarray(value + 1) if value.dtype.kind == "i" else value
    rng = generator(7, name, partition, server_round)
    return np.asarray(value + 0.1 * rng.standard_normal(value.shape)).astype(value.dtype)


def app_of(*mods: Any, change: Callable[[dict, int, int], dict] | None = None) -> ClientApp:
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        server_round = int(message.content["config"]["server-round"])
        named = {
            name: trained(array.numpy(), partition, server_round, name)
            for name, array in message.content["arrays"].items()
        }
        named = change(named, partition, server_round) if change else named
        metrics = MetricRecord({"num-examples": 10 + partition, "loss": 0.5})
        return Message(RecordDict({"arrays": record(**named), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    return with_partition_query(app)


def asked(grid: Any, number: int = 1, arrays: dict | None = None, strategy: str = "") -> list[Message]:
    config = ConfigRecord({"server-round": number, **({STRATEGY_KEY: strategy} if strategy else {})})
    content = RecordDict({"arrays": record(**(arrays or PARTS)), "config": config})
    return [Message(content, node, "train") for node in grid.get_node_ids()]


def ask(grid: Any, number: int = 1, arrays: dict | None = None, strategy: str = "") -> list[Message]:
    return list(grid.send_and_receive(asked(grid, number, arrays, strategy)))


def named(reply: Message) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in reply.content["arrays"].items()}


def update(number: int, partition: int, arrays: dict | None = None) -> np.ndarray:
    """Return what a client changes in its float parameters in a round, in the order of the vector."""
    found = [
        (trained(np.asarray(v), partition, number, n).astype(np.float32) - np.asarray(v, np.float32)).ravel()
        for n, v in (arrays or PARTS).items()
        if v.dtype.kind == "f" and "running" not in n
    ]
    return np.concatenate(found)


def sent_updates(reply: Message, arrays: dict | None = None) -> np.ndarray:
    start = arrays or PARTS
    found = named(reply)
    keys = [n for n, v in start.items() if v.dtype.kind == "f" and "running" not in n]
    return np.concatenate([(found[n] - np.asarray(start[n])).ravel() for n in keys])


def memories(engine: LocalGrid) -> dict[int, dict[str, np.ndarray]]:
    return {
        node: {
            name: np.concatenate([array.numpy() for array in kept.values()])
            for name, kept in records_from_bytes(state).items()
            if name.startswith("fedplat.compression")
        }
        for node, state in engine.node_states().items()
    }


class Tampering(GridWrapper):
    """Changes the content of the replies of some nodes on their way."""

    def __init__(self, grid: LocalGrid, changes: dict[int, Callable[[RecordDict], Any]]) -> None:
        super().__init__(grid)
        self._changes = changes

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        replies = super().send_and_receive(messages, timeout=timeout)
        for index, reply in enumerate(replies):
            change = self._changes.get(reply.metadata.src_node_id)
            if change and reply.metadata.message_type == "train":
                content = RecordDict(dict(reply.content.items()))
                replies[index] = change(content) or make_message(reply.metadata, content)
        return replies
