"""``fedplat benchmark engines``: the same federated round on several engines.

``training`` trains the same clients on the same batches from the same model; after the first round all
engines must hold the same model. ``no-op`` measures what an engine adds to a client that does nothing, and
``gpu`` the engine against the plain loop on a GPU.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fedplat import registry
from fedplat.errors import UserError

from . import engine_flower, engine_peers, engine_plain
from .children import in_child
from .common import Report, Section, chosen, compared, cores, installed, middle, quiet, spread, take_turns
from .engine_results import (
    BLAZE,
    COLUMNS,
    COPY,
    LOOPS,
    OURS,
    PFL,
    RAY,
    TOLERANCE,
    agreement,
    engine_overhead,
    training_rows,
)
from .workload import Turn, Workload, before_forks, data_here, vector_of

# What may be typed for each of them.
NAMES = {"fedplat": (OURS,), "loop": LOOPS, "ray": (RAY,), "pfl": PFL, "blazefl": (BLAZE,)}
PARTS = ("training", "no-op", "gpu")
# The most samples that all clients together train on in a round: what makes a full run about an hour.
MODELS = {"softmax": 30_000, "mlp": 30_000, "cnn-hfl": 20_000, "cnn-fedavg": 1_000}
CLIENTS, BATCHES, SAMPLES = (10, 100, 1000), (10, 64), 600
_PATIENCE = 60.0  # seconds of an engine in one cell, after which it gets no further turn
IDLE_CLIENTS = {62_000: 100, 11_200_000: 10}


class DisagreementError(RuntimeError):
    """Engines that were given the same work came to different models, or ours could not do it."""


@dataclass(frozen=True)
class Options:
    """What to measure; ``samples`` is per client, and ``limit`` the longest a turn may take, in seconds."""

    parts: tuple[str, ...] = PARTS
    models: tuple[str, ...] = tuple(MODELS)
    clients: tuple[int, ...] = CLIENTS
    batches: tuple[int, ...] = BATCHES
    engines: tuple[str, ...] = tuple(NAMES)
    samples: int | None = None
    repeats: int = 3
    rounds: int = 2
    seed: int = 1
    limit: float = 300.0
    idle: tuple[tuple[int, int], ...] = tuple(IDLE_CLIENTS.items())


QUICK: dict[str, Any] = {"models": ("cnn-hfl",), "clients": (10,), "batches": (64,), "samples": 200}
QUICK |= {"repeats": 2, "idle": ((62_000, 20), (11_200_000, 3))}


def check(options: Options) -> None:
    """Raise UserError for a part, model or engine that does not exist."""
    chosen("part", options.parts, PARTS)
    chosen("engine", options.engines, NAMES)
    for model in options.models:
        registry.find("models", model)


def measure(options: Options, report: Report) -> None:
    """Fill the report; raises DisagreementError at the end if engines disagreed."""
    quiet()
    if "pfl" in options.engines and installed("pfl"):
        importlib.import_module("pfl.model.pytorch")  # it sets itself up in a main process only
    before_forks()
    report.options = asdict(options)
    if "training" in options.parts:
        _training(options, report)
    if "no-op" in options.parts:
        report.add(_no_op(options, report))
    if "gpu" in options.parts:
        report.add(_gpu(options, report))
    if report.failed:
        raise DisagreementError("; ".join(report.failed))


def missing(options: Options) -> list[str]:
    """Return why engines that were asked for cannot take part."""
    absent = {
        "ray": ("ray", "flwr[simulation]"),
        "pfl": ("pfl", "fedplat[bench]"),
        "blazefl": ("blazefl", "blazefl[contrib,reproducibility]"),
    }
    return [
        f"{NAMES[name][0].split(',')[0]}: not installed (pip install '{package}')"
        for name, (module, package) in absent.items()
        if name in options.engines and not installed(module)
    ]


def engines(work: Workload, options: Options) -> dict[str, Callable[[], Turn]]:
    """Return what takes a turn for a workload, by the engine's name."""
    rounds, limit = options.rounds, options.limit
    every: dict[str, Callable[[], Turn]] = {
        OURS: lambda: engine_flower.local_engine(work, rounds, limit),
        LOOPS[0]: lambda: engine_plain.loop(work, rounds, 1),
        LOOPS[1]: lambda: engine_plain.loop(work, rounds, cores()),
        LOOPS[2]: lambda: engine_plain.process_per_core(work, rounds),
        RAY: lambda: engine_flower.ray_simulation(work, rounds, limit),
        PFL[0]: lambda: engine_peers.pfl_simulation(work, rounds, 1),
        PFL[1]: lambda: engine_peers.pfl_simulation(work, rounds, cores()),
        BLAZE: lambda: engine_peers.blazefl_simulation(work, rounds),
    }
    names = [
        engine
        for name in NAMES
        if name in options.engines and (name not in ("ray", "pfl", "blazefl") or installed(name))
        for engine in NAMES[name]
    ]
    return {name: every[name] for name in names}


def _turns(
    things: Mapping[str, Callable[[], Any]], options: Options, report: Report
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Let every thing take its turns, each in a process of its own."""

    def turn(thing: Callable[[], Any]) -> Any:
        return in_child(thing, options.limit).value

    bound = {name: functools.partial(turn, thing) for name, thing in things.items()}
    return take_turns(bound, options.repeats, report.say, _PATIENCE)


# Training --------------------------------------------------------------------------------------------------


def _training(options: Options, report: Report) -> None:
    data, note = data_here(options.seed)
    notes = [note] if note else []
    for model in options.models:
        for clients in options.clients:
            for batch in options.batches:
                samples = options.samples or max(10, min(SAMPLES, MODELS.get(model, 1_000) // clients))
                work = Workload(model, clients, batch, samples, data, options.seed)
                report.add(_train(work, options, report, notes))


def _train(work: Workload, options: Options, report: Report, notes: Sequence[str]) -> Section:
    title = f"training: {work.model}, {work.clients} clients, batch {work.batch}"
    try:
        work.situation()
    except UserError as error:
        return Section(title, COLUMNS, [], list(notes), [f"all engines: {error}"])
    section = _compared(title, work, engines(work, options), options, report)
    section.notes[:0] = notes
    section.skipped[:0] = missing(options)
    return section


def _compared(
    title: str, work: Workload, things: Mapping[str, Callable[[], Turn]], options: Options, report: Report
) -> Section:
    """Let engines take their turns at a workload; what must not be is noted in the report's failures."""
    here = replace(work, device="cpu")
    start = engine_plain.PlainTrainer(here).state()
    initial = vector_of({name: value.numpy() for name, value in start.items()})
    title += f" ({initial.size:,} parameters, {len(here.task.parts[0])} samples each of {work.data})"
    report.say(title)
    turns, failures = _turns(things, options, report)
    differences = agreement({name: of[0].model for name, of in turns.items()}, initial)
    report.failed += [
        f"{title}: the model of {name} differs from the others' by {relative:.3g} of the largest change"
        for name, (_, relative) in differences.items()
        if not relative <= TOLERANCE
    ]
    report.failed += [f"{title}: {name}: {why}" for name, why in failures.items() if name == OURS]
    seconds = {name: [s for turn in of for s in turn.seconds[1:]] for name, of in turns.items()}
    arithmetic = {name: [s for turn in of for s in turn.arithmetic[1:]] for name, of in turns.items()}
    overhead = engine_overhead(seconds, arithmetic)
    skipped = [f"{name}: {why}" for name, why in failures.items()]
    rows = training_rows(seconds, differences)
    return Section(title, COLUMNS, rows, [overhead] if overhead else [], skipped)


# Clients that do nothing, and the GPU ----------------------------------------------------------------------


def _no_op(options: Options, report: Report) -> Section:
    columns = ("engine", "parameters", "clients", "ms per client", "in copies", "x ours", "spread")
    kinds = {OURS: "ours", "bare grid": "bare"} | (
        {RAY: "ray"} if "ray" in options.engines and installed("ray") else {}
    )
    rounds, limit, sizes = options.rounds + 2, options.limit, options.idle
    work: dict[str, Callable[[], list[list[float]]]] = {
        name: functools.partial(engine_flower.carry, kind, sizes, rounds, limit)
        for name, kind in kinds.items()
    }
    work[COPY] = lambda: [[0.0, engine_flower.copy_seconds(parameters)] for parameters, _ in sizes]
    report.say("clients that do nothing")
    turns, failures = _turns(work, options, report)
    rows: list[dict[str, Any]] = []
    for number, (parameters, clients) in enumerate(sizes):
        # The first round of each size is left out: it starts workers and finds memory.
        seconds = {name: [s for turn in of for s in turn[number][1:]] for name, of in turns.items()}
        copies = seconds.pop(COPY)
        per_client = {name: [s / clients for s in of] for name, of in seconds.items()}
        for name, figures in compared(per_client, OURS).items():
            each = figures["seconds"]
            values = (name, parameters, clients, 1000 * each, each / middle(copies))
            of = (*values, figures["ratio"], figures["spread"])
            rows.append(dict(zip(columns, of, strict=True)))
        last = (COPY, parameters, None, 1000 * middle(copies), 1.0, None, spread(copies))
        rows.append(dict(zip(columns, last, strict=True)))
    notes = [
        "clients return what they got; from sending the first message to having the last reply",
        "the bare grid calls the clients in this process and hands the same arrays on",
    ]
    return Section("no-op client", columns, rows, notes, [f"{name}: {why}" for name, why in failures.items()])


def _gpu(options: Options, report: Report) -> Section:
    title = "training on a GPU"
    if not torch.cuda.is_available():
        return Section(title, COLUMNS, [], [], ["torch finds no CUDA GPU here"])
    data, note = data_here(options.seed)
    model, batch, clients = options.models[-1], options.batches[-1], min(100, max(options.clients))
    samples = options.samples or SAMPLES
    work = Workload(model, clients, batch, samples, data, options.seed, "cuda")
    things: dict[str, Callable[[], Turn]] = {
        OURS: lambda: engine_flower.local_engine(work, options.rounds, options.limit),
        LOOPS[0]: lambda: engine_plain.loop(work, options.rounds, 1),
    }
    title += f": {model}, {clients} clients, batch {batch}"
    section = _compared(title, work, things, options, report)
    section.notes[:0] = [note] if note else []
    return section
