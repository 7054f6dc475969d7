from functools import partial

import torch
from torch import nn

from fedplat.models.cutting import freeze_batch_norm, reestimate_batch_norm
from fedplat.models.dense import mlp
from fedplat.models.flat import FlatModel
from fedplat.rng import seeded_torch

from .cutting_nets import random_input, seeded, tiny_resnet


def test_statistics_are_those_of_all_samples_however_they_are_split() -> None:
    norm = nn.BatchNorm1d(3)
    with seeded_torch(1, "test"):
        x = torch.randn(10, 3) * 2 + 5
    assert reestimate_batch_norm(norm, [x]) == 1
    torch.testing.assert_close(norm.running_mean, x.mean(0))
    torch.testing.assert_close(norm.running_var, x.var(0))
    assert reestimate_batch_norm(norm, [x[:7], x[7:]]) == 2
    torch.testing.assert_close(norm.running_mean, x.mean(0))
    torch.testing.assert_close(norm.running_var, 0.7 * x[:7].var(0) + 0.3 * x[7:].var(0))


def test_what_was_there_before_does_not_count_and_nothing_else_changes() -> None:
    x = random_input((1, 8, 8))
    modules = [seeded(partial(tiny_resnet, "batch"), seed=3) for _ in range(2)]
    for layer in modules[1].modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.fill_(100)  # type: ignore[union-attr]
            layer.momentum = 0.3
    flats = [FlatModel(module) for module in modules]
    weights = flats[0].params.detach().clone()
    modules[1].eval()
    for flat in flats:
        assert reestimate_batch_norm(flat.module, [x, x[:2]]) == 2
    assert torch.equal(flats[0].vector, flats[1].vector)
    assert torch.equal(flats[0].params, weights)
    assert modules[0].training
    assert not any(layer.training for layer in modules[1].modules())
    assert modules[1].norm.momentum == 0.3  # type: ignore[union-attr]
    assert all(
        int(layer.num_batches_tracked) == 2
        for layer in modules[0].modules()
        if isinstance(layer, nn.BatchNorm2d)
    )  # type: ignore[arg-type]


def test_dropout_is_off_meanwhile() -> None:
    module = nn.Sequential(nn.Dropout(0.9), nn.BatchNorm1d(3))
    x = torch.ones(4, 3)
    reestimate_batch_norm(module, [x])
    assert torch.equal(module[1].running_mean, torch.ones(3))  # type: ignore[arg-type]
    assert module[0].training


def test_without_batches_or_batch_norm_nothing_changes() -> None:
    module = seeded(partial(tiny_resnet, "batch"))
    before = {key: value.clone() for key, value in module.state_dict().items()}
    assert reestimate_batch_norm(module, []) == 0
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    drawn = iter([torch.ones(2, 1, 2, 2)])
    assert reestimate_batch_norm(mlp((1, 2, 2), 3, hidden=(4,)), drawn) == 0
    assert next(drawn).shape == (2, 1, 2, 2)


def test_frozen_layers_train_on_their_batch_and_keep_their_statistics() -> None:
    free, frozen = (seeded(partial(tiny_resnet, "batch")) for _ in range(2))
    assert freeze_batch_norm(frozen) is frozen
    x = random_input((1, 8, 8))
    before = {key: value.clone() for key, value in frozen.state_dict().items()}
    torch.testing.assert_close(frozen(x), free(x))
    after = frozen.state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before if "num_batches" not in key)
    assert not torch.equal(free.state_dict()["norm.running_mean"], before["norm.running_mean"])
    assert reestimate_batch_norm(frozen, [x]) == 1
    assert not torch.equal(frozen.state_dict()["norm.running_mean"], before["norm.running_mean"])
