"""The picture of a table: its first metric, a panel per block, one colour scale for all."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..results.folder import write_atomically
from .cells import Plan
from .metrics import METRICS, Metric
from .on_disk import DONE, FAILED, REFUSED, SKIPPED, STARTED, Entries
from .sheet import Block, blocks_of, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize

_CELL_INCHES, _LINE_INCHES = 0.62, 0.29
_LETTER_INCHES = 0.075
_MOST_INCHES = 60.0
_WORDS = {FAILED: "failed", REFUSED: "cannot", SKIPPED: "–", STARTED: "…", DONE: "–"}


def draw_heat_map(plan: Plan, entries: Entries, path: Path, dpi: int = 150) -> None:
    """Draw a table's means and save the picture as a PNG.

    Light is better. A cell without a figure is grey and says why; the best of a column is bold.
    """
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    name = plan.table.metrics[0]
    metric = METRICS[name]
    blocks = list(blocks_of(plan, entries, name))
    known = [s.mean * metric.scale for b in blocks for s in b.cells.values() if s.mean is not None]
    finite = [value for value in known if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    norm = Normalize(low, high if high > low else low + 1.0)
    # Dark to light in the direction of better, so that it also reads in grey.
    colours = colormaps["viridis" if metric.better != "lower" else "viridis_r"]
    across, down = _arrangement(plan, len(blocks))
    width, height = _panel_inches(plan)
    figure = Figure(
        figsize=(min(_MOST_INCHES, across * width + 1.2), min(_MOST_INCHES, down * height + 0.6)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, block in zip(panels, blocks, strict=False):
        _draw_block(axes, plan, block, metric, norm, colours)
    for axes in panels[len(blocks) :]:
        axes.set_axis_off()
    figure.suptitle(f"{plan.table.title}: {metric.title}", fontsize=10)
    if finite:
        bar = figure.colorbar(ScalarMappable(norm, colours), ax=list(panels), shrink=0.8, pad=0.02)
        bar.set_label(metric.title, fontsize=8)
        bar.ax.tick_params(labelsize=7)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    write_atomically(path, buffer.getvalue())


def _arrangement(plan: Plan, blocks: int) -> tuple[int, int]:
    """Return panels across and down: the last of several axes of blocks goes across."""
    axes = plan.table.blocks
    across = len(axes[-1].values) if len(axes) > 1 else min(blocks, 2)
    across = max(1, min(across, 4))
    return across, -(-blocks // across)


def _panel_inches(plan: Plan) -> tuple[float, float]:
    rows, columns = plan.table.rows.values, plan.table.columns.values
    names = _LETTER_INCHES * max(len(row.shown) for row in rows)
    heads = _LETTER_INCHES * max(len(column.shown) for column in columns)
    width = 0.4 + names + _CELL_INCHES * len(columns)
    return max(width, 2.5), 0.7 + heads * 0.75 + _LINE_INCHES * len(rows)


def _draw_block(
    axes: Axes, plan: Plan, block: Block, metric: Metric, norm: Normalize, colours: Colormap
) -> None:
    rows, columns = plan.table.rows.values, plan.table.columns.values
    means = np.full((len(rows), len(columns)), np.nan)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            if (mean := block.cells[row.name, column.name].mean) is not None:
                means[i, j] = mean * metric.scale
    axes.set_facecolor("#dddddd")
    axes.imshow(np.ma.masked_invalid(means), aspect="auto", norm=norm, cmap=colours)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            shown = block.cells[row.name, column.name]
            if shown.mean is None:
                text, colour = _WORDS.get(shown.entry.state, "missing"), "#555555"
            else:
                text = f"{means[i, j]:.{min(metric.digits, 1)}f}" if abs(means[i, j]) < 1e4 else "large"
                colour = "black" if _is_light(colours(norm(means[i, j]))) else "white"
            weight = "bold" if shown.best else "normal"
            axes.text(j, i, text, ha="center", va="center", fontsize=7, color=colour, weight=weight)
    heads = [column.shown for column in columns]
    axes.set_xticks(range(len(columns)), heads, fontsize=7)
    if max(map(len, heads)) > 6:
        for tick in axes.get_xticklabels():
            tick.set(rotation=40, horizontalalignment="right")
    axes.set_yticks(range(len(rows)), [row.shown for row in rows], fontsize=7)
    axes.set_xlabel(plan.table.columns.shown, fontsize=7)
    axes.set_title(title_of(plan, block.names), loc="left", fontsize=8)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _is_light(colour: tuple[float, ...]) -> bool:
    red, green, blue = colour[:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue > 0.5
