from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fedplat import models, registry
from fedplat.clients.training import train_one
from fedplat.emulation.memory import (
    MemoryEstimate,
    kernel_memory,
    lstm_workspace,
    measured_memory,
    memory_table,
    training_memory,
)
from fedplat.emulation.memory_tracer import LiveBytes, allocated_peak
from fedplat.errors import UserError
from fedplat.models.cnn import cifar_cnn, hfl_cnn
from fedplat.models.dense import mlp, softmax_regression
from fedplat.models.flat import FlatModel
from fedplat.models.lstm import char_lstm
from fedplat.models.resnet import resnet18
from fedplat.training_config import LocalTraining

from ..flower_apps import with_workers_after
from ..models.zoo import plain_models

PLAIN, MOMENTUM = LocalTraining(), LocalTraining(momentum=0.9)
ADAM, BF16 = LocalTraining(optimizer="adam"), LocalTraining(precision="bf16")
CLIPPED = LocalTraining(max_grad_norm=1.0, weight_decay=0.1, momentum=0.5, nesterov=True)
SMALL = [name for name in plain_models() if not name.startswith("resnet")]
DEEP = [name for name in plain_models() if name.startswith("resnet")]


def check(rows) -> None:
    for row in rows:
        assert abs(row.error_percent) < 1, (row.model, row.training, row.estimate, row.measured)


@pytest.mark.parametrize("training", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("name", SMALL)
def test_the_estimate_is_what_training_takes(name: str, training: LocalTraining) -> None:
    check(memory_table({name: {}}, [training], (8, 32), text_length=20))


@pytest.mark.parametrize("name", DEEP)
def test_the_estimate_is_what_training_a_residual_net_takes(name: str) -> None:
    check(memory_table({name: {}}, [MOMENTUM], (2,), image_shape=(3, 8, 8)))


@pytest.mark.slow
@pytest.mark.parametrize("training", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("name", DEEP)
def test_the_estimate_is_what_training_a_residual_net_takes_at_full_size(
    name: str, training: LocalTraining
) -> None:
    check(memory_table({name: {}}, [training], (8, 32)))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mlp", {"hidden": (17,)}),
        ("mlp", {"hidden": (300, 10, 600)}),
        ("cnn-hfl", {"dropout": 0.5}),
        ("char-lstm", {"hidden": 33, "layers": 1, "embedding": 3}),
        ("char-lstm", {"hidden": 64, "layers": 3, "embedding": 100}),
    ],
)
def test_the_estimate_holds_at_other_widths_and_depths(name: str, settings) -> None:
    shape = (1, 28, 28) if name == "cnn-hfl" else (3, 12, 12)
    rows = list(memory_table({name: settings}, [PLAIN, CLIPPED], (3,), shape, text_length=9))
    assert len(rows) == 2
    for row in rows:
        assert abs(row.error_percent) < 1, (row.estimate, row.measured)


def test_the_estimate_holds_with_batch_norm() -> None:
    rows = list(memory_table({"resnet18": {"norm": "batch"}}, [PLAIN], (2,), (3, 9, 9)))
    check(rows)
    # Mean and variance of 4,800 channels in float32, and the counters of 20 layers in int64.
    assert rows[0].estimate.buffers == 2 * 4 * 4800 + 20 * 8


@pytest.mark.parametrize("name", ["mlp", "cnn-hfl", "cnn-cifar"])
def test_the_estimate_holds_in_bf16(name: str) -> None:
    check(memory_table({name: {}}, [BF16], (8,)))


def test_bf16_nearly_halves_the_activations_of_a_convolutional_net() -> None:
    def activations(training: LocalTraining) -> int:
        return training_memory(lambda: hfl_cnn((1, 28, 28), 10), (1, 28, 28), 256, training).activations

    # Not quite: the positions of the maxima that pooling saves are int64 either way.
    assert 0.5 < activations(BF16) / activations(PLAIN) < 0.8


def test_a_perceptron_is_as_computed_by_hand() -> None:
    n, hidden, classes = 64, 30, 10
    estimate = training_memory(lambda: mlp((1, 4, 5), classes, hidden=(hidden,)), (1, 4, 5), n, ADAM)
    weights = 4 * (20 * hidden + hidden + hidden * classes + classes)
    # The pixels in channels-last order, ReLU's output, log-softmax's, and the sum of the class weights.
    saved = 4 * n * 20 + 4 * n * hidden + 4 * n * classes + 4
    assert estimate.parameters == estimate.gradients == weights
    assert estimate.optimiser == 2 * weights + 4
    assert estimate.batch == 4 * 20 * n + 8 * n
    assert estimate.activations == saved
    assert estimate.total == sum(vars(estimate).values())


def test_memory_grows_by_the_same_for_every_sample() -> None:
    # Above some 200 samples; below, the peak is where the largest layer gets its gradient.
    sizes = [
        training_memory(lambda: cifar_cnn((3, 32, 32), 10), (3, 32, 32), n, PLAIN) for n in (300, 400, 500)
    ]
    assert sizes[1].activations - sizes[0].activations == sizes[2].activations - sizes[1].activations
    assert sizes[2].total - sizes[1].total == sizes[1].total - sizes[0].total > 0


@pytest.mark.parametrize(
    ("training", "slots"), [(PLAIN, 0), (MOMENTUM, 1), (LocalTraining(weight_decay=0.1), 0)]
)
def test_sgd_has_state_only_with_momentum(training: LocalTraining, slots: int) -> None:
    estimate = training_memory(lambda: softmax_regression((1, 2, 2), 3), (1, 2, 2), 1, training)
    assert estimate.optimiser == slots * estimate.parameters == slots * 60


def test_the_constant_is_added_as_given() -> None:
    build = lambda: softmax_regression((1, 2, 2), 3)  # noqa: E731
    without, with_it = (training_memory(build, (1, 2, 2), 1, PLAIN, constant) for constant in (0, 10**9))
    assert (without.constant, with_it.total - without.total) == (0, 10**9)


def test_a_model_far_too_large_for_this_machine_is_estimated() -> None:
    shape = (3, 200, 200)
    estimate = training_memory(lambda: mlp(shape, 10, hidden=(10**7,)), shape, 10**5, ADAM)
    assert estimate.parameters > 4e12


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (hfl_cnn((1, 28, 28), 10, dropout=0.5), (1, 28, 28)),
        (char_lstm((9,), 20, hidden=16), (9,)),
        (resnet18((3, 9, 9), 10, norm="batch"), (3, 9, 9)),
    ],
    ids=["cnn", "lstm", "batch norm"],
)
def test_a_module_and_torchs_generator_are_left_as_they_are(module: nn.Module, shape) -> None:
    module.eval()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    homes = [tensor.data_ptr() for tensor in module.state_dict().values()]
    first = training_memory(module, shape, 4, MOMENTUM)
    assert first == training_memory(module, shape, 4, MOMENTUM)
    text = len(shape) == 1
    x = torch.zeros(4, *shape, dtype=torch.int64 if text else torch.float32)
    y = torch.zeros(x.shape if text else 4, dtype=torch.int64)
    assert measured_memory(module, x, y, MOMENTUM) == measured_memory(module, x, y, MOMENTUM)
    assert not any(part.training for part in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert [tensor.data_ptr() for tensor in module.state_dict().values()] == homes
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_its_builder_and_the_seeded_builder_are_estimated_alike() -> None:
    shape = (3, 16, 16)
    ways = [
        cifar_cnn(shape, 7),
        lambda: cifar_cnn(shape, 7),
        lambda: models.build(cifar_cnn, shape, 7, seed=3),
    ]
    assert len({training_memory(way, shape, 5, ADAM) for way in ways}) == 1


@pytest.mark.parametrize(
    ("batch", "constant", "shape"), [(0, 0, (1, 2, 2)), (1, -1, (1, 2, 2)), (1, 0, (1, 0, 2))]
)
def test_sizes_that_make_no_sense_are_refused(batch: int, constant: int, shape) -> None:
    with pytest.raises(UserError, match="1 or more"):
        training_memory(lambda: softmax_regression((1, 2, 2), 3), shape, batch, PLAIN, constant)


def test_samples_that_the_model_cannot_take_are_refused() -> None:
    with pytest.raises(UserError, match="cannot train on samples of shape"):
        training_memory(softmax_regression((1, 2, 2), 3), (1, 5, 5), 1, PLAIN)


@pytest.mark.parametrize("shape", [(1, 1, 8, 32), (20, 4, 8, 32), (11, 3, 50, 33), (7, 8, 40, 256)])
def test_the_workspace_of_the_lstm_kernel_is_as_the_kernel_saves_it(shape) -> None:
    steps, batch, inputs, hidden = shape
    sizes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.uint8:
            sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        nn.LSTM(inputs, hidden)(torch.zeros(steps, batch, inputs))
    if not sizes:
        pytest.skip("this PyTorch computes LSTMs without oneDNN")
    # To the byte where this was found out; another processor's kernel may pad otherwise.
    assert lstm_workspace(steps, batch, inputs, hidden) == pytest.approx(sizes[0], rel=0.1)


def test_views_count_once_and_freed_tensors_no_more() -> None:
    outside = torch.zeros(1000)
    with LiveBytes() as live:
        kept = torch.zeros(10, 10)
        views = [kept.T, kept[2:], kept.add_(1), outside[5:]]
        assert live.live == live.peak == 400
        large = torch.zeros(500)
        assert live.live == 2400
        del large
        assert (live.live, live.peak) == (400, 2400)
        live.restart()
        assert live.peak == 400
        live.hold(outside)
        live.hold(outside)
        assert live.live == 4400
    del kept, views
    assert live.live == 4000


@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn-fedavg", "cnn-cifar"])
def test_the_estimate_is_what_pytorchs_own_allocator_reports(name: str) -> None:
    shape = (3, 32, 32)
    module = models.build(registry.find("models", name).load(), shape, 10, 1)
    estimate = training_memory(module, shape, 8, MOMENTUM)
    flat = FlatModel(module)
    x, y = torch.zeros(8, *shape), torch.zeros(8, dtype=torch.int64)
    training = MOMENTUM.model_copy(update={"batch_size": 8, "steps": 2})
    peak = allocated_peak(lambda: train_one(flat, training, x, y, np.random.default_rng(0)))
    assert estimate.total == pytest.approx(peak + flat.vector.nbytes + flat.grad.nbytes, rel=0.1)


def test_kernels_of_linear_layers_need_next_to_nothing_more_and_no_kernel_less() -> None:
    module, x, y = mlp((1, 8, 8), 10), torch.zeros(8, 1, 8, 8), torch.zeros(8, dtype=torch.int64)
    assert 0 <= kernel_memory(module, x, y, MOMENTUM) < 1000
    tokens = torch.zeros(4, 10, dtype=torch.int64)
    assert kernel_memory(char_lstm((10,), 12, hidden=32), tokens, tokens, MOMENTUM) >= 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_takes_at_least_what_is_estimated_and_not_much_more() -> None:
    shape, build = (3, 32, 32), lambda: cifar_cnn((3, 32, 32), 10)
    x, y = torch.zeros(512, *shape), torch.zeros(512, dtype=torch.int64)
    estimate = training_memory(build, shape, 512, MOMENTUM)
    measured = measured_memory(build(), x, y, MOMENTUM, "cuda")
    assert 0.9 * estimate.total < measured < 2 * estimate.total


def test_an_estimate_is_its_parts() -> None:
    assert MemoryEstimate(1, 2, 3, 4, 5, 6, 7, 8).total == 36


def test_a_process_that_began_with_an_estimate_can_fork_one_that_trains() -> None:
    printed = with_workers_after(
        "from fedplat.emulation.memory import training_memory\n"
        "from fedplat.models.dense import softmax_regression\n"
        "from fedplat.training_config import LocalTraining\n"
        "training_memory(lambda: softmax_regression((1, 2, 2), 3), (1, 2, 2), 2, LocalTraining())\n"
    )
    assert printed == ("[False, False] 2", "")
