"""What a model search may choose: blocks of each stage, and widths of groups of units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedplat.errors import UserError
from fedplat.models.cutting import CutPlan, Sizes

IntArray = NDArray[np.int64]
SpaceName = Literal["auto", "paper", "stages", "groups", "global"]

MOST_TO_ENUMERATE = 100_000
_PAPER_WIDTHS = (0.5, 1.0)
_PAPER_STAGES = 2


@dataclass(frozen=True)
class Knob:
    """One choice, with ascending levels: blocks of ``stage``, or else the width of ``groups``."""

    levels: tuple[float, ...]
    stage: str | None = None
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class SearchSpace:
    """All combinations of the knobs' levels.

    An architecture is a row of ``choices`` (m, knobs) int64: the number of the level of each knob. Groups
    without a knob stay whole, stages without one keep all their blocks. Sub-models are prefixes, so a higher
    level contains the lower ones.
    """

    plan: CutPlan
    knobs: tuple[Knob, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Levels of each knob."""
        return tuple(len(knob.levels) for knob in self.knobs)

    @property
    def size(self) -> int:
        """Number of architectures."""
        return math.prod(self.counts)

    def every(self) -> IntArray:
        """Return all architectures (size, knobs), not to be changed; the last knob changes fastest."""
        return self._every

    @cached_property
    def _every(self) -> IntArray:
        shape = self.counts or (1,)
        every = np.stack(np.unravel_index(np.arange(self.size), shape), axis=1)[:, : len(self.knobs)]
        every.flags.writeable = False
        return every

    def smallest(self) -> IntArray:
        """Return the smallest architecture (knobs,)."""
        return np.zeros(len(self.knobs), np.int64)

    def largest(self) -> IntArray:
        """Return the largest architecture (knobs,)."""
        return np.array(self.counts, np.int64) - 1

    def shallowest(self) -> IntArray:
        """Return the architecture (knobs,) of the fewest blocks and the largest widths."""
        return np.where([knob.stage is not None for knob in self.knobs], 0, self.largest())

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """Return n architectures, each level drawn uniformly, (n, knobs)."""
        return rng.integers(0, self.counts or (1,), (n, len(self.knobs)), np.int64)

    def depths(self, choices: IntArray) -> IntArray:
        """Return the blocks of the plan's stages, (m, stages)."""
        of = {knob.stage: k for k, knob in enumerate(self.knobs) if knob.stage is not None}
        columns = [
            np.asarray(self.knobs[of[stage.name]].levels, np.int64)[choices[:, of[stage.name]]]
            if stage.name in of
            else np.full(len(choices), stage.depth)
            for stage in self.plan.stages
        ]
        return np.stack(columns, axis=1) if columns else np.empty((len(choices), 0), np.int64)

    def units(self, choices: IntArray) -> IntArray:
        """Return the kept units of the plan's groups, (m, groups); 0 where no block that stays uses them."""
        of = {name: k for k, knob in enumerate(self.knobs) for name in knob.groups}
        depths = self.depths(choices)
        columns = []
        for group in self.plan.groups:
            widths = self.knobs[of[group.name]].levels if group.name in of else (1.0,)
            kept = np.array([max(1, math.ceil(width * group.units - 1e-9)) for width in widths])
            units = kept[choices[:, of[group.name]]] if group.name in of else np.full(len(choices), kept[0])
            first = self._first_blocks[group.name]
            if None not in first:
                present = [depths[:, stage] > block for stage, block in first.items() if stage is not None]
                units = units * np.any(present, axis=0)
            columns.append(units)
        return np.stack(columns, axis=1) if columns else np.empty((len(choices), 0), np.int64)

    def sizes(self, choice: IntArray) -> Sizes:
        """Return what a client is told to build one architecture (knobs,)."""
        units, depths = self.units(choice[None])[0], self.depths(choice[None])[0]
        return Sizes(
            tuple((group.name, int(n)) for group, n in zip(self.plan.groups, units, strict=True)),
            tuple((stage.name, int(n)) for stage, n in zip(self.plan.stages, depths, strict=True)),
        )

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Knobs of depth and of width that act on the same blocks, of those that can be left out."""
        later: dict[str, set[str]] = {}
        for array in self.plan.arrays:
            if array.stage is not None and array.block:
                later.setdefault(array.stage, set()).update(axis.group for axis in array.axes if axis)
        return tuple(
            (d, w)
            for d, depth in enumerate(self.knobs)
            for w, width in enumerate(self.knobs)
            if depth.stage is not None and later.get(depth.stage, set()).intersection(width.groups)
        )

    @cached_property
    def _first_blocks(self) -> dict[str, dict[int | None, int]]:
        """Return, by group, the first block of each stage (by number) that uses it; None: it always stays."""
        numbers = {stage.name: n for n, stage in enumerate(self.plan.stages)}
        first: dict[str, dict[int | None, int]] = {group.name: {} for group in self.plan.groups}
        for array in self.plan.arrays:
            stage = None if array.stage is None else numbers[array.stage]
            for axis in array.axes:
                if axis is not None:
                    seen = first[axis.group]
                    seen[stage] = min(seen.get(stage, array.block), array.block)
        return first


def search_space(
    plan: CutPlan,
    name: SpaceName = "auto",
    widths: Sequence[float] = (0.25, 0.5, 0.75, 1.0),
    min_depth: int = 1,
) -> SearchSpace:
    """Return the architectures to choose from, by name.

    ============ ==========================================================================================
    ``paper``    1 to all blocks per stage; 0.5 or 1 of the channels of the first two stages
    ``stages``   1 to all blocks per stage; one of ``widths`` per stage, and per group outside of stages
    ``groups``   1 to all blocks per stage; one of ``widths`` per group
    ``global``   1 to all blocks per stage; one of ``widths`` for the whole model
    ``auto``     ``paper`` for a model with two stages or more; else ``groups`` or, if those are more than
                 100,000 architectures, ``global``
    ============ ==========================================================================================

    ``min_depth`` is the fewest blocks of a stage, where it has so many. A group of units belongs to the stage
    that names it or, such as a stem's channels, to the first stage that uses it.

    Source of ``paper``: the released code of Yao, "Revisiting System-Heterogeneous Federated Learning through
    Dynamic Model Search", IEEE BigData 2024; there no stage has fewer than 2 blocks.

    Raises UserError for widths outside (0, 1], for a ``min_depth`` below 1, and for ``paper`` without stages.
    """
    if not widths or not all(0 < width <= 1 for width in widths):
        raise UserError(f"widths = {list(widths)}: give shares of the units, each above 0 and at most 1")
    if min_depth < 1:
        raise UserError(f"min_depth = {min_depth}: a stage keeps at least 1 block")
    if name == "paper" and not plan.stages:
        raise UserError("space = 'paper' needs a model with stages, such as resnet18; use 'groups' or 'auto'")
    depth = tuple(
        Knob(tuple(range(min(min_depth, stage.depth), stage.depth + 1)), stage.name)
        for stage in plan.stages
        if stage.depth > min_depth
    )
    levels = tuple(sorted(set(widths)))
    homes = _homes(plan)
    if name == "auto" and len(plan.stages) > 1:
        name = "paper"
    elif name == "auto":
        size = math.prod(len(knob.levels) for knob in depth) * len(levels) ** len(plan.groups)
        name = "groups" if size <= MOST_TO_ENUMERATE else "global"
    if name == "paper":
        together = [homes[stage.name] for stage in plan.stages[:_PAPER_STAGES]]
        levels = _PAPER_WIDTHS
    elif name == "stages":
        together = list(homes.values())
    elif name == "groups":
        together = [(group.name,) for group in plan.groups]
    else:
        together = [tuple(group.name for group in plan.groups)]
    return SearchSpace(plan, (*depth, *(Knob(levels, groups=names) for names in together if names)))


def _homes(plan: CutPlan) -> dict[str, tuple[str, ...]]:
    """Return the groups of each stage, and of each group outside of stages under its own name."""
    homes: dict[str, list[str]] = {stage.name: [] for stage in plan.stages}
    for group in plan.groups:
        users = [
            array.stage
            for array in plan.arrays
            if array.stage is not None and any(axis and axis.group == group.name for axis in array.axes)
        ]
        named = [stage for stage in users if group.name == stage or group.name.startswith(f"{stage}.")]
        homes.setdefault((named or users or [group.name])[0], []).append(group.name)
    return {name: tuple(groups) for name, groups in homes.items()}
