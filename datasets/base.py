"""What every data source returns, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Source:
    """Where a loader may look, and what it may do there.

    ``root`` is the user's own copy and is only ever read; ``cache`` is where decoded arrays and downloads
    are kept; ``download`` allows the network; ``seed`` drives a train/test split that the data lacks.
    """

    root: Path | None
    cache: Path
    download: bool
    seed: int


@dataclass(frozen=True)
class Split:
    """Samples ``x`` (n, ...) as stored (uint8 images or integer tokens), labels ``y`` (n,) or (n, T) int64.

    Both may be memory maps: take rows with an index array, never the whole.
    """

    x: NDArray[np.generic]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Dataset:
    """A train and a test split with what a model and a partitioner need to know about them.

    ``sample_shape`` is the shape of one prepared sample: (C, H, W) for images, (T,) for token sequences.
    ``groups`` (n,) names the natural client of each training sample by an index into ``group_names``.
    ``columns`` are further values of each training sample (n,), by name, that a partitioner may deal by.
    ``note`` says what a reader of the results must know about this copy of the data. ``fingerprint`` is
    a hash of the stored arrays: equal on two machines exactly if both hold the same samples and labels
    in the same order.
    Images are prepared as (x / scale − mean) / std per channel; tokens are handed on as int64.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    sample_shape: tuple[int, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    scale: float = 255.0
    groups: NDArray[np.int64] | None = None
    group_names: tuple[str, ...] = ()
    note: str = ""
    columns: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    fingerprint: str = field(default="", compare=False)

    @property
    def num_classes(self) -> int:
        """Number of classes, or of tokens for a language task."""
        return len(self.classes)

    @property
    def is_text(self) -> bool:
        """Whether samples are token sequences."""
        return len(self.sample_shape) == 1

    def prepare(self, x: NDArray[np.generic]) -> torch.Tensor:
        """Turn stored samples (n, H, W[, C]) or (n, T) into a tensor (n, C, H, W) float32 or (n, T) int64."""
        import torch

        if self.is_text:
            return torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64))
        images = torch.from_numpy(np.ascontiguousarray(x))
        images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
        images = images.to(torch.float32, memory_format=torch.contiguous_format)
        mean = torch.tensor(self.mean).view(1, -1, 1, 1)
        std = torch.tensor(self.std).view(1, -1, 1, 1)
        return images.div_(self.scale).sub_(mean).div_(std)
