"""Residual nets for small images: a 3x3 stem without pooling, and GroupNorm unless asked otherwise.

BatchNorm's running statistics are per client and break under label skew, and an attacker can send any;
GroupNorm has none and the same number of parameters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

from ..errors import UserError
from .shapes import image_shape

Norm = Literal["group", "batch"]
Groups = Annotated[int, Field(ge=1, le=64, description="groups of GroupNorm; has to divide 64")]

_STAGE_CHANNELS = (64, 128, 256, 512)


def resnet18(
    input_shape: tuple[int, ...], num_classes: int, *, norm: Norm = "group", groups: Groups = 32
) -> nn.Module:
    """ResNet-18 for small images: 11,173,962 parameters for 3x32x32 and ten classes.

    Takes (n, C, H, W), returns logits (n, num_classes). Raises UserError for text, for ``groups`` that do not
    divide 64 and, with ``norm="batch"``, for images under 9x9 pixels.

    Source: He et al., CVPR 2016, with the 3x3 stem that is usual for CIFAR; GroupNorm for skewed clients from
    Hsieh et al., ICML 2020; 32 groups from Wu and He, ECCV 2018.
    """
    return _resnet("resnet18", input_shape, num_classes, (2, 2, 2, 2), norm, groups)


def resnet34(
    input_shape: tuple[int, ...], num_classes: int, *, norm: Norm = "group", groups: Groups = 32
) -> nn.Module:
    """ResNet-34 for small images: 21,282,122 parameters for 3x32x32 and ten classes; see resnet18."""
    return _resnet("resnet34", input_shape, num_classes, (3, 4, 6, 3), norm, groups)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: (n, in, H, W) to (n, out, H / stride, W / stride)."""

    def __init__(self, fan_in: int, fan_out: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.norm2 = norm(fan_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or fan_in != fan_out:
            self.shortcut = nn.Sequential(
                OrderedDict(conv=nn.Conv2d(fan_in, fan_out, 1, stride=stride, bias=False), norm=norm(fan_out))
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(F(x) + shortcut(x)), He et al., equations 1 and 2."""
        out = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def _resnet(
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    depths: Sequence[int],
    norm: Norm,
    groups: int,
) -> nn.Module:
    # Below 9x9 the last stage is one pixel, and BatchNorm cannot train on a last batch of one sample there.
    channels, _, _ = image_shape(name, input_shape, smallest=9 if norm == "batch" else 1)
    if norm == "group" and _STAGE_CHANNELS[0] % groups:
        raise UserError(f"model '{name}': groups = {groups} does not divide {_STAGE_CHANNELS[0]} channels")
    make_norm: Callable[[int], nn.Module] = nn.BatchNorm2d
    if norm == "group":
        make_norm = partial(nn.GroupNorm, groups)

    width = _STAGE_CHANNELS[0]
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(channels, width, 3, padding=1, bias=False),
        norm=make_norm(width),
        relu=nn.ReLU(inplace=True),
    )
    for number, (depth, fan_out) in enumerate(zip(depths, _STAGE_CHANNELS, strict=True), start=1):
        blocks = []
        for position in range(depth):
            stride = 2 if number > 1 and position == 0 else 1
            blocks.append(ResidualBlock(width, fan_out, stride, make_norm))
            width = fan_out
        layers[f"stage{number}"] = nn.Sequential(*blocks)
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(width, num_classes)}
    net = nn.Sequential(layers)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net
