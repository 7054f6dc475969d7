"""Records of runs on emulated devices, written by hand."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedplat.results.folder import RunFolder

from . import client_record, config, round_record

Outcomes = Callable[[int, int], str]

REASONS = {
    "late": "late: {:d} s of 60 s",
    "out-of-memory": "out of memory: 320 of {:d} MB",
    "dropped": "dropped: the device was gone before it sent its reply",
    "away": "away: the device is not there",
    "failed": "ValueError: no data",
}


def simulated(number: int, **changes: Any) -> dict[str, Any]:
    """Return a round's simulated figures: 60 s, 500 J, four asked and three delivered; nought in round 0."""
    on = number > 0
    return {
        "seconds": 60.0 * on,
        "joules": 500.0 * on, "joules_compute": 400.0 * on, "joules_transfer": 100.0 * on,
        "available": 4 * on, "asked": 4 * on, "delivered": 3 * on, "late": 1 * on, "out_of_memory": 0,
        "dropped": 0, "away": 0, "failed": 0, "violations": 1 * on,
        "memory_used": 0.5 if on else None,
        "down_used": 0.25 if on else None, "up_used": 0.75 if on else None,
        **changes,
    }  # fmt: skip


def device_record(number: int, client: int, outcome: str = "delivered") -> dict[str, Any]:
    """Return a client's row; the numbers in the reasons differ from round to round."""
    failed = outcome != "delivered"
    row = client_record(number, client, "failed" if failed else "accepted")
    short = outcome == "out-of-memory"
    return row | {
        "reason": REASONS[outcome].format(100 + number) if failed else "",
        "device": {
            "outcome": outcome, "seconds": 60.0 if failed else 30.0, "seconds_down": 5.0,
            "seconds_compute": 40.0 if failed else 20.0, "seconds_up": 15.0 if failed else 5.0,
            "joules": 100.0,
            "memory_bytes": 320_000_000, "memory_budget": 200_000_000 if short else 900_000_000,
            "bytes_down": 1_000_000, "bytes_up": 1_000_000, "down_bps": 1_600_000, "up_bps": 1_600_000,
        },
    }  # fmt: skip


def make_device_run(
    path: Path, accuracies: Mapping[str, list[float | None]], outcome_of: Outcomes, clients: int = 4
) -> RunFolder:
    """Write a finished run; ``outcome_of(client, round)`` is what became of a client, "" if not asked."""
    changes: dict[str, Any] = {"partition": {"name": "iid", "clients": clients}, "attacks": []}
    changes["rounds"] = len(next(iter(accuracies.values()))) - 1
    folder = RunFolder.open(path, config(strategies=list(accuracies), **changes), resume=True)
    for position, (name, values) in enumerate(accuracies.items()):
        for number, accuracy in enumerate(values):
            asked = [(c, outcome_of(c, number)) for c in range(clients)] if number else []
            rows = [device_record(number, client, outcome) for client, outcome in asked if outcome]
            told = [outcome for _, outcome in asked]
            counts = {key.replace("-", "_"): told.count(key) for key in ("delivered", *REASONS)}
            figures = simulated(number, asked=len(rows), **counts)
            figures["seconds"] *= 1 + position
            record = round_record(number, accuracy, simulated=figures, failed=len(rows) - counts["delivered"])
            folder.log(name).append(record, rows)
        folder.log(name).save_model({})
    return RunFolder.existing(path)
