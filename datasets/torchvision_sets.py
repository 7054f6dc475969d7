"""MNIST, Fashion-MNIST and CIFAR-10, read with torchvision and kept decoded in the cache."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ..errors import UserError
from . import cifar_jpeg
from .base import Dataset, Source, Split
from .cache import Arrays, Cached, Facts, Stamp, cached, stamp
from .fetch import Wanted, locate
from .images import resize

ImageSize = Annotated[int, Field(ge=8, le=1024)] | None
Normalise = Literal["dataset", "half", "none"]

_VERSION = 1
_RAW = tuple(
    f"raw/{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
_BATCHES = ("batches.meta", *(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


@dataclass(frozen=True)
class _Published:
    name: str
    title: str
    torchvision_class: str
    folder: str
    raw: tuple[str, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def paths(self, root: Path) -> list[Path]:
        return [root / self.folder / name for name in self.raw]

    def is_in(self, root: Path) -> bool:
        return all(path.is_file() for path in self.paths(root))

    def open(self, root: Path, *, train: bool, download: bool = False) -> Any:
        import torchvision

        kind = getattr(torchvision.datasets, self.torchvision_class)
        return kind(str(root), train=train, download=download)


_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_MNIST = _Published("mnist", "MNIST", "MNIST", "MNIST", _RAW, _DIGITS, (0.1307,), (0.3081,))
_FASHION = _Published(
    "fashion-mnist", "Fashion-MNIST", "FashionMNIST", "FashionMNIST", _RAW, _CLOTHES, (0.2860,), (0.3530,)
)
_CIFAR10 = _Published(
    "cifar10", "CIFAR-10", "CIFAR10", "cifar-10-batches-py", _BATCHES, _OBJECTS,
    (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
)  # fmt: skip


def load_mnist(source: Source, *, image_size: ImageSize = None, normalise: Normalise = "dataset") -> Dataset:
    """Return MNIST, grey (60,000 + 10,000, 28, 28).

    ``image_size`` resizes once, bilinear with antialiasing (MUD-HoG uses 32). ``normalise`` subtracts and
    divides by the set's own mean 0.1307 and std 0.3081 ("dataset"), by 0.5 and 0.5 ("half"), or not at
    all ("none"). Raises UserError if the files are nowhere to be had. Source: LeCun et al., 1998.
    """
    return _dataset(_MNIST, *_load_idx(_MNIST, source, image_size), normalise)


def load_fashion_mnist(
    source: Source, *, image_size: ImageSize = None, normalise: Normalise = "half"
) -> Dataset:
    """Return Fashion-MNIST, grey (60,000 + 10,000, 28, 28).

    Settings as for MNIST; the set's own mean is 0.2860 and std 0.3530, while the default is 0.5 and 0.5 as
    in the experiments of MUD-HoG. Raises UserError. Source: Xiao et al., 2017.
    """
    return _dataset(_FASHION, *_load_idx(_FASHION, source, image_size), normalise)


def load_cifar10(
    source: Source, *, image_size: ImageSize = None, normalise: Normalise = "dataset"
) -> Dataset:
    """Return CIFAR-10, colour (50,000 + 10,000, 32, 32, 3).

    Read from torchvision's ``cifar-10-batches-py``, or else from a JPEG copy that ``note`` then tells of,
    ``CIFAR10/{train,test}/<class>/*.jpg`` or ``cifar10-jpeg.tar.xz``. Settings as for MNIST. Raises
    UserError. Source: Krizhevsky, 2009.
    """
    wanted = Wanted(
        title=_CIFAR10.title,
        layout=f"{_CIFAR10.folder}/, {cifar_jpeg.LAYOUT}",
        subfolder=_CIFAR10.folder,
        is_in=lambda root: _CIFAR10.is_in(root) or cifar_jpeg.has_tree(root) or cifar_jpeg.has_archive(root),
        fetch=lambda root: _CIFAR10.open(root, train=True, download=True),
    )
    root = locate(source, wanted)
    if _CIFAR10.is_in(root):
        return _dataset(_CIFAR10, _cached(_CIFAR10, source, root, image_size), "", normalise)
    if cifar_jpeg.has_tree(root):
        stamps, read = cifar_jpeg.open_tree(root)
        build = lambda: cifar_jpeg.build(stamps, read, image_size, str(root / cifar_jpeg.FOLDER))  # noqa: E731
    else:
        stamps = stamp(root, [root / cifar_jpeg.ARCHIVE])
        build = lambda: cifar_jpeg.build(*cifar_jpeg.open_archive(root), image_size, str(root))  # noqa: E731
    found = _remember("cifar10-jpeg", source, stamps, image_size, build)
    return _dataset(_CIFAR10, found, cifar_jpeg.NOTE, normalise)


def _load_idx(facts: _Published, source: Source, size: int | None) -> tuple[Cached, str]:
    wanted = Wanted(
        title=facts.title,
        layout=f"{facts.folder}/raw/*-ubyte",
        subfolder=facts.folder,
        is_in=facts.is_in,
        fetch=lambda root: facts.open(root, train=True, download=True),
    )
    return _cached(facts, source, locate(source, wanted), size), ""


def _cached(facts: _Published, source: Source, root: Path, size: int | None) -> Cached:
    def build() -> tuple[Arrays, Facts]:
        arrays = {}
        for split in ("train", "test"):
            try:
                data = facts.open(root, train=split == "train")
            except (RuntimeError, ValueError, OSError, EOFError, AssertionError) as error:
                where = root / facts.folder
                raise UserError(f"{facts.title}: the files in {where} are damaged: {error}") from error
            images = np.asarray(data.data, np.uint8)
            arrays[f"{split}_x"] = images if size is None else resize(images, size)
            arrays[f"{split}_y"] = np.asarray(data.targets, np.int64)
        return arrays, {"classes": facts.classes}

    return _remember(facts.name, source, stamp(root, facts.paths(root)), size, build)


def _remember(
    name: str,
    source: Source,
    stamps: list[Stamp],
    size: int | None,
    build: Callable[[], tuple[Arrays, Facts]],
) -> Cached:
    return cached(source.cache, name, _VERSION, {"image_size": size}, stamps, build)


def _dataset(facts: _Published, found: Cached, note: str, normalise: Normalise) -> Dataset:
    arrays = found.arrays
    channels = len(facts.mean)
    mean, std = {
        "dataset": (facts.mean, facts.std),
        "half": ((0.5,) * channels, (0.5,) * channels),
        "none": ((0.0,) * channels, (1.0,) * channels),
    }[normalise]
    return Dataset(
        name=facts.name,
        train=Split(arrays["train_x"], arrays["train_y"]),
        test=Split(arrays["test_x"], arrays["test_y"]),
        classes=tuple(found.facts["classes"]),
        sample_shape=(channels, *arrays["train_x"].shape[1:3]),
        mean=mean,
        std=std,
        note=note,
        fingerprint=found.fingerprint,
    )
