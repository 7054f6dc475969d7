"""``fedplat benchmark signing``: what signing and verifying a client's reply costs, by its size.

Against one pass over the same memory, which is the least that anything could take, and against Flower's own
serialisation of the same arrays, which a deployment pays for every reply anyway.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from fedplat.arrays import FlatArrays
from fedplat.compat import records_from_bytes, records_to_bytes
from fedplat.errors import UserError
from fedplat.rng import generator
from fedplat.security.signatures import Occasion, array_digest, sign, simulation_key, verified

from .common import Report, Section, compared, middle, quiet, take_turns

DIGEST, SIGN, VERIFY = "digest", "sign", "verify"
READ, WRITE, PARSE = "one pass (sum)", "Flower: to bytes", "Flower: from bytes"
COLUMNS = ("what", "MB", "ms", "ms per MB", "x one pass", "x to bytes", "spread")
# A turn is the median of so many calls, or of as many as fit into so many seconds.
_CALLS, _ENOUGH = 20, 0.5
_LAYERS = 10


@dataclass(frozen=True)
class Options:
    """What to measure: replies of so many megabytes (10⁶ bytes) of float32."""

    megabytes: tuple[int, ...] = (1, 10, 100)
    repeats: int = 3
    seed: int = 1


QUICK: dict[str, Any] = {"megabytes": (1, 10), "repeats": 2}


def check(options: Options) -> None:
    """Raise UserError for a size that is no reply's."""
    if wrong := [size for size in options.megabytes if size < 1]:
        raise UserError(f"sizes are whole megabytes, from 1; found {wrong[0]}")


def measure(options: Options, report: Report) -> None:
    """Fill the report, one section for all sizes."""
    quiet()
    report.options = asdict(options)
    rows: list[dict[str, Any]] = []
    try:
        for megabytes in sorted(options.megabytes):
            report.say(f"a reply of {megabytes} MB")
            things = {
                name: functools.partial(_seconds, run)
                for name, run in things_to_do(megabytes * 250_000, options.seed).items()
            }
            rows += rows_of(megabytes, take_turns(things, options.repeats, report.say)[0])
    finally:  # also of a run that is interrupted
        notes = ["processor time of one thread; SHA-256 and Ed25519; sign and verify contain a digest each"]
        report.add(Section("signed replies", COLUMNS, rows, notes))


def things_to_do(parameters: int, seed: int) -> dict[str, Callable[[], Any]]:
    """Return what is timed, on one reply of so many float32 parameters in ten layers."""
    rng = generator(seed, "benchmark-signing", parameters)
    named = {
        str(i): rng.standard_normal(size, np.float32)
        for i, size in enumerate([parameters // _LAYERS] * _LAYERS)
    }
    flat = FlatArrays.copy_of(named)
    metrics = MetricRecord({"num-examples": 100, "loss": 0.5})
    content = RecordDict({"arrays": flat.to_record(), "metrics": metrics})
    occasion, key = Occasion(1, "train", 1, 1, bytes(16)), simulation_key(seed, 0)
    # What came over a network holds Flower's bytes, what came through shared memory does not.
    wire = records_to_bytes(sign(content, occasion, key))
    received = records_from_bytes(wire)
    registered = {key.public_key().public_bytes_raw()}

    def to_bytes() -> bytes:
        arrays = ArrayRecord(list(named.values()))
        return records_to_bytes(RecordDict({"arrays": arrays, "metrics": metrics}))

    def from_bytes() -> list[Any]:
        return records_from_bytes(wire)["arrays"].to_numpy_ndarrays()  # type: ignore[union-attr]

    return {
        READ: lambda: float(flat.vector.sum()),
        DIGEST: lambda: array_digest(content),
        SIGN: lambda: sign(content, occasion, key),
        VERIFY: lambda: verified(received, occasion, registered),
        WRITE: to_bytes,
        PARSE: from_bytes,
    }


def _seconds(run: Callable[[], Any]) -> float:
    run()
    times: list[float] = []
    while not times or (sum(times) < _ENOUGH and len(times) < _CALLS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return middle(times)


def rows_of(megabytes: int, results: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return the rows of one size."""
    figures, written = compared(results, READ), compared(results, WRITE)
    rows = []
    for name, f in figures.items():
        ms = 1e3 * f["seconds"]
        values = (name, megabytes, ms, ms / megabytes, f["ratio"], written[name]["ratio"], f["spread"])
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows
