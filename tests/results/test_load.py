"""Runs as pandas tables say what the records on disk say."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedplat.results
from fedplat.cli import main
from fedplat.errors import UserError
from fedplat.results.folder import RunFolder
from fedplat.results.frames import Results, load
from fedplat.results.summary import summarise

from . import client_record, make_run

pandas = pytest.importorskip("pandas")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A real run of two rounds."""
    path = tmp_path_factory.mktemp("run") / "quick"
    command = [
        "run",
        "quickstart",
        "--set",
        "rounds=2",
        "--strategy",
        "mean,median",
        "--device",
        "cpu",
        "--quiet",
    ]
    assert main([*command, "--seed", "5", "--out", str(path)]) == 0
    return RunFolder.existing(path)


def lookup(record: Any, name: str) -> Any:
    """Return what a dotted name stands for in a nested record, found without the code under test."""
    if not name:
        return record
    if isinstance(record, list):
        head, _, rest = name.partition(".")
        return lookup(record[int(head)], rest)
    for key in sorted(record, key=len, reverse=True):
        if name == key or name.startswith(f"{key}."):
            return lookup(record[key], name[len(key) + 1 :])
    return None


def assert_same(frame: Any, rows: list[dict[str, Any]], least_columns: int) -> None:
    assert len(frame) == len(rows)
    names = [name for name in frame.columns if name not in ("run", "seed", "strategy")]
    assert len(names) >= least_columns
    for found, row in zip(frame.to_dict("records"), rows, strict=True):
        for name in names:
            expected = lookup(row, name)
            if expected is None:
                assert pandas.isna(found[name]), name
            else:
                assert found[name] == expected, name


def test_rounds_and_clients_are_those_of_the_records(real: RunFolder) -> None:
    results = fedplat.results.load(real.path)
    assert isinstance(results, Results)
    for name in ("mean", "median"):
        of = results.rounds[results.rounds["strategy"] == name]
        assert_same(of, real.rounds(name), 25)
        assert_same(results.clients[results.clients["strategy"] == name], list(real.clients(name)), 10)
    assert len(results.edges) == 0
    assert {"strategy", "round", "edge"} <= set(results.edges.columns)
    assert set(results.rounds["seed"]) == {5}
    assert list(results.rounds.columns[:4]) == ["run", "seed", "strategy", "round"]


def test_columns_have_the_types_that_suit_them(real: RunFolder) -> None:
    results = load(real.path)
    kinds = results.clients.dtypes.astype(str)
    for name in ("run", "strategy", "verdict", "status", "truth", "attack", "reason"):
        assert kinds[name] == "category"
    assert kinds["client"] == kinds["round"] == kinds["seed"] == "int64"
    assert kinds["weight"] == "float64"
    assert str(results.rounds["accuracy"].dtype) == "float64"
    assert str(results.rounds["detection.every_attacker_out"].dtype) == "boolean"
    assert str(results.summary["finished"].dtype) == "bool"


def test_configuration_environment_and_summary_are_there(real: RunFolder) -> None:
    results = load(str(real.path))
    config = results.config.iloc[0]
    assert config["training.lr"] == real.config.training.lr
    assert config["attacks.0.name"] == "sign-flip"
    assert results.environment.iloc[0]["samples_per_client.0"] == real.environment["samples_per_client"][0]
    summary = results.summary.set_index("strategy")
    for name, row in summarise(real)["strategies"].items():
        assert summary.loc[name, "accuracy"] == row["accuracy"]
        assert summary.loc[name, "seconds.per_round.train"] == row["seconds"]["per_round"]["train"]


def test_a_run_that_is_not_finished_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    rows = [client_record(1, client) for client in range(4)]
    folder = make_run(
        tmp_path / "run", {"mean": [0.1, 0.5], "median": []}, clients={"mean": rows}, finished=False
    )
    with (folder.log("mean").path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 2, "acc')
    results = load(folder.path)
    assert list(results.rounds["round"]) == [0, 1]
    assert list(results.rounds["accuracy"]) == [0.1, 0.5]
    assert not results.summary["finished"].any()
    assert len(results.clients) == 4


def test_a_figure_that_was_not_finite_or_not_measured_is_nan(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": [None, 0.5]}, loss=math.nan)
    rounds = load(folder.path).rounds
    assert list(rounds["accuracy"].isna()) == [True, False]
    assert rounds["loss"].isna().all()
    assert str(rounds["loss"].dtype) == "float64"


def test_folders_of_runs_and_several_runs_are_told_apart(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_run(tmp_path / "runs" / f"seed{seed}", {"mean": [0.1 * seed]}, seed=seed)
    make_run(tmp_path / "other" / "seed1", {"mean": [0.9]}, seed=1)
    one = load(tmp_path / "runs")
    assert list(one.rounds["run"]) == ["seed1", "seed2"]
    assert list(one.rounds["seed"]) == [1, 2]
    both = load(tmp_path / "runs", tmp_path / "other" / "seed1", tmp_path / "runs" / "seed2")
    assert list(both.rounds["run"]) == ["runs/seed1", "runs/seed2", "other/seed1"]
    assert list(both.rounds["accuracy"]) == [0.1, 0.2, 0.9]


def table_of(path: Path) -> Path:
    """Write a table of two rows and two columns in which both columns of the second row are one run."""
    for name, seed, accuracy in (("a", 1, 0.1), ("a", 2, 0.2), ("b", 1, 0.3), ("c", 1, 0.4)):
        make_run(path / "cells" / f"{name}{seed}", {"mean": [accuracy]}, seed=seed)
    cells = []
    for row, column, folders in (
        ("mean", "none", ["a1", "a2"]), ("mean", "flip", ["b1", "gone"]),
        ("krum", "none", ["c1"]), ("krum", "flip", ["c1"]),
    ):  # fmt: skip
        position = {"data": "digits", "method": row, "attack": column}
        runs = [
            {"seed": int(name[1]) if name != "gone" else 2, "folder": f"cells/{name}"} for name in folders
        ]
        cells.append({"position": position, "runs": runs})
    axes = [{"name": name} for name in ("data", "method", "attack")]
    (path / "table.json").write_text(json.dumps({"axes": axes, "cells": cells}))
    return path


def test_a_table_has_its_rows_columns_and_blocks(tmp_path: Path) -> None:
    rounds = load(table_of(tmp_path)).rounds
    assert list(rounds.columns[:7]) == ["run", "row", "column", "block.data", "seed", "strategy", "round"]
    found = rounds.groupby(["block.data", "row", "column"], observed=True)["accuracy"].mean()
    assert found.to_dict() == {
        ("digits", "krum", "flip"): 0.4, ("digits", "krum", "none"): 0.4,
        ("digits", "mean", "flip"): 0.3, ("digits", "mean", "none"): pytest.approx(0.15),
    }  # fmt: skip


def test_a_table_that_was_not_written_yet_has_its_runs(tmp_path: Path) -> None:
    (table_of(tmp_path) / "table.json").unlink()
    results = load(tmp_path)
    assert list(results.rounds["run"]) == ["a1", "a2", "b1", "c1"]
    assert "row" not in results.rounds.columns


def test_no_run_is_a_mistake_that_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run here"):
        load(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="name a run folder"):
        load()
    (tmp_path / "table.json").write_text('{"axes": [{"name": "a"}, {"name": "b"}], "cells": []}')
    with pytest.raises(UserError, match="none of this table's cells has run yet"):
        load(tmp_path)


def test_a_broken_record_is_told_with_its_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.1]})
    (folder.log("mean").path / "rounds.jsonl").write_text("{}}\n")
    with pytest.raises(UserError, match=r"rounds\.jsonl: a line cannot be read"):
        load(folder.path)


def test_without_pandas_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"pip install 'fedplat\[pandas\]'"):
        fedplat.results.load(tmp_path)


def test_the_package_and_the_command_line_import_nothing_slow() -> None:
    slow = ("torch", "pandas", "plotly", "matplotlib", "tensorboard", "mlflow", "http.server")
    code = (
        "import sys, fedplat, fedplat.results, fedplat.cli; fedplat.results.load; "
        f"print([name for name in {slow} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
