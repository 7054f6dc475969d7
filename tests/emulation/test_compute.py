from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedplat import models, registry
from fedplat.clients.training import batches
from fedplat.emulation.compute import (
    sample_bits,
    sample_flops,
    samples_seen,
    task_bits,
    task_flops,
    training_flops,
)
from fedplat.errors import UserError
from fedplat.models.cnn import cifar_cnn, fedavg_cnn, hfl_cnn, mudhog_fashion_cnn, mudhog_mnist_cnn
from fedplat.models.dense import mlp, softmax_regression
from fedplat.models.lstm import char_lstm
from fedplat.training_config import LocalTraining

from ..flower_apps import with_workers_after
from ..models.zoo import plain_models

GREY, GREY32, COLOUR = (1, 28, 28), (1, 32, 32), (3, 32, 32)

# Multiply-adds of each layer's forward pass for one sample: inputs x kernel x outputs x pixels of the output.
BY_HAND = {
    "softmax": (softmax_regression, GREY, [784 * 10]),
    "mlp": (mlp, GREY, [784 * 200, 200 * 200, 200 * 10]),
    "cnn-fedavg": (
        fedavg_cnn,
        GREY,
        [1 * 25 * 32 * 28 * 28, 32 * 25 * 64 * 14 * 14, 64 * 7 * 7 * 512, 512 * 10],
    ),
    "cnn-hfl": (hfl_cnn, GREY, [1 * 25 * 10 * 24 * 24, 10 * 25 * 20 * 8 * 8, 20 * 4 * 4 * 50, 50 * 10]),
    "cnn-mudhog-mnist": (
        mudhog_mnist_cnn,
        GREY32,
        [1 * 9 * 6 * 30 * 30, 6 * 9 * 16 * 13 * 13, 16 * 6 * 6 * 120, 120 * 84, 84 * 10],
    ),
    "cnn-mudhog-fashion": (
        mudhog_fashion_cnn,
        GREY,
        [
            *(1 * 9 * 24 * 28 * 28, 24 * 9 * 24 * 28 * 28),
            *(24 * 9 * 48 * 14 * 14, 48 * 9 * 48 * 12 * 12),
            *(48 * 9 * 96 * 6 * 6, 96 * 9 * 96 * 4 * 4),
            96 * 2 * 2 * 10,
        ],
    ),
    "cnn-cifar": (
        cifar_cnn,
        COLOUR,
        [
            *(3 * 9 * 32 * 32 * 32, 32 * 9 * 64 * 16 * 16, 64 * 9 * 128 * 8 * 8),
            *(128 * 4 * 4 * 256, 256 * 10),
        ],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_work_of_a_step_is_as_computed_by_hand(name: str, batch_size: int) -> None:
    builder, shape, layers = BY_HAND[name]
    # Two per multiply-add; once forward, once for the weights, once for the input of all but the first layer.
    by_hand = 2 * (3 * sum(layers) - layers[0])
    assert training_flops(lambda: builder(shape, 10), shape, batch_size) == batch_size * by_hand


def test_an_lstm_layer_is_counted_forward_and_twice_backward() -> None:
    steps, embedding, hidden, vocabulary = 20, 8, 32, 65
    gates = 4 * hidden * (embedding + hidden) + 4 * hidden * (hidden + hidden)
    by_hand = 2 * 3 * steps * (gates + hidden * vocabulary)
    found = training_flops(lambda: char_lstm((steps,), vocabulary, hidden=hidden), (steps,), 4)
    assert found == 4 * by_hand


def counted(module: nn.Module, x: Tensor) -> tuple[int, int]:
    """Count multiply-adds of a real forward pass by the shapes that each layer sees: all, and the first's."""
    found: list[int] = []

    def look(layer: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        if isinstance(layer, nn.Conv2d):
            found.append(result.numel() * layer.weight[0].numel())
        elif isinstance(layer, nn.Linear):
            found.append(result.numel() * layer.in_features)
        elif isinstance(layer, nn.LSTM):
            weights = sum(w.numel() for name, w in layer.named_parameters() if name.startswith("weight"))
            found.append(given[0][..., 0].numel() * weights)

    for layer in module.modules():
        layer.register_forward_hook(look)
    with torch.no_grad():
        module(x)
    return sum(found), 0 if isinstance(next(module.children()), nn.Embedding) else found[0]


@pytest.mark.parametrize("name", plain_models())
def test_every_model_takes_the_work_that_its_layers_see(name: str) -> None:
    target = registry.find("models", name).load()
    shape = (9,) if name == "char-lstm" else COLOUR
    module = models.build(target, shape, 10, 0)
    x = torch.zeros(2, *shape, dtype=torch.int64 if len(shape) == 1 else torch.float32)
    every, first = counted(module, x)
    assert training_flops(module, shape, 2) == 2 * (3 * every - first)


def test_a_residual_net_with_batch_norm_and_one_pixel_left_can_be_asked_per_sample() -> None:
    target = registry.find("models", "resnet18").load()
    per_sample = sample_flops(lambda: target((3, 9, 9), 10, norm="batch"), (3, 9, 9))
    assert per_sample == sample_flops(lambda: target((3, 9, 9), 10), (3, 9, 9)) > 0


def test_the_model_is_left_as_it_is() -> None:
    module = hfl_cnn(GREY, 10).eval()
    before = [parameter.clone() for parameter in module.parameters()]
    training_flops(module, GREY, 3)
    assert not module.training
    for parameter, copy in zip(module.parameters(), before, strict=True):
        assert parameter.grad is None
        assert torch.equal(parameter, copy)


def test_counting_first_leaves_a_process_that_can_be_forked_into_one_that_trains() -> None:
    count = (
        "from fedplat.emulation.compute import training_flops\n"
        "from fedplat.models.dense import softmax_regression\n"
        "training_flops(lambda: softmax_regression((1, 4, 4), 3), (1, 4, 4), 2)\n"
    )
    assert with_workers_after(count) == ("[False, False] 2", "")


@given(
    samples=st.integers(0, 70),
    size=st.integers(1, 40),
    epochs=st.integers(1, 3),
    steps=st.none() | st.integers(1, 30),
    drop_last=st.booleans(),
)
def test_the_samples_seen_are_those_that_training_takes(samples, size, epochs, steps, drop_last) -> None:
    training = LocalTraining(epochs=epochs, steps=steps, batch_size=size, drop_last=drop_last)
    plan = batches(samples, training, np.random.default_rng(0))
    assert samples_seen(samples, training) == sum(len(batch) for batch in plan)


def test_a_task_is_the_work_of_all_samples_seen() -> None:
    training = LocalTraining(epochs=3, batch_size=4, drop_last=True)
    per_sample = sample_flops(lambda: softmax_regression(GREY, 10), GREY)
    assert per_sample == 4 * 7840
    assert task_flops(per_sample, 10, training) == 3 * 8 * 4 * 7840
    assert task_bits(sample_bits(GREY), 10, training) == 3 * 8 * 784 * 8
    assert task_flops(per_sample, 0, training) == 0


@pytest.mark.parametrize(
    ("shape", "batch_size", "said"),
    [
        (GREY, 0, "1 or more"),
        ((1, 0, 28), 1, "1 or more"),
        ((3, 28, 28), 1, r"cannot train on samples of shape \(3, 28, 28\)"),
    ],
)
def test_what_cannot_be_trained_is_refused(shape, batch_size: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        training_flops(lambda: hfl_cnn(GREY, 10), shape, batch_size)
