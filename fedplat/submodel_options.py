"""What a training message says about the sub-model it brings, under which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedplat.errors import UserError
from fedplat.models.cutting import Sizes

SIZES = "fedplat.sizes"
"""Sizes of the sub-model, as ``Sizes.dumps`` writes them; without it, the message brings the whole model."""
KIND = "fedplat.submodel"
"""Which part of the model it is: momentum is kept as long as that stays the same."""
SCALER = "fedplat.scaler"
"""``off``, ``training`` or ``always``: whether layers divide their outputs by their share of the units."""
WIDTHS = "fedplat.widths"
"""Ordered dropout: widths to draw from, as a list with commas, in shares of the whole model's units."""
DISTILLATION = "fedplat.distillation"
"""Ordered dropout: weight of the distillation from the client's whole sub-model."""
MASKED_LOSS = "fedplat.masked-loss"
"""Whether logits of classes that the client does not have are set to 0 in the loss."""
STATIC_NORM = "fedplat.static-norm"
"""Whether running statistics of BatchNorm stay as they were sent."""


@dataclass(frozen=True)
class Shape:
    """What a client has to build: equal shapes are of one module."""

    sizes: str = ""
    scaler: str = "off"
    static_norm: bool = False


@dataclass(frozen=True)
class SubModelOptions:
    """How a client trains what it was sent; the defaults are for the whole model."""

    shape: Shape = Shape()
    kind: str = ""
    widths: tuple[float, ...] = ()
    distillation: float = 0.0
    masked_loss: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> SubModelOptions:
        """Read them from a message's configuration; raises UserError for what cannot be read."""
        if not any(key in config for key in (SIZES, SCALER, WIDTHS, MASKED_LOSS, STATIC_NORM)):
            return _WHOLE
        try:
            widths = tuple(float(text) for text in str(config.get(WIDTHS, "")).split(",") if text)
            distillation = float(config.get(DISTILLATION, 0.0))
        except ValueError as error:
            raise UserError(
                f"{WIDTHS} and {DISTILLATION} of a message have to be numbers: {error}"
            ) from error
        shape = Shape(
            str(config.get(SIZES, "")), str(config.get(SCALER, "off")), bool(config.get(STATIC_NORM, False))
        )
        return cls(
            shape, str(config.get(KIND, "")), widths, distillation, bool(config.get(MASKED_LOSS, False))
        )

    @property
    def plain(self) -> bool:
        """Whether training is the usual one, on whatever module."""
        return len(self.widths) < 2 and not self.masked_loss

    def sizes(self) -> Sizes | None:
        """Return the sizes of the sub-model; None for the whole model."""
        return Sizes.loads(self.shape.sizes) if self.shape.sizes else None


_WHOLE = SubModelOptions()
