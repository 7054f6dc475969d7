"""What the server holds after a client's reply: the model it sent, and those layers that came back."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedplat.arrays import FlatArrays
from fedplat.errors import UserError
from fedplat.layer_map import LayerMap, part_of, with_part
from fedplat.models import loss_fn
from fedplat.security.clipping import clip_
from fedplat.security.privacy import released


@dataclass(frozen=True)
class Upload:
    """One reply as the server sees it: the whole model it ``sent``, and the arrays that were ``returned``.

    ``lr`` and ``steps`` are those of the client's plain SGD, which the server prescribes. Raises UserError if
    arrays came back that were not sent, or numbers that are not finite, or for a training that is none.
    """

    sent: FlatArrays
    returned: FlatArrays
    lr: float
    steps: int = 1

    def __post_init__(self) -> None:
        if not (0 < self.lr < math.inf and self.steps >= 1):
            raise UserError(
                f"a client trains with lr above 0 and 1 step or more, not {self.lr}, {self.steps}"
            )
        known = {entry.name: entry.shape for entry in self.sent.layout.entries}
        for entry in self.returned.layout.entries:
            if known.get(entry.name) != entry.shape:
                raise UserError(f"array '{entry.name}' {entry.shape} of the upload is none of the model sent")
        if not np.isfinite(self.returned.vector).all():
            raise UserError("the upload holds numbers that are not finite; nothing can be told from it")

    @cached_property
    def gradient(self) -> dict[str, Tensor]:
        """The mean gradient over the client's steps, of the arrays that came back and no others, float32.

        Exact but for the rounding of the weights if there was one step.
        """
        start = tensors_of(self.sent)
        scale = 1 / (self.lr * self.steps)
        return {
            name: ((start[name].double() - value.double()) * scale).float()
            for name, value in tensors_of(self.returned).items()
        }

    @property
    def completed(self) -> FlatArrays:
        """The model with everything that did not come back as the server sent it."""
        return with_part(self.sent, self.returned)


def upload_of(
    sent: FlatArrays, trained: FlatArrays, layers: Collection[str] | None, lr: float, steps: int = 1
) -> Upload:
    """Return what the server gets of a ``trained`` model: some hidden layers and the head, None: everything.

    Raises UserError for a layer that the model has not.
    """
    if layers is None:
        return Upload(sent, trained, lr, steps)
    found = LayerMap.of(sent.layout)
    return Upload(sent, part_of(trained, found.arrays_of((*layers, found.head.name))), lr, steps)


def protected(
    sent: FlatArrays, trained: FlatArrays, clip: float, noise: float, rng: np.random.Generator
) -> FlatArrays:
    """Return a model whose update is at most ``clip`` long, plus N(0, (noise·clip)²) on every element.

    It is what :class:`fedplat.clients.mods.privacy.LocalPrivacyMod` does to the whole model, before layers
    are left out, which costs no privacy. A noise of 0 clips alone. Raises UserError for other numbers.
    """
    if not (0 < clip < math.inf and 0 <= noise < math.inf):
        raise UserError(f"clip = {clip} has to be above 0 and noise = {noise} not below, both finite")
    vector = trained.vector.copy()
    clip_(torch.from_numpy(vector)[None], torch.from_numpy(sent.vector), clip)
    return FlatArrays(
        trained.layout, released(vector, noise * clip, rng, trained.layout), trained.side.copy()
    )


def tensors_of(model: FlatArrays) -> dict[str, Tensor]:
    """Return the arrays of a model by name, as tensors that share its memory."""
    return {entry.name: torch.from_numpy(model.view(entry.name)) for entry in model.layout.entries}


def simulated(
    module: nn.Module,
    start: Mapping[str, Tensor],
    names: Collection[str],
    x: Tensor,
    y: Tensor,
    lr: float,
    steps: int = 1,
) -> dict[str, Tensor]:
    """Return the mean gradients of some arrays over steps of SGD from ``start``, differentiable in ``x``.

    Every step takes all samples (n, ...), labels ``y`` (n,). The module lends its layers, no weights.
    """
    parameters = {name: value.detach().requires_grad_() for name, value in start.items()}
    now: dict[str, Tensor] = dict(parameters)
    for step in range(1, steps + 1):
        loss = loss_fn(torch.func.functional_call(module, now, (x,)), y)
        # In the last step nothing but what came back is compared, so nothing else is computed.
        wanted = list(now) if step < steps else [name for name in now if name in names]
        found = torch.autograd.grad(loss, [now[name] for name in wanted], create_graph=True)
        now = {**now, **{n: now[n] - lr * g for n, g in zip(wanted, found, strict=True)}}
        if steps == 1:
            return dict(zip(wanted, found, strict=True))
    return {name: (parameters[name] - now[name]) / (lr * steps) for name in now if name in names}
