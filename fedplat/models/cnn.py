"""Small convolutional nets of the federated-learning literature, each one a table of its stages.

All take (n, C, H, W), return logits (n, num_classes), start from PyTorch's default initialisation and raise
UserError for text and for images too small to survive the pooling.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count, pairwise
from typing import Annotated, NamedTuple

from pydantic import Field
from torch import nn

from .shapes import image_shape


class Stage(NamedTuple):
    """One convolution with ReLU: output channels, kernel size, padding, then a 2x2 max pool or none."""

    channels: int
    kernel: int
    padding: int
    pool: bool = True


def fedavg_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two 5x5 convolutions (32, 64) and 512 units: 1,663,370 parameters for 1x28x28 and ten classes.

    Source: McMahan et al., AISTATS 2017, section 3; "same" padding is what gives the published count.
    """
    return _conv_net("cnn-fedavg", input_shape, num_classes, [Stage(32, 5, 2), Stage(64, 5, 2)], [512])


def hfl_cnn(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    dropout: Annotated[float, Field(ge=0, lt=1, description="share of units to drop while training")] = 0.0,
) -> nn.Module:
    """Two 5x5 convolutions (10, 20) and 50 units: 21,840 parameters for 1x28x28 and ten classes.

    Dropout is off by default. HierFAVG's released code has 0.5, at the same two places as here: whole
    channels after the second convolution, single units before the last layer.

    Source: the released code of Liu et al., ICC 2020 (HierFAVG), MNIST.
    """
    return _conv_net("cnn-hfl", input_shape, num_classes, [Stage(10, 5, 0), Stage(20, 5, 0)], [50], dropout)


def mudhog_mnist_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """LeNet-like net with 3x3 convolutions (6, 16): 81,194 parameters for 1x32x32 and ten classes.

    Images of 30x30 give the same count.

    Source: Gupta et al., ESORICS 2022, released code; MNIST is resized to 32x32 there.
    """
    stages = [Stage(6, 3, 0), Stage(16, 3, 0)]
    return _conv_net("cnn-mudhog-mnist", input_shape, num_classes, stages, [120, 84])


def mudhog_fashion_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Six 3x3 convolutions (24, 48, 96, twice each): 165,106 parameters for 1x28x28 and ten classes.

    Source: Gupta et al., ESORICS 2022, released code, Fashion-MNIST.
    """
    stages = [
        *(Stage(24, 3, 1, pool=False), Stage(24, 3, 1)),
        *(Stage(48, 3, 1, pool=False), Stage(48, 3, 0)),
        *(Stage(96, 3, 1, pool=False), Stage(96, 3, 0)),
    ]
    return _conv_net("cnn-mudhog-fashion", input_shape, num_classes, stages, [])


def cifar_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Three 3x3 convolutions (32, 64, 128) and 256 units: 620,362 parameters for 3x32x32 and ten classes.

    Our choice where a paper names no net; without BatchNorm, so that no running statistics are averaged.
    """
    stages = [Stage(32, 3, 1), Stage(64, 3, 1), Stage(128, 3, 1)]
    return _conv_net("cnn-cifar", input_shape, num_classes, stages, [256])


def _conv_net(
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    stages: Sequence[Stage],
    hidden: Sequence[int],
    dropout: float = 0.0,
) -> nn.Module:
    smallest = next(size for size in count(1) if _size_after(stages, size) >= 1)
    channels, height, width = image_shape(name, input_shape, smallest)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, stage in enumerate(stages, start=1):
        layers[f"conv{number}"] = nn.Conv2d(channels, stage.channels, stage.kernel, padding=stage.padding)
        channels = stage.channels
        if dropout and number == len(stages):
            layers["channel_dropout"] = nn.Dropout2d(dropout)
        if stage.pool:
            layers[f"pool{number}"] = nn.MaxPool2d(2)
        # After the pool, because max and ReLU commute and there are four times fewer numbers left.
        layers[f"relu{number}"] = nn.ReLU()
    layers["flatten"] = nn.Flatten()
    widths = [channels * _size_after(stages, height) * _size_after(stages, width), *hidden]
    for number, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        layers[f"fc{number}"] = nn.Linear(fan_in, fan_out)
        layers[f"fc_relu{number}"] = nn.ReLU()
    if dropout:
        layers["dropout"] = nn.Dropout(dropout)
    layers[f"fc{len(widths)}"] = nn.Linear(widths[-1], num_classes)
    return nn.Sequential(layers)


def _size_after(stages: Sequence[Stage], size: int) -> int:
    """Return the side length in pixels that is left of ``size``; 0 if a stage has nothing to work on."""
    for stage in stages:
        size = size + 2 * stage.padding - stage.kernel + 1
        size = size // 2 if stage.pool else size
        if size < 1:
            return 0
    return size
