"""Runs of small scenarios, from the configuration to the files on disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedplat import engines, experiment
from fedplat.config import load
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display


class Runs:
    """Runs a scenario with changes, on the CPU; ``options`` are further ones of ``experiment.run``."""

    def __init__(self, scenario: Mapping[str, Any], **options: Any) -> None:
        self._scenario, self._options = scenario, options

    def __call__(
        self,
        folder: Path,
        observer: Display | None = None,
        engine: engines.Engine | None = None,
        resume: bool = False,
        **changes: Any,
    ) -> RunFolder:
        config = load({**self._scenario, **changes}, f"{self._scenario['name']}.toml")
        opened = RunFolder.open(folder, config, resume)
        experiment.run(
            opened.config,
            opened,
            engine=engine or engines.LocalEngine(1),
            device="cpu",
            observer=observer or Display(),
            **self._options,
        )
        return opened


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lines of ``rounds.jsonl`` without what two runs may differ in."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
