"""Gradient inversion: a client's images and labels from the layers that it uploads.

Labels come from the head's bias, in closed form for one sample; the input of a linear layer too; images are
searched for whose gradient would have looked the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedplat.errors import UserError

from ..base import Scene
from .upload import Upload, simulated, tensors_of

_DECAY_AT = (3 / 8, 5 / 8, 7 / 8)
_LARGEST_BATCH = 64


@dataclass(frozen=True)
class Inversion:
    """How the search goes: the same number of steps for whatever was uploaded.

    ================ =======================================================================================
    ``iterations``   steps of Adam per start
    ``restarts``     starts from noise; the one with the lowest objective counts
    ``lr``           step in pixels of [0, 1], divided by ten at 3/8, 5/8 and 7/8 of the steps
    ``tv``           weight of the images' total variation in the objective
    ``match``        ``cosine``: one minus the cosine between gradients; ``l2``: their squared distance,
                     relative
    ``signed``       whether Adam sees the signs of the objective's gradient alone
    ================ =======================================================================================

    ``cosine`` with signs and total variation is Geiping et al., NeurIPS 2020; ``l2`` without either is the
    objective of Zhu et al., NeurIPS 2019, made for smooth activations. With ReLU the objective has a gradient
    almost everywhere, but jumps where a unit turns on or off.
    """

    iterations: int = 300
    restarts: int = 2
    lr: float = 0.1
    tv: float = 0.01
    match: Literal["cosine", "l2"] = "cosine"
    signed: bool = True

    def __post_init__(self) -> None:
        if self.iterations < 1 or self.restarts < 1:
            raise UserError("an inversion takes 1 or more iterations and restarts")
        if not 0 < self.lr < math.inf or not 0 <= self.tv < math.inf:
            raise UserError(f"inversion: lr = {self.lr} has to be above 0 and tv = {self.tv} not below")
        if self.match not in ("cosine", "l2"):
            raise UserError(f"inversion: match = '{self.match}': expected 'cosine' or 'l2'")


@dataclass(frozen=True)
class Reconstruction:
    """Images found, as pixels (n, C, H, W) in [0, 1], their labels (n,), and the objective they reach."""

    pixels: Tensor
    labels: Tensor
    objective: float


# Closed forms ----------------------------------------------------------------------------------------------


def labels_of(gradient: Tensor, count: int, expected: Tensor | None = None) -> Tensor:
    """Return the labels (count,) of a batch, ascending, from the gradient (C,) of the head's bias.

    That of class c is what the softmax gave c, mean over the samples, minus the share of samples that are c.
    So for one sample the only negative entry is its label, exactly. For more, every class with a negative
    entry has a sample; how many is estimated with ``expected`` (C,), the mean softmax that the model is
    thought to give, by default 1/C. The gradient (C, F) of the head's weight does for one sample if its
    inputs are not negative, as behind a ReLU. Raises UserError for all else, and where there is no gradient.

    Zhao et al., 2020 (iDLG) for one sample; the counts after Wainakh et al., PETS 2022, simplified.

    >>> labels_of(torch.tensor([0.2, -0.5, 0.3]), 1).tolist()
    [1]
    """
    if not 1 <= count <= _LARGEST_BATCH:
        raise UserError(f"batches of 1 to {_LARGEST_BATCH} samples have their labels inferred, not {count}")
    if gradient.ndim == 2 and count == 1:
        gradient = gradient.sum(dim=1)
    if gradient.ndim != 1 or not bool(gradient.isfinite().all()):
        raise UserError(
            "labels are inferred from the finite gradient (C,) of the head's bias, or of its weight (C, F) "
            "for a single sample"
        )
    if not bool(gradient.any()):
        raise UserError("the head has no gradient, so no label can be told from it")
    if count == 1:
        return gradient.argmin()[None]
    mean = torch.full_like(gradient, 1 / len(gradient)) if expected is None else expected
    if mean.shape != gradient.shape:
        raise UserError(f"expected {len(gradient)} mean probabilities, got {tuple(mean.shape)}")
    left = count * (mean.double() - gradient.double())
    found = [int(c) for c in gradient.argsort() if gradient[c] < 0][:count]
    left[found] -= 1
    while len(found) < count:
        found.append(int(left.argmax()))
        left[found[-1]] -= 1
    return torch.tensor(sorted(found))


def input_of(weight: Tensor, bias: Tensor) -> Tensor:
    """Return the input (F,) of a linear layer from one sample's gradients of its weight (O, F) and bias (O,).

    Each row of the weight's gradient is the input times that of the bias; rows are weighted by the latter's
    square. For a batch it is a mixture of the inputs. Raises UserError if the bias has no gradient.

    Phong et al., 2018; Geiping et al., NeurIPS 2020, proposition 3.1.

    >>> input_of(torch.tensor([[1.0, 2.0], [-2.0, -4.0]]), torch.tensor([0.5, -1.0])).tolist()
    [2.0, 4.0]
    """
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise UserError(
            f"expected gradients of a linear layer, (O, F) and (O,); got {tuple(weight.shape)} and "
            f"{tuple(bias.shape)}"
        )
    square = bias.double().square().sum()
    if not float(square) > 0:
        raise UserError("the bias of this layer has no gradient, so its input cannot be told")
    return (bias.double() @ weight.double() / square).float()


# The search ------------------------------------------------------------------------------------------------


def invert(
    module: nn.Module,
    upload: Upload,
    labels: Tensor,
    scene: Scene,
    settings: Inversion,
    rng: np.random.Generator,
) -> Reconstruction:
    """Search for images with such labels (n,) whose training would have changed the model as the upload says.

    Only the arrays of the upload are compared. ``scene`` tells the images' shape and how pixels are prepared.
    Of several starts the one counts that the server would take, by its own objective. ``module`` lends its
    layers. Raises UserError for a model with BatchNorm or other buffers, for data that are no images, and for
    an upload that equals what was sent.
    """
    if any(True for _ in module.buffers()):
        raise UserError("gradients are inverted for models without buffers: BatchNorm mixes the samples")
    if len(scene.sample_shape) != 3:
        raise UserError("gradients are inverted for images, and these data are none")
    target = upload.gradient
    if not sum(float(g.square().sum()) for g in target.values()) > 0:
        raise UserError("the upload equals what was sent, so there is no gradient to invert")
    runs = [_run(module, upload, target, labels, scene, settings, rng) for _ in range(settings.restarts)]
    return min(runs, key=lambda run: run.objective)


def _run(
    module: nn.Module,
    upload: Upload,
    target: Mapping[str, Tensor],
    labels: Tensor,
    scene: Scene,
    settings: Inversion,
    rng: np.random.Generator,
) -> Reconstruction:
    start = tensors_of(upload.sent)
    noise = rng.uniform(0, 1, (len(labels), *scene.sample_shape)).astype(np.float32)
    pixels = torch.from_numpy(noise).requires_grad_()
    adam = torch.optim.Adam([pixels], lr=settings.lr)
    milestones = [int(share * settings.iterations) for share in _DECAY_AT]
    schedule = torch.optim.lr_scheduler.MultiStepLR(adam, milestones, gamma=0.1)
    best, lowest = pixels.detach().clone(), math.inf
    for _ in range(settings.iterations):
        guess = simulated(
            module, start, target.keys(), scene.prepared(pixels), labels, upload.lr, upload.steps
        )
        objective = distance(target, guess, settings.match) + settings.tv * total_variation(pixels)
        # The last images need not be the best: signed steps overshoot.
        if (value := float(objective.detach())) < lowest:
            best, lowest = pixels.detach().clone(), value
        (pixels.grad,) = torch.autograd.grad(objective, [pixels])
        if settings.signed:
            pixels.grad.sign_()
        adam.step()
        schedule.step()
        with torch.no_grad():
            pixels.clamp_(0, 1)
    return Reconstruction(best, labels, lowest)


def distance(target: Mapping[str, Tensor], guess: Mapping[str, Tensor], match: str) -> Tensor:
    """Return how far gradients are apart: one minus their cosine, or squared distance over squared length.

    All arrays are one vector; neither depends on its length.

    >>> a, b = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([4.0, -3.0])}
    >>> distance(a, b, "cosine").item(), distance(a, b, "l2").item()
    (1.0, 2.0)
    """
    length = torch.stack([g.square().sum() for g in target.values()]).sum()
    if match == "l2":
        apart = torch.stack([(guess[name] - g).square().sum() for name, g in target.items()]).sum()
        return apart / length
    along = torch.stack([(guess[name] * g).sum() for name, g in target.items()]).sum()
    own = torch.stack([guess[name].square().sum() for name in target]).sum()
    return 1 - along / (length * own + 1e-30).sqrt()


def total_variation(images: Tensor) -> Tensor:
    """Return the mean absolute difference between neighbouring pixels of images (n, C, H, W)."""
    down, across = images.diff(dim=-2).abs().mean(), images.diff(dim=-1).abs().mean()
    return down + across
