"""Runs the cells of a table as tasks of a Ray cluster, and brings their folders back."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..results.folder import write_atomically
from ..runtime.local import available_cores
from .on_disk import FAILED, write_failure
from .one_cell import Job, prepare_process, run_job
from .runner import Watcher
from .spec import Resources

_POLL_SECONDS = 1.0
_MOST_LOSSES = 3

Files = dict[str, bytes]
"""A folder: contents by relative path."""


def run_on_ray(jobs: Sequence[Job], address: str, resources: Resources, watcher: Watcher) -> None:
    """Run jobs as Ray tasks that declare their cores, memory and GPUs.

    Without an ``address`` a Ray of this machine's own is started and stopped again. A task gets what its
    folder holds, so that a cell begun here goes on there, and sends its folder back. A cell whose node is
    lost runs again, which is told; after three losses it has failed. Raises UserError if there is no
    cluster, or none of its nodes is large enough.
    """
    import ray

    try:
        ray.init(
            address=address or None,
            num_cpus=None if address else available_cores(),
            include_dashboard=None if address else False,
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        raise UserError(f"--jobs ray:{address}: {error}") from None
    tasks = _Tasks(jobs, resources, watcher)
    try:
        _check_room(resources)
        tasks.work()
    finally:
        tasks.cancel()
        ray.shutdown()


def _check_room(resources: Resources) -> None:
    """Raise UserError unless some node has what a cell asks for; Ray would wait for one for ever."""
    import ray

    wanted = {
        "CPU": resources.cores,
        "GPU": resources.gpus,
        "memory": resources.memory_mb * 1e6,
    }
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(key, 0) >= amount for key, amount in wanted.items()) for node in nodes):
        shown = ", ".join(f"{amount:g} {key}" for key, amount in wanted.items() if amount)
        raise UserError(
            f"--jobs ray: no node of the cluster has {shown}, which a cell asks for ([resources])"
        )


class _Tasks:
    def __init__(self, jobs: Sequence[Job], resources: Resources, watcher: Watcher) -> None:
        import ray

        self._ray: Any = ray
        self._waiting = deque(jobs)
        self._resources = resources
        self._watcher = watcher
        self._running: dict[Any, Job] = {}
        self._losses: dict[str, int] = {}
        self._remote = ray.remote(ray_cell).options(
            num_cpus=resources.cores,
            num_gpus=resources.gpus,
            memory=resources.memory_mb * 1_000_000 or None,
            # A loss is handled here, where it can be told; no failure is tried again.
            max_retries=0,
        )

    def work(self) -> None:
        """Submit as many tasks as the cluster has cores for, until all are done."""
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._room():
                self._submit(self._waiting.popleft())
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_POLL_SECONDS)
            for task in ready:
                self._finish(task, self._running.pop(task))
            self._watcher.tick()

    def cancel(self) -> None:
        """Give up what is still running."""
        for task in self._running:
            with suppress(Exception):
                self._ray.cancel(task, force=True)

    def _room(self) -> int:
        total = self._ray.cluster_resources()
        limits = [total.get("CPU", 0) / self._resources.cores]
        if self._resources.gpus:
            limits.append(total.get("GPU", 0) / self._resources.gpus)
        return max(1, int(min(limits)))

    def _submit(self, job: Job) -> None:
        task = self._remote.remote(replace(job, cores=self._resources.cores), read_files(Path(job.path)))
        self._running[task] = job
        self._watcher.start(job.identity)

    def _finish(self, task: Any, job: Job) -> None:
        try:
            state, reason, files, last = self._ray.get(task)
        except self._ray.exceptions.RayTaskError as error:
            # run_job catches what a cell raises; this came from around it, for example from unpickling.
            self._fail(job, f"{type(error.cause).__name__}: {error.cause}")
        except self._ray.exceptions.RayError as error:
            self._lost(job, type(error).__name__)
        else:
            write_files(Path(job.path), files)
            self._watcher.round(job.identity, *last)
            self._watcher.end(job.identity, state, reason)

    def _lost(self, job: Job, how: str) -> None:
        losses = self._losses[job.identity] = self._losses.get(job.identity, 0) + 1
        if losses >= _MOST_LOSSES:
            self._fail(job, f"its node or process was lost {losses} times ({how})")
            return
        self._watcher.note(f"{job.label}: its node or process was lost ({how}); it runs again")
        self._waiting.appendleft(job)

    def _fail(self, job: Job, reason: str) -> None:
        write_failure(Path(job.path), FAILED, reason)
        self._watcher.end(job.identity, FAILED, reason)


def ray_cell(job: Job, files: Files) -> tuple[str, str, Files, tuple[int, float | None]]:
    """Run a cell on whatever node this is; return its state, reason, folder, and last round and accuracy."""
    prepare_process()
    last: tuple[int, float | None] = 0, None

    def told(number: int, accuracy: float | None) -> None:
        nonlocal last
        last = number, last[1] if accuracy is None else accuracy

    with tempfile.TemporaryDirectory(prefix="fedplat-cell-") as place:
        path = Path(place) / "run"
        write_files(path, files)
        state, reason = run_job(replace(job, path=str(path)), told)
        return state, reason, read_files(path), last


def read_files(folder: Path) -> Files:
    """Return a folder's files; half-written ones, whose names begin with a dot, are left out."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def write_files(folder: Path, files: Files) -> None:
    """Write files into a folder, each in one step, the model last: it says that the run is finished."""
    for name in sorted(files, key=lambda name: name.endswith("model.pt")):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, files[name])
