"""What of a model can be left out, and choices of what is kept: the types behind sub-models of all sizes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError, unknown_name

if TYPE_CHECKING:
    from torch import nn

    from ..arrays import Layout
    from .cutting_maps import IndexMap

Units = range | tuple[int, ...]
Width = float | Mapping[str, float]


@dataclass(frozen=True)
class Axis:
    """An axis of an array that follows the units of a group.

    It holds ``blocks`` copies of the units one after another (an LSTM's 4 gates), each unit being ``repeat``
    successive entries (h · w of a channel that was flattened); its length is blocks · units · repeat.
    """

    group: str
    repeat: int = 1
    blocks: int = 1


@dataclass(frozen=True)
class Group:
    """Units that are kept or left out together; named after the first layer that makes them."""

    name: str
    units: int


@dataclass(frozen=True)
class Stage:
    """Successive blocks of which the last ones may be left out; the first always stays."""

    name: str
    depth: int


@dataclass(frozen=True)
class ArrayAxes:
    """A parameter or buffer: the group of each axis (None: kept whole), and its block of a stage, if any."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[Axis | None, ...]
    stage: str | None = None
    block: int = 0

    def stays(self, depths: Mapping[str, int]) -> bool:
        """Whether the array is there if each stage has so many blocks."""
        return self.stage is None or self.block < depths[self.stage]


@dataclass(frozen=True)
class Sizes:
    """What a client has to know to build its sub-model: units of each group, blocks of each stage.

    A group has 0 units if all blocks that use it are left out.
    """

    units: tuple[tuple[str, int], ...]
    depths: tuple[tuple[str, int], ...] = ()

    def dumps(self) -> str:
        """Return one line of JSON, for a configuration record.

        >>> Sizes((("fc1", 3),), (("stage1", 1),)).dumps()
        '{"units":{"fc1":3},"depths":{"stage1":1}}'
        """
        return json.dumps({"units": dict(self.units), "depths": dict(self.depths)}, separators=(",", ":"))

    @classmethod
    def loads(cls, text: str) -> Sizes:
        """Read what ``dumps`` wrote; raises UserError for anything else."""
        try:
            parsed = json.loads(text)
            parts = [parsed.pop("units"), parsed.pop("depths")]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise UserError(f"sizes of a sub-model: {text[:80]!r} is not what Sizes.dumps writes") from error
        if parsed or not all(isinstance(part, dict) and all(map(_is_count, part.values())) for part in parts):
            raise UserError(
                f"sizes of a sub-model: {text[:80]!r} has to give whole numbers, units and depths"
            )
        return cls(tuple(parts[0].items()), tuple(parts[1].items()))


@dataclass(frozen=True)
class Cut:
    """Which units of each group are kept, in ascending order, and how many blocks of each stage.

    Cuts that keep the same are equal, however they were made: successive units are always a range.
    """

    kept: tuple[tuple[str, Units], ...]
    depths: tuple[tuple[str, int], ...] = ()

    @cached_property
    def units(self) -> dict[str, Units]:
        """The kept units by group."""
        return dict(self.kept)

    @cached_property
    def sizes(self) -> Sizes:
        """What the client is told."""
        return Sizes(tuple((name, len(units)) for name, units in self.kept), self.depths)

    def is_nested_in(self, other: Cut) -> bool:
        """Whether all that is kept here is kept there; raises UserError for cuts of different models."""
        if self.units.keys() != other.units.keys() or dict(self.depths).keys() != dict(other.depths).keys():
            raise UserError("these two cuts belong to different models, so neither is part of the other")
        depths = dict(other.depths)
        return all(_within(units, other.units[name]) for name, units in self.kept) and all(
            depth <= depths[name] for name, depth in self.depths
        )


@dataclass(frozen=True)
class CutPlan:
    """All that can be left out of a model; equal for two models of one architecture.

    The methods make cuts. ``width`` is the share of each group's units to keep, one for all or by name, where
    a name may be a pattern such as "stage2.*" and what is not named stays whole; of a group of n they keep
    max(1, ceil(width · n)). ``depth`` is the number of blocks by stage, all unless given. A group used only
    by blocks that are left out has no units.

    Raises UserError for widths outside (0, 1], depths outside 1 to the stage's, and unknown names.
    """

    groups: tuple[Group, ...]
    stages: tuple[Stage, ...]
    arrays: tuple[ArrayAxes, ...]

    @classmethod
    def declare(
        cls,
        module: nn.Module,
        axes: Mapping[str, Sequence[Axis | str | None]],
        stages: Collection[str] = (),
    ) -> CutPlan:
        """Build a plan by hand, for the method ``cut_plan`` of a module of one's own.

        ``axes`` gives, by array of the state dict, a group per axis, or None where it is whole; arrays not
        named are whole. ``stages`` names child modules whose own children are blocks that can be left out
        from the end: the module's forward pass has to run over the ones it has.

        Raises UserError for unknown names, another number of axes, and lengths that do not fit a group.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        if unknown := axes.keys() - shapes.keys():
            raise unknown_name("array of the model", min(unknown), shapes)
        modules = dict(module.named_modules())
        if unknown := set(stages) - modules.keys():
            raise unknown_name("child module", min(unknown), modules)
        children = {stage: [name for name, _ in modules[stage].named_children()] for stage in stages}
        blocks = {
            f"{stage}.{child}.": (stage, block)
            for stage, names in children.items()
            for block, child in enumerate(names)
        }
        arrays = []
        for name, shape in shapes.items():
            given = [Axis(a) if isinstance(a, str) else a for a in axes.get(name, [None] * len(shape))]
            place = next((where for start, where in blocks.items() if name.startswith(start)), (None, 0))
            arrays.append(ArrayAxes(name, shape, tuple(given), *place))
        return cls.of(arrays, [Stage(stage, len(names)) for stage, names in children.items()])

    @classmethod
    def of(cls, arrays: Sequence[ArrayAxes], stages: Sequence[Stage] = ()) -> CutPlan:
        """Build a plan from its arrays; the groups are those that their axes name, with as many units."""
        units: dict[str, int] = {}
        for array in arrays:
            if len(array.axes) != len(array.shape):
                raise UserError(
                    f"cut plan: '{array.name}' has {len(array.shape)} axes, not {len(array.axes)}"
                )
            for axis, length in zip(array.axes, array.shape, strict=True):
                if axis is None:
                    continue
                count, rest = divmod(length, axis.repeat * axis.blocks)
                if rest or units.setdefault(axis.group, count) != count:
                    raise UserError(
                        f"cut plan: an axis of {length} of '{array.name}' does not fit group '{axis.group}' "
                        f"of {units.get(axis.group, count)} units with repeat={axis.repeat}, "
                        f"blocks={axis.blocks}"
                    )
        return cls(tuple(Group(*item) for item in units.items()), tuple(stages), tuple(arrays))

    @cached_property
    def full(self) -> Cut:
        """The cut that keeps everything."""
        return self.prefix()

    def prefix(self, width: Width = 1.0, depth: Mapping[str, int] | None = None) -> Cut:
        """Keep the first units of every group (HeteroFL, FjORD): narrower cuts are part of wider ones."""
        return self._cut(width, depth, lambda units, count: range(count))

    def window(self, width: Width = 1.0, offset: int = 0, depth: Mapping[str, int] | None = None) -> Cut:
        """Keep successive units from ``offset`` on, going round at the end (FedRolex: the round)."""
        return self._cut(width, depth, lambda n, count: [(offset + i) % n for i in range(count)])

    def random(self, width: Width, rng: np.random.Generator, depth: Mapping[str, int] | None = None) -> Cut:
        """Keep units drawn without replacement (Federated Dropout)."""
        return self._cut(width, depth, lambda n, count: rng.choice(n, count, replace=False).tolist())

    def of_sizes(self, sizes: Sizes) -> Cut:
        """Return the cut of the first units that has these sizes; raises UserError if there is none."""
        counts, depths = self.check(sizes)
        return Cut(
            tuple((group.name, range(counts[group.name])) for group in self.groups),
            tuple((stage.name, depths[stage.name]) for stage in self.stages),
        )

    def check(self, sizes: Sizes) -> tuple[dict[str, int], dict[str, int]]:
        """Return units by group and blocks by stage; raises UserError unless the model has such a part."""
        counts, depths = dict(sizes.units), dict(sizes.depths)
        known = {group.name: group.units for group in self.groups}
        if counts.keys() != known.keys() or len(counts) != len(sizes.units):
            raise UserError(
                f"sizes of a sub-model: groups {sorted(counts)}, but the model has {sorted(known)}"
            )
        depths_known = self._depths(depths)
        if depths.keys() != depths_known.keys() or len(depths) != len(sizes.depths):
            raise UserError(
                f"sizes of a sub-model: stages {sorted(depths)}, but the model has {sorted(depths_known)}"
            )
        used = self._groups_used(depths)
        for name, count in counts.items():
            low, high = (1, known[name]) if name in used else (0, 0)
            if not low <= count <= high:
                raise UserError(
                    f"sizes of a sub-model: {count} units of '{name}', allowed are {low} to {high}"
                )
        return counts, depths

    def check_cut(self, cut: Cut) -> None:
        """Raise UserError unless this is a cut of the planned model, with units in ascending order."""
        self.check(cut.sizes)
        for group in self.groups:
            units = np.asarray(cut.units[group.name], np.int64)
            if len(units) and (units[0] < 0 or units[-1] >= group.units or (np.diff(units) < 1).any()):
                raise UserError(
                    f"cut: units of '{group.name}' have to be ascending, from 0 to {group.units - 1} at most"
                )

    def index_map(self, cut: Cut, layout: Layout) -> IndexMap:
        """Return where each number of the sub-model lies in the model; see ``cutting_maps.IndexMap``."""
        from .cutting_maps import IndexMap

        return IndexMap.of(self, cut, layout)

    def _cut(
        self,
        width: Width,
        depth: Mapping[str, int] | None,
        choose: Callable[[int, int], Sequence[int]],
    ) -> Cut:
        depths = self._depths(depth or {})
        used = self._groups_used(depths)
        widths = self._widths(width)
        kept = []
        for group in self.groups:
            # 0.07 * 100 is a little above 7 in floating point, and means 7.
            count = max(1, math.ceil(widths[group.name] * group.units - 1e-9))
            units = choose(group.units, count)  # also of unused groups, so that an rng goes on alike
            kept.append((group.name, _compact(units) if group.name in used else range(0)))
        return Cut(tuple(kept), tuple((stage.name, depths[stage.name]) for stage in self.stages))

    def _widths(self, width: Width) -> dict[str, float]:
        names = [group.name for group in self.groups]
        if not isinstance(width, Mapping):
            widths = dict.fromkeys(names, width)
            given = [width]
        else:
            for pattern in width:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise unknown_name("group of units", pattern, names)
            widths = {name: _by_pattern(name, width) for name in names}
            given = list(width.values())
        for value in given:
            if not 0 < value <= 1:
                raise UserError(
                    f"width = {value}: the share of units to keep has to be above 0 and at most 1"
                )
        return widths

    def _depths(self, depth: Mapping[str, int]) -> dict[str, int]:
        depths = {stage.name: stage.depth for stage in self.stages}
        for name, value in depth.items():
            if name not in depths:
                raise unknown_name("stage", name, depths)
            if not _is_count(value) or not 1 <= value <= depths[name]:
                raise UserError(f"depth of '{name}' = {value}: allowed are 1 to {depths[name]} blocks")
        return depths | dict(depth)

    def _groups_used(self, depths: Mapping[str, int]) -> set[str]:
        present = (array for array in self.arrays if array.stays(depths))
        return {axis.group for array in present for axis in array.axes if axis is not None}


def _by_pattern(name: str, width: Mapping[str, float]) -> float:
    if name in width:
        return width[name]
    return next((value for pattern, value in width.items() if fnmatchcase(name, pattern)), 1.0)


def _compact(units: Sequence[int]) -> Units:
    ordered = sorted(units)
    if ordered[-1] - ordered[0] + 1 == len(ordered):
        return range(ordered[0], ordered[-1] + 1)
    return tuple(ordered)


def _within(units: Units, other: Units) -> bool:
    if isinstance(units, range) and isinstance(other, range):
        return not units or (bool(other) and other[0] <= units[0] and units[-1] <= other[-1])
    return set(units) <= set(other)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
