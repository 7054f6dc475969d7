"""What is kept of a round's replies once their models are combined, and what else becomes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedplat.arrays import FlatArrays, Layout
from fedplat.updates import ClientUpdates

from .aggregators import Aggregate, RoundPlan
from .reports import ClientReport

STREAM_ABOVE = 1 << 30
"""Bytes of a round's updates up to which they are combined at once, where nothing else is said."""

TRIM_EVERY = 8
"""Blocks after which freed memory goes back to the system: between them it grows by a few megabytes each."""

_BLOCK_BYTES = 32 << 20


def rows_per_block(layout: Layout) -> int:
    """Return how many clients are combined at a time: 32 MiB of them, at least one.

    It depends on the model alone: sums are formed in the same order however many workers there are.
    """
    return max(1, _BLOCK_BYTES // max(4 * layout.dim, 1))


@dataclass(frozen=True)
class Accepted:
    """What is kept of the accepted replies once they are combined, by row: all but the models."""

    node_ids: NDArray[np.uint64]
    num_examples: NDArray[np.int64]
    update_norms: NDArray[np.float64]
    side: NDArray[np.uint8]
    metrics: Sequence[Mapping[str, float]]

    @classmethod
    def of(cls, updates: ClientUpdates, metrics: Sequence[Mapping[str, float]]) -> Accepted:
        """Take it from updates; nothing refers to their memory."""
        return cls(updates.node_ids, updates.num_examples, updates.update_norms, updates.side.copy(), metrics)

    @classmethod
    def joined(cls, blocks: Sequence[Accepted]) -> Accepted:
        """Put blocks together, in their order."""
        return cls(
            np.concatenate([block.node_ids for block in blocks]),
            np.concatenate([block.num_examples for block in blocks]),
            np.concatenate([block.update_norms for block in blocks]),
            np.concatenate([block.side for block in blocks]),
            [metrics for block in blocks for metrics in block.metrics],
        )


def new_model(accepted: Accepted, aggregate: Aggregate, reference: FlatArrays) -> FlatArrays:
    """Return the model of a combined vector (d,), with integers and without negative variances."""
    used = aggregate.accepted.numpy()
    side = _middle_of_integers(accepted.side[used] if used.any() else accepted.side, reference)
    new = FlatArrays(reference.layout, aggregate.vector.numpy(), side)
    for entry in reference.layout.entries:
        if entry.in_vector and entry.name.endswith("running_var"):
            part = new.vector[entry.start : entry.stop]
            np.maximum(part, 0, out=part)
    return new


def _middle_of_integers(sides: np.ndarray, reference: FlatArrays) -> np.ndarray:
    """Combine integer arrays, such as BatchNorm's counters, by the lower median, some client's own."""
    new = reference.side.copy()
    for entry in reference.layout.entries:
        if not entry.in_vector:
            values = np.ascontiguousarray(sides[:, entry.start : entry.stop]).view(entry.dtype)
            middle = np.sort(values, axis=0)[(len(values) - 1) // 2]
            new[entry.start : entry.stop] = middle.view(np.uint8)
    return new


def weighted_metrics(
    metrics: Sequence[Mapping[str, float]], shares: np.ndarray, count_key: str
) -> dict[str, float]:
    """Average the metrics that more than half of the clients sent, except the sample counts themselves.

    A client may lack one, such as the loss of a training that skipped every batch; then the others count.
    """
    sent = Counter(name for m in metrics for name in m)
    averages = {}
    for name in sorted(sent.keys() - {count_key}):
        having = [(s, m[name]) for s, m in zip(shares, metrics, strict=True) if name in m]
        if 2 * len(having) > len(metrics):
            averages[name] = float(sum(s * value for s, value in having) / sum(s for s, _ in having))
    return averages


def stack_coverage(coverages: list[torch.Tensor | None], layout: Layout) -> torch.Tensor | None:
    """Return which elements each reply covers as a matrix (n, d); None if all of them cover everything."""
    if all(coverage is None for coverage in coverages):
        return None
    everything = torch.ones(layout.dim, dtype=torch.bool)
    return torch.stack([everything if c is None else c for c in coverages])


def plan_of_round(reference: FlatArrays, server_round: int, clients: int) -> RoundPlan:
    """Return what is known of a round in which so many clients are asked."""
    # torch warns about read-only memory; the reference is only ever read.
    vector = reference.vector if reference.vector.flags.writeable else reference.vector.copy()
    return RoundPlan(torch.from_numpy(vector), reference.layout.num_params, server_round, clients)


def accepted_reports(
    accepted: Accepted,
    aggregate: Aggregate,
    node_ids: Sequence[int],
    clients: Sequence[int],
    kinds: Sequence[str],
) -> list[ClientReport]:
    """Return the reports on the replies that were combined, in their order; ``kinds`` are of sub-models."""
    return [
        ClientReport(
            node_id,
            client,
            "accepted",
            num_examples=int(accepted.num_examples[i]),
            weight=float(aggregate.weights[i]),
            verdict=aggregate.verdicts.get(i, ""),
            update_norm=float(accepted.update_norms[i]),
            metrics=accepted.metrics[i],
            scores={name: float(values[i]) for name, values in aggregate.scores.items()},
            submodel=kinds[i],
        )
        for i, (node_id, client) in enumerate(zip(node_ids, clients, strict=True))
    ]
