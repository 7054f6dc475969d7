"""The app for ``flwr run``: what is packed, what its run config means, and a run on a local SuperLink."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from fedplat.cli import main
from fedplat.cli.flower_app import INSTALLED
from fedplat.errors import UserError
from fedplat.serving import config_from

FLWR = Path(sys.executable).parent / "flwr"


def defaults() -> dict[str, object]:
    told = tomllib.loads((INSTALLED / "pyproject.toml").read_text())
    return dict(told["tool"]["flwr"]["app"]["config"])


def test_the_defaults_of_the_run_config_are_the_scenarios_own() -> None:
    config = config_from(defaults())
    assert (config.name, config.seed, config.strategies[0]) == ("quickstart", 1, "mean")
    assert config.to_dict() == config_from({}).to_dict()


def test_the_run_config_changes_what_it_names() -> None:
    told = defaults() | {"strategy": "krum,median", "rounds": 3, "seed": 7}
    config = config_from(told | {"overrides": "attacks=[] model.hidden=[8, 8] partition.clients=4"})
    assert (config.strategies, config.rounds, config.seed) == (("krum", "median"), 3, 7)
    assert (config.attacks, config.partition.clients, config.model.settings()) == ((), 4, {"hidden": (8, 8)})


def test_a_mistake_in_the_run_config_is_told_like_any_other() -> None:
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        config_from(defaults() | {"scenario": "quikstart"})


def test_the_app_can_be_had_as_a_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["flower-app"]) == 0
    assert "flwr run fedplat-app" in capsys.readouterr().out
    assert (tmp_path / "fedplat-app" / "pyproject.toml").exists()
    assert main(["flower-app"]) == 2
    assert "not overwritten" in capsys.readouterr().err


def environment(home: Path) -> dict[str, str]:
    return os.environ | {
        "FLWR_HOME": str(home),
        "PATH": f"{FLWR.parent}{os.pathsep}{os.environ['PATH']}",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_what_is_packed_is_the_thin_app_alone(tmp_path: Path) -> None:
    shutil.copytree(INSTALLED, tmp_path / "fedplat-app", ignore=shutil.ignore_patterns("__pycache__"))
    command = [FLWR, "build", "--app", tmp_path / "fedplat-app"]
    built = subprocess.run(
        command, cwd=tmp_path, env=environment(tmp_path / "home"), capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (bundle,) = tmp_path.glob("*.fab")
    with ZipFile(bundle) as packed:
        names = {name for name in packed.namelist() if not name.startswith(".info")}
    apps = {f"fedplat_app/{name}.py" for name in ("__init__", "client_app", "server_app")}
    assert names == {"pyproject.toml", *apps}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_flwr_run_runs_the_scenario_with_overrides(tmp_path: Path) -> None:
    environ, work = environment(tmp_path / "home"), tmp_path / "work"
    work.mkdir()
    port = str(39_500 + os.getpid() % 400)
    environ |= {"FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": port, "FLWR_LOCAL_CONTROL_API_PORT": port}

    def flwr(*arguments: str) -> str:
        done = subprocess.run(
            [FLWR, *arguments],
            cwd=work,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        return done.stdout + done.stderr

    run_config = f'rounds=2 strategy="median" out="{tmp_path}/out" overrides="partition.clients=5"'
    try:
        printed = flwr(
            *("run", str(INSTALLED), "--run-config", run_config),
            *("--federation-config", "num-supernodes=5 client-resources-num-cpus=1"),
            *("--format", "json"),
        )
        answer = json.loads(printed[printed.find("{") :])
        assert answer["success"], printed
        run_id = str(answer["run-id"])
        deadline, status = time.monotonic() + 200, ""
        while time.monotonic() < deadline and not status.startswith("finished"):
            time.sleep(1)
            status = json.loads(flwr("ls", "--run-id", run_id, "--format", "json"))["runs"][0]["status"]
        assert status == "finished:completed", printed
    finally:
        for process in Path("/proc").glob("[0-9]*/environ") if Path("/proc").exists() else ():
            try:
                mine = f"FLWR_HOME={tmp_path / 'home'}".encode() in process.read_bytes().split(b"\0")
            except OSError:
                continue
            if mine:
                os.kill(int(process.parent.name), 9)
    rounds = [
        json.loads(line) for line in (tmp_path / "out" / "median" / "rounds.jsonl").read_text().splitlines()
    ]
    assert [line["round"] for line in rounds] == [0, 1, 2]
    assert [line["accepted"] for line in rounds] == [0, 5, 5]
    assert list(work.iterdir()) == []
