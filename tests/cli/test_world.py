from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from fedplat import experiment
from fedplat.cli.common import load_config
from fedplat.cli.world import world as command
from fedplat.emulation.world_settings import world_of
from fedplat.errors import UserError

SCENARIO = """rounds = 6
data.name = "digits"
model.name = "mlp"
partition = {name = "iid", clients = 12}
availability = {name = "bernoulli", p = [0.4, 0.8]}

[world]
name = "wireless"
edges = 4
history = 30
"""


ASSOCIATED = {"world.name": "hierfavg", "topology.name": "edges", "topology.association.name": "fixed"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(SCENARIO)


def run(*arguments: str) -> str:
    """Return what the command prints; a user's mistake is raised as the command line would see it."""
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None:
        raise result.exception
    return result.output


def rows_of(told: str) -> list[list[str]]:
    """Return the cells of the table, edge by edge."""
    found = [line.replace(", ", ",").split() for line in told.splitlines()]
    return [cells for cells in found if len(cells) > 5 and cells[0].isdigit()]


def test_a_world_is_told_and_drawn_without_its_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_data(_: object) -> None:
        raise AssertionError("the data is not needed to say where clients are")

    monkeypatch.setattr(experiment, "load_data", no_data)
    told = run("mine.toml", "--round", "3", "--out", "a/map.png")
    assert told.startswith("mine: world wireless, nearest edges, seed 1, round 3; 12 clients and 4 edges, ")
    assert told.splitlines()[-1] == "picture: a/map.png"
    assert Path("a/map.png").read_bytes().startswith(b"\x89PNG")
    world = world_of(load_config("mine.toml", None, None), 12)
    assert world is not None
    there = world.available[:, 2]
    rows = rows_of(told)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    for edge, row in enumerate(rows):
        reached = world.covered[:, edge]
        assert row[2] == str(reached.sum())
        assert row[3] == f"{world.available[reached].mean():.0%}"
        assert row[4] == f"{world.up_bps()[reached, edge].mean() / 1e6:.3g}"
        assert row[5] == str((there & (world.best_edge == edge)).sum())
    assert f"{there.sum()} clients in round 3" in told


@pytest.mark.usefixtures("undrawn")
def test_seed_settings_and_round_are_heeded() -> None:
    tables = [run("mine.toml", *more) for more in ([], [], ["--seed", "2"], ["--round", "2"])]
    assert tables[0] == tables[1]
    assert len(set(tables)) == 3
    assert len(list(Path("runs").glob("world-mine-*.png"))) == 3
    told = run("mine.toml", "--set", "world.edges=2", "--set", "world.history=0")
    assert len(rows_of(told)) == 2
    assert "before it" not in told


@pytest.mark.usefixtures("undrawn")
def test_the_slow_link_of_hierfavg_is_told() -> None:
    told = run("quickstart", "--set", "world.name=hierfavg", "--set", "hardware.name=hierfavg")
    rows = rows_of(told)
    assert len(rows) == 5
    assert {(row[2], row[4], row[-2]) for row in rows} == {("20", "5.67", "0.567")}


@pytest.mark.usefixtures("undrawn")
def test_clients_are_at_the_edges_that_the_association_sends_them_to() -> None:
    more = [f"{key}={value}" for key, value in ASSOCIATED.items()]
    told = run("mine.toml", "--round", "2", *(word for pair in more for word in ("--set", pair)))
    assert told.startswith("mine: world hierfavg, fixed, seed 1, round 2; ")
    world = world_of(load_config("mine.toml", more, None), 12)
    assert world is not None
    there = world.available[:, 1]
    dealt_out = np.bincount(np.arange(12)[there] % world.edges, minlength=world.edges)
    assert [int(row[5]) for row in rows_of(told)] == dealt_out.tolist()


@pytest.mark.usefixtures("undrawn")
def test_a_strategy_of_several_is_shown_by_its_name() -> None:
    Path("mine.toml").write_text(
        SCENARIO.replace("rounds = 6", 'rounds = 6\nstrategies = ["mean", "median"]')
        + '[strategy.median.topology]\nname = "edges"\nassociation = {name = "fixed", place = "blocks"}\n'
    )
    assert "wireless, median, fixed, seed 1" in run("mine.toml")
    assert "wireless, nearest edges, seed 1" in run("mine.toml", "--strategy", "mean")
    with pytest.raises(UserError, match="did you mean 'median'"):
        run("mine.toml", "--strategy", "medain")


@pytest.mark.usefixtures("undrawn")
def test_an_edge_that_nobody_reaches_has_no_numbers() -> None:
    told = run(
        "mine.toml",
        "--set",
        "partition.clients=1",
        "--set",
        "world.range_m=1",
        "--set",
        "world.edges=9",
    )
    empty = [row for row in rows_of(told) if row[2] == "0"]
    assert len(empty) == 8
    assert all(row[3:5] == ["–", "–"] for row in empty)


def test_presence_that_depends_on_labels_looks_at_the_data() -> None:
    config = load_config("mine.toml", ["availability.name=label-dependent", "availability.beta=1.0"], None)
    counts = np.eye(10, dtype=np.int64)[np.zeros(12, np.int64)]
    world = world_of(config, 12, counts)
    assert world is not None
    # Everybody holds class 0 alone, whose chance is 0.
    assert not world.presence.any()


def test_mistakes_are_told() -> None:
    for arguments, told in (
        (["quickstart"], "add a table [world]"),
        (["mine.toml", "--round", "7"], "mine has 6 rounds"),
        (["mine.toml", "--out", "map.pdf"], "ends in .png"),
        (["mine.toml", "--set", "world.edges=0"], "world.edges"),
        (["mine.toml", "--set", "world.name=wirless"], "did you mean 'wireless'"),
        (["nothing.toml"], "there is no such file"),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            run(*arguments)
    Path("a").write_text("")
    with pytest.raises(UserError, match="cannot write the picture"):
        run("mine.toml", "--out", "a/map.png")
