"""Settings that are a range from low to high, of which every device draws its own value."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from ..errors import UserError

MOST = 1e12
"""The largest memory in MB and speed in Mbit/s; bytes and bit/s then fit into 64-bit integers."""


def ordered(span: tuple[float, float]) -> tuple[float, float]:
    """Return the range if it goes from low to high, else raise ValueError."""
    if not span[0] <= span[1]:
        raise ValueError(f"[{span[0]:g}, {span[1]:g}] has to go from low to high")
    return span


Chance = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Chances = Annotated[tuple[Chance, Chance], AfterValidator(ordered)]
Amounts = Annotated[tuple[Amount, Amount], AfterValidator(ordered)]
Positives = Annotated[tuple[Positive, Positive], AfterValidator(ordered)]


def check_range(name: str, span: tuple[float, float], most: float = MOST, above_zero: bool = False) -> None:
    """Raise UserError unless ``span`` goes from low to high within 0 and ``most``.

    >>> check_range("p", (0.3, 0.95), most=1)
    """
    low, high = span
    if not 0 <= low <= high <= most or (above_zero and low == 0):
        least = "above 0" if above_zero else "0"
        raise UserError(f"{name} is ({low}, {high}), expected a range from low to high, {least} to {most:g}")
