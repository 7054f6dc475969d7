"""The flow of ``fedplat run``, with a stand-in for the experiment itself."""

import json
import os
import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedplat import experiment
from fedplat.cli import main
from fedplat.config import ExperimentConfig
from fedplat.engines import LocalEngine
from fedplat.errors import UserError
from fedplat.results import figures
from fedplat.results.folder import RunFolder

from ..results import round_record

QUICK = ["run", "quickstart", "--set", "rounds=4", "--strategy", "mean,median"]


class Fake:
    """Does what an experiment does to the folder and the observer; may be stopped after some rounds."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.stop: Callable[[], object] | None = None
        self.stop_after = 2

    def __call__(self, config: ExperimentConfig, folder: RunFolder, **options: Any) -> None:
        self.calls.append({"config": config, **options})
        observer = options["observer"]
        for name in config.strategies:
            log = folder.log(name)
            done = folder.rounds(name)[-1]["round"] if log.started else -1
            observer.begin(name, max(done, 0), config.rounds)
            for number in range(done + 1, config.rounds + 1):
                record = round_record(number, 0.1 * number)
                log.append(record, [])
                log.save_checkpoint({"round": number})
                observer.round(name, record)
                if self.stop and number == self.stop_after:
                    self.stop()
            log.save_model({})
            observer.end(name)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fake:
    monkeypatch.chdir(tmp_path)
    stand_in = Fake()
    monkeypatch.setattr(experiment, "run", stand_in)
    # Drawing takes most of a second and has its own tests.
    monkeypatch.setattr(figures, "draw_curves", lambda runs, path, *more: path.write_bytes(b"a picture"))
    return stand_in


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_run_ends_with_a_table_and_says_where_the_picture_is(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUICK, "--out", "here", "--workers", "3", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert "mean: round 4/4, accuracy 40.0 %, loss 1\n" in output
    assert "picture: here/accuracy.png\n" in output
    rows = [line.split() for line in output.splitlines()]
    assert ["mean", "40.00"] in [row[:2] for row in rows]
    assert Path("here/accuracy.png").exists()
    assert json.loads(Path("here/summary.json").read_text())["finished"] is True
    assert isinstance(fake.calls[0]["engine"], LocalEngine)
    assert fake.calls[0]["device"] == "cpu"


def test_the_folder_is_named_after_the_scenario_and_its_digest(fake: Fake) -> None:
    assert main(QUICK) == 0
    digest = fake.calls[0]["config"].digest()
    assert Path("runs", f"quickstart-{digest}", "report.md").exists()


def test_options_reach_the_configuration(fake: Fake) -> None:
    assert main([*QUICK, "--set", "training.lr=0.05", "--seed", "7", "--strategy", "trimmed-mean"]) == 0
    config = fake.calls[0]["config"]
    assert config.strategies == ("mean", "median", "trimmed-mean")
    assert (config.training.lr, config.seed, config.rounds) == (0.05, 7, 4)


def test_settings_of_strategies_that_are_not_run_do_not_matter(fake: Fake) -> None:
    assert main(["run", "quickstart", "--set", "rounds=1", "--strategy", "median"]) == 0
    assert fake.calls[0]["config"].to_dict()["strategy"] == {"median": {"weighted": False}}


def test_quiet_prints_only_where_the_results_are(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--out", "here", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "here/report.md\nhere/accuracy.png\nhere/report.html\n"
    assert captured.err == ""


def test_a_finished_run_is_shown_and_not_run_again(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    main([*QUICK, "--out", "here"])
    before = Path("here/mean/rounds.jsonl").read_bytes()
    capsys.readouterr()
    assert main([*QUICK, "--out", "here"]) == 0
    output = capsys.readouterr().out
    assert "here already holds this run; it is not run again (--out DIR makes another copy)" in output
    assert "40.00" in output
    assert len(fake.calls) == 1
    assert Path("here/mean/rounds.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("stop", "status"), [(interrupt, 130), (lambda: os.kill(os.getpid(), signal.SIGTERM), 143)]
)
def test_a_stopped_run_says_how_to_go_on_and_that_command_does(
    fake: Fake, capsys: pytest.CaptureFixture[str], stop: Callable[[], object], status: int
) -> None:
    fake.stop = stop
    handler = signal.getsignal(signal.SIGTERM)
    assert main([*QUICK, "--set", "model.hidden=[8, 8]", "--seed", "3", "--out", "a folder"]) == status
    assert signal.getsignal(signal.SIGTERM) is handler
    message = capsys.readouterr().err
    assert "every full round is saved in a folder" in message
    words = shlex.split(message.splitlines()[-1])
    assert words[0] == "fedplat"
    assert words[-3:] == ["--out", "a folder", "--resume"]
    fake.stop = None
    assert main(words[1:]) == 0
    assert "mean: goes on after round 2 of 4" in capsys.readouterr().out
    assert fake.calls[0]["config"].digest() == fake.calls[1]["config"].digest()


def test_an_unfinished_run_is_only_continued_on_request(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.stop = interrupt
    main([*QUICK, "--out", "here"])
    capsys.readouterr()
    assert main([*QUICK, "--out", "here"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert len(fake.calls) == 1


def test_a_folder_of_another_run_is_left_alone(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    main([*QUICK, "--out", "here"])
    assert main([*QUICK, "--out", "here", "--seed", "2"]) == 2
    assert "seed" in capsys.readouterr().err
    assert len(fake.calls) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["quickstrat"], "unknown scenario 'quickstrat': did you mean 'quickstart'? Allowed: "),
        (["no/such.toml"], "no/such.toml: there is no such file"),
        (["quickstart", "--set", "partition.alhpa=1"], "partition.alhpa: unknown key; did you mean 'alpha'?"),
        (["quickstart", "--set", "training.lr=-1"], "training.lr: found -1; input should be greater than 0"),
        (["quickstart", "--set", "lr"], "expected KEY=VALUE"),
        (["quickstart", "--strategy", "mean,medain"], "unknown strategy 'medain': did you mean 'median'?"),
        (["quickstart", "--strategy", ","], "--strategy: expected names"),
        (["quickstart", "--device", "gpu"], "--device 'gpu': did you mean 'cpu'? Allowed: auto, cpu, cuda"),
        (["quickstart", "--engine", "locale"], "'locale': did you mean 'local'? Allowed: flower-"),
        (["quickstart", "--workers", "0"], "--workers"),
        (["quickstart", "--engine", "flower-simulation", "--workers", "2"], "--workers belongs to the local"),
        (["quickstart", "--engine", "flower-simulation", "--device", "cuda"], "flower.num_gpus=0.1"),
        (["quickstart", "--seed", "-1"], "--seed"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_before_anything_is_made(
    fake: Fake, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert main(["run", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert told in message
    assert not Path("runs").exists()
    assert fake.calls == []


def test_a_gpu_that_is_not_there_is_a_mistake(
    fake: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment.torch.cuda, "is_available", lambda: False)
    assert main([*QUICK, "--device", "cuda"]) == 2
    assert "no CUDA GPU" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_mistake_found_during_the_run_is_told_without_a_traceback(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    def complain() -> None:
        raise UserError("the rule needs more clients")

    fake.stop = complain
    assert main(QUICK) == 2
    assert capsys.readouterr().err == "error: the rule needs more clients\n"


def test_report_rebuilds_everything_also_for_an_unfinished_run(
    fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.stop = interrupt
    main([*QUICK, "--out", "here"])
    capsys.readouterr()
    assert main(["report", "here"]) == 0
    output = capsys.readouterr().out
    assert "This run is not finished" in output
    assert "(round 2 of 4)" in output
    assert "not finished" in Path("here/report.md").read_text()
    assert Path("here/accuracy.png").exists()


def test_report_needs_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no run here" in capsys.readouterr().err


def test_the_configuration_in_a_run_folder_runs_again_as_it_is(fake: Fake) -> None:
    main([*QUICK, "--out", "here"])
    assert main(["run", "here/config.toml", "--out", "there"]) == 0
    assert fake.calls[0]["config"].digest() == fake.calls[1]["config"].digest()


@pytest.mark.slow
def test_a_real_run_from_start_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "quickstart", "--set", "rounds=2", "--strategy", "mean", "--out", "here"]
    assert main([*arguments, "--device", "cpu", "--workers", "1"]) == 0
    assert "mean: round 2/2" in capsys.readouterr().out
    names = {path.name for path in Path("here").iterdir()}
    assert names >= {"config.toml", "environment.json", "summary.json", "report.md", "accuracy.png", "mean"}
