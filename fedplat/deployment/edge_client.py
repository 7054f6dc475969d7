"""What an edge is to the cloud: a client that hands each message to the edge's own server."""

from __future__ import annotations

from pathlib import Path

from flwr.app import ConfigRecord, Context, Error, Message

from ..compat import records_from_bytes, records_to_bytes
from .edge_bridge import ask

BRIDGE_KEY = "edge-bridge"
"""In the node config of a SuperNode that is an edge: the folder of its bridge."""

EDGE_SCENARIO = "fedplat.edge-scenario"
"""In the cloud's messages: the scenario with what is the edges' business, which clients are not told."""

EDGE_TIMEOUT = "fedplat.edge-timeout"
"""In the cloud's messages: after how many seconds it waits no longer for an edge."""


def answer_by_edge(message: Message, context: Context) -> Message:
    """Return what the server of this edge makes of a message of the cloud, for training or evaluation.

    Raises UserError if there is no such server, or it ends, or gives no answer while the cloud waits.
    """
    told = message.content.get("config")
    timeout = told.get(EDGE_TIMEOUT, 3600.0) if isinstance(told, ConfigRecord) else 3600.0
    header, content = ask(
        Path(str(context.node_config[BRIDGE_KEY])).expanduser(),
        {"type": message.metadata.message_type, "edge": int(context.node_config["partition-id"])},
        records_to_bytes(message.content),
        timeout=float(timeout),  # type: ignore[arg-type]
    )
    if "error" in header:
        return Message(Error(int(header["error"]["code"]), str(header["error"]["reason"])), reply_to=message)
    return Message(records_from_bytes(content), reply_to=message)
