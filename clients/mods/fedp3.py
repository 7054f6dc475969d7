"""FedP3's messages on the client: what came is made a whole model, and of the reply only a part leaves."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedplat.arrays import FlatArrays, Layout, peek
from fedplat.compat import make_message
from fedplat.errors import UserError
from fedplat.fedp3_options import FEDP3, KEPT, PartOptions
from fedplat.layer_map import LayerMap, part_of
from fedplat.security.validation import array_records
from fedplat.sparse_payload import unpacked


class FedP3Mod:
    """A client mod between FedP3's messages and a client that knows whole models only.

    The message that goes in holds the whole model, with zeros for what was pruned; the reply that comes out
    holds the layers that the message asked for, and the head, and nothing else of the model. So mods within,
    such as attacks and local privacy, see whole models. All other messages, and errors, pass as they are.

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
        reply = call_next(_whole(message, layout, layers.weights_of(options.masked)), context)
        if reply.has_error():
            return reply
        returned = layers.arrays_of((*options.trained, layers.head.name))
        content = RecordDict()
        for name, record in reply.content.items():
            if isinstance(record, ArrayRecord):
                content[name] = part_of(FlatArrays.of_record(record, layout), returned).to_record()
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


def _whole(message: Message, layout: Layout, pruned: list[str]) -> Message:
    """Return the message with the whole model, and the mask next to the options."""
    records = array_records(message)
    if len(records) != 1:
        raise UserError(f"a FedP3 message holds one record of arrays, found {len(records)}")
    arrays = {name: peek(array) for name, array in records[0].items()}
    model = unpacked(arrays, layout, pruned)
    content = RecordDict()
    for name, record in message.content.items():
        if isinstance(record, ArrayRecord):
            content[name] = model.to_record()
        elif isinstance(record, ConfigRecord) and FEDP3 in record:
            content[name] = ConfigRecord({**record, KEPT: arrays["mask"].tobytes() if pruned else b""})
        else:
            content[name] = record
    return make_message(message.metadata, content)
