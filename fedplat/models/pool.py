"""FedIns: a pool of scales and shifts around a frozen backbone, of which every image picks its own.

Only the pool is the model: the backbone is held aside, so that whatever averages, attacks, compresses, masks
or stores models sees the pool's five arrays and nothing else. Baselines of the same backbone are here too.
"""

from __future__ import annotations

import copy
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from ..datasets.cache import cached, default_cache
from ..errors import UserError
from . import loss_fn
from .backbones import BackboneRecipe, Frozen, frozen
from .shapes import image_shape
from .ssf import ScaleAndShift, pool_floats, spread, total_channels

Choice = Literal["cosine", "random", "all"]
Recipe = Annotated[BackboneRecipe, Field(description="the frozen network, and where its weights come from")]

_INIT_STD = 0.02
_MOST_QUERIES = 200_000
_MULTIPLIERS = (-7046029254386353131, 2685821657736338717)


class InstancePool(nn.Module):
    """M members, each with scales and shifts of all sites, a key and a head; N of them serve each image.

    =============== ============ ===========================================================================
    ``gamma, beta`` (M, S)       scales and shifts, the sites in a row; Normal(1, 0.02) and Normal(0, 0.02)
    ``keys``        (M, D)       compared with the query q(x); only where ``choice`` is "cosine"
    ``head_weight`` (M, C, D)    classifiers, as is ``head_bias`` (M, C)
    =============== ============ ===========================================================================

    The query is what the frozen backbone computes by itself. The N members of the largest cosine(q, key) are
    averaged, without weights, one image at a time, and the backbone runs again, adapted by the average.

    ``choice`` "all" and "random" need no keys; random members are drawn from the bits of the image, so that
    an image has the same ones always. ``share_over_batch`` averages over the images of a batch as well, as
    the first release did: then predictions depend on the rest of the batch, which is a fault, and only there
    for comparison. ``balance`` lowers the cosine of members by their use so far in a training (a multiple of
    their share, less 1/M). ``cache_queries`` keeps q(x) by image, for training without augmentation; results
    may then differ in their last digits with what else a process has seen.

    Source: Feng et al., ICCV 2023 (FedIns), released code.
    """

    gamma: Tensor
    beta: Tensor

    def __init__(
        self,
        backbone: Frozen,
        num_classes: int,
        *,
        members: int = 25,
        chosen: int = 3,
        pull: float = 0.1,
        choice: Choice = "cosine",
        share_over_batch: bool = False,
        balance: float = 0.0,
        cache_queries: bool = False,
    ) -> None:
        super().__init__()
        self.chosen = members if choice == "all" else chosen
        if self.chosen > members:
            raise UserError(f"chosen = {chosen} of {members} members: expected at most all of them")
        self.backbone, self.members, self.num_classes = backbone, members, num_classes
        self.pull, self.choice, self.balance = pull, choice, balance
        self.share_over_batch = share_over_batch
        channels = total_channels(backbone.sites)
        self.gamma = nn.Parameter(torch.empty(members, channels))
        self.beta = nn.Parameter(torch.empty(members, channels))
        if choice == "cosine":
            self.keys = nn.Parameter(torch.empty(members, backbone.width))
            nn.init.trunc_normal_(self.keys, std=_INIT_STD)
        self.head_weight = nn.Parameter(torch.empty(members, num_classes, backbone.width))
        self.head_bias = nn.Parameter(torch.zeros(members, num_classes))
        nn.init.normal_(self.gamma, 1.0, _INIT_STD)
        nn.init.normal_(self.beta, 0.0, _INIT_STD)
        nn.init.kaiming_normal_(self.head_weight)
        self._queries = QueryCache() if cache_queries else None
        self._used, self._similarity = torch.zeros(members), torch.zeros(())

    @property
    def floats(self) -> int:
        """Number of values that travel each way per client and round."""
        sites, keys = self.backbone.sites, self.choice == "cosine"
        return pool_floats(sites, self.backbone.width, self.num_classes, self.members, keys=keys)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, C) of images (n, C, H, W)."""
        return self._predict(x)[0]

    def training_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return (1 − λ)·CE + λ·(1 − R), where R is the mean over images of the *sum* of N cosines.

        λ is ``pull``. Keys have a gradient from R alone; without keys, or for λ = 0, the loss is CE.
        """
        logits, cosines = self._predict(x)
        loss = loss_fn(logits.float(), y)
        if cosines is None or not self.pull:
            return loss
        similarity = cosines.sum(dim=1).mean()
        self._similarity = similarity.detach() / self.chosen
        return (1 - self.pull) * loss + self.pull * (1 - similarity)

    def select(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the members (n, N) that serve each image, and their cosines if there are keys."""
        if self.choice == "all":
            return torch.arange(self.members, device=x.device).expand(len(x), -1), None
        if self.choice == "random":
            # Another odd number per member gives each image its own order of them.
            salt = torch.arange(1, 2 * self.members, 2, device=x.device) * _MULTIPLIERS[1]
            scores = _mixed(_hashes(x)[:, None] ^ salt)
            return scores.sort(dim=1, stable=True).indices[:, : self.chosen], None
        query = functional.normalize(self._query(x).float(), dim=1)
        cosines = query @ functional.normalize(self.keys.float(), dim=1).T
        scores = cosines.detach()
        if self.training and self.balance:
            used = self._used.to(x.device)
            scores = scores - self.balance * (used / used.sum().clamp(min=1) - 1 / self.members)
        # Stable: of equal ones, the first.
        index = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.chosen]
        return index, cosines.gather(1, index)

    def train(self, mode: bool = True) -> InstancePool:
        """Switch to training or evaluation, and begin to count anew who is selected."""
        self._used, self._similarity = torch.zeros(self.members), torch.zeros(())
        super().train(mode)
        return self

    def training_metrics(self) -> dict[str, float]:
        """Return what was selected since ``train()`` or ``eval()`` was called, for the client's reply.

        ``selected.MM`` is each member's share, ``selection-entropy`` theirs in nats, ``key-similarity`` the
        mean cosine in the last step. Nothing where nothing was selected.
        """
        if not float(self._used.sum()):
            return {}
        shares, entropy = spread(self._used.cpu())
        found = {f"selected.{number:02d}": float(share) for number, share in enumerate(shares)}
        return {**found, "selection-entropy": entropy, "key-similarity": float(self._similarity)}

    def _predict(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        index, cosines = self.select(x)
        # Kept on the device: a number read off it in every step would make the device wait.
        flat = index.flatten()
        self._used = self._used.to(x.device).index_add(0, flat, torch.ones(len(flat), device=x.device))
        if self.share_over_batch:
            return self._shared(x, index), cosines
        adapted = ScaleAndShift(
            self.backbone.sites, self._mean(index, self.gamma), self._mean(index, self.beta)
        )
        features = self.backbone.on(x.device).features(x, adapted)
        logits = torch.einsum("nd,mcd->nmc", features, self.head_weight.to(features.dtype)) + self.head_bias
        own = logits.gather(1, index[:, :, None].expand(-1, -1, self.num_classes))
        return own.sum(dim=1) / self.chosen, cosines

    def _shared(self, x: Tensor, index: Tensor) -> Tensor:
        """Return the logits that one mean over all images' members gives."""
        gamma, beta, weight, bias = (
            tensor[index.flatten()].mean(dim=0, keepdim=True)
            for tensor in (self.gamma, self.beta, self.head_weight, self.head_bias)
        )
        features = self.backbone.on(x.device).features(x, ScaleAndShift(self.backbone.sites, gamma, beta))
        return functional.linear(features, weight[0].to(features.dtype), bias[0].to(features.dtype))

    def _mean(self, index: Tensor, rows: Tensor) -> Tensor:
        # Summed before it is divided: the mean of ones is then exactly one.
        return functional.embedding_bag(index, rows, mode="sum") / self.chosen

    def _query(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            net = self.backbone.on(x.device)
            return net(x) if self._queries is None else self._queries(net, x)


class QueryCache:
    """Queries of images seen before, by a hash of 64 bits of their pixels; forgets all when full."""

    def __init__(self, most: int = _MOST_QUERIES) -> None:
        self._most = most
        self._rows: dict[int, np.ndarray] = {}
        self.computed = 0

    def __call__(self, net: nn.Module, x: Tensor) -> Tensor:
        """Return what ``net`` gives for images, computed only for those not seen yet."""
        keys = _hashes(x).tolist()
        new = {key: i for i, key in enumerate(keys) if key not in self._rows}
        if new:
            if len(self._rows) + len(new) > self._most:
                self._rows.clear()
                new = {key: i for i, key in enumerate(keys)}
            rows = torch.tensor(list(new.values()), device=x.device)
            values = net(x.index_select(0, rows)).float().cpu().numpy()
            self._rows |= dict(zip(new, values, strict=True))
            self.computed += len(new)
        return torch.from_numpy(np.stack([self._rows[key] for key in keys])).to(x.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> QueryCache:
        return self


class HeadOnly(nn.Module):
    """A baseline: one classifier of the frozen backbone's features, and nothing else is trained."""

    def __init__(self, backbone: Frozen, num_classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, C)."""
        with torch.no_grad():
            features = self.backbone.on(x.device)(x)
        logits: Tensor = self.head(features.to(self.head.weight.dtype))
        return logits


class FullyTuned(nn.Module):
    """A baseline: the pre-trained backbone and a classifier, all of it trained and sent.

    With ``frozen_norms`` BatchNorm stays in evaluation mode, as FedIns has it; its weights are trained.
    """

    def __init__(self, backbone: Frozen, num_classes: int, *, frozen_norms: bool = False) -> None:
        super().__init__()
        device = "meta" if torch.empty(0).device.type == "meta" else "cpu"
        self.backbone = copy.deepcopy(backbone.on(device)).requires_grad_(True)
        self.head = nn.Linear(backbone.width, num_classes)
        self.frozen_norms = frozen_norms

    def train(self, mode: bool = True) -> FullyTuned:
        """Switch to training or evaluation."""
        super().train(mode)
        if self.frozen_norms:
            self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, C)."""
        logits: Tensor = self.head(self.backbone(x))
        return logits


def fedins(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    backbone: Recipe,
    members: Annotated[int, Field(ge=1, le=1000, description="M, size of the pool")] = 25,
    chosen: Annotated[int, Field(ge=1, description="N, members that serve an image")] = 3,
    pull: Annotated[float, Field(ge=0, le=1, description="weight of pulling keys to queries")] = 0.1,
    choice: Annotated[Choice, Field(description="how members are chosen")] = "cosine",
    keys: Annotated[Literal["random", "k-means"], Field(description="how keys start")] = "random",
    share_over_batch: Annotated[bool, Field(description="one mean per batch, a fault of old code")] = False,
    balance: Annotated[float, Field(ge=0, description="against members that are always chosen")] = 0.0,
    cache_queries: Annotated[bool, Field(description="keep q(x) of images seen before")] = False,
) -> nn.Module:
    """FedIns: an :class:`InstancePool` around a frozen backbone; only the pool is trained and sent.

    ``keys = "k-means"`` starts keys at the centres of the public images' queries. Source: Feng et al., ICCV
    2023, released code; k-means and ``balance`` are our own.
    """
    held = frozen(backbone, image_shape("fedins", input_shape))
    pool = InstancePool(
        held,
        num_classes,
        members=members,
        chosen=chosen,
        pull=pull,
        choice=choice,
        share_over_batch=share_over_batch,
        balance=balance,
        cache_queries=cache_queries,
    )
    if keys == "k-means" and choice == "cosine" and pool.keys.device.type != "meta":
        with torch.no_grad():
            pool.keys.copy_(query_centres(held, members))
    return pool


def federated_ssf(input_shape: tuple[int, ...], num_classes: int, *, backbone: Recipe) -> nn.Module:
    """Federated SSF: one set of scales and shifts and one head for all images; FedIns with M = N = 1."""
    return InstancePool(
        frozen(backbone, image_shape("federated-ssf", input_shape)), num_classes, members=1, choice="all"
    )


def head_only(input_shape: tuple[int, ...], num_classes: int, *, backbone: Recipe) -> nn.Module:
    """Return a classifier on a frozen backbone; see :class:`HeadOnly`."""
    return HeadOnly(frozen(backbone, image_shape("backbone-head", input_shape)), num_classes)


def fully_tuned(
    input_shape: tuple[int, ...], num_classes: int, *, backbone: Recipe, frozen_norms: bool = False
) -> nn.Module:
    """Return a pre-trained backbone with a classifier, all trained; see :class:`FullyTuned`."""
    return FullyTuned(
        frozen(backbone, image_shape("backbone-full", input_shape)), num_classes, frozen_norms=frozen_norms
    )


def query_centres(backbone: Frozen, members: int) -> Tensor:
    """Return the k-means centres (M, D) of the queries of the images a backbone was pre-trained on.

    Raises UserError for a backbone that was not pre-trained here.
    """
    recipe = backbone.recipe
    if recipe.from_file:
        raise UserError("keys = 'k-means' needs public images, and this backbone's weights are of a file")

    def build() -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        from sklearn.cluster import KMeans

        from ..datasets.subset import public_part
        from .pretraining import features_of, public_data

        whole = public_data(recipe)
        x = whole.prepare(whole.train.x[public_part(whole, recipe.classes, recipe.held_back)])
        queries = functional.normalize(features_of(backbone.on("cpu"), x), dim=1).numpy()
        fitted = KMeans(members, n_init=1, random_state=recipe.seed).fit(queries)
        return {"centres": fitted.cluster_centers_.astype(np.float32)}, {}

    settings = {**recipe.identity(), "input": list(backbone.input_shape), "members": members}
    settings["hash"] = backbone.fingerprint()
    found = cached(default_cache() / "backbones", "keys", 1, settings, [], build)
    return torch.from_numpy(np.array(found.arrays["centres"]))


def _hashes(x: Tensor) -> Tensor:
    """Return a number of 64 bits for each image (n, ...), from the bits of its pixels alone."""
    words = x.detach().float().contiguous().flatten(1).view(torch.int32).to(torch.int64)
    place = torch.arange(1, words.shape[1] + 1, device=x.device) * _MULTIPLIERS[0]
    return _mixed(_mixed(words ^ place).sum(dim=1))


def _mixed(h: Tensor) -> Tensor:
    # Integers wrap around; two rounds of multiplying and folding spread every bit.
    for multiplier in _MULTIPLIERS:
        h = (h ^ (h >> 29)) * multiplier
    return h ^ (h >> 32)
