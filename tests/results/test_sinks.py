"""TensorBoard and MLflow get what is in ``rounds.jsonl``, once, however often a run stops and goes on."""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedplat.cli import main
from fedplat.cli.run import resume_command
from fedplat.config import ExperimentConfig
from fedplat.errors import UserError
from fedplat.results.flatten import numbers
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display
from fedplat.results.sinks import Recorder, Sink, export, export_folders, sinks_of
from fedplat.results.summary import summarise

from . import NAN, make_run, round_record


class Notes:
    """A sink that notes what it is told, and may fail."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.told: list[Any] = []
        self.fails_at = fails_at

    def check(self, config: ExperimentConfig) -> None: ...

    def start(self, folder: RunFolder, strategy: str, records: Sequence[Mapping[str, Any]]) -> None:
        self.told.append((strategy, [record["round"] for record in records]))

    def round(self, record: Mapping[str, Any]) -> None:
        if record["round"] == self.fails_at:
            raise ConnectionError("nobody there\nat all")
        self.told.append(record["round"])

    def end(self, complete: bool) -> None:
        self.told.append(complete)

    def finish(self, folder: RunFolder, strategy: str, summary: Mapping[str, Any]) -> None:
        self.told.append((strategy, summary["accuracy"]))


def go_on(
    folder: RunFolder, sinks: Mapping[str, Sink], strategy: str, numbers: range, *, stop: bool = False
) -> None:
    """Do what a run does to its folder and its observer in these rounds."""
    observer = Recorder(Display(), folder, sinks)
    observer.begin(strategy, max(numbers.start - 1, 0), 4)
    for number in numbers:
        record = round_record(number, 0.1 * number, loss=NAN if number == 2 else 1.5)
        folder.log(strategy).append(record, [])
        observer.round(strategy, record)
    if stop:
        observer.close()
    else:
        folder.log(strategy).save_model({})
        observer.end(strategy)
        observer.close()


def test_a_sink_is_told_what_the_folder_has_and_what_is_added(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.0, 0.1], "median": []}, finished=False)
    notes = Notes()
    go_on(folder, {"notes": notes}, "mean", range(2, 5))
    go_on(folder, {"notes": notes}, "median", range(2), stop=True)
    expected: list[Any] = [("mean", [0, 1]), 2, 3, 4, True, ("median", []), 0, 1, False]
    assert notes.told == expected


def test_a_sink_gets_none_for_a_number_that_is_not_finite_as_the_folder_does(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": []}, finished=False)
    seen: list[Any] = []

    class Keeps(Notes):
        def round(self, record: Mapping[str, Any]) -> None:
            seen.append(record)

    go_on(folder, {"keeps": Keeps()}, "mean", range(5))
    assert seen == folder.rounds("mean")
    assert seen[2]["loss"] is None


def test_a_sink_that_fails_is_told_of_once_and_the_run_and_other_sinks_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_run(tmp_path / "run", {"mean": []}, finished=False)
    broken, whole = Notes(fails_at=1), Notes()
    go_on(folder, {"mlflow": broken, "whole": whole}, "mean", range(5))
    assert broken.told == [("mean", []), 0]
    assert whole.told == [("mean", []), 0, 1, 2, 3, 4, True]
    assert len(folder.rounds("mean")) == 5
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "mlflow failed" in messages[0]
    assert "ConnectionError: nobody there)" in messages[0]
    assert f"fedplat report {folder.path} --mlflow" in messages[0]


def test_an_unknown_sink_is_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": []}, finished=False)
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        sinks_of(["tensorbord"], folder.config)


def test_the_command_that_goes_on_has_the_same_sinks() -> None:
    given = ("mine", None, None, Path("a"), None, None, "auto", "local", None, False)
    command = resume_command(*given, ["tensorboard", "mlflow"])
    assert command == "fedplat run mine --tensorboard --mlflow --out a --resume"


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow")])
def test_a_missing_package_is_told_before_there_is_a_folder(
    name: str,
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in [
        m for m in sys.modules if m.partition(".")[0] == package or m == "torch.utils.tensorboard"
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["run", "quickstart", "--out", str(tmp_path / "run"), f"--{name}"]) == 2
    assert f"pip install 'fedplat[{name}]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# TensorBoard -----------------------------------------------------------------------------------------------


def scalars(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Read event files back with TensorBoard's own reader."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def recorded(folder: RunFolder, strategy: str) -> dict[str, list[tuple[int, Any]]]:
    found: dict[str, list[tuple[int, Any]]] = {}
    for record in folder.rounds(strategy):
        for name, value in numbers(record).items():
            if name != "round":
                found.setdefault(name, []).append((record["round"], pytest.approx(value, rel=1e-6)))
    return found


def test_tensorboard_has_every_number_of_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = make_run(tmp_path / "run", {"mean": [], "median": []}, finished=False)
    sinks = sinks_of(["tensorboard"], folder.config)
    before = threading.active_count()
    for name in ("mean", "median"):
        go_on(folder, sinks, name, range(5))
        # Workers of the next strategy are forked now.
        assert threading.active_count() == before
    for name in ("mean", "median"):
        found = scalars(folder.path / "tensorboard" / name)
        assert found == recorded(folder, name)
        assert [step for step, _ in found["loss"]] == [0, 1, 3, 4]
        assert {"accuracy", "per_class_accuracy/0", "attack/weight", "seconds/train"} <= found.keys()


def test_a_stopped_run_that_goes_on_doubles_no_step_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = make_run(tmp_path / "run", {"mean": []}, finished=False)
    go_on(folder, sinks_of(["tensorboard"], folder.config), "mean", range(3), stop=True)
    # Rounds without the sink, as when the option was forgotten, are made up for.
    go_on(folder, {}, "mean", range(3, 4), stop=True)
    go_on(folder, sinks_of(["tensorboard"], folder.config), "mean", range(4, 5))
    assert scalars(folder.path / "tensorboard" / "mean") == recorded(folder, "mean")


def test_an_event_that_was_cut_off_by_a_kill_is_written_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = make_run(tmp_path / "run", {"mean": []}, finished=False)
    go_on(folder, sinks_of(["tensorboard"], folder.config), "mean", range(3), stop=True)
    (events,) = (folder.path / "tensorboard" / "mean").iterdir()
    events.write_bytes(events.read_bytes()[:-40])
    go_on(folder, sinks_of(["tensorboard"], folder.config), "mean", range(3, 5))
    assert scalars(folder.path / "tensorboard" / "mean") == recorded(folder, "mean")


def test_an_old_run_is_exported_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = make_run(tmp_path / "run", {"mean": [0.1, 0.5, 0.6], "median": [0.2]})
    for _ in range(2):
        export(folder, sinks_of(["tensorboard"], folder.config), summarise(folder))
        assert scalars(folder.path / "tensorboard" / "mean") == recorded(folder, "mean")
        assert len(list((folder.path / "tensorboard" / "mean").iterdir())) == 1


def test_the_cells_of_a_table_are_exported_each_in_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for name, seed in (("a", 1), ("b", 2)):
        make_run(tmp_path / "cells" / name, {"mean": [0.1, 0.1 * seed]}, seed=seed)
    export_folders([tmp_path], ["tensorboard"])
    for name, seed in (("a", 1), ("b", 2)):
        found = scalars(tmp_path / "cells" / name / "tensorboard" / "mean")
        assert found["accuracy"] == [(0, pytest.approx(0.1)), (1, pytest.approx(0.1 * seed))]
    with pytest.raises(UserError, match="no run here"):
        export_folders([tmp_path / "cells"], ["tensorboard"])


# MLflow ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An empty store; to make one takes seconds."""
    pytest.importorskip("mlflow")
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def client(_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", _store)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    return mlflow.MlflowClient()


def runs_in(client: Any, experiment: str) -> dict[str, Any]:
    found = client.get_experiment_by_name(experiment)
    return {run.data.tags["strategy"]: run for run in client.search_runs([found.experiment_id])}


def history(client: Any, run: Any, name: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name))


@pytest.mark.slow
def test_mlflow_has_params_tags_and_every_round_once(tmp_path: Path, client: Any) -> None:
    folder = make_run(tmp_path / "run", {"mean": [], "krum": []}, finished=False, name="mlflow-a")
    sinks = sinks_of(["mlflow"], folder.config)
    go_on(folder, sinks, "mean", range(3), stop=True)
    assert runs_in(client, "mlflow-a")["mean"].info.status == "KILLED"
    go_on(folder, {}, "mean", range(3, 4), stop=True)
    go_on(folder, sinks_of(["mlflow"], folder.config), "mean", range(4, 5))
    go_on(folder, sinks, "krum", range(5))
    runs = runs_in(client, "mlflow-a")
    assert runs.keys() == {"mean", "krum"}
    for name, run in runs.items():
        assert run.info.status == "FINISHED"
        assert run.data.params["attacks.0.name"] == "sign-flip"
        assert run.data.params["strategy"] == name
        assert run.data.tags["seed"] == str(folder.config.seed)
        assert run.data.tags["config_hash"] == folder.config.digest()
        assert "version.fedplat" in run.data.tags
        rows = folder.rounds(name)
        assert history(client, run, "accuracy") == [(row["round"], row["accuracy"]) for row in rows]
        assert [step for step, _ in history(client, run, "loss")] == [0, 1, 3, 4]
        assert [step for step, _ in history(client, run, "seconds/train")] == [1, 2, 3, 4]


@pytest.mark.slow
def test_mlflow_gets_the_summary_and_the_report_also_of_an_old_run(tmp_path: Path, client: Any) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.1, 0.5]}, name="mlflow-b")
    (folder.path / "report.md").write_text("# a report\n")
    for _ in range(2):
        export(folder, sinks_of(["mlflow"], folder.config), summarise(folder))
        run = runs_in(client, "mlflow-b")["mean"]
        assert history(client, run, "accuracy") == [(0, 0.1), (1, 0.5)]
        assert history(client, run, "summary/accuracy") == [(4, 0.5)]
        assert "report.md" in {file.path for file in client.list_artifacts(run.info.run_id)}
    assert json.loads((folder.path / "mean" / "mlflow.json").read_text())["run_id"] == run.info.run_id


@pytest.mark.slow
def test_an_mlflow_run_that_was_deleted_is_made_again(tmp_path: Path, client: Any) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.1, 0.5]}, name="mlflow-c")
    export(folder, sinks_of(["mlflow"], folder.config), summarise(folder))
    first = runs_in(client, "mlflow-c")["mean"]
    client.delete_run(first.info.run_id)
    export(folder, sinks_of(["mlflow"], folder.config), summarise(folder))
    second = runs_in(client, "mlflow-c")["mean"]
    assert second.info.run_id != first.info.run_id
    assert history(client, second, "accuracy") == [(0, 0.1), (1, 0.5)]


def test_a_tracking_server_that_is_not_there_is_told_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    folder = make_run(tmp_path / "run", {"mean": []}, finished=False)
    with pytest.raises(UserError, match=r"cannot be opened at http://127\.0\.0\.1:9") as told:
        sinks_of(["mlflow"], folder.config)
    assert "secret" not in str(told.value)


# A real run ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sinks_change_no_bit_of_a_run(tmp_path: Path, client: Any) -> None:
    pytest.importorskip("tensorboard")
    common = [
        "run",
        "quickstart",
        "--set",
        "rounds=2",
        "--strategy",
        "mean,median",
        "--quiet",
        "--device",
        "cpu",
    ]
    assert main([*common, "--out", str(tmp_path / "a"), "--tensorboard", "--mlflow"]) == 0
    assert main([*common, "--out", str(tmp_path / "b")]) == 0
    with_sinks, without = (RunFolder.existing(tmp_path / name) for name in "ab")
    assert with_sinks.config.digest() == without.config.digest()
    runs = runs_in(client, "quickstart")
    for name in ("mean", "median"):
        for file in ("clients.jsonl", "model.pt"):
            assert (tmp_path / "a" / name / file).read_bytes() == (tmp_path / "b" / name / file).read_bytes()
        assert scalars(tmp_path / "a" / "tensorboard" / name) == recorded(with_sinks, name)
        rows = with_sinks.rounds(name)
        assert history(client, runs[name], "accuracy") == [(row["round"], row["accuracy"]) for row in rows]
