"""Runs as pandas tables, for a notebook: ``fedplat.results.load("runs/quickstart-d09f7a6b")``."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .flatten import flatten
from .folder import StrategyLog, read_lines

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

_WORDS = ("status", "reason", "verdict", "truth", "attack", "submodel")
"""Columns of ``clients.jsonl`` and ``edges.jsonl`` that repeat a few words over and over."""


@dataclass(frozen=True)
class Results:
    """What the records of one or more runs hold, as pandas DataFrames; shares are between 0 and 1.

    Every frame begins with the run it is about: ``run`` (the folder's name, with as many folders before it
    as tell runs apart), for cells of a table ``row``, ``column`` and ``block.<axis>``, then ``seed`` and
    ``strategy``. What is nested in a record has its names joined by dots, such as ``seconds.train`` or
    ``per_class_accuracy.3``. A figure that a record does not have, or that was not finite, is NaN.

    - ``rounds``: a row per strategy and round; round 0 is the model before training,
    - ``clients``: a row per strategy, round and client; ``edges``: the same of edge servers,
    - ``summary``: a row per strategy, with ``finished``, what ``summary.json`` says of it,
    - ``config``: a row per run, every value of its configuration, ``environment``: versions, data, machine.
    """

    rounds: pd.DataFrame
    clients: pd.DataFrame
    edges: pd.DataFrame
    summary: pd.DataFrame
    config: pd.DataFrame
    environment: pd.DataFrame


@dataclass(frozen=True)
class _Run:
    path: Path
    cells: Sequence[Mapping[str, str]] = ({},)
    """Where a table shows the run; several of its cells may share one."""


def load(*folders: str | os.PathLike[str]) -> Results:
    """Return what run folders hold, finished or not.

    A folder may be a run's, a table's, or one of run folders such as ``runs``. A run that several cells of a
    table share is there once for each. A table that was never written has no ``table.json`` yet; then its
    runs are told apart by strategy, seed and configuration alone.

    Raises UserError if there is no run, if a record cannot be read, or without pandas.
    """
    pandas = _pandas()
    runs = {run.path.resolve(): run for folder in folders for run in _runs_in(Path(folder))}
    if not runs:
        raise UserError("name a run folder, a table's folder, or a folder of them")
    tables: dict[str, list[Row]] = {
        kind: [] for kind in ("rounds", "clients", "edges", "summary", "config", "environment")
    }
    for run, name in zip(runs.values(), _names(list(runs)), strict=True):
        for kind, row in _rows_of(run, name):
            tables[kind].append(row)
    axes = list(dict.fromkeys(axis for run in runs.values() for cell in run.cells for axis in cell))
    return Results(**{kind: _frame(pandas, kind, rows, axes) for kind, rows in tables.items()})


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise UserError("fedplat.results.load needs pandas: pip install 'fedplat[pandas]'") from error
    return pandas


# Finding runs ----------------------------------------------------------------------------------------------


def _runs_in(folder: Path) -> Iterator[_Run]:
    if (folder / "config.toml").exists():
        yield _Run(folder)
        return
    if (folder / "table.json").exists():
        yield from _runs_of_table(folder)
        return
    within = folder / "cells" if (folder / "cells").is_dir() else folder
    found = sorted(path.parent for path in within.glob("*/config.toml"))
    if not found:
        what = "no run here" if folder.exists() else "there is no such folder"
        raise UserError(f"{folder}: {what}; give a run folder, a table's folder, or a folder of run folders")
    for path in found:
        yield _Run(path)


def _runs_of_table(folder: Path) -> Iterator[_Run]:
    table = _read_json(folder / "table.json")
    *blocks, row, column = [axis["name"] for axis in table["axes"]]
    cells: dict[Path, list[Mapping[str, str]]] = {}
    for cell in table["cells"]:
        at = cell["position"]
        place = {"row": at[row], "column": at[column], **{f"block.{axis}": at[axis] for axis in blocks}}
        for run in cell["runs"]:
            path = folder / run["folder"]
            if (path / "config.toml").exists():
                cells.setdefault(path, []).append(place)
    if not cells:
        raise UserError(f"{folder}: none of this table's cells has run yet")
    for path, places in cells.items():
        yield _Run(path, places)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return names for folders: their last parts, as many as tell all of them apart."""
    longest = max(len(path.parts) for path in paths)
    for count in range(1, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


# Reading ---------------------------------------------------------------------------------------------------


def _rows_of(run: _Run, name: str) -> Iterator[tuple[str, Row]]:
    from .summary import strategy_summary

    try:
        config = tomllib.loads((run.path / "config.toml").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{run.path / 'config.toml'}: cannot be read: {error}") from error
    environment = _read_json(run.path / "environment.json")
    records: list[tuple[str, Row]] = [("config", flatten(config)), ("environment", flatten(environment))]
    of_strategies: list[tuple[str, str, Row]] = []
    for strategy in config.get("strategies", ()):
        log = StrategyLog(run.path / strategy.replace(":", "_"))
        rounds = _read_rows(log.path / "rounds.jsonl")
        summary = {"finished": log.finished, **strategy_summary(rounds, environment.get("classes", ()))}
        of_strategies.append(("summary", strategy, flatten(summary)))
        of_strategies += [("rounds", strategy, flatten(row)) for row in rounds]
        for kind in ("clients", "edges"):
            rows = _read_rows(log.path / f"{kind}.jsonl")
            of_strategies += [(kind, strategy, flatten(row)) for row in rows]
    for cell in run.cells:
        place = {"run": name, **cell, "seed": config.get("seed")}
        yield from ((kind, place | row) for kind, row in records)
        yield from ((kind, {**place, "strategy": s} | row) for kind, s, row in of_strategies)


def _read_rows(path: Path) -> list[Row]:
    try:
        return list(read_lines(path))
    except ValueError as error:
        raise UserError(f"{path}: a line cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    return found


# Building frames -------------------------------------------------------------------------------------------


def _frame(pandas: Any, kind: str, rows: Sequence[Row], axes: Iterable[str]) -> pd.DataFrame:
    first = ["run", *axes, "seed"]
    if kind not in ("config", "environment"):
        first.append("strategy")
    if kind in ("rounds", "clients", "edges"):
        first.append("round")
    first += {"clients": ["client"], "edges": ["edge"]}.get(kind, [])
    frame = pandas.DataFrame(list(rows))
    # Also an empty frame has the columns that code goes by.
    frame = frame.reindex(columns=[*first, *(name for name in frame.columns if name not in first)])
    repeated = {"run", "strategy", *axes, *(_WORDS if kind in ("clients", "edges") else ())}
    return frame.astype({name: _kind(frame[name], name in repeated) for name in frame.columns})


def _kind(column: Any, repeated: bool) -> Any:
    """Return the dtype that suits a column: categories for repeated words, numbers where there are some."""
    if repeated:
        return "category"
    if column.dtype != object:
        return column.dtype
    known = column.dropna()
    if known.empty:
        return "float64"
    if all(isinstance(value, bool) for value in known):
        return "boolean"
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        return "float64"
    return column.dtype
