"""Pictures of a run on emulated devices: accuracy over what it cost, and what became of every client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..emulation.schedule import DeviceSchedule
from ..emulation.situation import SCHEDULE
from .device_report import FOLDER, SIMULATED_PICTURE, outcomes_picture
from .figures import Curve, accuracy_range, draw_lines, name_lines, prepare
from .simulated import Progress

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .folder import RunFolder

Row = Mapping[str, Any]
Costs = Callable[[Progress], list[float | None]]

_HEIGHT_INCHES = 3.2
_MOST_CELLS_WITH_LINES = 60


@dataclass(frozen=True)
class Outcome:
    """A colour of the matrix: what it stands for, and which outcome of the client records that is."""

    text: str
    colour: str
    key: str


# They differ in lightness as well: pale is well, and the darker the more that went wrong on the device.
OUTCOMES = (
    Outcome("not asked", "#FFFFFF", ""),
    Outcome("away, not asked", "#DDDDDD", ""),
    Outcome("delivered", "#A6CEE3", "delivered"),
    Outcome("away when asked", "#8C8C8C", "away"),
    Outcome("late", "#E69F00", "late"),
    Outcome("dropped out", "#B3518F", "dropped"),
    Outcome("out of memory", "#000000", "out-of-memory"),
    Outcome("failed otherwise", "#009E73", "failed"),
)
NOT_ASKED, AWAY = 0, 1
_CODES = {outcome.key: code for code, outcome in enumerate(OUTCOMES) if outcome.key}


def draw_devices(folder: RunFolder, runs: Mapping[str, Sequence[Row]], title: str) -> None:
    """Draw the pictures of a run on emulated devices into its folder; none for another run."""
    draw_simulated(runs, folder.path / SIMULATED_PICTURE, title)
    available = None
    if (path := folder.path / FOLDER / SCHEDULE).exists():
        available = DeviceSchedule.load(path).available
    for name in runs:
        rows = [row for row in folder.clients(name) if row.get("device")]
        if rows:
            nodes = len(folder.environment.get("samples_per_client") or ())
            nodes = max(
                nodes, len(available) if available is not None else 0, *(r["client"] + 1 for r in rows)
            )
            table = outcome_table(rows, nodes, max(record["round"] for record in runs[name]), available)
            draw_outcomes(table, outcomes_picture(folder, name), f"{title}: {name}")


def draw_simulated(runs: Mapping[str, Sequence[Row]], path: Path, title: str, dpi: int = 200) -> bool:
    """Draw test accuracy over simulated time, energy and bytes, a line per strategy; say if there was any.

    ``runs`` are the ``rounds.jsonl`` records. A cost that is nought in every round has no panel; a line ends
    where its cost stops being finite. The colours are those of the picture of accuracy and loss.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A strategy without figures keeps its place, and with it the others keep their colours.
    progress = {
        name: Progress.of([record for record in records if record.get("simulated")])
        for name, records in runs.items()
    }
    panels: list[tuple[str, Costs, float]] = []
    for costs, quantity, units in _COSTS:
        most = max((value for run in progress.values() for value in costs(run) if value), default=0.0)
        if most > 0:
            unit, divisor = _unit(most, units)
            panels.append((f"{quantity} ({unit})", costs, divisor))
    if not panels:
        return False
    figure = Figure(figsize=(1.4 + 3.1 * len(panels), 1.0 + _HEIGHT_INCHES), layout="constrained")
    FigureCanvasAgg(figure)
    row: list[Axes] = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    row[0].set_title(title, loc="left", fontsize=11)
    row[0].set_ylabel("test accuracy (%)")
    for axes, (label, costs, divisor) in zip(row, panels, strict=True):
        curves = [_curve(name, run, costs, divisor) for name, run in progress.items()]
        prepare(axes, max((x for curve in curves for x in curve.rounds), default=0.0), False, 5)
        axes.set_xlabel(label)
        draw_lines(axes, curves, lambda curve: curve.accuracy, crosses=False)
        accuracy_range(axes, curves)
    # A name at the end of the last panel's line is at the height of the ends in all panels.
    name_lines(row[-1], curves, "accuracy", _HEIGHT_INCHES)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    return True


_TIMES = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
_JOULES = (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0))
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_COSTS: tuple[tuple[Costs, str, tuple[tuple[str, float], ...]], ...] = (
    (lambda run: run.seconds, "simulated time", _TIMES),
    (lambda run: run.joules, "energy of the devices", _JOULES),
    (lambda run: run.bytes, "sent, both directions", _BYTES),
)


def _unit(most: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Return the largest unit of which there are at least two.

    >>> _unit(3000.0, _TIMES), _unit(0.5, _JOULES)
    (('min', 60.0), ('J', 1.0))
    """
    return next((unit for unit in units if most >= 2 * unit[1]), units[-1])


def _curve(name: str, run: Progress, costs: Costs, divisor: float) -> Curve:
    known = [
        (cost / divisor, 100 * share)
        for cost, share in zip(costs(run), run.accuracy, strict=True)
        if cost is not None and share is not None
    ]
    return Curve(name, [x for x, _ in known], [y for _, y in known], [None] * len(known))


def outcome_table(
    rows: Iterable[Row], nodes: int, rounds: int, available: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """Return what became of each node in each round (nodes, rounds), as places in :data:`OUTCOMES`.

    ``rows`` are those of a ``clients.jsonl``; ``available`` (nodes, rounds or more) is the schedule's.
    """
    table = np.full((nodes, rounds), NOT_ASKED)
    if available is not None:
        table[~available[:nodes, :rounds]] = AWAY
    for row in rows:
        outcome = (row.get("device") or {}).get("outcome")
        if outcome in _CODES and row["client"] < nodes and 1 <= row["round"] <= rounds:
            table[row["client"], row["round"] - 1] = _CODES[outcome]
    return table


def draw_outcomes(table: NDArray[np.int64], path: Path, title: str, dpi: int = 150) -> None:
    """Draw a table of :func:`outcome_table` as a coloured matrix, with a legend that counts each outcome."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    nodes, rounds = table.shape
    figure = Figure(figsize=(8.0, 1.6 + min(max(0.17 * nodes, 1.2), 9.0)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.imshow(
        table, cmap=ListedColormap([outcome.colour for outcome in OUTCOMES]), vmin=-0.5,
        vmax=len(OUTCOMES) - 0.5, aspect="auto", interpolation="nearest",
        extent=(0.5, rounds + 0.5, nodes - 0.5, -0.5),
    )  # fmt: skip
    axes.set(xlabel="round", ylabel="client")
    axes.set_title(title, loc="left", fontsize=11)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=min(nodes, 25), integer=True, min_n_ticks=1))
    if nodes <= _MOST_CELLS_WITH_LINES and rounds <= _MOST_CELLS_WITH_LINES:
        axes.hlines(np.arange(1, nodes) - 0.5, 0.5, rounds + 0.5, color="0.75", linewidth=0.4)
        axes.vlines(np.arange(1, rounds) + 0.5, -0.5, nodes - 0.5, color="0.75", linewidth=0.4)
    counts = Counter(table.ravel().tolist())
    handles = [
        Patch(
            facecolor=outcome.colour, edgecolor="0.5", linewidth=0.5, label=f"{outcome.text} {counts[code]:,}"
        )
        for code, outcome in enumerate(OUTCOMES)
        if counts[code]
    ]
    figure.legend(handles=handles, loc="outside lower center", frameon=False, fontsize=9, ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
