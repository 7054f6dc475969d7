"""How clients make the model their own: nothing of it changes what a client sends, but for what it keeps.

A training message names the kind under :data:`PERSONAL`, and so does a question for the accuracy of the
client's own model, on the samples that it holds out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fedplat import registry
from fedplat.arrays import FlatArrays, Layout
from fedplat.errors import UserError
from fedplat.layer_map import LayerMap, part_layout, part_of, with_part
from fedplat.models.flat import FlatModel
from fedplat.rng import generator, seeded_torch
from fedplat.training_config import LocalTraining

from .training import train_one

PERSONAL = "fedplat.personal"
"""Under which a message holds :func:`told`; without it, clients have no models of their own."""
AFTER = "own-test-after"
"""A client's accuracy on its own test samples, of the model that is its own."""

Epochs = Annotated[int | None, Field(ge=1, description="over own samples; usual training without it")]
Rate = Annotated[float | None, Field(gt=0, description="learning rate; that of training without it")]
Samples = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class OwnWork:
    """What a client trains its own model with.

    ``model`` may be overwritten, ``samples`` gives inputs and labels, ``keys`` are the client and the round.
    """

    model: FlatModel
    training: LocalTraining
    samples: Samples
    seed: int
    keys: tuple[int, ...]

    def trained(
        self,
        start: FlatArrays,
        epochs: int | None = None,
        lr: float | None = None,
        *,
        towards: FlatArrays | None = None,
        strength: float = 0.0,
    ) -> FlatArrays:
        """Return ``start`` trained on the client's samples, after each step pulled ``towards`` another model.

        A pull is v ← (v + ηλw) / (1 + ηλ) with λ = ``strength``: the step of λ/2·‖v − w‖² taken implicitly,
        which is the gradient's to first order and cannot overshoot. Without ``epochs`` and ``lr`` the
        training is the usual one. Buffers are not pulled. No momentum is carried over.
        """
        changes: dict[str, Any] = {"keep_optimizer": False}
        changes |= {"epochs": epochs, "steps": None} if epochs is not None else {}
        changes |= {"lr": lr} if lr is not None else {}
        training, model = self.training.model_copy(update=changes), self.model
        model.load(start)
        pull = _Pull(model, towards, training.lr * strength) if towards is not None and strength else None
        with seeded_torch(self.seed, "personal", *self.keys):
            rng = generator(self.seed, "personal-batches", *self.keys)
            train_one(model, training, *self.samples(), rng, on_batch=pull)
        if pull is not None:
            pull.finish()
        return FlatArrays(model.layout, model.vector.cpu().numpy().copy(), model.side.cpu().numpy().copy())


class _Pull:
    """Pulls a model towards another after each of its steps; to be called before each step."""

    def __init__(self, model: FlatModel, towards: FlatArrays, size: float) -> None:
        anchor = torch.from_numpy(towards.vector[: model.layout.num_params].copy())
        self._anchor = anchor.to(model.device)
        self._model = model
        self._weight = size / (1 + size)
        self._stepped = False

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.finish()
        self._stepped = True
        return x, y

    def finish(self) -> None:
        """Pull after the step that was taken last, if there was one."""
        if self._stepped:
            with torch.no_grad():
                self._model.params.lerp_(self._anchor, self._weight)
        self._stepped = False


class Personal:
    """Clients have no models of their own; what is measured are their models after local training.

    A subclass may keep arrays in the client's state: of ``memory(layout)``, what :meth:`remembered` returns.
    ``received`` is the global model, ``own`` what the client remembers, None before it has trained.
    """

    whole_models = True
    """Whether clients have to get the whole model, and not a part of it from a sub-model scheme."""

    def local(self, layout: Layout) -> frozenset[str]:
        """Return the names of arrays that never leave the client."""
        return frozenset()

    def memory(self, layout: Layout) -> Layout:
        """Return the layout of what a client remembers."""
        return layout

    def start(self, received: FlatArrays, own: FlatArrays | None) -> FlatArrays:
        """Return what the client's training for the server starts from."""
        return received

    def remembered(
        self, received: FlatArrays, trained: FlatArrays, own: FlatArrays | None, work: OwnWork
    ) -> FlatArrays | None:
        """Return what to remember after a training that gave ``trained``; None: nothing."""
        return None

    def model(self, received: FlatArrays, own: FlatArrays | None, work: OwnWork) -> FlatArrays:
        """Return the client's own model, given the new global one."""
        return received


class FineTuning(Personal):
    """A client's model is the global one, trained on its own samples before it is used.

    Nothing of it is sent or kept. ``epochs`` and ``lr`` are those of local training unless given.
    """

    whole_models = False

    def __init__(self, *, epochs: Epochs = 1, lr: Rate = None) -> None:
        self._how = epochs, lr

    def model(self, received: FlatArrays, own: FlatArrays | None, work: OwnWork) -> FlatArrays:
        """Return the fine-tuned global model."""
        return work.trained(received, *self._how)


class Ditto(Personal):
    """Each client keeps a model of its own, trained in each of its rounds, and pulled to the global one.

    The own model starts as the first global one that the client gets, and descends its loss plus
    λ/2·‖v − w‖², with λ = ``strength`` and w the global model of the round; ``strength = 0`` is training
    alone. What is sent is trained as without it, so the global model is the same bits. Li, Hu, Beirami and
    Smith, ICML 2021, with the pull taken implicitly: the published step diverges from a strength of 2/lr on.
    """

    def __init__(
        self,
        *,
        strength: Annotated[float, Field(ge=0, description="lambda, the pull to the global model")] = 0.1,
        epochs: Epochs = None,
        lr: Rate = None,
    ) -> None:
        self._strength = strength
        self._how = epochs, lr

    def remembered(
        self, received: FlatArrays, trained: FlatArrays, own: FlatArrays | None, work: OwnWork
    ) -> FlatArrays:
        """Return the own model after one more training."""
        start = received if own is None else own
        return work.trained(start, *self._how, towards=received, strength=self._strength)

    def model(self, received: FlatArrays, own: FlatArrays | None, work: OwnWork) -> FlatArrays:
        """Return the own model, or the global one if the client has not trained yet."""
        return received if own is None else own


class FedPer(Personal):
    """The last ``layers`` of the model stay with each client; only what comes before them is shared.

    They start as the initial model's, are trained together with the rest, and are neither sent nor told:
    messages hold the shared layers alone, both ways. The global model's last layers stay what they were, so
    its own accuracy says nothing. Arivazhagan et al., 2019 (arXiv 1912.00818).
    """

    def __init__(
        self, *, layers: Annotated[int, Field(ge=0, description="last ones, that are never shared")] = 1
    ) -> None:
        self.layers = layers

    def local(self, layout: Layout) -> frozenset[str]:
        """Return the arrays of the last layers; raises UserError if nothing is left to share."""
        if not self.layers:
            return frozenset()
        layers = LayerMap.of(layout)
        names = list(layers.by_name)
        if self.layers >= len(names):
            raise UserError(
                f"personal.layers = {self.layers}: the model has {len(names)}, of which one has to be shared"
            )
        return layers.arrays_of(names[-self.layers :])

    def memory(self, layout: Layout) -> Layout:
        """Return the layout of the last layers."""
        return part_layout(layout, self.local(layout))

    def start(self, received: FlatArrays, own: FlatArrays | None) -> FlatArrays:
        """Return the shared layers with the client's own last ones."""
        return received if own is None else with_part(received, own)

    def remembered(
        self, received: FlatArrays, trained: FlatArrays, own: FlatArrays | None, work: OwnWork
    ) -> FlatArrays | None:
        """Return the last layers."""
        return part_of(trained, self.local(trained.layout)) if self.layers else None

    def model(self, received: FlatArrays, own: FlatArrays | None, work: OwnWork) -> FlatArrays:
        """Return the shared layers with the client's own last ones."""
        return self.start(received, own)


def told(name: str, settings: Mapping[str, Any]) -> str:
    """Return what a message says of a kind; "" for clients without models of their own."""
    return "" if name == "none" else json.dumps({"name": name, **settings}, sort_keys=True)


@lru_cache(maxsize=16)
def personal_of(text: str) -> Personal | None:
    """Return the kind that :func:`told` wrote down, None for ""; raises UserError for anything else.

    Code is not run on a server's word: kinds given by import path are refused.
    """
    if not text:
        return None
    try:
        settings = json.loads(text)
        name = str(settings.pop("name"))
        if ":" in name:
            raise UserError(f"personal: '{name}' names code by its import path, which clients do not run")
        made = registry.find("personal", name).load()(**settings)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{PERSONAL}: {text[:80]!r} is not what told() writes") from error
    if not isinstance(made, Personal):
        raise UserError(f"personal: '{name}' is no kind of personal models")
    return made
