"""Tiny backbones for tests: random weights, no data, no pre-training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedplat.models import build
from fedplat.models.backbones import BackboneRecipe, Frozen
from fedplat.models.conv_backbone import ConvBackbone
from fedplat.models.ssf import Backbone
from fedplat.models.vit import VisionTransformer
from fedplat.rng import seeded_torch

SHAPE = (3, 16, 16)


def tiny_vit(seed: int = 1, **settings: int) -> VisionTransformer:
    net = build(_vit, SHAPE, 0, seed, **settings)
    assert isinstance(net, VisionTransformer)
    return _lively(net, seed)  # type: ignore[return-value]


def tiny_conv(seed: int = 1) -> ConvBackbone:
    net = build(_conv, SHAPE, 0, seed)
    assert isinstance(net, ConvBackbone)
    return _lively(net, seed)  # type: ignore[return-value]


def _vit(input_shape: tuple[int, ...], _: int, **settings: int) -> VisionTransformer:
    return VisionTransformer(input_shape, **{"patch": 8, "width": 16, "depth": 2, "heads": 2, **settings})


def _conv(input_shape: tuple[int, ...], _: int) -> ConvBackbone:
    return ConvBackbone(input_shape, width=4)


def _lively(net: Backbone, seed: int) -> Backbone:
    """Give all weights values that are not those of a new net, so that leaving one out would show."""
    with seeded_torch(seed, "lively"):
        for name, tensor in net.state_dict().items():
            if "var" in name:
                tensor.uniform_(0.5, 1.5)
            elif tensor.is_floating_point() and tensor.ndim < 2:
                tensor += torch.empty_like(tensor).uniform_(-0.3, 0.3)
            elif tensor.ndim in (2, 3):  # a transformer's, which start so small that all images look alike
                tensor.normal_(0, 0.3)
    return net.eval()


def frozen_net(net: Backbone) -> Frozen:
    """Return a frozen backbone that is this net, without any file."""
    kind = "conv" if isinstance(net, ConvBackbone) else "vit-mini"
    size = {"width": 4} if kind == "conv" else {"width": 16, "depth": 2, "patch": 8, "heads": 2}
    held = Frozen(BackboneRecipe.model_validate({"kind": kind, "weights": "unused", **size}), SHAPE)
    held._on[next(net.parameters()).device] = net.eval().requires_grad_(False)  # type: ignore[assignment]
    return held


def write_safetensors(path: Path, state: dict[str, Tensor]) -> None:
    header, blob = {}, b""
    for name, tensor in state.items():
        raw = np.ascontiguousarray(tensor.numpy()).tobytes()
        kind = {"float32": "F32", "int64": "I64", "float16": "F16"}[str(tensor.dtype).split(".")[1]]
        header[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [len(blob), len(blob) + len(raw)],
        }
        blob += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob)
