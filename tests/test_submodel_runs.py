"""Runs with sub-models of different sizes, from the scenario to the files on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedplat import engines, experiment
from fedplat.config import load
from fedplat.errors import UserError
from fedplat.registry import entries
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display

from .runs import Runs, without_times

LEVELS = {"widths": [1.0, 0.5, 0.25]}
SCHEMES: dict[str, dict[str, Any]] = {
    "heterofl": LEVELS,
    "fjord": {**LEVELS, "distillation": 0.5},
    "fedrolex": LEVELS,
    "federated-dropout": LEVELS,
    "smallest": {"width": 0.5},
    "full-only": {},
}
SCENARIO: dict[str, Any] = {
    "name": "parts",
    "rounds": 3,
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 6},
    "model": {"name": "mlp", "hidden": [32, 16]},
    "training": {"batch_size": 32, "lr": 0.1, "momentum": 0.9, "keep_optimizer": True},
}


def of(*names: str, **changes: Any) -> dict[str, Any]:
    """Return the strategies that compare schemes, each by a mean."""
    tables = {n: {"name": "mean", "submodels": {"name": n, **SCHEMES[n]}} for n in names}
    return {"strategies": list(names), "strategy": tables, **changes}


run = Runs(SCENARIO)


def clients(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    return list(folder.clients(name))


def lines(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    return list(folder.rounds(name))


def assert_same(one: RunFolder, other: RunFolder, *names: str) -> None:
    for name in names:
        assert without_times(lines(one, name)) == without_times(lines(other, name))
        assert clients(one, name) == clients(other, name)
        paths = [folder.path / name / "model.pt" for folder in (one, other)]
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_every_scheme_learns_and_tells_who_got_what_and_how_good_each_level_is(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", **of(*SCHEMES))
    for name in SCHEMES:
        first, *_, last = lines(folder, name)
        assert last["accuracy"] > first["accuracy"] + 0.15
        sent = {row.get("submodel", "full").split("@")[0] for row in clients(folder, name)}
        assert all(row["status"] == "accepted" for row in clients(folder, name))
        if name in ("smallest", "full-only"):
            assert sent == ({"width-0.5"} if name == "smallest" else {"full"})
        else:
            assert sent == {"full", "width-0.5", "width-0.25"}
            assert set(last["submodels"]) == {"width-0.5", "width-0.25"}
            assert all(0 <= accuracy <= 1 for accuracy in last["submodels"].values())
    fewer = lines(folder, "smallest")[-1]["bytes_up"] < lines(folder, "heterofl")[-1]["bytes_up"]
    assert fewer < lines(folder, "full-only")[-1]["bytes_up"]


def test_every_scheme_in_the_catalogue_is_tried_somewhere() -> None:
    elsewhere = {"full", "depth", "fedconv", "model-search", "server-alone", "prefix-tuned"}
    assert set(entries("submodels")) - elsewhere >= set(SCHEMES)


def test_a_seed_gives_the_same_parts_and_another_one_others(tmp_path: Path) -> None:
    names = "heterofl", "federated-dropout"
    first = run(tmp_path / "a", **of(*names))
    assert_same(first, run(tmp_path / "b", engine=engines.LocalEngine(2), **of(*names)), *names)
    other = run(tmp_path / "c", seed=2, **of(*names))
    for name in names:
        assert clients(first, name) != clients(other, name)


class Stop(Display):
    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def round(self, strategy: str, record: dict[str, Any]) -> None:
        if record["round"] == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["heterofl", "fjord", "fedrolex", "federated-dropout"])
def test_a_run_that_was_interrupted_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "a", **of(name))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "b", Stop(after=2), **of(name))
    assert_same(undisturbed, run(tmp_path / "b", resume=True, **of(name)), name)


@pytest.mark.parametrize(
    "attack",
    [
        {"name": "sign-flip", "factor": -8.0},
        {"name": "label-flip", "source": [1], "target": 7},
        {"name": "gradient-ascent"},
        {"name": "alie"},
        {"name": "blur"},
    ],
    ids=lambda attack: attack["name"],
)
def test_attacks_work_on_sub_models(attack: dict[str, Any], tmp_path: Path) -> None:
    attacks = [{**attack, "clients": [1, 4]}]
    honest = run(tmp_path / "a", rounds=2, **of("heterofl"))
    attacked = run(tmp_path / "b", rounds=2, **of("heterofl", attacks=attacks))
    changed = {
        row["client"]
        for row, other in zip(clients(attacked, "heterofl"), clients(honest, "heterofl"), strict=True)
        if row["round"] == 1 and row["update_norm"] != pytest.approx(other["update_norm"], rel=1e-6)
    }
    # Who was sent another part than all others has nobody to collude with; and nobody honest is touched.
    assert changed <= {1, 4}
    if attack["name"] != "alie":
        assert changed == {1, 4}
    assert all(row["status"] == "accepted" for row in clients(attacked, "heterofl"))


def test_protection_works_on_parts_or_says_that_it_does_not(tmp_path: Path) -> None:
    security, local = {"signed_updates": True}, {"mode": "local", "clip": 0.5, "noise_multiplier": 0.001}
    folder = run(tmp_path / "a", rounds=2, security=security, privacy=local, **of("heterofl"))
    rows = clients(folder, "heterofl")
    assert all(row["status"] == "accepted" for row in rows)
    assert 0 < max(row["update_norm"] for row in rows) < 0.51
    for table in ({"aggregation": {"secure_groups": 2}}, {"privacy": {"mode": "central"}}):
        with pytest.raises(UserError, match="different parts"):
            run(tmp_path / next(iter(table)), **of("heterofl"), **table)


@pytest.mark.parametrize("name", ["top-k", "qsgd"])
def test_parts_may_be_compressed_on_their_way_back(name: str, tmp_path: Path) -> None:
    submodels = {"name": "heterofl", **LEVELS, "dynamic": True}
    folder = run(tmp_path / "a", submodels=submodels, compression={"name": name})
    assert all(row["status"] == "accepted" for row in clients(folder, "mean"))
    assert lines(folder, "mean")[-1]["bytes_up"] < lines(folder, "mean")[-1]["bytes_down"]


def megabytes(share: float) -> float:
    """Return the memory of a device that a share of the model's units just fits into, in MB."""
    task = experiment.build_task(load(SCENARIO, "parts.toml"), "cpu")
    from fedplat.models.cutting_costs import CutCosts

    costs = CutCosts(task.shapes, task.plan, task.dataset.sample_shape, task.training)
    return (costs.memory(task.plan.prefix(share).sizes) + 1000) / 1e6


def devices(**more: Any) -> dict[str, Any]:
    sizes = {"whole": 1.0, "half": 0.5, "none": 0.02}
    levels = [
        {"name": n, "memory_mb": megabytes(s) if n != "none" else 0.001, "down_mbps": 1.0, "up_mbps": 1.0}
        for n, s in sizes.items()
    ]
    return {"devices": {"name": "classes", "levels": levels}, **more}


def test_devices_get_what_fits_and_whom_nothing_fits_is_named(tmp_path: Path) -> None:
    folder = run(tmp_path / "a", **of("heterofl", "full-only", "fjord"), **devices())
    for name, kinds in (("heterofl", 2), ("full-only", 1), ("fjord", 2)):
        rows = clients(folder, name)
        fits = [row for row in rows if row["status"] == "accepted"]
        assert {row["device"]["outcome"] for row in fits} == {"delivered"}
        assert len({row.get("submodel", "full") for row in fits}) == kinds
        left = [row for row in rows if row["status"] != "accepted"]
        assert all(row["reason"].startswith("nothing fits: training takes") for row in left)
        assert "device" not in left[0]
        assert all(row["device"]["memory_bytes"] <= row["device"]["memory_budget"] for row in fits)
        assert len(fits) == (2 if name == "full-only" else 4) * SCENARIO["rounds"]
        sizes = {row.get("submodel", "full"): row["device"]["bytes_down"] for row in fits}
        assert len(set(sizes.values())) == kinds


def test_a_deadline_makes_parts_smaller_and_then_nobody_is_late(tmp_path: Path) -> None:
    wide = [{"name": "slow", "memory_mb": 1e4, "down_mbps": 0.1, "up_mbps": 0.1}]
    common = {"devices": {"name": "classes", "levels": wide}, "emulation": {"deadline_s": 1.2}}
    folder = run(tmp_path / "a", **of("heterofl", "full-only"), **common)
    rows = clients(folder, "heterofl")
    assert {row["device"]["outcome"] for row in rows} == {"delivered"}
    assert {row["submodel"] for row in rows} <= {"width-0.5", "width-0.25"}
    assert all(row["device"]["seconds"] <= 1.2 for row in rows)
    assert {row["reason"].split(":")[0] for row in clients(folder, "full-only")} == {"nothing fits"}


def test_if_everybody_is_asked_parts_still_fit_and_who_is_away_fails(tmp_path: Path) -> None:
    more = {"availability": {"name": "bernoulli"}, "emulation": {"ask": "all"}}
    folder = run(tmp_path / "a", rounds=4, **of("heterofl"), **devices(**more))
    outcomes = {row["device"]["outcome"] for row in clients(folder, "heterofl") if "device" in row}
    assert outcomes == {"delivered", "away"}


def test_one_scheme_may_be_that_of_all_strategies_and_is_written_down(tmp_path: Path) -> None:
    submodels = {"name": "heterofl", **LEVELS}
    config = load({**SCENARIO, "strategies": ["mean", "median"], "submodels": submodels}, "parts.toml")
    assert config.submodels_of("median").name == "heterofl"
    assert config.to_dict()["submodels"]["widths"] == [1.0, 0.5, 0.25]
    own = {"median": {"submodels": {"name": "full"}}}
    mixed = load({**config.to_dict(), "strategy": own}, "parts.toml")
    assert mixed.submodels_of("median").name == "full"
    assert load(mixed.to_dict(), "again").digest() == mixed.digest() != config.digest()
    plain = load(SCENARIO, "parts.toml")
    assert "submodels" not in plain.to_dict()
    assert plain.digest() == load({**SCENARIO, "submodels": {"name": "full"}}, "parts.toml").digest()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"submodels": {"name": "heterofi"}}, "did you mean 'heterofl'"),
        ({"strategy": {"mean": {"submodels": {"name": "heterofl", "width": [1.0]}}}}, "width"),
        ({"submodels": {"name": "heterofl", "widths": [2.0]}}, "less than or equal to 1|<= 1|at most 1"),
        ({"submodels": {"name": "depth"}}, "no stages"),
        ({"submodels": {"name": "heterofl", "public_samples": 10**6}}, "public_samples"),
        (
            {"strategies": ["flwr.serverapp.strategy:FedAvg"], "submodels": {"name": "heterofl"}},
            "Flower's own",
        ),
    ],
)
def test_mistakes_are_explained(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        run(tmp_path / "a", **changes)


@pytest.mark.slow
def test_depths_of_a_residual_net_and_its_norms(tmp_path: Path) -> None:
    model = {"name": "tests.test_submodel_runs:residual_net"}
    names = {"depth": {"depths": [1.0, 0.3]}, "static": {**LEVELS, "batch_norm": "static"}}
    tables = {
        n: {"name": "mean", "submodels": {"name": "depth" if n == "depth" else "heterofl", **s}}
        for n, s in names.items()
    }
    tables["static"]["submodels"]["public_samples"] = 100
    folder = run(tmp_path / "a", model=model, strategies=list(names), strategy=tables, rounds=8)
    for name in names:
        # A few rounds of BatchNorm are no steady climb, in whole models neither.
        assert max(record["accuracy"] for record in lines(folder, name)) > 0.5
        parts = lines(folder, name)[-1]["submodels"]
        assert parts
        assert max(parts.values()) > 0.3


def residual_net(input_shape: tuple[int, ...], num_classes: int) -> Any:
    from torch import nn

    from .models.cutting_nets import tiny_resnet

    net: Any = tiny_resnet("batch")
    net.fc = nn.Linear(16, num_classes)
    return net


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_flowers_simulation_gives_the_bits_of_the_local_engine(tmp_path: Path) -> None:
    names = "heterofl", "fjord", "federated-dropout"
    here = run(tmp_path / "here", **of(*names))
    there = run(tmp_path / "there", engine=engines.SimulationEngine("cpu"), **of(*names))
    assert_same(here, there, *names)
