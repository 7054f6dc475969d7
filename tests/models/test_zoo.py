from typing import Any

import pytest
import torch
from torch import nn

from fedplat import registry
from fedplat.errors import UserError
from fedplat.models import build, count_parameters, loss_fn
from fedplat.models.cnn import cifar_cnn, fedavg_cnn, hfl_cnn, mudhog_fashion_cnn, mudhog_mnist_cnn
from fedplat.models.dense import mlp, softmax_regression
from fedplat.models.lstm import char_lstm
from fedplat.models.resnet import resnet18, resnet34
from fedplat.rng import seeded_torch

from .zoo import plain_models

MNIST, CIFAR, DIGITS = (1, 28, 28), (3, 32, 32), (1, 8, 8)

COUNTS = [
    ("softmax", MNIST, 10, 7_850),
    ("mlp", MNIST, 10, 199_210),
    ("cnn-fedavg", MNIST, 10, 1_663_370),
    ("cnn-hfl", MNIST, 10, 21_840),
    ("cnn-mudhog-mnist", (1, 32, 32), 10, 81_194),
    ("cnn-mudhog-mnist", (1, 30, 30), 10, 81_194),
    ("cnn-mudhog-fashion", MNIST, 10, 165_106),
    ("cnn-cifar", CIFAR, 10, 620_362),
    ("resnet18", CIFAR, 10, 11_173_962),
    ("resnet34", CIFAR, 10, 21_282_122),
    ("char-lstm", (80,), 65, 815_945),
    # FedP3's table 4: weights and biases of 32x32 images, and of 28x28 pixels in a row.
    ("cnn-fedp3", CIFAR, 10, 2_806_602),
    ("mlp-fedp3", MNIST, 10, 2_913_290),
]


@pytest.mark.parametrize(("name", "shape", "classes", "count"), COUNTS)
def test_parameter_count_is_the_published_one(name: str, shape: Any, classes: int, count: int) -> None:
    with torch.device("meta"):
        module = registry.find("models", name).load()(shape, classes)
    assert count_parameters(module) == count


def test_the_counts_cover_every_name_in_the_zoo() -> None:
    assert {name for name, *_ in COUNTS} == set(plain_models())


@pytest.mark.parametrize("builder", [resnet18, resnet34])
def test_batch_norm_and_group_norm_have_the_same_number_of_parameters(builder: Any) -> None:
    with torch.device("meta"):
        group, batch = builder(CIFAR, 10), builder(CIFAR, 10, norm="batch")
    assert count_parameters(group) == count_parameters(batch)
    assert not list(group.buffers())
    assert list(batch.buffers())


@pytest.mark.parametrize("shape", [DIGITS, MNIST, (1, 30, 30), (1, 32, 32), CIFAR, (3, 33, 40)])
@pytest.mark.parametrize("builder", [softmax_regression, mlp, fedavg_cnn, cifar_cnn])
def test_nets_without_a_size_limit_take_every_usual_image(builder: Any, shape: tuple[int, ...]) -> None:
    module = build(builder, shape, 7, seed=1)
    assert module(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize("builder", [hfl_cnn, mudhog_mnist_cnn, mudhog_fashion_cnn])
@pytest.mark.parametrize("shape", [MNIST, (1, 30, 30), CIFAR, (3, 20, 25)])
def test_unpadded_nets_take_every_image_that_is_large_enough(builder: Any, shape: tuple[int, ...]) -> None:
    module = build(builder, shape, 7, seed=1)
    assert module(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("builder", "smallest"), [(hfl_cnn, 16), (mudhog_mnist_cnn, 10), (mudhog_fashion_cnn, 20), (cifar_cnn, 8)]
)
def test_the_smallest_image_works_and_one_pixel_less_is_refused(builder: Any, smallest: int) -> None:
    module = build(builder, (1, smallest, smallest), 10, seed=1)
    assert module(torch.zeros(1, 1, smallest, smallest)).shape == (1, 10)
    with pytest.raises(UserError, match=f"at least {smallest}x{smallest} pixels, got 28x{smallest - 1}"):
        builder((1, 28, smallest - 1), 10)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_resnet_gives_logits_and_gradients_for_a_tiny_batch(norm: str) -> None:
    module = build(resnet18, (3, 12, 12), 5, seed=1, norm=norm)
    with seeded_torch(0, "test"):
        x = torch.randn(1, 3, 12, 12)
    logits = module(x)
    logits.sum().backward()
    assert logits.shape == (1, 5)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_resnet_with_group_norm_takes_8x8_digits_and_with_batch_norm_says_why_not() -> None:
    with torch.device("meta"):
        resnet18(DIGITS, 10)
    with pytest.raises(UserError, match="at least 9x9 pixels, got 8x8"):
        resnet18(DIGITS, 10, norm="batch")


def test_resnet_refuses_groups_that_do_not_divide_its_channels() -> None:
    with pytest.raises(UserError, match="groups = 48 does not divide 64"):
        resnet34(CIFAR, 10, groups=48)


@pytest.mark.parametrize("name", [name for name in plain_models() if name != "char-lstm"])
def test_image_models_refuse_text_in_a_plain_sentence(name: str) -> None:
    with pytest.raises(UserError, match=f"'{name}' reads images.*80 tokens"):
        registry.find("models", name).load()((80,), 65)


def test_text_model_refuses_images_in_a_plain_sentence() -> None:
    with pytest.raises(UserError, match="'char-lstm' reads token sequences"):
        char_lstm(MNIST, 10)


def test_image_models_refuse_a_shape_that_is_neither() -> None:
    with pytest.raises(UserError, match=r"\(channels, height, width\), got \(28, 28\)"):
        mlp((28, 28), 10)


def test_char_lstm_predicts_every_position_from_the_past_alone() -> None:
    module = build(char_lstm, (6,), 9, seed=1, hidden=16, layers=1)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 0]])
    logits = module(tokens)
    assert logits.shape == (2, 6, 9)
    torch.testing.assert_close(logits[0, :3], logits[1, :3])
    assert not torch.equal(logits[0, 3], logits[1, 3])


def test_dropout_of_the_hfl_net_is_off_unless_asked_for() -> None:
    for dropout, expected in ((0.0, 0), (0.5, 2)):
        module = hfl_cnn(MNIST, 10, dropout=dropout)
        assert sum(isinstance(layer, nn.Dropout | nn.Dropout2d) for layer in module.modules()) == expected


def test_pooling_before_relu_changes_no_output() -> None:
    module = build(hfl_cnn, MNIST, 10, seed=3)
    with seeded_torch(0, "test"):
        x = torch.randn(3, *MNIST)
    out = torch.max_pool2d(torch.relu(module.conv1(x)), 2)
    out = torch.max_pool2d(torch.relu(module.conv2(out)), 2).flatten(1)
    assert torch.equal(module(x), module.fc2(torch.relu(module.fc1(out))))


def test_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    first, again, other = (build(mlp, DIGITS, 10, seed=seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["fc1.weight"], other["fc1.weight"])


def test_building_leaves_the_global_generator_untouched() -> None:
    before = torch.get_rng_state()
    build(resnet18, DIGITS, 10, seed=5)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", plain_models())
def test_every_setting_has_a_default_and_a_checked_type(name: str) -> None:
    for setting in registry.settings(registry.find("models", name).load()):
        assert not setting.required
        assert setting.annotation is not Any


def test_loss_of_sequences_is_the_mean_over_all_positions() -> None:
    with seeded_torch(0, "test"):
        logits, y = torch.randn(4, 7, 5), torch.randint(0, 5, (4, 7))
    per_position = [nn.functional.cross_entropy(logits[:, t], y[:, t]) for t in range(7)]
    torch.testing.assert_close(loss_fn(logits, y), torch.stack(per_position).mean())
    torch.testing.assert_close(loss_fn(logits[:, 0], y[:, 0]), per_position[0])
