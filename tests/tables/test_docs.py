"""What docs/tables.md shows can be typed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fedplat.cli import main
from fedplat.tables import heat_map
from fedplat.tables.cells import Options, plan
from fedplat.tables.metrics import METRICS
from fedplat.tables.spec import parse_table, read_table, table_names

TEXT = (Path(__file__).parents[2] / "docs" / "tables.md").read_text()


TABLES = re.findall(r"^\| `([a-z][\w-]*)` \|", TEXT, re.MULTILINE)
"""Those whose numbers of runs are told."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}[^\n]*\n(.*?)```", TEXT, re.DOTALL)


def test_the_table_file_is_one() -> None:
    table = parse_table(blocks("toml")[0].encode(), "mine.toml")
    # One cell in each of two blocks is skipped.
    whole = plan("mine", table, Options())
    assert len(whole.cells) == (3 * 3 - 1) * 2 * 3
    assert len(plan("mine", table, Options(quick=True)).cells) == (2 * 3 - 1) * 2


def test_the_python_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        exec(block, {})


@pytest.mark.parametrize(
    "line", [line for block in blocks("bash") for line in block.splitlines() if not line.startswith("#")]
)
def test_the_commands_are_right(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(heat_map, "draw_heat_map", lambda plan, entries, path: path.write_bytes(b"a picture"))
    Path("mine.toml").write_text(blocks("toml")[0])
    words = shlex.split(line, comments=True)[1:]
    if "--check" in words:
        assert main(words) == 2  # there is nothing to check yet
    else:
        assert main([*words, "--no-run", "--quiet"]) == 0


def test_all_metrics_and_tables_are_told_of() -> None:
    missing = [name for name in (*METRICS, *table_names()) if f"`{name}`" not in TEXT]
    assert not missing


@pytest.mark.parametrize("name", TABLES)
def test_the_numbers_of_runs_are_right(name: str) -> None:
    _, table = read_table(name)
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |"))
    told = [int(cell.replace(",", "")) for cell in row.split("|")[-3:-1]]

    def positions(whole: bool) -> int:
        count = 1
        kept = table if whole or table.quick is None else table.keep(table.quick.keep)
        for axis in kept.axes:
            count *= len(axis.values)
        return count

    # Rules that are told nothing of attackers have one run without an attack for all shares of them.
    shared = 16 * 3 if name == "defences" else 0
    assert told == [positions(True) - shared, positions(False)]
