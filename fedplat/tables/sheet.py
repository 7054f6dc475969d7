"""A table's entries as they are written: texts, best of each column, and published figures beside ours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ..results.tables import NOTHING
from .cells import Plan, Position
from .metrics import METRICS, Metric
from .on_disk import DONE, FAILED, REFUSED, SKIPPED, STARTED, Entries, Entry
from .spec import Published


@dataclass(frozen=True)
class Figure:
    """A published figure and ours minus it, both in the unit shown; the latter is None until there is one."""

    published: Published
    value: float
    deviation: float | None

    def text(self, metric: Metric) -> str:
        """Return both, rounded as the metric is."""
        digits = metric.digits
        apart = "" if self.deviation is None else f", {self.deviation:+.{digits}f}".replace("-", "−")
        return f"published {self.value:.{digits}f}{apart}"


@dataclass(frozen=True)
class Shown:
    """One cell of one metric: its entry, figures unscaled, whether it is the best of its column."""

    entry: Entry
    mean: float | None
    std: float | None
    seeds: int
    best: bool
    figures: tuple[Figure, ...]

    def text(self, metric: Metric, wanted: int, plus_minus: str = " ± ") -> str:
        """Return mean and deviation over seeds, or what there is instead."""
        if self.mean is None:
            return {
                DONE: NOTHING,
                SKIPPED: NOTHING,
                FAILED: "failed",
                REFUSED: "cannot work",
                STARTED: "unfinished",
            }.get(self.entry.state, "missing")
        text = metric.text(self.mean)
        if self.std is not None:
            text += f"{plus_minus}{metric.text(self.std)}"
        return text if self.seeds == wanted else f"{text} ({self.seeds} of {wanted} seeds)"


@dataclass(frozen=True)
class Block:
    """One block of one metric: its names, and cells by row and column."""

    names: Position
    metric: str
    cells: dict[tuple[str, str], Shown]


def blocks_of(plan: Plan, entries: Entries, metric: str) -> Iterator[Block]:
    """Yield the blocks of a table for one metric."""
    table = plan.table
    rows, columns = ([value.name for value in axis.values] for axis in (table.rows, table.columns))
    for block in itertools.product(*([value.name for value in axis.values] for axis in table.blocks)):
        cells = {}
        for column in columns:
            best = best_rows(METRICS[metric], {r: entries[(*block, r, column)].mean(metric) for r in rows})
            for row in rows:
                entry = entries[(*block, row, column)]
                cells[row, column] = Shown(
                    entry,
                    entry.mean(metric),
                    entry.std(metric),
                    len(entry.numbers(metric)),
                    row in best,
                    tuple(figures_of(plan, entry, metric)),
                )
        yield Block(block, metric, cells)


def best_rows(metric: Metric, means: dict[str, float | None]) -> set[str]:
    """Return the rows with the best mean, all whose text is the same; none if all rows are equal.

    >>> sorted(best_rows(METRICS["accuracy"], {"a": 0.93121, "b": 0.93119, "c": 0.9, "d": None}))
    ['a', 'b']
    """
    known = {row: mean for row, mean in means.items() if mean is not None}
    if len(known) < 2 or not metric.better:
        return set()
    best = (max if metric.better == "higher" else min)(known.values())
    found = {row for row, mean in known.items() if metric.text(mean) == metric.text(best)}
    return found if len(found) < len(known) else set()


def figures_of(plan: Plan, entry: Entry, metric: str) -> Iterator[Figure]:
    """Yield what others published for a cell."""
    named = dict(zip((axis.name for axis in plan.table.axes), entry.position, strict=True))
    ours = entry.mean(metric)
    for published in plan.table.published:
        if (published.metric or plan.table.metrics[0]) != metric:
            continue
        for cell in published.cells:
            value = float(cell["value"])
            if all(named[axis] == str(name) for axis, name in cell.items() if axis != "value"):
                yield Figure(published, value, None if ours is None else ours * METRICS[metric].scale - value)


def title_of(plan: Plan, block: Position) -> str:
    """Return a block's heading, "" for a table of one block."""
    return ", ".join(
        f"{axis.shown}: {next(value.shown for value in axis.values if value.name == name)}"
        for axis, name in zip(plan.table.blocks, block, strict=True)
    )


def shown_metrics(plan: Plan, entries: Entries) -> list[str]:
    """Return the metrics to write: the first one always, others where a run has a figure."""
    first, *others = plan.table.metrics
    return [first, *(m for m in others if any(entry.numbers(m) for entry in entries.values()))]


def row_differences(plan: Plan) -> list[str]:
    """Return the settings, besides the strategy, in which runs of one column and block differ.

    Rows of strategies should face exactly the same situation; what is not the same has to be told.
    """
    aside = {"strategies", "strategy", "submodels", "description", "name"}
    first: dict[tuple[Position, int], dict[str, object]] = {}
    differing: set[str] = set()
    for cell in plan.cells:
        values = {key: value for key, value in cell.config.to_dict().items() if key not in aside}
        *block, _, column = cell.position
        other = first.setdefault(((*block, column), cell.seed), values)
        differing |= {key for key in values.keys() | other.keys() if values.get(key) != other.get(key)}
    return sorted(differing)
