"""Names and types of FedP3's settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Layers = Literal["lower-b", "opu2", "opu3", "opu-1-2-3", "opu-2-3", "full", "budget"]
Draw = Literal["rotation", "random", "each-round"]
Rule = Literal["simple", "weighted", "attention"]

COUNTS: dict[Layers, tuple[int, ...]] = {
    "lower-b": (1,),
    "opu2": (2,),
    "opu3": (3,),
    "opu-1-2-3": (1, 2, 3),
    "opu-2-3": (2, 3),
    "full": (),
    "budget": (),
}
"""How many layers a client may get besides the head; none stands for all."""

Share = Annotated[float, Field(gt=0, le=1)]
Shares = Annotated[
    Share | tuple[Share, ...],
    Field(
        description="of each weight's elements sent of layers a client does not train; of several, one drawn"
    ),
]
Positive = Annotated[float, Field(gt=0)] | None
