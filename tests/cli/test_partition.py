from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedplat.cli import main
from fedplat.cli.partition import count_table


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_partition_prints_counts_with_totals_and_draws_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", "quickstart", "--set", "partition.clients=5", "--out", "a/split.png"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.split() and line.split()[0] in ("0", "1", "2", "3", "4")]
    numbers = np.array([[int(cell.replace("·", "0")) for cell in row[1:]] for row in rows])
    total = np.array(next(line for line in lines if line.split()[:1] == ["total"]).split()[1:], int)
    assert numbers.shape == (5, 11)
    assert (numbers.sum(axis=0) == total).all()
    assert (numbers[:, :-1].sum(axis=1) == numbers[:, -1]).all()
    assert total[-1] == 1438
    assert lines[-1] == "picture: a/split.png"
    assert Path("a/split.png").stat().st_size > 0


@pytest.mark.usefixtures("undrawn")
def test_partition_depends_on_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for seed in ("1", "1", "2"):
        assert main(["partition", "quickstart", "--seed", seed]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != tables[2]
    assert len(list(Path("runs").glob("partition-quickstart-*.png"))) == 2


def test_a_partition_that_cannot_be_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["partition", "quickstart", "--set", "partition.clients=1000"]) == 2
    assert "what would fit" in capsys.readouterr().err
    assert main(["partition", "quickstart", "--out", "split.pdf"]) == 2
    assert "ends in .png" in capsys.readouterr().err


def test_very_many_classes_are_summed_up() -> None:
    counts = np.zeros((2, 100), np.int64)
    counts[0, 7] = 3
    console = Console(width=120, record=True, file=open("out.txt", "w"))  # noqa: SIM115
    console.print(count_table(tuple(f"c{i}" for i in range(100)), counts, ["Ann", "Bob"]))
    text = console.export_text()
    assert "c7 (3)" in text
    assert "Bob" in text
    assert "none" in text
