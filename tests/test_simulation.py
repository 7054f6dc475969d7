"""The same runs on Flower's simulation and on the local engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedplat import experiment
from fedplat.config import load
from fedplat.engines import LocalEngine, SimulationEngine
from fedplat.errors import UserError
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display
from fedplat.runtime.simulation import simulation

from .flower_apps import plain_app, record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BASE: dict[str, Any] = {
    "name": "engines",
    "rounds": 4,
    "strategies": ["fed-credit", "mud-hog"],
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 8, "alpha": 0.5},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"lr": 0.05, "momentum": 0.5, "keep_optimizer": True},
    "attacks": [
        {"name": "sign-flip", "clients": [2], "factor": -4.0},
        {"name": "label-flip", "clients": [3], "source": [1], "target": 7},
        {"name": "alie", "clients": [5]},
    ],
}
PROTECTED: dict[str, Any] = {
    "strategies": ["fed-credit"],
    "attacks": [{"name": "sign-flip", "clients": [2], "factor": -4.0}],
    "security": {"signed_updates": True},
    "aggregation": {"secure_groups": 3},
    "privacy": {"mode": "local", "clip": 1.0, "noise_multiplier": 0.1},
}


@pytest.mark.parametrize("changes", [{}, PROTECTED], ids=["plain", "protected"])
def test_verdicts_and_models_are_those_of_the_local_engine_bit_for_bit(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    config = load({**BASE, **changes}, "engines")
    for name, engine in (("here", LocalEngine(1)), ("ray", SimulationEngine("cpu"))):
        folder = RunFolder.open(tmp_path / name, config, resume=False)
        experiment.run(config, folder, engine=engine, device="cpu", observer=Display(), group_size=1)
    for strategy in config.strategies:
        for file in ("clients.jsonl", "model.pt"):
            here, ray = (tmp_path / name / strategy / file for name in ("here", "ray"))
            assert here.read_bytes() == ray.read_bytes()


def test_flowers_own_strategy_runs_on_the_simulation_from_outside() -> None:
    with simulation(plain_app(), 3, num_cpus=0.5) as grid:
        result = FedAvg(min_train_nodes=3, min_available_nodes=3).start(
            grid, record(a=[0.0, 1.0]), num_rounds=2
        )
    assert result.arrays["0"].numpy().tolist() == [2.0, 3.0]


def test_a_ray_cluster_that_runs_already_is_joined_and_left_running() -> None:
    ray = Path(sys.executable).parent / "ray"
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    address = f"127.0.0.1:{port}"
    command = [ray, "start", "--head", f"--port={port}", "--num-cpus=2", "--block", "--disable-usage-stats"]
    head = subprocess.Popen(
        [*command, "--include-dashboard=false", f"--temp-dir={tempfile.mkdtemp(prefix='ray', dir='/tmp')}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def status() -> str:
        asked = [ray, "status", "--address", address]
        return subprocess.run(asked, check=False, capture_output=True, text=True, timeout=60).stdout

    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and "2.0 CPU" not in status():
            time.sleep(1)
        with simulation(plain_app(), 3, num_cpus=0.5, address=address) as grid:
            result = FedAvg().start(grid, record(a=[0.0]), num_rounds=1)
        assert result.arrays["0"].numpy().tolist() == [1.0]
        assert "2.0 CPU" in status()
    finally:
        head.terminate()
        try:
            head.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)


def ask_one_node_of_a_simulation(num_cpus: float) -> None:
    with simulation(plain_app(), 2, num_cpus=num_cpus) as grid:
        question = Message(RecordDict(), next(iter(grid.get_node_ids())), MessageType.QUERY)
        grid.send_and_receive([question], timeout=120)


def test_a_client_that_fits_nowhere_is_told_with_what_it_asks_for() -> None:
    # At once or with the first message, whichever is sooner.
    with pytest.raises(UserError, match=r"Every client needs the cores and the share of a GPU"):
        ask_one_node_of_a_simulation(num_cpus=4096.0)


def test_ctrl_c_ends_a_simulated_run_soon_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedplat", "run", "quickstart", "--strategy", "mean", "--out", "out"]
    command += ["--engine", "flower-simulation", "--set", "rounds=60"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    rounds = tmp_path / "out" / "mean" / "rounds.jsonl"
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (
            rounds.exists() and len(rounds.read_text().splitlines()) > 2
        ):
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        _, complaint = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, complaint
    assert "--engine flower-simulation" in complaint
    assert "Traceback" not in complaint
    done = len(rounds.read_text().splitlines())
    again = subprocess.run(
        [*command, "--resume", "--quiet"],
        cwd=tmp_path,
        timeout=280,
        capture_output=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert len(rounds.read_text().splitlines()) == 61 > done
