"""The names a user can type, and where the thing behind each name lives.

Nothing is imported until a name is used, so listing all names costs no torch import. Two rules make a
new part one file and one line here:

* a target's **keyword-only parameters are its settings**; a configuration may set exactly these, and
  their annotations (``Annotated[float, Field(gt=0)]``) are what a value is checked against;
* ``module:attribute`` is accepted wherever a name is, for parts that live in the user's own code.

Other packages add names through the entry-point group ``fedplat.<kind>``, e.g. ``fedplat.strategies``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from .errors import UserError, unknown_name


@dataclass(frozen=True)
class Entry:
    """One name: its kind, the ``module:attribute`` behind it, a summary and the publication it follows."""

    kind: str
    name: str
    target: str
    summary: str
    source: str = ""

    def load(self) -> Callable[..., Any]:
        """Import the target; raises UserError if it is not there."""
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"{SINGULAR[self.kind]} '{self.name}': cannot import {self.target}: {error}"
            ) from error


_STRATEGIES = "fedplat.strategies.baselines"
_DEFENCES = "fedplat.strategies.robust"
_KRUM = "Blanchard et al., NeurIPS 2017"
_ROBUST = "Yin et al., ICML 2018"
_MODELS = "fedplat.models"
_SOURCES = "fedplat.datasets"
_PARTITIONS = "fedplat.datasets.partition"

_BUILT_IN = (
    Entry(
        "strategies",
        "mean",
        f"{_STRATEGIES}:Mean",
        "weighted or plain mean of the updates",
        "McMahan et al., AISTATS 2017 (FedAvg)",
    ),
    Entry("strategies", "median", f"{_STRATEGIES}:Median", "coordinate-wise median", f"{_ROBUST}, option I"),
    Entry(
        "strategies",
        "trimmed-mean",
        f"{_STRATEGIES}:TrimmedMean",
        "coordinate-wise mean without the extremes",
        f"{_ROBUST}, option II",
    ),
    Entry("strategies", "krum", f"{_DEFENCES}:Krum", "the model nearest its neighbours", _KRUM),
    Entry("strategies", "multi-krum", f"{_DEFENCES}:MultiKrum", "mean of the best by Krum's score", _KRUM),
    Entry(
        "strategies",
        "bulyan",
        f"{_DEFENCES}:Bulyan",
        "repeated Krum, then the mean around the median",
        "El Mhamdi et al., ICML 2018",
    ),
    Entry(
        "strategies",
        "meamed",
        f"{_DEFENCES}:Meamed",
        "mean of the values nearest the median",
        "Xie et al., 2018",
    ),
    Entry(
        "strategies",
        "geometric-median",
        f"{_DEFENCES}:GeometricMedian",
        "least sum of distances to the clients",
        "Pillutla et al., 2019 (RFA)",
    ),
    Entry(
        "strategies",
        "centered-clipping",
        f"{_DEFENCES}:CenteredClipping",
        "updates clipped around the last model",
        "Karimireddy et al., ICML 2021",
    ),
    Entry(
        "strategies",
        "norm-clipping",
        f"{_DEFENCES}:NormClipping",
        "mean of updates of bounded length",
        "Sun et al., 2019",
    ),
    Entry(
        "selectors", "all", "fedplat.strategies.selectors:AllClients", "everyone takes part in every round"
    ),
    Entry(
        "selectors",
        "fraction",
        "fedplat.strategies.selectors:RandomFraction",
        "a random fraction each round",
        "McMahan et al., AISTATS 2017",
    ),
    Entry(
        "attacks",
        "sign-flip",
        "fedplat.clients.attacks.sign_flip:SignFlip",
        "sends the update (or the weights) with the sign turned",
        "Li et al., AAAI 2019 (RSA)",
    ),
    Entry("models", "softmax", f"{_MODELS}.dense:softmax_regression", "multinomial logistic regression"),
    Entry("models", "mlp", f"{_MODELS}.dense:mlp", "multi-layer perceptron"),
    Entry(
        "models",
        "cnn-fedavg",
        f"{_MODELS}.cnn:fedavg_cnn",
        "two 5x5 convolutions, 1,663,370 parameters on MNIST",
        "McMahan et al., AISTATS 2017",
    ),
    Entry(
        "models",
        "cnn-hfl",
        f"{_MODELS}.cnn:hfl_cnn",
        "small two-convolution net, 21,840 parameters on MNIST",
        "HierFAVG's released code",
    ),
    Entry(
        "models",
        "cnn-mudhog-mnist",
        f"{_MODELS}.cnn:mudhog_mnist_cnn",
        "LeNet-like net for 32x32 grey images, 81,194 parameters",
        "Gupta et al., ESORICS 2022, released code",
    ),
    Entry(
        "models",
        "cnn-mudhog-fashion",
        f"{_MODELS}.cnn:mudhog_fashion_cnn",
        "six-convolution net for 28x28 grey images, 165,106 parameters",
        "Gupta et al., ESORICS 2022, released code",
    ),
    Entry(
        "models",
        "cnn-cifar",
        f"{_MODELS}.cnn:cifar_cnn",
        "three 3x3 convolutions with pooling for 32x32 images",
    ),
    Entry(
        "models",
        "resnet18",
        f"{_MODELS}.resnet:resnet18",
        "ResNet-18 with a 3x3 stem, GroupNorm or BatchNorm",
        "He et al., CVPR 2016; Hsieh et al., ICML 2020 for GroupNorm",
    ),
    Entry(
        "models",
        "resnet34",
        f"{_MODELS}.resnet:resnet34",
        "ResNet-34 with a 3x3 stem, GroupNorm or BatchNorm",
        "He et al., CVPR 2016; Hsieh et al., ICML 2020 for GroupNorm",
    ),
    Entry(
        "models",
        "char-lstm",
        f"{_MODELS}.lstm:char_lstm",
        "two-layer character LSTM",
        "McMahan et al., AISTATS 2017",
    ),
    Entry(
        "datasets",
        "digits",
        f"{_SOURCES}.digits:load",
        "1,797 handwritten digits of 8x8 pixels, ship inside scikit-learn",
        "Alpaydin and Kaynak, UCI 1998",
    ),
    Entry(
        "datasets",
        "mnist",
        f"{_SOURCES}.torchvision_sets:load_mnist",
        "handwritten digits, 28x28",
        "LeCun et al., 1998",
    ),
    Entry(
        "datasets",
        "fashion-mnist",
        f"{_SOURCES}.torchvision_sets:load_fashion_mnist",
        "clothing, 28x28 grey",
        "Xiao et al., 2017",
    ),
    Entry(
        "datasets",
        "cifar10",
        f"{_SOURCES}.torchvision_sets:load_cifar10",
        "ten kinds of objects, 32x32 colour",
        "Krizhevsky, 2009",
    ),
    Entry(
        "datasets",
        "image-folder",
        f"{_SOURCES}.image_folder:load",
        "your own images: root/{train,test}/<class>/*",
    ),
    Entry(
        "datasets",
        "shakespeare",
        f"{_SOURCES}.shakespeare:load",
        "next character in plays; speakers are clients",
        "Karpathy's Tiny Shakespeare; task of McMahan et al., AISTATS 2017",
    ),
    Entry("partitions", "iid", f"{_PARTITIONS}:iid", "shuffled, equal sizes"),
    Entry(
        "partitions",
        "dirichlet",
        f"{_PARTITIONS}:dirichlet",
        "each class spread over the clients by Dirichlet(alpha)",
        "Yurochkin et al., ICML 2019",
    ),
    Entry(
        "partitions",
        "dirichlet-client",
        f"{_PARTITIONS}:dirichlet_client",
        "equal sizes, each client's class mix drawn from Dirichlet(alpha)",
        "Hsu et al., 2019",
    ),
    Entry(
        "partitions",
        "shards",
        f"{_PARTITIONS}:shards",
        "k label shards per client",
        "McMahan et al., AISTATS 2017",
    ),
    Entry("partitions", "quantity", f"{_PARTITIONS}:quantity", "label-balanced on average, log-normal sizes"),
    Entry("partitions", "natural", f"{_PARTITIONS}:natural", "one client per speaker, writer or user"),
    Entry(
        "partitions",
        "mud-hog",
        f"{_PARTITIONS}:mud_hog",
        "the split of the MUD-HoG experiments, to the sample",
        "Gupta et al., ESORICS 2022, released code",
    ),
)

SINGULAR = {
    "strategies": "strategy",
    "selectors": "selector",
    "attacks": "attack",
    "models": "model",
    "datasets": "dataset",
    "partitions": "partition",
}
KINDS = tuple(SINGULAR)


@cache
def entries(kind: str) -> dict[str, Entry]:
    """Return all names of a kind, ours first, then those that installed packages add."""
    found = {entry.name: entry for entry in _BUILT_IN if entry.kind == kind}
    for point in entry_points(group=f"fedplat.{kind}"):
        found.setdefault(point.name, Entry(kind, point.name, point.value, f"from {point.module}"))
    return found


def find(kind: str, name: str) -> Entry:
    """Return the entry for a name or ``module:attribute``; raises UserError with the nearest name."""
    if name in entries(kind):
        return entries(kind)[name]
    if ":" in name:
        return Entry(kind, name, name, "given by import path")
    raise unknown_name(SINGULAR[kind], name, entries(kind))


@dataclass(frozen=True)
class Setting:
    """One setting of a part: a keyword-only parameter of its target."""

    name: str
    annotation: Any
    default: Any

    @property
    def required(self) -> bool:
        """Whether a configuration has to give it."""
        return self.default is inspect.Parameter.empty


def settings(target: Callable[..., Any]) -> list[Setting]:
    """Return the settings of a target, in the order of its signature."""
    function = target.__init__ if inspect.isclass(target) else target
    hints = get_type_hints(function, include_extras=True)
    return [
        Setting(parameter.name, hints.get(parameter.name, Any), parameter.default)
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
