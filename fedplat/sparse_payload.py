"""A model of which some weights are pruned, on its way to a client: kept values, and a bit mask of which.

Three arrays at most: ``values`` float32, all that is kept, in the order of the vector; ``mask`` uint8, one
bit per element of the pruned arrays, one after another in the order of the layout; ``side`` uint8, the bytes
of arrays that are not of floating numbers, without gaps. Nothing is lost: −0.0, and kept zeros, stay what
they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import Entry, FlatArrays, Layout
from .compression.base import Arrays, EncodingError, checked, mask_bytes

Keep = Mapping[str, NDArray[np.bool_]]
"""Which elements of the pruned arrays are kept, by name; each flat, or in the array's own shape."""


def packed(model: FlatArrays, keep: Keep) -> Arrays:
    """Return the arrays that a model travels as, if so much of its pruned arrays is kept.

    >>> layout = Layout.of({"w": ((4,), "float32"), "b": ((1,), "float32")})
    >>> model = FlatArrays(layout, np.float32([1, 2, 3, 4, 5]), np.zeros(0, np.uint8))
    >>> sent = packed(model, {"w": np.array([True, False, False, True])})
    >>> sent["values"].tolist(), sent["mask"].tolist()  # 1001 0000
    ([1.0, 4.0, 5.0], [144])
    """
    chosen = np.ones(model.layout.dim, np.bool_)
    bits = [np.zeros(0, np.bool_)]
    for entry in _pruned(model.layout, keep):
        kept = np.ascontiguousarray(keep[entry.name]).reshape(-1)
        chosen[entry.start : entry.stop] = kept
        bits.append(kept)
    arrays: Arrays = {"values": model.vector[chosen]}
    if keep:
        arrays["mask"] = np.packbits(np.concatenate(bits))
    side = [model.side[e.start : e.stop] for e in model.layout.entries if not e.in_vector]
    if side:
        arrays["side"] = np.concatenate(side)
    return arrays


def unpacked(arrays: Mapping[str, NDArray[Any]], layout: Layout, pruned: Collection[str]) -> FlatArrays:
    """Return the model that :func:`packed` made arrays of, with zeros where nothing was sent.

    Raises EncodingError for arrays that are not of this layout with these arrays pruned.
    """
    entries = _pruned(layout, pruned)
    bits = sum(entry.stop - entry.start for entry in entries)
    side = sum(e.stop - e.start for e in layout.entries if not e.in_vector)
    length = len(arrays["values"]) if "values" in arrays and arrays["values"].ndim == 1 else 0
    parts = {"values": ("float32", length)}
    if pruned:
        parts["mask"] = ("uint8", mask_bytes(bits))
    if side:
        parts["side"] = ("uint8", side)
    checked(arrays, parts)
    chosen = np.ones(layout.dim, np.bool_)
    for name, kept in masks(arrays["mask"].tobytes() if pruned else b"", layout, pruned).items():
        entry = layout.by_name[name]
        chosen[entry.start : entry.stop] = kept.reshape(-1)
    if int(np.count_nonzero(chosen)) != length:
        raise EncodingError(f"there are {length} values for {int(np.count_nonzero(chosen))} elements")
    model = layout.new()
    model.vector[chosen] = arrays["values"]
    position = 0
    for entry in layout.entries:
        if not entry.in_vector:
            size = entry.stop - entry.start
            model.side[entry.start : entry.stop] = arrays["side"][position : position + size]
            position += size
    return model


def kept_layout(layout: Layout, counts: Mapping[str, int]) -> Layout:
    """Return a layout in which some arrays are flat and have so many elements, those that are kept."""
    buffers = [e.name for e in layout.entries if e.in_vector and e.start >= layout.num_params]
    named = {e.name: ((counts[e.name],) if e.name in counts else e.shape, e.dtype) for e in layout.entries}
    return Layout.of(named, buffers, promote=layout.has_promoted)


def without_pruned(part: FlatArrays, keep: Keep) -> FlatArrays:
    """Return arrays of which some have their kept elements alone: those of :func:`kept_layout`.

    Both sides have to know the mask; nothing tells of it.

    >>> layout = Layout.of({"w": ((2, 2), "float32"), "b": ((1,), "float32")})
    >>> model = FlatArrays(layout, np.float32([1, 0, 0, 4, 5]), np.zeros(0, np.uint8))
    >>> keep = {"w": np.array([[True, False], [False, True]])}
    >>> without_pruned(model, keep).vector.tolist()
    [1.0, 4.0, 5.0]
    >>> with_pruned(without_pruned(model, keep), layout, keep).vector.tolist()
    [1.0, 0.0, 0.0, 4.0, 5.0]
    """
    counts = {name: int(np.count_nonzero(kept)) for name, kept in keep.items()}
    layout = kept_layout(part.layout, counts)
    return FlatArrays(layout, part.vector[_chosen(part.layout, keep)], part.side.copy())


def with_pruned(sent: FlatArrays, layout: Layout, keep: Keep) -> FlatArrays:
    """Return what :func:`without_pruned` was given, with zeros for what is pruned."""
    part = FlatArrays(layout, np.zeros(layout.dim, np.float32), sent.side)
    part.vector[_chosen(layout, keep)] = sent.vector
    return part


def _chosen(layout: Layout, keep: Keep) -> NDArray[np.bool_]:
    chosen = np.ones(layout.dim, np.bool_)
    for entry in _pruned(layout, keep):
        chosen[entry.start : entry.stop] = np.ascontiguousarray(keep[entry.name]).reshape(-1)
    return chosen


def masks(data: bytes, layout: Layout, pruned: Collection[str]) -> dict[str, NDArray[np.bool_]]:
    """Return which elements are kept, by name and in the arrays' shapes, from the bytes of ``mask``.

    Raises EncodingError for another number of bytes.
    """
    entries = _pruned(layout, pruned)
    total = sum(entry.stop - entry.start for entry in entries)
    if len(data) != mask_bytes(total):
        raise EncodingError(f"a mask of {len(data)} bytes, expected {mask_bytes(total)}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=total).view(np.bool_)
    found, position = {}, 0
    for entry in entries:
        size = entry.stop - entry.start
        found[entry.name] = bits[position : position + size].reshape(entry.shape)
        position += size
    return found


def _pruned(layout: Layout, names: Collection[str]) -> list[Entry]:
    """Return the pruned arrays in the order of the vector."""
    if wrong := [n for n in names if n not in layout.by_name or not layout.by_name[n].in_vector]:
        raise EncodingError(f"the model has no floating arrays {sorted(wrong)} that could be pruned")
    return sorted((layout.by_name[name] for name in names), key=lambda entry: entry.start)
