import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedplat.datasets.base import Source

OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def source(tmp_path: Path, root: Path | None = None, *, download: bool = False, seed: int = 0) -> Source:
    return Source(root=root, cache=tmp_path / "cache", download=download, seed=seed)


def real_data(needs: str) -> Path:
    folder = os.environ.get("FEDPLAT_DATA")
    if not folder or not (Path(folder) / needs).exists():
        pytest.skip(f"needs {needs} in the folder that FEDPLAT_DATA names")
    return Path(folder)


def write_images(
    folder: Path, count: int, *, suffix: str = "jpg", size: tuple[int, int] = (32, 32), seed: int = 0
):
    folder.mkdir(parents=True)
    rng = np.random.default_rng([seed, *folder.name.encode()])
    for i in range(count):
        pixels = rng.integers(0, 256, (size[1], size[0], 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:04d}.{suffix}")


def write_idx(path: Path, array: np.ndarray):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    path.write_bytes(header + array.astype(np.uint8).tobytes())
