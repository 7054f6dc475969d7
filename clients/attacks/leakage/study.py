"""The comparison: the same clients, attacked by what different layer sets leave in their uploads.

A client trains once; every kind of upload is a selection of what came out, so differences between kinds are
those of the selection alone. All attacks have the same number of steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedplat.arrays import FlatArrays
from fedplat.errors import UserError
from fedplat.layer_map import LayerMap
from fedplat.models.flat import FlatModel
from fedplat.rng import generator
from fedplat.training_config import LocalTraining

from ...training import train_one
from ..base import Scene
from .inversion import Inversion, invert, labels_of
from .membership import Membership, calibrated_scores, loss_scores, membership, same_labels, sample_losses
from .quality import class_means, matched, mse, nearest, psnr, ssim
from .upload import protected, upload_of

Layers = tuple[str, ...] | None


@dataclass(frozen=True)
class Samples:
    """Prepared samples ``x`` (n, ...) with labels ``y`` (n,)."""

    x: Tensor
    y: Tensor

    def rows(self, rows: NDArray[np.int64]) -> Samples:
        """Return some of them."""
        index = torch.from_numpy(rows)
        return Samples(self.x[index], self.y[index])


@dataclass(frozen=True)
class World:
    """A model and who holds what: ``private`` is the pool that clients draw from, ``public`` the server's.

    The server knows the model it sends, how clients train, and how many samples a client has. Raises
    UserError for a model with BatchNorm or other buffers.
    """

    model: FlatModel
    scene: Scene
    private: Samples
    public: Samples

    def __post_init__(self) -> None:
        if self.model.layout.dim != self.model.layout.num_params or self.model.layout.side_bytes:
            raise UserError("leakage is studied for models without BatchNorm or other buffers")

    def weights(self) -> FlatArrays:
        """Return a copy of the weights that the model has now."""
        copy = self.model.layout.new()
        self.model.store(copy)
        return copy

    def trained(
        self, sent: FlatArrays, samples: Samples, training: LocalTraining, rng: np.random.Generator
    ) -> FlatArrays:
        """Return what a client makes of a model."""
        self.model.load(sent)
        train_one(self.model, training, samples.x, samples.y, rng)
        return self.weights()

    @property
    def head_bias(self) -> str:
        """The name of the head's bias; raises UserError if it has none."""
        entries = self.model.layout.entries
        head = [entry.name for entry in entries if len(entry.shape) >= 2][-1].rpartition(".")[0]
        if (name := f"{head}.bias") in self.model.layout.by_name:
            return name
        raise UserError("labels of batches are inferred from the head's bias, and this model's head has none")


@dataclass(frozen=True)
class Noise:
    """What a client does before it uploads: clip its update, and add noise of ``noise`` times the clip."""

    clip: float
    noise: float


@dataclass
class Inverted:
    """Figures of one kind of upload: a value per image, and per batch the share of labels found."""

    mse: list[float] = field(default_factory=list)
    psnr: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)
    beats_mean: list[float] = field(default_factory=list)
    labels: list[float] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)

    def add(self, truth: Tensor, found: Tensor, mean: Tensor) -> None:
        """Take in images (n, C, H, W) beside the true ones and those of the nearest class means."""
        error = mse(truth, found)
        self.mse += error.tolist()
        self.psnr += psnr(truth, found).tolist()
        self.ssim += ssim(truth, found).tolist()
        self.beats_mean += (error < mse(truth, mean)).double().tolist()
        self.images.append(found)


TRUTH, MEAN, NOISE, NOTHING = "true images", "nearest class mean", "noise", "no upload"


def inversions(
    world: World,
    sent: FlatArrays,
    uploads: Mapping[str, Layers],
    count: int,
    batches: int,
    training: LocalTraining,
    settings: Inversion,
    seed: int,
    noise: Noise | None = None,
) -> dict[str, Inverted]:
    """Attack uploads of clients with ``count`` images each, ``batches`` clients; return figures by name.

    ``training`` gives lr and steps; every step takes all images. Also returned: the true images, the class
    mean of the public samples that is nearest to each of them, and noise.
    """
    if not 1 <= count <= 64 or batches < 1:
        raise UserError(f"1 to 64 images of 1 or more clients are reconstructed, not {count} of {batches}")
    training = training.model_copy(update={"batch_size": count, "steps": training.steps or 1})
    means = class_means(world.scene.pixels(world.public.x), world.public.y)
    expected = _expected(world, sent)
    found = {name: Inverted() for name in (TRUTH, MEAN, NOISE, *uploads)}
    for number in range(batches):
        rows = generator(seed, "leakage-images", number).choice(len(world.private.y), count, replace=False)
        own = world.private.rows(rows)
        truth = world.scene.pixels(own.x)
        trained = world.trained(sent, own, training, generator(seed, "leakage-order", number))
        if noise is not None:
            rng = generator(seed, "leakage-noise", number)
            trained = protected(sent, trained, noise.clip, noise.noise, rng)
        mean = nearest(truth, means)
        drawn = generator(seed, "leakage-guess", number).uniform(0, 1, truth.shape).astype(np.float32)
        for name, guess in ((TRUTH, truth), (MEAN, mean), (NOISE, torch.from_numpy(drawn))):
            found[name].add(truth, guess, mean)
        for name, layers in uploads.items():
            upload = upload_of(sent, trained, layers, training.lr, training.steps or 1)
            labels = labels_of(upload.gradient[world.head_bias], count, expected)
            # The same starts for every kind of upload.
            rng = generator(seed, "leakage-starts", number)
            best = invert(world.model.module, upload, labels, world.scene, settings, rng)
            found[name].add(truth, matched(truth, best.pixels), mean)
            found[name].labels.append(overlap(own.y, labels))
    return found


def overlap(truth: Tensor, found: Tensor) -> float:
    """Return the share of a batch's labels that were found, each as often as it is there.

    >>> overlap(torch.tensor([3, 3, 5, 1]), torch.tensor([3, 5, 5, 1]))
    0.75
    """
    a, b = truth.bincount(minlength=1), found.bincount(minlength=1)
    size = min(len(a), len(b))
    return float(torch.minimum(a[:size], b[:size]).sum()) / len(truth)


@dataclass(frozen=True)
class Members:
    """Membership figures of one kind of upload, by score: ``loss``, and ``calibrated`` if there was any."""

    scores: Mapping[str, Membership]
    accuracy: float


def memberships(
    world: World,
    sent: FlatArrays,
    uploads: Mapping[str, Layers],
    count: int,
    clients: int,
    references: int,
    training: LocalTraining,
    seed: int,
    noise: Noise | None = None,
) -> dict[str, Members]:
    """Attack uploads of clients that train on ``count`` samples each; return figures by name.

    The server completes a model with what it sent and looks at losses; others are as many samples of the same
    labels. Its references are models that it trains itself, as clients do, from the model sent on ``count``
    public samples each, and of which it takes the same layers; with none, the model sent. Scores of all
    clients are judged together, by one threshold. ``accuracy`` is that of completed models on the others. The
    first entry is that of the model sent, which knows nothing of members: what chance gives.
    """
    if clients < 1 or references < 0:
        raise UserError(
            f"membership needs 1 or more clients and no negative number of references, not {clients}"
        )
    if references and count > len(world.public.y):
        raise UserError(f"references train on {count} public samples, and there are {len(world.public.y)}")
    pool = world.private.y.numpy()
    known = [_reference(world, sent, count, training, seed, number) for number in range(references)]
    raw: dict[str, list[tuple[NDArray[np.float64], ...]]] = {name: [] for name in (NOTHING, *uploads)}
    right: dict[str, list[float]] = {name: [] for name in raw}
    for client in range(clients):
        members, others = same_labels(pool, count, generator(seed, "leakage-members", client))
        own, rest = world.private.rows(members), world.private.rows(others)
        trained = world.trained(sent, own, training, generator(seed, "leakage-training", client))
        if noise is not None:
            trained = protected(
                sent, trained, noise.clip, noise.noise, generator(seed, "leakage-hiding", client)
            )
        both = Samples(torch.cat([own.x, rest.x]), torch.cat([own.y, rest.y]))
        simple = loss_scores(sample_losses(world.model, sent, both.x, both.y))
        raw[NOTHING].append((simple[:count], simple[count:]))
        right[NOTHING].append(_accuracy(world, sent, sent, None, rest, training.lr))
        for name, layers in uploads.items():
            losses = _losses(world, sent, trained, layers, both, training.lr)
            beside = [_losses(world, sent, model, layers, both, training.lr) for model in known]
            if not beside:
                beside = [sample_losses(world.model, sent, both.x, both.y)]
            simple, hard = loss_scores(losses), calibrated_scores(losses, beside)
            raw[name].append((simple[:count], simple[count:], hard[:count], hard[count:]))
            right[name].append(_accuracy(world, sent, trained, layers, rest, training.lr))
    found = {}
    for name, parts in raw.items():
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        # The same draws for every kind of upload.
        scores = {
            score: membership(columns[at], columns[at + 1], generator(seed, "leakage-bootstrap"))
            for score, at in (("loss", 0), ("calibrated", 2))
            if at < len(columns)
        }
        found[name] = Members(scores, float(np.mean(right[name])))
    return found


def _reference(
    world: World, sent: FlatArrays, count: int, training: LocalTraining, seed: int, number: int
) -> FlatArrays:
    rng = generator(seed, "leakage-references", number)
    rows = rng.choice(len(world.public.y), count, replace=False)
    return world.trained(sent, world.public.rows(rows), training, rng)


def _losses(
    world: World, sent: FlatArrays, trained: FlatArrays, layers: Layers, samples: Samples, lr: float
) -> NDArray[np.float64]:
    completed = upload_of(sent, trained, layers, lr).completed
    return sample_losses(world.model, completed, samples.x, samples.y)


def _accuracy(
    world: World, sent: FlatArrays, trained: FlatArrays, layers: Layers, samples: Samples, lr: float
) -> float:
    world.model.load(upload_of(sent, trained, layers, lr).completed)
    with torch.inference_mode():
        return float((world.model(samples.x).argmax(dim=1) == samples.y).double().mean())


def _expected(world: World, sent: FlatArrays, most: int = 500) -> Tensor:
    """Return the mean softmax (C,) of the model sent, on public samples."""
    world.model.load(sent)
    with torch.inference_mode():
        return world.model(world.public.x[:most]).softmax(dim=1).mean(dim=0)


def names_of(world: World, sets: Mapping[str, Sequence[Collection[int]]]) -> dict[str, Layers]:
    """Return the layers by name of kinds of sets of hidden layers by number, once each: "kind: layers"."""
    hidden = [layer.name for layer in LayerMap.of(world.model.layout).hidden]
    return {
        f"{kind}: {'+'.join(hidden[n] for n in sorted(one))}": tuple(hidden[n] for n in sorted(one))
        for kind, found in sets.items()
        for one in found
    }
