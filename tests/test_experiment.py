from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedplat import experiment, registry
from fedplat.arrays import FlatArrays
from fedplat.cli import main
from fedplat.config import load
from fedplat.errors import UserError
from fedplat.models.flat import FlatModel

SCENARIO: dict[str, Any] = {
    "name": "tiny",
    "rounds": 4,
    "strategies": ["mean", "median"],
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 6, "alpha": 1.0},
    "model": {"name": "softmax"},
    "training": {"batch_size": 32, "lr": 0.1, "momentum": 0.5, "keep_optimizer": True},
    "selection": {"name": "fraction", "fraction": 0.7},
    "attacks": [{"name": "sign-flip", "clients": [2]}],
}


def write(path: Path, **changes: Any) -> Path:
    import tomli_w

    path.write_text(tomli_w.dumps(SCENARIO | changes))
    return path


def run(path: Path, out: Path, *options: str) -> Path:
    assert main(["run", str(path), "--out", str(out), "--device", "cpu", "--quiet", *options]) == 0
    return out


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in lines(path)]


def assert_same_results(a: Path, b: Path, strategies: tuple[str, ...] = ("mean", "median")) -> None:
    for name in strategies:
        assert without_times(a / name / "rounds.jsonl") == without_times(b / name / "rounds.jsonl")
        assert (a / name / "clients.jsonl").read_text() == (b / name / "clients.jsonl").read_text()
        assert (a / name / "model.pt").read_bytes() == (b / name / "model.pt").read_bytes()


@pytest.mark.usefixtures("undrawn")
def test_same_run_twice_and_with_one_or_two_workers_gives_the_same_bits(tmp_path: Path) -> None:
    scenario = write(tmp_path / "tiny.toml")
    first = run(scenario, tmp_path / "a", "--workers", "2")
    assert_same_results(first, run(scenario, tmp_path / "b", "--workers", "2"))
    assert_same_results(first, run(scenario, tmp_path / "c", "--workers", "1"))


@pytest.mark.usefixtures("undrawn")
def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    scenario = write(tmp_path / "tiny.toml", strategies=["mean"], rounds=1)
    a, b = run(scenario, tmp_path / "a"), run(scenario, tmp_path / "b", "--seed", "2")
    assert (a / "mean" / "model.pt").read_bytes() != (b / "mean" / "model.pt").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_run_killed_in_the_middle_of_a_round_resumes_to_the_same_bits(tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    killer = {"name": "tests.faults:KillsServerOnce", "clients": [4], "marker": str(marker)}
    attacks = [*SCENARIO["attacks"], killer]
    scenario = write(tmp_path / "tiny.toml", attacks=attacks, selection={"name": "all"})
    command = [sys.executable, "-m", "fedplat", "run", str(scenario), "--quiet", "--device", "cpu"]
    command += ["--out", str(tmp_path / "killed-run")]
    root = Path(__file__).resolve().parents[1]
    killed = subprocess.run(command, capture_output=True, cwd=root, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert marker.exists()
    assert [row["round"] for row in lines(tmp_path / "killed-run" / "mean" / "rounds.jsonl")] == [0, 1, 2]
    refused = subprocess.run(command, capture_output=True, cwd=root, check=False, text=True)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    subprocess.run([*command, "--resume"], capture_output=True, cwd=root, check=True)
    undisturbed = run(scenario, tmp_path / "undisturbed")
    assert_same_results(undisturbed, tmp_path / "killed-run")


@pytest.mark.usefixtures("undrawn")
def test_a_half_written_line_after_the_last_checkpoint_is_dropped_on_resume(tmp_path: Path) -> None:
    scenario = write(tmp_path / "tiny.toml", strategies=["mean"])
    done = run(scenario, tmp_path / "done")
    expected = [(done / "mean" / n).read_text() for n in ("rounds.jsonl", "clients.jsonl")]
    # As if killed after lines of a later round were written, but before their checkpoint.
    (done / "mean" / "model.pt").unlink()
    for name in ("rounds.jsonl", "clients.jsonl"):
        with (done / "mean" / name).open("a") as file:
            file.write('{"round": 5, "accuracy": 0.1}\n{"round": 6, "acc')
    run(scenario, tmp_path / "done", "--resume")
    assert [(done / "mean" / n).read_text() for n in ("rounds.jsonl", "clients.jsonl")] == expected


def test_ctrl_c_saves_the_state_and_tells_how_to_go_on(tmp_path: Path) -> None:
    scenario = write(tmp_path / "tiny.toml", rounds=20_000)
    out = tmp_path / "stopped"
    command = [sys.executable, "-m", "fedplat", "run", str(scenario), "--out", str(out), "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not (out / "mean" / "checkpoint.pt").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"fedplat run {scenario} --device cpu --out {out} --resume" in stderr
    assert "Traceback" not in stderr
    done = lines(out / "mean" / "rounds.jsonl")[-1]["round"]
    checkpoint = torch.load(out / "mean" / "checkpoint.pt", weights_only=True)
    assert checkpoint["round"] in (done, done - 1)


@pytest.mark.usefixtures("undrawn")
def test_clients_that_fail_are_left_out_and_named_and_the_run_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = ("Raises", "SendsNan", "SendsWrongShape", "ClaimsManySamples")
    attacks = [{"name": f"tests.faults:{name}", "clients": [i]} for i, name in enumerate(faults)]
    scenario = write(tmp_path / "tiny.toml", attacks=attacks, selection={"name": "all"}, rounds=2)
    out = tmp_path / "out"
    assert main(["run", str(scenario), "--out", str(out), "--device", "cpu"]) == 0
    words = {0: "ValueError: boom", 1: "not finite", 2: "has shape", 3: "'num-examples' is 1000000000000"}
    printed, report = capsys.readouterr().out, (out / "report.md").read_text()
    for name in ("mean", "median"):
        rows = lines(out / name / "clients.jsonl")
        left_out = {row["client"]: row for row in rows if row["round"] == 2 and row["status"] != "accepted"}
        assert left_out.keys() == words.keys()
        assert all(words[client] in row["reason"] for client, row in left_out.items())
        assert left_out[0]["status"] == "failed"
        last = lines(out / name / "rounds.jsonl")[-1]
        assert (last["accepted"], last["refused"], last["failed"]) == (2, 3, 1)
        assert np.isfinite(last["loss"])
    for client, reason in words.items():
        assert f"client {client}, " in printed
        assert reason in printed
        assert reason in report


def test_the_run_folder_holds_what_it_promises(tmp_path: Path) -> None:
    out = run(write(tmp_path / "tiny.toml"), tmp_path / "out")
    assert {path.name for path in out.iterdir()} >= {
        "config.toml",
        "environment.json",
        "summary.json",
        "report.md",
        "accuracy.png",
        "mean",
        "median",
    }
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    environment = json.loads((out / "environment.json").read_text())
    assert environment["device"] == "cpu"
    assert environment["attackers"] == {"2": "sign-flip"}
    assert {"torch", "flwr", "python", "commit"} <= environment.keys()
    record = lines(out / "median" / "rounds.jsonl")[2]
    assert record["round"] == 2
    assert len(record["per_class_accuracy"]) == 10
    assert record["seconds"].keys() == {"configure", "train", "aggregate", "evaluate-clients", "evaluate"}
    # 5 of 6 clients (fraction 0.7, rounded up), 64 pixels x 10 classes and 10 biases, 4 bytes each.
    assert record["bytes_down"] == record["bytes_up"] == 5 * 650 * 4
    assert record["attack"].keys() == {"attackers", "selected", "weight", "success"}
    clients = [row for row in lines(out / "mean" / "clients.jsonl") if row["round"] == 2]
    assert len(clients) == 5
    assert sum(row["weight"] for row in clients) == pytest.approx(1)
    assert [row["client"] for row in clients if row["attack"] == "sign-flip"] in ([2], [])
    assert all(row["update_norm"] > 0 and row["samples"] >= 10 for row in clients)


@pytest.mark.usefixtures("undrawn")
def test_the_final_model_is_a_state_dict_that_the_model_loads(tmp_path: Path) -> None:
    out = run(write(tmp_path / "tiny.toml", strategies=["mean"]), tmp_path / "out")
    config = load(SCENARIO | {"strategies": ["mean"]}, "test")
    situation = experiment.build_situation(config, "cpu")
    module = situation.task.build_model()
    module.load_state_dict(torch.load(out / "mean" / "model.pt", weights_only=True))
    model = FlatModel(module)
    record = FlatArrays(model.layout, model.vector.numpy(), model.side.numpy()).to_record()
    metrics = situation.evaluate_fn(4, record)
    assert metrics is not None
    assert metrics["accuracy"] == lines(out / "mean" / "rounds.jsonl")[-1]["accuracy"]


@pytest.mark.usefixtures("undrawn")
def test_evaluation_comes_every_so_many_rounds_and_after_the_last(tmp_path: Path) -> None:
    scenario = write(tmp_path / "tiny.toml", strategies=["mean"], evaluation={"every": 3}, rounds=5)
    rows = lines(run(scenario, tmp_path / "out") / "mean" / "rounds.jsonl")
    assert [row["round"] for row in rows if row["accuracy"] is not None] == [0, 3, 5]


@pytest.mark.usefixtures("undrawn")
def test_all_strategies_face_the_same_clients_in_the_same_rounds(tmp_path: Path) -> None:
    out = run(write(tmp_path / "tiny.toml"), tmp_path / "out")
    chosen = [
        [(row["round"], row["client"]) for row in lines(out / name / "clients.jsonl")]
        for name in ("mean", "median")
    ]
    assert chosen[0] == chosen[1]
    assert (
        lines(out / "mean" / "rounds.jsonl")[0]["loss"] == lines(out / "median" / "rounds.jsonl")[0]["loss"]
    )


@pytest.mark.usefixtures("undrawn")
def test_sign_flipping_harms_the_mean_and_the_median_withstands_it(tmp_path: Path) -> None:
    attack = [{"name": "sign-flip", "fraction": 0.3, "factor": -4.0}]
    scenario = write(
        tmp_path / "tiny.toml",
        attacks=attack,
        rounds=12,
        selection={"name": "all"},
        partition={"name": "iid", "clients": 10},
        training={"batch_size": 16, "lr": 0.1},
    )
    out = run(scenario, tmp_path / "out")
    mean, median = (lines(out / name / "rounds.jsonl")[-1] for name in ("mean", "median"))
    assert mean["accuracy"] < 0.3
    assert median["accuracy"] > 0.8
    assert median["attack"]["weight"] < 0.15 < mean["attack"]["weight"]


def test_an_infeasible_strategy_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    scenario = write(
        tmp_path / "tiny.toml",
        strategies=["mean", "trimmed-mean"],
        strategy={"trimmed-mean": {"beta": 0.4}},
        partition={"name": "iid", "clients": 2},
        selection={"name": "all"},
        attacks=[],
    )
    assert main(["run", str(scenario), "--out", str(tmp_path / "out"), "--quiet"]) == 2
    assert not (tmp_path / "out" / "mean").exists()


# Those two need data with speakers, or with sub-domains.
@pytest.mark.parametrize(
    "name", sorted(registry.entries("partitions").keys() - {"natural", "dirichlet-domains"})
)
def test_every_partition_can_be_asked_for_by_a_scenario(name: str) -> None:
    partition = {"name": name, "clients": 6}
    dataset, parts = experiment.load_data(load(SCENARIO | {"partition": partition}, "test"))
    assert len(parts) == 6
    held = sum(map(len, parts))
    # FedP3's clients are of one size, and what does not go round belongs to nobody.
    assert held < len(dataset.train) if name.startswith("fedp3") else held == len(dataset.train)


@pytest.mark.parametrize(
    ("attacks", "words"),
    [
        ([{"name": "sign-flip", "clients": [6]}], "client 6 is not among the clients 0 to 5"),
        (
            [{"name": "sign-flip", "clients": [1]}, {"name": "sign-flip", "clients": [1]}],
            "named by two attacks",
        ),
        (
            [{"name": "sign-flip", "clients": [0, 1, 2, 3]}, {"name": "sign-flip", "fraction": 0.5}],
            "2 clients are left",
        ),
    ],
)
def test_attackers_that_do_not_exist_are_refused(attacks: list, words: str) -> None:
    with pytest.raises(UserError, match=words):
        experiment.build_situation(load(SCENARIO | {"attacks": attacks}, "test"), "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="no CUDA GPU here"):
        experiment.resolve_device("cuda")
    assert experiment.resolve_device("auto") == "cpu"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.usefixtures("undrawn")
def test_a_run_on_a_gpu_is_as_good_as_one_on_the_cpu(tmp_path: Path) -> None:
    scenario = write(tmp_path / "tiny.toml")
    on_cpu, on_gpu = tmp_path / "cpu", tmp_path / "gpu"
    assert main(["run", str(scenario), "--out", str(on_cpu), "--device", "cpu", "--quiet"]) == 0
    assert main(["run", str(scenario), "--out", str(on_gpu), "--device", "cuda", "--quiet"]) == 0
    for name in ("mean", "median"):
        a, b = (lines(out / name / "rounds.jsonl")[-1]["accuracy"] for out in (on_cpu, on_gpu))
        assert a == pytest.approx(b, abs=0.02)
    assert os.path.exists(on_gpu / "accuracy.png")
