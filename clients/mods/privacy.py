"""Local differential privacy: a client clips its update and adds noise before anything leaves it."""

from __future__ import annotations

import logging
from typing import Annotated

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray
from pydantic import Field

from fedplat.arrays import FlatArrays, Layout
from fedplat.security.clipping import clip_
from fedplat.security.privacy import checked_noise, noise_source, released
from fedplat.security.validation import array_records

from ..attacks.base import round_of, when

log = logging.getLogger("fedplat")


class LocalPrivacyMod:
    """A client mod that lets nothing of a training reply out but a clipped update with noise.

    The update, one vector over all floating arrays of any width, scalars and BatchNorm's statistics among
    them, is scaled down to an L2 norm of ``clip`` and every element gets N(0, (noise_multiplier·clip)²). What
    else a reply may tell is replaced: arrays of integers by those the server sent, ``num-examples`` by 1. All
    other metrics and records are dropped unless ``release_metrics`` is set, which protects none of them. A
    model with numbers that are not finite counts as no update: noise alone is sent.

    Noise is secret by default. ``seed`` gives noise that repeats, keyed by partition and round, for
    simulations only: who knows the seed takes the noise off again. Replies to other messages and errors pass.
    Raises UserError for a clip or a noise multiplier that is not above 0. What epsilon that gives is counted
    by :class:`fedplat.strategies.differential_privacy.LocalPrivacyAccount`.

        app = ClientApp()

        @app.train(mods=[LocalPrivacyMod(clip=1.0, noise_multiplier=1.0)])
        def train(message, context): ...
    """

    def __init__(
        self,
        *,
        clip: Annotated[float, Field(gt=0, description="largest L2 norm of an update")],
        noise_multiplier: Annotated[float, Field(gt=0, description="standard deviation over clip")],
        seed: int | None = None,
        release_metrics: bool = False,
        weighted_by_key: str = "num-examples",
    ) -> None:
        checked_noise(clip, noise_multiplier)
        self.clip = clip
        self.noise_multiplier = noise_multiplier
        self.seed = seed
        self.release_metrics = release_metrics
        self.weighted_by_key = weighted_by_key

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Run the client and return its protected reply.

        Raises ValueError, so that the client sends an error and nothing else, if the reply's arrays do not
        fit those of the message.
        """
        if message.metadata.message_type.split(".")[0] != "train":
            return call_next(message, context)
        server_round = round_of(message)
        # Read before the client runs, which may change the message it is given.
        start = _only(array_records(message), "message")
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        model = _only(array_records(reply), "reply", start.layout)
        partition = int(context.node_config.get("partition-id", context.node_id))
        source = noise_source(self.seed, "privacy", partition, *when(message))
        vector = self._clipped(model, start, server_round)
        noisy = released(vector, self.noise_multiplier * self.clip, source, start.layout)
        protected = FlatArrays(start.layout, noisy, start.side.copy()).to_record()
        return Message(self._content(reply, protected), reply_to=message)

    def _clipped(self, model: FlatArrays, start: FlatArrays, server_round: int) -> NDArray[np.float32]:
        if not np.isfinite(model.vector).all():
            log.warning("round %d: the trained model is not finite; noise alone is sent", server_round)
            return start.vector
        vector = model.vector.copy()
        clip_(torch.from_numpy(vector)[None], torch.from_numpy(start.vector.copy()), self.clip)
        return vector

    def _content(self, reply: Message, protected: ArrayRecord) -> RecordDict:
        """Return the reply's records with only what may be told."""
        key = self.weighted_by_key
        metrics = {name: r for name, r in reply.content.items() if isinstance(r, MetricRecord)}
        counting = next((name for name, r in metrics.items() if key in r), next(iter(metrics), "metrics"))
        content = RecordDict()
        for name, record in reply.content.items():
            if isinstance(record, ArrayRecord):
                content[name] = protected
            elif not self.release_metrics or name == counting:
                continue
            elif isinstance(record, MetricRecord):
                content[name] = MetricRecord({k: v for k, v in record.items() if k != key})
            else:
                content[name] = record
        others = metrics.get(counting, MetricRecord()) if self.release_metrics else MetricRecord()
        content[counting] = MetricRecord({**others, key: 1})
        return content


def _only(records: list[ArrayRecord], where: str, layout: Layout | None = None) -> FlatArrays:
    """Return the arrays of the one record there has to be, floating ones of all widths in the vector."""
    if len(records) != 1:
        raise ValueError(f"local privacy needs one record of arrays in the {where}, found {len(records)}")
    with np.errstate(over="ignore", invalid="ignore"):
        return FlatArrays.of_record(records[0], layout or Layout.of_record(records[0], promote=True))
