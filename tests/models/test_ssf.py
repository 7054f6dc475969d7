from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedplat.arrays import FlatArrays
from fedplat.errors import UserError
from fedplat.models import build, count_parameters
from fedplat.models.backbones import Frozen, fingerprint_of
from fedplat.models.flat import FlatModel
from fedplat.models.pool import FullyTuned, HeadOnly, InstancePool
from fedplat.models.ssf import Site, pool_floats, scale_and_shift, spread
from fedplat.models.vit import VisionTransformer
from fedplat.rng import seeded_torch

from .backbone_nets import SHAPE, frozen_net, tiny_conv, tiny_vit

NETS = [tiny_vit, tiny_conv]
CLASSES = 4


def images(n: int = 6, seed: int = 5) -> Tensor:
    with seeded_torch(seed, "test"):
        return torch.randn(n, *SHAPE)


def labels(n: int = 6) -> Tensor:
    return torch.arange(n) % CLASSES


def pool(
    make: Any = tiny_vit, seed: int = 1, members: int = 5, chosen: int = 2, **settings: Any
) -> InstancePool:
    def builder(_: tuple[int, ...], classes: int) -> InstancePool:
        return InstancePool(frozen_net(make()), classes, members=members, chosen=chosen, **settings)

    module = build(builder, SHAPE, CLASSES, seed)
    assert isinstance(module, InstancePool)
    return module


def neutral(module: InstancePool) -> InstancePool:
    with torch.no_grad():
        module.gamma.fill_(1)
        module.beta.zero_()
    return module


def test_scaling_is_per_channel_whatever_the_shape() -> None:
    with seeded_torch(1, "test"):
        gamma, beta = torch.randn(2, 2, 3)
        tokens, maps = torch.randn(2, 4, 3), torch.randn(2, 3, 4, 5)
    for n in range(2):
        for w in range(3):
            out = scale_and_shift(tokens, gamma, beta)[n, :, w]
            torch.testing.assert_close(out, gamma[n, w] * tokens[n, :, w] + beta[n, w])
            out = scale_and_shift(maps, gamma, beta)[n, w]
            torch.testing.assert_close(out, gamma[n, w] * maps[n, w] + beta[n, w])


@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("chosen", [1, 3, 5])
def test_ones_and_zeros_reproduce_the_plain_backbone_exactly(make: Any, chosen: int) -> None:
    module, x = neutral(pool(make, chosen=chosen)), images()
    features = module.backbone.on("cpu")(x)
    index, _ = module.select(x)
    heads = torch.stack(
        [
            functional.linear(features, *head)
            for head in zip(module.head_weight, module.head_bias, strict=True)
        ],
        1,
    )
    picked = heads.gather(1, index[:, :, None].expand(-1, -1, CLASSES)).sum(1) / chosen
    torch.testing.assert_close(module(x), picked)
    from fedplat.models.ssf import ScaleAndShift

    adapt = ScaleAndShift(
        module.backbone.sites, module._mean(index, module.gamma), module._mean(index, module.beta)
    )
    assert torch.equal(module.backbone.on("cpu").features(x, adapt), features)


@pytest.mark.parametrize("make", NETS)
@pytest.mark.parametrize("choice", ["cosine", "random", "all"])
def test_a_batch_gives_what_its_images_give_one_by_one(make: Any, choice: str) -> None:
    module, x = pool(make, choice=choice).eval(), images(7)
    if choice == "cosine":
        with torch.no_grad():
            module.keys.copy_(module.backbone.on("cpu")(x[:5]))
    assert len({tuple(row) for row in module.select(x)[0].tolist()}) > 1 or choice == "all"
    one_by_one = torch.cat([module(image[None]) for image in x])
    torch.testing.assert_close(module(x), one_by_one, atol=1e-5, rtol=1e-5)


def test_sharing_over_the_batch_depends_on_the_others_and_is_exact_for_one_image() -> None:
    ours, shared = pool(), pool(share_over_batch=True)
    x = images(7)
    torch.testing.assert_close(shared(x[:1]), ours(x[:1]), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(shared(x)[:1], shared(x[:1]), atol=1e-4)
    index, _ = shared.select(x)
    gamma, beta = (t[index].mean(1).mean(0, keepdim=True) for t in (shared.gamma, shared.beta))
    from fedplat.models.ssf import ScaleAndShift

    features = shared.backbone.on("cpu").features(x, ScaleAndShift(shared.backbone.sites, gamma, beta))
    head = functional.linear(
        features, shared.head_weight[index].mean((0, 1)), shared.head_bias[index].mean((0, 1))
    )
    torch.testing.assert_close(shared(x), head, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", NETS)
def test_all_members_are_one_average_and_a_single_one_is_federated_ssf(make: Any) -> None:
    everyone, one, x = pool(make, chosen=5), pool(make, members=1, choice="all"), images()
    everyone_by_key = pool(make, chosen=5, choice="all")
    with torch.no_grad():
        for name in ("gamma", "beta", "head_weight", "head_bias"):
            getattr(everyone_by_key, name).copy_(getattr(everyone, name))
            getattr(one, name).copy_(getattr(everyone, name).mean(0, keepdim=True))
    torch.testing.assert_close(everyone(x), one(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(everyone_by_key(x), one(x), atol=1e-5, rtol=1e-5)
    single = pool(make, members=1, chosen=1, pull=0.0)
    with torch.no_grad():
        for name in ("gamma", "beta", "head_weight", "head_bias"):
            getattr(single, name).copy_(getattr(one, name))
    losses = [module.training_loss(x, labels()) for module in (single, one)]
    assert torch.equal(*losses)
    gradients = [torch.autograd.grad(loss, m.gamma)[0] for loss, m in zip(losses, (single, one), strict=True)]
    assert torch.equal(*gradients)


def test_the_chosen_are_those_of_the_largest_cosines_and_keys_may_be_scaled() -> None:
    module, x = pool(members=6, chosen=3), images()
    query = module.backbone.on("cpu")(x)
    cosines = functional.cosine_similarity(query[:, None], module.keys[None], dim=2)
    index, found = module.select(x)
    for row, expected in zip(index, cosines, strict=True):
        assert set(row.tolist()) == set(expected.topk(3).indices.tolist())
    assert found is not None
    torch.testing.assert_close(found, cosines.gather(1, index))
    with torch.no_grad():
        module.keys.mul_(torch.tensor([[8.0], [0.5], [1.0], [4.0], [0.25], [2.0]]))
    assert torch.equal(module.select(x)[0], index)
    with torch.no_grad():
        module.keys.zero_()  # all cosines are 0: of equal ones, the first
    assert module.select(x)[0].tolist() == [[0, 1, 2]] * 6


def test_the_loss_is_that_of_the_spec_and_r_is_the_cosine_for_one_image_and_one_member() -> None:
    module, x, y = pool(chosen=1, pull=0.3), images(1), labels(1)
    index, _ = module.select(x)
    cosine = functional.cosine_similarity(module.backbone.on("cpu")(x), module.keys[index[0]])
    ce = functional.cross_entropy(module(x), y)
    torch.testing.assert_close(module.training_loss(x, y), 0.7 * ce + 0.3 * (1 - cosine[0]))
    three = pool(chosen=3, pull=1.0)
    _, cosines = three.select(images())
    assert cosines is not None
    torch.testing.assert_close(three.training_loss(images(), labels()), 1 - cosines.sum() / 6)


@pytest.mark.parametrize("make", NETS)
def test_members_that_are_not_selected_have_no_gradient_and_neither_have_keys_for_lambda_zero(
    make: Any,
) -> None:
    module, x, y = pool(make, members=8), images(3), labels(3)
    selected = set(module.select(x)[0].flatten().tolist())
    assert len(selected) < 8
    module.training_loss(x, y).backward()
    for parameter in module.parameters():
        for member in range(8):
            assert bool(parameter.grad[member].any()) == (member in selected)  # type: ignore[index]
    without = pool(make, members=8, pull=0.0)
    without.training_loss(x, y).backward()
    assert without.keys.grad is None or not without.keys.grad.any()
    assert without.gamma.grad is not None
    assert without.gamma.grad.any()


def test_keys_are_pulled_to_their_queries() -> None:
    module, x, y = pool(pull=1.0), images(4), labels(4)
    optimizer = torch.optim.SGD([module.keys], lr=0.5)
    before = float(module.training_loss(x, y).detach())
    for _ in range(20):
        optimizer.zero_grad()
        loss = module.training_loss(x, y)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < before - 0.2


@pytest.mark.parametrize("make", NETS)
def test_only_the_pool_is_the_model_and_its_size_is_the_formula(make: Any) -> None:
    module = pool(make)
    assert set(module.state_dict()) == {"gamma", "beta", "keys", "head_weight", "head_bias"}
    flat = FlatModel(module)
    assert flat.layout.dim == flat.layout.num_params == count_parameters(module) == module.floats
    assert flat.layout.side_bytes == 0
    before = fingerprint_of(module.backbone.on("cpu"))
    module.train()
    module.training_loss(images(), labels()).backward()
    assert not module.backbone.on("cpu").training
    assert fingerprint_of(module.backbone.on("cpu")) == before == module.backbone.fingerprint()
    without_keys = pool(make, choice="random")
    assert module.floats - without_keys.floats == 5 * module.backbone.width


@pytest.mark.parametrize(
    ("classes", "floats", "share"), [(10, 5_357_050, 0.062), (100, 7_087_300, 0.083), (200, 9_009_800, 0.105)]
)
def test_vit_b_sends_what_the_paper_s_sizes_give(classes: int, floats: int, share: float) -> None:
    with torch.device("meta"):
        net = VisionTransformer((3, 224, 224), patch=16, width=768, depth=12, heads=12)
    assert pool_floats(net.sites, 768, classes, 25) == floats
    full = count_parameters(net) + classes * 769
    assert floats / full == pytest.approx(share, abs=5e-4)
    assert pool_floats(net.sites, 768, 100, 1, keys=False) == 282_724


def test_the_pool_starts_as_released() -> None:
    held = frozen_net(tiny_vit())

    def builder(_: tuple[int, ...], classes: int) -> InstancePool:
        return InstancePool(held, classes, members=200, chosen=3)

    module = build(builder, SHAPE, 10, 3)
    assert isinstance(module, InstancePool)
    for tensor, mean, std in (
        (module.gamma, 1, 0.02),
        (module.beta, 0, 0.02),
        (module.keys, 0, 0.02),
        (module.head_weight, 0, math.sqrt(2 / (10 * 16))),
    ):
        assert float(tensor.detach().mean()) == pytest.approx(mean, abs=3e-3)
        assert float(tensor.detach().std()) == pytest.approx(std, rel=0.05)
    assert not module.head_bias.any()


def test_random_members_are_spread_and_depend_on_the_image_alone() -> None:
    module = pool(members=5, chosen=2, choice="random")
    x = images(600)
    index, _ = module.select(x)
    assert torch.equal(module.select(x[10:20])[0], index[10:20])
    shares, entropy = spread(torch.bincount(index.flatten(), minlength=5))
    assert shares.min() > 0.15
    assert entropy > 0.99 * math.log(5)
    assert all(len(set(row)) == 2 for row in index.tolist())


def test_what_was_selected_is_told_and_forgotten_at_the_next_training() -> None:
    module, x = pool(members=4, chosen=2), images(10)
    assert module.training_metrics() == {}
    module.train()
    module.training_loss(x, labels(10))
    index = module.select(x)[0].flatten()
    told = module.training_metrics()
    expected = torch.bincount(index, minlength=4) / 20
    assert [told[f"selected.{m:02d}"] for m in range(4)] == pytest.approx(expected.tolist())
    assert told["selection-entropy"] == pytest.approx(float(torch.special.entr(expected).sum()), abs=1e-6)
    assert module.train().training_metrics() == {}


def test_balance_lets_others_have_a_turn() -> None:
    def entropy(balance: float) -> float:
        module = pool(members=5, chosen=1, balance=balance)
        module.train()
        for start in range(8):
            module.training_loss(images(6, seed=start), labels())
        return module.training_metrics()["selection-entropy"]

    assert entropy(3.0) > entropy(0.0) + 0.2


def test_cached_queries_change_nothing_and_are_computed_once() -> None:
    plain, cached, x = pool(), pool(cache_queries=True), images(9)
    torch.testing.assert_close(cached(x), plain(x), atol=1e-5, rtol=1e-5)
    with torch.inference_mode():
        cached(x.flip(0))
    torch.testing.assert_close(cached(x[3:5]), plain(x[3:5]), atol=1e-5, rtol=1e-5)
    assert cached._queries is not None
    assert cached._queries.computed == 9
    cached.training_loss(x, labels(9)).backward()
    small = copy.copy(cached._queries)
    small._most = 4
    small(cached.backbone.on("cpu"), images(3, seed=9))
    assert len(small._rows) <= 4


def test_a_copy_of_a_model_and_one_without_memory_share_or_need_no_backbone() -> None:
    module = pool()
    assert copy.deepcopy(module).backbone is module.backbone
    held: Frozen = module.backbone
    with torch.device("meta"):
        shape = InstancePool(held, CLASSES, members=3)
        assert shape(torch.empty(2, *SHAPE)).shape == (2, CLASSES)


def test_averaging_equal_pools_is_the_identity() -> None:
    flat = FlatModel(pool())
    from fedplat.strategies.baselines import MeanRule
    from fedplat.updates import ClientUpdates

    arrays = FlatArrays(flat.layout, flat.vector.numpy().copy(), flat.side.numpy().copy())
    updates = ClientUpdates.stack([arrays] * 5, arrays, list(range(5)), [1, 2, 3, 4, 5])
    for weighted in (False, True):
        assert torch.equal(MeanRule(weighted)(updates).vector, flat.vector)


@pytest.mark.parametrize("make", NETS)
def test_the_baselines_train_what_they_should(make: Any) -> None:
    held, x = frozen_net(make()), images()
    head = HeadOnly(held, CLASSES)
    assert set(head.state_dict()) == {"head.weight", "head.bias"}
    torch.testing.assert_close(head(x), head.head(held.on("cpu")(x)))
    full = FullyTuned(held, CLASSES, frozen_norms=True).train()
    assert count_parameters(full) == held.parameters + count_parameters(head)
    full(x).sum().backward()
    assert all(p.grad is not None for p in full.parameters())
    assert not full.backbone.training
    assert FullyTuned(held, CLASSES).train().backbone.training
    before = held.fingerprint()
    with torch.no_grad():
        for parameter in full.parameters():
            parameter.zero_()
    assert held.fingerprint() == before
    FlatModel(full)


def test_more_chosen_than_there_are_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match="chosen = 6 of 5 members"):
        pool(members=5, chosen=6)


def test_pool_floats_by_hand() -> None:
    # Two members: (8 + 4) scales and as many shifts, a key of 4, and 3 classes of 4 weights and a bias.
    assert pool_floats([Site("a", 8), Site("b", 4)], 4, 3, 2) == 2 * (24 + 4 + 15)
