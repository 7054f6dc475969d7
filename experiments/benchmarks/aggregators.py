"""``fedplat benchmark aggregators``: seconds, memory and results of aggregation rules, on one matrix.

fedplat's functions against Flower's built-in strategies and ByzFL, and against one read of the matrix, which
is the least any of them could take.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from . import aggregator_rules as rules
from .children import growth_of, in_child
from .common import Report, Section, chosen, compared, cores, installed, memory, middle, quiet, take_turns
from .workload import before_forks

RULES = (
    "mean",
    "median",
    "trimmed-mean",
    "krum",
    "multi-krum",
    "bulyan",
    "geometric-median",
    "fed-credit",
)
OURS, FLOWER, WIRE, BYZFL, READ = "fedplat", "Flower", "Flower, from bytes", "ByzFL", "one read"
NAMES = {"fedplat": (OURS,), "flower": (FLOWER, WIRE), "byzfl": (BYZFL,)}
COLUMNS = (
    "library",
    "clients",
    "parameters",
    "s",
    "x ours",
    "x one read",
    "spread",
    "peak MB",
    "max difference",
)
# Times grow as clients to this power, memory as the matrix; used to guess before a cell is measured.
_POWER = {"krum": 2, "multi-krum": 2, "bulyan": 2.5}
# How far memory grows, in multiples of the matrix, before a library has been measured.
_PEAK = {OURS: 0.1, FLOWER: 3.0, WIRE: 4.0, BYZFL: 3.0}
_SPARE = 1 << 30
# A turn is the median of so many calls, or of as many as fit into so many seconds.
_CALLS, _ENOUGH = 5, 0.5
_LEAST = 20  # columns that every library can work on
Build = Callable[[torch.Tensor], rules.Run]


@dataclass(frozen=True)
class Options:
    """What to measure; cells that would take longer than ``limit`` seconds are skipped."""

    rules: tuple[str, ...] = RULES
    libraries: tuple[str, ...] = tuple(NAMES)
    clients: tuple[int, ...] = (10, 50, 100, 200)
    parameters: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    repeats: int = 3
    seed: int = 1
    threads: int | None = None
    limit: float = 20.0


QUICK: dict[str, Any] = {"clients": (10, 50), "parameters": (100_000,), "repeats": 2}


@dataclass(frozen=True)
class Timing:
    """One call: seconds, bytes that memory grew by at most, and how far the result is from ours."""

    seconds: float
    peak: int
    difference: float | None = None
    vector: rules.Vector | None = None


def check(options: Options) -> None:
    """Raise UserError for a rule or library that does not exist."""
    chosen("rule", options.rules, RULES)
    chosen("library", options.libraries, NAMES)


def measure(options: Options, report: Report) -> None:
    """Fill the report, one section per rule."""
    quiet()
    before_forks()
    report.options = asdict(options)
    rows: dict[str, list[dict[str, Any]]] = {rule: [] for rule in options.rules}
    skipped: dict[str, list[str]] = {rule: [] for rule in options.rules}
    guesses: dict[tuple[str, str], Guess] = {}
    try:
        for parameters in sorted(options.parameters):
            for clients in sorted(options.clients):
                _cell(clients, parameters, options, report, rows, skipped, guesses)
    finally:  # also of a run that is interrupted
        for rule in options.rules:
            notes = [f"threads: {options.threads or cores()}; peak MB is what memory grew by during the call"]
            if "byzfl" in options.libraries and not installed("byzfl"):
                skipped[rule].insert(0, "ByzFL: not installed (pip install 'fedplat[bench]')")
            report.add(Section(rule, COLUMNS, rows[rule], notes, skipped[rule]))


@dataclass(frozen=True)
class Guess:
    """What a library needed for a rule in one cell, to guess what it needs in another."""

    clients: int
    parameters: int
    seconds: float
    peak: int

    def seconds_at(self, rule: str, clients: int, parameters: int) -> float:
        """Return the guessed seconds of a cell.

        >>> Guess(10, 100, 1.0, 0).seconds_at("krum", 20, 1000)
        40.0
        """
        grown = (clients / self.clients) ** _POWER.get(rule, 1)
        return self.seconds * grown * parameters / self.parameters

    def peak_at(self, clients: int, parameters: int) -> float:
        """Return the guessed growth of memory of a cell, in bytes."""
        return self.peak * (clients * parameters) / (self.clients * self.parameters)


def _cell(
    clients: int,
    parameters: int,
    options: Options,
    report: Report,
    rows: dict[str, list[dict[str, Any]]],
    skipped: dict[str, list[str]],
    guesses: dict[tuple[str, str], Guess],
) -> None:
    where, size = f"n = {clients}, d = {parameters:,}", 4 * clients * parameters
    if memory("MemTotal") and size + _SPARE > memory("MemAvailable"):
        for rule in options.rules:
            skipped[rule].append(f"all, {where}: the matrix alone is {size / 1e9:.1f} GB, more than is free")
        return
    matrix = rules.round_of(clients, parameters, options.seed)
    for rule in options.rules:
        report.say(f"{rule}, {where}")
        things: dict[str, Callable[[], Timing]] = {}
        found: list[Timing] = []
        for library, build in libraries(rule, options.libraries).items():
            guess = guesses.get((rule, library))
            if why := too_much(library, rule, clients, parameters, guess, options.limit):
                skipped[rule].append(f"{library}, {where}: {why}")
            else:
                things[library] = functools.partial(_timed, build, library, matrix, found, options)
        if not things:
            continue
        things[READ] = functools.partial(_timed, rules.one_read, READ, matrix, [], options)
        results, failures = take_turns(things, options.repeats)
        skipped[rule] += [f"{library}, {where}: {why}" for library, why in failures.items()]
        for library, timings in results.items():
            worst = max(timing.peak for timing in timings)
            seconds = middle([timing.seconds for timing in timings])
            guesses[rule, library] = Guess(clients, parameters, seconds, worst)
        rows[rule] += rows_of(clients, parameters, results)


def too_much(
    library: str, rule: str, clients: int, parameters: int, guess: Guess | None, limit: float
) -> str:
    """Say why a cell is not measured, or nothing."""
    size = 4 * clients * parameters
    peak = guess.peak_at(clients, parameters) if guess else _PEAK.get(library, 0) * size
    peak += size if library == WIRE else 0
    free = memory("MemAvailable")
    if free and peak + _SPARE > free:
        return f"needs some {peak / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free"
    seconds = guess.seconds_at(rule, clients, parameters) if guess else 0.0
    return f"would take some {seconds:.0f} s, more than --limit {limit:g}" if seconds > limit else ""


def libraries(rule: str, wanted: tuple[str, ...]) -> dict[str, Build]:
    """Return, by library, what makes the rule on a matrix; libraries without the rule are left out."""
    tiny = torch.zeros(11, _LEAST)
    found: dict[str, Build] = {}
    if "fedplat" in wanted:
        found[OURS] = lambda matrix: rules.fedplat_rule(rule, matrix)
    if "flower" in wanted and rules.flower_rule(rule, tiny, False):
        found[FLOWER] = lambda matrix: _there(rules.flower_rule(rule, matrix, False))
        found[WIRE] = lambda matrix: _there(rules.flower_rule(rule, matrix, True))
    if "byzfl" in wanted and installed("byzfl") and rules.byzfl_rule(rule, tiny):
        found[BYZFL] = lambda matrix: _there(rules.byzfl_rule(rule, matrix))
    return found


def _there(run: rules.Run | None) -> rules.Run:
    assert run is not None
    return run


def _timed(build: Build, library: str, matrix: torch.Tensor, found: list[Timing], options: Options) -> Timing:
    """Time calls in a process of their own; the first result of ours is what the others are compared with."""
    reference, threads = found[0].vector if found else None, options.threads or cores()

    def call() -> Timing:
        torch.set_num_threads(threads)
        with threadpool_limits(threads):
            build(matrix[:, :1000].contiguous())()  # threads start and code is loaded before the clock runs
            vector, seconds, peak = growth_of(build(matrix))
            times = [seconds]
            while sum(times) < _ENOUGH and len(times) < _CALLS:
                again = build(matrix)
                start = time.perf_counter()
                again()
                times.append(time.perf_counter() - start)
        keep = vector if library == OURS and reference is None else None
        far = None if reference is None else float(np.abs(vector - reference).max())
        return Timing(middle(times), peak, far, keep)

    timing: Timing = in_child(call, _CALLS * options.limit + 60).value
    if timing.vector is not None:
        found.append(timing)
    return timing


def rows_of(clients: int, parameters: int, results: dict[str, list[Timing]]) -> list[dict[str, Any]]:
    """Return a cell's rows; the difference is the largest of any turn, for ours that between its turns."""
    figures = compared({name: [t.seconds for t in of] for name, of in results.items()}, OURS)
    read = figures[READ]["seconds"] if READ in figures else float("nan")
    rows = []
    for name, of in results.items():
        differences = [t.difference for t in of if t.difference is not None]
        f = figures[name]
        values = (
            *(name, clients, parameters, f["seconds"], f["ratio"], f["seconds"] / read, f["spread"]),
            max(t.peak for t in of) / 1e6,
            max(differences) if differences and name != READ else None,
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows
