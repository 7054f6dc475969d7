from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedplat.datasets.base import Source
from fedplat.datasets.cache import default_cache
from fedplat.datasets.subset import federated_part, public_part
from fedplat.errors import UserError
from fedplat.models import backbones, build, pretraining
from fedplat.models.backbones import BackboneRecipe, fingerprint_of, frozen
from fedplat.models.pool import InstancePool, fedins, query_centres
from fedplat.rng import generator

DIGITS = (1, 8, 8)


def recipe(**changes: Any) -> BackboneRecipe:
    usual: dict[str, Any] = {
        "width": 4,
        "data": "digits",
        "classes": (0, 1, 2, 3, 4),
        "epochs": 2,
        "batch_size": 64,
        "augment": "crop",
        "gate": 0.0,
    }
    return BackboneRecipe(**{**usual, **changes})


def test_public_and_federated_samples_and_classes_are_disjoint_and_together_all() -> None:
    whole = pretraining.public_data(recipe())
    public, mine = public_part(whole, (0, 1, 2, 3, 4)), federated_part(whole, (5, 6, 7, 8, 9))
    assert not set(public) & set(mine)
    assert len(public) + len(mine) == len(whole.train)
    assert not set(whole.train.y[public].tolist()) & set(whole.train.y[mine].tolist())
    public, mine = public_part(whole, (), 300), federated_part(whole, range(10), 300)
    assert not set(public) & set(mine)
    assert (len(public), len(mine)) == (300, len(whole.train) - 300)


def test_the_same_recipe_gives_the_same_bits_and_another_seed_others() -> None:
    whole = pretraining.public_data(recipe())
    first, facts = pretraining.train(recipe(), whole)
    again, _ = pretraining.train(recipe(), whole)
    other, _ = pretraining.train(recipe(seed=2), whole)
    assert fingerprint_of(first) == fingerprint_of(again) == facts["weights"] != fingerprint_of(other)
    assert facts["samples"] == len(public_part(whole, (0, 1, 2, 3, 4)))


@pytest.mark.parametrize("kind", ["conv", "vit-mini"])
def test_a_training_that_was_interrupted_ends_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    more = {"kind": kind, "epochs": 3}
    more |= {"width": 16, "depth": 1, "heads": 2, "patch": 4} if kind == "vit-mini" else {}
    whole, path = pretraining.public_data(recipe()), tmp_path / "epochs.npz"

    def stop(epoch: int, total: int, loss: float) -> None:
        if epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretraining.train(recipe(**more), whole, "cpu", path, stop)
    assert path.is_file()
    epochs: list[int] = []
    resumed, _ = pretraining.train(recipe(**more), whole, "cpu", path, lambda e, *_: epochs.append(e))
    undisturbed, _ = pretraining.train(recipe(**more), whole)
    assert epochs == [3]
    assert fingerprint_of(resumed) == fingerprint_of(undisturbed)
    assert not path.exists()


def test_a_backbone_is_made_once_kept_with_its_hash_and_the_same_in_another_process() -> None:
    made: list[int] = []
    one = pretraining.make(recipe(seed=11), DIGITS, on_epoch=lambda *_: made.append(1))
    pretraining.make(recipe(seed=11, gate=3.0), DIGITS, on_epoch=lambda *_: made.append(1))
    assert len(made) == 2
    held = frozen(recipe(seed=11), DIGITS)
    assert held.fingerprint() == one.facts["weights"]
    assert pickle.loads(pickle.dumps(held)) is held
    backbones._FROZEN.clear()
    assert frozen(recipe(seed=11), DIGITS).fingerprint() == one.facts["weights"]


def test_damaged_weights_are_noticed() -> None:
    pretraining.make(recipe(seed=12), DIGITS)
    (path,) = [
        file
        for file in (default_cache() / "backbones").glob("conv-*/stem.weight.npy")
        if '"seed": 12' in (file.parent / "manifest.json").read_text()
    ]
    array = np.load(path)
    array.flat[0] += 1
    np.save(path, array)
    with pytest.raises(UserError, match="do not have its hash"):
        pretraining.make(recipe(seed=12), DIGITS)
    for file in path.parent.iterdir():
        file.unlink()
    path.parent.rmdir()


def test_the_gate_refuses_a_backbone_that_is_no_better_than_random_weights() -> None:
    with pytest.raises(UserError, match=r"gate asks for \+60.0.*gate = 0"):
        build(fedins, DIGITS, 5, 1, backbone=recipe(gate=60.0), members=2, chosen=1)
    module = build(fedins, DIGITS, 5, 1, backbone=recipe(gate=0.0), members=2, chosen=1)
    assert isinstance(module, InstancePool)


@pytest.mark.slow
def test_a_longer_training_on_shapes_passes_the_gate() -> None:
    shapes = recipe(
        width=8,
        data="fedplat.datasets.shapes:load",
        options={"image_size": 16, "per_class": 100},
        classes=(0, 2, 4, 6, 8, 10),
        epochs=12,
        batch_size=32,
        gate=10.0,
    )
    made = pretraining.make(shapes, (3, 16, 16))
    assert made.facts["probe"] > made.facts["probe-random"] + 0.1
    pretraining.check_gate(shapes, made)


def test_the_probe_sees_no_public_and_no_test_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, seen = pretraining.public_data(recipe()), []
    net = pretraining.train(recipe(epochs=1), whole)[0]

    def watch(net: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        seen.append(x)
        return net(x).detach()

    monkeypatch.setattr(pretraining, "features_of", watch)
    pretraining.probe(recipe(), whole, net)
    federated = whole.prepare(whole.train.x[federated_part(whole, (5, 6, 7, 8, 9))])
    known = {row.numpy().tobytes() for row in federated}
    assert all(row.numpy().tobytes() in known for row in seen[0])


def test_shifted_images_are_the_same_for_the_same_generator_and_leave_the_original() -> None:
    x = torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8)
    before = x.clone()
    one, other = (pretraining.augmented(x, "crop-flip", generator(1, "test")) for _ in range(2))
    assert torch.equal(one, other)
    assert torch.equal(x, before)
    assert one.shape == x.shape
    assert not torch.equal(one, x)
    assert pretraining.augmented(x, "none", generator(1, "test")) is x


def test_keys_may_start_at_centres_of_the_public_queries() -> None:
    module = build(fedins, DIGITS, 5, 1, backbone=recipe(), members=6, chosen=1, keys="k-means")
    assert isinstance(module, InstancePool)
    torch.testing.assert_close(module.keys.detach(), query_centres(module.backbone, 6))
    whole = pretraining.public_data(recipe())
    x = whole.prepare(whole.train.x[public_part(whole, (0, 1, 2, 3, 4))])
    used = torch.bincount(module.select(x)[0].flatten(), minlength=6)
    assert int((used > 0).sum()) == 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "digit"}, "did you mean 'digits'"),
        ({"classes": (3, 12)}, "12 is none of digits's"),
        ({"options": {"size": 3}}, "setting of data 'digits' 'size'"),
        ({"options": {"test_fraction": 2.0}}, "test_fraction: Input should be less than 1"),
        ({"classes": (), "held_back": 100}, "another training set for every seed"),
        ({"classes": tuple(range(9))}, "fewer than two classes"),
    ],
)
def test_mistakes_are_explained(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        pretraining.make(recipe(**changes), DIGITS)


def test_images_of_another_shape_are_a_mistake_and_so_are_missing_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"images of digits are \(1, 8, 8\)"):
        pretraining.make(recipe(), (3, 32, 32))
    source = Source(tmp_path, tmp_path, False, 1)
    with pytest.raises(UserError, match="CIFAR-10 is missing"):
        pretraining.make(recipe(data="cifar10"), (3, 32, 32), source)
