"""An app under secure aggregation, clients that drop out of it, and the same sums without masks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp.strategy import Strategy

from fedplat.arrays import FlatArrays, Layout
from fedplat.clients.mods.secure_aggregation import SecureAggregationMod
from fedplat.runtime.local import LocalGrid
from fedplat.security.fixed_point import FixedPoint, decode_update, encode_update

from .flower_apps import record, with_partition_query

START = record(
    **{
        "w": np.linspace(-1, 1, 1003, dtype=np.float32).reshape(17, 59),
        "temperature": np.array(0.5, np.float32),
        "bn.running_var": np.ones(3, np.float32),
        "bn.num_batches_tracked": np.array(2**40, np.int64),
    }
)
Behaviour = Callable[[Message, int, ClientAppCallable, Context], Message | None]


def trained(start: ArrayRecord, partition: int, server_round: int) -> ArrayRecord:
    rng = np.random.default_rng((partition, server_round))
    return record(
        **{
            name: array.numpy() + np.asarray(rng.normal(size=array.shape), np.float32)
            if array.dtype == "float32"
            else array.numpy() + partition
            for name, array in start.items()
        }
    )


def secure_app(mod: SecureAggregationMod | None = None, behave: Behaviour | None = None) -> ClientApp:
    """Clients that add noise of their own to the model; ``behave`` may do something else to any message."""
    secure = mod or SecureAggregationMod()

    def outside(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        partition = int(context.node_config["partition-id"])
        reply = behave(message, partition, call_next, context) if behave else None
        return reply or call_next(message, context)

    app = ClientApp(mods=[outside, secure])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        server_round = int(message.content["config"]["server-round"])
        arrays = trained(message.content["arrays"], partition, server_round)
        metrics = MetricRecord({"num-examples": 10 * partition + 1, "train-loss": float(partition)})
        return Message(
            RecordDict({"arrays": arrays, "metrics": metrics, "notes": ConfigRecord({"secret": "x"})}),
            reply_to=message,
        )

    return with_partition_query(secure.register(app))


def play(
    strategy: Strategy, n: int, behave: Behaviour | None = None, rounds: int = 1, workers: int = 0, **mod
) -> ArrayRecord:
    with LocalGrid(secure_app(SecureAggregationMod(**mod), behave), n, workers=workers) as grid:
        result = strategy.start(grid, START, num_rounds=rounds, timeout=30)
        assert grid.node_states() == {} or behave is not None
    return result.arrays


def lost(at: str, *partitions: int) -> Behaviour:
    """Let clients fail whenever they get messages of a type."""

    def behave(message: Message, partition: int, call_next: ClientAppCallable, context: Context) -> None:
        if message.metadata.message_type == at and partition in partitions:
            raise RuntimeError("lost")

    return behave


def bits(arrays: ArrayRecord) -> dict[str, bytes]:
    return {name: array.numpy().tobytes() for name, array in arrays.items()}


def means(groups: Iterable[list[int]], codec: FixedPoint, weights: Callable[[int], int]) -> list[FlatArrays]:
    """Return the groups' mean models computed without any masks."""
    layout = Layout.of_record(START, promote=True)
    received = FlatArrays.of_record(START, layout)
    models = []
    for group in groups:
        encoded = [
            encode_update(FlatArrays.of_record(trained(START, p, 1), layout), received, codec, weights(p))
            for p in group
        ]
        models.append(layout.new())
        total = np.sum(encoded, axis=0, dtype=codec.dtype)
        decode_update(total, len(group), received, codec, into=models[-1])
    return models
