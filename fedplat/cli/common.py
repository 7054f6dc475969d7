"""What several commands share: options, consoles, and turning a scenario and options into a configuration."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from ..config import ExperimentConfig

USER_ERROR, INTERRUPTED, TERMINATED = 2, 130, 143

# What arguments are is said in the commands' docstrings: Typer 0.20 loses their help under Click 8.5.
Scenario = Annotated[str, typer.Argument(metavar="SCENARIO", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value, e.g. training.lr=0.05. May be repeated.",
        show_default=False,
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, help="The seed of everything random.", show_default=False)
]


def console() -> Console:
    """Return the console for results; where there is no terminal it never breaks or cuts a line."""
    from rich.console import Console

    plain = not sys.stdout.isatty()
    return Console(
        markup=False, highlight=False, emoji=False, width=10_000 if plain else None, soft_wrap=plain
    )


def load_config(
    scenario: str, overrides: Sequence[str] | None, seed: int | None, strategies: Sequence[str] = ()
) -> ExperimentConfig:
    """Return the configuration of a scenario with the command line's changes; raises UserError."""
    from ..config import load, strategy_names
    from ..scenarios import apply_overrides, read_scenario

    raw, where = read_scenario(scenario)
    names = strategy_names(strategies)
    if strategies and not names:
        raise UserError("--strategy: expected names, for example --strategy mean,median")
    if names and isinstance(raw.get("strategy"), dict):
        # What a scenario says about strategies that are not run is of no use; what --set says must fit.
        raw["strategy"] = {name: table for name, table in raw["strategy"].items() if name in names}
    apply_overrides(raw, overrides or ())
    if seed is not None:
        raw["seed"] = seed
    if names:
        raw["strategies"] = names
    return load(raw, where)


def client_count(config: ExperimentConfig) -> int:
    """Return how many clients there are; only a natural partition needs its data to say so."""
    if config.partition.clients:
        return config.partition.clients
    from ..experiment import load_data

    return len(load_data(config)[1])


def class_counts(config: ExperimentConfig) -> np.ndarray:
    """Return how many samples of each class every client has, (clients, classes); UserError for text."""
    from ..datasets.labels import class_counts as counts_of
    from ..experiment import load_data

    dataset, parts = load_data(config)
    if dataset.is_text:
        raise UserError(f"availability {config.availability.name} depends on classes, which text has none of")
    return counts_of(dataset.train.y, parts, dataset.num_classes)
