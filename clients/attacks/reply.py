"""Attacks on the reply: noise, constants, enlarged or invented models, false counts.

w is the model received, wᵢ the honestly trained one, p the number of parameters.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedplat.training_config import LocalTraining
from fedplat.verdicts import UNTARGETED

from .base import ReplyAttack

Vector = NDArray[np.float32]
Sigma = Annotated[float, Field(ge=0, description="standard deviation, per parameter")]


def normal(size: int, sigma: float, rng: np.random.Generator) -> Vector:
    """Return ``size`` draws of N(0, sigma²) as float32."""
    return rng.standard_normal(size, np.float32) * np.float32(sigma)


class GaussianNoise(ReplyAttack):
    """Send wᵢ + e with e ~ N(0, sigma²) in every parameter, drawn anew in every round.

    On the weights or on the update, it is the same. Sigma 1 is a common choice, inferred for Fed-Credit;
    MUD-HoG's additive noise, to be hard to see, has 0.01. The noise is sigma·√p long. Gupta et al., ESORICS
    2022 (additive noise); Chen et al., 2024 (Fed-Credit).
    """

    def __init__(self, *, sigma: Sigma = 1.0) -> None:
        self.sigma = sigma

    def forge(self, trained: Vector, received: Vector, rng: np.random.Generator) -> Vector:
        """Return the noisy model."""
        return trained + normal(len(trained), self.sigma, rng)


class SameValue(ReplyAttack):
    """Send the model whose every parameter is ``value``.

    The value 1 is inferred for Fed-Credit. Li et al., AAAI 2019 (RSA).
    """

    def __init__(self, *, value: float = 1.0) -> None:
        self.value = value

    def forge(self, trained: Vector, received: Vector, rng: np.random.Generator) -> Vector:
        """Return the constant model."""
        return np.full_like(trained, self.value)


class Scaling(ReplyAttack):
    """Send w + factor·(wᵢ − w): an honest update, enlarged.

    Where all n participants weigh the same and the server's rate is η, the factor n/η makes the mean the
    attacker's own model (model replacement); where sample counts weigh, it is Σ nⱼ / nᵢ. The default 10 is
    ours. For a backdoor use ``Backdoor(boost=...)``. Bagdasaryan et al., AISTATS 2020.
    """

    def __init__(self, *, factor: float = 10.0) -> None:
        self.factor = factor

    def forge(self, trained: Vector, received: Vector, rng: np.random.Generator) -> Vector:
        """Return the model with the enlarged update."""
        return received + np.float32(self.factor) * (trained - received)


class RandomWeights(ReplyAttack):
    """Send N(0, sigma²) in every parameter: a model that has nothing to do with training.

    By default sigma is the standard deviation of the parameters received, all taken together, so that the
    model looks usual in size (inferred). Lin et al., 2019 (free-riders), who draw uniformly.
    """

    def __init__(self, *, sigma: Sigma | None = None) -> None:
        self.sigma = sigma

    def forge(self, trained: Vector, received: Vector, rng: np.random.Generator) -> Vector:
        """Return the random model."""
        sigma = float(received.std(dtype=np.float64)) if self.sigma is None else self.sigma
        return normal(len(trained), sigma, rng)


class FreeRider(ReplyAttack):
    """Send w + N(0, noise²): the model received, perhaps disguised, in place of training.

    It holds the others back by its weight in the mean. Counts as malicious and untargeted: it claims work
    that it has not done. The disguise keeps its level; the paper also lets it decline over the rounds. To
    spare time a single step is trained, which only the reported loss and buffers such as BatchNorm's show.
    Fraboni et al., AISTATS 2021; no disguise by default.
    """

    kind: ClassVar[str] = UNTARGETED

    def __init__(self, *, noise: Sigma = 0.0) -> None:
        self.noise = noise

    def on_training(self, training: LocalTraining) -> LocalTraining:
        """Return the settings with one step."""
        return training.model_copy(update={"steps": 1})

    def forge(self, trained: Vector, received: Vector, rng: np.random.Generator) -> Vector:
        """Return the model received, disguised."""
        return received + normal(len(received), self.noise, rng) if self.noise else received


class InflatedCount(ReplyAttack):
    """Claim ``factor`` times as many samples as there are; the model is honest.

    A mean weighted by sample counts then listens mostly to the attacker. Rounded to whole samples. A server
    that bounds counts refuses more: in an experiment, any claim above the size of the whole training set.
    The default 10 is ours. Portnoy et al., 2020 (Byzantine-robust client weighting).
    """

    def __init__(self, *, factor: Annotated[float, Field(gt=0)] = 10.0) -> None:
        self.factor = factor

    def forge(self, trained: Vector, received: Vector, rng: np.random.Generator) -> Vector:
        """Return the trained model."""
        return trained

    def claimed(self, num_examples: int) -> int:
        """Return the inflated count."""
        return int(num_examples * self.factor + 0.5)


class NotFinite(ReplyAttack):
    """Send ``value`` in a random ``share`` of the parameters, in one at least; the others as trained.

    A single NaN makes every mean NaN. A server that checks its replies, as ours does, refuses the whole
    model, so this tests the check. The arithmetic of IEEE 754; no publication.
    """

    def __init__(
        self,
        *,
        value: Literal["nan", "inf", "-inf"] = "nan",
        share: Annotated[float, Field(gt=0, le=1, description="of the parameters")] = 1.0,
    ) -> None:
        self.value = value
        self.share = share

    def forge(self, trained: Vector, received: Vector, rng: np.random.Generator) -> Vector:
        """Return the spoilt model."""
        count = max(1, int(self.share * len(trained) + 0.5))
        spoilt = trained.copy()
        spoilt[rng.permutation(len(trained))[:count]] = np.float32(self.value)
        return spoilt
