"""The nets of FedP3's experiments, and the same with GroupNorm."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from math import prod
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from ..errors import UserError
from .shapes import image_shape

Width = Annotated[int, Field(ge=1)]
Norm = Annotated[Literal["none", "group"], Field(description="GroupNorm after convolutions, or none")]

_SIDE = 32
_GROUPS = 8


def fedp3_cnn(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    channels: Width = 64,
    hidden: Annotated[tuple[Width, ...], Field(description="units of each hidden layer")] = (1024, 1024),
    norm: Norm = "none",
) -> nn.Module:
    """Two 5x5 convolutions and 1024, 1024 units: 2,806,602 parameters for 3x32x32 and ten classes.

    Takes (n, C, H, W), returns logits (n, num_classes). Smaller images are padded with zeros to 32x32 by the
    first convolution, which gives 2,803,402 parameters for 1x28x28 and ten classes. Raises UserError for
    text, and for images that cannot be padded so alike on all sides.

    Source: Yi et al., ICLR 2024, table 4; the padding is inferred from its 1600 inputs of the first linear
    layer.
    """
    images, height, width = image_shape("cnn-fedp3", input_shape)
    pads = [max(_SIDE - side, 0) for side in (height, width)]
    if any(pad % 2 for pad in pads):
        raise UserError(
            f"model 'cnn-fedp3' pads images to {_SIDE}x{_SIDE} alike on all sides, and {height}x{width} "
            f"would need {pads[0]} and {pads[1]} pixels; take images of even height and width"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    padding = pads[0] // 2, pads[1] // 2
    for number, (fan_in, around) in enumerate(((images, padding), (channels, (0, 0))), start=1):
        layers[f"conv{number}"] = nn.Conv2d(fan_in, channels, 5, padding=around)
        if norm == "group":
            groups = next(count for count in range(min(_GROUPS, channels), 0, -1) if channels % count == 0)
            layers[f"norm{number}"] = nn.GroupNorm(groups, channels)
        layers[f"pool{number}"] = nn.MaxPool2d(2)
        layers[f"relu{number}"] = nn.ReLU()
    layers["flatten"] = nn.Flatten()
    sides = [((side + pad - 4) // 2 - 4) // 2 for side, pad in zip((height, width), pads, strict=True)]
    return _with_linear(layers, channels * prod(sides), hidden, num_classes)


def fedp3_mlp(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    hidden: Annotated[tuple[Width, ...], Field(description="units of each hidden layer")] = (
        1024,
        1024,
        1024,
    ),
) -> nn.Module:
    """Three layers of 1024 units with ReLU: 2,913,290 parameters for 1x28x28 and ten classes.

    Takes (n, C, H, W), returns logits (n, num_classes). Raises UserError for text.

    Source: Yi et al., ICLR 2024, table 4, EMNIST letters A to J.
    """
    pixels = prod(image_shape("mlp-fedp3", input_shape))
    return _with_linear(OrderedDict(flatten=nn.Flatten()), pixels, hidden, num_classes)


def _with_linear(
    layers: OrderedDict[str, nn.Module], inputs: int, hidden: tuple[int, ...], num_classes: int
) -> nn.Module:
    widths = (inputs, *hidden)
    for number, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        layers[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        layers[f"fc_relu{number}"] = nn.ReLU()
    layers[f"fc{len(widths)}"] = nn.Linear(widths[-1], num_classes)
    return nn.Sequential(layers)
