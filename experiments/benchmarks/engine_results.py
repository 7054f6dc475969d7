"""What comes of the engines' turns: whether they agree, their ratios, and our engine's overhead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .common import compared, middle
from .workload import Vector

OURS = "fedplat engine"
RAY = "Flower Ray simulation"
LOOPS = ("loop, 1 thread", "loop, all cores", "loop, process per core")
BEST = "best hand-written loop"
PFL = ("pfl, 1 thread", "pfl, all cores")
BLAZE = "BlazeFL"
COLUMNS = ("engine", "s per round", "x ours", "spread", "rounds", "max difference", "of largest change")
COPY = "one memory copy"
ENGINES = (OURS, *LOOPS, RAY, *PFL, BLAZE)
# Batches, seed and start are the same, so models differ by rounding alone: by less than this share of the
# largest change that a weight made. A client trained on other batches differs by a good part of it.
TOLERANCE = 0.02


def agreement(models: Mapping[str, Vector | None], initial: Vector) -> dict[str, tuple[float, float]]:
    """Return how far each model is from the first: the largest difference, and that over the largest change.

    ``models`` (d,) are after one round from ``initial`` (d,). A missing model or one of another size is
    infinitely far. The first is compared with the second, so that it too is judged.
    """
    names = list(models)
    found: dict[str, tuple[float, float]] = {}
    for number, name in enumerate(names):
        mine, other = models[name], models[names[1 if number == 0 and len(names) > 1 else 0]]
        if mine is None or other is None or mine.shape != initial.shape or other.shape != initial.shape:
            found[name] = (float("inf"), float("inf"))
            continue
        change = float(np.abs(other.astype(np.float64) - initial).max())
        most = float(np.abs(mine.astype(np.float64) - other).max())
        found[name] = (most, most / change if change > 0 else (0.0 if most == 0 else float("inf")))
    return found


def training_rows(
    seconds: Mapping[str, Sequence[float]], differences: Mapping[str, tuple[float, float]]
) -> list[dict[str, Any]]:
    """Return the table's rows, with the quickest of the plain loops once more as the best one."""
    figures = compared(seconds, OURS)
    rows = [_row(name, len(seconds[name]), figures[name], differences[name]) for name in figures]
    loops = [name for name in LOOPS if name in figures]
    if loops:
        best = min(loops, key=lambda name: figures[name]["seconds"])
        rows.append(
            _row(f"{BEST}: {best.partition(', ')[2]}", len(seconds[best]), figures[best], differences[best])
        )
    return rows


def _row(
    name: str, rounds: int, figures: Mapping[str, float], difference: tuple[float, float]
) -> dict[str, Any]:
    values = (name, figures["seconds"], figures["ratio"], figures["spread"], rounds, *difference)
    return dict(zip(COLUMNS, values, strict=True))


def engine_overhead(seconds: Mapping[str, Sequence[float]], arithmetic: Mapping[str, Sequence[float]]) -> str:
    """Say what share of our round is not the arithmetic of the best plain loop on the same cores.

    >>> engine_overhead({OURS: [2.0], LOOPS[0]: [1.8]}, {LOOPS[0]: [1.5]})
    'engine overhead: 25.0 % of a round is more than the arithmetic of the best hand-written loop'
    """
    loops = [name for name in LOOPS if seconds.get(name)]
    if not loops or not seconds.get(OURS):
        return ""
    best = min(loops, key=lambda name: middle(seconds[name]))
    ours = middle(seconds[OURS])
    share = (ours - middle(arithmetic[best])) / ours
    if share < 0:
        return f"engine overhead: none, a round takes less than the arithmetic of the {BEST}"
    return f"engine overhead: {100 * share:.1f} % of a round is more than the arithmetic of the {BEST}"
