"""Partitioners: which client gets which training samples.

Each is a pure function ``(view, clients, rng, *, settings)`` that returns one sorted int64 index array per
client. Samples are dealt by an owner array, one owner per sample, so no sample is shared or lost; only
``natural`` leaves samples out. A random draw that gives some client too little is repeated at most
``max_tries`` times.
"""

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..errors import UserError
from ..registry import find
from ..rng import generator
from .fedp3_partitions import classwise, dirichlet_equal
from .labels import Labels, Parts, check_parts, class_counts, parts_of, require_clients, require_room
from .retries import Draw, first_fit
from .sub_domains import dirichlet_domains

__all__ = [
    "Labels",
    "Parts",
    "class_counts",
    "classwise",
    "dirichlet",
    "dirichlet_client",
    "dirichlet_domains",
    "dirichlet_equal",
    "iid",
    "mud_hog",
    "natural",
    "partition",
    "quantity",
    "shards",
]

Counts = NDArray[np.int64]
Positive = Annotated[float, Field(gt=0)]
MinSamples = Annotated[int, Field(ge=1)]
MaxTries = Annotated[int, Field(ge=1, le=100_000)]


def partition(
    scheme: str | Callable[..., Parts], view: Labels, clients: int | None, seed: int, /, **settings: Any
) -> Parts:
    """Return the parts of a scheme (a name, ``module:attribute`` or function), drawn from the run's seed.

    The generator is ``generator(seed, "partition")``. Raises UserError if the scheme cannot fit, or if a
    user's own scheme shares a sample between clients. Our schemes are also checked to leave none out,
    except ``natural``.

    >>> view = Labels(np.repeat([0, 1], 20), num_classes=2)
    >>> [len(part) for part in partition("iid", view, 3, 1)]
    [14, 13, 13]
    """
    name = scheme if isinstance(scheme, str) else getattr(scheme, "__name__", repr(scheme))
    function = find("partitions", scheme).load() if isinstance(scheme, str) else scheme
    parts: Parts = function(view, clients, generator(seed, "partition"), **settings)
    check_parts(parts, len(view), name, complete=function.__module__ == __name__ and function is not natural)
    return parts


def iid(view: Labels, clients: int, rng: np.random.Generator, *, min_samples: MinSamples = 10) -> Parts:
    """Shuffle and deal in equal sizes (±1)."""
    clients = require_room("iid", len(view), clients, min_samples)
    return [np.sort(part) for part in np.array_split(rng.permutation(len(view)), clients)]


def dirichlet(
    view: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Positive = 0.5,
    balance: bool = False,
    min_samples: MinSamples = 10,
    max_tries: MaxTries = 100,
) -> Parts:
    """Spread each class over the clients by proportions p_c ~ Dir(alpha, ..., alpha), one draw per class.

    Client i gets the samples of class c between floor(n_c P_{i-1}) and floor(n_c P_i), where P are cumulative
    proportions and the class is shuffled. ``balance`` gives nothing more to a client that already holds n / N
    samples, as much released code does. Raises UserError if ``max_tries`` draws leave some client below
    ``min_samples``. Source: Yurochkin et al., ICML 2019.
    """
    labels = view.class_labels("dirichlet")
    clients = require_room("dirichlet", len(view), clients, min_samples)
    sizes = np.bincount(labels, minlength=view.num_classes)

    def drawer(clients: int, alpha: float) -> Draw:
        return lambda: _class_counts_by_proportion(sizes, clients, alpha, balance, rng)

    counts = first_fit("dirichlet", drawer, clients, min_samples, max_tries, alpha=(alpha, 2.0))
    return _deal(labels, counts, rng)


def dirichlet_client(
    view: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Positive = 0.5,
    min_samples: MinSamples = 10,
) -> Parts:
    """Give equal sizes (±1), each client's class mix drawn from Dir(alpha p), p being the class shares.

    Clients take their turn in random order and draw without replacement; a class that runs out is taken
    out of the mix and the rest rescaled. Whoever comes last takes what is left, so late clients' mixes
    are closer to the leftovers than to their own draw: the price of sharing no sample and losing none.
    Source: Hsu et al., 2019, where p is the prior over classes and alpha the total concentration.
    """
    labels = view.class_labels("dirichlet-client")
    clients = require_room("dirichlet-client", len(view), clients, min_samples)
    left = np.bincount(labels, minlength=view.num_classes)
    present = np.flatnonzero(left)
    mixes = np.zeros((clients, len(left)))
    mixes[:, present] = rng.dirichlet(alpha * left[present] / len(labels), size=clients)
    counts = np.zeros((len(left), clients), np.int64)
    for size, client in zip(_equal_sizes(len(labels), clients), rng.permutation(clients), strict=True):
        counts[:, client] = _take(left, mixes[client], size, rng)
        left = left - counts[:, client]
    return _deal(labels, counts, rng)


def shards(
    view: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    classes_per_client: Annotated[int, Field(ge=1)] = 2,
    min_samples: MinSamples = 10,
) -> Parts:
    """Sort by label, cut into clients x k shards, and give each client k random ones.

    k is ``classes_per_client``; shards are of equal size (±1), and so are clients. A shard may straddle two
    classes, so a client can see up to 2k classes and, if its shards are of one class, as few as one.
    Raises UserError if there are fewer samples than shards. Source: McMahan et al., AISTATS 2017 (k = 2).
    """
    labels = view.class_labels("shards")
    clients = require_room("shards", len(view), clients, min_samples)
    require_room("shards", len(view), clients, classes_per_client, "classes_per_client")
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    per_client = _equal_sizes(len(labels), clients)
    sizes = np.concatenate([_equal_sizes(int(size), classes_per_client) for size in per_client])
    dealt = rng.permutation(len(sizes))
    owner = np.empty(len(labels), np.int64)
    owner[order] = np.repeat(dealt // classes_per_client, sizes[dealt])
    return parts_of(owner, clients)


def quantity(
    view: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    sigma: Annotated[float, Field(ge=0, le=10)] = 1.0,
    min_samples: MinSamples = 10,
    max_tries: MaxTries = 100,
) -> Parts:
    """Shuffle and deal in sizes proportional to exp(sigma z), z ~ N(0, 1): uneven sizes, even classes.

    Raises UserError if ``max_tries`` draws leave some client below ``min_samples``.
    """
    clients = require_room("quantity", len(view), clients, min_samples)

    def drawer(clients: int, sigma: float) -> Draw:
        def draw() -> Counts:
            weights = rng.lognormal(0.0, sigma, clients)
            return _by_proportion(len(view), weights / weights.sum())[None, :]

        return draw

    counts = first_fit("quantity", drawer, clients, min_samples, max_tries, sigma=(sigma, 0.5))
    owner = np.empty(len(view), np.int64)
    owner[rng.permutation(len(view))] = np.repeat(np.arange(clients), counts[0])
    return parts_of(owner, clients)


def natural(
    view: Labels, clients: int | None, rng: np.random.Generator, *, min_samples: MinSamples = 10
) -> Parts:
    """Make one client of each natural group (speaker, writer, user) that has ``min_samples`` samples.

    ``clients`` None or 0 takes all of them, n takes a random n. Clients are in order of group number, and
    ``view.groups[part[0]]`` is a client's group. Samples of groups not taken belong to nobody. Raises
    UserError if the data has no groups or too few of that size.
    """
    if view.groups is None:
        raise UserError(
            f"partition 'natural': the samples of {view.name} are not grouped by user; "
            f"use iid, dirichlet, dirichlet-client, shards or quantity"
        )
    by_group = parts_of(np.asarray(view.groups), len(view.group_names))
    sizes = np.array([len(part) for part in by_group])
    fit = np.flatnonzero(sizes >= min_samples)
    wanted = clients or 0
    if not 0 <= wanted <= len(fit) or not len(fit):
        raise UserError(
            f"partition 'natural': {wanted or 'all'} clients asked for, and {len(fit)} of the "
            f"{len(sizes)} groups of {view.name} have min_samples = {min_samples} samples "
            f"(the largest has {sizes.max(initial=0)}); ask for fewer clients or a smaller min_samples"
        )
    chosen = np.sort(rng.choice(fit, wanted, replace=False)) if wanted else fit
    return [by_group[group] for group in chosen]


def mud_hog(
    view: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Positive = 0.9,
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1,
) -> Parts:
    """Split as the MUD-HoG experiments do, to the sample; ``rng`` is not used, ``seed`` is.

    A legacy NumPy generator seeded with ``seed``; per class: shuffle its samples, draw p ~ Dir(alpha), give
    each sample a client drawn from p. The same split whatever the run's seed, and no minimum size: a client
    may end up empty. Within a client the order is ascending here, by class in the original. Raises UserError
    if alpha is so small that the legacy draw underflows. Source: Gupta et al., ESORICS 2022, released code.
    """
    labels = view.class_labels("mud-hog")
    clients = require_clients("mud-hog", clients)
    legacy = np.random.RandomState(seed)  # the published split is a stream of this generator
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        legacy.shuffle(members)
        proportions = legacy.dirichlet(np.full(clients, alpha))
        if not np.isfinite(proportions).all():
            raise UserError(f"partition 'mud-hog': alpha = {alpha:g} is too small to draw from; try 0.01")
        owner[members] = legacy.choice(clients, size=len(members), p=proportions)
    return parts_of(owner, clients)


def _equal_sizes(samples: int, parts: int) -> Counts:
    return samples // parts + (np.arange(parts) < samples % parts).astype(np.int64)


def _by_proportion(samples: int, proportions: NDArray[np.float64]) -> Counts:
    edges = np.minimum(np.floor(np.cumsum(proportions) * samples), samples).astype(np.int64)
    edges[-1] = samples
    return np.diff(edges, prepend=0)


def _class_counts_by_proportion(
    sizes: Counts, clients: int, alpha: float, balance: bool, rng: np.random.Generator
) -> Counts:
    proportions = rng.dirichlet(np.full(clients, alpha), size=len(sizes))
    counts = np.zeros((len(sizes), clients), np.int64)
    for label, row in enumerate(proportions):
        if balance:
            open_to = row * (counts.sum(axis=0) < sizes.sum() / clients)
            row = open_to / open_to.sum() if open_to.sum() > 0 else row
        counts[label] = _by_proportion(int(sizes[label]), row)
    return counts


def _take(left: Counts, mix: NDArray[np.float64], size: int, rng: np.random.Generator) -> Counts:
    taken = np.zeros_like(left)
    while (need := size - int(taken.sum())) > 0:  # each pass fills the need or uses up a class
        remaining = left - taken
        weights = np.where(remaining > 0, mix, 0.0)
        if weights.sum() <= 0:
            weights = remaining.astype(np.float64)
        taken += np.minimum(rng.multinomial(need, weights / weights.sum()), remaining)
    return taken


def _deal(labels: NDArray[np.int64], counts: Counts, rng: np.random.Generator) -> Parts:
    owner = np.empty(len(labels), np.int64)
    for label, row in enumerate(counts):
        owner[rng.permutation(np.flatnonzero(labels == label))] = np.repeat(np.arange(len(row)), row)
    return parts_of(owner, counts.shape[1])
