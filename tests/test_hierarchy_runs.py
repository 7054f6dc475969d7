"""Runs with edge servers, from the scenario to the files on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedplat import engines, experiment
from fedplat.config import load
from fedplat.errors import UserError
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display
from fedplat.results.report import write_report

from .runs import Runs, without_times

SCENARIO: dict[str, Any] = {
    "name": "edges",
    "rounds": 2,
    "data": {"name": "digits"},
    "partition": {"name": "shards", "clients": 8},
    "model": {"name": "softmax"},
    "training": {"batch_size": 32, "lr": 0.1, "momentum": 0.5, "keep_optimizer": True},
}
EDGES: dict[str, Any] = {"name": "edges", "edges": 2, "edge_rounds": 2}
WORLD: dict[str, Any] = {
    "world": {"name": "wireless", "edges": 3, "history": 20},
    "availability": {"name": "bernoulli"},
    "topology": {"name": "edges", "edge_rounds": 2, "association": "plan-ab", "least": 1, "most": 4},
}


run = Runs(SCENARIO, group_size=1)


def model(folder: RunFolder, name: str) -> bytes:
    return (folder.log(name).path / "model.pt").read_bytes()


def assert_same(one: RunFolder, other: RunFolder, name: str = "mean") -> None:
    assert without_times(one.rounds(name)) == without_times(other.rounds(name))
    assert list(one.clients(name)) == list(other.clients(name))
    assert list(one.edges(name)) == list(other.edges(name))
    assert model(one, name) == model(other, name)


def rows_of(folder: RunFolder, number: int, name: str = "mean") -> list[dict[str, Any]]:
    return [row for row in folder.clients(name) if row["round"] == number]


def test_one_round_of_one_edge_is_a_flat_run_to_the_bit(tmp_path: Path) -> None:
    tables = {
        "flat": {"name": "mean", "topology": {"name": "flat"}},
        "one-edge": {"name": "mean", "topology": {"edges": 1, "edge_rounds": 1}},
        "two-edges": {"name": "mean", "topology": {"edge_rounds": 1}},
        "more-rounds": {"name": "mean"},
    }
    folder = run(
        tmp_path, strategies=list(tables), strategy=tables, topology=EDGES,
        selection={"name": "fraction", "fraction": 0.5},
    )  # fmt: skip
    assert model(folder, "flat") == model(folder, "one-edge")
    flat, one = list(folder.clients("flat")), list(folder.clients("one-edge"))
    assert flat == [{key: value for key, value in row.items() if key != "edge"} for row in one]
    assert not list(folder.edges("flat"))
    assert "edges" not in folder.rounds("flat")[-1]
    assert len({model(folder, name) for name in tables}) == 3


def test_weights_sum_to_one_and_edges_and_clients_are_told_apart(tmp_path: Path) -> None:
    folder = run(tmp_path, topology=EDGES)
    for number in (1, 2):
        clients, edges = rows_of(folder, number), [e for e in folder.edges("mean") if e["round"] == number]
        assert [row["client"] for row in clients] == list(range(8))
        assert [row["edge"] for row in clients] == [0, 1] * 4
        assert sum(row["weight"] for row in clients) == pytest.approx(1)
        assert sum(edge["weight"] for edge in edges) == pytest.approx(1)
        for edge in edges:
            members = [row for row in clients if row["edge"] == edge["edge"]]
            assert edge["samples"] == sum(row["samples"] for row in members)
            assert edge["weight"] == pytest.approx(sum(row["weight"] for row in members))
            assert edge["delivered"] == edge["clients"] == 4
    last = folder.rounds("mean")[-1]
    assert last["edges"]["used"] == 8
    assert last["edges"]["signals"] == 8
    # Of two rounds at the edges, clients pay each, and the links to the cloud only the one model of an edge.
    assert last["bytes_up"] == 8 * last["edges"]["bytes_up"]
    assert last["seconds"]["decide"] >= 0


class Stop(Display):
    def round(self, strategy: str, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("undrawn")
def test_a_world_decides_costs_and_who_is_there_and_a_stopped_run_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    changes = {**WORLD, "rounds": 4}
    whole = run(tmp_path / "whole", **changes)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", Stop(), **changes)
    assert_same(whole, run(tmp_path / "stopped", resume=True, **changes))
    for record in whole.rounds("mean")[1:]:
        edges = [edge for edge in whole.edges("mean") if edge["round"] == record["round"]]
        simulated = record["simulated"]
        assert simulated["seconds"] == pytest.approx(max(edge.get("seconds", 0.0) for edge in edges))
        assert simulated["joules"] == pytest.approx(sum(edge.get("joules", 0.0) for edge in edges))
        assert simulated["joules_cloud"] > 0
        assert record["edges"]["cost"] > 0
        assert simulated["asked"] == record["edges"]["used"]
    write_report(whole)
    text = (whole.path / "report.md").read_text()
    assert "## Edges" in text


ATTACKS: dict[str, dict[str, Any]] = {
    "clients": {"name": "sign-flip", "clients": [0, 3]},
    "colluders": {"name": "alie", "clients": [0, 2], "z": 5.0},
    "an edge": {"name": "sign-flip", "edges": [1]},
    "edges that collude": {"name": "ipm", "edges": [1]},
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_clients_and_edges_attack(attack: dict[str, Any], tmp_path: Path) -> None:
    honest = run(tmp_path / "honest", topology={**EDGES, "edge_rounds": 1}, rounds=1)
    attacked = run(tmp_path / "attacked", topology={**EDGES, "edge_rounds": 1}, rounds=1, attacks=[attack])
    assert model(honest, "mean") != model(attacked, "mean")
    guilty = [row["edge"] for row in attacked.edges("mean") if row["truth"] != "honest"]
    assert guilty == list(attack.get("edges", []))
    moved = [
        edge["edge"]
        for edge, other in zip(attacked.edges("mean"), honest.edges("mean"), strict=True)
        if edge["update_norm"] != pytest.approx(other["update_norm"], rel=1e-6)
    ]
    assert attack["name"] == "sign-flip" or moved
    assert [row["client"] for row in attacked.clients("mean") if row["truth"] != "honest"] == list(
        attack.get("clients", [])
    )


def test_a_byzantine_edge_is_outvoted_by_a_rule_at_the_cloud_and_clients_by_one_at_the_edges(
    tmp_path: Path,
) -> None:
    changes: dict[str, Any] = {
        "topology": {"name": "edges", "edges": 4, "edge": {"name": "trimmed-mean", "beta": 0.3}},
        "partition": {"name": "iid", "clients": 12},
        "attacks": [{"name": "sign-flip", "factor": -20.0, "edges": [2]}],
        "strategies": ["mean", "median"],
    }
    folder = run(tmp_path, **changes)
    last = {name: folder.rounds(name)[-1]["accuracy"] for name in ("mean", "median")}
    assert last["median"] > last["mean"] + 0.2


def test_every_protection_works_at_the_edges(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "topology": {**EDGES, "association": {"name": "fixed", "place": "blocks"}},
        "aggregation": {"secure_groups": 2},
        "security": {"signed_updates": True},
        "privacy": {"mode": "local", "clip": 0.5, "noise_multiplier": 0.5},
        "training": {"lr": 0.1},
    }
    folder = run(tmp_path / "a", **changes)
    rows = rows_of(folder, 2)
    assert [row["edge"] for row in rows] == [0] * 4 + [1] * 4
    assert {row["status"] for row in rows} == {"accepted"}
    assert sum(row["weight"] for row in rows) == pytest.approx(1)
    flat = run(tmp_path / "b", **{**changes, "topology": {}, "rounds": 4})
    spent = [folder.rounds("mean")[-1], flat.rounds("mean")[-1]]
    # Two rounds of two edge rounds release as often as four flat rounds.
    assert spent[0]["diagnostics"]["epsilon"] == pytest.approx(spent[1]["diagnostics"]["epsilon"])


def test_clients_that_move_between_edges_spend_one_account(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "privacy": {"mode": "local", "clip": 0.5, "noise_multiplier": 0.5},
        "rounds": 3,
        "topology": {**EDGES, "edge_rounds": 1, "association": "random-most", "most": 4},
    }
    folder = run(tmp_path / "a", **changes)
    flat = run(tmp_path / "b", **{**changes, "topology": {}})
    moved = {(row["client"], row["edge"]) for row in folder.clients("mean")}
    assert len(moved) > 8
    pairs = zip(folder.rounds("mean")[1:], flat.rounds("mean")[1:], strict=True)
    assert all(a["diagnostics"]["epsilon"] == b["diagnostics"]["epsilon"] for a, b in pairs)


def test_sub_models_compression_and_devices_work_at_the_edges(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "model": {"name": "mlp", "hidden": [32, 16]},
        "submodels": {"name": "heterofl", "widths": [1.0, 0.5]},
        "compression": {"name": "top-k", "fraction": 0.2},
        "devices": {"name": "uniform", "memory_mb": [0.02, 0.06]},
        "emulation": {"drop_probability": 0.2},
        "topology": {**EDGES, "cloud_seconds": 3.0, "cloud_joules": 2.0},
    }
    folder = run(tmp_path / "a", **changes)
    kinds = {row.get("submodel", "full") for row in folder.clients("mean")}
    assert len(kinds) > 1
    last = folder.rounds("mean")[-1]
    assert set(last["submodels"]) == {"width-0.5"}
    assert last["simulated"]["seconds"] > 3
    assert last["simulated"]["joules_cloud"] == 4
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", Stop(), **{**changes, "rounds": 3})
    assert_same(
        run(tmp_path / "c", **{**changes, "rounds": 3}),
        run(tmp_path / "b", resume=True, **{**changes, "rounds": 3}),
    )


def test_an_edge_that_nobody_is_at_sits_out_and_all_away_leave_the_model(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "partition": {"name": "iid", "clients": 3},
        "topology": {"name": "edges", "edges": 4},
    }
    folder = run(tmp_path / "a", **changes)
    rows = [edge for edge in folder.edges("mean") if edge["round"] == 2]
    assert [edge["status"] for edge in rows] == ["accepted"] * 3 + ["failed"]
    assert rows[3]["reason"] == "the edge sits out: no client is at this edge"
    assert rows[3]["weight"] == 0
    away = {"availability": {"name": "bernoulli", "p": [0.0, 0.0]}}
    folder = run(tmp_path / "b", **changes, **away)
    losses = [record["loss"] for record in folder.rounds("mean")]
    assert losses[0] == losses[1] == losses[2]
    assert not list(folder.clients("mean"))
    assert [r["simulated"]["joules"] for r in folder.rounds("mean")] == [0, 0, 0]


def test_flat_runs_in_a_world_and_one_edge_are_the_same_and_slower_than_edges(tmp_path: Path) -> None:
    tables = {
        "flat": {"name": "mean", "topology": {"name": "flat"}},
        "one-edge": {"name": "mean", "topology": {"name": "edges", "edges": 1}},
        "edges": {"name": "mean", "topology": {"name": "edges", "association": "all-online"}},
    }
    folder = run(
        tmp_path, strategies=list(tables), strategy=tables, model={"name": "mlp"},
        world={**WORLD["world"], "fading": False}, availability=WORLD["availability"],
    )  # fmt: skip
    took = {name: folder.rounds(name)[-1]["simulated"] for name in tables}
    assert took["flat"]["seconds"] == pytest.approx(took["one-edge"]["seconds"])
    assert took["flat"]["joules"] == pytest.approx(took["one-edge"]["joules"])
    up = {n: [row["device"]["seconds_up"] for row in folder.clients(n)] for n in ("flat", "edges")}
    assert up["flat"] == pytest.approx([10 * seconds for seconds in up["edges"]], rel=1e-4)
    assert model(folder, "flat") == model(folder, "one-edge")


def test_names_settings_and_what_does_not_go_together_are_told(tmp_path: Path) -> None:
    def told(match: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=match):
            experiment.build_situation(load({**SCENARIO, **changes}, "edges.toml"), "cpu")

    told("did you mean 'edges'", topology={"name": "edge"})
    told("did you mean 'fixed'", topology={**EDGES, "association": "fixd"})
    told("did you mean 'median'", topology={**EDGES, "edge": "medan"})
    told("did you mean 'wireless'", world={"name": "wirless"})
    told("topology.edge.beta", topology={**EDGES, "edge": {"name": "trimmed-mean", "beta": 0.7}})
    told("topology.association.place", topology={**EDGES, "association": {"name": "fixed", "place": "no"}})
    told("give the number of edge servers", topology={"name": "edges"})
    told("below least", topology={**EDGES, "least": 5, "most": 3})
    told("'central' noise", topology=EDGES, privacy={"mode": "central"})
    told("give one of", topology=EDGES, attacks=[{"name": "sign-flip", "edges": [0], "count": 1}])
    for attack, match in (
        ({"name": "label-flip", "source": [1], "target": 7, "edges": [0]}, "an edge has none"),
        ({"name": "sign-flip", "edges": [5]}, "edge 5 of 0 to 1"),
    ):
        with pytest.raises(UserError, match=match):
            run(tmp_path / match[:3], topology=EDGES, attacks=[attack])
    with pytest.raises(UserError, match="no edges to attack"):
        run(tmp_path / "none", attacks=[{"name": "sign-flip", "edges": [0]}])
    with pytest.raises(UserError, match="Krum: 2f"):
        run(tmp_path / "krum", topology={**EDGES, "most": 4, "edge": {"name": "krum", "f": 2}})


def test_scenarios_without_edges_are_what_they_were_and_those_with_them_can_be_read_again() -> None:
    plain = load(SCENARIO, "x.toml")
    assert not {"topology", "world"} & plain.to_dict().keys()
    for changes in (
        {"topology": EDGES},
        WORLD,
        {
            "topology": {**EDGES, "edge": {"name": "median", "before": [{"name": "nnm", "f": 1}]}},
            "strategies": ["a", "b"],
            "strategy": {
                "a": {"name": "mean", "topology": {"name": "flat"}},
                "b": {"name": "mean", "topology": {"edge_rounds": 5}},
            },
        },
    ):
        once = load({**SCENARIO, **changes}, "x.toml")
        again = load(json.loads(json.dumps(once.to_dict())), "x.toml")
        assert once.digest() == again.digest() != plain.digest()
    assert again.topology_of("b").settings()["edges"] == 2
    assert again.topology_of("b").settings()["edge_rounds"] == 5


@pytest.mark.slow
def test_flowers_simulation_ends_with_the_same_model(tmp_path: Path) -> None:
    local = run(tmp_path / "local", **WORLD)
    with engines.of("flower-simulation", device="cpu") as engine:
        assert_same(local, run(tmp_path / "simulated", engine=engine, **WORLD))
