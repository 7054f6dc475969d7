"""The aggregation rules of fedplat, Flower and ByzFL as functions without arguments, ready to be timed.

Every library gets the same matrix and the same number of liars. Flower's rules are its strategies'
``aggregate_train``; they are timed on arrays that lie in memory, and again on what a client sends, whose
bytes they have to read first.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from numpy.typing import NDArray

from fedplat.arrays import FlatArrays
from fedplat.compat import array_record, set_task_identity
from fedplat.rng import generator
from fedplat.strategies import aggregators as ours
from fedplat.strategies.fed_credit import FedCredit
from fedplat.updates import ClientUpdates, update_norms

Vector = NDArray[np.float32]
Run = Callable[[], Vector]
_LAYERS = 10


def liars(clients: int) -> int:
    """Return how many liars the rules are told of: a fifth, which Bulyan's n ≥ 4f + 3 still allows.

    >>> [liars(n) for n in (10, 50, 100, 200)]
    [1, 10, 20, 40]
    """
    return min(clients // 5, (clients - 3) // 4)


def round_of(clients: int, parameters: int, seed: int) -> torch.Tensor:
    """Return a round's models (n, d): close to a common one, the last fifth of them far off."""
    rng = generator(seed, "benchmark-aggregators", clients, parameters)
    matrix = rng.standard_normal((clients, parameters), np.float32)
    matrix *= np.float32(0.01)
    matrix += np.float32(1)
    if count := liars(clients):
        matrix[-count:] *= np.float32(-4)
    return torch.from_numpy(matrix)


def fedplat_rule(name: str, matrix: torch.Tensor) -> Run:
    """Return fedplat's function of that name on ``matrix`` (n, d)."""
    f = liars(len(matrix))
    rules: dict[str, Callable[[], ours.Aggregate]] = {
        "mean": lambda: ours.mean(matrix),
        "median": lambda: ours.median(matrix),
        "trimmed-mean": lambda: ours.trimmed_mean(matrix, f),
        "krum": lambda: ours.krum(matrix, f),
        "multi-krum": lambda: ours.multi_krum(matrix, f),
        "bulyan": lambda: ours.bulyan(matrix, f),
        "geometric-median": lambda: ours.geometric_median(matrix),
        "fed-credit": lambda: FedCredit().aggregator(_stacked(matrix)),
    }
    return lambda: rules[name]().vector.numpy()


def _stacked(matrix: torch.Tensor) -> ClientUpdates:
    """Return the round as a strategy sees it, with the lengths of the updates, which every round needs."""
    n, d = matrix.shape
    sent = FlatArrays.copy_of({"w": np.ones(d, np.float32)})
    reference = torch.from_numpy(sent.vector)
    return ClientUpdates(
        sent.layout,
        np.arange(1, n + 1, dtype=np.uint64),
        np.full(n, 10, np.int64),
        matrix,
        reference,
        np.zeros((n, 0), np.uint8),
        update_norms(matrix, reference),
    )


class _InMemory(Array):
    """An array that is handed out as it is, so that a strategy's own work alone is timed."""

    def numpy(self) -> NDArray[Any]:
        return self.__dict__["values"]


def _in_memory(values: Vector) -> Array:
    array = _InMemory("float32", tuple(values.shape), "numpy.ndarray", b"")
    array.__dict__["values"] = values
    return array


def flower_rule(name: str, matrix: torch.Tensor, serialised: bool) -> Run | None:
    """Return the built-in strategy of Flower for that rule, or None if there is none."""
    n, f = len(matrix), liars(len(matrix))
    common: dict[str, Any] = {"fraction_evaluate": 0.0}
    strategies: dict[str, Callable[[], flower.FedAvg]] = {
        "mean": lambda: flower.FedAvg(**common),
        "median": lambda: flower.FedMedian(**common),
        "trimmed-mean": lambda: flower.FedTrimmedAvg(beta=f / n, **common),
        "krum": lambda: flower.Krum(num_malicious_nodes=f, **common),
        "multi-krum": lambda: flower.MultiKrum(num_malicious_nodes=f, num_nodes_to_select=n - f, **common),
        "bulyan": lambda: flower.Bulyan(num_malicious_nodes=f, **common),
    }
    if name not in strategies:
        return None
    set_task_identity(1)
    make = Array if serialised else _in_memory
    messages = []
    for node, row in enumerate(matrix.numpy(), start=1):
        layers = {f"layer{i}": make(part) for i, part in enumerate(np.array_split(row, _LAYERS))}
        content = RecordDict({"arrays": array_record(layers), "metrics": MetricRecord({"num-examples": 10})})
        messages.append(Message(content, dst_node_id=node, message_type="train"))

    def run() -> Vector:
        arrays, _ = strategies[name]().aggregate_train(1, messages)
        if not isinstance(arrays, ArrayRecord):
            raise RuntimeError(f"Flower's {name} returned nothing")
        return np.concatenate([array.ravel() for array in arrays.to_numpy_ndarrays()])

    return run


def byzfl_rule(name: str, matrix: torch.Tensor) -> Run | None:
    """Return ByzFL's aggregator for that rule, or None if there is none."""
    import byzfl

    f = liars(len(matrix))
    rules: dict[str, Callable[[], Any]] = {
        "mean": byzfl.Average,
        "median": byzfl.Median,
        "trimmed-mean": lambda: byzfl.TrMean(f=f),
        "krum": lambda: byzfl.Krum(f=f),
        "multi-krum": lambda: byzfl.MultiKrum(f=f),
        "geometric-median": byzfl.GeometricMedian,
    }
    return None if name not in rules else lambda: rules[name]()(matrix).numpy()


def one_read(matrix: torch.Tensor) -> Run:
    """Return a single pass over the matrix that does next to nothing: the limit that memory sets."""
    ones = torch.ones(matrix.shape[1])
    return lambda: (matrix @ ones).numpy()
