"""Run folders written by hand, so that what is read from them can be checked."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedplat.config import ExperimentConfig, load
from fedplat.results.folder import RunFolder

SCENARIO: dict[str, Any] = {
    "name": "tiny",
    "description": "Two strategies on digits",
    "rounds": 4,
    "strategies": ["mean", "median"],
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 4},
    "model": {"name": "softmax"},
    "attacks": [{"name": "sign-flip", "clients": [3]}],
}


def config(**changes: Any) -> ExperimentConfig:
    return load({**SCENARIO, **changes}, "tiny")


def round_record(
    number: int, accuracy: float | None, loss: float | None = 1.0, **changes: Any
) -> dict[str, Any]:
    return {
        "round": number,
        "accuracy": accuracy,
        "loss": loss if accuracy is not None else None,
        "per_class_accuracy": None if accuracy is None else [accuracy, accuracy / 2, None],
        "attack": {"attackers": 1, "selected": 1, "weight": 0.25} if number else {},
        "train": {"loss": 1.0},
        "accepted": 4 if number else 0,
        "refused": 0,
        "failed": 0,
        "bytes_down": 1_000_000 if number else 0,
        "bytes_up": 2_000_000 if number else 0,
        "seconds": {"train": 2.0, "aggregate": 0.5, "evaluate": 0.25} if number else {"evaluate": 0.25},
        **changes,
    }


def client_record(number: int, client: int, status: str = "accepted", reason: str = "") -> dict[str, Any]:
    return {
        "round": number, "client": client, "status": status, "reason": reason, "samples": 10,
        "weight": 0.25, "verdict": "", "update_norm": 1.0,
        "truth": "malicious-untargeted" if client == 3 else "honest",
        "attack": "sign-flip" if client == 3 else "",
    }  # fmt: skip


def make_run(
    path: Path,
    accuracies: Mapping[str, list[float | None]],
    *,
    clients: Mapping[str, list[dict[str, Any]]] | None = None,
    loss: float = 1.0,
    finished: bool = True,
    **changes: Any,
) -> RunFolder:
    """Write a run with these accuracies by round, beginning with the initial model's."""
    folder = RunFolder.open(path, config(strategies=list(accuracies), **changes), resume=True)
    for name, values in accuracies.items():
        log = folder.log(name)
        for number, accuracy in enumerate(values):
            rows = [row for row in (clients or {}).get(name, []) if row["round"] == number]
            counts = {s: sum(row["status"] == s for row in rows) for s in ("refused", "failed")}
            log.append(round_record(number, accuracy, loss if number else 2.0, **counts), rows)
        if finished:
            log.save_model({})
        elif values:
            log.save_checkpoint({"round": len(values) - 1})
    return RunFolder.existing(path)


NAN = math.nan
