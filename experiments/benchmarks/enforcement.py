"""``fedplat benchmark enforcement``: real limits: the least memory that training takes, the speed of links.

Each model is built and trained for three steps in processes whose memory the kernel limits, and the limit is
bisected. What the estimate does not count shows as the difference: Python, pieces of the heap,
kernels' scratch memory. Then bytes are sent through a shaped link, one way at a time, by the real clock.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedplat import registry
from fedplat.clients.training import train_one
from fedplat.deployment.shaped_link import ShapedLink
from fedplat.emulation.enforce import (
    OVERHEAD_BYTES,
    OutOfMemory,
    least_cap,
    process_overhead_bytes,
    why_not_enforced,
)
from fedplat.emulation.memory import training_memory
from fedplat.errors import UserError, unknown_name
from fedplat.models import build
from fedplat.models.flat import FlatModel
from fedplat.rng import generator
from fedplat.training_config import LocalTraining

from .common import Report, Section, middle, quiet

COLUMNS = ("model", "optimizer", "batch", "estimate MB", "least MB", "beyond MB", "least / estimate")
LINK_COLUMNS = ("way", "asked Mbit/s", "seconds", "achieved Mbit/s", "achieved / asked")
MODELS = ("mlp", "cnn-fedavg", "cnn-mudhog-fashion", "cnn-cifar", "char-lstm")
_CLASSES, _IMAGE, _TEXT = 10, (3, 32, 32), (80,)


@dataclass(frozen=True)
class Options:
    """What to train: models of the registry, with batches of these sizes."""

    models: tuple[str, ...] = MODELS
    batches: tuple[int, ...] = (16, 64)
    optimizers: tuple[str, ...] = ("sgd", "adam")
    step_kb: int = 256
    mbps: tuple[int, ...] = (1, 10, 100, 1000)
    seconds: float = 4.0
    seed: int = 1


QUICK: dict[str, Any] = {
    "models": MODELS[:2],
    "batches": (64,),
    "optimizers": ("sgd",),
    "mbps": (10, 100),
    "seconds": 2.0,
}


def check(options: Options) -> None:
    """Raise UserError for unknown models and for sizes below 1, and where nothing can be limited."""
    for name in options.models:
        registry.find("models", name)
    if any(size < 1 for size in (*options.batches, options.step_kb, *options.mbps)) or options.seconds <= 0:
        raise UserError("sizes of batches and of the bisection's step, and speeds, are numbers from 1")
    if wrong := [name for name in options.optimizers if name not in ("sgd", "adam")]:
        raise unknown_name("optimizer", wrong[0], ("sgd", "adam"))
    if reason := why_not_enforced():
        raise UserError(f"enforcement cannot be measured here: {reason}")


def measure(options: Options, report: Report) -> None:
    """Fill the report: a section with a row per model, optimizer and batch, and one of links."""
    quiet()
    report.options = asdict(options)
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    base = process_overhead_bytes()
    try:
        for name in options.models:
            for optimizer in options.optimizers:
                for size in options.batches:
                    what = f"{name}, {optimizer}, batches of {size}"
                    report.say(what)
                    try:
                        rows.append(row_of(name, optimizer, size, options))
                    except OutOfMemory as error:
                        skipped.append(f"{what}: more than four times the estimate ({error})")
    finally:  # also of a run that is interrupted
        report.add(Section("enforced memory", COLUMNS, rows, _notes(rows, base), skipped))
    links: list[dict[str, Any]] = []
    try:
        for mbps in options.mbps:
            for way in ("down", "up"):
                report.say(f"{mbps} Mbit/s {way}")
                links.append(link_row(way, mbps, options.seconds))
    finally:
        notes = ["one connection over the loopback interface; the bytes of the first burst are not counted"]
        report.add(Section("shaped links", LINK_COLUMNS, links, notes))


def row_of(name: str, optimizer: str, size: int, options: Options) -> dict[str, Any]:
    """Return one row."""
    module, shape = model_of(name)
    training = LocalTraining(optimizer="adam" if optimizer == "adam" else "sgd", batch_size=size)
    estimate = training_memory(module, shape, size, training).total
    work = client_of(name, shape, training, options.seed)
    least = least_cap(work, 0, 4 * estimate + OVERHEAD_BYTES, options.step_kb * 1024)
    values = (name, optimizer, size, estimate / 1e6, least / 1e6, (least - estimate) / 1e6, least / estimate)
    return dict(zip(COLUMNS, values, strict=True))


def model_of(name: str) -> tuple[torch.nn.Module, tuple[int, ...]]:
    """Return a model of the registry as it is without settings, and the shape of a sample of its."""
    target = registry.find("models", name).load()
    try:
        return build(target, _IMAGE, _CLASSES, 0), _IMAGE
    except UserError:  # a model of text
        return build(target, _TEXT, _CLASSES, 0), _TEXT


def client_of(name: str, shape: tuple[int, ...], training: LocalTraining, seed: int) -> Callable[[], object]:
    """Return what a client does: build the model, train three steps. Its samples are there already."""
    text, size = len(shape) == 1, training.batch_size
    x = torch.zeros(size, *shape, dtype=torch.int64 if text else torch.float32)
    y = torch.zeros(x.shape if text else size, dtype=torch.int64)
    three = training.model_copy(update={"steps": 3})

    def train() -> object:
        flat = FlatModel(model_of(name)[0])
        return train_one(flat, three, x, y, generator(seed, "benchmark-enforcement"))

    return train


def link_row(way: str, mbps: int, seconds: float) -> dict[str, Any]:
    """Send for about so long through a link of a speed, and return what the receiver saw."""
    burst = 64 << 10
    size = burst + int(mbps * 1e6 / 8 * seconds)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ShapedLink(("127.0.0.1", 0), server.getsockname()[:2], burst=burst) as link,
    ):
        link.set_rates(*((mbps * 1e6, math.inf) if way == "down" else (math.inf, mbps * 1e6)))
        near = socket.create_connection(link.address)
        far, _ = server.accept()
        with near, far:
            sender, receiver = (far, near) if way == "down" else (near, far)
            sending = threading.Thread(target=sender.sendall, args=(bytes(size),))
            start = time.perf_counter()
            sending.start()
            got = 0
            while got < size:
                got += len(receiver.recv(1 << 20))
            taken = time.perf_counter() - start
            sending.join()
    achieved = 8e-6 * (size - burst) / taken
    return dict(zip(LINK_COLUMNS, (way, mbps, taken, achieved, achieved / mbps), strict=True))


def _notes(rows: list[dict[str, Any]], base: int) -> list[str]:
    notes = [
        f"a process takes {base / 1e6:.2g} MB to train a net of a few kB; clients get "
        f"{OVERHEAD_BYTES / 1e6:.2g} MB on top of their cap",
        "samples are zeros, held by the parent; limit: RLIMIT_DATA; one thread",
    ]
    if rows:
        notes.append(f"median of least / estimate: {middle([r['least / estimate'] for r in rows]):.2f}")
    return notes
