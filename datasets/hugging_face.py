"""Data sets of the Hugging Face Hub, which flwr-datasets builds on: ``data.name = "hf:<repository>"``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..errors import UserError, unknown_name
from ..rng import generator
from .base import Dataset, Source, Split
from .cache import Arrays, Facts, cached, stamp
from .hub import installed, open_repository, split_fingerprint
from .hub_images import pixel_statistics, pixels_of
from .images import stratified
from .shakespeare import windows

Column = str | None
Fraction = Annotated[float, Field(ge=0, le=1)]

_VERSION = 1
_LABELS = ("label", "labels", "target", "class", "y")
_TESTS = ("test", "validation", "valid", "val")
_WIDEST = 64  # characters of a text column that partitioners may deal by


def data_set(repository: str) -> Callable[..., Dataset]:
    """Return the loader of a repository such as ``ylecun/mnist``, or of a local folder, for the registry."""
    if not repository:
        raise UserError("data.name = 'hf:' needs a repository or a folder: hf:ylecun/mnist, hf:./my-data")

    @functools.wraps(load)
    def named(source: Source, **settings: Any) -> Dataset:
        return load(source, repository, **settings)

    return named


@dataclass(frozen=True)
class _Wanted:
    """The settings that change what is decoded."""

    image: Column
    text: Column
    label: Column
    group: Column
    train_split: str
    test_split: str | None
    test_fraction: float
    image_size: int | None
    grayscale: bool | None
    sequence_length: int


def load(
    source: Source,
    repository: str,
    *,
    image: Annotated[Column, Field(description="column; guessed if there is one of images")] = None,
    label: Annotated[Column, Field(description="column; guessed if there is one of classes")] = None,
    text: Annotated[Column, Field(description="column, to predict the next character of")] = None,
    group: Annotated[Column, Field(description="column of natural clients, for partition natural")] = None,
    subset: Annotated[str | None, Field(description="the repository's configuration")] = None,
    revision: Annotated[str | None, Field(description="branch, tag or commit")] = None,
    train_split: str = "train",
    test_split: Annotated[str | None, Field(description="test or validation, else drawn")] = None,
    test_fraction: Annotated[float, Field(gt=0, lt=1, description="of a drawn test split")] = 0.2,
    image_size: Annotated[int, Field(ge=4, le=1024)] | None = None,
    grayscale: Annotated[bool | None, Field(description="nothing: as the images are")] = None,
    sequence_length: Annotated[int, Field(ge=2, le=1024, description="characters, for text")] = 80,
    normalise: Literal["dataset", "half", "none"] = "dataset",
    mean: Annotated[tuple[Fraction, ...] | None, Field(description="per channel, for pixels 0..1")] = None,
    std: Annotated[
        tuple[Annotated[float, Field(gt=0, le=1)], ...] | None, Field(description="likewise")
    ] = None,
) -> Dataset:
    """Return a repository of the Hub, or a local folder, as images with classes or as text.

    A path (``hf:./folder``, ``hf:/folder``) is read from disk: what ``save_to_disk`` wrote, or files that
    ``datasets.load_dataset`` reads. So is ``<data.root>/<repository>`` if it exists. Everything else comes
    from the Hub or its local cache; ``data.download = false`` allows the cache only. No code of a repository
    is run, and Flower's telemetry of ``FederatedDataset`` is not used.

    Images are uint8, decoded like ``image-folder``'s, or arrays of integers 0..255 laid out (H, W), (H, W, C)
    or (C, H, W); images of different sizes need ``image_size``. ``normalise`` subtracts mean and divides by
    standard deviation of the training pixels ("dataset"), 0.5 and 0.5 ("half"), or nothing ("none"); ``mean``
    and ``std`` say them. Text is cut into windows of ``sequence_length`` + 1 characters within a row, and
    what is left of a row is dropped; characters that only the test split has are unknown to training.

    Raises UserError: package missing, Hub out of reach, unknown repository, split or column, labels missing.
    """
    wanted = _Wanted(
        image, text, label, group, train_split, test_split, test_fraction, image_size, grayscale,
        sequence_length,
    )  # fmt: skip
    opened = open_repository(source, repository, subset, revision)
    where = f"hf:{repository}"
    train, test = _splits(opened.splits, wanted, where)
    fingerprints = [split_fingerprint(part) for part in (train, test) if part is not None]
    settings = {**vars(wanted), "seed": source.seed if test is None else 0, "splits": fingerprints}
    settings["repository"] = "" if opened.folder else [repository, subset, revision]
    found = cached(
        source.cache,
        "hf",
        _VERSION,
        settings,
        stamp(opened.folder, sorted(p for p in opened.folder.rglob("*") if p.is_file()))
        if opened.folder
        else (),
        lambda: _build(train, test, wanted, source.seed, where),
    )
    arrays, facts = found.arrays, found.facts
    means, stds = _scale(facts, normalise, mean, std, where)
    return Dataset(
        name=where,
        train=Split(arrays["train_x"], arrays["train_y"]),
        test=Split(arrays["test_x"], arrays["test_y"]),
        classes=tuple(facts["classes"]),
        sample_shape=tuple(facts["sample_shape"]),
        mean=means,
        std=stds,
        groups=arrays.get("groups"),
        group_names=tuple(facts["group_names"]),
        note=facts["note"],
        columns={name: arrays[f"column-{i}"] for i, name in enumerate(facts["columns"])},
        fingerprint=found.fingerprint,
    )


def _splits(splits: Mapping[str, Any], wanted: _Wanted, where: str) -> tuple[Any, Any | None]:
    """Return the training split, and the test split or None if one has to be drawn."""
    test_name = wanted.test_split
    if test_name is None:
        test_name = next((n for n in _TESTS if n in splits and n != wanted.train_split), None)
    for key, name in (("train_split", wanted.train_split), ("test_split", test_name)):
        if name is not None and name not in splits:
            raise UserError(f"{where}: data.{key}: {unknown_name('split', name, splits)}")
    if test_name == wanted.train_split:
        raise UserError(f"{where}: data.test_split: '{test_name}' is the training split")
    return splits[wanted.train_split], None if test_name is None else splits[test_name]


# Columns ---------------------------------------------------------------------------------------------------


def _kind(feature: Any) -> str:
    """Return what a column holds: image, class, text, integer, number, array or other."""
    hf = installed()
    if isinstance(feature, hf.Image):
        return "image"
    if isinstance(feature, hf.ClassLabel):
        return "class"
    if isinstance(feature, hf.Value):
        if feature.dtype in ("string", "large_string"):
            return "text"
        if feature.dtype.startswith(("int", "uint", "bool")):
            return "integer"
        return "number" if feature.dtype.startswith("float") else "other"
    # Lists have had several names; whatever has a feature inside, or a shape, is one.
    return "array" if hasattr(feature, "feature") or hasattr(feature, "shape") else "other"


def _choose(
    kinds: Mapping[str, str], setting: str, given: str | None, guesses: list[list[str]], where: str
) -> str:
    """Return the column given, or the one of the first guesses that there are; UserError if unclear."""
    listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    if given is not None:
        if given not in kinds:
            raise UserError(f"{where}: data.{setting}: {unknown_name('column', given, kinds)}")
        return given
    found = next((names for names in guesses if names), [])
    if len(found) == 1:
        return found[0]
    reason = f"it could be {' or '.join(found)}" if found else "no column looks like one"
    raise UserError(f"{where}: set data.{setting} to a column: {reason}. Columns: {listed}")


def _columns_by(kinds: Mapping[str, str], *wanted: str) -> list[str]:
    return [name for name, kind in kinds.items() if kind in wanted]


def _build(train: Any, test: Any | None, wanted: _Wanted, seed: int, where: str) -> tuple[Arrays, Facts]:
    kinds = {name: _kind(feature) for name, feature in train.features.items()}
    if test is not None and set(test.features) != set(kinds):
        odd = sorted(set(test.features) ^ set(kinds))
        raise UserError(f"{where}: only one of the train and test splits has the columns {odd}")
    if not len(train) or (test is not None and not len(test)):
        raise UserError(f"{where}: a split has no samples")
    if wanted.text is not None and (wanted.image or wanted.label):
        raise UserError(
            f"{where}: give data.text alone, to predict the next character, or data.image with data.label"
        )
    build = _build_text if wanted.text is not None else _build_images
    rows, arrays, facts = build(train, test, kinds, wanted, seed, where)
    if wanted.group is not None:
        column = _choose(kinds, "group", wanted.group, [], where)
        names, groups = np.unique(np.array(train[column][:])[rows], return_inverse=True)
        arrays["groups"], facts["group_names"] = groups.astype(np.int64), [str(name) for name in names]
    scalar = [n for n in _columns_by(kinds, "class", "integer", "number", "text") if n != wanted.text]
    for name in scalar:
        values = np.array(train[name][:])
        # Objects are columns with gaps; long texts are nothing to deal by.
        if values.dtype.kind in "iufbU" and values.dtype.itemsize <= 4 * _WIDEST:
            arrays[f"column-{len(facts['columns'])}"] = values[rows]
            facts["columns"].append(name)
    return arrays, facts


# Images ----------------------------------------------------------------------------------------------------


def _build_images(
    train: Any, test: Any | None, kinds: Mapping[str, str], wanted: _Wanted, seed: int, where: str
) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]], Facts]:
    of_images, of_arrays = _columns_by(kinds, "image"), _columns_by(kinds, "array")
    image = _choose(kinds, "image", wanted.image, [of_images, of_arrays], where)
    usual = [name for name in _columns_by(kinds, "integer", "text") if name.lower() in _LABELS]
    label = _choose(kinds, "label", wanted.label, [_columns_by(kinds, "class"), usual], where)
    parts = [train] if test is None else [train, test]
    classes, labels = _labels(parts, label, where)
    pixels = pixels_of(parts, image, kinds[image], wanted.image_size, wanted.grayscale, where)
    rows, note = np.arange(len(train)), ""
    if test is None:
        rows, held_out = stratified(labels[0], wanted.test_fraction, generator(seed, "hf-split"))
        pixels = [pixels[0][rows], pixels[0][held_out]]
        labels = [labels[0][rows], labels[0][held_out]]
        note = f"test split of {wanted.test_fraction:g} drawn with seed {seed}"
    height, width, *channels = pixels[0].shape[1:]
    means, stds = pixel_statistics(pixels[0])
    arrays: dict[str, NDArray[Any]] = {
        "train_x": pixels[0],
        "train_y": labels[0],
        "test_x": pixels[1],
        "test_y": labels[1],
    }
    shape = [channels[0] if channels else 1, height, width]
    return rows, arrays, _facts(classes, shape, note) | {"mean": means, "std": stds}


def _facts(classes: list[str], sample_shape: list[int], note: str) -> Facts:
    return {
        "classes": classes, "sample_shape": sample_shape, "note": note,
        "mean": [], "std": [], "group_names": [], "columns": [],
    }  # fmt: skip


def _labels(parts: list[Any], column: str, where: str) -> tuple[list[str], list[NDArray[np.int64]]]:
    """Return the class names and each part's labels (n,): the names' order, or that of the sorted values."""
    values = [np.array(part[column][:]) for part in parts]
    feature = parts[0].features[column]
    named = isinstance(feature, installed().ClassLabel)
    for value in values:
        if value.dtype.kind not in "iubU" or (named and value.min() < 0):
            raise UserError(
                f"{where}: column '{column}' is no label of every sample: some have none, or it is no class; "
                f"choose another with data.label, or another data.test_split"
            )
    if named:
        return list(feature.names), [value.astype(np.int64) for value in values]
    classes, codes = np.unique(np.concatenate(values), return_inverse=True)
    ends = np.cumsum([len(value) for value in values])[:-1]
    return [str(name) for name in classes], np.split(codes.astype(np.int64), ends)


def _scale(
    facts: Facts,
    normalise: str,
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
    where: str,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    channels = len(facts["mean"])
    usual = {
        "dataset": (facts["mean"], facts["std"]),
        "half": ((0.5,) * channels, (0.5,) * channels),
        "none": ((0.0,) * channels, (1.0,) * channels),
    }[normalise]
    chosen = []
    for name, given, default in (("mean", mean, usual[0]), ("std", std, usual[1])):
        values = tuple(default if given is None else given * channels if len(given) == 1 else given)
        if len(values) != channels:
            raise UserError(f"{where}: data.{name} has {len(values)} numbers, the images {channels} channels")
        chosen.append(values)
    return chosen[0], chosen[1]


# Text ------------------------------------------------------------------------------------------------------


def _build_text(
    train: Any, test: Any | None, kinds: Mapping[str, str], wanted: _Wanted, seed: int, where: str
) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]], Facts]:
    column = _choose(kinds, "text", wanted.text, [], where)
    if kinds[column] != "text":
        raise UserError(f"{where}: data.text: column '{column}' holds no text ({kinds[column]})")
    texts, note = [list(part[column][:]) for part in ([train] if test is None else [train, test])], ""
    kept = np.arange(len(texts[0]))
    if test is None:
        order = generator(seed, "hf-split").permutation(len(kept))
        count = min(max(round(wanted.test_fraction * len(kept)), 1), len(kept) - 1)
        kept, held_out = np.sort(order[count:]), np.sort(order[:count])
        texts = [[texts[0][i] for i in kept], [texts[0][i] for i in held_out]]
        note = f"test split of {wanted.test_fraction:g} of the rows drawn with seed {seed}"
    alphabet = sorted(set().union(*(text or "" for part in texts for text in part)))
    token = {character: index for index, character in enumerate(alphabet)}
    dtype = np.min_scalar_type(max(len(alphabet) - 1, 1))
    arrays: dict[str, NDArray[Any]] = {}
    rows = kept
    for name, part in zip(("train", "test"), texts, strict=True):
        cuts = [
            windows(np.array([token[c] for c in text or ""], dtype), wanted.sequence_length) for text in part
        ]
        if not any(len(cut) for cut in cuts):
            raise UserError(
                f"{where}: no row of the {name} split has {wanted.sequence_length + 1} characters in "
                f"'{column}'; lower data.sequence_length"
            )
        if name == "train":
            rows = np.repeat(kept, [len(cut) for cut in cuts])
        joined = np.concatenate(cuts)
        arrays[f"{name}_x"] = np.ascontiguousarray(joined[:, :-1])
        arrays[f"{name}_y"] = joined[:, 1:].astype(np.int64)
    return rows, arrays, _facts(alphabet, [wanted.sequence_length], note)
