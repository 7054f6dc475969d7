"""FedConv in whole runs on the digits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedplat.cli import main

FEDCONV = "fedplat.strategies.fedconv.scheme:FedConvScheme"
SCENARIO: dict[str, Any] = {
    "rounds": 2,
    "strategies": ["krum"],
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 5},
    "model": {"name": "mlp", "hidden": [16, 8]},
    "training": {"lr": 0.1},
    "attacks": [{"name": "sign-flip", "clients": [2]}],
    "submodels": {
        "name": FEDCONV,
        "public_samples": 60,
        "compress_epochs": 2,
        "dilate_epochs": 2,
    },
}
OPTIONS = ["--quiet", "--device", "cpu", "--workers", "1", "--group-size", "5"]


def write(path: Path, **changes: Any) -> Path:
    path.write_text(tomli_w.dumps(SCENARIO | changes))
    return path


def rounds_of(out: Path, strategy: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (out / strategy / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


@pytest.mark.slow
def test_every_aggregator_works_on_replies_made_large(tmp_path: Path) -> None:
    changes = {"strategies": ["mean", "krum", "fed-credit"], "strategy": {"krum": {"f": 1}}}
    scenario, out = write(tmp_path / "fedconv.toml", rounds=1, **changes), tmp_path / "out"
    assert main(["run", str(scenario), "--out", str(out), *OPTIONS]) == 0
    for strategy in changes["strategies"]:
        start, first = rounds_of(out, strategy)
        assert first["loss"] < start["loss"]
        assert (out / strategy / "clients.jsonl").read_text().count('"accepted"') == 5


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_a_round_resumes_to_the_same_bits(tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    killer = {"name": "tests.faults:KillsServerOnce", "clients": [4], "marker": str(marker), "in_round": 2}
    scenario = write(tmp_path / "fedconv.toml", attacks=[killer], strategies=["mean"])
    command = [sys.executable, "-m", "fedplat", "run", str(scenario), *OPTIONS]
    command += ["--out", str(tmp_path / "killed-run")]
    root = Path(__file__).resolve().parents[2]
    killed = subprocess.run(command, capture_output=True, cwd=root, check=False)
    assert killed.returncode == -signal.SIGKILL
    subprocess.run([*command, "--resume"], capture_output=True, cwd=root, check=True)
    out = tmp_path / "undisturbed"
    assert main(["run", str(scenario), "--out", str(out), *OPTIONS]) == 0
    assert rounds_of(out, "mean") == rounds_of(tmp_path / "killed-run", "mean")
    models = [(tmp_path / name / "mean" / "model.pt").read_bytes() for name in ("undisturbed", "killed-run")]
    assert models[0] == models[1]
