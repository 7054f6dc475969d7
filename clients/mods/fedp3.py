"""FedP3's messages on the client: what came is made a whole model, and of the reply only a part leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from numpy.typing import NDArray

from fedplat.arrays import FlatArrays, Layout, peek
from fedplat.compat import make_message
from fedplat.errors import UserError
from fedplat.fedp3_options import FEDP3, KEPT, PartOptions
from fedplat.layer_map import LayerMap, part_of
from fedplat.security.validation import array_records
from fedplat.sparse_payload import masks, unpacked, without_pruned


class FedP3Mod:
    """A client mod between FedP3's messages and a client that knows whole models only.

    The message that goes in holds the whole model, with zeros for what was pruned; the reply that comes out
    holds the layers that the message asked for, and the head, and nothing else of the model; of layers whose
    pruned weights are held at zero, the kept ones alone. So mods within, such as attacks and local privacy,
    see whole models. All other messages, and errors, pass as they are.

    ``layout`` gives the layout of the model; an app sets it. ``noise_seed`` is what makes DP-FedP3's noise
    repeat, for simulations only; None: it is secret. Raises EncodingError, so that the client sends an error,
    for a message whose arrays do not fit the layout, and LayoutError for such a reply.
    """

    def __init__(self, layout: Callable[[], Layout] | None = None, noise_seed: int | None = None) -> None:
        self.layout = layout
        self.noise_seed = noise_seed

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Run the client on the whole model and return a part of its reply."""
        options = options_of(message)
        if options is None:
            return call_next(message, context)
        if self.layout is None:
            raise UserError("FedP3Mod does not know the model: give it the layout")
        layout = self.layout()
        layers = LayerMap.of(layout)
        pruned = layers.weights_of(options.masked)
        arrays = _arrays(message)
        mask = arrays["mask"].tobytes() if pruned and "mask" in arrays else b""
        reply = call_next(_whole(message, unpacked(arrays, layout, pruned), mask), context)
        if reply.has_error():
            return reply
        returned = layers.arrays_of((*options.trained, layers.head.name))
        sparse = layers.weights_of(options.returned_sparse)
        keep = {name: kept for name, kept in masks(mask, layout, pruned).items() if name in sparse}
        content = RecordDict()
        for name, record in reply.content.items():
            if isinstance(record, ArrayRecord):
                part = part_of(FlatArrays.of_record(record, layout), returned)
                content[name] = (without_pruned(part, keep) if keep else part).to_record()
            else:
                content[name] = record
        return make_message(reply.metadata, content)


def options_of(message: Message) -> PartOptions | None:
    """Return what a message of FedP3's says; None for any other message."""
    if message.metadata.message_type.split(".")[0] != "train" or not message.has_content():
        return None
    for record in message.content.values():
        if isinstance(record, ConfigRecord) and FEDP3 in record:
            return PartOptions.of(record)
    return None


def _arrays(message: Message) -> dict[str, NDArray[Any]]:
    records = array_records(message)
    if len(records) != 1:
        raise UserError(f"a FedP3 message holds one record of arrays, found {len(records)}")
    return {name: peek(array) for name, array in records[0].items()}


def _whole(message: Message, model: FlatArrays, mask: bytes) -> Message:
    """Return the message with the whole model, and the mask next to the options."""
    content = RecordDict()
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            content[name] = model.to_record()
        elif isinstance(record, ConfigRecord) and FEDP3 in record:
            content[name] = ConfigRecord({**record, KEPT: mask})
        else:
            content[name] = record
    return make_message(message.metadata, content)
