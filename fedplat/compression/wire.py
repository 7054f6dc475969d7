"""What a message really weighed on its way, also once its content is another one."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from flwr.app import Message, Metadata

from ..arrays import payload_bytes
from ..security.validation import array_records

_noted: dict[int, tuple[weakref.ref[Metadata], int]] = {}


def wire_bytes(message: Message) -> int:
    """Return the bytes of the arrays with which a message travelled.

    Of a reply that a :class:`fedplat.compression.CompressionGrid` let through or refused what was really
    sent, also if the message was made anew with the same metadata since; of any other message those of the
    arrays in it.
    """
    meta = message.metadata
    kept = _noted.get(id(meta))
    if kept is not None and kept[0]() is meta:
        return kept[1]
    return _array_bytes(message)


def note(reply: Message) -> int:
    """Remember what a reply weighs for as long as its metadata lives, and return it."""
    meta, size = reply.metadata, _array_bytes(reply)
    key = id(meta)
    # Metadata can be compared but not hashed, so no dictionary of weak keys would take them.
    _noted[key] = weakref.ref(meta, lambda _: _noted.pop(key, None)), size
    return size


def sent_bytes(messages: Iterable[Message]) -> int:
    """Return the bytes of the arrays in messages; they share records, each of which is looked at once."""
    known: dict[int, int] = {}
    total = 0
    for message in messages:
        for record in array_records(message):
            if id(record) not in known:
                known[id(record)] = payload_bytes(record)
            total += known[id(record)]
    return total


def _array_bytes(message: Message) -> int:
    total = 0
    for record in array_records(message):
        try:
            total += payload_bytes(record)
        except (TypeError, ValueError, ArithmeticError):  # types or shapes that are none
            total += sum(len(array.data) for array in record.values())
    return total
