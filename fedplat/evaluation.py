"""Evaluation of the global model on the test set, and of what attackers wanted it to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from numpy.typing import NDArray

from .arrays import FlatArrays
from .clients.attacks import Attack
from .clients.training import evaluate
from .datasets.base import Dataset
from .models.flat import FlatModel
from .rounds import EvaluateFn

SUCCESS = "attack-success."
PART = "accuracy-of."
"""How the names of sub-models' accuracies begin."""


def evaluation_of(
    model: FlatModel,
    dataset: Dataset,
    attacks: Iterable[Attack] = (),
    *,
    batch_size: int = 1000,
    every: int = 1,
    last: int | None = None,
) -> EvaluateFn:
    """Return the function that measures a model on the test set: accuracy, loss, accuracy per class.

    For each attack with a goal it adds ``attack-success.<label>``. Rounds that are neither a multiple of
    ``every`` nor the ``last`` are left out.
    """
    x = dataset.prepare(dataset.test.x).to(model.device)
    y = torch.from_numpy(np.ascontiguousarray(dataset.test.y)).to(model.device)
    wanting = [attack for attack in attacks if attack.goal()]
    disguised = [attack.disguise(x) for attack in wanting]

    def evaluate_fn(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if server_round % every and server_round != last:
            return None
        model.load(FlatArrays.of_record(arrays, model.layout))
        result = evaluate(model, x, y, dataset.num_classes, batch_size)
        recall = result.confusion.diagonal() / np.where(result.support > 0, result.support, np.nan)
        figures = {"accuracy": result.accuracy, "loss": result.loss, "per-class-accuracy": recall.tolist()}
        for attack, shown in zip(wanting, disguised, strict=True):
            seen = result if shown is None else evaluate(model, shown, y, dataset.num_classes, batch_size)
            figures[SUCCESS + attack.label] = success_rate(attack.goal(), seen.confusion, seen.support)
        return MetricRecord(figures)

    return evaluate_fn


def success_rate(goal: Mapping[int, int], confusion: NDArray[np.int64], support: NDArray[np.int64]) -> float:
    """Return the share of the test samples of the goal's classes that are predicted as the goal wants them.

    ``confusion`` (C, C) has true classes as rows, ``support`` (C,) counts all samples of a class, also those
    without a prediction; nan if there are none. A class that the attack wants predicted as itself is left
    out.

    >>> confusion = np.array([[8, 2, 0], [5, 4, 1], [0, 0, 10]])
    >>> success_rate({0: 1, 1: 2}, confusion, confusion.sum(axis=1))
    0.15
    """
    pairs = [(true, wanted) for true, wanted in goal.items() if true != wanted]
    total = sum(int(support[true]) for true, _ in pairs)
    return sum(int(confusion[pair]) for pair in pairs) / total if total else float("nan")
