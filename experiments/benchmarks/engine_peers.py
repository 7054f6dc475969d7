"""Two other simulators, where they are installed: Apple's pfl and BlazeFL, with the same batches and model.

``pfl`` runs as its examples do: ``SimulatedBackend``, ``FederatedAveraging``, users' data in memory, one
process. ``BlazeFL`` is written after the published 3.0.0 package, in its recommended mode, one thread per
core, which wants a free-threaded Python 3.14; it has not been run under such a Python, so its times have yet
to be seen.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
from __future__ import annotations

import functools
import threading
import time
from typing import Any

import torch
from torch import nn

from .common import cores
from .workload import Turn, Workload, vector_of


def pfl_simulation(work: Workload, rounds: int, threads: int) -> Turn:
    """Train with pfl's simulated federated averaging; its first round also evaluates, as pfl always does."""
    import pfl.algorithm.base
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(threads)
    task, turn, number = work.task, Turn(), 1
    clients = range(len(task.parts))
    for partition in clients:
        work.prepared(partition)

    def user_data(user: int) -> Any:
        x, y = work.prepared(user)
        order = work.order(user, number)
        return PyTorchTensorDataset((x[order], y[order]), user_id=str(user))

    module: Any = task.build_model()
    module.train()
    module.loss = lambda x, y: nn.functional.cross_entropy(module(x), y)
    module.metrics = lambda x, y: {"loss": Weighted(0, len(y))}
    model = PyTorchModel(
        model=module,
        local_optimizer_create=functools.partial(torch.optim.SGD, momentum=task.training.momentum),
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )

    class Clock(TrainingProcessCallback):
        begin = time.perf_counter()

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Any]:
            nonlocal number
            turn.seconds.append(time.perf_counter() - self.begin)
            if turn.model is None:
                turn.model = vector_of({k: v.numpy() for k, v in module.state_dict().items()})
            number += 1
            self.begin = time.perf_counter()
            return super().after_central_iteration(
                aggregate_metrics, model, central_iteration=central_iteration
            )

    data = FederatedDataset(user_data, get_user_sampler("minimize_reuse", list(clients)))
    FederatedAveraging().run(
        algorithm_params=pfl.algorithm.base.NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=len(clients),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=task.training.epochs,
            local_learning_rate=task.training.lr,
            local_batch_size=task.training.batch_size,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock()],
        send_metrics_to_platform=False,
    )
    return turn


class _Batches(list[tuple[torch.Tensor, torch.Tensor]]):
    """A client's batches in order; ``dataset`` is what BlazeFL counts."""

    def __init__(self, work: Workload, partition: int, server_round: int) -> None:
        x, y = work.prepared(partition)
        order = work.order(partition, server_round).split(work.task.training.batch_size)
        super().__init__((x[batch], y[batch]) for batch in order)
        self.dataset = y


def blazefl_simulation(work: Workload, rounds: int) -> Turn:
    """Train with BlazeFL's ``FedAvgThreadPoolClientTrainer`` and ``FedAvgBaseServerHandler``."""
    from blazefl.contrib import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer

    torch.set_num_threads(1)
    task, turn, clients = work.task, Turn(), len(work.task.parts)
    building = threading.Lock()  # fedplat's builders seed torch's one generator, which threads would share
    for partition in range(clients):
        work.prepared(partition)

    class Models:
        def select_model(self, model_name: str) -> nn.Module:
            with building:
                return task.build_model()

    class Data:
        def get_dataloader(
            self, type_: Any, cid: int, batch_size: int | None = None, generator: Any = None
        ) -> Any:
            return _Batches(work, cid, handler.round + 1)

    common: dict[str, Any] = {
        "model_selector": Models(),
        "model_name": "same",
        "dataset": Data(),
        "device": "cpu",
        "num_clients": clients,
        "batch_size": task.training.batch_size,
        "seed": work.seed,
    }
    handler = FedAvgBaseServerHandler(global_round=rounds, sample_ratio=1.0, **common)
    trainer = FedAvgThreadPoolClientTrainer(
        epochs=task.training.epochs, lr=task.training.lr, num_parallels=cores(), **common
    )
    trainer.progress_fn = lambda it: it  # no progress bar
    while not handler.is_stopped():
        begin = time.perf_counter()
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        for package in trainer.uplink_package():
            handler.load(package)
        turn.seconds.append(time.perf_counter() - begin)
        if turn.model is None:
            turn.model = vector_of({k: v.numpy().copy() for k, v in handler.model.state_dict().items()})
    return turn
