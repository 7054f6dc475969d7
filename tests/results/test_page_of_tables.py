import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fedplat.cli import main
from fedplat.errors import UserError
from fedplat.results.page import is_table, table_data

from . import make_run
from .test_page import HOSTILE, traces_of


def table_folder(path: Path) -> Path:
    """Write the folder of a table of one row, two columns and two blocks, of which one cell was run."""
    run = make_run(path / "cells" / "a-1", {"mean": [0.1, 0.5]}, seed=1)
    again = make_run(path / "cells" / "b-1", {"mean": [0.1, 0.7]}, seed=2)

    def cell(block: str, column: str, accuracies: list[float]) -> dict[str, Any]:
        runs = [
            {
                "seed": seed, "state": "done", "folder": f"cells/{folder.path.name}", "rounds": 1,
                "values": {"accuracy": a}, "made_with": {"flwr": "1.42.0"},
                "command": f"fedplat run tiny --seed {seed}",
            }
            for seed, a, folder in zip((1, 2), accuracies, (run, again), strict=False)
        ]  # fmt: skip
        return {
            "position": {"data": block, "method": "mean", "attack": column},
            "state": "done" if runs else "missing",
            "mean": {"accuracy": sum(accuracies) / 2 if runs else None},
            "std": {"accuracy": 0.1414 if runs else None},
            "published": [
                {"metric": "accuracy", "paper": "A", "table": "1", "value": 61.5, "deviation": -1.5}
            ]
            if runs
            else [],
            "runs": runs,
        }

    axes = {"data": ["x", "y"], "method": ["mean"], "attack": ["none", "flip"]}
    values = {
        "table": "tiny", "title": HOSTILE, "command": "fedplat table tiny", "fedplat": "0.1.0",
        "smaller": ["1 round"],
        "axes": [
            {"name": name, "values": [{"name": v, "label": v.upper()} for v in known]}
            for name, known in axes.items()
        ],
        "metrics": {"accuracy": {"unit": "%", "scale": 100, "better": "higher"}},
        "cells": [
            cell(block, column, [0.5, 0.7] if (block, column) == ("x", "flip") else [])
            for block in "xy" for column in ("none", "flip")
        ],
        "published": [{"paper": "A", "table": "Table 1", "note": ""}],
        "claims": [],
    }  # fmt: skip
    (path / "table.json").write_text(json.dumps(values))
    return path


def test_a_table_shows_blocks_curves_and_published_figures(tmp_path: Path) -> None:
    data = table_data(table_folder(tmp_path))
    assert [table["title"] for table in data["tables"]] == ["accuracy, % – X", "accuracy, % – Y"]
    missing, done = data["tables"][0]["rows"][0]["cells"]
    assert missing == {"t": "missing", "v": None}
    assert done["t"] == "60.00 ± 14.14"
    assert done["beside"] == ["published 61.50, −1.50"]
    assert data["choices"] == [{"id": "block", "label": "block", "options": ["all", "X", "Y"]}]
    assert data["sections"][0]["select"]["options"] == ["X, FLIP"]
    low, high, mean = traces_of(data, "accuracy")
    assert (low["y"], high["y"], mean["y"]) == ([10, 50], [10, 70], [10, 60])
    assert data["commands"] == ["fedplat table tiny"]


def test_the_command_writes_the_page_of_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table_folder(tmp_path)
    assert is_table(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    assert "published 61.50, −1.50" in text
    assert "<b>" not in text.partition('<script type="application/json"')[0].replace("<body>", "")
    shutil.rmtree(tmp_path / "cells")
    assert main(["report", str(tmp_path), "--clean", str(tmp_path)]) == 2


def test_a_table_that_was_not_written_yet_says_how(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    with pytest.raises(UserError, match="--no-run"):
        table_data(tmp_path)
