"""Clients without ill will: poor pictures and little training."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional

from fedplat.errors import UserError
from fedplat.training_config import LocalTraining
from fedplat.verdicts import UNRELIABLE

from .base import Attack
from .data import Share, drawn_samples, require_images

Probability = Annotated[float, Field(ge=0, le=1)]


def gaussian_kernel(size: int, sigma: float) -> torch.Tensor:
    """Return the values exp(−(i² + j²) / 2σ²) around the middle of (size, size), scaled to sum 1; float32.

    >>> gaussian_kernel(3, 1.0)
    tensor([[0.0751, 0.1238, 0.0751],
            [0.1238, 0.2042, 0.1238],
            [0.0751, 0.1238, 0.0751]])
    """
    offset = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    line = torch.exp(-(offset**2) / (2 * sigma**2))
    return (torch.outer(line, line) / line.sum() ** 2).float()


class Blur(Attack):
    """Per mini-batch: left out with probability ``skip``, otherwise blurred whole with probability ``blur``.

    To blur is to mirror ``padding`` pixels at every edge and to take, per channel, the mean under a Gaussian
    ``kernel`` of ``kernel`` x ``kernel`` pixels; with a sigma far above the kernel's width that is a box.
    Labels are right. Acts on the images as normalised, and draws anew for every batch, so that all samples
    are seen in the end. The image keeps its size if padding is (kernel − 1) / 2.

    The values are those of MUD-HoG's released code, by default for Fashion-MNIST. Its setting for MNIST,
    kernel 7, sigma 50, padding 2, makes 30x30 pixels of 32x32, which a model must accept. Gupta et al.,
    ESORICS 2022. Raises UserError for text, and for images smaller than the kernel or the padding.
    """

    kind: ClassVar[str] = UNRELIABLE
    images_only: ClassVar[bool] = True

    def __init__(
        self,
        *,
        skip: Probability = 0.7,
        blur: Probability = 0.5,
        kernel: Annotated[int, Field(ge=1, description="pixels along an edge")] = 5,
        sigma: Annotated[float, Field(gt=0, description="of the kernel, in pixels")] = 30.0,
        padding: Annotated[int, Field(ge=0, description="pixels mirrored at every edge")] = 2,
    ) -> None:
        self.skip = skip
        self.blur = blur
        self.kernel = kernel
        self.sigma = sigma
        self.padding = padding

    def on_batch(
        self, x: torch.Tensor, y: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return None, the blurred batch, or the batch as it is."""
        skipped, blurred = rng.random(2) < (self.skip, self.blur)
        if skipped:
            return None
        return (self.blurred(x) if blurred else x), y

    def blurred(self, x: torch.Tensor) -> torch.Tensor:
        """Return images (n, C, H, W) blurred, (n, C, H', W') with H' = H + 2·padding − kernel + 1."""
        require_images("Blur", x)
        n, channels, height, width = x.shape
        least = min(height, width)
        if self.padding >= least or self.kernel > least + 2 * self.padding:
            raise UserError(
                f"attack Blur: kernel {self.kernel} and padding {self.padding} on images {height}x{width}"
            )
        planes = functional.pad(x, (self.padding,) * 4, mode="reflect").flatten(0, 1).unsqueeze(1)
        weight = gaussian_kernel(self.kernel, self.sigma).to(x).view(1, 1, self.kernel, self.kernel)
        return functional.conv2d(planes, weight).view(n, channels, *self._size(height, width))

    def _size(self, *edges: int) -> list[int]:
        return [edge + 2 * self.padding - self.kernel + 1 for edge in edges]


class LowResolution(Attack):
    """A ``share`` of the local images, by default all, lose resolution: means of blocks, enlarged again.

    Blocks of ``factor`` x ``factor`` pixels are averaged and each mean fills its block, so that the size of
    the image stays. Where the factor does not divide an edge, the edge is cut into as few blocks of about
    that size as cover it. Labels are right. MUD-HoG names low resolution and has no code for it: everything
    here is inferred. Gupta et al., ESORICS 2022. Raises UserError for text.
    """

    kind: ClassVar[str] = UNRELIABLE
    images_only: ClassVar[bool] = True

    def __init__(
        self,
        *,
        factor: Annotated[int, Field(ge=1, description="pixels along a block's edge")] = 4,
        share: Share = 1.0,
    ) -> None:
        self.factor = factor
        self.share = share

    def on_data(
        self, x: torch.Tensor, y: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples, the drawn ones coarse."""
        require_images("LowResolution", x)
        rows = drawn_samples(len(y), self.share, rng).to(x.device)
        height, width = x.shape[2:]
        blocks = -(-height // self.factor), -(-width // self.factor)
        new = x.clone()
        if len(rows):
            small = functional.adaptive_avg_pool2d(x[rows], blocks)
            new[rows] = functional.interpolate(small, size=(height, width), mode="nearest")
        return new, y


class FewSteps(Attack):
    """Trains exactly ``steps`` mini-batches a round, whatever the others do: a client short of time.

    The data are right and the model is sent honestly, with the full sample count. Partial local work as in
    Li et al., MLSys 2020 (FedProx); one step is our default.
    """

    kind: ClassVar[str] = UNRELIABLE

    def __init__(self, *, steps: Annotated[int, Field(ge=1)] = 1) -> None:
        self.steps = steps

    def on_training(self, training: LocalTraining) -> LocalTraining:
        """Return the settings with so many steps."""
        return training.model_copy(update={"steps": self.steps})
