"""Updates as integers whose sum does not wrap around, for sums in which nobody sees the terms."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import FlatArrays, Layout
from ..errors import UserError
from ..updates import column_ranges
from .masking import Ring

_CHUNK = 1 << 16
# Integers up to here, times a factor with a rounding error or two, are still rounded to the right one.
_EXACT = 1 << 48
_LEAST_STEPS = 1 << 8


@dataclass(frozen=True)
class FixedPoint:
    """How real numbers in [−clip, clip] become elements of the ring of integers modulo 2^bits, and back.

    A sum has at most ``summands`` terms, each weighted by a whole number from 1 to ``max_weight``. With
    L = ⌊(2^(bits − 1) − 1) / summands⌋ (at most 2^48) a value x of weight w becomes
    q = round(x · w · L / (clip · max_weight)), to the nearest integer, ties to even.

    A sum cannot wrap around: |x| ≤ clip and w ≤ max_weight give |q| ≤ L, so the sum of ``summands`` such
    terms is at most summands · L ≤ 2^(bits − 1) − 1 in size, which is what a signed integer of that width
    holds. The sum modulo 2^bits therefore is the sum. Each term is off by half a step of
    clip · max_weight / L at most, and so is a weighted mean in which the mean weight is 1 or more, times
    max_weight / (mean weight).

    >>> codec = FixedPoint(clip=8.0, bits=32, summands=2)
    >>> total = codec.encode(np.array([0.5, -8.0])) + codec.encode(np.array([0.25, -9.0]))
    >>> codec.decode(total, weight=2).round(6).tolist()
    [0.375, -8.0]
    """

    clip: float
    bits: int
    summands: int
    max_weight: int = 1

    def __post_init__(self) -> None:
        """Raise UserError for settings that do not work, or leave too few steps between 0 and clip."""
        if not (math.isfinite(self.clip) and self.clip > 0):
            raise UserError(f"clip must be a number above 0, got {self.clip}")
        if self.bits not in (32, 64):
            raise UserError(f"bits must be 32 or 64, got {self.bits}")
        if self.summands < 1 or self.max_weight < 1:
            raise UserError(
                f"expected at least one term of weight 1, got {self.summands} of {self.max_weight}"
            )
        if self.limit < self.max_weight * _LEAST_STEPS:
            raise UserError(
                f"a sum of {self.summands} updates of weights up to {self.max_weight} leaves fewer than "
                f"{_LEAST_STEPS} steps in {self.bits} bits: lower max_weight, or use bits = 64"
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of ring elements."""
        return np.dtype(f"uint{self.bits}")

    @property
    def limit(self) -> int:
        """The largest size L of one term."""
        return min(((1 << (self.bits - 1)) - 1) // self.summands, _EXACT)

    @property
    def scale(self) -> float:
        """Ring elements per 1.0 of a value of weight 1."""
        return self.limit / (self.clip * self.max_weight)

    def encode(self, values: NDArray[Any], weight: int = 1) -> Ring:
        """Return values (d,) as ring elements (d,), clipped to ±clip.

        Raises ValueError for a number that is not finite or a weight outside 1 to ``max_weight``.
        """
        self._check(weight)
        out = np.empty(values.shape, self.dtype)
        for start in range(0, len(values), _CHUNK):
            part = values[start : start + _CHUNK].astype(np.float64)
            if not np.isfinite(part).all():
                raise ValueError("an update has numbers that are not finite")
            np.clip(part, -self.clip, self.clip, out=part)
            part *= weight * self.scale
            np.rint(part, out=part)
            out[start : start + _CHUNK] = part.astype(f"int{self.bits}").view(self.dtype)
        return out

    def encode_integers(self, values: NDArray[np.int64], weight: int = 1) -> Ring:
        """Return whole numbers (k,), times the weight, as ring elements; clipped to ±⌊L / max_weight⌋."""
        self._check(weight)
        most = self.limit // self.max_weight
        return (np.clip(values, -most, most) * weight).astype(f"int{self.bits}").view(self.dtype)

    def decode(self, total: Ring, weight: int) -> NDArray[np.float64]:
        """Return the weighted mean (d,) of what a sum (d,) is made of; ``weight`` is the sum of weights."""
        return total.view(f"int{self.bits}").astype(np.float64) / (self.scale * weight)

    def decode_integers(self, total: Ring, weight: int) -> NDArray[np.int64]:
        """Return the weighted mean of whole numbers, rounded to the nearest."""
        mean = total.view(f"int{self.bits}").astype(np.float64) / weight
        return np.rint(mean).astype(np.int64)

    def digest(self, model: FlatArrays) -> bytes:
        """Return a SHA-256 digest, 32 bytes, of these settings and a model: names, order, types, values."""
        settings = (float(self.clip), int(self.bits), int(self.summands), int(self.max_weight))
        arrays = [(entry.name, entry.shape, entry.dtype) for entry in model.layout.entries]
        digest = hashlib.sha256(repr((settings, arrays)).encode())
        digest.update(model.vector.data)
        for entry in model.layout.entries:
            if not entry.in_vector:  # what lies between the entries is no part of the model
                digest.update(model.side[entry.start : entry.stop].data)
        return digest.digest()

    def _check(self, weight: int) -> None:
        if not 1 <= weight <= self.max_weight:
            raise ValueError(f"a weight must be from 1 to {self.max_weight}, got {weight}")


# Models ----------------------------------------------------------------------------------------------------


def vector_length(layout: Layout) -> int:
    """Return how many ring elements stand for an update: all floats, all integers, and the weight.

    Raises UserError for arrays that hold neither.
    """
    if odd := [e.name for e in layout.entries if not e.in_vector and e.numpy_dtype.kind not in "iub"]:
        raise UserError(f"arrays {odd} hold neither real nor whole numbers, so they cannot be summed")
    return layout.dim + sum(math.prod(e.shape) for e in layout.entries if not e.in_vector) + 1


def encode_update(trained: FlatArrays, received: FlatArrays, codec: FixedPoint, weight: int = 1) -> Ring:
    """Return trained − received, integers included, and last the weight, as one vector of ring elements.

    Both models have the same layout, in which floats of all widths lie in the vector. Integers travel as
    their differences. Raises ValueError if an update has numbers that are not finite.
    """
    vector = np.empty(vector_length(received.layout), codec.dtype)
    for start, part in _differences(trained, received):
        vector[start : start + len(part)] = codec.encode(part, weight)
    integers = _integers(trained) - _integers(received)
    vector[received.layout.dim : -1] = codec.encode_integers(integers, weight)
    vector[-1] = weight
    return vector


def count_outside(trained: FlatArrays, received: FlatArrays, clip: float) -> int:
    """Return how many floats of an update lie outside ±clip."""
    return sum(int(np.count_nonzero(np.abs(part) > clip)) for _, part in _differences(trained, received))


def _differences(trained: FlatArrays, received: FlatArrays) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield the floats of an update in pieces, with the place where each begins."""
    for start, stop in column_ranges(received.layout.dim, _CHUNK):
        with np.errstate(over="ignore", invalid="ignore"):
            yield start, trained.vector[start:stop] - received.vector[start:stop]


def decode_update(total: Ring, terms: int, received: FlatArrays, codec: FixedPoint, into: FlatArrays) -> int:
    """Write received + the weighted mean update of a sum into a model, and return the sum of the weights.

    Integers move by their rounded mean difference, and stay in the range of their type. Raises ValueError if
    the sum of weights is not possible for so many terms: then one of them was not made by the rules, or its
    mask is still on.
    """
    weight = int(total[-1])
    if not terms <= weight <= terms * codec.max_weight:
        raise ValueError(
            f"the weights of {terms} updates add up to {weight}: a member did not keep to the protocol"
        )
    d = received.layout.dim
    for start, stop in column_ranges(d, _CHUNK):
        into.vector[start:stop] = received.vector[start:stop] + codec.decode(total[start:stop], weight)
    moved = _integers(received) + codec.decode_integers(total[d:-1], weight)
    start = 0
    for entry in received.layout.entries:
        if not entry.in_vector:
            stop = start + math.prod(entry.shape)
            into.side[entry.start : entry.stop].view(entry.dtype)[:] = _fitting(
                moved[start:stop], entry.dtype
            )
            start = stop
    return weight


def _integers(flat: FlatArrays) -> NDArray[np.int64]:
    """Return all whole numbers of a model (k,), those of 64 bits without sign modulo 2^64."""
    parts = [
        flat.view(entry.name).reshape(-1).astype(np.int64)
        for entry in flat.layout.entries
        if not entry.in_vector
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _fitting(values: NDArray[np.int64], dtype: str) -> NDArray[Any]:
    if np.dtype(dtype).kind == "b":
        return values > 0
    if np.dtype(dtype).itemsize < 8:
        bounds = np.iinfo(dtype)
        values = np.clip(values, bounds.min, bounds.max)
    return values.astype(dtype)
