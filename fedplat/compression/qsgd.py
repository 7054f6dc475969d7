"""QSGD: every element is rounded at random to one of a few levels, so that it is right on average."""

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
    checked,
    checked_finite,
    pack_codes,
    packed_bytes,
    unpack_codes,
)

_MOST_LEVELS = 127
_CHUNK_ELEMENTS = 1 << 18


class QSGD(Compressor):
    """Stochastic quantisation to ``levels`` s per sign, for buckets of ``bucket`` elements by themselves.

    An element v of a bucket with norm N becomes sign(v)·N·ξ/s, where ξ is one of the two whole numbers around
    s·|v|/N, drawn so that its mean is s·|v|/N (Alistarh et al., NIPS 2017). N is the bucket's largest
    absolute value or, with ``norm="l2"``, its L2 norm, which gives more zeros and more noise. Sent are N as
    float32 and ⌈log₂(2s + 1)⌉ bits per element, packed without gaps; no entropy coding.

    The squared error of a bucket of n elements is on average at most n·N²/4s² and, with the L2 norm, at most
    min(n/s², √n/s)·N².
    """

    def __init__(
        self,
        *,
        levels: Annotated[int, Field(ge=1, le=_MOST_LEVELS, description="levels per sign; 7: 4 bits")] = 7,
        bucket: Annotated[int, Field(ge=1, description="elements that share a norm")] = 512,
        norm: Annotated[Literal["max", "l2"], Field(description="norm of a bucket")] = "max",
        error_feedback: Annotated[bool, Field(description="add what was lost to the next update")] = False,
    ) -> None:
        if not 1 <= levels <= _MOST_LEVELS:
            raise UserError(f"qsgd: levels is {levels}, expected 1 to {_MOST_LEVELS}; beyond that use fp16")
        if bucket < 1:
            raise UserError(f"qsgd: bucket is {bucket}, expected at least 1")
        if norm not in ("max", "l2"):
            raise UserError(f"qsgd: norm is 'max' or 'l2', not {norm!r}")
        self.levels = levels
        self.bucket = bucket
        self.norm = norm
        self.error_feedback = error_feedback

    @property
    def bits(self) -> int:
        """Bits per element."""
        return (2 * self.levels).bit_length()

    def describe(self) -> str:
        """Return name and settings."""
        return f"qsgd levels={self.levels} bucket={self.bucket} norm={self.norm}"

    def parts(self, layout: Layout) -> Parts:
        """Packed codes, and a norm per bucket."""
        length = layout.num_params
        norms = -(-length // self.bucket)
        return {"codes": ("uint8", packed_bytes(length, self.bits)), "norms": ("float32", norms)}

    def encode(self, vector: Float32Array, layout: Layout, rng: np.random.Generator) -> Arrays:
        """Return codes, which are levels plus s, and norms. Norms that overflow float32 are infinite."""
        codes = np.empty(len(vector), np.uint8)
        norms = np.empty(-(-len(vector) // self.bucket), np.float32)
        for first, last in self._chunks(len(norms)):
            part = vector[first * self.bucket : last * self.bucket]
            values = np.zeros((last - first) * self.bucket)
            values[: len(part)] = part
            rows = values.reshape(last - first, self.bucket)
            norms[first:last] = self._norms(rows)
            found = self._levels(rows, norms[first:last], rng).reshape(-1)[: len(part)]
            codes[first * self.bucket : first * self.bucket + len(part)] = found
        return {"codes": pack_codes(codes, self.bits), "norms": norms}

    def decode(self, arrays: Mapping[str, NDArray[Any]], layout: Layout) -> Float32Array:
        """Return the vector; raises EncodingError for other arrays, codes that do not exist, bad norms."""
        checked(arrays, self.parts(layout))
        norms = arrays["norms"]
        checked_finite(norms, "norms")
        if (norms < 0).any():
            raise EncodingError("'norms' holds a negative number")
        codes = unpack_codes(arrays["codes"], self.bits, layout.num_params)
        if len(codes) and int(codes.max()) > 2 * self.levels:
            raise EncodingError(f"'codes' go up to {int(codes.max())}, expected at most {2 * self.levels}")
        vector = codes.astype(np.float32)
        vector -= np.float32(self.levels)
        steps = norms / np.float32(self.levels)
        whole = len(vector) // self.bucket
        vector[: whole * self.bucket].reshape(whole, self.bucket)[...] *= steps[:whole, None]
        vector[whole * self.bucket :] *= steps[whole:]
        return vector

    def _chunks(self, buckets: int) -> list[tuple[int, int]]:
        many = max(1, _CHUNK_ELEMENTS // self.bucket)
        return [(first, min(first + many, buckets)) for first in range(0, buckets, many)]

    def _norms(self, rows: NDArray[np.float64]) -> Float32Array:
        if self.norm == "max":
            return np.abs(rows).max(axis=1).astype(np.float32)
        exact = np.sqrt(np.square(rows).sum(axis=1))
        with np.errstate(over="ignore"):
            rounded = exact.astype(np.float32)
        # Rounded up, or a lone element would lie above the highest level.
        return np.where(rounded < exact, np.nextafter(rounded, np.float32(np.inf)), rounded)

    def _levels(
        self, rows: NDArray[np.float64], norms: Float32Array, rng: np.random.Generator
    ) -> NDArray[np.uint8]:
        safe = np.where(norms > 0, norms, 1).astype(np.float64)
        scaled = np.abs(rows) * (self.levels / safe)[:, None]
        level = np.floor(scaled)
        level += rng.random(rows.shape, np.float32) < scaled - level
        np.minimum(level, self.levels, out=level)
        return (np.copysign(level, rows) + self.levels).astype(np.uint8)
