"""What a run will need at the server, told before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from . import models, registry
from .config import ExperimentConfig
from .experiment import load_data
from .models.flat import FlatModel
from .strategies.composed import FederatedStrategy
from .strategies.similarity import FLTrust


@dataclass(frozen=True)
class Needs:
    """Memory at the server in bytes: one round's updates, and what each strategy keeps between rounds."""

    clients: int
    parameters: int
    updates: int
    kept: dict[str, int]


def needs_of(config: ExperimentConfig) -> Needs:
    """Return what a run needs; loads the data, from a local copy only, and builds the model.

    Raises UserError if the data is not on this machine.
    """
    local = config.data.model_copy(update={"download": False})
    dataset, parts = load_data(config.model_copy(update={"data": local}))
    build = registry.find("models", config.model.name).load()
    shape, classes = dataset.sample_shape, dataset.num_classes
    module = models.build(build, shape, classes, config.seed, **config.model.settings())
    layout = FlatModel(module).layout
    kept = {}
    for name in config.strategies:
        part = config.strategy_part(name)
        target = registry.find("strategies", part.name).load()
        if isinstance(target, type) and issubclass(target, FederatedStrategy):
            extra = {"root": lambda arrays, server_round: arrays} if issubclass(target, FLTrust) else {}
            rule = cast(Any, target)(**part.settings(), **extra).aggregator
            if size := rule.state_bytes(len(parts), layout.num_params):
                kept[name] = size
    return Needs(len(parts), layout.num_params, 4 * len(parts) * layout.dim, kept)


def megabytes(size: int) -> str:
    """Return a number of bytes as text.

    >>> megabytes(51_964_160), megabytes(640)
    ('52.0 MB', '0.6 kB')
    """
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
