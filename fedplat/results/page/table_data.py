"""What the page about a table of runs says: figures by row and column, curves of any cell, how to make it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from ...errors import UserError
from ..folder import read_lines
from ..tables import NOTHING
from ..values import finite
from .charts import Series, chart, has_points, lines_view, wants_log
from .comparison import mark_best
from .curves import Section, section

Values = Mapping[str, Any]
Position = tuple[str, ...]

_FILE = "table.json"
_MOST_POINTS = 100_000
_UNDONE = {
    "skipped": NOTHING, "done": NOTHING, "failed": "failed", "refused": "cannot work",
    "started": "unfinished",
}  # fmt: skip


def is_table(folder: Path) -> bool:
    """Whether a folder is one of ``fedplat table``."""
    return (folder / _FILE).exists() or (
        (folder / "cells").is_dir() and not (folder / "config.toml").exists()
    )


def table_data(folder: Path, values: Values | None = None) -> dict[str, Any]:
    """Return what the page about a table's folder says, as plain JSON values.

    ``values`` is what its ``table.json`` holds, or is about to. Raises UserError for a folder without one.
    """
    if values is None:
        values = _read(folder)
    blocks, rows, columns = _axes(values)
    runs = [run for cell in values["cells"] for run in cell["runs"]]
    states = Counter(run["state"] for run in runs)
    metrics = _shown_metrics(values)
    titles = {name: _metric_title(name, values) for name in metrics}
    path = folder / _FILE
    updated = datetime.fromtimestamp(path.stat().st_mtime if path.exists() else 0, UTC)
    seeds = sorted({run["seed"] for run in runs})
    complete = set(states) <= {"done", "refused"}
    block_titles = [_block_title(blocks, names) for names in _block_names(blocks)]
    sections = [_curves(folder, values, blocks, rows, columns)]
    return {
        "kind": "table",
        "title": values["title"],
        "description": "",
        "subtitle": f"seeds {', '.join(map(str, seeds))}" if seeds else "",
        "seeds": seeds,
        "status": {
            "state": "finished" if complete else "unfinished",
            "rounds": 0,
            "done": {},
            "updated": updated.isoformat(timespec="seconds") if path.exists() else "",
            "usual_seconds": 0.0,
        },
        "versions": {"fedplat": values["fedplat"], **_versions(runs)},
        "warnings": [f"Smaller than the table as described: {'; '.join(values['smaller'])}."]
        if values["smaller"]
        else [],
        "choices": [
            *(
                [{"id": "metric", "label": "figure", "options": [titles[m] for m in metrics]}]
                if len(metrics) > 1
                else []
            ),
            *(
                [{"id": "block", "label": "block", "options": ["all", *block_titles]}]
                if len(block_titles) > 1
                else []
            ),
        ],
        "tables": list(_tables(values, metrics, titles)),
        "explanation": _explanation(values, metrics, len(seeds)),
        "situation": [],
        "sections": [found for found in sections if found],
        "left_out": None,
        "commands": [values["command"]],
        "config": "",
        "runs": _runs_table(values),
        "environment": [
            ["runs", ", ".join(f"{count} {state}" for state, count in sorted(states.items()))],
            *_facts(values, runs),
        ],
    }


def _read(folder: Path) -> Values:
    path = folder / _FILE
    if not path.exists():
        raise UserError(
            f"{folder}: there is no {_FILE} yet; it is written when the table's command ends, or by the same "
            f"command with --no-run"
        )
    try:
        found: Values = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not a table of fedplat: {error}") from None
    return found


# Tables ----------------------------------------------------------------------------------------------------


def _axes(values: Values) -> tuple[list[Values], Values, Values]:
    *blocks, rows, columns = values["axes"]
    return blocks, rows, columns


def _block_names(blocks: Sequence[Values]) -> list[Position]:
    return list(product(*([value["name"] for value in axis["values"]] for axis in blocks)))


def _label(axis: Values, name: str) -> str:
    return next(str(value["label"]) for value in axis["values"] if value["name"] == name)


def _block_title(blocks: Sequence[Values], names: Position) -> str:
    return ", ".join(_label(axis, name) for axis, name in zip(blocks, names, strict=True))


def _shown_metrics(values: Values) -> list[str]:
    first, *others = values["metrics"]
    return [first, *(m for m in others if any(cell["mean"].get(m) is not None for cell in values["cells"]))]


def _cells(values: Values) -> dict[Position, Values]:
    names = [axis["name"] for axis in values["axes"]]
    return {tuple(cell["position"][name] for name in names): cell for cell in values["cells"]}


def _tables(values: Values, metrics: Sequence[str], titles: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield a table for each metric and block, as the page has them."""
    blocks, rows, columns = _axes(values)
    cells = _cells(values)
    for number, metric in enumerate(metrics):
        for place, names in enumerate(_block_names(blocks)):
            block = _block_title(blocks, names)
            found = [
                {
                    "name": row["label"],
                    "style": index,
                    "cells": [
                        _cell(cells[(*names, row["name"], c["name"])], metric, values)
                        for c in columns["values"]
                    ],
                }
                for index, row in enumerate(rows["values"])
            ]
            for column in range(len(columns["values"])):
                mark_best([row["cells"][column] for row in found], values["metrics"][metric]["better"])
            yield {
                "id": f"{number}-{place}",
                "title": " – ".join(filter(None, [titles[metric], block])),
                "heads": [rows["name"], *(column["label"] for column in columns["values"])],
                "text_columns": 1,
                "rows": found,
                "filters": {
                    **({"metric": titles[metric]} if len(metrics) > 1 else {}),
                    **({"block": block} if block else {}),
                },
            }


def _cell(cell: Values, metric: str, values: Values) -> dict[str, Any]:
    digits = _digits(metric)
    scale = values["metrics"][metric]["scale"]
    known = [run for run in cell["runs"] if finite(run["values"].get(metric)) is not None]
    mean, std = finite(cell["mean"].get(metric)), finite(cell["std"].get(metric))
    found: dict[str, Any] = {"v": None if mean is None else mean * scale}
    if mean is None:
        found["t"] = _UNDONE.get(cell["state"], "missing")
    else:
        found["t"] = _number(mean * scale, digits) + (
            "" if std is None else f" ± {_number(std * scale, digits)}"
        )
        if len(known) < len(cell["runs"]):
            found["t"] += f" ({len(known)} of {len(cell['runs'])} seeds)"
    beside = []
    for figure in cell["published"]:
        if figure["metric"] == metric:
            apart = finite(figure["deviation"])
            less = "" if apart is None else f", {apart:+.{digits}f}".replace("-", "−")
            beside.append(f"published {figure['value']:.{digits}f}{less}")
    return found | ({"beside": beside} if beside else {})


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}" if abs(value) < 1e5 else f"{value:.2e}"


def _digits(metric: str) -> int:
    from ...tables.metrics import METRICS

    return METRICS[metric].digits if metric in METRICS else 2


def _metric_title(metric: str, values: Values) -> str:
    from ...tables.metrics import METRICS

    unit = values["metrics"][metric]["unit"]
    return METRICS[metric].title if metric in METRICS else f"{metric}, {unit}" if unit else metric


def _explanation(values: Values, metrics: Sequence[str], seeds: int) -> str:
    from ...tables.metrics import METRICS

    said = [f"{METRICS[m].title}: {METRICS[m].explanation}." for m in metrics if m in METRICS]
    if seeds > 1:
        said.append(
            "± is the standard deviation over the seeds (n − 1); the best mean of each column is bold."
        )
    for published in values["published"]:
        note = f" ({published['note']})" if published.get("note") else ""
        said.append(
            f"Published: {published['paper']}, {published['table']}{note}; after it, ours minus theirs."
        )
    said += [
        f"Claimed, without a public table: {claim['paper']}: {claim['text']}." for claim in values["claims"]
    ]
    return " ".join(said)


# Curves ----------------------------------------------------------------------------------------------------


def _curves(
    folder: Path, values: Values, blocks: Sequence[Values], rows: Values, columns: Values
) -> Section | None:
    """Return accuracy and loss over the rounds, a line per row, with a choice of block and column."""
    cells = _cells(values)
    choices = list(product(_block_names(blocks), [column["name"] for column in columns["values"]]))
    options, views = [], {"accuracy": [], "loss": []}  # type: ignore[var-annotated]
    points, log = 0, False
    for names, column in choices:
        named: dict[str, dict[str, list[Series]]] = {"accuracy": {}, "loss": {}}
        for row in rows["values"]:
            runs = [] if points > _MOST_POINTS else cells[(*names, row["name"], column)]["runs"]
            records = [list(_records(folder / run["folder"])) for run in runs]
            for key, scale in (("accuracy", 100.0), ("loss", 1.0)):
                named[key][row["label"]] = [
                    {r["round"]: scale * v for r in one if (v := finite(r.get(key))) is not None}
                    for one in records
                ]
                points += sum(map(len, named[key][row["label"]]))
        if not has_points(named["accuracy"]):
            continue
        options.append(", ".join(filter(None, [_block_title(blocks, names), _label(columns, column)])))
        views["accuracy"].append([lines_view(named["accuracy"], "test accuracy, %")])
        views["loss"].append([lines_view(named["loss"], "test loss")])
        log |= wants_log(named["loss"])
    if not options:
        return None
    found = section(
        "curves",
        "Over the rounds",
        [
            chart("accuracy", "Accuracy", views["accuracy"]),
            chart("loss", "Loss", views["loss"], log="y", log_on=log),
        ],
        "Lines are means over the seeds, bands reach from the lowest to the highest."
        + (" The page has room for the first cells only." if points > _MOST_POINTS else ""),
    )
    if found:
        found["select"] = {"label": "cell", "options": options}
    return found


def _records(path: Path) -> Iterator[Values]:
    """Yield the rounds of a cell's run, which has one strategy."""
    for log in sorted(path.glob("*/rounds.jsonl")):
        yield from read_lines(log)


# Facts -----------------------------------------------------------------------------------------------------


def _versions(runs: Sequence[Values]) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for run in runs:
        for key in ("flwr", "torch"):
            if run["made_with"].get(key):
                found.setdefault(key, set()).add(str(run["made_with"][key]))
    return {key: ", ".join(sorted(values)) for key, values in found.items()}


def _facts(values: Values, runs: Sequence[Values]) -> list[list[str]]:
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in run["made_with"].items():
            found.setdefault(key, {})[str(value)] = None
    return [
        [key, ", ".join(known) if len(known) <= 4 else f"{len(known)} different"]
        for key, known in found.items()
    ]


def _runs_table(values: Values) -> dict[str, Any]:
    """Return a row per run: where it stands, what it came to, and the command that runs it alone."""
    names = [axis["name"] for axis in values["axes"]]
    first = next(iter(values["metrics"]))
    scale = values["metrics"][first]["scale"]
    rows = []
    for cell in values["cells"]:
        position = [cell["position"][name] for name in names]
        for run in cell["runs"]:
            value = finite(run["values"].get(first))
            reason = f": {run['reason']}" if run.get("reason") else ""
            cells = [
                *({"t": text, "v": None} for text in (*position[1:], run["state"] + reason, run["command"]))
            ]
            number = (
                {"t": NOTHING, "v": None} if value is None else {"t": _number(value * scale, 2), "v": value}
            )
            rows.append(
                {"name": position[0], "cells": [*cells, {"t": str(run["seed"]), "v": run["seed"]}, number]}
            )
    return {
        "id": "runs",
        "title": "",
        "heads": [*names, "state", "command", "seed", _metric_title(first, values)],
        "text_columns": len(names) + 2,
        "rows": rows,
    }
