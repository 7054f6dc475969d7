"""``fedplat benchmark leakage``: what a curious server learns from what clients upload, by layer sets.

The same clients' uploads, whole as with FedAvg or in the layer sets of FedP3, are searched for the images
they were trained on and asked who was among the samples; then again with a client's noise on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedplat import registry
from fedplat.arrays import FlatArrays
from fedplat.clients.attacks.base import Scene
from fedplat.clients.attacks.leakage import Inversion
from fedplat.clients.attacks.leakage.study import (
    MEAN,
    NOISE,
    TRUTH,
    Inverted,
    Layers,
    Members,
    Noise,
    Samples,
    World,
    inversions,
    memberships,
    names_of,
)
from fedplat.clients.attacks.leakage.upload import upload_of
from fedplat.errors import UserError
from fedplat.layer_map import LayerMap
from fedplat.models import build
from fedplat.models.flat import FlatModel
from fedplat.rng import generator
from fedplat.strategies.fedp3.layers import LayerSets
from fedplat.training_config import LocalTraining

from .common import Report, Section, chosen, quiet
from .leakage_figure import draw_reconstructions
from .workload import Workload

PARTS = ("inversion", "membership", "noise")
WHOLE = "FedAvg: all"
SETS = {"LowerB": "lower-b", "OPU2": "opu2", "OPU3": "opu3"}
_DATA = {"cnn-cifar": "cifar10"}

INVERTED = ("upload", "share %", "images", "MSE", "PSNR dB", "sd dB", "SSIM", "beats mean %", "labels %")
GUESSED = ("upload", "score", "AUC", "AUC low", "AUC high", "TPR at 1 %", "TPR low", "TPR high", "accuracy %")
KINDS = ("kind", "sets", "PSNR dB", "least dB", "most dB", "SSIM", "beats mean %")
KINDS_GUESSED = ("kind", "sets", "score", "AUC", "least AUC", "most AUC", "TPR at 1 %")
HIDDEN = (
    "upload",
    "clip",
    "noise",
    "PSNR dB",
    "SSIM",
    "labels %",
    "AUC loss",
    "AUC calibrated",
    "accuracy %",
)


@dataclass(frozen=True)
class Options:
    """What to attack.

    ``parts`` are some of PARTS, all if empty. Inversion: clients with ``batches`` images, ``repeats`` of them
    each, ``steps`` local steps at ``lr`` from fresh weights; the search takes ``iterations`` of ``pace``
    pixels. Membership: ``clients`` that train ``epochs`` over ``samples`` samples at ``training_lr``, from
    weights trained ``pretraining`` epochs on half of the ``public`` samples, which are the server's.
    """

    models: tuple[str, ...] = ("cnn-mudhog-mnist", "cnn-cifar")
    batches: tuple[int, ...] = (1, 4)
    repeats: int = 3
    steps: int = 1
    lr: float = 0.1
    iterations: int = 100
    restarts: int = 1
    pace: float = 0.3
    tv: float = 0.1
    samples: int = 100
    clients: int = 4
    references: int = 2
    epochs: int = 10
    training_lr: float = 0.05
    public: int = 1000
    pretraining: int = 5
    clip: float = 1.0
    noises: tuple[float, ...] = (0.0, 0.003, 0.01, 0.03)
    parts: tuple[str, ...] = ()
    keep: Path | None = None
    seed: int = 1


QUICK: dict[str, Any] = {
    "models": ("cnn-mudhog-mnist",),
    "batches": (1,),
    "repeats": 1,
    "iterations": 60,
    "samples": 50,
    "clients": 2,
    "references": 1,
    "noises": (0.0, 0.01),
}


def check(options: Options) -> None:
    """Raise UserError for models that do not exist and numbers that make no sense."""
    for name in options.models:
        registry.find("models", name)
    chosen("part of leakage", options.parts, PARTS)
    if wrong := [size for size in options.batches if not 1 <= size <= 64]:
        raise UserError(f"batches to reconstruct have 1 to 64 images; found {wrong[0]}")
    if options.samples * options.clients < 100:
        raise UserError(
            f"{options.clients} clients with {options.samples} samples are too few to tell a rate of 1 %: "
            "100 samples in all are the least"
        )
    if options.samples > options.public // 2 or min(options.repeats, options.clients, options.steps) < 1:
        raise UserError(
            "the server has at least twice a client's samples, and everything is done at least once"
        )
    _search(options)
    if options.keep is not None and options.keep.exists():
        raise UserError(f"--keep: {options.keep} exists already; name a new folder")


def measure(options: Options, report: Report) -> None:
    """Fill the report, five sections for each model, and draw what was reconstructed."""
    quiet()
    report.options = asdict(options)
    for model in options.models:
        world, data = world_of(model, options)
        uploads = uploads_of(world)
        fresh, title = world.weights(), f"{model} on {data}"
        for part in options.parts or PARTS:
            world.model.load(fresh)  # whatever the part before has left in it
            if part == "inversion":
                _inversion(title, world, uploads, options, report)
            elif part == "membership":
                _membership(title, world, uploads, options, report)
            else:
                _noise(title, world, options, report)


def world_of(model: str, options: Options) -> tuple[World, str]:
    """Return a fresh model with the clients' pool and the server's samples, and the name of the data."""
    name = _DATA.get(model, "mnist")
    try:
        data = Workload("softmax", 1, 10, 10, name, options.seed).situation().task.dataset
    except UserError as error:
        raise UserError(f"leakage of '{model}' is measured on {name}: {error}") from error
    rng = generator(options.seed, "leakage-world")
    private = np.sort(rng.choice(len(data.train), min(len(data.train), 5000), replace=False))
    public = np.sort(rng.choice(len(data.test), min(len(data.test), options.public), replace=False))
    target = registry.find("models", model).load()
    flat = FlatModel(build(target, data.sample_shape, data.num_classes, options.seed))
    scene = Scene(options.seed, data.num_classes, data.mean, data.std, data.sample_shape)
    both = [
        Samples(data.prepare(split.x[rows]), torch.from_numpy(np.asarray(split.y[rows], np.int64)))
        for split, rows in ((data.train, private), (data.test, public))
    ]
    return World(flat, scene, *both), data.name


def uploads_of(world: World) -> dict[str, Layers]:
    """Return all kinds of uploads by name, "kind: layers"; a set that holds all hidden layers is FedAvg's."""
    count = len(LayerMap.of(world.model.layout).hidden)
    sets = {}
    for kind, name in SETS.items():
        drawn = LayerSets(name, "rotation", count, count)  # type: ignore[arg-type]
        found = {drawn(client, 1) for client in range(count)}
        sets[kind] = [one for one in sorted(found) if len(one) < count]
    return {WHOLE: None, **names_of(world, sets)}


# Parts -----------------------------------------------------------------------------------------------------


def _inversion(
    title: str, world: World, uploads: Mapping[str, Layers], options: Options, report: Report
) -> None:
    sent = world.weights()
    drawn: dict[int, dict[str, Inverted]] = {}
    for size in options.batches:
        report.say(f"{title}: batches of {size}")
        found = drawn[size] = inversions(
            world, sent, uploads, size, options.repeats, _one_step(options), _search(options), options.seed
        )
        rows = [
            inverted_row(name, found[name], share(sent, uploads, name)) for name in found if name != TRUTH
        ]
        notes = [
            f"{options.repeats} clients with {size} image(s) each, {options.steps} step(s) of SGD from fresh "
            f"weights; {options.iterations} iterations, {options.restarts} start(s)",
            f"'{MEAN}' and '{NOISE}' are guesses without an upload; share: of the parameters uploaded",
        ]
        report.add(Section(f"images from uploads, {title}, batches of {size}", INVERTED, rows, notes))
        report.add(Section(f"by kind, {title}, batches of {size}", KINDS, inverted_kinds(rows)))
    if options.keep is not None:
        draw_reconstructions(drawn, options.keep / f"reconstructions-{title.split()[0]}.png", title)


def _membership(
    title: str, world: World, uploads: Mapping[str, Layers], options: Options, report: Report
) -> None:
    report.say(f"{title}: members")
    found = _guessed(world, uploads, options)
    rows = [guessed_row(name, score, one) for name, one in found.items() for score in one.scores]
    notes = [
        f"{options.clients} clients, {options.epochs} epochs over {options.samples} samples each; as many "
        "others of the same labels; 95 % of bootstrap draws of the samples",
        f"accuracy: of the completed models, on the others; {options.references} reference models",
    ]
    report.add(Section(f"members from uploads, {title}", GUESSED, rows, notes))
    report.add(Section(f"members by kind, {title}", KINDS_GUESSED, guessed_kinds(rows)))


def _noise(title: str, world: World, options: Options, report: Report) -> None:
    rows, fresh, size = [], world.weights(), min(options.batches)
    whole: dict[str, Layers] = {WHOLE: None}
    for value in options.noises:
        report.say(f"{title}: noise {value:g}")
        noise = Noise(options.clip, value)
        world.model.load(fresh)
        seen = inversions(
            world,
            fresh,
            whole,
            size,
            options.repeats,
            _one_step(options),
            _search(options),
            options.seed,
            noise,
        )[WHOLE]
        world.model.load(fresh)
        told = _guessed(world, whole, options, noise)[WHOLE]
        aucs = [told.scores[score].auc for score in ("loss", "calibrated")]
        values = (
            WHOLE,
            options.clip,
            value,
            _mean(seen.psnr),
            _mean(seen.ssim),
            100 * _mean(seen.labels),
            *aucs,
        )
        rows.append(dict(zip(HIDDEN, (*values, 100 * told.accuracy), strict=True)))
    notes = [
        "updates clipped to an L2 norm of 'clip', then noise of 'noise' times that on every element",
        f"batches of {size}; noise far below 1 is no guarantee: its epsilon is too large to mean anything",
    ]
    report.add(Section(f"with noise, {title}", HIDDEN, rows, notes))


def _guessed(
    world: World, uploads: Mapping[str, Layers], options: Options, noise: Noise | None = None
) -> dict[str, Members]:
    """Return what is told of members of clients that go on from a model of the server's own making."""
    fresh = world.weights()
    half = len(world.public.y) // 2
    rows = np.arange(len(world.public.y))
    training = LocalTraining(epochs=options.epochs, batch_size=10, lr=options.training_lr)
    before = training.model_copy(update={"epochs": options.pretraining})
    rng = generator(options.seed, "leakage-pretraining")
    sent = world.trained(fresh, world.public.rows(rows[:half]), before, rng)
    # What the model was trained on says little about how hard a sample is: the references have the rest.
    own = World(world.model, world.scene, world.private, world.public.rows(rows[half:]))
    found = memberships(
        own,
        sent,
        uploads,
        options.samples,
        options.clients,
        options.references,
        training,
        options.seed,
        noise,
    )
    world.model.load(fresh)
    return found


def _one_step(options: Options) -> LocalTraining:
    return LocalTraining(steps=options.steps, lr=options.lr)


def _search(options: Options) -> Inversion:
    return Inversion(options.iterations, options.restarts, options.pace, options.tv)


# Rows ------------------------------------------------------------------------------------------------------


def share(sent: FlatArrays, uploads: Mapping[str, Layers], name: str) -> float | None:
    """Return the share of the parameters that an upload holds, in per cent; None for a guess."""
    if name not in uploads:
        return None
    return 100 * upload_of(sent, sent, uploads[name], 1.0).returned.layout.dim / sent.layout.dim


def inverted_row(name: str, found: Inverted, part: float | None) -> dict[str, Any]:
    """Return one row of images."""
    labels = 100 * _mean(found.labels) if found.labels else None
    psnr = float(np.std(found.psnr))
    values = (name, part, len(found.psnr), _mean(found.mse), _mean(found.psnr), psnr, _mean(found.ssim))
    return dict(zip(INVERTED, (*values, 100 * _mean(found.beats_mean), labels), strict=True))


def inverted_kinds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per kind of upload: means over its layer sets, which as many clients each would have."""
    found = []
    for kind, own in by_kind(rows).items():
        dbs = [row["PSNR dB"] for row in own]
        others = [_mean([row[column] for row in own]) for column in ("SSIM", "beats mean %")]
        found.append(dict(zip(KINDS, (kind, len(own), _mean(dbs), min(dbs), max(dbs), *others), strict=True)))
    return found


def guessed_row(name: str, score: str, found: Members) -> dict[str, Any]:
    """Return one row of members."""
    one = found.scores[score]
    values = (name, score, one.auc, *one.auc_range, one.tpr, *one.tpr_range, 100 * found.accuracy)
    return dict(zip(GUESSED, values, strict=True))


def guessed_kinds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per kind of upload and score."""
    found = []
    for kind, both in by_kind(rows).items():
        for score in ("loss", "calibrated"):
            own = [row for row in both if row["score"] == score]
            if not own:
                continue
            aucs = [row["AUC"] for row in own]
            tpr = _mean([row["TPR at 1 %"] for row in own])
            values = (kind, len(own), score, _mean(aucs), min(aucs), max(aucs), tpr)
            found.append(dict(zip(KINDS_GUESSED, values, strict=True)))
    return found


def by_kind(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows by the word before the colon of their upload.

    >>> list(by_kind([{"upload": "OPU2: a+b"}, {"upload": "OPU2: b+c"}, {"upload": "noise"}]))
    ['OPU2', 'noise']
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["upload"].partition(":")[0], []).append(row)
    return found


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")
