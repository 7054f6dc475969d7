"""What a table file may say: axes, the scenario of every cell, metrics, and what others published."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator

from ..config_errors import explain
from ..config_parts import Strict
from ..errors import UserError, unknown_name
from .metrics import COMPARED, METRICS

Count = Annotated[int, Field(ge=1)]
Names = tuple[str, ...]
Variables = Annotated[dict[str, Any], Field(default_factory=dict)]
Kept = Annotated[dict[str, Names], Field(default_factory=dict)]
Reference = Annotated[dict[str, str], Field(default_factory=dict)]
Changes = Annotated[dict[str, Any], Field(alias="set", default_factory=dict)]


class Value(Strict):
    """One value of an axis: its name, and what it changes in the scenario.

    The name is what the command line and placeholders such as ``{attack}`` use; ``set`` has keys as
    ``fedplat run --set`` takes them, ``vars`` are placeholders of one's own.
    """

    value: str | int | float | bool
    label: str = ""
    scenario: str = ""
    strategy: str = ""
    changes: Changes
    vars: Variables

    @property
    def name(self) -> str:
        """Return the value as the command line has it."""
        return str(self.value).lower() if isinstance(self.value, bool) else str(self.value)

    @property
    def shown(self) -> str:
        """Return the value as tables have it."""
        return self.label or self.name


class Axis(Strict):
    """One direction of a table. ``key`` is what plain values set: ``strategy``, or a key of the scenario."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")]
    label: str = ""
    key: str = ""
    values: Annotated[tuple[Value, ...], Field(min_length=1)]

    @field_validator("values", mode="before")
    @classmethod
    def _tables(cls, values: Any) -> Any:
        if not isinstance(values, list | tuple):
            return values
        return [value if isinstance(value, Mapping | Value) else {"value": value} for value in values]

    @field_validator("values")
    @classmethod
    def _different(cls, values: tuple[Value, ...]) -> tuple[Value, ...]:
        names = [value.name for value in values]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"names {', '.join(twice)} twice")
        return values

    @property
    def shown(self) -> str:
        """Return the axis as tables have it."""
        return self.label or self.name

    def kept(self, names: Sequence[str]) -> Axis:
        """Return the axis with these of its values, in its own order; raises UserError for others."""
        known = {value.name for value in self.values}
        for name in names:
            if name not in known:
                raise unknown_name(self.name, name, known)
        return self.model_copy(update={"values": tuple(v for v in self.values if v.name in names)})


class Published(Strict):
    """Figures from one table of a paper; each of ``cells`` has axes' names with values, and ``value``.

    A cell belongs to every cell of ours that agrees with it. ``value`` is in the unit the metric is shown in.
    """

    paper: str
    table: str
    metric: str = ""
    note: str = ""
    cells: Annotated[tuple[dict[str, str | float | int | bool], ...], Field(min_length=1)]


class Claim(Strict):
    """What a paper says in words, where no table of it is public."""

    paper: str
    text: str


class Skip(Strict):
    """Cells that make no sense, by axis and names of values, and why."""

    cells: dict[str, Names]
    reason: str


class Quick(Strict):
    """What ``--quick`` changes: fewer rounds and seeds, settings, and which values of axes are kept."""

    seeds: Count | None = None
    rounds: Count | None = None
    note: str = ""
    changes: Changes
    vars: Variables
    keep: Kept


class Resources(Strict):
    """What a cell asks of a Ray cluster."""

    cores: Count = 1
    memory_mb: Annotated[int, Field(ge=0)] = 0
    gpus: Annotated[float, Field(ge=0)] = 0.0


class Table(Strict):
    """A table file; see docs/tables.md."""

    title: str
    description: str = ""
    scenario: str
    seeds: Count = 1
    rounds: Count | None = None
    metrics: Annotated[Names, Field(min_length=1)] = ("accuracy",)
    changes: Changes
    vars: Variables
    rows: Axis
    columns: Axis
    blocks: tuple[Axis, ...] = ()
    reference: Reference
    published: tuple[Published, ...] = ()
    claims: tuple[Claim, ...] = ()
    skip: tuple[Skip, ...] = ()
    quick: Quick | None = None
    resources: Resources = Resources()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Return all axes: blocks, rows, columns."""
        return (*self.blocks, self.rows, self.columns)

    def axis(self, name: str) -> Axis:
        """Return an axis by name; raises UserError."""
        found = {axis.name: axis for axis in self.axes}
        if name not in found:
            raise unknown_name("axis", name, found)
        return found[name]

    def keep(self, kept: Mapping[str, Sequence[str]]) -> Table:
        """Return the table with some values of its axes alone; raises UserError for what is not there."""
        for name in kept:
            self.axis(name)

        def of(axis: Axis) -> Axis:
            return axis.kept(kept[axis.name]) if axis.name in kept else axis

        blocks = tuple(of(axis) for axis in self.blocks)
        return self.model_copy(update={"blocks": blocks, "rows": of(self.rows), "columns": of(self.columns)})


def table_names() -> list[str]:
    """Return the names of the tables that come with fedplat."""
    folder = files("fedplat.experiments").joinpath("tables")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def read_table(name: str) -> tuple[str, Table]:
    """Return a table by its name or TOML file, and the name for its folder.

    Raises UserError that lists every mistake with its key, what was found and the nearest right name.
    """
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
        if not path.is_file():
            raise UserError(f"{name}: there is no such file")
        return path.stem, parse_table(path.read_bytes(), name)
    if name not in table_names():
        raise unknown_name("table", name, table_names())
    source = files("fedplat.experiments").joinpath("tables", f"{name}.toml")
    return name, parse_table(source.read_bytes(), name)


def parse_table(content: bytes, where: str) -> Table:
    """Return a table from the content of a file that messages call ``where``; raises UserError."""
    try:
        raw = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not a TOML file: {error}") from None
    try:
        table = Table.model_validate(raw)
    except ValidationError as error:
        raise UserError(explain(error, Table, raw, where)) from None
    try:
        _check(table)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return table


def _check(table: Table) -> None:
    """Raise UserError unless all names that the table uses are names of something in it."""
    names = [axis.name for axis in table.axes]
    if len({*names, "seed"}) <= len(names):
        raise UserError(f"axes need names of their own, none of them 'seed': {', '.join(names)}")
    for metric in (*table.metrics, *(p.metric for p in table.published if p.metric)):
        if metric not in METRICS:
            raise unknown_name("metric", metric, METRICS)
    _check_strategies(table)
    table.keep({name: (value,) for name, value in table.reference.items()})
    if (metric := next((m for m in table.metrics if m in COMPARED), "")) and not table.reference:
        raise UserError(f"metrics: {metric!r} needs [reference], the cell to compare with")
    for skip in table.skip:
        table.keep(skip.cells)
    if table.quick:
        table.keep(table.quick.keep)
    for published in table.published:
        for cell in published.cells:
            if not isinstance(cell.get("value"), int | float):
                raise UserError(f"published: {cell}: 'value' has to be there, and a number")
            table.keep({axis: (str(name),) for axis, name in cell.items() if axis != "value"})


def _check_strategies(table: Table) -> None:
    """Raise UserError for settings of a strategy that no cell runs; those of placeholders are not known."""
    strategies = {value.strategy for axis in table.axes for value in axis.values} - {""}
    strategies |= {v.name for axis in table.axes if axis.key == "strategy" for v in axis.values}
    less = table.quick.changes if table.quick else {}
    for changes in (table.changes, less, *(value.changes for axis in table.axes for value in axis.values)):
        for key in changes:
            first, _, rest = key.partition(".")
            about = rest.partition(".")[0]
            if first == "strategy" and strategies and "{" not in about and about not in strategies:
                raise UserError(f"{key}: {unknown_name('strategy of this table', about, strategies)}")
