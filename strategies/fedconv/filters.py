"""FedConv's filters: small convolutions over weights that make a model smaller, or large again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedplat.errors import UserError
from fedplat.models.cutting import ArrayAxes, CutPlan, Sizes

Init = Literal["random", "delta"]
Residual = Literal["all", "conv"]

# From so many numbers of a kernel on, Fourier transforms are faster than sums, and exact up to rounding.
_FOURIER_FROM = 1 << 11


@dataclass(frozen=True)
class BlockSettings:
    """How a filter is built.

    ===================== ============================================================================
    ``channels``          channels of the projection: 1 -> channels -> 1 by 1x1 convolutions; with 1, one
                          1x1 convolution
    ``residual``          which arrays add what came in to their projection: all, or those of convolutions
    ``activation``        slopes for positive and negative numbers after the convolution; None: identity
    ``activation_times``  how often it is applied (the released code: twice)
    ``init``              random: torch's defaults; delta: the filter takes the first units as they are
    ===================== ============================================================================
    """

    channels: int = 16
    residual: Residual = "all"
    activation: tuple[float, float] | None = None
    activation_times: int = 1
    init: Init = "delta"


@dataclass(frozen=True)
class Matrices:
    """An array seen as ``positions`` matrices of rows and columns, the units of its first two axes.

    Positions are the places of a kernel, the pixels of a channel that was flattened, the gates of an LSTM.
    A vector is a matrix of one row.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]
    rows: int
    columns: int

    @classmethod
    def of(cls, array: ArrayAxes, counts: Mapping[str, int]) -> Matrices:
        """See the array of a model with so many units in each group; raises UserError if that cannot be."""
        if not array.shape or any(axis is not None for axis in array.axes[2:]):
            raise UserError(
                f"fedconv: '{array.name}' of shape {array.shape} is no vector, matrix or kernel whose first "
                "two axes are units; take another model"
            )
        split: list[int] = []
        shape: list[int] = []
        for length, axis in zip(array.shape[:2], array.axes[:2], strict=True):
            parts = (1, length, 1) if axis is None else (axis.blocks, counts[axis.group], axis.repeat)
            split += parts
            shape.append(prod(parts))
        split += array.shape[2:]
        units = [1, 4][: len(shape)]
        places = [dim for dim in range(len(split)) if dim not in units]
        rows = split[1] if len(units) == 2 else 1
        return cls((*shape, *array.shape[2:]), tuple(split), (*places, *units), rows, split[units[-1]])

    @property
    def positions(self) -> int:
        """The number of matrices."""
        return prod(self.shape) // (self.rows * self.columns)

    def take(self, array: Tensor) -> Tensor:
        """Return the matrices (positions, rows, columns) of an array."""
        return array.reshape(self.split).permute(self.order).reshape(-1, self.rows, self.columns)

    def put(self, matrices: Tensor) -> Tensor:
        """Return the array of matrices (positions, rows, columns)."""
        permuted = matrices.reshape([self.split[dim] for dim in self.order])
        return permuted.permute([self.order.index(dim) for dim in range(len(self.order))]).reshape(self.shape)


class FilterBlock(nn.Module):
    """The filters of one array, one per position: projection, residual, convolution, activation.

    The two 1x1 convolutions of a projection have nothing between them, so they are a·w + b per position,
    with a and b formed of their weights: the same function and gradients without the channels. The kernel is
    weight-normalised, one magnitude per position.
    """

    def __init__(
        self, large: Matrices, small: Matrices, settings: BlockSettings, enlarge: bool, rng: torch.Generator
    ) -> None:
        super().__init__()
        self.source, self.target = (small, large) if enlarge else (large, small)
        self.enlarge = enlarge
        self.settings = settings
        self.residual = settings.residual == "all" or len(large.shape) > 2
        size = (large.rows - small.rows + 1, large.columns - small.columns + 1)
        places, channels, delta = large.positions, settings.channels, settings.init == "delta"

        def uniform(bound: float, *shape: int) -> Tensor:
            return (2 * torch.rand(shape, generator=rng) - 1) * bound

        kernel = uniform(prod(size) ** -0.5, places, *size)
        first, shift = uniform(1.0, places, channels), uniform(1.0, places, channels)
        last, last_shift = (uniform(channels**-0.5, places, channels), uniform(channels**-0.5, places))
        if delta:
            kernel = torch.zeros(places, *size)
            kernel[:, 0, 0] = 1
            last, last_shift = torch.zeros_like(last), torch.zeros_like(last_shift)
            if channels == 1:  # there is no second convolution that could be zero
                first, shift = torch.full_like(first, 0.0 if self.residual else 1.0), torch.zeros_like(shift)
            elif not self.residual:
                first, shift = torch.ones_like(first), torch.zeros_like(shift)
                last = torch.full_like(last, 1 / channels)
        self.first, self.shift = nn.Parameter(first), nn.Parameter(shift)
        if channels > 1:
            self.last, self.last_shift = nn.Parameter(last), nn.Parameter(last_shift)
        self.magnitude = nn.Parameter(kernel.flatten(1).norm(dim=1))
        if size == (1, 1):
            # One number has a sign for a direction: its gradient is rounding, which Adam would walk along.
            self.register_buffer("kernel", kernel, persistent=False)
        else:
            self.kernel = nn.Parameter(kernel)

    def forward(self, array: Tensor) -> Tensor:
        """Return the array of the other size."""
        x = self.source.take(array)
        if self.settings.channels > 1:
            scale = (self.first * self.last).sum(1)
            shift = (self.shift * self.last).sum(1) + self.last_shift
        else:
            scale, shift = self.first[:, 0], self.shift[:, 0]
        y = scale[:, None, None] * x + shift[:, None, None]
        if self.residual:
            y = y + x
        norm = self.kernel.flatten(1).norm(dim=1)
        kernel = self.kernel * (self.magnitude / norm)[:, None, None]
        y = convolved(y, kernel, self.enlarge)
        for _ in range(self.settings.activation_times if self.settings.activation else 0):
            y = modified_leaky_relu(y, *(self.settings.activation or (1.0, 1.0)))
        return self.target.put(y)


class FilterBank(nn.Module):
    """The filters of all arrays of a model, for one smaller size of it; ``enlarge`` goes back to the whole.

    ``forward`` takes the arrays by name and returns those of the other size. The only parameters are the
    filters'; ``rng`` draws their first values.
    """

    def __init__(
        self,
        plan: CutPlan,
        sizes: Sizes,
        settings: BlockSettings,
        *,
        enlarge: bool = False,
        rng: torch.Generator,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict()
        counts, depths = plan.check(sizes)
        whole = {group.name: group.units for group in plan.groups}
        for array in plan.arrays:
            if array.stays(depths):
                large, small = Matrices.of(array, whole), Matrices.of(array, counts)
                self.blocks[_key(array.name)] = FilterBlock(large, small, settings, enlarge, rng)

    def forward(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all arrays in the other size; they keep their names."""
        return {name: self.blocks[_key(name)](array) for name, array in arrays.items()}


def convolved(matrices: Tensor, kernels: Tensor, enlarge: bool) -> Tensor:
    """Convolve each matrix (p, r, c) with a kernel of its own (p, k, l), as torch's Conv2d understands it.

    The result has r - k + 1 rows; with ``enlarge`` (ConvTranspose2d), r + k - 1.
    """
    _, rows, columns = matrices.shape
    places, height, width = kernels.shape
    if height * width < _FOURIER_FROM:
        convolve = functional.conv_transpose2d if enlarge else functional.conv2d
        return convolve(matrices[None], kernels[:, None], groups=places)[0]
    sign = 1 if enlarge else -1
    size = (rows + sign * (height - 1), columns + sign * (width - 1))
    window = (max(size[0], rows), max(size[1], columns))
    spectrum = torch.fft.rfft2(kernels, window)
    product = torch.fft.rfft2(matrices, window) * (spectrum if enlarge else spectrum.conj())
    return torch.fft.irfft2(product, window)[:, : size[0], : size[1]]


def modified_leaky_relu(x: Tensor, positive: float, negative: float) -> Tensor:
    """Return positive·x where x > 0, else negative·x."""
    return torch.where(x > 0, positive * x, negative * x)


def _key(name: str) -> str:
    return name.replace(".", "/")  # torch allows no dots in the names of modules
