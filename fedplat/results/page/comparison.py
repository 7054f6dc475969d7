"""The table that compares strategies, over one seed or several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from ..simulated import add_target
from ..tables import NOTHING, Column, row_names, shown_columns
from ..values import finite

Row = Mapping[str, Any]
Cell = dict[str, Any]

_HIGHER = (
    "accuracy", "accuracy_mean_of_last", "worst_class_accuracy", "detection_precision", "detection_recall",
    "detection_f1", "own_tests", "own_tests_worst", "own_models", "own_models_worst", "edges_healthy",
)  # fmt: skip
_LOWER = (
    "loss", "accuracy_loss", "attack_success", "attackers_weight", "honest_left_out", "first_round_all_out",
    "all_out_since", "epsilon", "own_tests_spread", "own_models_spread", "simulated_seconds_per_round",
    "joules", "late", "out_of_memory", "dropped", "simulated_seconds_to_target", "joules_to_target",
    "bytes_to_target", "edges_cost", "seconds_per_round", "bytes_per_round",
)  # fmt: skip
"""What is best of a column; the best over the rounds is for orientation, so none of it is marked."""


def comparison(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the comparison of strategies as a table for the page, from each seed's summary.

    Cells have a text ``t``, the number ``v`` that it is sorted by, unscaled, and ``best`` in the best of a
    column, all whose text is the same. With several seeds texts are mean ± standard deviation (n − 1), and
    the costs up to an accuracy are those up to the highest that every strategy reached with every seed.
    """
    names = list(summaries[0]["strategies"])
    each: Sequence[Mapping[str, Row]] = [summary["strategies"] for summary in summaries]
    whole: Row = summaries[0]
    if len(summaries) > 1:
        each, whole = _together(summaries)
    columns = shown_columns(whole)
    labels = [row_names(summary) for summary in summaries]
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(names):
        # A remark such as "diverged" is told if any seed has it.
        said = max((one[index] for one in labels), key=len)
        cells = [_cell(column, [one[name] for one in each]) for column in columns]
        rows.append({"name": said, "style": index, "cells": cells})
    for place, column in enumerate(columns):
        mark_best([row["cells"][place] for row in rows], _better(column.key))
    return {
        "id": "comparison",
        "title": "",
        "heads": ["strategy", *(column.heading for column in columns)],
        "text_columns": 1,
        "rows": rows,
    }


def _together(summaries: Sequence[Row]) -> tuple[list[dict[str, Row]], Row]:
    """Return each seed's strategies, with costs to an accuracy that all of them reached, and all as one."""
    each: list[dict[str, Row]] = []
    every: dict[str, dict[str, Any]] = {}
    for place, summary in enumerate(summaries):
        each.append({})
        for name, row in summary["strategies"].items():
            # Without the seed's own target, which may be another.
            simulated = {key: value for key, value in row["simulated"].items() if key != "to_target"}
            each[-1][name] = every[f"{place}:{name}"] = {**row, "simulated": simulated}
    return each, {"strategies": every, "target": add_target(every), "rounds": summaries[0]["rounds"]}


def mark_best(cells: Sequence[Cell], better: str) -> None:
    """Mark the best of a column, and all whose text is the same; none if that is all of them.

    >>> cells = [{"t": "91.2", "v": 0.9121}, {"t": "91.2", "v": 0.9119}, {"t": "7.0", "v": 0.07}]
    >>> mark_best(cells, "higher")
    >>> [cell.get("best", False) for cell in cells]
    [True, True, False]
    """
    known = [cell for cell in cells if cell["v"] is not None]
    if len(known) < 2 or not better:
        return
    best = (max if better == "higher" else min)(known, key=lambda cell: float(cell["v"]))
    found = [cell for cell in known if cell["t"].partition(" ±")[0] == best["t"].partition(" ±")[0]]
    if len(found) < len(known):
        for cell in found:
            cell["best"] = True


def _better(key: str) -> str:
    return "higher" if key in _HIGHER else "lower" if key in _LOWER else ""


def _cell(column: Column, rows: Sequence[Row]) -> Cell:
    known = [value for row in rows if (value := finite(column.value(row))) is not None]
    if not known:
        return {"t": NOTHING, "v": None}
    text = _text(column, mean(known))
    if len(known) > 1:
        text += f" ± {_text(column, stdev(known))}"
    if len(known) < len(rows):
        text += f" ({len(known)} of {len(rows)} seeds)"
    return {"t": text, "v": mean(known)}


def _text(column: Column, value: float) -> str:
    return replace(column, value=lambda row: value).text({})
