"""Pre-training of backbones on public data, with the probe that tells whether it was worth anything.

Public data are classes, or samples, that no client has. What comes out depends on the recipe alone and is
kept in the cache; an interrupted training goes on at the last full epoch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from .. import registry
from ..datasets import subset
from ..datasets.base import Dataset, Source
from ..datasets.cache import Cached, cached, default_cache, fingerprint
from ..datasets.subset import check_classes, few_of_each, part_of, public_part
from ..errors import UserError
from ..rng import generator, seeded_torch
from .backbones import BackboneRecipe, available, fingerprint_of, network
from .ssf import Backbone

log = logging.getLogger("fedplat")

_VERSION = 1
_MAX_SHIFT = 4
_MOST_PROBED = 300
OnEpoch = Callable[[int, int, float], None]


def pretrained(recipe: BackboneRecipe, input_shape: tuple[int, ...]) -> Backbone:
    """Return the backbone of a recipe, from the cache or made now; raises UserError if it fails the gate."""
    made = make(recipe, input_shape)
    check_gate(recipe, made)
    net = network(recipe, input_shape)
    net.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in made.arrays.items()})
    return net.eval()


def make(
    recipe: BackboneRecipe,
    input_shape: tuple[int, ...],
    source: Source | None = None,
    device: str = "cpu",
    on_epoch: OnEpoch | None = None,
) -> Cached:
    """Return weights, facts and hash of a recipe's backbone, whatever its gate says of it.

    Facts are ``probe``, ``probe-random`` (accuracies), ``samples``, ``accuracy`` (on public test data) and
    ``data`` (the hash of the data set). ``source`` is where data are looked for; by default the cache and
    FEDPLAT_DATA, without downloads. Raises UserError for data that are not there, or of another shape.
    """
    folder = default_cache() / "backbones"
    identity = {**recipe.identity(), "input": list(input_shape)}

    def build() -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        log.warning("pre-training a %s on public data of %s; this is done once", recipe.kind, recipe.data)
        whole = public_data(recipe, source)
        if whole.sample_shape != tuple(input_shape):
            raise UserError(
                f"backbone: the images of {recipe.data} are {whole.sample_shape}, those of the clients "
                f"{tuple(input_shape)}; set backbone.options = {{image_size = {input_shape[-1]}}}"
            )
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:20]
        net, facts = train(recipe, whole, device, folder / f".epochs-{key}.npz", on_epoch)
        state = {name: tensor.cpu().numpy() for name, tensor in net.state_dict().items()}
        return state, {**facts, "data": whole.fingerprint, "recipe": identity}

    found = cached(folder, recipe.kind, _VERSION, identity, [], build)
    if fingerprint(found.arrays) != found.fingerprint:
        raise UserError(f"a backbone in {folder} is damaged: its weights do not have its hash; delete it")
    return found


def public_data(recipe: BackboneRecipe, source: Source | None = None) -> Dataset:
    """Return the whole data set that a recipe's public part is of.

    Raises UserError for one whose split into training and test depends on the seed, if its public part is
    told by sample: then clients of another seed would hold public samples.
    """
    if source is None:
        root = os.environ.get("FEDPLAT_DATA")
        source = Source(Path(root) if root else None, default_cache(), False, recipe.seed)
    whole = part_of(recipe.data, recipe.options, source)
    check_classes(recipe.classes, whole)
    if recipe.held_back:
        other = Source(source.root, source.cache, source.download, source.seed + 1)
        if part_of(recipe.data, recipe.options, other).fingerprint != whole.fingerprint:
            raise UserError(
                f"backbone.held_back: {recipe.data} has another training set for every seed, so samples "
                f"cannot be kept from clients; give public classes instead"
            )
    return whole


def train(
    recipe: BackboneRecipe,
    whole: Dataset,
    device: str = "cpu",
    checkpoint: Path | None = None,
    on_epoch: OnEpoch | None = None,
) -> tuple[Backbone, dict[str, Any]]:
    """Pre-train on the public part, without its classifier at the end, and probe what came out."""
    rows = public_part(whole, recipe.classes, recipe.held_back)
    x = whole.prepare(whole.train.x[rows]).to(device)
    y = _labels(np.asarray(whole.train.y)[rows]).to(device)
    with seeded_torch(recipe.seed, "backbone-init"):
        net = network(recipe, whole.sample_shape).to(device)
        head = nn.Linear(net.width, int(y.max()) + 1).to(device)
    random_accuracy = probe(recipe, whole, net.eval(), device)
    both = nn.ModuleList([net, head])
    optimizer = _optimizer(recipe, both)
    start = _resumed(checkpoint, both, optimizer)
    steps = -(-len(y) // recipe.batch_size)
    peak = optimizer.param_groups[0]["lr"]
    for epoch in range(start, recipe.epochs):
        both.train()
        rng, losses = generator(recipe.seed, "backbone-epoch", epoch), []
        for step, batch in enumerate(np.array_split(rng.permutation(len(y)), steps)):
            done = (epoch * steps + step) / (recipe.epochs * steps)
            for group in optimizer.param_groups:
                group["lr"] = (
                    peak * min(1.0, done * recipe.epochs + 0.05) * (1 + math.cos(math.pi * done)) / 2
                )
            index = torch.from_numpy(batch).to(device)
            images = augmented(x.index_select(0, index), recipe.augment, rng)
            loss = functional.cross_entropy(head(net(images)), y.index_select(0, index))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if checkpoint is not None:
            _keep(checkpoint, both, optimizer, epoch + 1)
        if on_epoch is not None:
            on_epoch(epoch + 1, recipe.epochs, float(torch.stack(losses).mean()))
    net.eval()
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    facts = {
        "probe": probe(recipe, whole, net, device),
        "probe-random": random_accuracy,
        "samples": len(rows),
        "weights": fingerprint_of(net),
    }
    return net, facts


def check_split(model: Mapping[str, Any], data: str, settings: Mapping[str, Any]) -> None:
    """Raise UserError unless clients hold nothing that their model's backbone is pre-trained on.

    ``model`` are the model's settings, ``data`` and ``settings`` the name and settings of the clients' data.
    Models without a backbone pass, and so do weights of a file, of which nothing is known.
    """
    recipe = model.get("backbone")
    if not isinstance(recipe, BackboneRecipe) or available(recipe).from_file:
        return
    target = registry.find("datasets", data).load()
    part = target is subset.load
    held: str = settings["of"] if part else data
    if registry.find("datasets", held).load() is not registry.find("datasets", recipe.data).load():
        return
    if recipe.held_back:
        if not part or settings["held_back"] < recipe.held_back:
            raise UserError(
                f"backbone.held_back = {recipe.held_back}: clients hold some of these samples of {held}; "
                f"use data 'subset' with of = '{held}' and held_back = {recipe.held_back}"
            )
        return
    own = set(settings["classes"]) if part else set()
    if not own or own & set(recipe.classes):
        raise UserError(
            f"backbone.classes: clients hold classes of {held} that the backbone is pre-trained on"
            + (f", {sorted(own & set(recipe.classes))}" if own else "")
            + f"; use data 'subset' with of = '{held}' and other classes"
        )


def check_gate(recipe: BackboneRecipe, made: Cached) -> None:
    """Raise UserError unless a probe found the backbone so much better than random weights."""
    gain = 100 * (made.facts["probe"] - made.facts["probe-random"])
    if recipe.gate and gain < recipe.gate:
        raise UserError(
            f"backbone: a linear probe on classes it has not seen finds it {gain:+.1f} points from the same "
            f"network with random weights, and gate asks for {recipe.gate:+.1f}; comparisons on it would say "
            f"nothing. Pre-train longer or on more classes, or set backbone.gate = 0 to use it anyway"
        )


def probe(recipe: BackboneRecipe, whole: Dataset, net: Backbone, device: str = "cpu") -> float:
    """Return the accuracy of a linear classifier of features, on training samples that are not public.

    At most 300 of each class; two thirds of them fit it, one third judges. No test sample is looked at.
    """
    from sklearn.linear_model import LogisticRegression

    public = np.zeros(len(whole.train), bool)
    public[public_part(whole, recipe.classes, recipe.held_back)] = True
    rng = generator(recipe.seed, "backbone-probe")
    others = few_of_each(whole.train.y, np.flatnonzero(~public), _MOST_PROBED, rng)
    labels = np.asarray(whole.train.y)[others]
    if len(np.unique(labels)) < 2:
        raise UserError("backbone: fewer than two classes are left for the clients; name fewer public ones")
    order = rng.permutation(len(others))
    features = features_of(net, whole.prepare(whole.train.x[others]), device).double().numpy()
    fit, judge = order[: 2 * len(order) // 3], order[2 * len(order) // 3 :]
    centre, spread = features[fit].mean(axis=0), features[fit].std(axis=0) + 1e-8
    scaled = (features - centre) / spread
    model = LogisticRegression(C=0.1, max_iter=300).fit(scaled[fit], labels[fit])
    return float((model.predict(scaled[judge]) == labels[judge]).mean())


def features_of(net: Backbone, x: Tensor, device: str | torch.device = "cpu", batch: int = 500) -> Tensor:
    """Return the plain features (n, D) of images (n, C, H, W), on the CPU."""
    with torch.no_grad():
        return torch.cat([net(part.to(device)).cpu() for part in x.split(batch)])


def augmented(x: Tensor, how: str, rng: np.random.Generator) -> Tensor:
    """Return images (n, C, H, W) shifted by up to an eighth of their size, and mirrored if asked for.

    Brightness and contrast change a little, the same for all channels. ``rng`` decides everything.
    """
    if how == "none":
        return x
    n, _, height, width = x.shape
    shift = min(_MAX_SHIFT, height // 8)
    padded = functional.pad(x, [shift] * 4)
    down, right = (torch.from_numpy(rng.integers(0, 2 * shift + 1, n)).to(x.device) for _ in range(2))
    rows = down[:, None] + torch.arange(height, device=x.device)
    columns = right[:, None] + torch.arange(width, device=x.device)
    if how == "crop-flip":
        mirrored = torch.from_numpy(rng.random(n) < 0.5).to(x.device)
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    sample = torch.arange(n, device=x.device)[:, None, None]
    out = padded.permute(0, 2, 3, 1)[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    light = torch.from_numpy(rng.uniform([0.8, -0.2], [1.2, 0.2], (n, 2))).to(x)
    return (out * light[:, :1, None, None] + light[:, 1:, None, None]).contiguous()


def _labels(y: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.unique(y, return_inverse=True)[1].astype(np.int64))


def _optimizer(recipe: BackboneRecipe, both: nn.Module) -> torch.optim.Optimizer:
    if recipe.kind == "conv":
        return torch.optim.SGD(
            both.parameters(), lr=recipe.lr or 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True
        )
    return torch.optim.AdamW(both.parameters(), lr=recipe.lr or 1e-3, weight_decay=0.05)


def _keep(path: Path, both: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write weights and the optimiser's memory; the file is whole or not there."""
    arrays = {f"net/{name}": tensor.cpu().numpy() for name, tensor in both.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        arrays |= {f"optimizer/{number}/{k}": v.cpu().numpy() for k, v in values.items() if v is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.npz")
    np.savez(temporary, epoch=np.int64(epoch), **arrays)
    temporary.replace(path)


def _resumed(path: Path | None, both: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load what :func:`_keep` wrote, if it did, and return the number of epochs that are done."""
    if path is None or not path.is_file():
        return 0
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: torch.from_numpy(np.array(file[name])) for name in file.files}
    both.load_state_dict({n.removeprefix("net/"): a for n, a in arrays.items() if n.startswith("net/")})
    state: dict[int, dict[str, Tensor]] = {}
    for name, array in arrays.items():
        if name.startswith("optimizer/"):
            _, number, key = name.split("/")
            state.setdefault(int(number), {})[key] = array
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return int(arrays["epoch"])
