"""Models without convolutions, for images of any size."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from math import prod
from typing import Annotated

from pydantic import Field
from torch import nn

from .shapes import image_shape

Width = Annotated[int, Field(ge=1)]


def softmax_regression(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Multinomial logistic regression on the pixels: 7,850 parameters for 1x28x28 and ten classes.

    Takes (n, C, H, W), returns logits (n, num_classes). Raises UserError for text.
    """
    pixels = prod(image_shape("softmax", input_shape))
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(pixels, num_classes)))


def mlp(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    hidden: Annotated[tuple[Width, ...], Field(description="units of each hidden layer")] = (200, 200),
) -> nn.Module:
    """Perceptron with ReLU layers, by default FedAvg's "2NN": 199,210 parameters for 1x28x28, ten classes.

    Takes (n, C, H, W), returns logits (n, num_classes). Raises UserError for text.

    Source: McMahan et al., AISTATS 2017, section 3.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    widths = (prod(image_shape("mlp", input_shape)), *hidden)
    for number, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        layers[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        layers[f"relu{number}"] = nn.ReLU()
    layers[f"fc{len(widths)}"] = nn.Linear(widths[-1], num_classes)
    return nn.Sequential(layers)
