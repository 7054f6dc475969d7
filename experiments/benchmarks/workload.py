"""The work that every engine does: the same model, samples, batches and starting point."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedplat.clients.task import ClientTask
from fedplat.clients.training import batches
from fedplat.config import load
from fedplat.errors import UserError
from fedplat.experiment import Situation, build_situation
from fedplat.rng import generator

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Workload:
    """One cell of the table: ``samples`` is the most a client trains on per round, in one epoch of SGD."""

    model: str
    clients: int
    batch: int
    samples: int
    data: str = "mnist"
    seed: int = 1
    device: str = "cpu"

    def situation(self) -> Situation:
        """Load the data and build the clients; the same in every process. Kept, for engines to share."""
        return _situation(self)

    @property
    def task(self) -> ClientTask:
        """The clients' task."""
        return self.situation().task

    def order(self, partition: int, server_round: int) -> torch.Tensor:
        """Return the order in which a client sees its samples in a round: that of fedplat's own clients."""
        rng = generator(self.seed, "batches", partition, server_round)
        plan = batches(len(self.task.parts[partition]), self.task.training, rng)
        return torch.from_numpy(np.concatenate(plan))

    def prepared(self, partition: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a client's samples, ready for the model; prepared once and kept."""
        return _prepared(self, partition)


@functools.lru_cache(maxsize=2)
def _situation(work: Workload) -> Situation:
    config = {
        "name": "benchmark",
        "rounds": 1,
        "seed": work.seed,
        "data": {"name": work.data, "download": False},
        "partition": {"name": "iid", "clients": work.clients},
        "model": {"name": work.model},
        "training": {"batch_size": work.batch, "lr": 0.05},
    }
    situation = build_situation(load(config, "benchmark"), work.device)
    parts = [part[: work.samples] for part in situation.task.parts]
    return replace(situation, task=replace(situation.task, parts=parts))


@functools.lru_cache(maxsize=1)
def _store(work: Workload) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    return {}


def _prepared(work: Workload, partition: int) -> tuple[torch.Tensor, torch.Tensor]:
    known = _store(work)
    if partition not in known:
        known[partition] = work.task.samples(partition)
    return known[partition]


def data_here(seed: int) -> tuple[str, str]:
    """Return the data set to use, and a note if it is not MNIST."""
    try:
        Workload("softmax", 1, 10, 10, "mnist", seed).situation()
    except UserError:
        return "digits", "MNIST is not on this disk (FEDPLAT_DATA names its folder): scikit-learn's digits"
    return "mnist", ""


def vector_of(named: Mapping[str, Any]) -> Vector:
    """Return named arrays, in the order of their names, as one vector (d,)."""
    parts = [np.asarray(named[name], np.float32).ravel() for name in sorted(named)]
    return np.concatenate(parts)


def before_forks() -> None:
    """Do once what every child would do again, and nothing that a fork cannot stand."""
    torch.set_num_threads(1)  # see the children's module
    # The first optimiser of a process imports PyTorch's compiler, which takes seconds.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])


@dataclass
class Turn:
    """One turn of an engine: ``seconds`` of every round, and the global ``model`` (d,) after the first.

    ``arithmetic`` is the part of ``seconds`` spent training, where the engine can tell: if several processes
    train side by side, their time divided by their number.
    """

    seconds: list[float] = field(default_factory=list)
    arithmetic: list[float] = field(default_factory=list)
    model: Vector | None = None
