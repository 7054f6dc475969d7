"""What a partitioner sees of a training set, and what must hold of every partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from .base import Dataset

Indices = NDArray[np.int64]
Parts = list[Indices]


@dataclass(frozen=True, eq=False)
class Labels:
    """The training labels (n,), or (n, T) for text, and each sample's natural group (n,) if there are any.

    ``columns`` are further values (n,) of the samples, by name.
    """

    labels: NDArray[np.int64]
    num_classes: int
    groups: NDArray[np.int64] | None = None
    group_names: tuple[str, ...] = ()
    name: str = "dataset"
    columns: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, dataset: Dataset) -> Labels:
        """Return the view of a data set's training split."""
        return cls(
            dataset.train.y,
            dataset.num_classes,
            dataset.groups,
            dataset.group_names,
            dataset.name,
            dataset.columns,
        )

    def class_labels(self, scheme: str) -> NDArray[np.int64]:
        """Return the labels (n,); raises UserError for a data set whose samples have no class."""
        if self.labels.ndim != 1:
            raise UserError(
                f"partition '{scheme}' deals by class, and the samples of {self.name} have none; "
                f"use natural, iid or quantity"
            )
        return np.asarray(self.labels)


def require_clients(scheme: str, clients: int | None) -> int:
    """Return the number of clients if it is at least 1, else raise UserError."""
    if clients is None or clients < 1:
        raise UserError(f"partition '{scheme}' needs a number of clients of at least 1, found {clients}")
    return clients


def require_room(
    scheme: str, samples: int, clients: int | None, least: int, setting: str = "min_samples"
) -> int:
    """Return the number of clients if each can have ``least`` samples, else raise UserError with what fits.

    ``setting`` is the name under which the user knows ``least``.
    """
    clients = require_clients(scheme, clients)
    if clients * least > samples:
        fits = [f"clients <= {samples // least}"] if samples >= least else []
        fits += [f"{setting} <= {samples // clients}"] if samples >= clients else []
        advice = " or ".join(fits) or f"at least {clients} samples"
        raise UserError(
            f"partition '{scheme}': {clients} clients x {setting} {least} = {clients * least} "
            f"> {samples} training samples; what would fit: {advice}"
        )
    return clients


def parts_of(owner: Indices, clients: int) -> Parts:
    """Turn the owner (n,) of each sample into one sorted index array per client.

    >>> [part.tolist() for part in parts_of(np.array([1, 0, 1]), 3)]
    [[1], [0, 2], []]
    """
    order = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def check_parts(parts: Sequence[Indices], samples: int, scheme: str, *, complete: bool) -> None:
    """Raise UserError unless the parts are disjoint index arrays in range that leave out no sample.

    ``complete=False`` allows samples that belong to no client.
    """
    if not parts:
        raise UserError(f"partition '{scheme}' returned no clients")
    for client, part in enumerate(parts):
        array = np.asarray(part)
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise UserError(f"partition '{scheme}': client {client} is not a flat array of integers")
        if len(array) and not 0 <= array.min() <= array.max() < samples:
            raise UserError(f"partition '{scheme}': client {client} has an index outside 0..{samples - 1}")
    uses = np.bincount(np.concatenate(parts), minlength=samples)
    if uses.max(initial=0) > 1:
        raise UserError(f"partition '{scheme}': sample {int(uses.argmax())} was given out more than once")
    if complete and not uses.all():
        raise UserError(f"partition '{scheme}': {int((uses == 0).sum())} samples were given to nobody")


def class_counts(labels: NDArray[np.int64], parts: Sequence[Indices], num_classes: int) -> NDArray[np.int64]:
    """Return how many samples of each class each client has, (clients, classes).

    >>> class_counts(np.array([0, 1, 1]), [np.array([0, 1]), np.array([2])], 2).tolist()
    [[1, 1], [0, 1]]
    """
    return np.stack([np.bincount(labels[part], minlength=num_classes) for part in parts]).astype(np.int64)
