"""Sub-domains: the same images turned, inverted, grey or blurred, and clients that mix them unevenly.

They are what makes data differ *inside* a client: a data set names each sample's sub-domain in the column
``sub-domain``, and the partition ``dirichlet-domains`` deals by class and sub-domain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..errors import UserError
from .labels import Labels, Parts, parts_of, require_room
from .retries import first_fit

Images = NDArray[np.generic]
SubDomain = Literal["plain", "turned-90", "turned-180", "turned-270", "inverted", "grey", "blurred"]

COLUMN = "sub-domain"
"""Under which a data set keeps its samples' sub-domains."""


def transformed(x: Images, domain: str, scale: float = 255.0) -> Images:
    """Return stored images (n, H, W) or (n, H, W, C) of levels 0..scale as a sub-domain shows them.

    Turning by 90 degrees needs H = W. Grey is the mean over the channels, blurred the mean of 3x3 pixels.

    >>> transformed(np.array([[[1, 2], [3, 4]]], np.uint8), "turned-90").tolist()
    [[[2, 4], [1, 3]]]
    >>> transformed(np.array([[[0, 255]]], np.uint8), "inverted").tolist()
    [[[255, 0]]]
    """
    change: dict[str, Callable[[Images], Images]] = {
        "plain": lambda x: x,
        "turned-90": lambda x: _turned(x, 1),
        "turned-180": lambda x: _turned(x, 2),
        "turned-270": lambda x: _turned(x, 3),
        "inverted": lambda x: (scale - x.astype(np.float64)).astype(x.dtype),
        "grey": _grey,
        "blurred": _blurred,
    }
    return change[domain](x)


def spread_over(
    x: Images, domains: tuple[str, ...], rng: np.random.Generator, scale: float = 255.0
) -> tuple[Images, NDArray[np.int64]]:
    """Return images (n, ...) each in one sub-domain, all of them equally often (±1), and which (n,)."""
    which = np.arange(len(x)) % len(domains)
    rng.shuffle(which)
    out = np.array(x)
    for number, domain in enumerate(domains):
        if domain != "plain":
            rows = which == number
            out[rows] = transformed(np.asarray(x[rows]), domain, scale)
    return out, which.astype(np.int64)


def dirichlet_domains(
    view: Labels,
    clients: int,
    rng: np.random.Generator,
    *,
    alpha: Annotated[float, Field(gt=0, description="of classes over clients")] = 0.2,
    alpha_in: Annotated[float, Field(gt=0, description="of sub-domains within a client")] = 1.0,
    min_samples: Annotated[int, Field(ge=1)] = 10,
    max_tries: Annotated[int, Field(ge=1, le=100_000)] = 100,
) -> Parts:
    """Deal by class and sub-domain: clients differ by Dir(alpha), and inside by Dir(alpha_in).

    Per class c shares p_c ~ Dir(alpha) over the clients, per client i weights w_i ~ Dir(alpha_in) over the
    sub-domains; of the samples of class c in sub-domain s client i gets p_ci · w_is / Σ_j p_cj w_js.
    A large ``alpha_in`` gives every client all sub-domains alike, a small one few. Nothing is shared or lost.
    Raises UserError for data without sub-domains, or if ``max_tries`` draws leave some client below
    ``min_samples``. Our own rule, for the experiments on heterogeneity inside clients.
    """
    labels = view.class_labels("dirichlet-domains")
    if COLUMN not in view.columns:
        raise UserError(
            f"partition 'dirichlet-domains': the samples of {view.name} have no sub-domains; "
            f"use data 'subset' with sub_domains = ['plain', 'turned-90', ...], or partition 'dirichlet'"
        )
    clients = require_room("dirichlet-domains", len(view), clients, min_samples)
    domains = np.asarray(view.columns[COLUMN]).astype(np.int64)
    kinds = int(domains.max(initial=0)) + 1
    sizes = np.zeros((view.num_classes, kinds), np.int64)
    np.add.at(sizes, (labels, domains), 1)

    def drawer(clients: int, alpha: float) -> Any:
        def draw() -> NDArray[np.int64]:
            over_clients = rng.dirichlet(np.full(clients, alpha), size=view.num_classes)
            inside = rng.dirichlet(np.full(kinds, alpha_in), size=clients)
            weights = np.maximum(over_clients[:, None, :] * inside.T[None, :, :], 1e-300)
            # (classes, sub-domains, clients), cut at the rounded cumulative shares.
            ends = np.floor(sizes[:, :, None] * np.cumsum(weights / weights.sum(2, keepdims=True), axis=2))
            ends = np.minimum(ends, sizes[:, :, None])
            ends[:, :, -1] = sizes
            return np.diff(ends.astype(np.int64), axis=2, prepend=0).reshape(-1, clients)

        return draw

    counts = first_fit("dirichlet-domains", drawer, clients, min_samples, max_tries, alpha=(alpha, 2.0))
    owner = np.empty(len(labels), np.int64)
    cells = labels * kinds + domains
    for cell, per_client in enumerate(counts):
        rows = rng.permutation(np.flatnonzero(cells == cell))
        owner[rows] = np.repeat(np.arange(clients), per_client)
    return parts_of(owner, clients)


def _turned(x: Images, quarters: int) -> Images:
    if quarters % 2 and x.shape[1] != x.shape[2]:
        raise UserError(f"images of {x.shape[1]}x{x.shape[2]} cannot be turned by 90 degrees: not square")
    return np.rot90(x, quarters, axes=(1, 2))


def _grey(x: Images) -> Images:
    if x.ndim == 3:
        return x
    return np.broadcast_to(np.rint(x.mean(axis=3, keepdims=True)), x.shape).astype(x.dtype)


def _blurred(x: Images) -> Images:
    pad = [(0, 0), (1, 1), (1, 1), *[(0, 0)] * (x.ndim - 3)]
    wide = np.pad(x.astype(np.float64), pad, mode="edge")
    height, width = x.shape[1:3]
    total = sum(wide[:, i : i + height, j : j + width] for i in range(3) for j in range(3))
    return np.rint(np.asarray(total) / 9).astype(x.dtype)
