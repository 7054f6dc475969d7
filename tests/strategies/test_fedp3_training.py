"""What a client does with its part: masks that hold, shares drawn per step, noise of the right size."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedplat.clients.fedp3_training import PrunedNet, clipped_sum, ordered_mask, train_privately
from fedplat.clients.training import train_one
from fedplat.errors import UserError
from fedplat.fedp3_options import PartOptions
from fedplat.models import loss_fn
from fedplat.models.dense import mlp
from fedplat.models.fedp3_nets import fedp3_cnn
from fedplat.models.flat import FlatModel
from fedplat.models.resnet import ResidualBlock
from fedplat.rng import generator, seeded_torch
from fedplat.training_config import LocalTraining

SHAPE = (1, 4, 4)
TRAINING = LocalTraining(epochs=2, batch_size=5, lr=0.2, momentum=0.9, weight_decay=0.01)


def model_of(seed: int = 0) -> FlatModel:
    with seeded_torch(seed, "test"):
        return FlatModel(mlp(SHAPE, 3, hidden=(8, 6)))


def data(count: int = 20) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.standard_normal((count, *SHAPE)).astype(np.float32))
    return x, torch.from_numpy(rng.integers(0, 3, count))


def pruned(model: FlatModel, name: str = "fc1.weight", share: float = 0.5) -> dict[str, NDArray[np.bool_]]:
    """Zero the smallest weights, and return the mask of the others."""
    weight = model.module.get_parameter(name)
    mask = weight.detach().abs() > weight.detach().abs().flatten().quantile(1 - share)
    with torch.no_grad():
        weight.mul_(mask)
    return {name: mask.numpy()}


def net_of(model: FlatModel, kept: Mapping[str, NDArray[np.bool_]], **options: Any) -> PrunedNet:
    given = PartOptions(("fc2",), ("fc1",), 0.5 if kept else 1.0, **options)
    return PrunedNet(model, given, kept, generator(1, "test"))


def train(model: FlatModel, net: PrunedNet, training: LocalTraining = TRAINING) -> None:
    train_one(model, training, *data(), generator(2, "batches"), loss_of=net.loss)
    net.restore()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_pruned_weights_stay_zero_and_regrow_only_if_the_mask_is_not_held(optimizer: Any) -> None:
    plain = {"momentum": 0.9} if optimizer == "sgd" else {}
    training = LocalTraining(epochs=2, batch_size=5, lr=0.05, optimizer=optimizer, **plain)
    held, loose = model_of(), model_of()
    kept, same = pruned(held), pruned(loose)
    train(held, net_of(held, kept), training)
    train(loose, net_of(loose, same, enforce=False), training)
    gone = torch.from_numpy(~kept["fc1.weight"])
    assert not held.module.get_parameter("fc1.weight")[gone].any()
    assert loose.module.get_parameter("fc1.weight")[gone].all()


def test_masked_training_is_that_of_a_net_whose_weights_are_theta_times_mask() -> None:
    model, by_hand = model_of(), model_of()
    kept = pruned(model)
    pruned(by_hand)
    train(model, net_of(model, kept), LocalTraining(steps=3, batch_size=20, lr=0.2))
    mask = torch.from_numpy(kept["fc1.weight"])
    x, y = data()
    for _ in range(3):
        by_hand.zero_grad()
        loss_fn(by_hand(x), y).backward()
        with torch.no_grad():
            by_hand.module.get_parameter("fc1.weight").grad.mul_(mask)  # type: ignore[union-attr]
            by_hand.vector -= 0.2 * by_hand.grad
    torch.testing.assert_close(model.vector, by_hand.vector, rtol=1e-5, atol=1e-6)


def test_without_pruning_it_is_the_usual_training_bit_for_bit() -> None:
    model, usual = model_of(), model_of()
    net = net_of(model, {})
    assert net.plain
    train(model, net)
    train_one(usual, TRAINING, *data(), generator(2, "batches"))
    assert torch.equal(model.vector, usual.vector)


def test_frozen_layers_are_returned_as_they_came_and_seen_as_such() -> None:
    model = model_of()
    kept = pruned(model)
    before = copy.deepcopy(dict(model.module.named_parameters()))
    net = net_of(model, kept, freeze=True)
    assert not net.plain
    train(model, net)
    after = dict(model.module.named_parameters())
    for name in ("fc1.weight", "fc1.bias"):
        assert torch.equal(after[name], before[name])
    for name in ("fc2.weight", "fc3.bias"):
        assert not torch.equal(after[name], before[name])


def test_uniform_pruning_draws_shares_and_elements_anew_in_each_step() -> None:
    model = model_of()
    kept = pruned(model)
    net = net_of(model, kept, local="uniform", least=0.5)
    masks = [net.masks()["fc1.weight"] for _ in range(200)]
    assert not any((mask & torch.from_numpy(~kept["fc1.weight"])).any() for mask in masks)
    on = torch.stack(masks)[:, torch.from_numpy(kept["fc1.weight"])].float().mean(dim=1)
    assert float(on.mean()) == pytest.approx(0.75, abs=0.03)  # q ~ U[0.5, 1]
    assert float(on.max()) > 0.85
    assert float(on.min()) < 0.65
    constant = net_of(model, {}, local="uniform", least=0.5, constant=True)
    on = torch.stack([constant.masks()["fc1.weight"] for _ in range(200)]).float().mean(dim=(1, 2))
    assert float(on.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(on.std()) == pytest.approx((0.25 / 128) ** 0.5, rel=0.25)
    again = net_of(model, kept, local="uniform", least=0.5)
    assert torch.equal(again.masks()["fc1.weight"], masks[0])
    assert set(net.masks()) == {"fc1.weight"}


def test_ordered_masks_are_nested_blocks_and_spare_images_and_the_head() -> None:
    last = torch.zeros(6, 5, 3, 3, dtype=torch.bool)
    for share in (0.2, 0.5, 0.7, 1.0):
        mask = ordered_mask((6, 5, 3, 3), share, False, False).expand(6, 5, 3, 3)
        assert bool((mask | ~last).all())
        rows, columns = int(np.ceil(share * 6 - 1e-9)), int(np.ceil(share * 5 - 1e-9))
        assert bool(mask[:rows, :columns].all())
        assert int(mask.sum()) == rows * columns * 9
        last = mask
    assert bool(last.all())
    with seeded_torch(0, "test"):
        model = FlatModel(fedp3_cnn((1, 32, 32), 3, channels=4, hidden=(8, 6)))
    options = PartOptions((), ("conv1", "conv2", "fc1", "fc2"), 1.0, "ordered", 0.5, True)
    masks = PrunedNet(model, options, {}, generator(0, "t")).masks()
    assert masks["conv1.weight"].flatten(1).any(dim=1).tolist() == [True, True, False, False]
    assert masks["conv1.weight"].all(dim=0).flatten().any().item() is False
    assert bool(masks["conv2.weight"][:2, :2].all())
    assert not masks["conv2.weight"][2:].any()
    # Of 100 inputs of the first linear layer, those of the first two channels are left.
    assert masks["fc1.weight"].any(dim=0).tolist() == [True] * 50 + [False] * 50
    assert masks["fc2.weight"].any(dim=1).tolist() == [True] * 6
    assert masks["fc2.weight"].any(dim=0).tolist() == [True] * 4 + [False] * 4


# Differential privacy ------------------------------------------------------------------------------------


class Silence:
    def standard_normal(self, size: int) -> NDArray[np.float64]:
        return np.zeros(size)


def private(model: FlatModel, clip: float, noise: float, source: Any, **options: Any) -> PrunedNet:
    net = net_of(model, {}, clip=clip, noise=noise, **options)
    training = LocalTraining(steps=1, batch_size=20, lr=0.5)
    train_privately(net, training, *data(), generator(2, "batches"), source)
    net.restore()
    return net


def test_a_step_is_the_sum_of_clipped_gradients_over_the_batch_size() -> None:
    model, by_hand = model_of(), model_of()
    clip = 0.3
    private(model, clip, 1.0, Silence())
    total, norms = torch.zeros_like(by_hand.grad), []
    for x, y in zip(*data(), strict=True):
        by_hand.zero_grad()
        loss_fn(by_hand(x[None]), y[None]).backward()
        norms.append(float(by_hand.grad.norm()))
        total += by_hand.grad * min(1.0, clip / norms[-1])
    assert max(norms) > clip
    torch.testing.assert_close(model.vector, by_hand.vector - 0.5 * total / 20, rtol=1e-5, atol=1e-6)


def test_clipped_norms_are_at_most_the_clip_and_what_is_not_finite_counts_nothing() -> None:
    rng = torch.Generator().manual_seed(0)
    rows = {"a": torch.randn(6, 4, generator=rng), "b": torch.randn(6, 2, 3, generator=rng)}
    for row in range(6):
        one = {name: value[row : row + 1] for name, value in rows.items()}
        sums, norms = clipped_sum(one, 0.7)
        length = sum(float(value.square().sum()) for value in sums.values()) ** 0.5
        assert length == pytest.approx(min(0.7, float(norms[0])), rel=1e-5)
    whole = clipped_sum(rows, 0.7)[0]
    rows["a"] = torch.cat([rows["a"], torch.tensor([[torch.nan, 1, 1, 1], [torch.inf, 1, 1, 1]])])
    rows["b"] = torch.cat([rows["b"], torch.ones(2, 2, 3)])
    more = clipped_sum(rows, 0.7)[0]
    torch.testing.assert_close(more["b"], whole["b"])


def test_noise_on_the_gradient_has_the_clip_times_the_multiplier_over_the_batch_size() -> None:
    quiet, noisy = model_of(), model_of()
    private(quiet, 0.3, 4.0, Silence())
    private(noisy, 0.3, 4.0, np.random.default_rng(0))
    noise = (noisy.vector - quiet.vector).numpy() / 0.5
    assert noise.std() == pytest.approx(4.0 * 0.3 / 20, rel=0.1)
    assert abs(noise.mean()) < 0.015
    assert (noise != 0).all()


def test_noise_is_for_what_is_trained_and_held_masks_hold() -> None:
    model = model_of()
    before = model.module.get_parameter("fc1.weight").detach().clone()
    private(model, 0.3, 4.0, np.random.default_rng(0), freeze=True)
    assert torch.equal(model.module.get_parameter("fc1.weight"), before)
    held = model_of()
    kept = pruned(held)
    net = PrunedNet(held, PartOptions(("fc2",), ("fc1",), 0.5, clip=1.0, noise=1.0), kept, generator(1, "t"))
    train_privately(net, TRAINING, *data(), generator(2, "b"), np.random.default_rng(0))
    assert not held.module.get_parameter("fc1.weight")[torch.from_numpy(~kept["fc1.weight"])].any()


def test_samples_are_taken_by_chance_one_by_one() -> None:
    model, seen = model_of(), []

    def on_batch(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(len(y))
        return x, y

    net = net_of(model, {}, clip=1.0, noise=1.0)
    training = LocalTraining(steps=100, batch_size=5, lr=1e-6)
    result = train_privately(net, training, *data(), generator(3, "b"), Silence(), on_batch=on_batch)
    assert result.steps == 100
    assert np.mean([*seen, *[0] * (100 - len(seen))]) == pytest.approx(5, abs=0.8)
    assert np.var(seen) == pytest.approx(20 * 0.25 * 0.75, rel=0.5)


def test_group_norm_is_fine_and_batch_norm_is_refused() -> None:
    with seeded_torch(0, "test"):
        model = FlatModel(fedp3_cnn((1, 32, 32), 3, channels=4, hidden=(8,), norm="group"))
    x, y = torch.randn(6, 1, 32, 32), torch.tensor([0, 1, 2, 0, 1, 2])
    options = PartOptions(("conv1",), ("conv2", "fc1"), 1.0, clip=1.0, noise=1.0)
    net = PrunedNet(model, options, {}, generator(0, "t"))
    training = LocalTraining(steps=1, batch_size=6, lr=0.1)
    train_privately(net, training, x, y, generator(1, "b"), Silence())
    assert bool(torch.isfinite(model.vector).all())
    block = functools.partial(ResidualBlock, 1, 2, 1, nn.BatchNorm2d)
    normed = FlatModel(nn.Sequential(block(), nn.Flatten(), nn.Linear(2 * 32 * 32, 3)))
    bad = PrunedNet(normed, PartOptions((), clip=1.0, noise=1.0), {}, generator(0, "t"))
    with pytest.raises(UserError, match="GroupNorm"):
        train_privately(bad, training, x, y, generator(1, "b"), Silence())
