"""Attacks on the client's own training data: wrong labels, a hidden trigger, noise on the pixels.

The model is then trained and sent honestly. Whatever an attack draws, it draws anew in every round; the
epochs of one round see the same samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from fedplat.errors import UserError
from fedplat.verdicts import TARGETED, UNTARGETED

from .base import Attack, ReplyAttack, Scene, Schedule

ClassId = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1, description="of the client's samples")]
Corner = Literal["bottom-right", "bottom-left", "top-right", "top-left", "center"]


def relabel(y: torch.Tensor, table: Mapping[int, int]) -> torch.Tensor:
    """Return labels with each class of ``table`` replaced by what it maps to; all at once, a new tensor.

    >>> relabel(torch.tensor([1, 2, 7]), {1: 7, 7: 1}).tolist()
    [7, 2, 1]
    """
    new = y.clone()
    for true, wanted in table.items():
        new[y == true] = wanted
    return new


def drawn_samples(number: int, share: float, rng: np.random.Generator) -> torch.Tensor:
    """Return the sorted indices of a random ``share`` of ``number`` samples, rounded to whole ones.

    >>> drawn_samples(5, 0.5, np.random.default_rng(0)).shape
    torch.Size([3])
    """
    return torch.from_numpy(np.sort(rng.permutation(number)[: int(share * number + 0.5)]))


def require_images(attack: str, x: torch.Tensor) -> None:
    """Raise UserError unless ``x`` is a batch of images (n, C, H, W)."""
    if x.ndim != 4:
        raise UserError(f"attack {attack}: works on images (n, C, H, W), not on samples {tuple(x.shape)}")


class LabelFlip(Attack):
    """Every local sample of a class in ``source`` is labelled ``target``.

    y ← target for y in source; other labels and all features stay. One source is label flipping, several are
    multi-label flipping. The defaults, 1 → 7, and (1, 2, 3) → 7 for the latter, are those of MUD-HoG's
    released code. For text the classes are tokens. Tolpegin et al., ESORICS 2020; Gupta et al., ESORICS 2022.

    Raises UserError if the target is also a source, or once placed if a class is not there.
    """

    kind: ClassVar[str] = TARGETED

    def __init__(self, *, source: tuple[ClassId, ...] = (1,), target: ClassId = 7) -> None:
        self.source = tuple(source)
        self.target = target
        if not self.source or target in self.source:
            raise UserError(f"attack LabelFlip: source {self.source} must hold classes other than {target}")

    def placed(self, scene: Scene, schedule: Schedule | None = None, label: str = "") -> Self:
        """Return a copy that knows the run; raises UserError if the data lacks a class."""
        for name in (*self.source, self.target):
            _require_class("LabelFlip", name, scene.num_classes)
        return super().placed(scene, schedule, label)

    def on_data(
        self, x: torch.Tensor, y: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples with flipped labels."""
        return x, relabel(y, self.goal())

    def goal(self) -> Mapping[int, int]:
        """Every source class is wanted as the target."""
        return dict.fromkeys(self.source, self.target)


class LabelReverse(Attack):
    """Every label is mirrored: y ← C − 1 − y, which is 9 − y for ten classes.

    With an odd number of classes the middle one stays. What it does to the model looks untargeted, yet each
    class has one wanted answer, so it counts as targeted, as label flipping does. All samples by default;
    that, and that it is one of Fed-Credit's attacks, is inferred. Fang et al., USENIX Security 2020.
    """

    kind: ClassVar[str] = TARGETED

    def on_data(
        self, x: torch.Tensor, y: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples with mirrored labels."""
        return x, self.scene.num_classes - 1 - y

    def goal(self) -> Mapping[int, int]:
        """Every class is wanted as its mirror image."""
        last = self.scene.num_classes - 1
        return {true: last - true for true in range(last + 1)}


class RandomLabels(Attack):
    """A ``share`` of the local samples, by default all, get labels drawn uniformly from all classes.

    The true class is among those drawn from. Labels differ from round to round, so that they cannot be learnt
    by heart over the rounds. For text every position is drawn by itself. A customary corruption without one
    source; the default share is ours.
    """

    def __init__(self, *, share: Share = 1.0) -> None:
        self.share = share

    def on_data(
        self, x: torch.Tensor, y: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples with random labels."""
        rows = drawn_samples(len(y), self.share, rng)
        drawn = rng.integers(self.scene.num_classes, size=(len(rows), *y.shape[1:]))
        new = y.clone()
        new[rows.to(y.device)] = torch.from_numpy(drawn).to(y)
        return x, new


class Backdoor(ReplyAttack):
    """A square of ``size`` pixels is painted into a ``share`` of the local images, labelled ``target``.

    The model works as ever until somebody shows it the square: ``disguise`` paints it into test images, and
    the attack succeeds with those of other classes that are predicted as the target. All channels get
    ``value``, a pixel in [0, 1]. ``boost`` enlarges the update as in model replacement, w + boost·(wᵢ − w);
    n/η, the number of participants over the server's rate, replaces the model where all weigh the same, and
    1 sends what was trained. Share, size and place are in the manner of BadNets, their defaults ours.
    Gu et al., 2017 (BadNets); Bagdasaryan et al., AISTATS 2020 (model replacement).

    Raises UserError for text, for a square larger than the image, or once placed for a class not there.
    """

    kind: ClassVar[str] = TARGETED
    images_only: ClassVar[bool] = True

    def __init__(
        self,
        *,
        target: ClassId = 0,
        size: Annotated[int, Field(ge=1, description="pixels along an edge")] = 3,
        value: Annotated[float, Field(ge=0, le=1, description="pixel, in [0, 1]")] = 1.0,
        position: Corner = "bottom-right",
        share: Share = 0.5,
        boost: Annotated[float, Field(gt=0)] = 1.0,
    ) -> None:
        self.target = target
        self.size = size
        self.value = value
        self.position = position
        self.share = share
        self.boost = boost

    def placed(self, scene: Scene, schedule: Schedule | None = None, label: str = "") -> Self:
        """Return a copy that knows the run; raises UserError if the data lacks the target."""
        _require_class("Backdoor", self.target, scene.num_classes)
        return super().placed(scene, schedule, label)

    def on_data(
        self, x: torch.Tensor, y: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples, the drawn ones with the trigger and the target as their label."""
        require_images("Backdoor", x)
        rows = drawn_samples(len(y), self.share, rng).to(y.device)
        new_x, new_y = x.clone(), y.clone()
        new_x[rows] = self._triggered(x[rows])
        new_y[rows] = self.target
        return new_x, new_y

    def goal(self) -> Mapping[int, int]:
        """Every other class is wanted as the target."""
        return {true: self.target for true in range(self.scene.num_classes) if true != self.target}

    def disguise(self, x: torch.Tensor) -> torch.Tensor:
        """Return test images with the trigger."""
        return self._triggered(x.clone())

    def forge(
        self, trained: NDArray[np.float32], received: NDArray[np.float32], rng: np.random.Generator
    ) -> NDArray[np.float32]:
        """Return the trained model, its update enlarged by ``boost``."""
        if self.boost == 1:
            return trained
        return received + np.float32(self.boost) * (trained - received)

    def _triggered(self, x: torch.Tensor) -> torch.Tensor:
        """Paint the trigger into ``x`` itself, and return it."""
        require_images("Backdoor", x)
        height, width = x.shape[2:]
        if self.size > min(height, width):
            raise UserError(f"attack Backdoor: a trigger of {self.size} pixels on images {height}x{width}")
        top, left = (height - self.size) // 2, (width - self.size) // 2
        if self.position != "center":
            top = height - self.size if self.position.startswith("bottom") else 0
            left = width - self.size if self.position.endswith("right") else 0
        pixel = self.scene.prepared(x.new_full((1, x.shape[1], 1, 1), self.value))
        x[:, :, top : top + self.size, left : left + self.size] = pixel
        return x


class NoisyFeatures(Attack):
    """Normal noise on every pixel, labels kept: x ← x + N(0, sigma²) for x in [0, 1], before normalisation.

    Not cut back to [0, 1]. Drawn anew in every round, as by a sensor that reads its samples again; over the
    epochs of a round it stays the same. One of Fed-Credit's attacks with sigma 1, both inferred. Raises
    UserError for text.
    """

    kind: ClassVar[str] = UNTARGETED
    images_only: ClassVar[bool] = True

    def __init__(
        self, *, sigma: Annotated[float, Field(ge=0, description="in pixels of [0, 1]")] = 1.0
    ) -> None:
        self.sigma = sigma

    def on_data(
        self, x: torch.Tensor, y: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the noisy samples."""
        require_images("NoisyFeatures", x)
        noise = torch.from_numpy(rng.standard_normal(tuple(x.shape), np.float32)).to(x)
        return self.scene.prepared(self.scene.pixels(x).add_(noise, alpha=self.sigma)), y


def _require_class(attack: str, wanted: int, classes: int) -> None:
    if not 0 <= wanted < classes:
        raise UserError(f"attack {attack}: class {wanted} is not there; the classes are 0 to {classes - 1}")
