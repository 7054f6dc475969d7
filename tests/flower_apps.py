"""Small Flower apps and messages that several tests share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp


def record(**arrays: np.ndarray) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in arrays.items()})


def plain_app() -> ClientApp:
    """Add 1 to every array and count its own calls in the context, as a Flower user would write it."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        calls = int(context.state["count"]["calls"]) + 1 if "count" in context.state else 1
        context.state["count"] = ConfigRecord({"calls": calls})
        arrays = [np.asarray(a + 1) for a in message.content["arrays"].to_numpy_ndarrays()]
        partition = int(context.node_config["partition-id"])
        metrics = MetricRecord({"num-examples": 10 + partition, "calls": calls})
        content = RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})
        return Message(content, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        total = sum(float(a.sum()) for a in message.content["arrays"].to_numpy_ndarrays())
        metrics = MetricRecord({"num-examples": 1, "total": total})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def with_partition_query(app: ClientApp) -> ClientApp:
    """Let an app tell which partition it holds."""

    @app.query()
    def query(message: Message, context: Context) -> Message:
        answer = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
        return Message(RecordDict({"node": answer}), reply_to=message)

    return app


def replies_to(
    messages: Iterable[Message],
    models: Mapping[int, ArrayRecord | Error],
    counts: Mapping[int, object] | None = None,
) -> list[Message]:
    """Answer messages by hand: for each node id a model, or an error."""
    replies = []
    for message in messages:
        node = message.metadata.dst_node_id
        model = models[node]
        if isinstance(model, Error):
            replies.append(Message(model, reply_to=message))
        else:
            metrics = MetricRecord({"num-examples": (counts or {}).get(node, 1)})
            replies.append(Message(RecordDict({"arrays": model, "metrics": metrics}), reply_to=message))
    return replies


_TRAIN_IN_WORKERS = """
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from fedplat.runtime.local import LocalGrid

app = ClientApp()

@app.train()
def train(message, context):
    torch.ones(1, requires_grad=True).sum().backward()
    return Message(RecordDict({}), reply_to=message)

with LocalGrid(app, 2, workers=2) as grid:
    messages = [Message(RecordDict({}), node, "train") for node in grid.get_node_ids()]
    print([reply.has_error() for reply in grid.send_and_receive(messages)], len(grid.worker_pids()))
"""


def with_workers_after(code: str) -> tuple[str, str]:
    """Run code in a new process, then a client of two that goes backward; return what it printed, and said.

    It prints whether each reply is an error, and how many workers there were.
    """
    script = "import torch\n" + code + _TRAIN_IN_WORKERS
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr.strip()
