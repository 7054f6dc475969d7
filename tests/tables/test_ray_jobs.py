"""Cells as Ray tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from fedplat.errors import UserError
from fedplat.tables import ray_jobs
from fedplat.tables.grid_view import Progress, Silent
from fedplat.tables.ray_jobs import read_files, run_on_ray, write_files
from fedplat.tables.runner import missing_jobs
from fedplat.tables.spec import Resources

from . import planned
from .test_processes import contents, run


class Notes(Silent):
    def __init__(self, progress: Progress) -> None:
        super().__init__(progress)
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Cluster:
    """Stands in for Ray: tasks end at once; the first ``losses`` of them lose their node."""

    exceptions = ray.exceptions

    def __init__(self, losses: int) -> None:
        self.losses = losses
        self.asked: dict[str, Any] = {}

    def remote(self, function: Any) -> Cluster:
        self.function = function
        return self

    def options(self, **asked: Any) -> Any:
        self.asked = asked

        class Remote:
            @staticmethod
            def remote(*arguments: Any) -> tuple[Any, ...]:
                return arguments

        return Remote

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    def wait(self, tasks: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return tasks[:1], tasks[1:]

    def get(self, task: tuple[Any, ...]) -> Any:
        if self.losses:
            self.losses -= 1
            raise ray.exceptions.WorkerCrashedError
        return "done", "", {"mean/model.pt": b"a model"}, (2, 0.5)


class Hashable(dict[str, bytes]):
    __hash__ = object.__hash__  # type: ignore[assignment]


@pytest.mark.parametrize(("losses", "state"), [(2, "done"), (3, "failed")])
def test_a_cell_whose_node_is_lost_runs_again_and_that_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: int, state: str
) -> None:
    made = planned(seeds=1, keep={"method": ["mean"], "attack": ["none"]})
    cluster, watcher = Cluster(losses), Notes(Progress(made, dict.fromkeys(made.runs, "missing")))
    for name in ("remote", "cluster_resources", "wait", "get"):
        monkeypatch.setattr(ray, name, getattr(cluster, name))
    # A job holds a dict and so has no hash, which a task of Ray does.
    monkeypatch.setattr(ray_jobs.Job, "__hash__", lambda job: hash(job.identity))
    monkeypatch.setattr(ray_jobs, "read_files", lambda folder: Hashable())
    jobs = missing_jobs(made, tmp_path, device="cpu")
    resources = Resources(cores=2, memory_mb=500, gpus=0.5)
    ray_jobs._Tasks(jobs, resources, watcher).work()
    assert list(watcher.progress.states.values()) == [state]
    assert len(watcher.notes) == min(losses, 2)
    assert "its node or process was lost (WorkerCrashedError); it runs again" in watcher.notes[0]
    assert cluster.asked == {"num_cpus": 2, "num_gpus": 0.5, "memory": 500_000_000, "max_retries": 0}
    assert (Path(jobs[0].path) / "mean" / "model.pt").exists() is (state == "done")


def test_a_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    write_files(tmp_path / "a", {"config.toml": b"1", "mean/model.pt": b"2", "mean/rounds.jsonl": b"3"})
    (tmp_path / "a" / ".half.tmp").write_bytes(b"4")
    files = read_files(tmp_path / "a")
    assert files == {"config.toml": b"1", "mean/model.pt": b"2", "mean/rounds.jsonl": b"3"}
    assert read_files(tmp_path / "nowhere") == {}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cells_on_a_local_ray_have_the_bits_of_cells_here(tmp_path: Path) -> None:
    made = planned(seeds=1, keep={"method": ["mean"]})
    jobs = missing_jobs(made, tmp_path / "ray", device="cpu")
    progress = Progress(made, dict.fromkeys(made.runs, "missing"))
    run_on_ray(jobs, "", Resources(), Silent(progress))
    assert set(progress.states.values()) == {"done"}
    run(made, tmp_path / "here", 1, 1)
    assert contents(made, tmp_path / "ray") == contents(made, tmp_path / "here")
    with pytest.raises(UserError, match="no node of the cluster has 4096 CPU"):
        run_on_ray(jobs, "", Resources(cores=4096), Silent(progress))
