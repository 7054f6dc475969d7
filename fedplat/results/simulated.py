"""What a run on emulated devices came to: simulated seconds, joules, and what the devices did not deliver.

Simulated time is what the rounds would have taken on the devices of the schedule. It has nothing to do with
the wall time of the run, which is under the key ``seconds``: the two are never added or compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .values import finite, mean, running

Record = dict[str, Any]
Row = Mapping[str, Any]

TARGETS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.97)
"""The accuracies of which one, the same for all strategies, is named in the tables."""
COUNTS = ("asked", "delivered", "late", "out_of_memory", "dropped", "away", "violations")
MISSED = {"late": "late", "out-of-memory": "out of memory", "dropped": "dropped", "away": "away"}
"""The outcomes in which a device does not deliver, as the client records and as people call them."""

_TOTALS = ("seconds", "joules", "joules_compute", "joules_transfer")
_MEANS = ("available", "memory_used", "down_used", "up_used")
_TOLD = re.compile(rf"({'|'.join(MISSED.values())})\b")
_WORST = 10


@dataclass(frozen=True)
class Progress:
    """How far a run is after each record: simulated seconds, joules and bytes from the start, and accuracy.

    A cost is None from the first round on in which it is not finite; an accuracy where there was no
    evaluation.
    """

    rounds: list[int]
    seconds: list[float | None]
    joules: list[float | None]
    bytes: list[float | None]
    accuracy: list[float | None]

    @classmethod
    def of(cls, records: Sequence[Row]) -> Progress:
        """Return the sums over ``rounds.jsonl`` records that have the key ``simulated``."""
        return cls(
            [record["round"] for record in records],
            running(record["simulated"].get("seconds") for record in records),
            running(record["simulated"].get("joules") for record in records),
            running(record["bytes_down"] + record["bytes_up"] for record in records),
            [finite(record.get("accuracy")) for record in records],
        )

    def until(self, accuracy: float) -> Record | None:
        """Return round, seconds, joules and bytes at the first evaluation of at least this accuracy.

        >>> Progress([0, 1, 2], [0, 5, 9], [0, 1, 2], [0, 8, 16], [0.1, None, 0.6]).until(0.5)
        {'accuracy': 0.5, 'round': 2, 'seconds': 9, 'joules': 2, 'bytes': 16}
        """
        for index, reached in enumerate(self.accuracy):
            if reached is not None and reached >= accuracy:
                return {
                    "accuracy": accuracy,
                    "round": self.rounds[index],
                    "seconds": self.seconds[index],
                    "joules": self.joules[index],
                    "bytes": self.bytes[index],
                }
        return None


def simulated_summary(records: Iterable[Row]) -> Record:
    """Return one strategy's simulated figures, {} for a run without emulated devices.

    Seconds and joules are totals, None if not finite (a link of no speed never ends); ``per_round_seconds``
    is the mean length of a round; outcomes are summed over clients and rounds; the ``*_used`` are means over
    the rounds of the share used of what the devices had; ``reached`` is the cost of each of
    :data:`TARGETS` that was reached, see :meth:`Progress.until`.
    """
    known = [record for record in records if record.get("simulated")]
    if not known:
        return {}
    rounds = [record["simulated"] for record in known if record["round"] > 0]
    progress = Progress.of(known)
    totals = {key: running([0.0, *(row.get(key) for row in rounds)])[-1] for key in _TOTALS}
    seconds = totals["seconds"]
    return {
        **totals,
        "per_round_seconds": seconds / len(rounds) if rounds and seconds is not None else None,
        **{key: sum(int(row.get(key) or 0) for row in rounds) for key in COUNTS},
        **{key: mean(row.get(key) for row in rounds) for key in _MEANS},
        "reached": [cost for target in TARGETS if (cost := progress.until(target))],
    }


def add_target(strategies: Mapping[str, Record]) -> float | None:
    """Choose the accuracy that strategies are compared at, and add each one's ``to_target``; return it.

    It is the largest of :data:`TARGETS` that all strategies reached, leaving out those that did not even
    reach the smallest; None, and nothing is added, if none did.
    """
    reached: Counter[float] = Counter()
    for row in strategies.values():
        reached.update(cost["accuracy"] for cost in row["simulated"].get("reached", ()))
    if not reached:
        return None
    target = max(reached, key=lambda accuracy: (reached[accuracy], accuracy))
    for row in strategies.values():
        if row["simulated"]:
            costs = [cost for cost in row["simulated"]["reached"] if cost["accuracy"] == target]
            row["simulated"]["to_target"] = costs[0] if costs else None
    return target


def missed(row: Row) -> str | None:
    """Return in words why a device did not deliver, None for a client that failed otherwise or did not.

    >>> missed({"status": "failed", "reason": "late: 132 s of 60 s"})
    'late'
    >>> missed({"status": "failed", "reason": "killed", "device": {"outcome": "out-of-memory"}})
    'out of memory'
    >>> missed({"status": "failed", "reason": "ValueError", "device": {"outcome": "delivered"}})
    """
    if row["status"] != "failed":
        return None
    if (device := row.get("device")) is not None:
        return MISSED.get(device["outcome"])
    told = _TOLD.match((row.get("reason") or "").replace("out-of-memory", "out of memory"))
    return told.group(1) if told else None


def device_clients(rows: Iterable[Row]) -> list[Record]:
    """Return, by client, how often it was asked and with which outcome, from the client records.

    ``why`` says what it was short of: medians over the rounds in which it was late, of what it had spent
    until the server went on, or out of memory. Clients without emulated devices are left out.
    """
    found: dict[int, list[Row]] = {}
    for row in rows:
        if row.get("device"):
            found.setdefault(row["client"], []).append(row["device"])
    clients = []
    for number, devices in sorted(found.items()):
        counts = Counter(device["outcome"] for device in devices)
        clients.append(
            {"client": number, "asked": len(devices), "delivered": counts["delivered"]}
            | {key.replace("-", "_"): counts[key] for key in MISSED}
            | {"why": _why(devices)}
        )
    return clients


def worst(clients: Sequence[Row], most: int = _WORST) -> list[Row]:
    """Return the clients that missed most often, those that never did left out; ties by number."""
    lost = [(misses_of(client), client) for client in clients]
    ranked = sorted(lost, key=lambda item: (-item[0], item[1]["client"]))
    return [client for misses, client in ranked if misses][:most]


def misses_of(client: Row) -> int:
    """Return in how many rounds a client's device did not deliver."""
    return sum(client[key.replace("-", "_")] for key in MISSED)


def _why(devices: Sequence[Row]) -> Record:
    """Return medians: the parts of a late round, and the bytes needed and there when memory was short."""
    why: Record = {}
    if late := [device for device in devices if device["outcome"] == "late"]:
        for key in ("seconds", "seconds_down", "seconds_compute", "seconds_up"):
            values = [value for device in late if (value := finite(device.get(key))) is not None]
            why[key] = median(values) if values else None
    if short := [device for device in devices if device["outcome"] == "out-of-memory"]:
        for key in ("memory_bytes", "memory_budget"):
            why[key] = median(device[key] for device in short)
    return why
