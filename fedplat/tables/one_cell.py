"""One cell's run, in whatever process it is called: the same bits wherever and beside whatever it runs."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ExperimentConfig, load
from ..errors import UserError
from ..results.progress import Display
from .on_disk import FAILED, REFUSED, forget_failure, write_failure

if TYPE_CHECKING:
    from ..results.folder import RunFolder

Told = Callable[[int, float | None], object]
"""Is told after every round: its number, and the accuracy if it was measured."""


@dataclass(frozen=True)
class Job:
    """A run as plain values, to be sent to another process: folder, configuration, label, cores, device."""

    identity: str
    label: str
    path: str
    config: Mapping[str, Any]
    cores: int = 1
    device: str = "auto"


class Teller(Display):
    """Passes the rounds of a run on."""

    def __init__(self, told: Told) -> None:
        self._told = told

    def begin(self, strategy: str, done: int, total: int) -> None:
        """Tell where the run goes on."""
        self._told(done, None)

    def round(self, strategy: str, record: Mapping[str, Any]) -> None:
        """Tell that a round is over."""
        self._told(record["round"], record.get("accuracy"))


def prepare_process() -> None:
    """Give this process one thread for arithmetic.

    Sums over several threads may differ in their last digits, so how many there are must not depend on how
    many cells run at once; a cell's cores are for its clients.
    """
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"
    import torch

    torch.set_num_threads(1)


def run_job(job: Job, told: Told) -> tuple[str, str]:
    """Run a cell, from its checkpoint if it has one, and return its state and, if it failed, the reason.

    A failure is written into the folder. Ctrl-C, and whatever else is no Exception, passes through.
    """
    path = Path(job.path)
    forget_failure(path)
    try:
        run_cell(load(job.config, job.label), path, job.cores, job.device, told)
    except Exception as error:
        refused = isinstance(error, UserError) and _cannot_work(error)
        state = REFUSED if refused else FAILED
        reason = str(error) if isinstance(error, UserError) else _short(error)
        write_failure(path, state, reason, "" if refused else traceback.format_exc())
        return state, reason
    return "done", ""


def run_cell(config: ExperimentConfig, path: Path, cores: int, device: str, told: Told) -> RunFolder:
    """Run a configuration with one strategy in a folder, unless it is there already."""
    from .. import engines, experiment
    from ..results.folder import RunFolder

    logging.getLogger("flwr").setLevel(logging.WARNING)
    device = experiment.resolve_device(device)
    folder = RunFolder.open(path, config, resume=True)
    if not folder.finished:
        experiment.run(
            config,
            folder,
            engine=engines.of("local", workers=cores, device=device),
            device=device,
            observer=Teller(told),
            group_size=_group_size(config) if device == "cpu" else None,
        )
    return folder


def _group_size(config: ExperimentConfig) -> int:
    """Return how many clients to train at once: what changes no bits, whatever a trial would measure here."""
    from .. import experiment
    from ..clients.stacked.execution import usual_execution

    task = experiment.build_task(config, "cpu")
    return usual_execution(task.build_model, task.training, task.sample()).group


def _cannot_work(error: UserError) -> bool:
    from ..strategies.aggregators.base import InfeasibleError

    return isinstance(error, InfeasibleError)


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
