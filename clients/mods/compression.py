"""A client sends its update compressed, and remembers what that left out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from numpy.typing import NDArray

from fedplat.arrays import Entry, FlatArrays, Float32Array, Layout, LayoutError
from fedplat.compat import make_message
from fedplat.compression.base import Compressor, EncodingError
from fedplat.compression.envelope import decoded, enclosed, encoded, is_training, reference_of
from fedplat.compression.simple import Uncompressed
from fedplat.rng import generator
from fedplat.security.validation import array_records

from ..app import STRATEGY_KEY
from ..attacks.base import when

log = logging.getLogger("fedplat")

_MEMORY_KEY = "fedplat.compression"


class CompressionMod:
    """Sends training replies compressed; a :class:`fedplat.compression.CompressionGrid` puts them back.

    In the reply the model is replaced by the one that the server will decode, to the bit; then the mods
    ``within`` see it, the first of them last; then it is left out, and what ``compressor`` made of it is sent
    instead. A signature therefore has to be made within: it is one of the model that will be aggregated.
    To be the outermost mod.

    Draws depend on ``seed``, partition and round only. What a compressor with error feedback leaves out is
    kept in ``context.state``, by array, for one strategy at a time; an array of another size begins anew.

    Evaluation and errors pass as they are, and so do replies that cannot be compressed: with arrays other
    than those that were sent, numbers that are not finite, or updates too large for the compressor. What was
    remembered is then kept for the next round.

        app = ClientApp(mods=[CompressionMod(TopK(fraction=0.01), within=[SigningMod.from_node_config()])])
    """

    def __init__(self, compressor: Compressor, seed: int = 0, *, within: Sequence[Mod] = ()) -> None:
        self.compressor = compressor
        self.seed = seed
        self.within = tuple(within)

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Run the client and return its compressed reply."""
        sent = array_records(message) if is_training(message) else []
        if len(sent) != 1 or isinstance(self.compressor, Uncompressed):
            return _chain(self.within, call_next)(message, context)
        # Read before the client runs, which may change the message it is given.
        start = reference_of(sent[0], self.compressor)
        handed: list[tuple[str, ArrayRecord, dict[str, NDArray[Any]]]] = []

        def lossy(message: Message, context: Context) -> Message:
            reply = call_next(message, context)
            found = self._compressed(start, message, context, reply)
            if found is None:
                return reply
            name, model, arrays = found
            content = RecordDict()
            for other, record in reply.content.items():
                content[other] = record
            content[name] = as_sent = model.to_record()
            handed.append((name, as_sent, arrays))
            return make_message(reply.metadata, content)

        reply = _chain(self.within, lossy)(message, context)
        if not handed or not reply.has_content():
            return reply
        name, as_sent, arrays = handed[-1]
        # What a mod within has changed is no longer what the server would decode.
        if reply.content.get(name) is not as_sent:
            return reply
        return enclosed(reply, name, arrays, self.compressor)

    def _compressed(
        self, start: FlatArrays, message: Message, context: Context, reply: Message
    ) -> tuple[str, FlatArrays, dict[str, NDArray[Any]]] | None:
        """Return the name of the reply's model, the model to be decoded, and the arrays to send."""
        if not reply.has_content():
            return None
        names = [name for name, record in reply.content.items() if isinstance(record, ArrayRecord)]
        compressor, layout = self.compressor, start.layout
        if len(names) != 1:
            return None
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                model = FlatArrays.of_record(array_records(reply)[0], layout)
        except LayoutError as error:
            log.debug("a reply is sent uncompressed: %s", error)
            return None
        p = layout.num_params
        if compressor.of_model:
            vector = model.vector[:p]
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                vector = model.vector[:p] - start.vector[:p]
                if compressor.error_feedback:
                    vector += _memory(message, context, layout)
            if not np.isfinite(vector).all():
                return None
        client = int(context.node_config.get("partition-id", context.node_id))
        rng = generator(self.seed, "compression", client, *when(message))
        try:
            arrays = encoded(vector, model, compressor, rng)
            as_sent, said = decoded(arrays, start, compressor)
        except EncodingError as error:
            log.debug("a reply is sent uncompressed: %s", error)
            return None
        if compressor.error_feedback:
            _remember(message, context, layout, vector - said)
        return names[0], as_sent, arrays


def _chain(mods: Sequence[Mod], call_next: ClientAppCallable) -> ClientAppCallable:
    """Return a call of the mods, one inside the other, around another call."""
    for mod in reversed(mods):
        call_next = functools.partial(_call, mod, call_next)
    return call_next


def _call(mod: Mod, call_next: ClientAppCallable, message: Message, context: Context) -> Message:
    return mod(message, context, call_next)


# What was not sent -----------------------------------------------------------------------------------------


def _key(message: Message) -> str:
    """Return where a client remembers: strategies that share a run's clients do not share that."""
    for record in message.content.values():
        if isinstance(record, ConfigRecord) and STRATEGY_KEY in record:
            return _MEMORY_KEY + str(record[STRATEGY_KEY])
    return _MEMORY_KEY


def _parameters(layout: Layout) -> list[Entry]:
    return [entry for entry in layout.entries if entry.in_vector and entry.stop <= layout.num_params]


def _memory(message: Message, context: Context, layout: Layout) -> Float32Array:
    """Return what is still to be sent (p,); zeros at first, and for arrays of another size than before."""
    memory, record = np.zeros(layout.num_params, np.float32), context.state.get(_key(message))
    # By array: Flower's own strategies make floats of a model's integers, which then is of another layout.
    known = record if isinstance(record, ArrayRecord) else ArrayRecord()
    for entry in _parameters(layout):
        if entry.name in known:
            found = known[entry.name].numpy()
            if found.shape == (entry.stop - entry.start,) and found.dtype == np.float32:
                memory[entry.start : entry.stop] = found
    return memory


def _remember(message: Message, context: Context, layout: Layout, vector: Float32Array) -> None:
    for key in [key for key in context.state if key.startswith(_MEMORY_KEY)]:
        del context.state[key]
    context.state[_key(message)] = ArrayRecord(
        {entry.name: Array(vector[entry.start : entry.stop]) for entry in _parameters(layout)}
    )
