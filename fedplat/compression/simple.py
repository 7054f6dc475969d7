"""Compressors without a memory or chance: none, 16 bits per number, and zeros left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..arrays import Float32Array, Layout
from ..errors import UserError
from .base import Arrays, Compressor, Parts, as_float16, checked, checked_finite, mask_bytes, unpacked_mask

_LARGEST_BFLOAT = 0x7F7F


class Uncompressed(Compressor):
    """The model as it is, four bytes per parameter; replies are not touched at all."""

    of_model: ClassVar[bool] = True

    def describe(self) -> str:
        """Return name and settings."""
        return "none"

    def parts(self, layout: Layout) -> Parts:
        """One array of all parameters."""
        return {"values": ("float32", layout.num_params)}

    def encode(self, vector: Float32Array, layout: Layout, rng: np.random.Generator) -> Arrays:
        """Return the vector."""
        return {"values": vector.copy()}

    def decode(self, arrays: Mapping[str, NDArray[Any]], layout: Layout) -> Float32Array:
        """Return the vector; raises EncodingError if it has another length or type."""
        checked(arrays, self.parts(layout))
        return np.array(arrays["values"], np.float32)


class HalfPrecision(Compressor):
    """Two bytes per parameter, rounded to the nearest number that there is.

    ``fp16`` has 11 significant bits from 6e-5 to 65504, beyond which updates are clamped: an error of at most
    max(|x|·2⁻¹¹, 2⁻²⁵) within. ``bf16`` has the range of float32 but 8 significant bits: at most |x|·2⁻⁸.
    """

    def __init__(
        self,
        *,
        format: Annotated[Literal["fp16", "bf16"], Field(description="16-bit format")] = "fp16",
    ) -> None:
        if format not in ("fp16", "bf16"):
            raise UserError(f"a format of 16 bits is 'fp16' or 'bf16', not {format!r}")
        self.format = format

    def describe(self) -> str:
        """Return name and settings."""
        return self.format

    def parts(self, layout: Layout) -> Parts:
        """One array of all parameters; NumPy has no bf16, whose bits are sent as whole numbers."""
        return {"values": ("float16" if self.format == "fp16" else "uint16", layout.num_params)}

    def encode(self, vector: Float32Array, layout: Layout, rng: np.random.Generator) -> Arrays:
        """Return the vector in 16 bits each."""
        return {"values": as_float16(vector) if self.format == "fp16" else _as_bfloat(vector)}

    def decode(self, arrays: Mapping[str, NDArray[Any]], layout: Layout) -> Float32Array:
        """Return the vector; raises EncodingError for other arrays and numbers that are not finite."""
        checked(arrays, self.parts(layout))
        values = np.ascontiguousarray(arrays["values"])
        if self.format == "fp16":
            found = values.astype(np.float32)
        else:
            found = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        checked_finite(found, "values")
        return found


def _as_bfloat(values: Float32Array) -> NDArray[np.uint16]:
    """Return the upper halves of finite float32 numbers, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    magnitude = np.minimum(rounded & np.uint32(0x7FFF), np.uint32(_LARGEST_BFLOAT))
    return (magnitude | (rounded & np.uint32(0x8000))).astype(np.uint16)


class Sparse(Compressor):
    """The model without its zeros, bit for bit: a bitmask and what is not zero.

    For models that are pruned or masked; one with few zeros is sent whole, four bytes per parameter. −0.0
    counts as a number. The size depends on the model.
    """

    of_model: ClassVar[bool] = True

    def describe(self) -> str:
        """Return name and settings."""
        return "sparse"

    def parts(self, layout: Layout) -> None:
        """Nothing that is known before training."""
        return None

    def encode(self, vector: Float32Array, layout: Layout, rng: np.random.Generator) -> Arrays:
        """Return mask and values, or all values where that is not more."""
        chosen = np.ascontiguousarray(vector).view(np.uint32) != 0
        count = int(np.count_nonzero(chosen))
        if mask_bytes(len(vector)) + 4 * count >= 4 * len(vector):
            return {"values": vector.copy()}
        return {"mask": np.packbits(chosen), "values": vector[chosen]}

    def decode(self, arrays: Mapping[str, NDArray[Any]], layout: Layout) -> Float32Array:
        """Return the vector, any number at all; raises EncodingError if the arrays do not go together."""
        length = layout.num_params
        if arrays.keys() == {"values"}:
            checked(arrays, {"values": ("float32", length)})
            return np.array(arrays["values"], np.float32)
        # Never more values than there are elements, or the mask could not have as many ones.
        values = min(arrays["values"].size, length) if "values" in arrays else length
        checked(arrays, {"mask": ("uint8", mask_bytes(length)), "values": ("float32", values)})
        chosen = unpacked_mask(arrays["mask"], length, values)
        vector = np.zeros(length, np.float32)
        vector[chosen] = arrays["values"]
        return vector
