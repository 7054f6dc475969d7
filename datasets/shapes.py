"""Drawn images for trials without any files: shapes in colours and textures, one class per kind of shape."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..rng import generator
from .base import Dataset, Source, Split
from .cache import fingerprint

NAMES = (
    "disc", "ring", "square", "frame", "triangle", "plus",
    "cross", "diamond", "stripes", "bars", "moon", "hourglass",
)  # fmt: skip

_Plane = NDArray[np.float64]


def load(
    source: Source,
    *,
    image_size: Annotated[int, Field(ge=8, le=128)] = 32,
    per_class: Annotated[int, Field(ge=1, description="training images of each class")] = 200,
    test_per_class: Annotated[int, Field(ge=1)] = 50,
    noise: Annotated[float, Field(ge=0, le=1, description="deviation of the pixels' noise")] = 0.1,
) -> Dataset:
    """Return coloured images (n, S, S, 3) of twelve kinds of shapes, drawn with the source's seed.

    Place, size, angle, colours, the texture of shape and ground, and noise are random; the class is the shape
    alone. Our own.

    >>> from pathlib import Path
    >>> data = load(Source(None, Path("unused"), False, 0), image_size=8, per_class=2, test_per_class=1)
    >>> len(data.train), len(data.test), data.sample_shape, data.num_classes
    (24, 12, (3, 8, 8), 12)
    """
    rng = generator(source.seed, "shapes")
    arrays: dict[str, NDArray[np.generic]] = {}
    for split, count in (("train", per_class), ("test", test_per_class)):
        labels = np.tile(np.arange(len(NAMES)), count)
        arrays[f"{split}_x"] = np.stack([_drawn(NAMES[label], image_size, noise, rng) for label in labels])
        arrays[f"{split}_y"] = labels.astype(np.int64)
    return Dataset(
        name="shapes",
        train=Split(arrays["train_x"], arrays["train_y"].astype(np.int64)),
        test=Split(arrays["test_x"], arrays["test_y"].astype(np.int64)),
        classes=NAMES,
        sample_shape=(3, image_size, image_size),
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        note="drawn, no photographs",
        fingerprint=fingerprint(arrays),
    )


def _drawn(name: str, size: int, noise: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    axis = (np.arange(size) + 0.5) / size * 2 - 1
    y, x = np.meshgrid(axis, axis, indexing="ij")
    angle, radius = rng.uniform(-0.4, 0.4), rng.uniform(0.5, 0.8)
    dx, dy = rng.uniform(-0.2, 0.2, 2)
    u = ((x - dx) * np.cos(angle) + (y - dy) * np.sin(angle)) / radius
    v = ((y - dy) * np.cos(angle) - (x - dx) * np.sin(angle)) / radius
    inside = _inside(name, u, v)
    colours = rng.uniform(0.05, 0.95, (2, 3))
    # Colours that can be told apart, whatever was drawn.
    colours[1] += np.where(colours[0] > 0.5, -0.35, 0.35)
    frequency, phase = rng.uniform(2, 9, 2), rng.uniform(0, 6, 2)
    textures = [
        0.12 * np.sin(f * (x + y * (2 * i - 1)) + p)
        for i, (f, p) in enumerate(zip(frequency, phase, strict=True))
    ]
    image = np.where(
        inside[..., None], colours[0] + textures[0][..., None], colours[1] + textures[1][..., None]
    )
    image = image + noise * rng.standard_normal(image.shape)
    return np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)


def _inside(name: str, u: _Plane, v: _Plane) -> NDArray[np.bool_]:
    """Return which points of a plane belong to a shape that reaches from −1 to 1."""
    far, square = np.hypot(u, v), np.maximum(abs(u), abs(v))
    shapes = {
        "disc": far < 0.9,
        "ring": (far < 1) & (far > 0.6),
        "square": square < 0.8,
        "frame": (square < 0.9) & (square > 0.5),
        "triangle": (v < 0.8) & (abs(u) < (v + 0.9) * 0.6),
        "plus": (square < 0.95) & (np.minimum(abs(u), abs(v)) < 0.25),
        "cross": (far < 1.1) & (np.minimum(abs(u - v), abs(u + v)) < 0.35),
        "diamond": abs(u) + abs(v) < 1,
        "stripes": (square < 0.9) & (np.floor((v + 1) * 2.5) % 2 == 0),
        "bars": (square < 0.9) & (np.floor((u + 1) * 2.5) % 2 == 0),
        "moon": (far < 0.95) & (np.hypot(u - 0.4, v) > 0.7),
        "hourglass": (abs(v) < 0.9) & (abs(u) < abs(v)),
    }
    return shapes[name]
