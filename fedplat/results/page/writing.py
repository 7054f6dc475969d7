"""Pages as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..folder import RunFolder
from .data import page_data
from .html import write_html
from .table_data import table_data

NAME = "report.html"


def write_page(runs: Sequence[RunFolder], path: Path, summary: Mapping[str, Any] | None = None) -> None:
    """Write the page about runs that differ in nothing but the seed to a file, in one step.

    ``summary`` is that of the first run if it is known already. Raises UserError if the runs differ in more.
    """
    write_html(page_data(runs, summary), path)


def write_table_page(folder: Path) -> Path:
    """Write ``report.html`` into a table's folder; return its path. Raises UserError for another folder."""
    path = folder / NAME
    write_html(table_data(folder), path)
    return path
