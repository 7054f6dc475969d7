"""Reading labelled image files: listing a tree, decoding to one uint8 array, splitting by class."""

import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from ..errors import UserError
from .cache import Stamp

SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"}
)
Pixels = NDArray[np.uint8]
Read = Callable[[Stamp], bytes]

_CHUNK = 256
_BATCH = 1024
_SMALL_BYTES = 16_384


def is_image(name: str) -> bool:
    """Whether a file name is that of an image we read; hidden files are not.

    >>> is_image("cat/1.JPG"), is_image("cat/.1.jpg"), is_image("labels.csv")
    (True, False, False)
    """
    return Path(name).suffix.lower() in SUFFIXES and not Path(name).name.startswith(".")


def list_images(root: Path, below: tuple[str, ...] = ()) -> list[Stamp]:
    """Return every image under ``root / below``, sorted by path component (not by the joined string)."""
    found: list[Stamp] = []
    with os.scandir(root.joinpath(*below)) as entries:
        for entry in entries:
            if entry.is_dir():
                if not entry.name.startswith("."):
                    found += list_images(root, (*below, entry.name))
            elif is_image(entry.name):
                status = entry.stat()
                found.append(Stamp((*below, entry.name), status.st_size, status.st_mtime_ns))
    return sorted(found)


def reader(root: Path) -> Read:
    """Return the function that reads a listed file of a tree."""
    return lambda file: root.joinpath(*file.parts).read_bytes()


def decode(files: Sequence[Stamp], read: Read, *, size: int | None = None, grey: bool = False) -> Pixels:
    """Decode images to one array (n, H, W, 3), or (n, H, W) if ``grey``.

    With ``size`` an image is cut to its central square and resized to size x size (bilinear, antialiased).
    Without it all images must have the first one's size. Raises UserError that names the file that is
    unreadable, of another size, or of more than 8 bits per channel.
    """
    if not files:
        raise UserError("no image to decode")
    first = _decode_one(files[0], read, size, grey)
    out = np.empty((len(files), *first.shape), np.uint8)

    def fill(start: int) -> None:
        for i in range(start, min(start + _CHUNK, len(files))):
            pixels = _decode_one(files[i], read, size, grey)
            if pixels.shape != first.shape:
                found, expected = (f"{p.shape[1]}x{p.shape[0]}" for p in (pixels, first))
                raise UserError(f"{'/'.join(files[i].parts)} is {found} pixels, the first image {expected}")
            out[i] = pixels

    # Thumbnails spend their time in Python, where threads only get in each other's way.
    small = sum(file.size for file in files) < _SMALL_BYTES * len(files)
    with ThreadPoolExecutor(1 if small else min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(fill, range(0, len(files), _CHUNK if small else _CHUNK // 16)))
    return out


def _decode_one(file: Stamp, read: Read, size: int | None, grey: bool) -> Pixels:
    where = "/".join(file.parts)
    try:
        with Image.open(io.BytesIO(read(file))) as image:
            if image.mode[0] in "IF":
                raise UserError(f"{where} has more than 8 bits per channel; convert it to 8 bits first")
            if size is None and image.mode == ("L" if grey else "RGB"):
                return np.asarray(image)
            upright = ImageOps.exif_transpose(image).convert("L" if grey else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"cannot read the image {where}: {error}") from error
    if size is not None and upright.size != (size, size):
        upright = ImageOps.fit(upright, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(upright)


def resize(images: Pixels, size: int) -> Pixels:
    """Resize (n, H, W[, C]) to size x size, bilinear and antialiased, by Pillow's integer arithmetic.

    For square images the bits are those of ``torchvision.transforms.Resize`` on PIL images.
    """
    out = np.empty((len(images), size, size, *images.shape[3:]), np.uint8)
    for start in range(0, len(images), _BATCH):
        widened = _resize_width(images[start : start + _BATCH], size)
        out[start : start + _BATCH] = _resize_width(widened.swapaxes(1, 2), size).swapaxes(1, 2)
    return out


def _resize_width(images: Pixels, width: int) -> Pixels:
    # Pillow resizes a square image's rows first, then its columns, each on its own: one tall strip of all
    # rows gives the same bits as image by image, some ten times faster.
    count, rows, columns, *channels = images.shape
    strip = Image.fromarray(images.reshape(count * rows, columns, *channels))
    resized = np.asarray(strip.resize((width, strip.height), Image.Resampling.BILINEAR))
    return resized.reshape(count, rows, width, *channels)


def stratified(
    labels: NDArray[np.int64], test_fraction: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sorted (train, test) indices with round(test_fraction * n_c) test samples of each class c.

    Each class that has two samples or more keeps at least one on either side.

    >>> labels = np.repeat([0, 1], [10, 20])
    >>> [np.bincount(labels[part]).tolist() for part in stratified(labels, 0.2, np.random.default_rng(0))]
    [[8, 16], [2, 4]]
    """
    is_test = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = round(test_fraction * len(members))
        if len(members) > 1:
            count = min(max(count, 1), len(members) - 1)
        is_test[rng.permutation(members)[:count]] = True
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)
