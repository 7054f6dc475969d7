"""The picture of a run: accuracy and loss over the rounds, one line per strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .values import finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart, without the yellow, too pale for lines.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
_STYLES = tuple((colour, dash) for dash, colour in product(("-", (0, (4, 1.6)), (0, (1, 1.4))), _COLOURS))
_LABEL_POINTS = 9.0
_DECADES_FOR_LOG = 2.0
# How high the two parts of the picture come out; names need to know how much room they have.
_TOP_INCHES, _BOTTOM_INCHES = 3.0, 2.0


@dataclass(frozen=True)
class Curve:
    """One strategy's evaluations: rounds, accuracy in %, loss; None where a value is not finite.

    In place of rounds may stand what they have cost so far.
    """

    name: str
    rounds: Sequence[float]
    accuracy: list[float | None]
    loss: list[float | None]

    @classmethod
    def of(cls, name: str, records: Sequence[Mapping[str, Any]]) -> Curve:
        """Return the curve of the rounds that were evaluated."""
        rows = [record for record in records if record.get("accuracy") is not None]
        accuracy = [None if (share := finite(r["accuracy"])) is None else 100 * share for r in rows]
        return cls(
            name, [record["round"] for record in rows], accuracy, [finite(r.get("loss")) for r in rows]
        )


def draw_curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    path: Path,
    title: str,
    rounds: int | None = None,
    dpi: int = 200,
) -> None:
    """Draw the ``rounds.jsonl`` records of each strategy and save the picture as a PNG.

    Accuracy is above, loss below, on a log scale if it spans more than two decades. Each line is named at its
    end; a loss that stops being finite ends in a cross. ``rounds`` is how many were planned.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = [Curve.of(name, records) for name, records in runs.items()]
    last = max([rounds or 0, *(curve.rounds[-1] for curve in curves if curve.rounds)])
    figure = Figure(figsize=(7.2, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    top.set_title(title, loc="left", fontsize=11)
    top.set_ylabel("test accuracy (%)")
    bottom.set(xlabel="round", ylabel="test loss")
    figure.align_ylabels()
    for axes in (top, bottom):
        prepare(axes, last)
    draw_lines(top, curves, lambda curve: curve.accuracy, crosses=False)
    accuracy_range(top, curves)
    draw_lines(bottom, curves, lambda curve: curve.loss, crosses=True)
    _loss_range(bottom, curves)
    # After the limits are set: the names are placed in fractions of the axes.
    name_lines(top, curves, "accuracy", _TOP_INCHES)
    name_lines(bottom, curves, "loss", _BOTTOM_INCHES)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)


def prepare(axes: Axes, last: float, integer: bool = True, ticks: int = 8) -> None:
    """Set up axes from 0 to ``last``."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, last if last > 0 else 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, integer=integer, min_n_ticks=1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.88", linewidth=0.7)
    axes.set_axisbelow(True)


def draw_lines(
    axes: Axes, curves: Sequence[Curve], values: Callable[[Curve], list[float | None]], crosses: bool
) -> None:
    """Draw a line per strategy; ``crosses`` marks where one stops being finite."""
    for index, curve in enumerate(curves):
        colour, dash = style(index)
        heights = [math.nan if value is None else value for value in values(curve)]
        if not any(map(math.isfinite, heights)):
            continue  # a line without points has no extent, and the layout needs one
        few = len(heights) <= 12
        axes.plot(
            curve.rounds, heights, color=colour, linestyle=dash, linewidth=1.7, clip_on=False,
            marker="o" if few else None, markersize=3.2, zorder=3,
        )  # fmt: skip
        end = _break(heights)
        if crosses and end is not None:
            axes.plot(curve.rounds[end], heights[end], "x", color=colour, markersize=7, mew=2, zorder=4)


def style(index: int) -> tuple[str, Any]:
    """Return colour and dashes of the n-th line; 21 differ."""
    return _STYLES[index % len(_STYLES)]


def _break(heights: Sequence[float]) -> int | None:
    """Return where the last finite value is, if others follow that are not finite."""
    known = [index for index, value in enumerate(heights) if math.isfinite(value)]
    return known[-1] if known and known[-1] < len(heights) - 1 else None


def accuracy_range(axes: Axes, curves: Sequence[Curve]) -> None:
    """Set the range of an accuracy axis in %."""
    known = [value for curve in curves for value in curve.accuracy if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 100.0)
    margin = max(0.06 * (high - low), 1.0)
    axes.set_ylim(max(0.0, low - margin), min(100.0, high + margin))


def _loss_range(axes: Axes, curves: Sequence[Curve]) -> None:
    known = [value for curve in curves for value in curve.loss if value is not None]
    positive = [value for value in known if value > 0]
    if not known:
        axes.set_ylim(0, 1)
    elif positive and max(positive) / min(positive) > 10**_DECADES_FOR_LOG:
        axes.set_yscale("log", nonpositive="mask")
        axes.set_ylim(min(positive) / 1.4, max(positive) * 1.4)
    else:
        axes.set_ylim(min(0.0, *known), max(known) * 1.06 or 1.0)


def name_lines(axes: Axes, curves: Sequence[Curve], values: str, inches: float) -> None:
    """Write each line's name to the right of its end, moved apart where they would touch."""
    to_fraction = axes.transScale + axes.transLimits
    ends = []
    for index, curve in enumerate(curves):
        known = [(r, v) for r, v in zip(curve.rounds, getattr(curve, values), strict=True) if v is not None]
        if known:
            # Fractions of the axes stay what they are when the layout makes room for the names.
            x, y = to_fraction.transform(known[-1]).tolist()
            broken = values == "loss" and known[-1][0] != curve.rounds[-1]
            ends.append((y, x, f"{curve.name} (diverged)" if broken else curve.name, *style(index)))
    ends.sort(key=lambda end: end[0])
    gap = _LABEL_POINTS * 1.3 / 72 / inches
    for (y, x, name, colour, dash), place in zip(
        ends, spread([end[0] for end in ends], gap, 1.0), strict=True
    ):
        side: dict[str, Any] = {"transform": axes.transAxes, "clip_on": False, "color": colour}
        axes.plot([x, 1.0], [y, y], linestyle=":", linewidth=0.6 if x < 1 else 0.0, **side)
        axes.plot([1.01, 1.065], [y, place], linestyle=dash, linewidth=1.1, **side)
        axes.text(1.075, place, name, fontsize=_LABEL_POINTS, va="center", **side)


def spread(wanted: Sequence[float], gap: float, height: float) -> list[float]:
    """Return places at least ``gap`` apart, in order and near the wanted ones, that begin within 0..height.

    If there is no room for all the gap shrinks.

    >>> spread([10, 10, 50], 4, 100)
    [8.0, 12.0, 50.0]
    >>> spread([0, 0, 0], 80, 100)
    [0.0, 50.0, 100.0]
    """
    count = len(wanted)
    gap = min(gap, height / max(count - 1, 1))
    groups: list[
        tuple[float, int]
    ] = []  # centre and number of labels of each block that has been pushed together
    for value in wanted:
        centre, size = float(value), 1
        while groups and centre - (size - 1) * gap / 2 < groups[-1][0] + (groups[-1][1] - 1) * gap / 2 + gap:
            other, others = groups.pop()
            centre, size = (centre * size + other * others) / (size + others), size + others
        half = (size - 1) * gap / 2
        groups.append((min(max(centre, half), height - half), size))
    return [centre + (index - (size - 1) / 2) * gap for centre, size in groups for index in range(size)]
