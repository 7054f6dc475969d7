"""Part of another data set: some classes, a few images of each, in several sub-domains.

What is left out by class, or held back by sample, is what a backbone may be pre-trained on: see
:func:`public_part` and :func:`federated_part`, which are the two sides of one cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError, create_model

from .. import registry
from ..errors import UserError, unknown_name
from ..rng import generator
from .base import Dataset, Source, Split
from .cache import fingerprint
from .sub_domains import COLUMN, SubDomain, spread_over

Classes = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...], Field(description="class indices of the data set it is part of")
]
Rows = NDArray[np.int64]

_SCALES = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), "half": ((0.5,) * 3, (0.5,) * 3)}


def load(
    source: Source,
    *,
    of: Annotated[str, Field(description="name of the data set it is part of")],
    options: Annotated[dict[str, Any], Field(description="settings of that data set")] = {},  # noqa: B006
    classes: Classes = (),
    held_back: Annotated[int, Field(ge=0, description="training samples left to a public side")] = 0,
    per_class: Annotated[int | None, Field(ge=1, description="training images of each class")] = None,
    test_per_class: Annotated[int | None, Field(ge=1)] = None,
    sub_domains: Annotated[tuple[SubDomain, ...], Field(min_length=1)] = ("plain",),
    normalise: Literal["own", "imagenet", "half"] = "own",
) -> Dataset:
    """Return some ``classes`` (none given: all) of the data set ``of``, numbered anew in the order given.

    ``held_back`` training samples, the same for every seed, are left out for the public side.
    ``per_class`` images of each class are drawn with the source's seed; ``test_per_class`` bounds the test
    set. Each image is shown in one of ``sub_domains``, all equally often, and the column ``sub-domain`` tells
    in which. ``normalise`` takes the mean and deviation of the data set itself, of ImageNet, or 0.5.

    Raises UserError for unknown names and settings, classes that are not there or given twice, and text.
    """
    whole = part_of(of, options, source)
    if whole.is_text or whole.train.y.ndim != 1:
        raise UserError(f"data 'subset' takes images with a class each, and {whole.name} has none")
    rng = generator(source.seed, "subset")
    chosen = check_classes(classes, whole)
    train = federated_part(whole, chosen, held_back)
    test = np.flatnonzero(np.isin(whole.test.y, chosen))
    parts, which = {}, {}
    for name, split, rows, most in (
        ("train", whole.train, train, per_class),
        ("test", whole.test, test, test_per_class),
    ):
        rows = few_of_each(split.y, rows, most, rng)
        images, which[name] = spread_over(np.asarray(split.x[rows]), sub_domains, rng, whole.scale)
        parts[name] = Split(images, _renumbered(np.asarray(split.y[rows]), chosen))
        if name == "train":
            kept = rows
    columns = {key: np.asarray(values)[kept] for key, values in whole.columns.items()}
    if len(sub_domains) > 1:
        columns[COLUMN] = which["train"]
    arrays = {f"{k}_{axis}": getattr(split, axis) for k, split in parts.items() for axis in ("x", "y")}
    note = f"classes {', '.join(map(str, chosen))} of {whole.name}" if classes else whole.name
    note += f", {per_class} images of each" if per_class else ""
    note += f", in sub-domains {', '.join(sub_domains)}" if sub_domains != ("plain",) else ""
    return replace(
        whole,
        name=f"{whole.name}-subset",
        train=parts["train"],
        test=parts["test"],
        classes=tuple(whole.classes[label] for label in chosen),
        groups=None if whole.groups is None else np.asarray(whole.groups)[kept],
        columns=columns,
        note="; ".join(filter(None, [note, whole.note])),
        fingerprint=fingerprint(arrays),
        **_scale(whole, normalise),
    )


def part_of(name: str, options: dict[str, Any], source: Source) -> Dataset:
    """Load a data set by name with its settings as a user gives them; raises UserError for wrong ones."""
    target = registry.find("datasets", name).load()
    known = {setting.name: setting for setting in registry.settings(target)}
    if unknown := sorted(set(options) - set(known)):
        raise unknown_name(f"setting of data '{name}'", unknown[0], known)
    fields: dict[str, Any] = {
        key: (one.annotation, ... if one.required else one.default) for key, one in known.items()
    }
    schema: type[BaseModel] = create_model("Options", **fields)
    try:
        checked = schema.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"data '{name}': {where}: {first['msg']}") from None
    loaded: Dataset = target(source, **{key: getattr(checked, key) for key in known})
    return loaded


def check_classes(classes: Sequence[int], whole: Dataset) -> tuple[int, ...]:
    """Return the classes asked for, all if none are; raises UserError for one that is not there, or twice."""
    chosen = tuple(classes) or tuple(range(whole.num_classes))
    if wrong := [label for label in chosen if label >= whole.num_classes]:
        raise UserError(f"classes: {wrong[0]} is none of {whole.name}'s, 0 to {whole.num_classes - 1}")
    if len(set(chosen)) < len(chosen):
        raise UserError(f"classes: {list(chosen)} names one twice")
    return chosen


def held_back_rows(samples: int, count: int) -> Rows:
    """Return the sorted rows that a public side of ``count`` samples gets, whatever the run's seed.

    >>> held_back_rows(10, 3).tolist() == held_back_rows(10, 3).tolist()
    True
    """
    if count > samples:
        raise UserError(f"{count} samples held back for a backbone, and there are {samples}")
    return np.sort(generator(0, "public-side").permutation(samples)[:count])


def federated_part(whole: Dataset, classes: Sequence[int], held_back: int = 0) -> Rows:
    """Return the training rows of some classes without those held back."""
    mine = np.isin(np.asarray(whole.train.y), list(classes))
    mine[held_back_rows(len(whole.train), held_back)] = False
    return np.flatnonzero(mine)


def public_part(whole: Dataset, classes: Sequence[int], held_back: int = 0) -> Rows:
    """Return the training rows that a backbone may see: of its own classes, or those held back."""
    if not held_back:
        return np.flatnonzero(np.isin(np.asarray(whole.train.y), list(classes)))
    return held_back_rows(len(whole.train), held_back)


def few_of_each(labels: NDArray[np.int64], rows: Rows, most: int | None, rng: np.random.Generator) -> Rows:
    """Return at most so many rows of each class, drawn at random and sorted; all of them for None."""
    if most is None:
        return rows
    shuffled = rng.permutation(rows)
    own = np.asarray(labels)[shuffled]
    return np.sort(np.concatenate([shuffled[own == label][:most] for label in np.unique(own)] or [rows]))


def _renumbered(labels: NDArray[np.int64], chosen: Sequence[int]) -> NDArray[np.int64]:
    table = np.full(max(chosen) + 1, -1, np.int64)
    table[list(chosen)] = np.arange(len(chosen))
    return table[labels]


def _scale(whole: Dataset, normalise: str) -> dict[str, Any]:
    if normalise == "own":
        return {}
    scale = _SCALES[normalise]
    if whole.sample_shape[0] == 1:
        return {"mean": (sum(scale[0]) / 3,), "std": (sum(scale[1]) / 3,)}
    return {"mean": scale[0], "std": scale[1]}
