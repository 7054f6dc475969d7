"""What the page about a run says, as plain JSON values: tables, charts, configuration."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import tomli_w

from ...errors import UserError
from ..folder import RunFolder
from ..left_out import HEADS as LEFT_OUT_HEADS
from ..left_out import devices_left_out, others_left_out
from ..summary import summarise
from ..tables import explanation
from ..wording import value_text
from .clients import client_sections
from .comparison import comparison
from .curves import cost_section, curve_section, edge_section
from .partition import partition_section

_SAID_ELSEWHERE = (
    "execution", "samples_per_client", "label_counts", "attackers", "classes", "parameters", "data_note",
)  # fmt: skip
_MOST_LEFT_OUT = 100
_MAY_DIFFER = ("seed", "description", "flower", "timeout")


def page_data(runs: Sequence[RunFolder], summary: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what the page about these runs says; they are the same situation with other seeds.

    ``summary`` is that of the first run if it is known already, as
    :func:`~fedplat.results.summary.summarise` returns it. Raises UserError for no run, for runs that differ
    in more than the seed, and for two with the same seed.
    """
    from ..report import situation

    check_same(runs)
    first = runs[0]
    summaries = [dict(summary) if summary else summarise(first), *map(summarise, runs[1:])]
    config = first.config.to_dict()
    names = list(first.config.strategies)
    records = [{name: run.rounds(name) for name in names} for run in runs]
    seeds = [run.config.seed for run in runs]
    sections = [
        curve_section(names, records, first.config.rounds),
        cost_section(names, records),
        *client_sections(first, names, len(runs) > 1),
        edge_section(names, records),
        partition_section(first.environment),
    ]
    environment = {key: value for key, value in first.environment.items() if key not in _SAID_ELSEWHERE}
    return {
        "kind": "run",
        "title": first.config.name,
        "description": first.config.description,
        "subtitle": f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}",
        "seeds": seeds,
        "status": status_of(runs, records),
        "versions": summaries[0]["versions"],
        "tables": [comparison(summaries)],
        "explanation": _spread_said(len(runs)) + explanation(summaries[0]),
        "situation": [[key, text] for key, text in situation(config, first.environment).items()]
        + ([["Note on the data", note]] if (note := first.environment.get("data_note")) else []),
        "sections": [section for section in sections if section],
        "left_out": left_out_table(summaries, seeds),
        "commands": [_again(run) for run in runs],
        "config": tomli_w.dumps(config),
        "environment": [[key, value_text(value)] for key, value in environment.items()],
    }


def check_same(runs: Sequence[RunFolder]) -> None:
    """Raise UserError unless the runs are one situation with different seeds."""
    if not runs:
        raise UserError("no run to show: give at least one run folder")
    first = runs[0].config.to_dict()
    known = {runs[0].config.seed: runs[0].path}
    for run in runs[1:]:
        differing = differences(first, run.config.to_dict())
        if differing:
            raise UserError(
                f"{run.path} differs from {runs[0].path} in more than the seed: {'; '.join(differing)}. "
                f"Runs on one page are the same situation with other seeds"
            )
        if run.config.seed in known:
            raise UserError(
                f"{run.path} has the same seed as {known[run.config.seed]}: {run.config.seed}; give each once"
            )
        known[run.config.seed] = run.path


def differences(one: Mapping[str, Any], other: Mapping[str, Any], key: str = "") -> list[str]:
    """Return the settings in which two resolved configurations differ, but for what changes no comparison.

    >>> differences({"seed": 1, "data": {"name": "digits"}}, {"seed": 2, "data": {"name": "mnist"}})
    ["data.name = 'digits' and 'mnist'"]
    """
    found: list[str] = []
    for name in dict.fromkeys((*one, *other)):
        place = f"{key}.{name}" if key else name
        here, there = one.get(name), other.get(name)
        if here == there or place in _MAY_DIFFER or place in ("data.root", "data.download"):
            continue
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            found += differences(here, there, place)
        else:
            found.append(f"{place} = {here!r} and {there!r}")
    return found


def status_of(
    runs: Sequence[RunFolder], records: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]]
) -> dict[str, Any]:
    """Return how far the runs are: state, rounds, and when something was last written.

    ``state`` is "finished" or "unfinished"; whether one that is not finished still runs, a reader can only
    tell from ``updated`` (ISO, UTC) and ``usual_seconds``, the wall time of its longest round of late.
    """
    done = {
        name: min((one[name][-1]["round"] if one[name] else 0) for one in records)
        for name in runs[0].config.strategies
    }
    finished = all(run.log(name).finished for run in runs for name in run.config.strategies)
    times = []
    for run in runs:
        files = [run.log(name).path / "rounds.jsonl" for name in run.config.strategies]
        times += [file.stat().st_mtime for file in (run.path / "config.toml", *files) if file.exists()]
    late = [
        sum(v for v in r["seconds"].values() if v) for one in records for rs in one.values() for r in rs[-5:]
    ]
    updated = datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds") if times else ""
    return {
        "state": "finished" if finished else "unfinished",
        "rounds": runs[0].config.rounds,
        "done": done,
        "updated": updated,
        "usual_seconds": max(late, default=0.0),
    }


def left_out_table(summaries: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, Any] | None:
    """Return the table of the replies that were refused or failed, None if none was."""
    several = len(seeds) > 1
    rows = []
    for seed, summary in zip(seeds, summaries, strict=True):
        for strategy, clients in summary["left_out"].items():
            for row in (*devices_left_out(clients), *others_left_out(clients)):
                rows.append([*([str(seed)] if several else []), strategy, *row])
    hidden = len(rows) - _MOST_LEFT_OUT
    if not rows:
        return None
    return {
        "id": "left-out",
        "title": "",
        "note": f"{hidden} more rows are in summary.json." if hidden > 0 else "",
        "heads": ["seed", *LEFT_OUT_HEADS] if several else LEFT_OUT_HEADS,
        "text_columns": 4 if several else 3,
        "rows": [
            {"name": row[0], "cells": [{"t": text, "v": _number(text)} for text in row[1:]]}
            for row in rows[:_MOST_LEFT_OUT]
        ],
    }


def _number(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def _spread_said(count: int) -> str:
    return f"Figures are mean ± standard deviation (n − 1) over {count} seeds. " if count > 1 else ""


def _again(run: RunFolder) -> str:
    path = run.path.as_posix()
    return shlex.join(["fedplat", "run", f"{path}/config.toml", "--out", f"{path}-again"])
