"""The names that Python blocks may use without defining them: a small federation, and what is in it.

Pages speak of ``grid``, ``app`` and ``initial_arrays`` as of things that a Flower user has. Here they are
real: eight clients with handwritten digits, on fedplat's own engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flwr.app
import torch
from flwr.clientapp import ClientApp
from torch.nn.functional import cross_entropy

from fedplat.clients.app import make_client_app
from fedplat.clients.task import ClientTask
from fedplat.config import load
from fedplat.experiment import load_data
from fedplat.models import build
from fedplat.models.dense import mlp
from fedplat.runtime import LocalGrid
from fedplat.strategies import Mean
from fedplat.training_config import LocalTraining

CLIENTS = 8


@contextmanager
def given() -> Iterator[dict[str, Any]]:
    """Return what every page starts with."""
    raw = {
        "name": "given",
        "rounds": 1,
        "data": {"name": "digits"},
        "partition": {"name": "iid", "clients": CLIENTS},
        "model": {"name": "mlp"},
    }
    dataset, parts = load_data(load(raw, "given"))
    training = LocalTraining(steps=1, batch_size=16)

    def build_model() -> torch.nn.Module:
        return build(mlp, dataset.sample_shape, dataset.num_classes, 1, hidden=(16, 16))

    task = ClientTask(dataset, parts, build_model, training, seed=1)
    app = make_client_app(task)
    arrays = flwr.app.ArrayRecord(build_model().state_dict())
    with LocalGrid(app, CLIENTS, workers=1) as grid:
        yield {
            "__name__": "page",
            "ArrayRecord": flwr.app.ArrayRecord,
            "ClientApp": ClientApp,
            "ConfigRecord": flwr.app.ConfigRecord,
            "Context": flwr.app.Context,
            "Message": flwr.app.Message,
            "RecordDict": flwr.app.RecordDict,
            "app": app,
            "arrays": arrays,
            "attackers": list(grid.get_node_ids())[:2],
            "build_model": build_model,
            "client_loss": lambda module: cross_entropy(
                module(task.samples(0)[0][:1]), task.samples(0)[1][:1]
            ),
            "evaluate": lambda server_round, arrays: flwr.app.MetricRecord({"round": float(server_round)}),
            "grid": grid,
            "initial_arrays": arrays,
            "num_classes": dataset.num_classes,
            "public": lambda: task.samples(0),
            "sample_shape": dataset.sample_shape,
            "strategy": Mean(),
            "task": task,
            "train_on_clean_samples": lambda arrays: arrays,
            "training": training,
        }
