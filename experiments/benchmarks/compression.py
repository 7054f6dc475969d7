"""``fedplat benchmark compression``: how small updates become, and what that costs, by compressor and size.

Bytes are those of the arrays that a reply carries, held against four per parameter. Seconds are processor
time of one thread, also as a multiple of one pass over the same memory.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedplat.arrays import FlatArrays
from fedplat.compression import QSGD, Compressor, HalfPrecision, Sparse, TopK
from fedplat.compression.envelope import decoded, encoded
from fedplat.errors import UserError
from fedplat.rng import generator

from .common import Report, Section, middle, quiet, take_turns

COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "fp16": HalfPrecision,
    "bf16": functools.partial(HalfPrecision, format="bf16"),
    "top-k 0.1 %": functools.partial(TopK, fraction=0.001),
    "top-k 1 %": functools.partial(TopK, fraction=0.01),
    "top-k 1 %, float16": functools.partial(TopK, fraction=0.01, values="float16"),
    "top-k 10 %": functools.partial(TopK, fraction=0.1),
    "qsgd 2 bits": functools.partial(QSGD, levels=1),
    "qsgd 4 bits": QSGD,
    "qsgd 8 bits": functools.partial(QSGD, levels=127),
    "sparse, 90 % zeros": Sparse,
}
READ = "one pass (sum)"
COLUMNS = ("what", "MB", "bytes", "smaller", "encode ms/MB", "decode ms/MB", "encode/pass", "relative error")
# A turn is the median of so many calls, or of as many as fit into so many seconds.
_CALLS, _ENOUGH = 10, 0.3
_LAYERS = 10


@dataclass(frozen=True)
class Options:
    """What to measure: updates of so many megabytes (10⁶ bytes) of float32."""

    megabytes: tuple[int, ...] = (1, 10, 100)
    repeats: int = 3
    seed: int = 1


QUICK: dict[str, Any] = {"megabytes": (1, 10), "repeats": 2}


def check(options: Options) -> None:
    """Raise UserError for a size that is no update's."""
    if wrong := [size for size in options.megabytes if size < 1]:
        raise UserError(f"sizes are whole megabytes, from 1; found {wrong[0]}")


def measure(options: Options, report: Report) -> None:
    """Fill the report, one section for all sizes."""
    quiet()
    report.options = asdict(options)
    rows: list[dict[str, Any]] = []
    try:
        for megabytes in sorted(options.megabytes):
            report.say(f"an update of {megabytes} MB")
            rows += rows_of(megabytes, options, report.say)
    finally:  # also of a run that is interrupted
        notes = [
            "processor time of one thread, per 10⁶ bytes of float32 before compression",
            "updates are drawn from a normal distribution; the error is the length of what is lost, relative",
        ]
        report.add(Section("compressed updates", COLUMNS, rows, notes))


def rows_of(megabytes: int, options: Options, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Return the rows of one size."""
    cases = {name: Case.of(build(), megabytes * 250_000, options.seed) for name, build in COMPRESSORS.items()}
    flat = next(iter(cases.values())).model.vector
    things = {READ: functools.partial(_seconds, lambda: float(flat.sum()))}
    for name, case in cases.items():
        things[f"encode {name}"] = functools.partial(_seconds, case.encode)
        things[f"decode {name}"] = functools.partial(_seconds, case.decode)
    seconds = {name: middle(found) for name, found in take_turns(things, options.repeats, say)[0].items()}
    return [
        {
            "what": name,
            "MB": megabytes,
            "bytes": case.nbytes,
            "smaller": case.model.vector.nbytes / case.nbytes,
            "encode ms/MB": 1e3 * seconds[f"encode {name}"] / megabytes,
            "decode ms/MB": 1e3 * seconds[f"decode {name}"] / megabytes,
            "encode/pass": seconds[f"encode {name}"] / seconds[READ],
            "relative error": case.error(),
        }
        for name, case in cases.items()
    ]


@dataclass(frozen=True)
class Case:
    """One compressor with a client's model, the one it was sent, and the arrays made of them."""

    compressor: Compressor
    model: FlatArrays
    reference: FlatArrays
    vector: np.ndarray
    arrays: dict[str, np.ndarray]
    seed: int

    @classmethod
    def of(cls, compressor: Compressor, parameters: int, seed: int) -> Case:
        """Draw a model and an update of so many parameters in ten layers."""
        rng = generator(seed, "benchmark-compression", parameters)
        layers = {str(i): np.zeros(parameters // _LAYERS, np.float32) for i in range(_LAYERS)}
        reference, model = FlatArrays.copy_of(layers), FlatArrays.copy_of(layers)
        reference.vector[:] = rng.standard_normal(len(reference.vector), np.float32)
        model.vector[:] = reference.vector + 0.01 * rng.standard_normal(len(model.vector), np.float32)
        if isinstance(compressor, Sparse):
            model.vector[rng.random(len(model.vector), np.float32) < 0.9] = 0
        vector = model.vector if compressor.of_model else model.vector - reference.vector
        arrays = encoded(vector, model, compressor, generator(seed, "benchmark-draws"))
        return cls(compressor, model, reference, vector, arrays, seed)

    @property
    def nbytes(self) -> int:
        """Bytes that are sent."""
        return sum(array.nbytes for array in self.arrays.values())

    def encode(self) -> None:
        """Do what a client does, but for its memory of errors."""
        encoded(self.vector, self.model, self.compressor, generator(self.seed, "benchmark-draws"))

    def decode(self) -> None:
        """Do what the server does."""
        decoded(self.arrays, self.reference, self.compressor)

    def error(self) -> float:
        """Return the length of what is lost over that of the vector."""
        lost = decoded(self.arrays, self.reference, self.compressor)[1] - self.vector
        return float(np.linalg.norm(lost) / np.linalg.norm(self.vector))


def _seconds(run: Callable[[], Any]) -> float:
    run()
    times: list[float] = []
    while not times or (sum(times) < _ENOUGH and len(times) < _CALLS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return middle(times)
