"""Whether a model's clients are trained together, and how many at once: known, measured, or told."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import platform
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedplat.arrays import FlatArrays
from fedplat.models.flat import FlatModel
from fedplat.runtime.local import available_cores
from fedplat.training_config import LocalTraining

from ..training import train_one
from .modules import NotStackable
from .trainer import Learner, StackedTrainer

_USUAL_GROUP = 16
_CPU_SIZES = (1, 4, 8, 16, 64)
_GPU_SIZES = (1, 8, 32, 128, 512)
_STEPS = 3
_WORTH = 1.3  # stacking that changes bits has to be this much faster
_AS_GOOD = 1.1  # times the best: of sizes as fast as this, the smallest
_LONG_STEP = 50e3  # microseconds: arithmetic is all of such a step on a CPU, so there is nothing to gain
_LONG_TRY = 0.5  # seconds: long enough to be measured once
_HOPELESS = 1.5  # times the best so far: larger groups will not be better
_SHARE_OF_MEMORY = 0.5
_MOST_BYTES = 512 << 20


@dataclass(frozen=True)
class Execution:
    """How a worker trains its clients: ``stacked`` or one after another, at most ``group`` in one call.

    ``exact`` says that the results have the same bits for every group. ``microseconds`` per client and step
    are what was measured, by size of group, with ``single`` for one after another by autograd; ``source``
    tells where the choice comes from: ``measured``, ``cached``, ``given`` or ``known``.
    """

    stacked: bool
    group: int
    exact: bool
    source: str
    microseconds: dict[str, float]

    def summary(self) -> str:
        """Return the choice as a line for a reader.

        >>> Execution(True, 16, True, "measured", {"single": 200.0, "16": 40.0}).summary()
        'up to 16 clients at once in each worker, 5.0x the speed of one after another (measured)'
        """
        if self.group == 1:
            return f"one client after another in each worker ({self.source})"
        single, ours = (self.microseconds.get(key) for key in ("single", str(self.group)))
        gain = f", {single / ours:.1f}x the speed of one after another" if single and ours else ""
        return f"up to {self.group} clients at once in each worker{gain} ({self.source})"


def known_execution(
    build_model: Callable[[], nn.Module], training: LocalTraining, sample: Tensor, group: int | None = None
) -> Execution | None:
    """Return the choice that needs no measurement; None if it takes one to decide.

    Where stacking changes no bits it is used, in groups of ``group``. One group size given decides; a model
    that cannot be stacked decides as well.
    """
    try:
        trainer = _trainer(FlatModel(build_model()), training, sample)
    except NotStackable:
        return Execution(False, 1, True, "known", {})
    exact = trainer.kernel.exact
    if group is not None:
        return Execution(exact or group > 1, group, exact or group == 1, "given", {})
    return None


def usual_execution(
    build_model: Callable[[], nn.Module], training: LocalTraining, sample: Tensor
) -> Execution:
    """Return a choice that depends on the model alone: what changes no bits, in groups of usual size."""
    known = known_execution(build_model, training, sample)
    if known is not None:
        return known
    exact = _trainer(FlatModel(build_model()), training, sample).kernel.exact
    return Execution(exact, _USUAL_GROUP if exact else 1, True, "known", {})


def measured_execution(
    build_model: Callable[[], nn.Module], training: LocalTraining, sample: Tensor, device: str, cache: Path
) -> Execution:
    """Return the fastest way for a model on this machine, from a trial of a few steps or an earlier one.

    The trial runs in processes of its own on a CPU. On a GPU, groups grow while half of the free memory
    holds them. What was measured is kept in ``cache`` under the model, the settings and the machine.
    """
    known = known_execution(build_model, training, sample)
    if known is not None:
        return known
    path = cache / "group-sizes" / f"{_key(build_model, training, sample, device)}.json"
    if (found := _read(path)) is not None:
        return found

    def trial() -> dict[str, float]:
        return _measure(FlatModel(build_model(), device), training, sample.to(device))

    microseconds = trial() if device != "cpu" else _in_workers(trial)
    exact = _trainer(FlatModel(build_model()), training, sample).kernel.exact
    chosen = decide(microseconds, exact)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{time.time_ns()}")
    temporary.write_text(json.dumps(asdict(chosen)))
    temporary.replace(path)
    return chosen


def decide(microseconds: dict[str, float], exact: bool) -> Execution:
    """Choose from measured microseconds per client and step, by size of group and for ``single``.

    >>> decide({"single": 100.0, "1": 90.0, "4": 40.0, "16": 39.0}, exact=False).group
    4
    >>> decide({"single": 100.0, "1": 120.0, "4": 90.0}, exact=False).stacked
    False
    """
    sizes = {int(size): value for size, value in microseconds.items() if size != "single"}
    if not sizes:
        return Execution(exact, 1, True, "measured", microseconds)
    best = min(sizes.values())
    group = min(size for size, value in sizes.items() if value <= _AS_GOOD * best)
    stacked = exact or microseconds["single"] >= _WORTH * sizes[group]
    return Execution(stacked, group if stacked else 1, exact or not stacked, "measured", microseconds)


def _measure(model: FlatModel, training: LocalTraining, sample: Tensor) -> dict[str, float]:
    """Return the least microseconds per client and step of a few tries, for one by one and for groups."""
    training = training.model_copy(update={"steps": _STEPS, "epochs": 1, "keep_optimizer": False})
    per_client = min(training.batch_size, 256)
    x = sample.expand(per_client, *sample.shape[1:]).contiguous()
    y = torch.zeros((per_client, *sample.shape[1:]) if sample.ndim == 2 else per_client, dtype=torch.int64)
    y = y.to(model.device)
    start = FlatArrays(model.layout, model.vector.cpu().numpy().copy(), model.side.cpu().numpy().copy())
    trainer = StackedTrainer(model.module, model.layout, training, x[:1], model.device)

    def single() -> None:
        train_one(model, training, x, y, np.random.default_rng(0))

    def group_of(size: int) -> Callable[[], None]:
        def run() -> None:
            learners = [
                Learner(np.arange(per_client), np.random.default_rng(0), torch.Generator(model.device))
                for _ in range(size)
            ]
            trainer.train([start] * size, x, y, learners)

        return run

    found = {"single": _seconds(single, model.device) / _STEPS * 1e6}
    if model.device.type == "cpu" and found["single"] > _LONG_STEP:
        return found
    for size in _fitting_sizes(model):
        try:
            seconds = _seconds(group_of(size), model.device)
        except torch.cuda.OutOfMemoryError:
            break
        found[str(size)] = seconds / _STEPS / size * 1e6
        if found[str(size)] > _HOPELESS * min(value for key, value in found.items() if key != "single"):
            break
        if model.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            if 4 * torch.cuda.max_memory_allocated() > _SHARE_OF_MEMORY * free:
                break
    return found


def _fitting_sizes(model: FlatModel) -> Iterable[int]:
    if model.device.type == "cuda":
        return _GPU_SIZES
    return [size for size in _CPU_SIZES if size == 1 or 3 * 4 * size * model.layout.dim <= _MOST_BYTES]


def _seconds(work: Callable[[], None], device: torch.device, tries: int = 3) -> float:
    found: list[float] = []
    while len(found) <= tries and max(found[1:], default=0.0) < _LONG_TRY:
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found[1:])  # the first one also allocates, and loads what is needed


def _in_workers(trial: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Run a trial in as many forked processes as there will be workers, and return the means.

    Each has one thread. They run at once because they share caches and memory, as the workers will.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return trial()
    fork = multiprocessing.get_context("fork")

    def child(connection: Connection) -> None:
        torch.set_num_threads(1)
        connection.send(trial())

    found: list[dict[str, float]] = []
    running = []
    for _ in range(available_cores()):
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=child, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        running.append((process, ours))
    for process, ours in running:
        with suppress(EOFError):  # whatever ended it, it has printed
            found.append(ours.recv())
        process.join()
    if not found:
        raise RuntimeError("the trial of group sizes ended without a result")
    return {key: mean(each[key] for each in found) for key in found[0] if all(key in each for each in found)}


def _trainer(model: FlatModel, training: LocalTraining, sample: Tensor) -> StackedTrainer:
    return StackedTrainer(model.module, model.layout, training, sample, model.device)


def _key(build_model: Callable[[], nn.Module], training: LocalTraining, sample: Tensor, device: str) -> str:
    module = build_model()
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    name = torch.cuda.get_device_name() if device != "cpu" else platform.processor() or platform.machine()
    facts: list[Any] = [str(module), shapes, tuple(sample.shape), training.model_dump(exclude={"lr"})]
    facts += [device, name, platform.node(), available_cores(), torch.__version__, 2]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _read(path: Path) -> Execution | None:
    try:
        return Execution(**{**json.loads(path.read_text()), "source": "cached"})
    except (OSError, ValueError, TypeError):
        return None
