"""A client is never trusted: what a reply must be before any aggregator sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flwr.app import ArrayRecord, Error, Message, MetricRecord

from ..arrays import FlatArrays, Layout, LayoutError
from ..compat import make_error_message

REFUSED_CODE = 1001
"""Error code of a reply that a strategy around another one did not let through; Flower's own are small."""


class ReplyRefused(ValueError):
    """A reply that is left out of the round, with the reason to report."""


def refusal(message: Message, reason: str) -> Message:
    """Return the error that takes the place of a reply which is not let through; its sender is kept.

    To any strategy it is a client that failed; ours report it as refused, with the reason.
    """
    return make_error_message(message.metadata, Error(REFUSED_CODE, reason))


def is_refusal(message: Message) -> bool:
    """Whether a message was made by :func:`refusal`."""
    return message.has_error() and message.error.code == REFUSED_CODE


@dataclass(frozen=True)
class ReplyRules:
    """What is asked of a training reply besides the right names, shapes, types and finite numbers.

    ``max_examples`` bounds the sample count a client may claim, since it is a weight in the mean; an
    experiment sets it to the size of the training set.
    """

    max_examples: int = 10_000_000
    weighted_by_key: str = "num-examples"

    def arrays(self, message: Message, layout: Layout) -> FlatArrays:
        """Return the reply's model in ``layout``; raises ReplyRefused unless it fits exactly."""
        records = array_records(message)
        if len(records) != 1:
            raise ReplyRefused(f"expected one record of arrays, found {len(records)}")
        try:
            return FlatArrays.of_record(records[0], layout)
        except LayoutError as error:
            raise ReplyRefused(str(error)) from error

    def num_examples(self, message: Message) -> int:
        """Return the claimed number of samples; raises ReplyRefused unless it is believable."""
        key = self.weighted_by_key
        # Not by content.metric_records, whose circular references would keep the reply's arrays alive.
        records = [r for r in message.content.values() if isinstance(r, MetricRecord) and key in r]
        if len(records) != 1:
            raise ReplyRefused(f"expected one metric '{key}', found {len(records)}")
        value = records[0][key]
        if isinstance(value, list) or not math.isfinite(value) or value != int(value):
            raise ReplyRefused(f"'{key}' is {value}, expected a whole number")
        if not 1 <= value <= self.max_examples:
            raise ReplyRefused(f"'{key}' is {int(value)}, expected 1 to {self.max_examples}")
        return int(value)


def scalar_metrics(message: Message) -> dict[str, float]:
    """Return the finite scalar metrics of a reply, by name."""
    found: dict[str, float] = {}
    for record in message.content.values():
        if isinstance(record, MetricRecord):
            found |= {k: v for k, v in record.items() if not isinstance(v, list) and math.isfinite(v)}
    return found


def array_records(message: Message) -> list[ArrayRecord]:
    """Return the records of arrays that a message carries."""
    if not message.has_content():
        return []
    return [record for record in message.content.values() if isinstance(record, ArrayRecord)]
