"""The picture of one strategy's clients: the weight each had in every round, and the rule's scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .figures import spread, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]

_KNOWN = frozenset(
    ("round", "client", "status", "reason", "samples", "weight", "verdict", "update_norm", "truth", "attack",
     "device", "submodel", "edge")
)  # fmt: skip
_HEIGHT_INCHES = 2.4
_LABEL_POINTS = 9.0


def score_names(rows: Sequence[Row]) -> list[str]:
    """Return the figures per client that a rule added to the records, such as a credibility."""
    return sorted({key for row in rows for key in row.keys() - _KNOWN})


def draw_clients(rows: Sequence[Row], path: Path, title: str, dpi: int = 150) -> None:
    """Draw the rows of a ``clients.jsonl``: weight in the model, and every score, by client over the rounds.

    Each client is a thin line, coloured by what it truly is: honest, or the label of its attack; the thick
    line is the mean of the group. Rounds in which a client did not take part are left open.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = ["weight", *score_names(rows)]
    figure = Figure(figsize=(7.2, 0.6 + _HEIGHT_INCHES * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
    panels[0].set_title(title, loc="left", fontsize=11)
    for axes, name in zip(panels, names, strict=True):
        _panel(axes, rows, name)
    panels[-1].set_xlabel("round")
    figure.align_ylabels()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)


def _panel(axes: Axes, rows: Sequence[Row], name: str) -> None:
    from matplotlib.ticker import MaxNLocator

    first, last = min(row["round"] for row in rows), max(row["round"] for row in rows)
    axes.set_ylabel(name.replace("_", " ") + (" in the model" if name == "weight" else ""))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.88", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlim(first, max(last, first + 1))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    rounds = list(range(first, last + 1))
    groups: dict[str, dict[int, dict[int, float]]] = {}
    for row in rows:
        value = row.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            client = groups.setdefault(row.get("attack") or "honest", {}).setdefault(row["client"], {})
            client[row["round"]] = float(value)
    ends = []
    for index, group in enumerate(sorted(groups, key=lambda label: (label != "honest", label))):
        colour, dash = style(index)
        members = groups[group].values()
        for values in members:
            heights = [values.get(number, math.nan) for number in rounds]
            axes.plot(rounds, heights, color=colour, linewidth=0.6, alpha=0.35)
        means = [_mean([v[number] for v in members if number in v]) for number in rounds]
        few = len(rounds) <= 12
        axes.plot(
            rounds, means, color=colour, linestyle=dash, linewidth=1.8,
            marker="o" if few else None, markersize=3.2, zorder=3,
        )  # fmt: skip
        known = [mean for mean in means if math.isfinite(mean)]
        ends.append((known[-1], f"{group} ({len(members)})", colour))
    _name_ends(axes, ends)


def _name_ends(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each group's name beside the end of its line, moved apart where they would touch."""
    low, high = axes.get_ylim()
    ends.sort()
    wanted = [(height - low) / (high - low) for height, _, _ in ends]
    gap = _LABEL_POINTS * 1.3 / 72 / _HEIGHT_INCHES
    for place, (_, name, colour) in zip(spread(wanted, gap, 1.0), ends, strict=True):
        axes.text(
            1.02, place, name, transform=axes.transAxes, color=colour, fontsize=_LABEL_POINTS, va="center"
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
