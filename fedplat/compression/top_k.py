"""Top-k: of every update only the largest changes are sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..arrays import Float32Array, Layout
from ..errors import UserError
from .base import (
    Arrays,
    Compressor,
    EncodingError,
    Parts,
    as_float16,
    checked,
    checked_finite,
    mask_bytes,
    unpacked_mask,
)


class TopK(Compressor):
    """Sends the ``fraction`` of an update's elements that are largest in absolute value, the rest later.

    The largest of the whole vector or, ``per_layer``, of each array: round(fraction·size), at least one. Of
    equal elements those with the lower index. Where they are is told by sorted 16- or 32-bit indices, or by a
    bitmask if that is smaller; with a fraction of 1 it is not told. ``values`` is how they are sent.

    With ``error_feedback`` a client remembers what it did not send, rounding included, and adds it to its
    next update, so that nothing is lost, only late (Stich et al., NeurIPS 2018). That takes four bytes per
    parameter on the client, and what the server then leaves out, because it came late, is lost after all.
    """

    def __init__(
        self,
        *,
        fraction: Annotated[float, Field(gt=0, le=1, description="share of elements that is sent")] = 0.01,
        error_feedback: Annotated[bool, Field(description="send later what was not sent")] = True,
        values: Annotated[
            Literal["float32", "float16"], Field(description="type of the values sent")
        ] = "float32",
        per_layer: Annotated[bool, Field(description="the largest of each array, not of all")] = False,
    ) -> None:
        if not 0 < fraction <= 1:
            raise UserError(f"top-k: fraction is {fraction}, expected a number above 0 and at most 1")
        if values not in ("float32", "float16"):
            raise UserError(f"top-k: values are sent as 'float32' or 'float16', not {values!r}")
        self.fraction = fraction
        self.error_feedback = error_feedback
        self.values = values
        self.per_layer = per_layer

    def describe(self) -> str:
        """Return name and settings."""
        return f"top-k fraction={self.fraction} values={self.values} per_layer={self.per_layer}"

    def count(self, layout: Layout) -> int:
        """Return how many elements are sent."""
        return sum(self._of(stop - start) for start, stop in self._ranges(layout))

    def parts(self, layout: Layout) -> Parts:
        """Values, and indices or a mask unless all are sent."""
        length, count = layout.num_params, self.count(layout)
        values: Parts = {"values": (self.values, count)}
        if count == length:
            return values
        index = "uint16" if length <= 1 << 16 else "uint32"
        if mask_bytes(length) <= count * np.dtype(index).itemsize:
            return {"mask": ("uint8", mask_bytes(length)), **values}
        return {"indices": (index, count), **values}

    def encode(self, vector: Float32Array, layout: Layout, rng: np.random.Generator) -> Arrays:
        """Return the largest elements and where they are."""
        parts, size = self.parts(layout), np.abs(vector)
        where = np.concatenate(
            [
                start + largest(size[start:stop], self._of(stop - start))
                for start, stop in self._ranges(layout)
            ]
            or [np.zeros(0, np.int64)]
        )
        found = vector[where]
        arrays: Arrays = {"values": as_float16(found) if self.values == "float16" else found}
        if "mask" in parts:
            chosen = np.zeros(len(vector), np.bool_)
            chosen[where] = True
            arrays["mask"] = np.packbits(chosen)
        elif "indices" in parts:
            arrays["indices"] = where.astype(parts["indices"][0])
        return arrays

    def decode(self, arrays: Mapping[str, NDArray[Any]], layout: Layout) -> Float32Array:
        """Return the vector with zeros for what was not sent; raises EncodingError for other arrays."""
        length, parts = layout.num_params, self.parts(layout)
        checked(arrays, parts)
        values = arrays["values"].astype(np.float32)
        checked_finite(values, "values")
        if "mask" in parts:
            where: NDArray[Any] = unpacked_mask(arrays["mask"], length, len(values))
        elif "indices" in parts:
            where = arrays["indices"]
            if not (where[1:] > where[:-1]).all():
                raise EncodingError("'indices' are not in order, or some come twice")
            if len(where) and int(where[-1]) >= length:
                raise EncodingError(f"'indices' go up to {int(where[-1])}, but there are {length} elements")
        else:
            return values
        vector = np.zeros(length, np.float32)
        vector[where] = values
        return vector

    def _of(self, size: int) -> int:
        return min(size, max(1, round(self.fraction * size)))

    def _ranges(self, layout: Layout) -> list[tuple[int, int]]:
        if not self.per_layer:
            return [(0, layout.num_params)]
        ranges = [(e.start, e.stop) for e in layout.entries if e.in_vector and e.stop <= layout.num_params]
        return sorted(span for span in ranges if span[0] < span[1])


def largest(sizes: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Return the sorted places of the ``count`` largest numbers (n,); of equal ones the first.

    >>> largest(np.array([2.0, 5.0, 2.0, 7.0]), 3).tolist()
    [0, 1, 3]
    """
    if count >= len(sizes):
        return np.arange(len(sizes))
    least = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    above = np.flatnonzero(sizes > least)
    ties = np.flatnonzero(sizes == least)[: count - len(above)]
    return np.sort(np.concatenate([above, ties]))
