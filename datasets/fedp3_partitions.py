"""FedP3's data: training and test samples pooled, clients of equal size, each with a test part of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..errors import UserError
from ..rng import generator
from .base import Dataset, Split
from .labels import Labels, Parts, require_clients, require_room

Positive = Annotated[float, Field(gt=0)]
MinSamples = Annotated[int, Field(ge=1)]


def classwise(
    view: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    classes_per_client: Annotated[int, Field(ge=1)] = 5,
    min_samples: MinSamples = 10,
) -> Parts:
    """Give client i the classes i, i + 1, ... (``classes_per_client``, around the end), as many of each.

    A client gets as many samples of each of its classes as the scarcest class has for each client that owns
    it; what is left belongs to nobody. Which ones is drawn. Raises UserError if that is fewer than
    ``min_samples`` in all, or if there are fewer classes. Source: Yi et al., ICLR 2024, released code (S1).
    """
    labels = view.class_labels("fedp3-classwise")
    clients = require_room("fedp3-classwise", len(view), clients, min_samples)
    classes = view.num_classes
    if classes_per_client > classes:
        raise UserError(
            f"partition 'fedp3-classwise': classes_per_client = {classes_per_client}, and {view.name} has "
            f"{classes} classes"
        )
    owned = [[(client + j) % classes for j in range(classes_per_client)] for client in range(clients)]
    owners = np.bincount(np.concatenate(owned), minlength=classes)
    sizes = np.bincount(labels, minlength=classes)
    per_class = int(min(sizes[c] // owners[c] for c in range(classes) if owners[c]))
    if per_class * classes_per_client < min_samples:
        raise UserError(
            f"partition 'fedp3-classwise': the scarcest class has {per_class} samples for each client that "
            f"owns it, {per_class * classes_per_client} in all and min_samples is {min_samples}; take fewer "
            f"clients, or fewer classes_per_client"
        )
    left = [rng.permutation(np.flatnonzero(labels == c)) for c in range(classes)]
    taken = [0] * classes
    parts = []
    for own in owned:
        rows = []
        for c in own:
            rows.append(left[c][taken[c] : taken[c] + per_class])
            taken[c] += per_class
        parts.append(np.sort(np.concatenate(rows)).astype(np.int64))
    return parts


def dirichlet_equal(
    view: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Positive = 0.5,
    min_samples: MinSamples = 10,
) -> Parts:
    """Give clients of equal size samples one at a time, of classes drawn from a mix ~ Dir(alpha, ..., alpha).

    Each step takes a random client that is not full, a class from its mix, again if none of that are left,
    and a sample of it. What does not make equal sizes belongs to nobody. A client all of whose classes are
    gone takes from what is left by their numbers. Source: Yi et al., ICLR 2024, released code (S2).
    """
    labels = view.class_labels("fedp3-dirichlet")
    clients = require_room("fedp3-dirichlet", len(view), clients, min_samples)
    size = len(labels) // clients
    mixes = rng.dirichlet(np.full(view.num_classes, alpha), size=clients)
    left = np.bincount(labels, minlength=view.num_classes)
    counts = np.zeros((clients, view.num_classes), np.int64)
    # Dealing at random to those not full gives a random order of turns: one of a multiset's permutations has
    # another law, so the turns are drawn one by one.
    open_clients = list(range(clients))
    room = [size] * clients
    mixed = np.cumsum(mixes * (left > 0), axis=1)
    for _ in range(size * clients):
        place = int(rng.integers(len(open_clients)))
        client = open_clients[place]
        edges = mixed[client]
        if not edges[-1] > 0:
            edges = np.cumsum(left)
        c = int(np.searchsorted(edges, rng.random() * edges[-1], side="right"))
        counts[client, c] += 1
        left[c] -= 1
        if left[c] == 0:
            mixed = np.cumsum(mixes * (left > 0), axis=1)
        room[client] -= 1
        if room[client] == 0:
            open_clients[place] = open_clients[-1]
            open_clients.pop()
    shuffled = [rng.permutation(np.flatnonzero(labels == c)) for c in range(view.num_classes)]
    ends = np.cumsum(counts, axis=0)
    return [
        np.sort(
            np.concatenate(
                [shuffled[c][ends[i, c] - counts[i, c] : ends[i, c]] for c in range(view.num_classes)]
            )
        ).astype(np.int64)
        for i in range(clients)
    ]


# Pooling, and the clients' own test parts --------------------------------------------------------------


def pooled(dataset: Dataset) -> Dataset:
    """Return a data set whose training split is both splits, training samples first; the test split stays.

    Clients then hold test samples too: what they do not hold out for tests they train on, so results are
    about their own test parts; see :func:`with_clients_tests`. Natural groups and columns are dropped.
    """
    both = Split(
        np.concatenate([np.asarray(dataset.train.x), np.asarray(dataset.test.x)]),
        np.concatenate([dataset.train.y, dataset.test.y]),
    )
    note = f"{dataset.note}; training and test samples pooled".removeprefix("; ")
    return replace(dataset, train=both, groups=None, group_names=(), columns={}, note=note)


def split_clients(
    parts: Sequence[NDArray[np.int64]], share: float, seed: int
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Return what of each client's samples it trains on, and the ``share`` that it holds out for tests.

    A random permutation per client, drawn from the seed and the client's number; both ascending. The held-out
    part is rounded to the nearest, and leaves at least one sample to train on. Raises UserError for a share
    outside [0, 1).

    >>> train, test = split_clients([np.arange(600)], 0.3, seed=1)
    >>> len(train[0]), len(test[0])
    (420, 180)
    """
    if not 0 <= share < 1:
        raise UserError(f"own_test = {share}: expected a share of 0 or more and below 1")
    train, test = [], []
    for client, part in enumerate(parts):
        order = generator(seed, "own-test", client).permutation(np.asarray(part, np.int64))
        count = min(round(share * len(order)), max(len(order) - 1, 0))
        test.append(np.sort(order[:count]))
        train.append(np.sort(order[count:]))
    return train, test


def with_clients_tests(dataset: Dataset, held_out: Sequence[NDArray[np.int64]]) -> Dataset:
    """Return the data set with the samples that clients hold out as its test split.

    With clients of equal size, its accuracy is the mean over the clients. Raises UserError if there are none.
    """
    if not sum(map(len, held_out)):
        raise UserError("own_test: no client holds out a sample, so nothing could be measured; take more")
    require_clients("own_test", len(held_out))
    rows = np.concatenate([np.asarray(part, np.int64) for part in held_out])
    return replace(dataset, test=Split(dataset.train.x[rows], dataset.train.y[rows]))
