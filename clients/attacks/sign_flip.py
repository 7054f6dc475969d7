"""Sign flipping: train honestly, then send the opposite."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .base import ReplyAttack


class SignFlip(ReplyAttack):
    """Send w + factor·(wᵢ − w) for ``of="delta"``, or factor·wᵢ for ``of="weights"``.

    w is the model received, wᵢ the honestly trained one; factor −1 turns the sign, −4 turns and enlarges it.
    Li et al., AAAI 2019 (RSA).
    """

    def __init__(self, *, of: Literal["delta", "weights"] = "delta", factor: float = -1.0) -> None:
        self.of = of
        self.factor = factor

    def forge(
        self, trained: NDArray[np.float32], received: NDArray[np.float32], rng: np.random.Generator
    ) -> NDArray[np.float32]:
        """Return the turned model."""
        factor = np.float32(self.factor)
        return factor * trained if self.of == "weights" else received + factor * (trained - received)
