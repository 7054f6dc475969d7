"""Clients that misbehave, for runs that must survive them; used as attacks by import path."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict

from fedplat.clients.attacks import Attack


class Raises(Attack):
    """Raise in every round."""

    def __call__(self, message: Message, context: Context, call_next) -> Message:
        if message.metadata.message_type == "train":
            raise ValueError("boom")
        return call_next(message, context)


class _Changes(Attack):
    def __call__(self, message: Message, context: Context, call_next) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type != "train":
            return reply
        arrays = [a.numpy() for a in reply.content["arrays"].values()]
        metrics = dict(reply.content["metrics"])
        arrays, metrics = self.change(arrays, metrics)
        names = list(reply.content["arrays"])
        record = ArrayRecord(dict(zip(names, ArrayRecord(arrays).values(), strict=True)))
        return Message(RecordDict({"arrays": record, "metrics": MetricRecord(metrics)}), reply_to=message)


class SendsNan(_Changes):
    """Send one number that is not one."""

    def change(self, arrays, metrics):
        arrays[0].flat[0] = np.nan
        return arrays, metrics


class SendsWrongShape(_Changes):
    """Send an array with a row too many."""

    def change(self, arrays, metrics):
        return [np.concatenate([arrays[0], arrays[0][:1]]), *arrays[1:]], metrics


class ClaimsManySamples(_Changes):
    """Claim 10^12 samples."""

    def change(self, arrays, metrics):
        return arrays, metrics | {"num-examples": 10**12}


class KillsServerOnce(Attack):
    """Kill the server with SIGKILL in the middle of a round, the first time."""

    def __init__(self, *, marker: str, in_round: int = 3) -> None:
        self.marker = Path(marker)
        self.in_round = in_round

    def __call__(self, message: Message, context: Context, call_next) -> Message:
        is_time = message.metadata.message_type == "train" and message.metadata.group_id == str(self.in_round)
        if is_time and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(0.2)
        return call_next(message, context)
