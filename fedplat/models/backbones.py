"""Frozen backbones: which one a model uses, where its weights come from, and the one copy of a process.

Weights are read from a file, or made here by pre-training on data that no client has; those are kept in the
cache under a hash. Nothing is downloaded unless a recipe allows it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from ..errors import UserError
from ..rng import seeded_torch
from .conv_backbone import ConvBackbone
from .ssf import Backbone, Site
from .vit import VisionTransformer, vit_of_state

log = logging.getLogger("fedplat")

_PUBLISHED = "vit_b_16-c867db91.pth"
_HEADER = 8


class BackboneRecipe(BaseModel):
    """What a backbone is and where its weights come from; raises pydantic's ValidationError.

    ``conv`` and ``vit-mini`` are pre-trained here, on ``classes`` of the data set ``data`` (or on
    ``held_back`` of its samples), unless ``weights`` names a file; ``vit-b-16`` needs one. ``gate`` is by how
    many points a linear probe on the other classes has to beat the same network with random weights; 0 uses
    any backbone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Annotated[Literal["conv", "vit-mini", "vit-b-16"], Field(description="architecture")] = "conv"
    width: Annotated[int | None, Field(ge=2, description="channels of the first stage, or of tokens")] = None
    depth: Annotated[int | None, Field(ge=1, description="blocks of each stage, or of the transformer")] = (
        None
    )
    heads: Annotated[int, Field(ge=1, description="of attention")] = 4
    patch: Annotated[int, Field(ge=1, description="pixels of a patch, each way")] = 4
    data: Annotated[str, Field(description="data set to pre-train on")] = ""
    options: Annotated[dict[str, Any], Field(description="settings of that data set")] = {}
    classes: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], Field(description="its public classes, by index")
    ] = ()
    held_back: Annotated[int, Field(ge=0, description="public samples, in place of public classes")] = 0
    epochs: Annotated[int, Field(ge=1)] = 30
    batch_size: Annotated[int, Field(ge=2)] = 128
    lr: Annotated[float | None, Field(gt=0, description="peak; default 0.1 SGD, 0.001 AdamW for vit")] = None
    augment: Literal["none", "crop", "crop-flip"] = "crop-flip"
    seed: Annotated[int, Field(ge=0)] = 1
    weights: Annotated[Path | None, Field(description="state dict: .pt, .pth or .safetensors")] = None
    download: Annotated[bool, Field(description="allow torchvision's weights to be fetched")] = False
    if_missing: Annotated[
        Literal["error", "vit-mini"], Field(description="what to do if vit-b-16 has no weights")
    ] = "error"
    gate: Annotated[float, Field(ge=0, description="points over random weights, in a linear probe")] = 10.0

    @model_validator(mode="after")
    def _has_weights(self) -> Self:
        from_file = self.weights is not None or (self.kind == "vit-b-16" and self.if_missing == "error")
        if not from_file and not (self.data and bool(self.classes) != bool(self.held_back)):
            raise ValueError(
                "pre-training needs 'data' and either the public 'classes' or 'held_back' samples of it"
            )
        return self

    @property
    def from_file(self) -> bool:
        """Whether the weights are read instead of made."""
        return self.weights is not None or self.kind == "vit-b-16"

    def identity(self) -> dict[str, Any]:
        """Return what the pre-trained weights depend on."""
        values = self.model_dump(mode="json", exclude={"weights", "download", "if_missing", "gate"})
        return {key: value for key, value in values.items() if value is not None}


class Frozen:
    """The one copy of a frozen backbone in a process, one per device, which all its models share.

    It is no module, so that a model that holds one has none of its weights among its own; a copy of the model
    shares it, and another process makes its own.
    """

    def __init__(self, recipe: BackboneRecipe, input_shape: tuple[int, ...]) -> None:
        self.recipe, self.input_shape = recipe, input_shape
        shape = self._shape()
        self.sites: tuple[Site, ...] = shape.sites
        self.width: int = shape.width
        self.parameters: int = sum(p.numel() for p in shape.parameters())
        self._on: dict[torch.device, Backbone] = {}

    def on(self, device: torch.device | str) -> Backbone:
        """Return the backbone on a device, in evaluation mode and without gradients.

        Raises UserError if its weights are nowhere to be had, or do not pass the gate.
        """
        device = torch.device(device)
        if device not in self._on:
            # It may first be asked for while a model is evaluated, and is needed for training later.
            with torch.inference_mode(False):
                net = self._loaded() if device.type != "meta" else self._shape()
                self._on[device] = net.to(device).eval().requires_grad_(False)
        return self._on[device]

    def fingerprint(self) -> str:
        """Return the SHA-256 of the weights as they are now."""
        return fingerprint_of(self.on("cpu"))

    def _shape(self) -> Backbone:
        with seeded_torch(0, "backbone-shape"), torch.device("meta"):
            return network(self.recipe, self.input_shape)

    def _loaded(self) -> Backbone:
        if self.recipe.from_file:
            return of_file(self.recipe, self.input_shape)
        from .pretraining import pretrained

        return pretrained(self.recipe, self.input_shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> Frozen:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return frozen, (self.recipe, self.input_shape)


_FROZEN: dict[str, Frozen] = {}


def frozen(recipe: BackboneRecipe, input_shape: tuple[int, ...]) -> Frozen:
    """Return the process's copy of a backbone; loaded or made at once, except for models without memory.

    Raises UserError if that cannot be, see :meth:`Frozen.on`.
    """
    recipe = available(recipe)
    key = json.dumps([recipe.model_dump(mode="json"), list(input_shape)], sort_keys=True)
    if key not in _FROZEN:
        _FROZEN[key] = Frozen(recipe, input_shape)
    if torch.empty(0).device.type != "meta":
        _FROZEN[key].on("cpu")
    return _FROZEN[key]


def available(recipe: BackboneRecipe) -> BackboneRecipe:
    """Return the recipe, or the one that takes its place where published weights are not at hand."""
    if recipe.kind != "vit-b-16" or recipe.if_missing == "error" or _published_file(recipe) is not None:
        return recipe
    log.warning("no weights of vit-b-16 here: a vit-mini takes its place, pre-trained on %s", recipe.data)
    return recipe.model_copy(update={"kind": "vit-mini", "weights": None})


def network(recipe: BackboneRecipe, input_shape: tuple[int, ...]) -> Backbone:
    """Return the architecture of a recipe with weights drawn from torch's generator."""
    if recipe.kind == "conv":
        return ConvBackbone(input_shape, width=recipe.width or 16, depth=recipe.depth or 1)
    if recipe.kind == "vit-mini":
        return VisionTransformer(
            input_shape,
            patch=recipe.patch,
            width=recipe.width or 128,
            depth=recipe.depth or 6,
            heads=recipe.heads,
        )
    return VisionTransformer(
        input_shape, patch=16, width=recipe.width or 768, depth=recipe.depth or 12, heads=_heads(recipe)
    )


def of_file(recipe: BackboneRecipe, input_shape: tuple[int, ...]) -> Backbone:
    """Return the backbone with the weights of a file; raises UserError if there is none that fits."""
    path = _published_file(recipe) if recipe.weights is None else recipe.weights.expanduser()
    if path is None:
        raise UserError(
            f"backbone 'vit-b-16': its weights ({_PUBLISHED} of torchvision) are not here. Give the file as "
            f"backbone.weights, set backbone.download = true to fetch it, or pre-train a small one here: "
            f"backbone.if_missing = 'vit-mini', or kind = 'vit-mini' or 'conv'"
        )
    state = read_weights(path)
    if recipe.kind != "conv":
        net: Backbone = vit_of_state(input_shape, state, _heads(recipe))
        expected = network(recipe, input_shape) if recipe.kind == "vit-mini" else None
        if expected is not None and expected.sites != net.sites:
            raise UserError(f"{path}: these weights are not of a vit-mini as the recipe describes it")
        return net
    net = network(recipe, input_shape)
    try:
        net.load_state_dict(dict(state))
    except RuntimeError as error:
        raise UserError(f"{path}: the weights do not fit: {str(error).splitlines()[-1].strip()}") from None
    return net


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a ``.safetensors`` file, or of what torch saved as a state dict.

    Nothing in the file can run code. Raises UserError for a file that is missing or something else.
    """
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path.read_bytes())
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path}: cannot read the weights: {error.strerror or error}") from None
    except Exception as error:  # torch raises half a dozen kinds
        raise UserError(f"{path}: not a state dict: {str(error).splitlines()[0]}") from None
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path}: expected a state dict of tensors")
    return dict(state)


def fingerprint_of(module: nn.Module) -> str:
    """Return the SHA-256 over names, shapes and bytes of a module's weights and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).tobytes())
    return digest.hexdigest()


def _heads(recipe: BackboneRecipe) -> int:
    # Of the published sizes all heads have 64 channels.
    return recipe.heads if recipe.kind == "vit-mini" else (recipe.width or 768) // 64 or 1


def _published_file(recipe: BackboneRecipe) -> Path | None:
    """Return where the weights of vit-b-16 are, fetched first if that is allowed; None if nowhere."""
    if recipe.weights is not None:
        return recipe.weights if recipe.weights.expanduser().is_file() else None
    path = Path(torch.hub.get_dir()) / "checkpoints" / _PUBLISHED
    if not path.is_file() and recipe.download:
        import torchvision

        try:
            torchvision.models.ViT_B_16_Weights.IMAGENET1K_V1.get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:
            log.warning("the weights of vit-b-16 could not be fetched: %s", error)
    return path if path.is_file() else None


def _safetensors(content: bytes) -> dict[str, Tensor]:
    kinds = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32}
    try:
        end = _HEADER + int.from_bytes(content[:_HEADER], "little")
        header = json.loads(content[_HEADER:end])
        found = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                values = np.frombuffer(content[end + start : end + stop], kinds[entry["dtype"]])
                found[name] = torch.from_numpy(values.reshape(entry["shape"]).copy())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not a safetensors file of plain numbers: {error}") from None
    return found
