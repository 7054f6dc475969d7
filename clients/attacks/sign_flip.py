"""Sign flipping: train honestly, then send the opposite."""

from __future__ import annotations

from typing import Literal

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedplat.arrays import FlatArrays, Layout
from fedplat.security.validation import array_records

from .base import Attack


class SignFlip(Attack):
    """Send w + factor·(wᵢ − w) for ``of="delta"``, or factor·wᵢ for ``of="weights"``.

    w is the model received, wᵢ the honestly trained one; factor −1 turns the sign, −4 turns and enlarges it.
    Buffers such as BatchNorm's statistics are sent as they are: a negative variance would only give the
    attacker away. Flower client mod; acts on training replies alone. Li et al., AAAI 2019 (RSA).
    """

    def __init__(self, *, of: Literal["delta", "weights"] = "delta", factor: float = -1.0) -> None:
        self.of = of
        self.factor = factor

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Run the client and turn its reply around."""
        reply = call_next(message, context)
        if reply.has_error() or message.metadata.message_type.split(".")[0] != "train":
            return reply
        layout = Layout.of_record(array_records(message)[0], promote=True)
        received = FlatArrays.of_record(array_records(message)[0], layout)
        content = RecordDict()
        for name, record in reply.content.items():
            if isinstance(record, ArrayRecord):
                content[name] = self._turned(FlatArrays.of_record(record, layout), received).to_record()
            else:
                content[name] = record
        return Message(content, reply_to=message)

    def _turned(self, trained: FlatArrays, received: FlatArrays) -> FlatArrays:
        p = trained.layout.num_params
        vector = trained.vector.copy()
        if self.of == "weights":
            vector[:p] *= self.factor
        else:
            vector[:p] -= received.vector[:p]
            vector[:p] *= self.factor
            vector[:p] += received.vector[:p]
        return FlatArrays(trained.layout, vector, trained.side)
