"""The main path, to read from top to bottom: configuration, data, clients, strategy, rounds, results."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from . import models, registry
from .arrays import FlatArrays
from .attack_setup import attacks_in, attacks_of
from .clients.attacks import Attack
from .clients.collusion_grid import CollusionGrid
from .clients.stacked.execution import Execution, known_execution, measured_execution
from .clients.task import ClientTask
from .compression import CompressionGrid, Compressor
from .config import ExperimentConfig
from .datasets.base import Dataset, Source
from .datasets.cache import default_cache
from .datasets.fedp3_partitions import pooled
from .datasets.labels import Labels, class_counts
from .datasets.partition import partition
from .emulation.grid import EmulatedGrid
from .emulation.situation import Devices, devices_of
from .emulation.timeline import Policy, Timeline
from .emulation.workload import TaskWork
from .engines import Engine
from .errors import UserError
from .evaluation import evaluation_of
from .hierarchy_setup import Hierarchy, build_hierarchy
from .models.flat import FlatModel
from .models.pretraining import check_split
from .personal_setup import OwnModels, evaluation_with_own_tests, least_upload, split_own_tests
from .protection import colluders_signature
from .results.folder import RunFolder, StrategyLog
from .round_records import add_devices, add_edges, add_own_tests, client_records, round_record
from .rounds import EvaluateFn, Round, rounds
from .security.privacy import BudgetSpent
from .strategies.composed import FederatedStrategy
from .strategies.hierarchy import EdgeGrid
from .strategies.wrapper import innermost, load_state, state_of
from .strategy_setup import build_strategy
from .submodel_setup import evaluation_with_parts
from .verdicts import is_malicious


class Observer(Protocol):
    """Is told how a run goes on; ``record`` is the line that was just added to ``rounds.jsonl``."""

    def note(self, text: str) -> None:
        """Something is worth knowing before the first strategy starts."""
        ...

    def begin(self, strategy: str, done: int, total: int) -> None:
        """A strategy starts, or goes on after ``done`` rounds."""
        ...

    def round(self, strategy: str, record: dict[str, Any]) -> None:
        """A round is over and on disk."""
        ...

    def end(self, strategy: str) -> None:
        """A strategy is finished."""
        ...


@dataclass(frozen=True)
class Situation:
    """What every strategy of a run faces: data, who holds it, who attacks, the model to start from."""

    config: ExperimentConfig
    task: ClientTask
    initial: ArrayRecord
    evaluate_fn: EvaluateFn
    execution: Execution | None = None
    devices: Devices | None = None
    edge_attacks: Sequence[tuple[int, Attack]] = ()
    """Attacks of edge servers, each with its place in the scenario's list of attacks."""

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.task.parts)


def run(
    config: ExperimentConfig,
    folder: RunFolder,
    *,
    engine: Engine,
    device: str,
    observer: Observer,
    group_size: int | None = None,
) -> None:
    """Run every strategy that the folder does not hold finished; each starts or goes on where it stopped.

    The ``engine`` runs the clients; results do not depend on it, or in their last digits only.
    ``group_size`` is how many clients a worker of the local engine trains at once; None lets a short trial
    decide, or the folder if the run goes on. Ctrl-C passes through as KeyboardInterrupt, with everything up
    to the last full round on disk.
    """
    logging.getLogger("flwr").setLevel(logging.WARNING)
    situation = build_situation(config, device)
    execution = execution_for(situation.task, folder, group_size if engine.groups else 1)
    situation = replace(situation, execution=execution)
    observer.note(f"clients: {engine.summary(execution)}")
    strategies = {name: build_strategy(config, name, situation, engine) for name in config.strategies}
    hierarchies = {name: build_hierarchy(config, name, situation, engine) for name in config.strategies}
    if situation.edge_attacks and not any(hierarchies.values()):
        raise UserError("attacks: there are no edges to attack: set topology.name = 'edges'")
    if situation.devices:
        situation.devices.keep_in(folder.path / "devices")
    describe_run(folder, situation, execution, engine)
    with engine:
        for name, strategy in strategies.items():
            log = folder.log(name)
            if log.finished:
                observer.begin(name, config.rounds, config.rounds)
            else:
                run_strategy(name, strategy, situation, log, engine, observer, hierarchies[name])
            observer.end(name)


def describe_run(folder: RunFolder, situation: Situation, execution: Execution, engine: Engine) -> None:
    """Write into environment.json what a run works on and how."""
    counts = counts_of(situation.task.dataset, situation.task.parts)
    folder.describe(
        device=situation.task.device,
        classes=list(situation.task.dataset.classes),
        data_note=situation.task.dataset.note,
        data_fingerprint=situation.task.dataset.fingerprint,
        samples_per_client=[len(part) for part in situation.task.parts],
        attackers={str(client): attack.label for client, attack in sorted(situation.task.attacks.items())},
        parameters=FlatArrays.of_record(situation.initial).layout.num_params,
        execution={**asdict(execution), "summary": execution.summary()},
        engine=engine.name,
        **({} if counts is None else {"label_counts": counts.tolist()}),
    )


def run_strategy(
    name: str,
    strategy: Strategy,
    situation: Situation,
    log: StrategyLog,
    engine: Engine,
    observer: Observer,
    hierarchy: Hierarchy | None = None,
) -> None:
    """Run one strategy to the end, from its checkpoint if there is one; with edges it is the cloud's."""
    config, arrays, done = situation.config, situation.initial, -1
    own = OwnModels(config, name, situation.task.attacks)
    with engine.clients(situation, name) as clients:
        attacks = {
            node: attack for node, c in clients.numbers.items() if (attack := situation.task.attacks.get(c))
        }
        signature = colluders_signature(config, simulation=engine.simulated)
        grid: Grid = clients.grid
        if config.compression.name != "none":
            grid = CompressionGrid(grid, config.compression.build())
        colluding = CollusionGrid(grid, attacks, clients.numbers, signature)
        emulated = emulated_grid(colluding, name, situation, clients.numbers, hierarchy)
        met: Grid = emulated or colluding
        edges = None
        if hierarchy is not None:
            edges, met = hierarchy.around(met, clients)
        elif isinstance(inner := innermost(strategy), FederatedStrategy):
            inner.identities |= clients.identities
        if log.started:
            checkpoint = log.load_checkpoint()
            done, arrays = checkpoint["round"], _record_of(checkpoint["arrays"])
            colluding.load_state_dict(checkpoint.get("collusion", {}))
            clients.load_states({n: bytes(s.numpy()) for n, s in checkpoint["nodes"].items()})
            load_state(strategy, checkpoint["strategy"])
            if edges is not None:
                edges.load_state_dict(checkpoint["edges"])
                cast(CollusionGrid, met).load_state_dict(checkpoint["edges-collusion"])
        log.rewind(done)
        # Before any thread of a progress display exists.
        clients.grid.start_workers()
        observer.begin(name, max(done, 0), config.rounds)
        for current in _within_budget(
            rounds(
                strategy,
                met,
                arrays,
                config.rounds,
                timeout=config.timeout,
                train_config=own.told(clients),
                evaluate_config=clients.told,
                evaluate_fn=evaluation_with_parts(
                    situation.evaluate_fn,
                    hierarchy.model_of if hierarchy else strategy,
                    situation.task,
                    config.evaluation.batch_size,
                ),
                after=done,
            )
        ):
            arrays = current.arrays
            measured = own.measured(clients, current)
            rows = client_records(current, strategy, situation.task.attacks, edges)
            malicious = sum(is_malicious(attack.kind) for attack in situation.task.attacks.values())
            record = round_record(current, rows, strategy, malicious)
            add_own_tests(record, rows, measured)
            if emulated:
                add_devices(record, rows, emulated)
            edge_rows = []
            if edges is not None and hierarchy is not None:
                edge_rows = add_edges(record, current, strategy, edges, hierarchy.attacks, emulated)
            log.append(record, rows, edge_rows)
            log.save_checkpoint(
                {
                    "round": current.number,
                    "arrays": state_dict_of(arrays),
                    "nodes": {node: _as_tensor(state) for node, state in clients.states().items()},
                    "collusion": colluding.state_dict(),
                    "strategy": state_of(strategy),
                    **({} if edges is None else _edges_state(edges, met)),
                }
            )
            observer.round(name, record)
    log.save_model(state_dict_of(arrays))


def _edges_state(edges: EdgeGrid, met: Grid) -> dict[str, Any]:
    return {"edges": edges.state_dict(), "edges-collusion": cast(CollusionGrid, met).state_dict()}


def emulated_grid(
    grid: Grid,
    name: str,
    situation: Situation,
    clients: Mapping[int, int],
    hierarchy: Hierarchy | None = None,
) -> EmulatedGrid | None:
    """Return a grid on which clients are on the situation's devices, around one that runs them at once."""
    devices, config = situation.devices, situation.config
    if devices is None:
        return None
    emulation, hardware = config.emulation, devices.hardware
    slower = config.topology_of(name).settings().get("cloud_slower", 1.0)
    overhead = round(emulation.overhead_mb * 1e6)
    policy = Policy(emulation.deadline_s, emulation.late, emulation.enforce, overhead)
    compressor: Compressor = situation.config.compression.build()
    return EmulatedGrid(
        grid,
        devices.schedule if hierarchy else devices.straight_to_cloud(slower),
        Timeline(hardware, policy),
        policy,
        clients=clients,
        work_of=TaskWork(situation.task, overhead),
        least_up=least_upload(compressor, situation.task),
        links=hierarchy.links if hierarchy else None,
        budget_at=hierarchy.budget_at if hierarchy else None,
    )


def _within_budget(coming: Iterator[Round]) -> Iterator[Round]:
    """Pass rounds on; a budget of privacy that is spent is an end of the run, not a fault."""
    try:
        yield from coming
    except BudgetSpent as end:
        logging.getLogger("fedplat").warning("the run ends here: %s", end)


# Building the situation ------------------------------------------------------------------------------------


def load_data(config: ExperimentConfig) -> tuple[Dataset, list[np.ndarray]]:
    """Load the data set and spread its training samples over the clients."""
    root = config.data.root or (Path(os.environ["FEDPLAT_DATA"]) if os.environ.get("FEDPLAT_DATA") else None)
    source = Source(root, default_cache(), config.data.download, config.seed)
    dataset: Dataset = config.data.build(source)
    if config.partition.pool:
        dataset = pooled(dataset)
    parts = partition(
        config.partition.name,
        Labels.of(dataset),
        config.partition.clients,
        config.seed,
        **config.partition.settings(),
    )
    return dataset, parts


def build_task(config: ExperimentConfig, device: str, *, keep_samples: bool = True) -> ClientTask:
    """Load and spread the data and choose the attackers: all that clients need to know."""
    dataset, parts = load_data(config)
    check_split(config.model.settings(), config.data.name, config.data.settings())
    dataset, train, held_out = split_own_tests(config, dataset, parts)
    attacks = attacks_of(config, dataset, len(train), counts_of(dataset, train))
    builder = registry.find("models", config.model.name).load()
    build_model = functools.partial(
        models.build,
        builder,
        dataset.sample_shape,
        dataset.num_classes,
        config.seed,
        **config.model.settings(),
    )
    return ClientTask(
        dataset, train, build_model, config.training, config.seed, attacks, device, keep_samples, held_out
    )


def build_situation(config: ExperimentConfig, device: str) -> Situation:
    """Build what clients need, the initial model and its evaluation."""
    device = resolve_device(device)
    task = build_task(config, device)
    model = FlatModel(task.build_model(), device)
    initial = FlatArrays(model.layout, model.vector.cpu().numpy().copy(), model.side.cpu().numpy().copy())
    evaluate_fn = evaluation_of(
        model,
        task.dataset,
        # One attack serves all its clients, and is measured once.
        {id(attack): attack for attack in task.attacks.values()}.values(),
        batch_size=config.evaluation.batch_size,
        every=config.evaluation.every,
        last=config.rounds,
    )
    evaluate_fn = evaluation_with_own_tests(evaluate_fn, model, task, config.evaluation.batch_size)
    devices = devices_of(config, len(task.parts), lambda: counts_of(task.dataset, task.parts))
    placed = enumerate(attacks_in(config, task.dataset)) if config.attacks else ()
    by_edges = [(index, attack) for index, attack in placed if config.attacks[index].edges is not None]
    return Situation(config, task, initial.to_record(), evaluate_fn, devices=devices, edge_attacks=by_edges)


def execution_for(task: ClientTask, folder: RunFolder, group_size: int | None) -> Execution:
    """Return how clients are trained; a run that goes on does it as before, and ends with the same bits.

    Raises UserError if a run that goes on is told another size of group, where that changes results.
    """
    common = task.build_model, task.training, task.sample()
    chosen = known_execution(*common, group_size)
    if began := folder.environment.get("execution"):
        before = Execution(**{name: value for name, value in began.items() if name != "summary"})
        if chosen is None or chosen == before:
            return before
        if not (chosen.exact and before.exact and chosen.stacked == before.stacked):
            raise UserError(
                f"{folder.path} was begun with --group-size {before.group}, which its results depend on in "
                f"their last digits; go on with that, or give another folder with --out"
            )
    return chosen or measured_execution(*common, task.device, default_cache())


def counts_of(dataset: Dataset, parts: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return how many samples of each class each client has (clients, classes); None for text."""
    return None if dataset.is_text else class_counts(dataset.train.y, parts, dataset.num_classes)


def resolve_device(device: str) -> str:
    """Return ``cuda`` or ``cpu``; raises UserError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UserError("--device cuda: torch finds no CUDA GPU here; use --device cpu or auto")
    return ("cuda" if available else "cpu") if device == "auto" else device


# Models as torch has them --------------------------------------------------------------------------------


def state_dict_of(arrays: ArrayRecord) -> dict[str, torch.Tensor]:
    """Return a model's arrays as a torch state dict."""
    flat = FlatArrays.of_record(arrays)
    return {entry.name: torch.from_numpy(flat.view(entry.name)) for entry in flat.layout.entries}


def _as_tensor(state: bytes) -> torch.Tensor:
    # A checkpoint holds tensors and plain values only, so that reading one can never run code.
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _record_of(state: Mapping[str, torch.Tensor]) -> ArrayRecord:
    return ArrayRecord({name: Array(tensor.numpy()) for name, tensor in state.items()})
