"""Own tests and own models of the clients in an experiment."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from numpy.typing import NDArray

from .arrays import Layout, payload_bytes
from .clients.attacks import Attack
from .clients.personal import PERSONAL, FedPer, told
from .clients.task import ClientTask
from .compression import Compressor
from .config import ExperimentConfig
from .datasets.base import Dataset
from .datasets.fedp3_partitions import split_clients, with_clients_tests
from .errors import UserError
from .layer_map import LayerMap, part_layout
from .models.flat import FlatModel
from .personal_metrics import ask_for_own_models, with_own_tests
from .rounds import EvaluateFn, Round
from .strategies.fedper import SharedLayers
from .strategies.submodels import SubModelScheme, layout_of
from .verdicts import is_malicious

if TYPE_CHECKING:
    from .engines import Clients

Parts = Sequence[NDArray[np.int64]]


def split_own_tests(config: ExperimentConfig, dataset: Dataset, parts: Parts) -> tuple[Dataset, Parts, Parts]:
    """Return data set, what clients train on, and what they hold out, as ``[partition]`` says.

    Nothing is held out, and all stays as it is, without ``own_test``. Where both splits were pooled, what is
    held out is the test set. Raises UserError if no client has enough samples to hold one out.
    """
    if not config.partition.own_test:
        return dataset, parts, ()
    train, held_out = split_clients(parts, config.partition.own_test, config.seed)
    if not sum(map(len, held_out)):
        raise UserError(
            f"partition.own_test = {config.partition.own_test:g}: no client has enough samples to hold one "
            f"out; take a larger share, or fewer clients"
        )
    return (with_clients_tests(dataset, held_out) if config.partition.pool else dataset), train, held_out


def evaluation_with_own_tests(
    evaluate_fn: EvaluateFn, model: FlatModel, task: ClientTask, batch_size: int
) -> EvaluateFn:
    """Return an evaluation that also measures the global model on what clients hold out, if they do.

    Malicious clients do not count.
    """
    if not task.held_out:
        return evaluate_fn
    return with_own_tests(
        evaluate_fn, model, task.dataset, task.held_out, batch_size, malicious(task.attacks)
    )


def malicious(attacks: Mapping[int, Attack]) -> frozenset[int]:
    """Return the clients whose own tests are nobody's concern."""
    return frozenset(client for client, attack in attacks.items() if is_malicious(attack.kind))


class OwnModels:
    """How the clients of one of the strategies make the model their own, and how good that is for them."""

    def __init__(self, config: ExperimentConfig, name: str, attacks: Mapping[int, Attack]) -> None:
        part = config.personal_of(name)
        self._told = told(part.name, part.settings())
        self._timeout = config.timeout
        self._malicious = malicious(attacks)

    def told(self, clients: Clients) -> ConfigRecord:
        """Return what messages to clients have to say."""
        return ConfigRecord({**clients.told, PERSONAL: self._told}) if self._told else clients.told

    def measured(self, clients: Clients, current: Round) -> dict[int, tuple[float, bool]]:
        """Return the accuracy of each client's own model after a round, and whether the client counts.

        Empty for clients without such models, and for rounds in which the global one is not evaluated. What
        that sends is no part of the method, and counts as no traffic; its time is the clients' evaluation's.
        """
        if not self._told or not current.number or current.server_metrics is None:
            return {}
        start = time.perf_counter()
        found = ask_for_own_models(
            clients.grid, clients.numbers, current.arrays, self.told(clients), current.number, self._timeout
        )
        seconds = current.seconds.get("evaluate-clients", 0.0)
        current.seconds["evaluate-clients"] = seconds + time.perf_counter() - start
        return {client: (accuracy, client not in self._malicious) for client, accuracy in found.items()}


def personal_scheme(config: ExperimentConfig, name: str, task: ClientTask) -> SubModelScheme | None:
    """Return what sends clients the part of the model that they share; None if that is all of it."""
    part = config.personal_of(name)
    if part.name == "none":
        return None
    kind = part.build()
    local = kind.local(layout_of(task.shapes)) if isinstance(kind, FedPer) else frozenset()
    return SharedLayers(local) if local else None


def least_upload(compressor: Compressor, task: ClientTask) -> Callable[[ArrayRecord], int]:
    """Return a function that gives the fewest bytes that a reply to arrays can have.

    A reply to a FedP3 message, which is not of the arrays that were sent, holds at least one layer and the
    head, and is not compressed.
    """
    whole: list[Layout] = []

    def least(record: ArrayRecord) -> int:
        layout = Layout.of_record(record)
        if "values" not in layout.by_name or any("." in name for name in layout.by_name):
            return compressor.least_bytes(layout)
        if not whole:
            whole.append(layout_of(task.shapes))
        layers = LayerMap.of(whole[0])
        parts = [layers.arrays_of((layer.name, layers.head.name)) for layer in layers.hidden]
        return min(*(part_layout(whole[0], part).nbytes for part in parts), payload_bytes(record))

    return least
