"""The 1,797 handwritten digits of 8x8 pixels that ship inside scikit-learn: no files, no network."""

from typing import Annotated

import numpy as np
from pydantic import Field

from ..rng import generator
from .base import Dataset, Source, Split
from .cache import fingerprint
from .images import stratified

# Over all 1,797 images on the scale 0..1.
MEAN = 0.3053
STD = 0.3760


def load(
    source: Source,
    *,
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2,
) -> Dataset:
    """Return the digits (n, 8, 8), grey levels 0..16, split by class with the source's seed.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998, test part, as
    packaged by scikit-learn. It has no split of its own.

    >>> from pathlib import Path
    >>> digits = load(Source(root=None, cache=Path("unused"), download=False, seed=0))
    >>> len(digits.train), len(digits.test), digits.sample_shape
    (1438, 359, (1, 8, 8))
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = bunch.images.astype(np.uint8)
    labels = bunch.target.astype(np.int64)
    train, test = stratified(labels, test_fraction, generator(source.seed, "digits-split"))
    arrays = {
        "train_x": images[train],
        "train_y": labels[train],
        "test_x": images[test],
        "test_y": labels[test],
    }
    return Dataset(
        name="digits",
        train=Split(arrays["train_x"], arrays["train_y"]),
        test=Split(arrays["test_x"], arrays["test_y"]),
        classes=tuple("0123456789"),
        sample_shape=(1, 8, 8),
        mean=(MEAN,),
        std=(STD,),
        scale=16.0,
        fingerprint=fingerprint(arrays),
    )
