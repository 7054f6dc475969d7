"""From a listing of ``<split>/<class>/...`` images to labelled train and test arrays."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .cache import Stamp


def classes_of(files: Sequence[Stamp], depth: int, where: str) -> tuple[str, ...]:
    """Return the sorted class names, the path component number ``depth``; raises UserError under two."""
    names = tuple(sorted({file.parts[depth] for file in files if len(file.parts) > depth + 1}))
    if len(names) < 2:
        found = f"only the class '{names[0]}'" if names else "no class folder with images"
        raise UserError(f"{where}: {found}; expected one folder of images per class, at least two")
    return names


def train_and_test(files: Sequence[Stamp], where: str) -> tuple[list[Stamp], list[Stamp], tuple[str, ...]]:
    """Divide files ``(train|test, class, ...)`` and return (train, test, classes), each in path order.

    Raises UserError if a split has no classes or the two have different ones.
    """
    train = [file for file in files if file.parts[0] == "train" and len(file.parts) > 2]
    test = [file for file in files if file.parts[0] == "test" and len(file.parts) > 2]
    classes = classes_of(train, 1, f"{where}/train")
    others = classes_of(test, 1, f"{where}/test")
    if classes != others:
        odd = [f"'{name}' only in train" for name in sorted(set(classes) - set(others))]
        odd += [f"'{name}' only in test" for name in sorted(set(others) - set(classes))]
        raise UserError(f"{where}: train and test have different classes: {', '.join(odd)}")
    return train, test, classes


def labels_of(files: Sequence[Stamp], classes: Sequence[str], depth: int) -> NDArray[np.int64]:
    """Return the label (n,) of each file: the rank of its class name."""
    rank = {name: label for label, name in enumerate(classes)}
    return np.array([rank[file.parts[depth]] for file in files], np.int64)
