"""A picture of a world in one round: a map of who reports to which edge, and who was there when."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .wireless import Bools, Floats, Ints
from .world import World

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart; more edges begin again with another
# shape, and lines show who belongs to whom in any case.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SHAPES = ("s", "D", "h", "o")
_LIGHT = (3, 4, 5)
_IDLE = "0.72"
_HISTORY, _RUN, _NOW = "#9FB3C8", "#0072B2", "#D55E00"
_MOST_NUMBERED = 120
_MOST_IN_LEGEND = 20


def draw_world(world: World, round_: int, edge_of: Ints, path: Path, title: str) -> None:
    """Draw a round and save it as a PNG; the same world, round and association make the same file.

    ``edge_of`` (N,) is the edge of each client, below 0 for those that take no part. Clients that are away
    are hollow, also if they have an edge; those that are there and have none are grey.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    there = world.available[:, round_ - 1]
    strip = float(np.clip(0.03 * world.clients, 1.0, 3.0))
    figure = Figure(figsize=(8.6, 6.9 + strip), layout="constrained")
    FigureCanvasAgg(figure)
    panels: list[Axes] = list(figure.subplots(2, 1, height_ratios=(6.3, strip)))
    _map(panels[0], world, there, np.asarray(edge_of))
    figure.suptitle(textwrap.fill(title, 95), x=0.01, ha="left", fontsize=11)
    _legend(figure, world, there, np.asarray(edge_of))
    _presence(panels[1], world, round_)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _map(axes: Axes, world: World, there: Bools, edge_of: Ints) -> None:
    low, high = _square(world)
    if world.range_m < (high - low).max():
        _ranges(axes, world)
    _links(axes, world, np.flatnonzero(there & (edge_of >= 0)), edge_of)
    numbered = world.clients <= _MOST_NUMBERED
    size = 130.0 if numbered else float(np.clip(12_000 / world.clients, 6, 90))
    looks = [_look(here, int(edge)) for here, edge in zip(there, edge_of, strict=True)]
    faces, rims, inks = zip(*looks, strict=True)
    x_m, y_m = world.client_m.T
    axes.scatter(x_m, y_m, size, c=list(faces), edgecolors=list(rims), linewidths=1.1, zorder=3)
    centred: dict[str, Any] = {"ha": "center", "va": "center_baseline"}
    for client, (x, y) in enumerate(world.client_m.tolist() if numbered else ()):
        axes.text(x, y, str(client), color=inks[client], fontsize=6.5, zorder=4, **centred)
    for edge, (x, y) in enumerate(world.edge_m.tolist()):
        colour, ink = _colour(edge), _ink(edge)
        axes.scatter(
            x, y, 280, marker=_shape(edge), color=colour, edgecolors="white", linewidths=1.6, zorder=5
        )
        axes.text(x, y, str(edge), color=ink, fontsize=10, fontweight="bold", zorder=6, **centred)
    axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), aspect="equal", xlabel="metres", ylabel="metres")
    axes.spines[:].set_color("0.6")


def _ranges(axes: Axes, world: World) -> None:
    from matplotlib.patches import Circle

    look: dict[str, Any] = {"alpha": 0.45, "linewidth": 1.0, "linestyle": (0, (5, 3)), "zorder": 1}
    for edge, (x, y) in enumerate(world.edge_m.tolist()):
        axes.add_patch(Circle((x, y), world.range_m, facecolor="none", edgecolor=_colour(edge), **look))


def _links(axes: Axes, world: World, clients: Ints, edge_of: Ints) -> None:
    from matplotlib.collections import LineCollection

    edges = edge_of[clients]
    lines = list(np.stack([world.client_m[clients], world.edge_m[edges]], axis=1))
    colours = [_colour(edge) for edge in edges.tolist()]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=0.9, alpha=0.5, zorder=2))


def _square(world: World) -> tuple[Floats, Floats]:
    places = np.concatenate([world.client_m, world.edge_m])
    low, high = places.min(axis=0), places.max(axis=0)
    middle, half = (low + high) / 2, max(float((high - low).max()) * 0.535, 1.0)
    return middle - half, middle + half


def _look(there: Any, edge: int) -> tuple[str, str, str]:
    """Return the colours of a client: of its disc, of the disc's rim, and of its number."""
    if not there:
        return "white", "0.55", "0.35"
    if edge < 0:
        return _IDLE, _IDLE, "black"
    return _colour(edge), _colour(edge), _ink(edge)


def _colour(edge: int) -> str:
    return _COLOURS[edge % len(_COLOURS)]


def _shape(edge: int) -> str:
    return _SHAPES[edge // len(_COLOURS) % len(_SHAPES)]


def _ink(edge: int) -> str:
    return "black" if edge % len(_COLOURS) in _LIGHT else "white"


def _legend(figure: Figure, world: World, there: Bools, edge_of: Ints) -> None:
    from matplotlib.lines import Line2D

    def handle(label: str, face: str, rim: str, marker: str = "o") -> Line2D:
        return Line2D(
            [], [], linestyle="", marker=marker, markersize=9, markerfacecolor=face, markeredgecolor=rim,
            label=label,
        )  # fmt: skip

    handles = []
    for edge in range(min(world.edges, _MOST_IN_LEGEND)):
        count = int((there & (edge_of == edge)).sum())
        clients = "1 client" if count == 1 else f"{count:,} clients"
        handles.append(handle(f"edge {edge}: {clients}", _colour(edge), _colour(edge), _shape(edge)))
    if world.edges > _MOST_IN_LEGEND:
        handles.append(Line2D([], [], linestyle="", label=f"and {world.edges - _MOST_IN_LEGEND:,} more"))
    idle = int((there & (edge_of < 0)).sum())
    handles.append(handle(f"there, no part: {idle:,}", _IDLE, _IDLE))
    handles.append(handle(f"away: {int((~there).sum()):,}", "white", "0.55"))
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9, labelspacing=0.9)


def _presence(axes: Axes, world: World, round_: int) -> None:
    """Draw who is there: a row for each client, the history before round 1 in grey, the run in blue."""
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    first = 1 - world.history
    shown = world.presence * np.where(np.arange(first, world.rounds + 1) < 1, 1, 2)
    axes.imshow(
        shown, cmap=ListedColormap(["white", _HISTORY, _RUN]), vmin=0, vmax=2, aspect="auto",
        interpolation="nearest" if shown.shape[1] <= 800 else "auto",
        extent=(first - 0.5, world.rounds + 0.5, world.clients - 0.5, -0.5),
    )  # fmt: skip
    axes.plot(
        round_, 1.04, marker="v", markersize=7, color=_NOW, clip_on=False, zorder=3,
        transform=axes.get_xaxis_transform(),
    )  # fmt: skip
    axes.set_ylabel("client")
    axes.set_xlabel("round; there: filled, away: white")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=min(world.clients, 5), integer=True, min_n_ticks=1))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    axes.spines[:].set_color("0.6")
    if world.history:
        axes.axvline(0.5, color="black", linewidth=1.2)
        axes.set_title(f"history: {world.before.mean():.0%} there", loc="left", fontsize=9, pad=12)
    run = f"run: {world.available.mean():.0%} there; the mark is round {round_:,}"
    axes.set_title(run, loc="right", fontsize=9, pad=12)
