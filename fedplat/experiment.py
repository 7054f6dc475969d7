"""The main path, to read from top to bottom: configuration, data, clients, strategy, rounds, results."""

from __future__ import annotations

import functools
import inspect
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
from .arrays import FlatArrays, Layout
from .clients.attacks import Attack, Scene, Schedule, Wanted, choose_attackers
from .clients.attacks.collusion import Collusion
from .clients.collusion_grid import CollusionGrid
from .clients.stacked.execution import Execution, known_execution, measured_execution
from .clients.task import ClientTask
from .compression import CompressionGrid, Compressor
from .config import ExperimentConfig
from .datasets.base import Dataset, Source
from .datasets.cache import default_cache
from .datasets.labels import Labels, class_counts
from .datasets.partition import partition
from .emulation.grid import EmulatedGrid
from .emulation.situation import Devices, devices_of
from .emulation.timeline import Policy, Timeline
from .emulation.workload import TaskWork
from .engines import Engine
from .errors import UserError
from .evaluation import evaluation_of
from .models.flat import FlatModel
from .protection import colluders_signature, protected
from .results.folder import RunFolder, StrategyLog
from .root_training import root_training
from .round_records import add_devices, client_records, round_record
from .rounds import EvaluateFn, Round, rounds
from .security.privacy import BudgetSpent
from .security.validation import ReplyRules
from .strategies.composed import FederatedStrategy
from .strategies.fedconv import LearnedWeights, ServerAlone
from .strategies.similarity import FLTrust
from .strategies.wrapper import innermost, load_state, state_of
from .submodel_setup import context_of, evaluation_with_parts, schedule_for, scheme_for
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
    if situation.devices:
        situation.devices.keep_in(folder.path / "devices")
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
    )
    with engine:
        for name, strategy in strategies.items():
            log = folder.log(name)
            if log.finished:
                observer.begin(name, config.rounds, config.rounds)
            else:
                run_strategy(name, strategy, situation, log, engine, observer)
            observer.end(name)


def run_strategy(
    name: str,
    strategy: Strategy,
    situation: Situation,
    log: StrategyLog,
    engine: Engine,
    observer: Observer,
) -> None:
    """Run one strategy to the end, from its checkpoint if there is one."""
    config, arrays, done = situation.config, situation.initial, -1
    with engine.clients(situation, name) as clients:
        attacks = {
            node: attack for node, c in clients.numbers.items() if (attack := situation.task.attacks.get(c))
        }
        signature = colluders_signature(config, simulation=engine.simulated)
        grid: Grid = clients.grid
        if config.compression.name != "none":
            grid = CompressionGrid(grid, config.compression.build())
        colluding = CollusionGrid(grid, attacks, clients.numbers, signature)
        emulated = emulated_grid(colluding, situation, clients.numbers)
        if isinstance(inner := innermost(strategy), FederatedStrategy):
            inner.identities |= clients.identities
        if log.started:
            checkpoint = log.load_checkpoint()
            done, arrays = checkpoint["round"], _record_of(checkpoint["arrays"])
            colluding.load_state_dict(checkpoint.get("collusion", {}))
            clients.load_states({n: bytes(s.numpy()) for n, s in checkpoint["nodes"].items()})
            load_state(strategy, checkpoint["strategy"])
        log.rewind(done)
        # Before any thread of a progress display exists.
        clients.grid.start_workers()
        observer.begin(name, max(done, 0), config.rounds)
        for current in _within_budget(
            rounds(
                strategy,
                emulated or colluding,
                arrays,
                config.rounds,
                timeout=config.timeout,
                train_config=clients.told,
                evaluate_config=clients.told,
                evaluate_fn=evaluation_with_parts(
                    situation.evaluate_fn, strategy, situation.task, config.evaluation.batch_size
                ),
                after=done,
            )
        ):
            arrays = current.arrays
            rows = client_records(current, strategy, situation.task.attacks)
            malicious = sum(is_malicious(attack.kind) for attack in situation.task.attacks.values())
            record = round_record(current, rows, strategy, malicious)
            if emulated:
                add_devices(record, rows, emulated)
            log.append(record, rows)
            log.save_checkpoint(
                {
                    "round": current.number,
                    "arrays": state_dict_of(arrays),
                    "nodes": {node: _as_tensor(state) for node, state in clients.states().items()},
                    "collusion": colluding.state_dict(),
                    "strategy": state_of(strategy),
                }
            )
            observer.round(name, record)
    log.save_model(state_dict_of(arrays))


def emulated_grid(grid: Grid, situation: Situation, clients: Mapping[int, int]) -> EmulatedGrid | None:
    """Return a grid on which clients are on the situation's devices, around one that runs them at once."""
    if situation.devices is None:
        return None
    emulation, hardware = situation.config.emulation, situation.devices.hardware
    overhead = round(emulation.overhead_mb * 1e6)
    policy = Policy(emulation.deadline_s, emulation.late, emulation.enforce, overhead)
    compressor: Compressor = situation.config.compression.build()
    return EmulatedGrid(
        grid,
        situation.devices.schedule,
        Timeline(hardware, policy),
        policy,
        clients=clients,
        work_of=TaskWork(situation.task, overhead),
        least_up=lambda record: compressor.least_bytes(Layout.of_record(record)),
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
    attacks = attacks_of(config, dataset, parts)
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
        dataset, parts, build_model, config.training, config.seed, attacks, device, keep_samples
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
    devices = devices_of(config, len(task.parts), lambda: counts_of(task.dataset, task.parts))
    return Situation(config, task, initial.to_record(), evaluate_fn, devices=devices)


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


def attacks_of(config: ExperimentConfig, dataset: Dataset, parts: Sequence[np.ndarray]) -> dict[int, Attack]:
    """Return how each attacking client behaves, by partition."""
    requests = [Wanted(a.fraction, a.count, a.clients, a.richest_in) for a in config.attacks]
    counts = counts_of(dataset, parts)
    scale = dataset.mean or (0.0,), dataset.std or (1.0,)
    scene = Scene(config.seed, dataset.num_classes, *scale, dataset.sample_shape)
    found: dict[int, Attack] = {}
    chosen = choose_attackers(len(parts), requests, config.seed, counts)
    names = [part.name for part in config.attacks]
    for index, (part, ids) in enumerate(zip(config.attacks, chosen, strict=True)):
        attack: Attack = part.build()
        if isinstance(attack, Collusion) and config.aggregation.secure_groups:
            raise UserError(
                f"attacks.{index}: '{part.name}' is made from what honest clients sent, which "
                f"aggregation.secure_groups hides from everyone; leave one of them out"
            )
        label = (
            part.name if names.count(part.name) == 1 else f"{part.name}-{names[:index].count(part.name) + 1}"
        )
        found |= dict.fromkeys(ids, attack.placed(scene, Schedule(part.start, part.on, part.off), label))
    return found


def counts_of(dataset: Dataset, parts: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return how many samples of each class each client has (clients, classes); None for text."""
    return None if dataset.is_text else class_counts(dataset.train.y, parts, dataset.num_classes)


def resolve_device(device: str) -> str:
    """Return ``cuda`` or ``cpu``; raises UserError for a GPU that is not there."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UserError("--device cuda: torch finds no CUDA GPU here; use --device cpu or auto")
    return ("cuda" if available else "cpu") if device == "auto" else device


def build_strategy(config: ExperimentConfig, name: str, situation: Situation, engine: Engine) -> Strategy:
    """Build a strategy with what protects its clients around it.

    Raises InfeasibleError if its rule cannot work on so many clients, or groups of them, and UserError if it
    cannot be protected as the scenario says.
    """
    part = config.strategy_part(name)
    target, settings = registry.find("strategies", part.name).load(), part.settings()
    clients = situation.num_clients
    scheme = scheme_for(config, name, situation)
    if inspect.isclass(target) and issubclass(target, FederatedStrategy):
        # Data of the server's own are no setting: they are handed to the strategies that ask for them.
        if issubclass(target, FLTrust):
            settings["root"] = root_training(situation.task, settings["root_samples"])
        strategy: Strategy = cast(Any, target)(
            **settings,
            selector=config.selection.build(),
            before=[step.build() for step in part.before],
            seed=config.seed,
            rules=ReplyRules(max_examples=len(situation.task.dataset.train)),
            fraction_evaluate=0.0,
            submodels=scheme,
            devices=schedule_for(config, scheme, situation),
            **{"min_nodes": clients, **engine.waits},
        )
        inner = cast(FederatedStrategy, strategy)
        if isinstance(strategy, LearnedWeights | ServerAlone):
            strategy.bind(context_of(config, config.submodels_of(name), situation))
        inner.aggregator.check(config.aggregation.secure_groups or inner.selector.count(clients))
    elif config.submodels_of(name).name != "full":
        raise UserError(f"strategy '{part.name}' is Flower's own, which sends the whole model to everyone")
    else:
        strategy = cast(Strategy, target(**settings))
    return protected(strategy, config, clients, simulation=engine.simulated)


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
