"""What all clients of an experiment share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedplat.datasets.base import Dataset, Split
from fedplat.models.cutting import CutPlan, plan_of
from fedplat.training_config import LocalTraining

from .attacks import Attack

_MOST_RESIDENT_BYTES = 1 << 30


@dataclass(frozen=True)
class ClientTask:
    """What all clients of an experiment share: data, who holds which samples, model, training, who attacks.

    ``parts[i]`` are the indices of the training samples of partition i; ``attacks`` is keyed by partition.
    Without ``keep_samples``, a client's are prepared anew each time: a device has those of one client only.
    ``held_out[i]`` are indices into the training set, too: what client i keeps for tests and never trains on;
    none for all clients if empty.
    """

    dataset: Dataset
    parts: Sequence[NDArray[np.int64]]
    build_model: Callable[[], nn.Module]
    training: LocalTraining
    seed: int
    attacks: Mapping[int, Attack] = field(default_factory=dict)
    device: str = "cpu"
    keep_samples: bool = True
    held_out: Sequence[NDArray[np.int64]] = ()

    @cached_property
    def resident(self) -> tuple[Tensor, Tensor, list[NDArray[np.int64]]] | None:
        """The clients' samples and labels, prepared once, and the rows that are each client's.

        None if they are not kept, or would take more than 1 GiB. Processes forked after the first use share
        the memory.
        """
        if not self.keep_samples:
            return None
        rows = np.unique(np.concatenate([np.asarray(part, np.int64) for part in self.parts]))
        if len(rows) * int(np.prod(self.dataset.sample_shape)) * 4 > _MOST_RESIDENT_BYTES:
            return None
        return *self._prepared(rows), [np.searchsorted(rows, part) for part in self.parts]

    @cached_property
    def shapes(self) -> nn.Module:
        """The model on torch's meta device: shapes without numbers. Not to be changed."""
        with torch.device("meta"):
            return self.build_model()

    @cached_property
    def plan(self) -> CutPlan:
        """What can be left out of the model; UserError if that is not known."""
        return plan_of(self.shapes, self.dataset.sample_shape)

    def samples(self, partition: int) -> tuple[Tensor, Tensor]:
        """Return a client's prepared samples and labels."""
        if self.resident is None:
            return self._prepared(self.parts[partition])
        x, y, rows = self.resident
        own = torch.from_numpy(rows[partition]).to(self.device)
        return x.index_select(0, own), y.index_select(0, own)

    def own_tests(self, partition: int) -> tuple[Tensor, Tensor]:
        """Return a client's prepared test samples and labels; its training samples if none are held out."""
        if not self.held_out:
            return self.samples(partition)
        return self._prepared(self.held_out[partition])

    def for_server(self) -> ClientTask:
        """Return the task with a training set that lacks what clients hold out, to draw samples from.

        Its rows are others than those of ``parts``, which stay as they are.
        """
        if not self.held_out:
            return self
        free = np.ones(len(self.dataset.train), np.bool_)
        free[np.concatenate([np.asarray(part, np.int64) for part in self.held_out])] = False
        rows = np.flatnonzero(free)
        train = Split(self.dataset.train.x[rows], self.dataset.train.y[rows])
        dataset = replace(self.dataset, train=train, groups=None, group_names=(), columns={})
        return replace(self, dataset=dataset)

    def sample(self) -> Tensor:
        """Return some sample as the model takes it, (1, ...) of zeros: what its layers do with it is all."""
        kind = torch.int64 if self.dataset.is_text else torch.float32
        return torch.zeros((1, *self.dataset.sample_shape), dtype=kind, device=self.device)

    def attack_of(self, partition: int, server_round: int) -> Attack:
        """Return how a client behaves in a round; an attack that does nothing for an honest one."""
        attack = self.attacks.get(partition)
        return attack if attack and attack.schedule.active(server_round) else Attack()

    def _prepared(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        x = self.dataset.prepare(self.dataset.train.x[rows])
        y = torch.from_numpy(np.ascontiguousarray(self.dataset.train.y[rows]))
        return x.to(self.device), y.to(self.device)

    def __getstate__(self) -> dict[str, Any]:
        # Another process prepares its own: the stored samples are smaller.
        made = ("resident", "shapes", "plan")
        return {name: value for name, value in self.__dict__.items() if name not in made}
