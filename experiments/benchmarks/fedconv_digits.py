"""How well FedConv's filters make a model smaller, against slices: accuracies on the digits, no federation.

    python -m fedplat.experiments.benchmarks.fedconv_digits [steps] [starts]

One convolutional net is trained on 1,200 digits; filters of several kinds, and as a control all weights of
the slice, are fitted on 300 of them; 597 others are the test. Mean and range over some starts of the filters.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedplat.arrays import FlatArrays
from fedplat.datasets.base import Source
from fedplat.datasets.digits import load
from fedplat.models import build
from fedplat.models.flat import FlatModel
from fedplat.rng import generator
from fedplat.strategies.fedconv.filters import BlockSettings
from fedplat.strategies.fedconv.fitting import FitPlan, PublicSplit, fit
from fedplat.strategies.fedconv.scheme import Filters, Problem
from fedplat.strategies.fedconv.server_side import Bound, ServerNet, vector_of
from fedplat.strategies.submodels import SubModelContext

SEED, WIDTHS = 1, (0.75, 0.5)
LOW, MIDDLE = (0.85, 0.001), (0.85, 0.3)
VARIANTS = {
    "paper layout, no activation, delta": BlockSettings(16, "all", None, 1, "delta"),
    "paper layout, s_n = .3, delta": BlockSettings(16, "all", MIDDLE, 1, "delta"),
    "paper layout, s_n = .001, delta": BlockSettings(16, "all", LOW, 1, "delta"),
    "paper layout, no activation, random": BlockSettings(16, "all", None, 1, "random"),
    "paper layout, s_n = .3, random": BlockSettings(16, "all", MIDDLE, 1, "random"),
    "paper layout, s_n = .001, random": BlockSettings(16, "all", LOW, 1, "random"),
    "code layout, MLR twice, random": BlockSettings(1, "conv", LOW, 2, "random"),
}


def cnn() -> nn.Module:
    """Two convolutions (16, 32) with pooling, and one linear layer."""
    layers = OrderedDict(
        conv1=nn.Conv2d(1, 16, 3, padding=1),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(16, 32, 3, padding=1),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc=nn.Linear(128, 10),
    )
    return nn.Sequential(layers)


def main(steps: int = 2000, starts: int = 3) -> None:
    digits = load(Source(root=None, cache=Path("unused"), download=False, seed=SEED))
    x = digits.prepare(np.concatenate([digits.train.x, digits.test.x]))
    y = torch.from_numpy(np.concatenate([digits.train.y, digits.test.y]))
    order = torch.from_numpy(generator(SEED, "order").permutation(len(y)))
    train, test = order[:1200], order[1200:]
    context = SubModelContext.of(cnn, (1, 8, 8), 10, public=lambda: (x[train[:300]], y[train[:300]]))
    bound = Bound(context)
    model = trained(bound, x[train], y[train])
    epochs = max(1, round(steps / 8))
    plan = FitPlan(epochs)
    print(f"global model: {accuracy(bound.net, vector_of(model)[None], x[test], y[test])[0]:.1f} %")
    print(f"{epochs} epochs of 8 steps, {starts} starts", flush=True)
    rows: dict[str, list[str]] = {}

    def note(name: str, width: float, accuracies: list[float]) -> None:
        rows.setdefault(name, []).append(told(accuracies))
        print(f"{name:40}{width:>6}{rows[name][-1]:>22}", flush=True)

    for width in WIDTHS:
        cut = context.plan.prefix(width)
        part = context.plan.index_map(cut, context.layout)
        net = ServerNet(context_small(context, width), part.layout)
        slices = vector_of(part.extract(model))[None]
        note("slice as it is", width, accuracy(net, slices, x[test], y[test]))
        fitted = fit(net, slices, bound.split, plan, generator(SEED, "slice"))
        note("slice, all weights fitted", width, accuracy(net, fitted.values, x[test], y[test]))
        for name, settings in VARIANTS.items():
            filters = Filters(context.plan, cut.sizes, settings, enlarge=False)
            start = torch.stack([filters.fresh(seed) for seed in range(starts)])
            whole = bound.net.named.split(vector_of(model).repeat(starts, 1))
            problem = Problem(filters, whole, net)
            values = fit(
                problem.logits(torch.arange(starts)), start, bound.split, plan, generator(SEED, name)
            ).values
            note(name, width, accuracy(net, problem.vectors(values), x[test], y[test]))
    print(f"\n{'':40}" + "".join(f"{width:>22}" for width in WIDTHS))
    for name, cells in rows.items():
        print(f"{name:40}" + "".join(f"{cell:>22}" for cell in cells))


def context_small(context: SubModelContext, width: float) -> nn.Module:
    """Return the sub-model of a width."""
    from fedplat.models.cutting import shrink

    return shrink(context.module, context.plan, context.plan.prefix(width).sizes)


def trained(bound: Bound, x: Tensor, y: Tensor) -> FlatArrays:
    """Return the net after 30 epochs on all training digits."""
    flat = FlatModel(build(lambda shape, classes: cnn(), (1, 8, 8), 10, SEED))
    model = flat.layout.new()
    flat.store(model)
    data = PublicSplit.of(x, y, generator(SEED, "split"), 0.1)
    fitted = fit(bound.net, vector_of(model)[None], data, FitPlan(30, 2e-3), generator(SEED, "train"))
    model.vector[:] = fitted.values[0].numpy()
    return model


def accuracy(net: ServerNet, values: Tensor, x: Tensor, y: Tensor) -> list[float]:
    """Return the accuracies of models (m, d) in per cent."""
    with torch.no_grad():
        return [float((out.argmax(1) == y).double().mean() * 100) for out in net(values, x)]


def told(accuracies: list[float]) -> str:
    """Return mean and range."""
    mean, low, high = sum(accuracies) / len(accuracies), min(accuracies), max(accuracies)
    return f"{mean:.1f}" if high - low < 0.05 else f"{mean:.1f} ({low:.1f}-{high:.1f})"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
