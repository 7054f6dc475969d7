"""A picture of device logs: free memory, link speeds and availability over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .logs import DeviceLogs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
_PANELS = (("mem_free_mb", "free memory [MB]"), ("down_mbps", "down [Mbit/s]"), ("up_mbps", "up [Mbit/s]"))
_GRID = 600


def draw_logs(logs: DeviceLogs, path: Path, title: str) -> None:
    """Draw memory, both speeds and, if any log has it, the share of devices available; save as a PNG.

    Up to seven devices have a line each; of more, the median, the middle half and the middle 90 % of those
    whose log covers the time. Each log is drawn over its own span. The same logs make the same file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    few = len(logs) <= len(_COLOURS)
    panels = len(_PANELS) + any(log.available is not None for log in logs)
    figure = Figure(figsize=(8.0, 0.6 + 1.9 * panels + (0.4 if few else 0.3)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Axes] = list(figure.subplots(panels, 1, sharex=True))
    start = min(float(log.time_s[0]) for log in logs)
    end = max(float(log.time_s[-1]) for log in logs)
    times = np.linspace(start, end if end > start else start + 1, _GRID)
    unit, divisor = _unit(times[-1] - times[0])
    for place, (column, label) in enumerate(_PANELS):
        if few:
            _lines(axes[place], logs, column, divisor)
        else:
            _bands(axes[place], times / divisor, _values(logs, column, times))
        axes[place].set_ylabel(label)
        if _spread(logs, column) > 30:  # phones beside laptops: a linear axis would flatten most of them
            axes[place].set_yscale("log")
            axes[place].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        else:
            axes[place].set_ylim(bottom=0)
    if panels > len(_PANELS):
        known = _values(logs, "available", times)
        axes[-1].fill_between(
            times / divisor, _column_means(known) * 100, step="post", color="#0072B2", alpha=0.5, linewidth=0
        )
        axes[-1].set(ylabel="available [%]", ylim=(0, 100))
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.88", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.margins(x=0)
    axes[-1].set_xlabel(f"time [{unit}]")
    axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 3, 4, 6, 8, 10]))
    axes[0].set_title(title, loc="left", fontsize=11)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=9, ncols=4)
    figure.align_ylabels(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _unit(span_s: float) -> tuple[str, float]:
    return ("h", 3600.0) if span_s >= 7200 else ("min", 60.0) if span_s >= 300 else ("s", 1.0)


def _spread(logs: DeviceLogs, column: str) -> float:
    """Return how many times the 5 % largest values are above the 5 % smallest; 1 where some are near 0."""
    low, high = np.quantile(np.concatenate([getattr(log, column) for log in logs]), (0.05, 0.95))
    return float(high / low) if low > 0 else 1.0


def _lines(axes: Axes, logs: DeviceLogs, column: str, divisor: float) -> None:
    for colour, log in zip(_COLOURS, logs, strict=False):
        times, values = log.time_s / divisor, getattr(log, column)
        if len(log) == 1:  # one sample holds for ever
            axes.axhline(values[0], color=colour, linewidth=1.2, label=log.device)
        else:
            axes.step(times, values, where="post", color=colour, linewidth=1.2, label=log.device)


def _values(logs: DeviceLogs, column: str, times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values (devices, times), NaN outside a log's span; without the column, 1."""
    table = np.full((len(logs), len(times)), np.nan)
    for row, log in zip(table, logs, strict=True):
        values = getattr(log, column)
        values = np.ones(len(log)) if values is None else values
        inside = (
            (times >= log.time_s[0]) & (times <= log.time_s[-1])
            if len(log) > 1
            else np.ones(len(times), bool)
        )
        row[inside] = values[log.index_at(times[inside], "clamp")]
    return table


def _column_means(table: NDArray[np.float64]) -> NDArray[np.float64]:
    known = np.isfinite(table)
    return np.nansum(table, axis=0) / np.maximum(known.sum(axis=0), 1)


def _bands(axes: Axes, times: NDArray[np.float64], table: NDArray[np.float64]) -> None:
    covered = np.isfinite(table).any(axis=0)
    bands = np.full((5, len(times)), np.nan)
    bands[:, covered] = np.nanquantile(table[:, covered], (0.05, 0.25, 0.5, 0.75, 0.95), axis=0)
    colour = "#0072B2"
    axes.fill_between(
        times, bands[0], bands[4], color=colour, alpha=0.18, linewidth=0, label="middle 90 % of devices"
    )
    axes.fill_between(times, bands[1], bands[3], color=colour, alpha=0.35, linewidth=0, label="middle half")
    axes.plot(times, bands[2], color=colour, linewidth=1.5, label="median")
