"""Runs a finished cell once more, elsewhere, and compares bits."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from .cells import Cell, Plan, cell_path
from .on_disk import DONE, state_of, strategy_log
from .one_cell import Told, prepare_process, run_cell

TIMES = frozenset({"seconds", "decision_seconds"})
"""Keys of ``rounds.jsonl`` that hold wall time, which no two runs share; ``simulated.seconds`` is not one."""


def choose(plan: Plan, out: Path, seed: int | None = None) -> Cell:
    """Return one of the finished runs, at random; raises UserError if there is none."""
    finished = [cell for i, cell in plan.runs.items() if state_of(cell_path(out, i), cell) == DONE]
    if not finished:
        raise UserError(f"{out} has no finished cell of this table to check")
    return random.Random(seed).choice(finished)


def check(cell: Cell, out: Path, cores: int, device: str, told: Told) -> list[str]:
    """Run a cell again in a temporary folder and return in what it differs, nothing if it does not."""
    prepare_process()
    path = cell_path(out, cell.identity)
    with tempfile.TemporaryDirectory(prefix="fedplat-check-") as place:
        again = run_cell(cell.config, Path(place) / "run", cores, device, told)
        return differences(strategy_log(path, cell.strategy).path, again.log(cell.strategy).path)


def differences(kept: Path, again: Path) -> list[str]:
    """Compare two strategies' folders: every bit of the model, every record but wall time."""
    found = _model_differences(kept / "model.pt", again / "model.pt")
    for name in ("rounds.jsonl", "clients.jsonl"):
        found += _record_differences(name, _records(kept / name), _records(again / name))
    return found


def _model_differences(kept: Path, again: Path) -> list[str]:
    import torch

    try:
        here = torch.load(kept, map_location="cpu", weights_only=True)
    except Exception as error:
        return [f"model.pt: cannot be read: {error}"]
    there = torch.load(again, map_location="cpu", weights_only=True)
    if list(here) != list(there):
        return ["model.pt: other arrays"]
    return [
        f"model.pt: {name}"
        for name, tensor in here.items()
        if (tensor.dtype, tensor.shape) != (there[name].dtype, there[name].shape)
        or tensor.numpy().tobytes() != there[name].numpy().tobytes()
    ]


def _records(path: Path) -> list[Any]:
    try:
        return [without_times(json.loads(line)) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        return [f"cannot be read: {error}"]


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the wall times.

    >>> without_times({"round": 1, "seconds": {"train": 0.5}, "simulated": {"seconds": 9.0}})
    {'round': 1, 'simulated': {'seconds': 9.0}}
    """
    kept = {key: value for key, value in record.items() if key not in TIMES}
    for key, value in kept.items():
        if isinstance(value, dict) and "decision_seconds" in value:
            kept[key] = {name: item for name, item in value.items() if name != "decision_seconds"}
    return kept


def _record_differences(name: str, here: Sequence[Any], there: Sequence[Any]) -> list[str]:
    if len(here) != len(there):
        return [f"{name}: {len(here)} lines, and now {len(there)}"]
    for one, other in zip(here, there, strict=True):
        if one != other:
            if not isinstance(one, dict):
                return [f"{name}: {one}"]
            keys = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
            return [f"{name}: round {one.get('round')}, first in {', '.join(keys)}"]
    return []
