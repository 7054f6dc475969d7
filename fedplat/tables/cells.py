"""The cells of a table: from axes and options to one resolved configuration per run."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import ExperimentConfig, load
from ..errors import UserError, unknown_name
from ..scenarios import apply_overrides, read_scenario
from .spec import Table, Value

Position = tuple[str, ...]
"""Names of values: of the blocks, the row, the column, in this order."""

_LONG = 60
_PLACEHOLDER = re.compile(r"\{([A-Za-z][\w-]*)\}")


@dataclass(frozen=True)
class Options:
    """What the command line changes of a table."""

    seeds: int | None = None
    rounds: int | None = None
    quick: bool = False
    keep: Mapping[str, Sequence[str]] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One run: where it stands in the table, its configuration with one strategy, and its folder's name.

    ``command`` runs it alone.
    """

    position: Position
    seed: int
    strategy: str
    config: ExperimentConfig
    command: str

    @property
    def identity(self) -> str:
        """Return what tells runs apart: the hash of the resolved configuration, and the package version."""
        return f"{self.config.digest()}-{__version__}"


@dataclass(frozen=True)
class Plan:
    """A table with the options taken in: what is shown, and the runs that this takes.

    Cells that come to the same run, such as one without an attack under several fractions, share it.
    ``skipped`` has the reasons for positions without a run, ``caps`` what the options made smaller.
    """

    name: str
    table: Table
    seeds: int
    cells: tuple[Cell, ...]
    skipped: Mapping[Position, str]
    caps: tuple[str, ...] = ()

    @property
    def runs(self) -> dict[str, Cell]:
        """Return the runs by identity, in the order of the table."""
        found: dict[str, Cell] = {}
        for cell in self.cells:
            found.setdefault(cell.identity, cell)
        return found

    def positions(self) -> list[Position]:
        """Return all positions, skipped ones too."""
        return list(itertools.product(*([value.name for value in axis.values] for axis in self.table.axes)))


def plan(name: str, table: Table, options: Options) -> Plan:
    """Return the cells of a table, each with a configuration that has been checked.

    Raises UserError for a mistake in the table, in a scenario, or in the options.
    """
    whole = table
    if options.quick:
        table = quick(name, table, options.keep)
    table = table.keep(options.keep)
    caps = _caps(whole, table, options)
    seeds = options.seeds or table.seeds
    positions: list[Cell] = []
    skipped: dict[Position, str] = {}
    for values in itertools.product(*(axis.values for axis in table.axes)):
        position = tuple(value.name for value in values)
        if reason := _skip(table, position):
            skipped[position] = reason
            continue
        where = f"{name}, {', '.join(value.shown for value in values)}"
        positions += _cells_at(table, values, position, seeds, options, where)
    _check_overrides(options.overrides, {cell.strategy for cell in positions})
    made: dict[str, Cell] = {}
    for cell in positions:
        other = made.setdefault(cell.identity, cell)
        if other.config.to_dict() != cell.config.to_dict():
            raise UserError(f"{name}: {other.position} and {cell.position} have the same hash; rename one")
    return Plan(name, table, seeds, tuple(positions), skipped, caps)


def quick(name: str, table: Table, chosen: Mapping[str, Sequence[str]]) -> Table:
    """Return a table as ``--quick`` has it, but for axes whose values were ``chosen`` by hand.

    Raises UserError if the table says nothing of it.
    """
    if (less := table.quick) is None:
        raise UserError(f"{name}: the table has no [quick]; use --rounds, --rows, --columns and --set")
    kept = table.keep({axis: names for axis, names in less.keep.items() if axis not in chosen})
    return kept.model_copy(
        update={
            "seeds": less.seeds or table.seeds,
            "rounds": less.rounds or table.rounds,
            "vars": {**table.vars, **less.vars},
        }
    )


def _caps(whole: Table, table: Table, options: Options) -> tuple[str, ...]:
    """Say what is less than the whole table."""
    found = []
    less = whole.quick if options.quick else None
    rounds = options.rounds or table.rounds
    if rounds and rounds != whole.rounds:
        found.append(
            f"{rounds} round{'s' * (rounds > 1)} instead of {whole.rounds or 'those of the scenario'}"
        )
    if less and less.changes:
        told = {key: toml_value(value) for key, value in less.changes.items()}
        found.append(", ".join(f"{k} = {v}" if len(v) < _LONG else f"other {k}" for k, v in told.items()))
    for before, after in zip(whole.axes, table.axes, strict=True):
        if len(after.values) < len(before.values):
            shown = ", ".join(value.shown for value in after.values)
            found.append(f"{len(after.values)} of {len(before.values)} values of {before.shown} ({shown})")
    if less and less.note:
        found.append(less.note)
    if options.overrides:
        found.append(f"--set {' '.join(options.overrides)}")
    return tuple(found)


def _skip(table: Table, position: Position) -> str:
    named = dict(zip((axis.name for axis in table.axes), position, strict=True))
    for skip in table.skip:
        if all(named[axis] in names for axis, names in skip.cells.items()):
            return skip.reason
    return ""


def _cells_at(
    table: Table, values: tuple[Value, ...], position: Position, seeds: int, options: Options, where: str
) -> Iterator[Cell]:
    variables = _variables(table, values, where)
    changes = _changes(table, values, options)
    scenario = str(
        _filled(next((v.scenario for v in values if v.scenario), table.scenario), variables, where)
    )
    named: dict[str, Any] = {}
    for key, value in changes.items():
        named[str(_filled(key, variables, where))] = _filled(value, variables, where)
    strategy = _strategy_named(named, where)
    raw, _ = read_scenario(scenario)
    strategy = strategy or str((raw.get("strategies") or ["mean"])[0])
    texts = [f"{key}={toml_value(value)}" for key, value in named.items()]
    if (rounds := options.rounds or table.rounds) is not None:
        texts.append(f"rounds={rounds}")
    # What is said of strategies that this cell does not run is of no use to it.
    texts = [text for text in (*texts, *options.overrides) if _strategy_of(text) in ("", strategy)]
    if isinstance(raw.get("strategy"), dict):
        raw["strategy"] = {key: item for key, item in raw["strategy"].items() if key == strategy}
    apply_overrides(raw, texts)
    raw["strategies"] = [strategy]
    config = load(raw, where)
    words = ["fedplat", "run", scenario, "--strategy", strategy]
    words += [word for text in texts for word in ("--set", text)]
    for seed in range(config.seed, config.seed + seeds):
        # The seed alone changes no schema, and making one takes most of the time.
        seeded = config.model_copy(update={"seed": seed})
        yield Cell(position, seed, strategy, seeded, shlex.join([*words, "--seed", str(seed)]))


def _variables(table: Table, values: tuple[Value, ...], where: str) -> dict[str, Any]:
    found = dict(table.vars)
    for axis, value in zip(table.axes, values, strict=True):
        found[axis.name] = value.value
        found |= value.vars
    for _ in range(2):  # a placeholder's value may have placeholders
        found = {key: _filled(value, found, where) for key, value in found.items()}
    return found


def _changes(table: Table, values: tuple[Value, ...], options: Options) -> dict[str, Any]:
    """Return what differs from the scenario, by key; later ones win: table, blocks, columns, rows, quick."""
    found = dict(table.changes)
    pairs = list(zip(table.axes, values, strict=True))
    for axis, value in [*pairs[:-2], pairs[-1], pairs[-2]]:
        if axis.key and not value.strategy:
            found[axis.key] = value.value
        if value.strategy:
            found["strategy"] = value.strategy
        found |= value.changes
    if options.quick and table.quick:
        found |= table.quick.changes
    return found


def _strategy_named(changes: dict[str, Any], where: str) -> str:
    """Take the cell's strategy out of its changes, "" for the scenario's first one; several are refused."""
    several = changes.pop("strategies", [])
    one = changes.pop("strategy", several[0] if len(several) == 1 else "")
    if several not in ([], [one]):
        raise UserError(
            f"{where}: strategies = {toml_value(several)}: a cell runs one strategy; name it alone"
        )
    return str(one)


def _strategy_of(text: str) -> str:
    """Return the strategy that ``strategy.NAME.key=value`` is about, "" for anything else."""
    path = text.partition("=")[0].strip().split(".")
    return path[1] if path[0] == "strategy" and len(path) > 1 else ""


def _check_overrides(overrides: Sequence[str], strategies: set[str]) -> None:
    for text in overrides:
        if text.partition("=")[0].strip() == "strategies":
            raise UserError(f"--set {text}: the table's rows say which strategies run; use --rows")
        if (about := _strategy_of(text)) and about not in strategies:
            raise UserError(f"--set {text}: {unknown_name('strategy of this table', about, strategies)}")


def _filled(value: Any, variables: Mapping[str, Any], where: str) -> Any:
    """Replace placeholders; a text that is one placeholder becomes its value, whatever its type."""
    if isinstance(value, Mapping):
        return {key: _filled(item, variables, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_filled(item, variables, where) for item in value]
    if not isinstance(value, str):
        return value

    def of(match: re.Match[str]) -> Any:
        if match[1] not in variables:
            raise UserError(f"{where}: {unknown_name('placeholder', match[1], variables)}")
        return variables[match[1]]

    if whole := _PLACEHOLDER.fullmatch(value):
        return of(whole)
    return _PLACEHOLDER.sub(lambda match: str(of(match)), value)


def toml_value(value: Any) -> str:
    """Return a value as TOML on one line.

    >>> toml_value([{"name": "sign-flip", "fraction": 0.3}, True])
    '[{name = "sign-flip", fraction = 0.3}, true]'
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml_key(key)} = {toml_value(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key) else toml_value(key)


def cell_path(out: Path, identity: str) -> Path:
    """Return a cell's run folder within a table's folder."""
    return out / "cells" / identity
