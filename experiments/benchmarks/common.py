"""What the benchmarks share: taking turns, medians and ratios, tables, JSON, and what the machine is."""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedplat.errors import UserError, unknown_name

from .children import TurnError

if TYPE_CHECKING:
    from rich.table import Table

Say = Callable[[str], None]
_PACKAGES = ("torch", "numpy", "scipy", "flwr", "ray", "byzfl", "pfl", "blazefl")
_FORMAT = 1


@dataclass(frozen=True)
class Section:
    """A table of results: ``rows`` hold raw numbers, by column; ``skipped`` says what is missing and why."""

    title: str
    columns: tuple[str, ...]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass
class Report:
    """All that a benchmark found; ``on_section`` is called with every section as soon as it is there."""

    benchmark: str
    options: dict[str, Any]
    on_section: Callable[[Section], None] = lambda section: None
    say: Say = lambda text: None
    sections: list[Section] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def add(self, section: Section) -> None:
        """Take in a section and show it."""
        self.sections.append(section)
        self.on_section(section)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "format": _FORMAT,
            "benchmark": self.benchmark,
            "options": self.options,
            "machine": machine(),
            "sections": [vars(section) | {"columns": list(section.columns)} for section in self.sections],
            "failed": self.failed,
        }


def write_json(reports: Iterable[Report], path: Path) -> None:
    """Write reports as one JSON file; raises UserError if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps([report.to_dict() for report in reports], indent=2, default=str)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the results: {error}") from error


# Turns and ratios ------------------------------------------------------------------------------------------


def take_turns(
    things: Mapping[str, Callable[[], Any]],
    repeats: int,
    say: Say = lambda text: None,
    patience: float = float("inf"),
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Let every thing take its turn, ``repeats`` times round; return all results, and why others failed.

    What fails once is left out from then on, and what has taken ``patience`` seconds gets no further turn.
    Taking turns spreads whatever else the machine does meanwhile over all of them.
    """
    results: dict[str, list[Any]] = {name: [] for name in things}
    failures: dict[str, str] = {}
    taken = dict.fromkeys(things, 0.0)
    for number in range(1, repeats + 1):
        for name, thing in things.items():
            if name in failures or (number > 1 and taken[name] >= patience):
                continue
            say(f"turn {number} of {repeats}: {name}")
            start = time.perf_counter()
            try:
                results[name].append(thing())
            except TurnError as error:
                failures[name] = str(error)
                results.pop(name)
            taken[name] += time.perf_counter() - start
    return results, failures


def middle(values: Sequence[float]) -> float:
    """Return the median.

    >>> middle([1.0, 9.0, 2.0])
    2.0
    """
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Return (largest − smallest) / median, to tell a quiet machine from a noisy one.

    >>> spread([1.0, 2.0, 3.0])
    1.0
    """
    return (max(values) - min(values)) / middle(values) if middle(values) > 0 else 0.0


def compared(seconds: Mapping[str, Sequence[float]], ours: str) -> dict[str, dict[str, float]]:
    """Return per name its median, its spread, and its median as a multiple of ``ours``.

    >>> compared({"a": [2.0, 4.0, 3.0], "b": [6.0]}, "a")["b"]
    {'seconds': 6.0, 'spread': 0.0, 'ratio': 2.0}
    """
    base = middle(seconds[ours]) if seconds.get(ours) else float("nan")
    return {
        name: {"seconds": middle(values), "spread": spread(values), "ratio": middle(values) / base}
        for name, values in seconds.items()
        if values
    }


def chosen(what: str, wanted: Sequence[Any] | None, allowed: Iterable[Any]) -> list[Any]:
    """Return ``wanted``, or all that is allowed; raises UserError naming the nearest for another."""
    options = list(allowed)
    for item in wanted or ():
        if item not in options:
            raise unknown_name(what, str(item), map(str, options))
    return [item for item in options if not wanted or item in wanted]


def quiet() -> None:
    """Keep Flower's progress messages out of the tables."""
    logging.getLogger("flwr").setLevel(logging.ERROR)


# Tables ----------------------------------------------------------------------------------------------------


def table_of(section: Section) -> Table:
    """Return a section as a table for the terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(section.title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in section.columns:
        numbers = all(not isinstance(row.get(column), str) for row in section.rows)
        table.add_column(Text(column), justify="right" if numbers else "left")
    for row in section.rows:
        table.add_row(*(Text(shown(row.get(column), column)) for column in section.columns))
    return table


def shown(value: Any, column: str = "") -> str:
    """Return a value as a table has it: three digits, ratios with an x, nothing as a dash.

    >>> shown(0.01234), shown(12.3456), shown(2.5, "x ours"), shown(None), shown(1663370), shown(1e-7)
    ('0.0123', '12.3', '2.50x', '–', '1,663,370', '1e-07')
    """
    if value is None or value != value:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    if column.startswith("x "):
        return f"{value:.2f}x"
    if value == 0:
        return "0"
    digits = f"{value:#.3g}"
    return f"{value:.0g}" if "e-" in digits else f"{value:,.0f}" if abs(value) >= 1000 else digits.rstrip(".")


# The machine -----------------------------------------------------------------------------------------------


def cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Return what the results depend on, in general terms: no host name, no user, no paths."""
    facts: dict[str, Any] = {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": cores(),
        "memory_gb": round(memory("MemTotal") / 1e9),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "threads_env": {k: os.environ[k] for k in sorted(os.environ) if k.endswith("_NUM_THREADS")},
    }
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def machine_line() -> str:
    """Return the machine in one line for the terminal."""
    facts = machine()
    threads = "".join(f", {k}={v}" for k, v in facts.pop("threads_env").items())
    names = ", ".join(f"{name} {facts[name]}" for name in ("python", *_PACKAGES) if name in facts)
    system = f"{facts['system']} {facts['architecture']}, load {facts['load_average']}"
    return f"{facts['cores']} cores, {facts['memory_gb']} GB, {system}; {names}{threads}"


def memory(field_name: str) -> int:
    """Return a field of the system's memory table, such as MemAvailable, in bytes; 0 if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(field_name + ":"))


def installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    from importlib.util import find_spec

    return find_spec(package) is not None
