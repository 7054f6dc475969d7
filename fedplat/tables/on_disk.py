"""What a table's folder holds of its cells: their states, their figures, and why some failed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from ..results.folder import RunFolder, StrategyLog, write_json
from .cells import Cell, Plan, Position, cell_path
from .metrics import COMPARED, NEEDS_CLIENTS, RunRecords, values_of

DONE, STARTED, MISSING, FAILED, REFUSED, SKIPPED = (
    "done", "started", "missing", "failed", "refused", "skipped",
)  # fmt: skip
"""``refused``: a rule that cannot work here says so itself; ``skipped``: the table says so."""

_FAILURE = "failed.json"
_VERSIONS = ("fedplat", "commit", "python", "flwr", "torch", "torchvision", "numpy", "scikit-learn")


@dataclass(frozen=True)
class Outcome:
    """A run's state, how many rounds it has, its figures by metric (unscaled), and why it failed.

    ``facts`` are what its environment.json says of versions, data and machine.
    """

    state: str
    rounds: int = 0
    values: Mapping[str, float | None] = field(default_factory=dict)
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def strategy_log(path: Path, strategy: str) -> StrategyLog:
    """Return a strategy's part of a run folder, without reading the configuration there."""
    return StrategyLog(path / strategy.replace(":", "_"))


def state_of(path: Path, cell: Cell) -> str:
    """Return the state of a cell's run from which files there are."""
    log = strategy_log(path, cell.strategy)
    if log.finished:
        return DONE
    if (failure := read_failure(path)) is not None:
        return str(failure["state"])
    return STARTED if log.started else MISSING


def read_failure(path: Path) -> dict[str, Any] | None:
    """Return what is known of a run's failure, None if it did not fail."""
    try:
        found: dict[str, Any] = json.loads((path / _FAILURE).read_text())
    except (OSError, ValueError):
        return None
    return found


def write_failure(path: Path, state: str, reason: str, traceback: str = "") -> None:
    """Write down that a run failed, or was refused, and why."""
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / _FAILURE, {"state": state, "reason": reason, "traceback": traceback.splitlines()})


def forget_failure(path: Path) -> None:
    """Let a run that failed be run again."""
    (path / _FAILURE).unlink(missing_ok=True)


def outcome_of(path: Path, cell: Cell, metrics: Sequence[str]) -> Outcome:
    """Return what a run came to; figures are those of a finished run alone."""
    state = state_of(path, cell)
    if state in (FAILED, REFUSED):
        return Outcome(state, reason=str((read_failure(path) or {})["reason"]))
    if state == MISSING:
        return Outcome(state)
    environment: dict[str, Any] = {}
    if (path / "environment.json").exists():
        environment = json.loads((path / "environment.json").read_text())
    folder = RunFolder(path, cell.config, environment)
    rounds = folder.rounds(cell.strategy)
    last = rounds[-1]["round"] if rounds else 0
    if state == STARTED:
        return Outcome(state, last, facts=facts_of(environment))
    clients = list(folder.clients(cell.strategy)) if NEEDS_CLIENTS & set(metrics) else []
    count = len(environment.get("samples_per_client", ())) or cell.config.partition.clients
    deadline = cell.config.emulation.deadline_s if cell.config.emulates_devices else None
    run = RunRecords(rounds, clients, count, deadline)
    return Outcome(DONE, last, values_of(run, metrics), facts=facts_of(environment))


def facts_of(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes a run's numbers comparable: versions, data, machine."""
    found = {key: environment[key] for key in _VERSIONS if environment.get(key)}
    for key in ("data_fingerprint", "device", "system", "parameters"):
        if environment.get(key):
            found[key] = environment[key]
    return found


@dataclass(frozen=True)
class Entry:
    """One position of a table: its runs by seed, and each metric's values of those that are done."""

    position: Position
    runs: Mapping[int, tuple[Cell, Outcome]]
    reason: str = ""
    values: Mapping[str, Mapping[int, float | None]] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """Return the state of all runs together; one that failed is told before one that is missing."""
        states = {outcome.state for _, outcome in self.runs.values()}
        if not states:
            return SKIPPED
        return next(s for s in (FAILED, REFUSED, STARTED, MISSING, DONE) if s in states)

    def numbers(self, metric: str) -> list[float]:
        """Return a metric's known values, by seed."""
        return [value for value in self.values.get(metric, {}).values() if value is not None]

    def mean(self, metric: str) -> float | None:
        """Return the mean over the seeds that are done, None without any."""
        return mean(numbers) if (numbers := self.numbers(metric)) else None

    def std(self, metric: str) -> float | None:
        """Return the standard deviation over seeds (n - 1 in the denominator), None with fewer than two."""
        return stdev(numbers) if len(numbers := self.numbers(metric)) > 1 else None


Entries = Mapping[Position, Entry]


def entries_of(plan: Plan, out: Path) -> dict[Position, Entry]:
    """Return every position of a table with what the folder has of it."""
    compared = [metric for metric in plan.table.metrics if metric in COMPARED]
    metrics = tuple(dict.fromkeys((*plan.table.metrics, *(COMPARED[metric][0] for metric in compared))))
    known: dict[str, Outcome] = {}
    runs: dict[Position, dict[int, tuple[Cell, Outcome]]] = {p: {} for p in plan.positions()}
    for cell in plan.cells:
        if cell.identity not in known:
            known[cell.identity] = outcome_of(cell_path(out, cell.identity), cell, metrics)
        runs[cell.position][cell.seed] = (cell, known[cell.identity])
    found = {}
    for position, of_seed in runs.items():
        done = {seed: outcome for seed, (_, outcome) in of_seed.items() if outcome.state == DONE}
        values = {m: {seed: outcome.values.get(m) for seed, outcome in done.items()} for m in metrics}
        found[position] = Entry(position, of_seed, plan.skipped.get(position, ""), values)
    if not compared:
        return found
    return {position: _with_compared(plan, found, entry, compared) for position, entry in found.items()}


def reference_position(plan: Plan, position: Position) -> Position:
    """Return the position that a cell is compared with."""
    axes = [axis.name for axis in plan.table.axes]
    return tuple(plan.table.reference.get(axis, name) for axis, name in zip(axes, position, strict=True))


def _with_compared(plan: Plan, entries: Entries, entry: Entry, metrics: Sequence[str]) -> Entry:
    """Add the metrics that compare with the reference, seed by seed, where both are there."""
    other = entries.get(reference_position(plan, entry.position))
    added: dict[str, dict[int, float | None]] = {metric: {} for metric in metrics}
    if other is not None and other.position != entry.position:
        for metric in metrics:
            source, compare = COMPARED[metric]
            before = other.values[source]
            for seed, now in entry.values[source].items():
                reached = before.get(seed)
                added[metric][seed] = None if now is None or reached is None else compare(reached, now)
    return Entry(entry.position, entry.runs, entry.reason, {**entry.values, **added})
