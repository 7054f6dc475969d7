import csv
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedplat.results import tables
from fedplat.results.summary import summarise

from . import make_run
from .device_records import make_device_run


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
    for row in summary["strategies"].values():
        row["attackers_weight"] = None  # or there is no room for the loss
    console = Console(width=80, file=io.StringIO())
    console.print(tables.rich_table(summary))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert "12.50" in text
    assert "2.20e+12" in text
    assert "geometric-median" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_column_without_any_figure_is_not_shown(summary: dict[str, Any]) -> None:
    for row in summary["strategies"].values():
        row["attackers_weight"] = None
    assert "attackers' weight %" not in tables.headings(summary)


def device_summary(path: Path, outcome: str = "delivered") -> dict[str, Any]:
    accuracies: dict[str, list[float | None]] = {"mean": [0.1, 0.4, 0.9], "geometric-median": [0.1, 0.8, 0.8]}
    return summarise(make_device_run(path, accuracies, lambda c, n: outcome if c == 1 else "delivered"))


def test_costs_on_devices_are_called_simulated_and_name_the_accuracy(tmp_path: Path) -> None:
    summary = device_summary(tmp_path / "run", "late")
    heads = tables.headings(summary)
    row = dict(zip(heads, tables.cells(summary)[1], strict=True))
    assert row["simulated s per round"] == "120"
    assert row["simulated s to 80 %"] == "120"
    assert row["kJ"] == "1.00"
    assert row["kJ to 80 %"] == "0.500"
    assert row["MB to 80 %"] == "3.00"
    assert row["late"] == "2"
    assert row["s per round"] == "2.75"
    assert {"out of memory", "dropped"}.isdisjoint(heads)
    assert "the wall time of the run" in tables.explanation(summary)


def test_little_energy_is_shown_in_joules(tmp_path: Path) -> None:
    summary = device_summary(tmp_path / "run")
    for row in summary["strategies"].values():
        row["simulated"]["joules"] = 2.5
    assert {"J", "J to 80 %"} <= set(tables.headings(summary))
    assert tables.cells(summary)[0][tables.headings(summary).index("J")] == "2.50"
    assert float(next(csv.DictReader(io.StringIO(tables.csv_text(summary))))["joules"]) == 2.5


def test_a_run_without_devices_has_no_word_about_them(summary: dict[str, Any]) -> None:
    assert tables.explanation(summary) == tables.EXPLANATION
    assert not [head for head in tables.headings(summary) if "simulated" in head or "J" in head]


def test_csv_names_the_accuracy_that_costs_are_given_to(tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(device_summary(tmp_path / "run")))))
    assert [row["target"] for row in rows] == ["0.8", "0.8"]
    assert [float(row["simulated_seconds_to_target"]) for row in rows] == [120.0, 120.0]
    assert [row["out_of_memory"] for row in rows] == ["0", "0"]


def test_terminal_table_of_a_run_on_devices_fits_80_columns(tmp_path: Path) -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(tables.rich_table(device_summary(tmp_path / "run", "late")))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= 80
    for part in ("geometric-median", "simulated", "late", "to 80", "kJ"):
        assert part in text
