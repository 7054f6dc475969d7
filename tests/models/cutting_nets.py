"""Nets for the tests of sub-models: the whole zoo, and small ones."""

from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedplat import registry
from fedplat.arrays import FlatArrays, Layout
from fedplat.models import build
from fedplat.models.flat import FlatModel
from fedplat.models.resnet import ResidualBlock
from fedplat.rng import seeded_torch

from .zoo import plain_models

IMAGE, TEXT = (1, 20, 20), (6,)
ZOO: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in plain_models()]
ZOO.append(("resnet18", {"norm": "batch"}))


def shape_of(name: str) -> tuple[int, ...]:
    return TEXT if name == "char-lstm" else IMAGE


@cache
def zoo_model(number: int) -> FlatModel:
    name, settings = ZOO[number]
    target = registry.find("models", name).load()
    return FlatModel(build(target, shape_of(name), 10, 1, **settings))


def tiny_resnet(norm: str = "group", depths: tuple[int, int] = (3, 2)) -> nn.Module:
    """Channels 8 and 16; GroupNorm of 4 groups."""
    make: Callable[[int], nn.Module] = nn.BatchNorm2d if norm == "batch" else partial(nn.GroupNorm, 4)
    first = [ResidualBlock(8, 8, 1, make) for _ in range(depths[0])]
    second = [ResidualBlock(16 if i else 8, 16, 1 if i else 2, make) for i in range(depths[1])]
    return nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 8, 3, padding=1, bias=False),
            norm=make(8),
            relu=nn.ReLU(),
            stage1=nn.Sequential(*first),
            stage2=nn.Sequential(*second),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(16, 5),
        )
    )


def small_conv_net() -> nn.Module:
    """Convolution of 2 and 3 channels, the second with BatchNorm, 2x2 pixels flattened, LayerNorm."""
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 4, 3),
            relu1=nn.ReLU(),
            depthwise=nn.Conv2d(4, 4, 3, groups=4),
            conv2=nn.Conv2d(4, 6, 1),
            norm2=nn.BatchNorm2d(6),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(6 * 4, 8),
            relu3=nn.ReLU(),
            fc2=nn.Linear(8, 3),
        )
    )


def seeded(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """Build with random weights everywhere, also where the initial ones are 0 and 1, and some statistics."""
    with seeded_torch(seed, "test"):
        module = make()
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point() and not name.startswith("lstm"):
                tensor.uniform_(0.1, 0.6) if "running_var" in name else tensor.uniform_(-0.6, 0.6)
            elif not tensor.is_floating_point():
                tensor.fill_(7)
        return module


def arrays_of(flat: FlatModel) -> FlatArrays:
    arrays = flat.layout.new()
    flat.store(arrays)
    return arrays


def layout_of(module: nn.Module) -> Layout:
    return FlatModel(module).layout


def random_input(shape: tuple[int, ...], samples: int = 4, vocabulary: int = 10) -> Tensor:
    with seeded_torch(9, "test"):
        if len(shape) == 1:
            return torch.randint(0, vocabulary, (samples, *shape))
        return torch.randn(samples, *shape)
