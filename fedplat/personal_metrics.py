"""How good models are for the clients, each on its own test samples: the mean, the worst, and the spread."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from .arrays import FlatArrays
from .clients.personal import AFTER
from .compat import MessageType
from .datasets.base import Dataset
from .models.flat import FlatModel
from .rounds import EvaluateFn
from .strategies.reports import ClientReport

__all__ = [
    "AFTER",
    "OWN",
    "after_training",
    "ask_for_own_models",
    "over_clients",
    "own_test_accuracies",
    "own_test_figures",
    "with_own_tests",
]

log = logging.getLogger("fedplat")

OWN = "own-test."
"""How the names of figures over the clients begin."""

_WORST = 0.1


def over_clients(accuracies: Iterable[float]) -> dict[str, float]:
    """Return ``mean``, ``worst-10`` (the mean of the worst tenth, rounded up) and ``spread`` of accuracies.

    The spread is the standard deviation. Clients count alike; nan, of clients without test samples, is left
    out; nothing is returned if nothing is left.

    >>> over_clients([0.5, 1.0, 0.75, float("nan")])["worst-10"]
    0.5
    """
    values = np.sort(np.array([value for value in accuracies if np.isfinite(value)], np.float64))
    if not len(values):
        return {}
    worst = values[: ceil(_WORST * len(values))]
    return {"mean": float(values.mean()), "worst-10": float(worst.mean()), "spread": float(values.std())}


def after_training(reports: Sequence[ClientReport]) -> dict[int, float]:
    """Return how good the models were that clients had when they had trained, as their replies say.

    By client; empty if clients do not measure that. Clients may lie.
    """
    return {r.client: float(r.metrics[AFTER]) for r in reports if AFTER in r.metrics}


def ask_for_own_models(
    grid: Grid,
    clients: Mapping[int, int],
    arrays: ArrayRecord,
    config: ConfigRecord,
    server_round: int,
    timeout: float | None = None,
) -> dict[int, float]:
    """Ask every client how good its own model is, given the new global one; return what it says, by client.

    ``clients`` gives each node's client, ``config`` says what kind of models these are. Clients that give no
    answer are left out, which is logged. Clients may lie.
    """
    settings = ConfigRecord({**config, "server-round": server_round})
    content = RecordDict({"arrays": arrays, "config": settings})
    questions = [
        Message(content, node, MessageType.EVALUATE, group_id=str(server_round)) for node in sorted(clients)
    ]
    told: dict[int, float] = {}
    for answer in grid.send_and_receive(questions, timeout=timeout):
        if answer.has_error():
            log.warning("round %d: no own model is measured: %s", server_round, answer.error.reason)
            continue
        metrics = answer.content.get("metrics")
        if isinstance(metrics, MetricRecord) and AFTER in metrics:
            told[clients[answer.metadata.src_node_id]] = float(metrics[AFTER])  # type: ignore[arg-type]
    return dict(sorted(told.items()))


def own_test_accuracies(
    model: FlatModel, dataset: Dataset, held_out: Sequence[NDArray[np.int64]], batch_size: int = 1000
) -> NDArray[np.float64]:
    """Return a model's accuracy (clients,) on each client's own test samples, nan for a client without any.

    ``held_out`` are indices into the training split. A sample counts as right if its true class has the
    largest logit, the first of equal ones, as in :func:`fedplat.clients.training.evaluate`; of a text, every
    position does.
    """
    rows = np.unique(np.concatenate([np.asarray(part, np.int64) for part in held_out]))
    right = np.zeros(len(rows))
    in_training = [part for part in model.module.modules() if part.training]
    model.module.eval()
    try:
        with torch.inference_mode():
            for start in range(0, len(rows), batch_size):
                some = rows[start : start + batch_size]
                logits = model(dataset.prepare(dataset.train.x[some]).to(model.device))
                found = logits.max(dim=-1)
                true = torch.from_numpy(np.ascontiguousarray(dataset.train.y[some])).to(model.device)
                hit = (found.indices == true) & ~found.values.isnan()
                right[start : start + len(some)] = (
                    hit.double().reshape(len(some), -1).mean(dim=1).cpu().numpy()
                )
    finally:
        for part in in_training:
            part.training = True
    places = [np.searchsorted(rows, part) for part in held_out]
    return np.array([right[place].mean() if len(place) else np.nan for place in places])


def with_own_tests(
    evaluate_fn: EvaluateFn,
    model: FlatModel,
    dataset: Dataset,
    held_out: Sequence[NDArray[np.int64]],
    batch_size: int = 1000,
    but: Collection[int] = (),
) -> EvaluateFn:
    """Return an evaluation that adds ``own-test.mean``, ``.worst-10`` and ``.spread`` of the global model.

    For any strategy, where the clients' samples are at hand. Clients in ``but``, such as attackers, do not
    count. Rounds that ``evaluate_fn`` leaves out are left out.
    """
    counted = [part for client, part in enumerate(held_out) if client not in but]

    def with_figures(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        metrics = evaluate_fn(server_round, arrays)
        if metrics is None:
            return None
        model.load(FlatArrays.of_record(arrays, model.layout))
        figures = over_clients(own_test_accuracies(model, dataset, counted, batch_size))
        for name, value in figures.items():
            metrics[OWN + name] = value
        return metrics

    return with_figures


def own_test_figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures over clients among a round's metrics, without the start of their names."""
    return {name.removeprefix(OWN): float(v) for name, v in metrics.items() if name.startswith(OWN)}
