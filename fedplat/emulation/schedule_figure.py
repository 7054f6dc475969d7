"""A picture of a device schedule: what every node has in every round."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .ranges import MOST
from .schedule import MB, MBIT, DeviceSchedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

_PANELS = (
    ("memory_bytes", "memory [MB]", MB),
    ("down_bps", "down [Mbit/s]", MBIT),
    ("up_bps", "up [Mbit/s]", MBIT),
)
_SPREAD_FOR_LOG = 10.0
_MOST_CELLS_WITH_LINES = 60
# The map runs from dark blue to yellow, in order of lightness, which colour-blind readers see as well.
_MAP = "cividis"
_DROPS = "#D55E00"


def draw_schedule(schedule: DeviceSchedule, path: Path, title: str) -> None:
    """Draw memory and both speeds as heat maps (nodes, rounds) and save them as a PNG.

    Rounds in which a node is away are blank; where it drops out, memory has a cross. A scale is logarithmic
    if the values are far apart. The same schedule makes the same file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    nodes, rounds = schedule.nodes, schedule.rounds
    panel = min(max(0.08 * nodes, 1.3), 4.0)
    figure = Figure(figsize=(8.0, 1.2 + 3 * (panel + 0.25)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Axes] = list(figure.subplots(len(_PANELS), 1, sharex=True))
    for place, (column, label, unit) in enumerate(_PANELS):
        values = getattr(schedule, column) / unit
        _heat_map(figure, axes[place], values, schedule.available, label)
        axes[place].set_ylabel("client")
        axes[place].yaxis.set_major_locator(MaxNLocator(nbins=min(nodes, 8), integer=True, min_n_ticks=1))
        if nodes <= _MOST_CELLS_WITH_LINES and rounds <= _MOST_CELLS_WITH_LINES:
            axes[place].hlines(np.arange(1, nodes) - 0.5, 0.5, rounds + 0.5, color="white", linewidth=0.4)
            axes[place].vlines(np.arange(1, rounds) + 0.5, -0.5, nodes - 0.5, color="white", linewidth=0.4)
    axes[-1].set_xlabel("round")
    axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    axes[0].set_title(title, loc="left", fontsize=11)
    _legend(figure, axes[0], schedule)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _heat_map(
    figure: Figure, axes: Axes, values: NDArray[np.float64], there: NDArray[np.bool_], label: str
) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import StrMethodFormatter

    nodes, rounds = values.shape
    known = values[there]
    norm, logarithmic = _scale(known)
    colours = colormaps[_MAP].with_extremes(bad="white", under=colormaps[_MAP](0.0))
    # Below a logarithmic scale's least positive value lies 0, which would be masked there as if away.
    shown = np.ma.masked_array(np.maximum(values, norm.vmin or 0.0), mask=~there)
    image = axes.imshow(
        shown, cmap=colours, norm=norm, aspect="auto", interpolation="nearest",
        extent=(0.5, rounds + 0.5, nodes - 0.5, -0.5),
    )  # fmt: skip
    free = bool(known.size) and bool((known >= MOST).all())
    label = f"{label}: no limit" if free else label
    bar = figure.colorbar(image, ax=axes, label=label, aspect=12, pad=0.015)
    if free:
        bar.set_ticks([])
    if logarithmic:
        bar.ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.spines[:].set_color("0.6")


def _scale(known: NDArray[np.float64]) -> tuple[Normalize, bool]:
    """Return the scale of the values of nodes that are there, and whether it is logarithmic."""
    from matplotlib.colors import LogNorm, Normalize

    if not known.size:
        return Normalize(0, 1), False
    positive = known[known > 0]
    low, high = (float(positive.min()), float(positive.max())) if positive.size else (0.0, 0.0)
    if low and high / low > _SPREAD_FOR_LOG:
        return LogNorm(low, high), True
    least, most = float(known.min()), float(known.max())
    # Values that are all the same need a scale with two ends.
    return Normalize(least if least < 0.999 * most else 0.0, most or 1.0), False


def _legend(figure: Figure, axes: Axes, schedule: DeviceSchedule) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = []
    away = int((~schedule.available).sum())
    if away:
        share = away / schedule.available.size
        handles.append(Patch(facecolor="white", edgecolor="0.5", linewidth=0.5, label=f"away ({share:.1%})"))
    node, column = np.nonzero(schedule.drops) if schedule.drops is not None else ((), ())
    if len(node):
        size = float(np.clip(250 / schedule.nodes, 1.5, 6))
        cross: dict[str, Any] = {"color": _DROPS, "marker": "x", "mew": 1.2, "linestyle": ""}
        axes.plot(np.asarray(column) + 1, node, markersize=size, **cross)
        handles.append(Line2D([], [], markersize=6, **cross, label=f"drops out ({len(node):,})"))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=9, ncols=2)
