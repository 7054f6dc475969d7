"""The layers of a model, read off the names of its arrays, and the part of a model that some of them are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from .arrays import Entry, FlatArrays, Layout
from .errors import UserError, unknown_name

_SHORTCUTS = ("shortcut", "downsample")


@dataclass(frozen=True)
class Layer:
    """Arrays that belong together: ``arrays`` are all, ``weights`` those of two axes or more."""

    name: str
    arrays: tuple[str, ...]
    weights: tuple[str, ...]


@dataclass(frozen=True)
class LayerMap:
    """The hidden layers of a model in their order, and its head, the last layer with a weight.

    A layer is what one module has, with the norm that follows it and, in a residual block, the convolution of
    the shortcut. Its name is the module's.
    """

    hidden: tuple[Layer, ...]
    head: Layer

    @classmethod
    def of(cls, layout: Layout) -> LayerMap:
        """Find the layers in the order of the arrays; raises UserError for a model without hidden ones.

        >>> names = {"fc1.weight": (3, 2), "fc1.bias": (3,), "norm.weight": (3,), "fc2.weight": (2, 3)}
        >>> found = LayerMap.of(Layout.of({name: (shape, "float32") for name, shape in names.items()}))
        >>> [layer.name for layer in found.hidden], found.head.name, found.hidden[0].arrays
        (['fc1'], 'fc2', ('fc1.weight', 'fc1.bias', 'norm.weight'))
        """
        return _map_of(layout)

    @cached_property
    def by_name(self) -> dict[str, Layer]:
        """All layers by name, the head last."""
        return {layer.name: layer for layer in (*self.hidden, self.head)}

    def named(self, names: Iterable[str]) -> list[Layer]:
        """Return layers by name; raises UserError for one that the model has not."""
        for name in (names := list(names)):
            if name not in self.by_name:
                raise unknown_name("layer of the model", name, self.by_name)
        return [self.by_name[name] for name in names]

    def arrays_of(self, names: Iterable[str]) -> frozenset[str]:
        """Return the names of all arrays of some layers."""
        return frozenset(array for layer in self.named(names) for array in layer.arrays)

    def weights_of(self, names: Iterable[str]) -> list[str]:
        """Return the names of the weights of some layers, which are what can be pruned."""
        return [array for layer in self.named(names) for array in layer.weights]


@lru_cache(maxsize=64)
def _map_of(layout: Layout) -> LayerMap:
    groups: dict[str, list[Entry]] = {}
    for entry in layout.entries:
        groups.setdefault(entry.name.rpartition(".")[0], []).append(entry)
    merged: list[tuple[str, list[Entry]]] = []
    before: list[Entry] = []  # norms that come before any layer
    for name, entries in groups.items():
        weighty = any(_is_weight(entry, layout) for entry in entries)
        beside = any(part in _SHORTCUTS for part in name.split("."))
        if merged and (beside or not weighty):
            merged[-1][1].extend(entries)
        elif weighty:
            merged.append((name, [*before, *entries]))
            before = []
        else:
            before += entries
    if len(merged) < 2:
        raise UserError("the model has no hidden layer; layers cannot be shared out among clients")
    layers = [
        Layer(name, tuple(e.name for e in entries), tuple(e.name for e in entries if _is_weight(e, layout)))
        for name, entries in merged
    ]
    return LayerMap(tuple(layers[:-1]), layers[-1])


def _is_weight(entry: Entry, layout: Layout) -> bool:
    return entry.in_vector and entry.stop <= layout.num_params and len(entry.shape) >= 2


# Parts of a model --------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def part_layout(layout: Layout, names: frozenset[str]) -> Layout:
    """Return the layout of some arrays of a model alone."""
    chosen = [entry for entry in layout.entries if entry.name in names]
    buffers = [e.name for e in chosen if e.in_vector and e.start >= layout.num_params]
    return Layout.of({e.name: (e.shape, e.dtype) for e in chosen}, buffers, promote=layout.has_promoted)


def part_of(model: FlatArrays, names: Collection[str]) -> FlatArrays:
    """Return a copy of some arrays of a model."""
    part = part_layout(model.layout, frozenset(names)).new()
    for mine, whole in _pairs(part.layout, model.layout):
        _bytes(part, mine)[...] = _bytes(model, whole)
    return part


def with_part(model: FlatArrays, part: FlatArrays) -> FlatArrays:
    """Return a copy of a model with some of its arrays replaced; the model is left as it is."""
    new = FlatArrays(model.layout, model.vector.copy(), model.side.copy())
    for mine, whole in _pairs(part.layout, model.layout):
        _bytes(new, whole)[...] = _bytes(part, mine)
    return new


def elements_of(layout: Layout, names: Collection[str]) -> NDArray[np.bool_]:
    """Return which elements (d,) of the vector belong to some arrays."""
    mask = np.zeros(layout.dim, np.bool_)
    for entry in layout.entries:
        if entry.in_vector and entry.name in names:
            mask[entry.start : entry.stop] = True
    return mask


def ranges_of(layout: Layout, names: Collection[str]) -> list[tuple[int, int]]:
    """Return the ranges of the parameters among some arrays, neighbours joined."""
    found: list[tuple[int, int]] = []
    for entry in layout.entries:
        if entry.in_vector and entry.stop <= layout.num_params and entry.name in names:
            if found and found[-1][1] == entry.start:
                found[-1] = found[-1][0], entry.stop
            else:
                found.append((entry.start, entry.stop))
    return found


def _pairs(part: Layout, whole: Layout) -> Sequence[tuple[Entry, Entry]]:
    return [(entry, whole.by_name[entry.name]) for entry in part.entries]


def _bytes(model: FlatArrays, entry: Entry) -> NDArray[np.generic]:
    source: NDArray[np.generic] = model.vector if entry.in_vector else model.side
    return source[entry.start : entry.stop]
