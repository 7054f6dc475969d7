"""How a compressed model travels in a reply, and how it is taken out again, by whoever sent it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from ..arrays import FlatArrays, Float32Array, Layout, peek
from ..compat import make_message
from .base import Compressor, EncodingError, checked, plain_parts, working_layout

ENCODED = "fedplat.encoded"
"""Name of the record of arrays that travels in the place of a model."""

ENCODING = "fedplat.encoding"
"""Name of the record that says how: ``kind`` is the compressor, ``record`` the name of the model's record."""

_MOST_ARRAYS = 8
_SHOWN = 60  # characters of another party's text in a reason


def reference_of(record: ArrayRecord, compressor: Compressor) -> FlatArrays:
    """Return a model that was sent, in the layout in which it is compressed; a view where possible."""
    with np.errstate(over="ignore", invalid="ignore"):
        layout = working_layout(Layout.of_record(record), compressor)
        # The memory behind a record may hold more digits of promoted arrays than travel.
        return layout.new().fill(record) if layout.has_promoted else FlatArrays.of_record(record, layout)


def is_training(message: Message) -> bool:
    """Whether a message asks for training, or answers that."""
    return message.metadata.message_type.split(".")[0] == "train"


def encoded(
    vector: Float32Array, model: FlatArrays, compressor: Compressor, rng: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Return all arrays to send: what the compressor makes of ``vector``, and the rest of the model as it is.

    ``vector`` (p,) is what the compressor asks for: the update, or the model's own parameters.
    """
    layout = model.layout
    arrays = compressor.encode(vector, layout, rng)
    plain = plain_parts(layout)
    if "buffers" in plain:
        arrays["buffers"] = model.vector[layout.num_params :].copy()
    if "side" in plain:
        pieces = [model.side[e.start : e.stop] for e in layout.entries if not e.in_vector]
        arrays["side"] = np.concatenate(pieces)
    return arrays


def decoded(
    arrays: Mapping[str, NDArray[Any]],
    reference: FlatArrays,
    compressor: Compressor,
    into: FlatArrays | None = None,
) -> tuple[FlatArrays, Float32Array]:
    """Return the model that arrays stand for, and the vector (p,) that the compressor decoded.

    Client and server call this with the same arrays and get the same bits: the arithmetic is one operation
    on one number each. The model is a new one, or written to ``into``. Raises EncodingError if anything is
    not as it has to be; then ``into`` is not touched.
    """
    layout, p = reference.layout, reference.layout.num_params
    plain = plain_parts(layout)
    checked({name: array for name, array in arrays.items() if name in plain}, plain)
    own = {name: array for name, array in arrays.items() if name not in plain}
    vector = compressor.decode(own, layout)
    model = into or layout.new()
    if compressor.of_model:
        model.vector[:p] = vector
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(reference.vector[:p], vector, out=model.vector[:p])
    if "buffers" in plain:
        model.vector[p:] = arrays["buffers"]
    if "side" in plain:
        position = 0
        for entry in layout.entries:
            if not entry.in_vector:
                size = entry.stop - entry.start
                model.side[entry.start : entry.stop] = arrays["side"][position : position + size]
                position += size
    return model, vector


# Replies ---------------------------------------------------------------------------------------------------


def enclosed(reply: Message, name: str, arrays: dict[str, NDArray[Any]], compressor: Compressor) -> Message:
    """Return a reply with arrays in the place of its record ``name``."""
    content = RecordDict()
    for other, record in reply.content.items():
        if other != name:
            content[other] = record
    content[ENCODED] = FlatArrays.copy_of(arrays).to_record()
    content[ENCODING] = ConfigRecord({"kind": compressor.describe(), "record": name})
    return make_message(reply.metadata, content)


def is_enclosed(message: Message) -> bool:
    """Whether a message carries a compressed model."""
    return message.has_content() and (ENCODED in message.content or ENCODING in message.content)


def opened(content: RecordDict, compressor: Compressor) -> tuple[str, dict[str, NDArray[Any]]]:
    """Return what :func:`enclosed` put into a reply: the name of the model's record, and the arrays.

    Raises EncodingError for content that is not of this kind. Arrays are views of what came.
    """
    record, encoding = content.get(ENCODED), content.get(ENCODING)
    if not isinstance(record, ArrayRecord) or not isinstance(encoding, ConfigRecord):
        raise EncodingError("it does not say how it is compressed, or holds no arrays")
    kind, name = encoding.get("kind"), encoding.get("record")
    if kind != compressor.describe():
        raise EncodingError(f"it is compressed by '{_text(kind)}', expected '{compressor.describe()}'")
    if not isinstance(name, str) or not name or name in content:
        raise EncodingError(f"a record '{_text(name)}' cannot be put into it")
    if len(record) > _MOST_ARRAYS:
        raise EncodingError(f"it holds {len(record)} arrays, expected at most {_MOST_ARRAYS}")
    try:
        return name, {key: peek(array) for key, array in record.items()}
    except Exception as error:  # whatever an unreadable array raises, it concerns this reply alone
        raise EncodingError(f"an array cannot be read: {_text(error)}") from error


def restored(reply: Message, name: str, model: FlatArrays) -> Message:
    """Return a reply with the model in the place of what was sent for it."""
    content = RecordDict({name: model.to_record()})
    for other, record in reply.content.items():
        if other not in (ENCODED, ENCODING):
            content[other] = record
    return make_message(reply.metadata, content)


def _text(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
