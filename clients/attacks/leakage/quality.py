"""How near reconstructed images are to the true ones, and what guesses without any upload reach."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional

from fedplat.errors import UserError

_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2
_EXACT = 1e-10


def mse(truth: Tensor, images: Tensor) -> Tensor:
    """Return the mean squared error (n,) of every image; pixels (n, C, H, W) in [0, 1]."""
    if truth.shape != images.shape or truth.ndim != 4 or not len(truth):
        raise UserError(
            f"images of one shape are compared, not {tuple(truth.shape)} and {tuple(images.shape)}"
        )
    return (truth.double() - images.double()).square().mean(dim=(1, 2, 3))


def psnr(truth: Tensor, images: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio (n,) in dB, at most 100.

    >>> psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1)).item()
    20.0
    """
    return -10 * torch.log10(mse(truth, images).clamp(min=_EXACT)).float()


def ssim(truth: Tensor, images: Tensor) -> Tensor:
    """Return the structural similarity (n,) of images (n, C, H, W) in [0, 1]; 1 for equal ones.

    Mean over channels and over all places where an 11x11 Gaussian window (deviation 1.5) fits; images smaller
    than that get the largest odd window that fits. Wang et al., 2004, with their constants.
    """
    mse(truth, images)  # for what it refuses
    size = min(_WINDOW, *truth.shape[-2:])
    size -= 1 - size % 2
    at = torch.arange(size, dtype=torch.float64) - size // 2
    line = torch.exp(-at.square() / (2 * _SIGMA**2))
    window = (line[:, None] * line / line.sum() ** 2)[None, None]

    def blurred(values: Tensor) -> Tensor:
        return (
            functional.conv2d(values.flatten(0, 1)[:, None], window).squeeze(1).unflatten(0, values.shape[:2])
        )

    x, y = truth.double(), images.double()
    mx, my = blurred(x), blurred(y)
    vx, vy, both = blurred(x * x) - mx * mx, blurred(y * y) - my * my, blurred(x * y) - mx * my
    found = (2 * mx * my + _C1) * (2 * both + _C2) / ((mx * mx + my * my + _C1) * (vx + vy + _C2))
    return found.mean(dim=(1, 2, 3)).float()


def matched(truth: Tensor, images: Tensor) -> Tensor:
    """Return the images in the order that fits the true ones best, each used once: least sum of errors.

    Gradients do not tell the order of a batch, so none can be asked for.
    """
    mse(truth, images)
    rows, columns = linear_sum_assignment(_errors(truth, images).numpy())
    order = torch.empty(len(truth), dtype=torch.int64)
    order[torch.from_numpy(rows)] = torch.from_numpy(columns)
    return images[order]


def nearest(truth: Tensor, candidates: Tensor) -> Tensor:
    """Return for every true image the candidate (m, C, H, W) with the least error, as often as it is best."""
    return candidates[_errors(truth, candidates).argmin(dim=1)]


def class_means(images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean image of every class that has any, (classes, C, H, W), in the order of the labels."""
    if not len(labels) or len(images) != len(labels):
        raise UserError(f"{len(images)} images with {len(labels)} labels have no mean image per class")
    return torch.stack([images[labels == label].mean(dim=0) for label in labels.unique()])


def _errors(truth: Tensor, images: Tensor) -> Tensor:
    a, b = truth.flatten(1).double(), images.flatten(1).double()
    return torch.cdist(a, b).square() / a.shape[1]
