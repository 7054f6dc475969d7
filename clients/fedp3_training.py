"""FedP3's training on the client: pruned weights stay zero, and each step may leave out more of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedplat.errors import UserError
from fedplat.fedp3_options import PartOptions
from fedplat.layer_map import LayerMap
from fedplat.models import loss_fn
from fedplat.models.flat import FlatModel
from fedplat.security.example_privacy import sampling_of
from fedplat.security.privacy import NormalSource
from fedplat.training_config import LocalTraining

from .training import TrainResult, _optimizer

_MOST_GRADIENTS = 1 << 25
"""Numbers of samples' gradients that are in memory at once."""

Named = dict[str, Tensor]


@dataclass(frozen=True)
class LocalShares:
    """Draws the share of the pruned layers that a step keeps."""

    options: PartOptions
    rng: np.random.Generator

    def __call__(self) -> float:
        """Return the share of the next step."""
        least = self.options.least
        return least if self.options.constant else float(self.rng.uniform(least, 1.0))


def ordered_mask(shape: tuple[int, ...], share: float, first: bool, last: bool) -> Tensor:
    """Return which elements are among the first ⌈share·outputs⌉ outputs and so many inputs, broadcastable.

    Of the ``first`` layer no inputs are left out, of the ``last`` one before the head no outputs. Masks of
    smaller shares are within those of larger ones.

    >>> ordered_mask((4, 2), 0.5, False, False).int().tolist()
    [[1, 0], [1, 0], [0, 0], [0, 0]]
    """

    def kept(length: int, whole: bool) -> Tensor:
        return torch.arange(length) < (length if whole else ceil(share * length - 1e-9))

    mask = kept(shape[0], last)[:, None] & kept(shape[1], first)[None, :]
    return mask.reshape(*mask.shape, *(1,) * (len(shape) - 2))


class PrunedNet:
    """A model of which each step sees the weights θ · mask; frozen layers are seen as they came.

    ``kept`` are the masks of what was sent pruned, by name; ``rng`` draws what steps leave out besides.
    Gradients reach the model's parameters through the masks, so that what is masked stays what it is.
    """

    def __init__(
        self,
        model: FlatModel,
        options: PartOptions,
        kept: Mapping[str, NDArray[np.bool_]],
        rng: np.random.Generator,
    ) -> None:
        layers = LayerMap.of(model.layout)
        self.model = model
        self.options = options
        self._kept = {name: torch.from_numpy(mask).to(model.device) for name, mask in kept.items()}
        self._pruned = layers.weights_of(options.pruned)
        self._share = LocalShares(options, rng)
        self._random = torch.Generator(model.device).manual_seed(int(rng.integers(2**63)))
        weights = layers.weights_of(layer.name for layer in layers.hidden)
        self._first, self._last = weights[0], frozenset(layers.hidden[-1].weights)
        parameters = dict(model.module.named_parameters())
        trained = layers.arrays_of((*options.trained, layers.head.name))
        frozen = [name for name in parameters if options.freeze and name not in trained]
        # Copies, since an optimiser's weight decay moves whatever lies in its vector.
        self.frozen: Named = {name: parameters[name].detach().clone() for name in frozen}
        self.trained: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in parameters.items() if name not in self.frozen
        }

    @property
    def plain(self) -> bool:
        """Whether every step sees the model itself."""
        return not (self._kept and self.options.enforce) and self.options.local == "fixed" and not self.frozen

    def masks(self) -> Named:
        """Return the masks of the next step by name; draws."""
        enforced = dict(self._kept) if self.options.enforce else {}
        if self.options.local == "fixed" or not self._pruned:
            return enforced
        share = self._share()
        for name in self._pruned:
            weight = self.model.module.get_parameter(name)
            if self.options.local == "uniform":
                drawn = torch.rand(weight.shape, generator=self._random, device=weight.device) < share
            else:
                drawn = ordered_mask(tuple(weight.shape), share, name == self._first, name in self._last)
                drawn = drawn.to(weight.device)
            enforced[name] = drawn & enforced[name] if name in enforced else drawn
        return enforced

    def seen(self, parameters: Mapping[str, Tensor], masks: Named) -> Named:
        """Return what a step computes with in place of the model's parameters."""
        both = {**self.frozen, **parameters}
        return {name: value * masks[name] if name in masks else value for name, value in both.items()}

    def logits(self, seen: Named, x: Tensor) -> Tensor:
        """Return what the model gives with other parameters."""
        if x.ndim == 4 and self.model.channels_last:
            x = x.to(memory_format=torch.channels_last)
        output: Tensor = functional_call(self.model.module, seen, (x,))
        return output

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a step, whose gradient reaches the model's parameters."""
        return loss_fn(self.logits(self.seen(self.trained, self.masks()), x).float(), y)

    def restore(self) -> None:
        """Put frozen layers back to what they were."""
        state = dict(self.model.module.named_parameters())
        with torch.no_grad():
            for name, value in self.frozen.items():
                state[name].copy_(value)


# Differential privacy ----------------------------------------------------------------------------------


def clipped_sum(gradients: Named, clip: float) -> tuple[Named, Tensor]:
    """Return the sum over samples (b, ...) of gradients, each scaled down to a norm of ``clip``, and the
    norms.

    The norm (b,) is over all arrays together. A gradient that is not finite counts as zero.

    >>> sums, norms = clipped_sum({"w": torch.tensor([[3.0, 4.0], [0.0, 0.5]])}, 1.0)
    >>> sums["w"], norms
    (tensor([0.6000, 1.3000]), tensor([5.0000, 0.5000]))
    """
    norms = torch.stack([g.flatten(1).double().square().sum(dim=1) for g in gradients.values()]).sum(0).sqrt()
    finite = torch.isfinite(norms)
    factors = torch.where(finite, (clip / norms.clamp(min=1e-30)).clamp(max=1.0), 0.0).float()
    sums = {}
    for name, g in gradients.items():
        safe = g if bool(finite.all()) else torch.where(finite.view(-1, *(1,) * (g.ndim - 1)), g, 0.0)
        sums[name] = torch.tensordot(factors, safe, dims=1)
    return sums, norms.float()


def train_privately(
    net: PrunedNet,
    training: LocalTraining,
    x: Tensor,
    y: Tensor,
    rng: np.random.Generator,
    source: NormalSource,
    *,
    on_batch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None] | None = None,
    loss_factor: float = 1.0,
) -> TrainResult:
    """Train in place by DP-SGD: w ← w − γ · (Σ clipped gradients + N(0, (noise·clip)²)) / b.

    ``rng`` takes each sample into a step with probability b/m; b is the batch size, also where the draw gives
    more or fewer, and a step without samples is noise alone. Every layer that is trained gets noise. A bound
    on the length of the whole gradient is not applied: it would be a bound on noise.

    Raises UserError for a model with BatchNorm.
    """
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in net.model.module.modules()):
        raise UserError(
            "gradients of single samples do not exist with BatchNorm; take a model with GroupNorm"
        )
    model, options, device = net.model, net.options, net.model.device
    rate, steps = sampling_of(len(y), training)
    optimizer = _optimizer(model, training)
    model.module.train()
    model.bind_grad()
    x, y = x.to(device), y.to(device)
    size = sum(parameter.numel() for parameter in net.trained.values())
    at_once = max(1, _MOST_GRADIENTS // max(size, 1))
    expected = rate * len(y)
    losses, seen = 0.0, 0
    for _ in range(steps):
        rows = torch.from_numpy(np.flatnonzero(rng.random(len(y)) < rate)).to(device)
        batch: tuple[Tensor, Tensor] | None = x.index_select(0, rows), y.index_select(0, rows)
        if on_batch is not None and len(rows):
            batch = on_batch(*batch) if batch else None
        masks = net.masks()
        model.zero_grad()
        if batch is not None and len(batch[1]):
            for some_x, some_y in zip(batch[0].split(at_once), batch[1].split(at_once), strict=True):
                gradients, loss = _per_sample(net, masks, some_x, some_y)
                sums, _ = clipped_sum(gradients, options.clip)
                losses, seen = losses + float(loss.sum()), seen + len(some_y)
                for name, value in sums.items():
                    gradient = net.trained[name].grad
                    assert gradient is not None
                    gradient.add_(value, alpha=loss_factor)
        noise = torch.from_numpy(source.standard_normal(size)).float().to(device)
        parts = noise.split([parameter.numel() for parameter in net.trained.values()])
        for (name, parameter), part in zip(net.trained.items(), parts, strict=True):
            assert parameter.grad is not None
            parameter.grad.add_(part.view_as(parameter), alpha=options.noise * options.clip).div_(expected)
            if name in masks:
                # A mask depends on no data of the client's, so that leaving noise out there tells nothing.
                parameter.grad.mul_(masks[name])
        optimizer.step()
    return TrainResult(losses / seen if seen else float("nan"), seen, steps, None)


def _per_sample(net: PrunedNet, masks: Named, x: Tensor, y: Tensor) -> tuple[Named, Tensor]:
    """Return the gradient of each sample's loss (b, ...) by name, and the losses (b,)."""
    parameters = {name: parameter.detach() for name, parameter in net.trained.items()}

    def loss(values: Named, one_x: Tensor, one_y: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional_call(net.model.module, net.seen(values, masks), (one_x[None],))
        found = loss_fn(logits.float(), one_y[None])
        return found, found.detach()

    per_sample = vmap(grad(loss, has_aux=True), in_dims=(None, 0, 0), randomness="different")
    gradients, losses = per_sample(parameters, x, y)
    return gradients, losses
