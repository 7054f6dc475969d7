"""Where the numbers of a sub-model lie in the model: a gather takes it out, a scatter puts it back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..arrays import FlatArrays, Layout, LayoutError
from .cutting_plan import ArrayAxes, Axis, Cut, CutPlan, Units

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class IndexMap:
    """A cut of models of one layout.

    ============== ==================================================================================
    ``whole``      layout of the model, d numbers
    ``layout``     layout of the sub-model, k numbers: the same names in the same order, smaller shapes
                   and without the arrays of blocks that are left out
    ``index``      (k,) int64: number i of the sub-model is number ``index[i]`` of the model
    ``side``       (b,) int64: bytes of the model's side block that the sub-model has (counters)
    ``side_home``  (b,) int64: where they lie in the sub-model's side block
    ============== ==================================================================================
    """

    whole: Layout
    layout: Layout
    index: IntArray
    side: IntArray
    side_home: IntArray

    @classmethod
    def of(cls, plan: CutPlan, cut: Cut, layout: Layout) -> IndexMap:
        """Build the map; raises LayoutError or UserError for a layout or a cut of another model."""
        plan.check_cut(cut)
        arrays = _matching(plan, layout)
        depths = dict(cut.depths)
        entries = [entry for entry in layout.entries if arrays[entry.name].stays(depths)]
        positions = {e.name: _positions(arrays[e.name], cut.units) for e in entries}
        sub = Layout.of(
            {e.name: (tuple(len(p) for p in positions[e.name]), e.dtype) for e in entries},
            buffers={e.name for e in entries if e.in_vector and e.start >= layout.num_params},
            promote=any(e.in_vector and e.dtype != "float32" for e in entries),
        )
        side: list[IntArray] = []
        side_home: list[IntArray] = []
        index = np.arange(sub.dim)  # which it is already if nothing is left out
        for entry in entries if sub != layout else [e for e in entries if not e.in_vector]:
            home = sub.by_name[entry.name]
            flat = _flat(positions[entry.name], entry.shape)
            if entry.in_vector:
                index[home.start : home.stop] = entry.start + flat
            else:
                size = entry.numpy_dtype.itemsize
                side.append(entry.start + (flat[:, None] * size + np.arange(size)).ravel())
                side_home.append(np.arange(home.start, home.stop))
        index.flags.writeable = False
        return cls(layout, sub, index, _joined(side), _joined(side_home))

    @cached_property
    def coverage(self) -> Tensor:
        """(d,) bool: which numbers of the model are in the sub-model. Not to be changed."""
        covered = np.zeros(self.whole.dim, bool)
        covered[self.index] = True
        return torch.from_numpy(covered)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the map takes."""
        return int(self.index.nbytes + self.side.nbytes + self.side_home.nbytes)

    def extract(self, model: FlatArrays) -> FlatArrays:
        """Return the sub-model of a model as a copy; raises LayoutError for a model of another layout."""
        _check(model, self.whole)
        sub = self.layout.new()
        if self.layout == self.whole:
            sub.vector[:] = model.vector
        else:  # never out of range; "clip" only spares NumPy a buffered second pass
            np.take(model.vector, self.index, out=sub.vector, mode="clip")
        sub.side[self.side_home] = model.side[self.side]
        return sub

    def restore(
        self, sub: FlatArrays, model: FlatArrays, into: FlatArrays | None = None
    ) -> tuple[FlatArrays, Tensor]:
        """Return a copy of ``model`` with the sub-model's numbers put in, and ``coverage``.

        What the sub-model has not, counters too, keeps ``model``'s value bit for bit. ``into`` is memory to
        put the copy in, such as a row of a matrix. Raises LayoutError for arrays laid out otherwise.
        """
        _check(sub, self.layout)
        _check(model, self.whole)
        full = self.whole.new() if into is None else into
        _check(full, self.whole)
        full.vector[:] = model.vector
        full.side[:] = model.side
        full.vector[self.index if self.layout != self.whole else slice(None)] = sub.vector
        full.side[self.side] = sub.side[self.side_home]
        return full, self.coverage


class IndexMaps:
    """Makes maps for one model and keeps those used last, up to ``max_bytes`` of memory (at least one).

    A map takes 8 bytes per number of the sub-model, twice what the sub-model itself does.
    """

    def __init__(self, plan: CutPlan, layout: Layout, max_bytes: int = 256 << 20) -> None:
        self.plan = plan
        self.layout = layout
        self.max_bytes = max_bytes
        self._maps: OrderedDict[Cut, IndexMap] = OrderedDict()

    def __call__(self, cut: Cut) -> IndexMap:
        """Return the map of a cut; see ``IndexMap.of``."""
        found = self._maps.pop(cut, None) or IndexMap.of(self.plan, cut, self.layout)
        self._maps[cut] = found
        while len(self._maps) > 1 and sum(one.nbytes for one in self._maps.values()) > self.max_bytes:
            self._maps.popitem(last=False)
        return found


def axis_positions(axis: Axis | None, length: int, units: Mapping[str, Units]) -> IntArray:
    """Return which entries of an axis are kept, ascending.

    >>> axis_positions(Axis("fc", repeat=2), 8, {"fc": (0, 3)}).tolist()
    [0, 1, 6, 7]
    >>> axis_positions(Axis("lstm", blocks=2), 8, {"lstm": (0, 3)}).tolist()
    [0, 3, 4, 7]
    """
    if axis is None:
        return np.arange(length)
    per_block = length // axis.blocks
    kept = np.asarray(units[axis.group], np.int64)
    block, repeat = np.arange(axis.blocks) * per_block, np.arange(axis.repeat)
    return (block[:, None, None] + kept[None, :, None] * axis.repeat + repeat).ravel()


def _positions(array: ArrayAxes, units: Mapping[str, Units]) -> list[IntArray]:
    return [axis_positions(axis, n, units) for axis, n in zip(array.axes, array.shape, strict=True)]


def _flat(positions: list[IntArray], shape: tuple[int, ...]) -> IntArray:
    flat = np.zeros(1, np.int64)
    for kept, length in zip(positions, shape, strict=True):
        flat = (flat[:, None] * length + kept).ravel()
    return flat


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _matching(plan: CutPlan, layout: Layout) -> dict[str, ArrayAxes]:
    arrays = {array.name: array for array in plan.arrays}
    shapes = {name: array.shape for name, array in arrays.items()}
    found = {entry.name: entry.shape for entry in layout.entries}
    if shapes != found:
        wrong = sorted(name for name in shapes | found if shapes.get(name) != found.get(name))
        raise LayoutError(f"the layout is not that of the planned model: {', '.join(wrong)}")
    return arrays


def _check(arrays: FlatArrays, layout: Layout) -> None:
    if arrays.layout is not layout and arrays.layout != layout:
        names = {entry.name for entry in set(arrays.layout.entries) ^ set(layout.entries)}
        raise LayoutError(f"the arrays do not fit the cut: {', '.join(sorted(names)) or 'other order'}")
