"""What a compressor is: an update becomes a few small arrays, and these become an update again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..arrays import Float32Array, Layout

Arrays = dict[str, NDArray[Any]]
Parts = dict[str, tuple[str, int]]
"""Names of one-dimensional arrays with their types and lengths."""


class EncodingError(ValueError):
    """Arrays that are not what a compressor sends for a model of that layout."""


class Compressor(ABC):
    """Turns the parameters of an update, or of a model, into small arrays and back.

    What is encoded is a float32 vector (p,) of ``layout.num_params`` finite numbers: the client's model minus
    the one it was sent or, with ``of_model``, the client's model itself, whatever its bits. Buffers and
    arrays of integers are no business of a compressor: they travel as they are, next to what it returns.
    """

    of_model: ClassVar[bool] = False
    error_feedback: bool = False
    """Whether a client adds what was lost of its last update to its next one."""

    @abstractmethod
    def describe(self) -> str:
        """Return name and settings, which client and server have to have in common."""

    @abstractmethod
    def parts(self, layout: Layout) -> Parts | None:
        """Return what :meth:`encode` will return for any vector; None where that depends on the vector."""

    @abstractmethod
    def encode(self, vector: Float32Array, layout: Layout, rng: np.random.Generator) -> Arrays:
        """Return one-dimensional arrays from which :meth:`decode` gets the vector, or one close to it."""

    @abstractmethod
    def decode(self, arrays: Mapping[str, NDArray[Any]], layout: Layout) -> Float32Array:
        """Return the vector (p,) that arrays stand for; a new array.

        Raises EncodingError for anything that :meth:`encode` does not return. The arrays may be anybody's:
        nothing larger than a few times the vector is allocated, whatever they say.
        """

    def encoded_bytes(self, layout: Layout) -> int | None:
        """Return the bytes of all arrays that a reply carries, buffers and integers among them.

        Known before training; None where it depends on the data.
        """
        parts = self.parts(layout := working_layout(layout, self))
        if parts is None:
            return None
        return parts_bytes(parts) + parts_bytes(plain_parts(layout))

    def least_bytes(self, layout: Layout) -> int:
        """Return the fewest bytes that a reply's arrays can have, whatever the client trained.

        A reply that is not compressed after all has those of the model.
        """
        working = working_layout(layout, self)
        parts = self.parts(working)
        own = mask_bytes(working.num_params) if parts is None else parts_bytes(parts)
        return min(own + parts_bytes(plain_parts(working)), layout.nbytes)


def working_layout(layout: Layout, compressor: Compressor) -> Layout:
    """Return the layout in which models are compressed, which follows from names, shapes and types alone.

    Client and server come to the same one, however each has a model in memory. Floating arrays of other
    widths than 32 bits are converted for a compressor of updates, and travel as they are for one of models.
    """
    named = {entry.name: (entry.shape, entry.dtype) for entry in layout.entries}
    found = Layout.of(named, promote=not compressor.of_model)
    return layout if layout == found else found


def plain_parts(layout: Layout) -> Parts:
    """Return the arrays that travel as they are: float buffers, and the bytes of all that is no float32."""
    buffers = layout.dim - layout.num_params
    side = sum(entry.stop - entry.start for entry in layout.entries if not entry.in_vector)
    sizes = {"buffers": ("float32", buffers), "side": ("uint8", side)}
    return {name: (dtype, length) for name, (dtype, length) in sizes.items() if length}


def parts_bytes(parts: Parts) -> int:
    """Return the bytes of arrays of such types and lengths.

    >>> parts_bytes({"indices": ("uint16", 3), "values": ("float32", 3)})
    18
    """
    return sum(np.dtype(dtype).itemsize * length for dtype, length in parts.values())


def checked(arrays: Mapping[str, NDArray[Any]], parts: Parts) -> None:
    """Raise EncodingError unless arrays have exactly these names, types and lengths."""
    if arrays.keys() != parts.keys():
        raise EncodingError(f"it holds arrays {sorted(arrays)}, expected {sorted(parts)}")
    for name, (dtype, length) in parts.items():
        array = arrays[name]
        if array.dtype != np.dtype(dtype) or array.shape != (length,):
            raise EncodingError(
                f"'{name}' is {array.dtype.name} of shape {array.shape}, expected {dtype} of ({length},)"
            )


def checked_finite(values: NDArray[Any], name: str) -> None:
    """Raise EncodingError unless all numbers are finite."""
    if not np.isfinite(values).all():
        raise EncodingError(f"'{name}' holds numbers that are not finite")


def as_float16(values: Float32Array) -> NDArray[np.float16]:
    """Return the nearest float16 of finite numbers, at most ±65504.

    >>> as_float16(np.float32([1e9, -70000, 0.1])).tolist()
    [65504.0, -65504.0, 0.0999755859375]
    """
    largest = np.float32(65504.0)
    return np.clip(values, -largest, largest).astype(np.float16)


# Bits ------------------------------------------------------------------------------------------------------


def mask_bytes(length: int) -> int:
    """Return the bytes of a bitmask over so many elements."""
    return -(-length // 8)


def unpacked_mask(mask: NDArray[np.uint8], length: int, ones: int) -> NDArray[np.bool_]:
    """Return a bitmask as booleans (length,); raises EncodingError unless it has so many ones."""
    chosen = np.unpackbits(mask, count=length).view(np.bool_)
    found = int(np.count_nonzero(chosen))
    if found != ones:
        raise EncodingError(f"'mask' chooses {found} elements, but there are {ones} values")
    return chosen


def pack_codes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes below 2^bits, for bits from 1 to 8, into ⌈n·bits / 8⌉ bytes, the first code highest.

    >>> pack_codes(np.uint8([1, 2, 3]), 3).tolist()  # 001 010 01|1
    [41, 128]
    """
    groups = -(-len(codes) // 8)
    padded = np.zeros(groups * 8, np.uint8)
    padded[: len(codes)] = codes
    # Eight codes are bits bytes, and fit into one integer.
    joined = np.zeros(groups, np.uint64)
    for column in padded.reshape(groups, 8).T:
        joined = (joined << np.uint64(bits)) | column
    joined <<= np.uint64(64 - 8 * bits)
    rows = joined.astype(">u8").view(np.uint8).reshape(groups, 8)
    return np.ascontiguousarray(rows[:, :bits]).reshape(-1)[: packed_bytes(len(codes), bits)].copy()


def unpack_codes(packed: NDArray[np.uint8], bits: int, length: int) -> NDArray[np.uint8]:
    """Return the codes (length,) that :func:`pack_codes` packed.

    >>> unpack_codes(np.uint8([41, 128]), 3, 3).tolist()
    [1, 2, 3]
    """
    groups = -(-length // 8)
    rows = np.zeros((groups, 8), np.uint8)
    flat = np.zeros(groups * bits, np.uint8)
    flat[: len(packed)] = packed
    rows[:, :bits] = flat.reshape(groups, bits)
    joined = rows.reshape(-1).view(">u8").astype(np.uint64)
    codes = np.empty((groups, 8), np.uint8)
    for column in range(8):
        codes[:, column] = (joined >> np.uint64(64 - bits * (column + 1))) & np.uint64((1 << bits) - 1)
    return codes.reshape(-1)[:length]


def packed_bytes(length: int, bits: int) -> int:
    """Return ⌈length·bits / 8⌉."""
    return -(-length * bits // 8)
