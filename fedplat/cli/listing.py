"""``fedplat list``: all names there are."""

from __future__ import annotations

from typing import Annotated

import typer

from ..catalogue import PREFIXED
from ..errors import unknown_name
from ..registry import KINDS, entries
from ..scenarios import read_scenario, scenario_names
from .common import console

_ALL = ("scenarios", "tables", *KINDS)


def list_names(
    kind: Annotated[str | None, typer.Argument(metavar="[KIND]", show_default=False)] = None,
) -> None:
    """List scenarios, tables, strategies, selectors, attacks, models, datasets, partitions and other parts.

    KIND is one of these words, and without it all are listed.
    """
    from rich.table import Table
    from rich.text import Text

    if kind is not None and kind not in _ALL:
        raise unknown_name("kind", kind, _ALL)
    out = console()
    for number, shown in enumerate([kind] if kind else _ALL):
        if number:
            out.print()
        if kind is None:
            out.print(Text(shown, style="bold underline"))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="bold")
        table.add_column()
        table.add_column(style="dim")
        for name, summary, source in _rows(shown):
            table.add_row(Text(name), Text(summary), Text(source))
        out.print(table)


def _rows(kind: str) -> list[tuple[str, str, str]]:
    if kind == "scenarios":
        return [(name, str(read_scenario(name)[0].get("description", "")), "") for name in scenario_names()]
    if kind == "tables":
        from ..tables.spec import read_table, table_names

        return [(name, read_table(name)[1].title, "") for name in table_names()]
    rows = [(entry.name, entry.summary, entry.source) for entry in entries(kind).values()]
    prefixed = PREFIXED.get(kind, {}).items()
    return rows + [(f"{prefix}:{rest}", summary, "") for prefix, (_, rest, summary) in prefixed]
