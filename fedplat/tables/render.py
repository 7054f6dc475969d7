"""A table as Markdown, CSV, LaTeX and JSON, of however many cells there are."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import __version__
from ..results.folder import without_nan, write_atomically
from ..results.tables import escape_latex, markdown_table
from .cells import Plan
from .metrics import METRICS
from .on_disk import DONE, FAILED, REFUSED, SKIPPED, Entries
from .sheet import Block, Shown, blocks_of, figures_of, row_differences, shown_metrics, title_of

_NUMBERS = ("mean", "std", "seeds_done", "seeds_wanted", "best", "published", "deviation", "state")


def write_table(plan: Plan, entries: Entries, out: Path, command: str) -> list[Path]:
    """Write the table as Markdown, CSV, LaTeX, JSON, heat map and page; return the paths.

    ``command`` is what makes the table again.
    """
    from ..results.page import write_table_page
    from .heat_map import draw_heat_map

    out.mkdir(parents=True, exist_ok=True)
    texts = {
        "table.md": markdown(plan, entries, command),
        "table.csv": csv_text(plan, entries),
        "table.tex": latex(plan, entries, command),
    }
    for name, text in texts.items():
        write_atomically(out / name, text.encode())
    write_json_values(plan, entries, out, command)
    draw_heat_map(plan, entries, out / "heatmap.png")
    return [*(out / name for name in (*texts, "table.json", "heatmap.png")), write_table_page(out)]


def write_json_values(plan: Plan, entries: Entries, out: Path, command: str) -> None:
    """Write ``table.json``: see :func:`json_values`."""
    values = json.dumps(without_nan(json_values(plan, entries, command)), indent=1, allow_nan=False)
    write_atomically(out / "table.json", f"{values}\n".encode())


def markdown(plan: Plan, entries: Entries, command: str) -> str:
    """Return the table and what belongs to it: caps, claims, what failed, how to make it again."""
    table = plan.table
    parts = [f"# {table.title}"]
    parts += [table.description] if table.description else []
    if plan.caps:
        parts.append("**Smaller than the table as described:** " + "; ".join(plan.caps) + ".")
    for index, metric in enumerate(shown_metrics(plan, entries)):
        kind = METRICS[metric]
        parts.append(f"## {kind.title[:1].upper()}{kind.title[1:]}")
        parts.append(f"{kind.explanation[:1].upper()}{kind.explanation[1:]}{_best_is(metric)}.")
        for block in blocks_of(plan, entries, metric):
            title = title_of(plan, block.names)
            parts += [f"### {title}"] if title else []
            parts.append(_markdown_block(plan, block))
        if index == 0:
            parts.append(f"![{table.title}](heatmap.png)")
    parts.append(_notes(plan, entries, command))
    return "\n\n".join(parts) + "\n"


def _best_is(metric: str) -> str:
    return "; the best of each column is bold" if METRICS[metric].better else ""


def _markdown_block(plan: Plan, block: Block) -> str:
    table, metric = plan.table, METRICS[block.metric]
    heads = [f"{table.rows.shown} \\ {table.columns.shown}", *(value.shown for value in table.columns.values)]
    rows = []
    for row in table.rows.values:
        texts = []
        for column in table.columns.values:
            shown = block.cells[row.name, column.name]
            text = shown.text(metric, plan.seeds)
            text = f"**{text}**" if shown.best else text
            texts.append("<br>".join([text, *(figure.text(metric) for figure in shown.figures)]))
        rows.append([row.shown, *texts])
    return markdown_table(heads, rows)


def _notes(plan: Plan, entries: Entries, command: str) -> str:
    lines = ["## About this table", ""]
    rounds = sorted({cell.config.rounds for cell in plan.cells})
    spread = ", ± is the standard deviation over them (n − 1)" if plan.seeds > 1 else ""
    seeds = sorted({cell.seed for cell in plan.cells})
    lines.append(f"- {', '.join(map(str, rounds))} rounds; seeds {', '.join(map(str, seeds))}{spread}")
    states = Counter(outcome.state for entry in entries.values() for _, outcome in entry.runs.values())
    lines.append(f"- runs: {', '.join(f'{count} {state}' for state, count in sorted(states.items()))}")
    for which, versions in _versions(entries).items():
        lines.append(f"- {which}: {', '.join(versions)}" + (" (differ between cells)" * (len(versions) > 1)))
    if differing := row_differences(plan):
        lines.append(f"- rows differ, besides in their strategy, in: {', '.join(differing)}")
    for published in plan.table.published:
        note = f" ({published.note})" if published.note else ""
        lines.append(f"- published: {published.paper}, {published.table}{note}")
    lines += [
        f"- claimed, without a public table: {claim.paper}: {claim.text}" for claim in plan.table.claims
    ]
    lines += [f"- {line}" for line in _reasons(plan, entries)]
    lines += [f"- made by `{command}`; every number with its configuration hash is in table.json"]
    return "\n".join(lines)


def _versions(entries: Entries) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for entry in entries.values():
        for _, outcome in entry.runs.values():
            for key in ("fedplat", "commit", "flwr", "torch", "device"):
                if outcome.state == DONE and key in outcome.facts:
                    found.setdefault(key, set()).add(str(outcome.facts[key]))
    return {key: sorted(values) for key, values in found.items()}


def _reasons(plan: Plan, entries: Entries) -> Iterator[str]:
    """Yield why cells failed, cannot work or were left out; equal reasons once, with how many cells."""
    where: dict[tuple[str, str], list[str]] = {}
    for entry in entries.values():
        name = ", ".join(entry.position)
        for seed, (_, outcome) in entry.runs.items():
            if outcome.state in (FAILED, REFUSED):
                seed_text = f", seed {seed}" if plan.seeds > 1 else ""
                where.setdefault((outcome.state, outcome.reason), []).append(f"{name}{seed_text}")
        if entry.state == SKIPPED:
            where.setdefault((SKIPPED, entry.reason), []).append(name)
    words = {FAILED: "failed", REFUSED: "cannot work", SKIPPED: "left out"}
    for (state, reason), names in where.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{words[state]}: {'; '.join(names[:3])}{more}: {' '.join(reason.split())}"


def csv_text(plan: Plan, entries: Entries) -> str:
    """Return a line per cell and metric, unrounded, in the unit that is shown."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*(axis.name for axis in plan.table.axes), "metric", "unit", *_NUMBERS])
    for metric in shown_metrics(plan, entries):
        kind = METRICS[metric]
        for block in blocks_of(plan, entries, metric):
            for shown in block.cells.values():
                numbers = [None if v is None else v * kind.scale for v in (shown.mean, shown.std)]
                figure = shown.figures[0] if shown.figures else None
                row = [
                    *shown.entry.position, metric, kind.unit, *numbers, shown.seeds, plan.seeds,
                    str(shown.best).lower(), figure and figure.value, figure and figure.deviation,
                    shown.entry.state,
                ]  # fmt: skip
                writer.writerow(["" if value is None else value for value in row])
    return file.getvalue()


def latex(plan: Plan, entries: Entries, command: str) -> str:
    """Return a booktabs ``tabular`` per block of the first metric, published figures below ours."""
    metric = plan.table.metrics[0]
    lines = [
        f"% {plan.table.title}: {METRICS[metric].title}".replace("\n", " "),
        f"% {command}",
        "% needs \\usepackage{booktabs}",
    ]
    lines += [f"% smaller than the table as described: {cap}" for cap in plan.caps]
    for block in blocks_of(plan, entries, metric):
        title = title_of(plan, block.names)
        lines += ["", f"% {title}"] if title else [""]
        lines += _latex_block(plan, block)
    return "\n".join(lines) + "\n"


def _latex_block(plan: Plan, block: Block) -> Iterator[str]:
    table, metric = plan.table, METRICS[block.metric]
    columns = [value.name for value in table.columns.values]
    yield rf"\begin{{tabular}}{{l{'r' * len(columns)}}}"
    yield r"\toprule"
    heads = [table.rows.shown, *(value.shown for value in table.columns.values)]
    yield " & ".join(map(escape_latex, heads)) + r" \\"
    yield r"\midrule"
    for row in table.rows.values:
        cells = [block.cells[row.name, column] for column in columns]
        yield " & ".join([escape_latex(row.shown), *(_latex_cell(c, plan, block) for c in cells)]) + r" \\"
        if any(cell.figures for cell in cells):
            beside = [
                rf"\textit{{{_latex_text(cell.figures[0].text(metric))}}}" if cell.figures else ""
                for cell in cells
            ]
            yield " & ".join(["", *beside]) + r" \\"
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _latex_cell(shown: Shown, plan: Plan, block: Block) -> str:
    text = _latex_text(shown.text(METRICS[block.metric], plan.seeds))
    return rf"\textbf{{{text}}}" if shown.best else text


def _latex_text(text: str) -> str:
    return escape_latex(text).replace("±", r"$\pm$").replace("−", "$-$")


def json_values(plan: Plan, entries: Entries, command: str) -> dict[str, Any]:
    """Return all raw numbers, unscaled, with what they come from."""
    table = plan.table
    return {
        "table": plan.name,
        "title": table.title,
        "command": command,
        "fedplat": __version__,
        "smaller": list(plan.caps),
        "axes": [
            {"name": axis.name, "values": [{"name": v.name, "label": v.shown} for v in axis.values]}
            for axis in table.axes
        ],
        "metrics": {
            name: {"unit": METRICS[name].unit, "scale": METRICS[name].scale, "better": METRICS[name].better}
            for name in table.metrics
        },
        "cells": [_json_cell(plan, entries, position) for position in plan.positions()],
        "published": [published.model_dump(mode="json") for published in table.published],
        "claims": [claim.model_dump(mode="json") for claim in table.claims],
    }


def _json_cell(plan: Plan, entries: Entries, position: tuple[str, ...]) -> dict[str, Any]:
    entry = entries[position]
    return {
        "position": dict(zip((axis.name for axis in plan.table.axes), position, strict=True)),
        "state": entry.state,
        **({"reason": entry.reason} if entry.reason else {}),
        "mean": {metric: entry.mean(metric) for metric in plan.table.metrics},
        "std": {metric: entry.std(metric) for metric in plan.table.metrics},
        "published": [
            {"metric": metric, "paper": figure.published.paper, "table": figure.published.table}
            | {"value": figure.value, "deviation": figure.deviation}
            for metric in plan.table.metrics
            for figure in figures_of(plan, entry, metric)
        ],
        "runs": [
            {
                "seed": seed,
                "state": outcome.state,
                "config_hash": cell.config.digest(),
                "folder": f"cells/{cell.identity}",
                "rounds": outcome.rounds,
                **({"reason": outcome.reason} if outcome.reason else {}),
                "values": {m: entry.values.get(m, {}).get(seed) for m in plan.table.metrics},
                "made_with": dict(outcome.facts),
                "command": cell.command,
            }
            for seed, (cell, outcome) in sorted(entry.runs.items())
        ],
    }


def terminal_tables(plan: Plan, entries: Entries) -> Iterator[Any]:
    """Yield the blocks of the first metric for a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table, metric = plan.table, plan.table.metrics[0]
    for block in blocks_of(plan, entries, metric):
        title = " – ".join(filter(None, [METRICS[metric].title, title_of(plan, block.names)]))
        grid = Table(box=box.SIMPLE_HEAD, title=Text(title), title_justify="left", pad_edge=False)
        grid.add_column(Text(table.rows.shown))
        for column in table.columns.values:
            grid.add_column(Text(column.shown), justify="right")
        for row in table.rows.values:
            shown = [block.cells[row.name, column.name] for column in table.columns.values]
            texts = [Text(s.text(METRICS[metric], plan.seeds), "bold" if s.best else "") for s in shown]
            grid.add_row(Text(row.shown), *texts)
        yield grid
