"""A client under a hard limit of its memory: what does not fit fails, as it would on a small device."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Annotated

from flwr.app import ConfigRecord, Context, Error, Message
from flwr.clientapp.typing import ClientAppCallable
from pydantic import Field

from fedplat.compat import ErrorCode, records_from_bytes, records_to_bytes
from fedplat.emulation.enforce import OVERHEAD_BYTES, OutOfMemory, run_capped

MEMORY_KEY = "fedplat.memory-bytes"
"""Under which a training message's config says how many bytes the client may use."""
OUT_OF_MEMORY = "out of memory:"
"""How the reason of an error begins that says so."""

_HEAD = struct.Struct("<QQ")


class MemoryCapMod:
    """A client mod that trains in a process which may not allocate more than the message says.

    The cap, in bytes, is ``fedplat.memory-bytes`` in a config record of the training message; without it, and
    for other messages, the client runs as ever. The process is forked, gets the cap and ``overhead_bytes`` on
    top, and sends its reply and ``context.state`` back. If memory runs out, the reply is an error
    whose reason begins with "out of memory:"; anything else that the client raises is raised here.

    It is to be the innermost mod, so that only training is limited. ``forget`` is called in the process
    before counting starts; it should drop a model that the app keeps between calls, which would else be
    there for free. Nothing else that the client keeps outside ``context.state`` survives the call.

    Raises UserError, where Linux's limits are missing or the process has used a GPU; ValueError for a
    cap that is no whole number from 0.

        app = ClientApp(mods=[always_reply, MemoryCapMod()])
    """

    def __init__(
        self,
        *,
        overhead_bytes: Annotated[int, Field(ge=0, description="bytes on top of the cap")] = OVERHEAD_BYTES,
        forget: Callable[[], object] | None = None,
    ) -> None:
        self.overhead_bytes = overhead_bytes
        self.forget = forget

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Run the client, under its cap if the message has one."""
        cap = memory_cap(message)
        if cap is None:
            return call_next(message, context)
        try:
            data = run_capped(
                lambda: _checked(call_next(message, context)),
                lambda reply: _packed(reply, context),
                cap,
                overhead=self.overhead_bytes,
                prepare=self.forget,
            )
        except OutOfMemory as error:
            reason = f"{OUT_OF_MEMORY} training does not fit into {cap / 1e6:.3g} MB ({error})"
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
        return _unpacked(data, message, context)


def memory_cap(message: Message) -> int | None:
    """Return the cap in bytes that a training message carries, or None; raises ValueError for a wrong one."""
    if message.metadata.message_type.split(".")[0] != "train" or not message.has_content():
        return None
    found = [
        record[MEMORY_KEY]
        for record in message.content.values()
        if isinstance(record, ConfigRecord) and MEMORY_KEY in record
    ]
    if not found:
        return None
    cap = found[0]
    if not isinstance(cap, int) or isinstance(cap, bool) or cap < 0:
        raise ValueError(f"{MEMORY_KEY} is {cap!r}, expected a whole number of bytes, 0 or more")
    return cap


def _checked(reply: Message) -> Message:
    if not isinstance(reply, Message):
        raise TypeError(f"the ClientApp returned {type(reply).__name__} instead of a Message")
    return reply


def _packed(reply: Message, context: Context) -> bytes:
    """Return the client's state, and its error or the records of its reply."""
    state = records_to_bytes(context.state)
    if reply.has_error():
        head = json.dumps([reply.error.code, reply.error.reason]).encode()
        return _HEAD.pack(len(head), len(state)) + head + state
    return _HEAD.pack(0, len(state)) + state + records_to_bytes(reply.content)


def _unpacked(data: bytes, message: Message, context: Context) -> Message:
    told, kept = _HEAD.unpack_from(data)
    view = memoryview(data)[_HEAD.size :]
    state = records_from_bytes(bytes(view[told : told + kept]))
    context.state.clear()
    for name, record in state.items():
        context.state[name] = record
    if told:
        return Message(Error(*json.loads(bytes(view[:told]))), reply_to=message)
    return Message(records_from_bytes(bytes(view[told + kept :])), reply_to=message)


__all__ = ["MEMORY_KEY", "OUT_OF_MEMORY", "MemoryCapMod", "memory_cap"]
