"""Who attacks in an experiment, and how."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .clients.attacks import Attack, Scene, Schedule, Wanted, choose_attackers
from .clients.attacks.collusion import Collusion
from .config import ExperimentConfig
from .datasets.base import Dataset
from .errors import UserError


def attacks_of(
    config: ExperimentConfig, dataset: Dataset, clients: int, counts: NDArray[np.int64] | None
) -> dict[int, Attack]:
    """Return how each attacking client behaves, by partition.

    ``counts`` (clients, classes) are their samples, None for text. Raises UserError for attacks that cannot
    be made on such a run.
    """
    own = [(index, part) for index, part in enumerate(config.attacks) if part.edges is None]
    requests = [Wanted(a.fraction, a.count, a.clients, a.richest_in) for _, a in own]
    chosen = choose_attackers(clients, requests, config.seed, counts)
    placed = attacks_in(config, dataset)
    found: dict[int, Attack] = {}
    for (index, part), ids in zip(own, chosen, strict=True):
        if isinstance(placed[index], Collusion) and config.aggregation.secure_groups:
            raise UserError(
                f"attacks.{index}: '{part.name}' is made from what honest clients sent, which "
                f"aggregation.secure_groups hides from everyone; leave one of them out"
            )
        found |= dict.fromkeys(ids, placed[index])
    return found


def attacks_in(config: ExperimentConfig, dataset: Dataset) -> list[Attack]:
    """Return the attacks of a scenario, which know the run and have a label, whoever carries them out."""
    scale = dataset.mean or (0.0,), dataset.std or (1.0,)
    scene = Scene(config.seed, dataset.num_classes, *scale, dataset.sample_shape)
    names = [part.name for part in config.attacks]
    found = []
    for index, part in enumerate(config.attacks):
        attack: Attack = part.build()
        label = (
            part.name if names.count(part.name) == 1 else f"{part.name}-{names[:index].count(part.name) + 1}"
        )
        found.append(attack.placed(scene, Schedule(part.start, part.on, part.off), label))
    return found
