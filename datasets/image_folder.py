"""Your own images: one folder per class, with a train/test split of yours or one drawn by the seed."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..errors import UserError
from ..rng import generator
from .base import Dataset, Source, Split
from .cache import Arrays, Facts, Stamp, cached
from .images import decode, list_images, reader, stratified
from .labelled import classes_of, labels_of, train_and_test

_VERSION = 1


def load(
    source: Source,
    *,
    image_size: Annotated[int, Field(ge=4, le=1024)] = 32,
    grayscale: bool = False,
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2,
    mean: Annotated[float, Field(ge=0, le=1)] = 0.5,
    std: Annotated[float, Field(gt=0, le=1)] = 0.5,
) -> Dataset:
    """Return the images under ``source.root``: ``{train,test}/<class>/*``, or ``<class>/*`` without a split.

    Every image is cut to its central square and resized to image_size x image_size. Without a split,
    ``test_fraction`` of each class is drawn with the source's seed. Pixels are prepared as
    (x / 255 − mean) / std, the same for all channels.

    Raises UserError: no such folder, no classes, classes that differ between train and test, an
    unreadable image (named).
    """
    root = _existing(source.root)
    try:
        files = list_images(root)
    except OSError as error:
        raise UserError(f"cannot list {root}: {error}") from error
    build, settings = _plan(root, files, source.seed, image_size, grayscale, test_fraction)
    found = cached(source.cache, "image-folder", _VERSION, settings, files, build)
    arrays = found.arrays
    channels = 1 if grayscale else 3
    return Dataset(
        name="image-folder",
        train=Split(arrays["train_x"], arrays["train_y"]),
        test=Split(arrays["test_x"], arrays["test_y"]),
        classes=tuple(found.facts["classes"]),
        sample_shape=(channels, image_size, image_size),
        mean=(mean,) * channels,
        std=(std,) * channels,
        note=found.facts["note"],
        fingerprint=found.fingerprint,
    )


def _existing(root: Path | None) -> Path:
    layout = "{train,test}/<class>/* or <class>/*"
    if root is None:
        raise UserError(
            f"image-folder: set data.root (or FEDPLAT_DATA) to a folder of images, laid out as {layout}"
        )
    root = root.expanduser()
    if not root.is_dir():
        raise UserError(f"image-folder: there is no folder {root}; expected images laid out as {layout}")
    return root


def _plan(
    root: Path, files: list[Stamp], seed: int, size: int, grey: bool, test_fraction: float
) -> tuple[Callable[[], tuple[Arrays, Facts]], dict[str, object]]:
    given = [name for name in ("train", "test") if (root / name).is_dir()]
    if len(given) == 1:
        missing = "test" if given == ["train"] else "train"
        raise UserError(
            f"{root} has {given[0]}/ but no {missing}/; give both, or neither to have a split drawn"
        )
    read = reader(root)

    def given_split() -> tuple[Arrays, Facts]:
        train, test, classes = train_and_test(files, str(root))
        arrays: Arrays = {
            "train_x": decode(train, read, size=size, grey=grey),
            "train_y": labels_of(train, classes, 1),
            "test_x": decode(test, read, size=size, grey=grey),
            "test_y": labels_of(test, classes, 1),
        }
        return arrays, {"classes": classes, "note": ""}

    def drawn_split() -> tuple[Arrays, Facts]:
        inside = [file for file in files if len(file.parts) > 1]
        classes = classes_of(inside, 0, str(root))
        labels = labels_of(inside, classes, 0)
        images = decode(inside, read, size=size, grey=grey)
        train, test = stratified(labels, test_fraction, generator(seed, "image-folder-split"))
        arrays: Arrays = {
            "train_x": images[train],
            "train_y": labels[train],
            "test_x": images[test],
            "test_y": labels[test],
        }
        return arrays, {"classes": classes, "note": f"test split of {test_fraction:g} drawn with seed {seed}"}

    settings: dict[str, object] = {"image_size": size, "grayscale": grey}
    if given:
        return given_split, settings
    return drawn_split, {**settings, "test_fraction": test_fraction, "seed": seed}
