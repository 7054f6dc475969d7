"""Training in the wrong direction."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .base import Attack


class GradientAscent(Attack):
    """Train on factor·loss with a negative factor: every local step climbs the loss on right samples.

    w ← w − lr·factor·∇L. Unlike a sign flip of the update, it follows the loss uphill from step to step, so
    it grows with the number of local steps and may end in numbers that are not finite, which a server
    refuses; ``max_grad_norm`` of the training bounds it. The loss reported is the true one. The factor −1 is
    plain ascent. Shejwalkar et al., IEEE S&P 2022, who then project the update on a ball, which is left out.
    """

    def __init__(self, *, factor: Annotated[float, Field(lt=0)] = -1.0) -> None:
        self.factor = factor

    def loss_factor(self) -> float:
        """Return the factor."""
        return self.factor
