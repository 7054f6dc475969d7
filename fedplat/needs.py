"""What a run will need at the server, told before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from . import models, registry
from .clients.attacks.collusion import Collusion
from .config import ExperimentConfig
from .experiment import load_data
from .runtime.local import available_cores
from .runtime.waves import wave_bytes
from .strategies.aggregators import RoundPlan
from .strategies.composed import FederatedStrategy
from .strategies.replies import STREAM_ABOVE, rows_per_block
from .strategies.similarity import FLTrust
from .strategies.submodels import layout_of


@dataclass(frozen=True)
class Needs:
    """Memory at the server in bytes, for rounds of so many ``clients``.

    ``updates`` is what one round's updates take together, ``waves`` what they take for the strategies that
    combine them as they come. ``streamed`` has these strategies, each with the bytes it needs on disk, and
    ``kept`` what strategies keep from round to round.
    """

    clients: int
    parameters: int
    updates: int
    waves: int
    streamed: dict[str, int]
    kept: dict[str, int]


def needs_of(config: ExperimentConfig) -> Needs:
    """Return what a run needs; loads the data, from a local copy only, and builds the model.

    Raises UserError if the data is not on this machine.
    """
    local = config.data.model_copy(update={"download": False})
    dataset, parts = load_data(config.model_copy(update={"data": local}))
    build = registry.find("models", config.model.name).load()
    shape, classes = dataset.sample_shape, dataset.num_classes
    with torch.device("meta"):  # names and shapes are enough, and cost nothing to make
        module = models.build(build, shape, classes, config.seed, **config.model.settings())
    layout = layout_of(module)
    clients = config.selection.build().count(len(parts))
    updates = 4 * clients * layout.dim
    plan = RoundPlan(torch.zeros(layout.dim), layout.num_params, 1, clients)
    # Colluders have to see all updates before any is combined.
    in_waves = updates > STREAM_ABOVE and not any(isinstance(a.build(), Collusion) for a in config.attacks)
    streamed, kept = {}, {}
    for name in config.strategies:
        part = config.strategy_part(name)
        target = registry.find("strategies", part.name).load()
        if isinstance(target, type) and issubclass(target, FederatedStrategy):
            extra = {"root": lambda arrays, server_round: arrays} if issubclass(target, FLTrust) else {}
            rule = cast(Any, target)(**part.settings(), **extra).aggregator
            if size := rule.state_bytes(len(parts), layout.num_params):
                kept[name] = size
            if in_waves and not part.before and rule.running(plan) is not None:
                streamed[name] = rule.disk_bytes(clients, layout.dim)
    waves = wave_bytes(layout, rows_per_block(layout), available_cores())
    return Needs(clients, layout.num_params, updates, waves, streamed, kept)


def megabytes(size: int) -> str:
    """Return a number of bytes as text.

    >>> megabytes(51_964_160), megabytes(640)
    ('52.0 MB', '0.6 kB')
    """
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"
