"""Columns of images, encoded or as plain arrays, of a Hugging Face data set as uint8 pixels."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..errors import UserError
from .cache import Stamp
from .hub import installed
from .images import Pixels, decode, resize


def pixels_of(
    parts: list[Any], column: str, kind: str, size: int | None, grey: bool | None, where: str
) -> list[Pixels]:
    """Return each part's images (n, H, W) or (n, H, W, 3) uint8, all of one size.

    ``size`` resizes to size x size; ``grey`` None keeps colours if any image has them. Raises UserError.
    """
    if kind == "image":
        pixels = _decoded(parts, column, size, grey, where)
    elif kind == "array":
        pixels = [_from_arrays(part[column][:], f"{where}: column '{column}'") for part in parts]
        if grey and pixels[0].ndim == 4:
            raise UserError(f"{where}: data.grayscale is for images; column '{column}' holds arrays")
        if size is not None:
            pixels = [resize(part, size) for part in pixels]
    else:
        raise UserError(f"{where}: data.image: column '{column}' holds no images ({kind})")
    if len({part.shape[1:] for part in pixels}) > 1:
        raise UserError(f"{where}: train and test images differ in size; set data.image_size")
    return pixels


def _decoded(parts: list[Any], column: str, size: int | None, grey: bool | None, where: str) -> list[Pixels]:
    encoded = [
        part.select_columns([column]).cast_column(column, installed().Image(decode=False)) for part in parts
    ]

    def read(file: Stamp) -> bytes:
        row = encoded[int(file.parts[0])][int(file.parts[1])][column]
        if row is None:
            raise UserError(f"{where}: row {file.parts[1]} has no image in '{column}'")
        return bytes(row["bytes"]) if row["bytes"] is not None else Path(row["path"]).read_bytes()

    files = [[Stamp((str(p), str(i)), 0, 0) for i in range(len(part))] for p, part in enumerate(parts)]
    if grey is None:
        modes = (Image.open(io.BytesIO(read(file))).mode for part in files for file in part)
        grey = all(mode in ("L", "LA", "1") for mode in modes)
    try:
        return [decode(part, read, size=size, grey=grey) for part in files]
    except UserError as error:
        hint = "" if size else "; data.image_size brings images to one size"
        raise UserError(f"{where}: column '{column}', split/row {error}{hint}") from error


def _from_arrays(rows: Any, where: str) -> Pixels:
    try:
        values = np.array(rows)
    except ValueError as error:
        raise UserError(f"{where}: the arrays differ in size") from error
    if values.dtype.kind not in "iub" or values.ndim not in (3, 4):
        raise UserError(f"{where}: expected integers 0..255 as (H, W), (H, W, C) or (C, H, W) per sample")
    if values.min() < 0 or values.max() > 255:
        raise UserError(f"{where}: expected integers 0..255, found {values.min()} to {values.max()}")
    pixels = values.astype(np.uint8)
    if pixels.ndim == 4 and pixels.shape[3] not in (1, 3):
        if pixels.shape[1] not in (1, 3):
            raise UserError(f"{where}: of the shape {pixels.shape[1:]} no side is 1 or 3 colours")
        pixels = pixels.transpose(0, 2, 3, 1)
    if pixels.ndim == 4 and pixels.shape[3] == 1:
        pixels = pixels[..., 0]
    return np.ascontiguousarray(pixels)


def pixel_statistics(pixels: Pixels) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of every channel of images (n, H, W[, C]), for pixels 0..1.

    Computed from how often each value occurs, so exactly; a channel of one value gets a deviation of 1.

    >>> pixel_statistics(np.array([[[0, 255]]], np.uint8))
    ([0.5], [0.5])
    """
    channels = pixels[..., None] if pixels.ndim == 3 else pixels
    means, stds = [], []
    for c in range(channels.shape[-1]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(channels), 4096):
            counts += np.bincount(channels[start : start + 4096, ..., c].ravel(), minlength=256)
        values, shares = np.arange(256) / 255, counts / counts.sum()
        mean = float(values @ shares)
        means.append(mean)
        stds.append(float(np.sqrt((values - mean) ** 2 @ shares)) or 1.0)
    return means, stds
