"""In-place distillation on the server: sub-models learn to answer as the whole model does, without data.

Clients with small devices train small sub-models, so shared weights drift between what one size and another
want. After a round the server draws sub-models towards the whole model on Gaussian noise, and writes what
they learn back into the weights that they share with it.

Source of the idea: Yao, "Revisiting System-Heterogeneous Federated Learning through Dynamic Model Search",
IEEE BigData 2024, abstract. Steps, temperature, guard and noise for text are inferred.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fedplat.arrays import FlatArrays
from fedplat.errors import UserError
from fedplat.models.cutting import CutPlan, IndexMaps, Sizes, freeze_batch_norm, shrink
from fedplat.models.cutting_shrink import Scaler
from fedplat.models.flat import FlatModel
from fedplat.rng import generator


@dataclass(frozen=True)
class DistillationSettings:
    """How the server distils.

    =============== ====================================================================================
    ``subnets``     sub-models per round
    ``steps``       steps of Adam for each, at ``lr``
    ``batch``       noise samples per step, and for the comparison before and after
    ``temperature`` both softmaxes'; the loss is multiplied by its square
    ``beta``        weight of what a sub-model learned, against what it started from
    ``scaler``      ``shrink``'s: what the clients train with, so that the server sees them alike
    =============== ====================================================================================
    """

    subnets: int = 5
    steps: int = 20
    batch: int = 64
    lr: float = 1e-3
    temperature: float = 1.0
    beta: float = 1.0
    scaler: Scaler = "off"
    device: str = "cpu"


class Distillation:
    """Distils the whole model into sub-models of itself.

    The teacher is a frozen copy of the model as it was aggregated. One after another, each sub-model is cut
    out, takes its steps, and its parameters are written back. The inputs are N(0, 1): images or features, or
    for a model that reads tokens what its embedding would give, since tokens cannot be noise; the embedding
    itself then learns nothing. BatchNorm normalises by the batch; its statistics and counters are neither
    used nor changed. Dropout is off.

    The new model is kept only if all its numbers are finite and, on noise not trained on, the loss has
    fallen in the mean over the sub-models and the whole model, whose own loss starts at 0: else it would be
    free to forget. ``module`` may be on the meta device; it is left as it is.

    Raises UserError for settings out of range, and for a meta module with buffers outside its state dict.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: CutPlan,
        sample_shape: tuple[int, ...],
        settings: DistillationSettings,
        seed: int = 0,
    ) -> None:
        positive = (settings.subnets, settings.steps, settings.lr, settings.temperature, settings.beta)
        if min(positive) <= 0 or settings.batch < 2 or settings.beta > 1:
            raise UserError(
                f"distillation: {settings}: all have to be above 0, batch 2 or more, beta at most 1"
            )
        meta = {name for name, tensor in module.named_buffers() if tensor.is_meta}
        if hidden := meta - module.state_dict().keys():
            raise UserError(
                f"distillation: buffer '{min(hidden)}' is not part of the state dict; register it so"
            )
        self.settings = settings
        self.plan = plan
        self.sample_shape = sample_shape
        self.seed = seed
        self._module = module
        self._maps: IndexMaps | None = None

    def __call__(
        self, model: FlatArrays, subnets: Sequence[Sizes], server_round: int
    ) -> tuple[FlatArrays, dict[str, float]]:
        """Return the model after distillation into sub-models of these sizes, and figures; see above.

        The figures: ``distillation.before`` and ``.after``, the mean losses; ``.drift``, of these the whole
        model's; and ``.kept``, 1 or 0. If it is 0, the model returned is ``model``.
        """
        teacher = self._flat(model)
        rng = generator(self.seed, "distillation", server_round)
        student = self._flat(model)
        held_out = self._noise(teacher.module, rng)
        every = [*subnets, self.plan.full.sizes]
        before = self._losses(teacher, student.module, every, held_out)
        for sizes in subnets:
            part = self._cut(student.module, sizes)
            if not self._train(teacher, part, rng):
                return model, _figures(before, [math.nan] * len(before), kept=False)
            student = self._flat(self._written_back(student, part, sizes))
        after = self._losses(teacher, student.module, every, held_out)
        kept = bool(np.mean(after) < np.mean(before))  # not if any is NaN
        new = model.layout.new()
        student.store(new)
        kept = kept and bool(np.isfinite(new.vector).all())
        return (new if kept else model), _figures(before, after, kept)

    def loss(self, teacher: nn.Module, part: nn.Module, noise: Tensor) -> Tensor:
        """Return KL(teacher || part) of the softmaxes, mean over samples (and positions), times τ²."""
        tau = self.settings.temperature
        with torch.no_grad():
            target = _answer(teacher, noise, self.sample_shape) / tau
        logits = _answer(part, noise, self.sample_shape) / tau
        divergence = functional.kl_div(
            functional.log_softmax(logits.flatten(0, -2), dim=1),
            functional.log_softmax(target.flatten(0, -2), dim=1),
            reduction="batchmean",
            log_target=True,
        )
        return divergence * tau**2

    def _train(self, teacher: FlatModel, part: FlatModel, rng: np.random.Generator) -> bool:
        """Take the steps of one sub-model; return whether the loss stayed finite."""
        optimiser = torch.optim.Adam([part.params], lr=self.settings.lr)
        for _ in range(self.settings.steps):
            part.zero_grad()
            loss = self.loss(teacher.module, part.module, self._noise(teacher.module, rng))
            if not torch.isfinite(loss):
                return False
            loss.backward()
            optimiser.step()
        return True

    def _losses(
        self, teacher: FlatModel, module: nn.Module, every: Sequence[Sizes], noise: Tensor
    ) -> list[float]:
        with torch.no_grad():
            parts = (self._cut(module, sizes).module for sizes in every)
            return [float(self.loss(teacher.module, part, noise)) for part in parts]

    def _noise(self, teacher: nn.Module, rng: np.random.Generator) -> Tensor:
        embedding = _embedding(teacher, self.sample_shape)
        shape = self.sample_shape if embedding is None else (*self.sample_shape, embedding.weight.shape[1])
        # Drawn on the CPU, so that it is the same on all devices.
        drawn = rng.standard_normal((self.settings.batch, *shape), np.float32)
        return torch.from_numpy(drawn).to(self.settings.device)

    def _flat(self, model: FlatArrays) -> FlatModel:
        module = copy.deepcopy(self._module)
        if any(tensor.is_meta for tensor in module.state_dict().values()):
            module = module.to_empty(device="cpu")
        flat = FlatModel(_quiet(module), self.settings.device)
        flat.load(model)
        return flat

    def _cut(self, module: nn.Module, sizes: Sizes) -> FlatModel:
        # Students are in evaluation mode, for dropout's sake, where the scaler would be off.
        scaler: Scaler = "off" if self.settings.scaler == "off" else "always"
        return FlatModel(_quiet(shrink(module, self.plan, sizes, scaler=scaler)), self.settings.device)

    def _written_back(self, whole: FlatModel, part: FlatModel, sizes: Sizes) -> FlatArrays:
        """Return the model with the sub-model's parameters in it, by ``beta``; buffers stay."""
        model, sub = whole.layout.new(), part.layout.new()
        whole.store(model)
        part.store(sub)
        if self._maps is None or self._maps.layout != whole.layout:
            self._maps = IndexMaps(self.plan, whole.layout)
        index = self._maps(self.plan.of_sizes(sizes)).index[: part.layout.num_params]
        old, new = model.vector[index], sub.vector[: part.layout.num_params]
        model.vector[index] = new if self.settings.beta == 1 else old + self.settings.beta * (new - old)
        return model


def _figures(before: Sequence[float], after: Sequence[float], kept: bool) -> dict[str, float]:
    return {
        "distillation.before": float(np.mean(before)),
        "distillation.after": float(np.mean(after)),
        "distillation.drift": float(after[-1]),
        "distillation.kept": float(kept),
    }


def _quiet(module: nn.Module) -> nn.Module:
    """Put a module in evaluation mode, but BatchNorm, which is to use each batch and to remember none."""
    module.eval()
    for layer in freeze_batch_norm(module).modules():
        if isinstance(layer, _BatchNorm):
            layer.train()
    return module


def _embedding(module: nn.Module, sample_shape: tuple[int, ...]) -> nn.Embedding | None:
    """Return the layer that reads tokens; None for models of images and features."""
    if len(sample_shape) != 1:
        return None
    return next((layer for layer in module.modules() if isinstance(layer, nn.Embedding)), None)


def _answer(module: nn.Module, noise: Tensor, sample_shape: tuple[int, ...]) -> Tensor:
    """Return the logits for noise, which takes the place of what an embedding gives, if there is one."""
    embedding = _embedding(module, sample_shape)
    if embedding is None:
        logits: Tensor = module(noise)
        return logits
    # A narrower embedding gives the first of its numbers, scaled as its own would be.
    given = noise[..., : embedding.weight.shape[1]] / getattr(embedding, "rate_out", 1.0)
    handle = embedding.register_forward_hook(lambda layer, inputs, output: given)
    try:
        logits = module(torch.zeros(noise.shape[:-1], dtype=torch.int64, device=noise.device))
    finally:
        handle.remove()
    return logits
