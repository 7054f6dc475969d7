import csv
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedplat.results import tables
from fedplat.results.summary import summarise

from . import make_run


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    return summarise(
        make_run(tmp_path / "run", {"mean": [0.1, 0.9, 0.5, 0.125], "median": []}, finished=False)
    )


def test_markdown_has_one_row_per_strategy_with_a_dash_for_what_is_not_known(summary: dict[str, Any]) -> None:
    lines = tables.markdown(summary).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| mean (round 3 of 4) | 12.50 |")
    assert lines[3].startswith("| median (round 0 of 4) | – | – |")
    assert len({line.count("|") for line in lines}) == 1


def test_the_best_accuracy_comes_last_and_in_brackets(summary: dict[str, Any]) -> None:
    heads = tables.headings(summary)
    assert heads[1] == "accuracy %"
    assert heads[-1] == "(best over rounds %)"
    assert tables.cells(summary)[0][-1] == "90.00"


def test_csv_is_unrounded_and_has_every_column(summary: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(summary))))
    assert float(rows[0]["accuracy"]) == 0.125
    assert rows[0]["finished"] == "false"
    assert rows[1]["accuracy"] == ""
    assert {column.key for column in tables.COLUMNS} <= rows[0].keys()


def test_latex_escapes_what_latex_would_read_as_its_own(summary: dict[str, Any]) -> None:
    summary["strategies"]["my_pack:A&B 50%"] = summary["strategies"].pop("median")
    text = tables.latex(summary)
    assert r"my\_pack:A\&B 50\% (round 0 of 4) & -- &" in text
    assert r"accuracy \%" in text
    columns = len(tables.headings(summary))
    assert all(
        line.replace(r"\&", "").count(" & ") == columns - 1 for line in text.splitlines() if r" \\" in line
    )


def test_terminal_table_fits_80_columns(summary: dict[str, Any]) -> None:
    summary["strategies"]["geometric-median"] = summary["strategies"]["mean"] | {
        "diverged": True,
        "loss": 2.2e12,
    }
    console = Console(width=80, file=io.StringIO())
    console.print(tables.rich_table(summary))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert "12.50" in text
    assert "2.20e+12" in text


def test_a_column_without_any_figure_is_not_shown(summary: dict[str, Any]) -> None:
    for row in summary["strategies"].values():
        row["attackers_weight"] = None
    assert "attackers' weight %" not in tables.headings(summary)
