from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fedplat import experiment
from fedplat.clients.app import make_client_app
from fedplat.clients.attacks import Attack, Scene
from fedplat.clients.attacks.data import (
    Backdoor,
    LabelFlip,
    LabelReverse,
    NoisyFeatures,
    RandomLabels,
    drawn_samples,
)
from fedplat.clients.attacks.unreliable import Blur, LowResolution
from fedplat.config import load
from fedplat.errors import UserError
from fedplat.evaluation import evaluation_of
from fedplat.models.flat import FlatModel
from fedplat.rounds import rounds
from fedplat.runtime.local import LocalGrid
from fedplat.strategies import ClientReport, Mean
from fedplat.verdicts import TARGETED, UNTARGETED

DIGITS = Scene(seed=1, num_classes=10, mean=(0.3,), std=(0.4,))
SMALL: dict[str, Any] = {
    "name": "small",
    "rounds": 8,
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 8},
    "model": {"name": "mlp", "hidden": (32,)},
    "training": {"batch_size": 32, "lr": 0.1},
}


@dataclass(frozen=True)
class Outcome:
    """What federated averaging came to: on the test set, and in the last round's replies."""

    accuracy: float
    loss: float
    success: float
    reports: list[ClientReport]


@functools.cache
def situation() -> experiment.Situation:
    return experiment.build_situation(load(SMALL, "t"), "cpu")


def outcome(attack: Attack, attackers: int = 3, num_rounds: int = 8) -> Outcome:
    """Average 8 clients, the first ``attackers`` of whom attack; success is judged even if nobody does."""
    task, initial = situation().task, situation().initial
    data = task.dataset
    placed = attack.placed(Scene(task.seed, data.num_classes, data.mean, data.std), label="it")
    task = replace(task, attacks=dict.fromkeys(range(attackers), placed))
    measure = evaluation_of(FlatModel(task.build_model()), data, [placed], every=100, last=num_rounds)
    strategy = Mean(fraction_evaluate=0)
    with LocalGrid(make_client_app(task), 8, workers=0) as grid:
        *_, last = rounds(strategy, grid, initial, num_rounds, evaluate_fn=measure)
    found: Any = last.server_metrics
    return Outcome(found["accuracy"], found["loss"], found.get("attack-success.it", 0.0), strategy.reports)


@functools.cache
def clean() -> Outcome:
    return outcome(Attack(), attackers=0)


def images(n: int = 6, channels: int = 1, edge: int = 5) -> torch.Tensor:
    """Return images whose pixels, in [0, 1], all differ, as DIGITS prepares them."""
    count = n * channels * edge * edge
    return DIGITS.prepared((torch.arange(count) / count).view(n, channels, edge, edge))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


LABELS = torch.arange(10)


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (LabelFlip(), [0, 7, 2, 3, 4, 5, 6, 7, 8, 9]),
        (LabelFlip(source=(1, 2, 3), target=7), [0, 7, 7, 7, 4, 5, 6, 7, 8, 9]),
        (LabelFlip(source=(9,), target=0), [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]),
        (LabelReverse(), [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]),
        (LabelReverse().placed(Scene(num_classes=11)), [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]),
    ],
)
def test_labels_become_what_the_table_says(attack: Attack, expected: list[int]) -> None:
    x, y = torch.rand(10, 1, 2, 2), LABELS.clone()
    new_x, new_y = attack.on_data(x, y, rng())
    assert new_y.tolist() == expected
    assert new_y.dtype == torch.int64
    assert new_x is x
    assert torch.equal(y, LABELS)


def test_a_flip_wants_its_sources_as_the_target_and_a_reversal_everything_mirrored() -> None:
    assert LabelFlip(source=(1, 2, 3)).goal() == {1: 7, 2: 7, 3: 7}
    assert LabelReverse().placed(Scene(num_classes=3)).goal() == {0: 2, 1: 1, 2: 0}
    assert LabelFlip.kind == LabelReverse.kind == Backdoor.kind == TARGETED
    assert RandomLabels.kind == NoisyFeatures.kind == UNTARGETED


def test_tokens_are_flipped_at_every_position() -> None:
    y = torch.tensor([[1, 2, 7], [0, 1, 1]])
    assert LabelFlip().on_data(y, y, rng())[1].tolist() == [[7, 2, 7], [0, 7, 7]]
    drawn = RandomLabels().placed(Scene(num_classes=90)).on_data(y, y, rng())[1]
    assert drawn.shape == y.shape
    assert len(set(drawn.flatten().tolist())) > 3


@pytest.mark.parametrize("source", [(7,), (1, 7), ()])
def test_a_flip_needs_sources_other_than_its_target(source: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="classes other than 7"):
        LabelFlip(source=source, target=7)


@pytest.mark.parametrize("attack", [LabelFlip(source=(1, 5)), LabelFlip(target=5), Backdoor(target=5)])
def test_classes_that_are_not_there_are_refused_before_any_training(attack: Attack) -> None:
    with pytest.raises(UserError, match="class 5 is not there; the classes are 0 to 4"):
        attack.placed(Scene(num_classes=5))
    settings = {"name": "fedplat.clients.attacks.data:LabelFlip", "count": 1, "source": [1, 12]}
    with pytest.raises(UserError, match="class 12 is not there"):
        experiment.build_situation(load(SMALL | {"attacks": [settings]}, "t"), "cpu")


def test_random_labels_are_uniform_and_the_same_for_the_same_draw() -> None:
    y = torch.full((5000,), 3)
    _, new = RandomLabels().on_data(torch.zeros(5000, 1), y, rng(1))
    counts = torch.bincount(new, minlength=10)
    # 500 each, standard deviation 21.
    assert counts.sum() == 5000
    assert (counts - 500).abs().max() < 85
    assert torch.equal(new, RandomLabels().on_data(torch.zeros(5000, 1), y, rng(1))[1])
    assert not torch.equal(new, RandomLabels().on_data(torch.zeros(5000, 1), y, rng(2))[1])
    assert (y == 3).all()


def test_only_the_drawn_share_of_labels_is_random() -> None:
    y = torch.full((1000,), 10)
    _, new = RandomLabels(share=0.3).on_data(torch.zeros(1000, 1), y, rng())
    # No drawn label can be 10, so exactly the drawn ones differ.
    assert (new != 10).sum() == 300
    assert torch.equal(RandomLabels(share=0.0).on_data(y, y, rng())[1], y)


@pytest.mark.parametrize(
    ("number", "share", "count"), [(7, 0.5, 4), (10, 0.0, 0), (10, 1.0, 10), (0, 0.5, 0)]
)
def test_a_share_is_rounded_to_whole_samples(number: int, share: float, count: int) -> None:
    drawn = drawn_samples(number, share, rng()).tolist()
    assert len(set(drawn)) == count
    assert drawn == sorted(drawn)


@pytest.mark.parametrize(
    ("position", "rows", "columns"),
    [
        ("bottom-right", (3, 4), (3, 4)),
        ("bottom-left", (3, 4), (0, 1)),
        ("top-right", (0, 1), (3, 4)),
        ("top-left", (0, 1), (0, 1)),
        ("center", (1, 2), (1, 2)),
    ],
)
def test_the_trigger_is_a_square_of_exactly_the_prepared_value(
    position: Any, rows: Any, columns: Any
) -> None:
    attack = Backdoor(size=2, value=0.9, position=position).placed(DIGITS)
    x = images()
    before = x.clone()
    shown = attack.disguise(x)
    inside = torch.zeros(5, 5, dtype=torch.bool)
    inside[np.ix_(rows, columns)] = True
    wanted = torch.tensor((0.9 - 0.3) / 0.4)
    torch.testing.assert_close(shown[:, 0, inside], wanted.expand(6, 4))
    assert torch.equal(shown[:, :, ~inside], before[:, :, ~inside])
    assert torch.equal(x, before)


def test_a_trigger_on_colour_is_prepared_per_channel() -> None:
    scene = Scene(mean=(0.0, 0.25, 0.5), std=(1.0, 0.5, 0.25))
    shown = Backdoor(size=1).placed(scene).disguise(torch.zeros(1, 3, 4, 4))
    assert shown[0, :, 3, 3].tolist() == [1.0, 1.5, 2.0]


def test_a_backdoor_is_put_into_the_drawn_samples_alone() -> None:
    attack = Backdoor(target=4, share=0.5, size=2).placed(DIGITS)
    x, y = images(), torch.tensor([0, 1, 2, 3, 5, 6])
    before = x.clone(), y.clone()
    new_x, new_y = attack.on_data(x, y, rng())
    poisoned = new_y == 4
    assert poisoned.sum() == 3
    assert torch.equal(new_x[poisoned], attack.disguise(x)[poisoned])
    assert torch.equal(new_x[~poisoned], x[~poisoned])
    assert torch.equal(new_y[~poisoned], y[~poisoned])
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])
    again = attack.on_data(x, y, rng())
    assert torch.equal(again[0], new_x)
    assert not all(torch.equal(attack.on_data(x, y, rng(n))[1], new_y) for n in range(1, 5))


def test_a_backdoor_wants_every_other_class_as_its_target() -> None:
    assert Backdoor(target=1).placed(Scene(num_classes=4)).goal() == {0: 1, 2: 1, 3: 1}


def test_a_boosted_backdoor_replaces_the_model_in_a_mean_of_n() -> None:
    received, trained = np.array([1, 2], np.float32), np.array([3, -2], np.float32)
    sent = Backdoor(boost=4.0).forge(trained, received, rng())
    assert sent.tolist() == [9, -14]
    assert np.mean([received, received, received, sent], axis=0).tolist() == trained.tolist()
    assert Backdoor().forge(trained, received, rng()) is trained


@pytest.mark.parametrize("attack", [Backdoor(), NoisyFeatures()])
def test_attacks_on_pixels_refuse_text(attack: Attack) -> None:
    with pytest.raises(UserError, match=r"works on images \(n, C, H, W\), not on samples \(3, 20\)"):
        attack.on_data(torch.ones(3, 20), torch.ones(3, 20), rng())


def test_a_trigger_larger_than_the_image_is_refused() -> None:
    with pytest.raises(UserError, match="trigger of 6 pixels on images 5x5"):
        Backdoor(size=6).disguise(images())


def test_noise_has_its_size_in_pixels_and_keeps_labels() -> None:
    x, y = torch.zeros(50, 1, 20, 20), torch.arange(50)
    new_x, new_y = NoisyFeatures(sigma=0.5).placed(DIGITS).on_data(x, y, rng())
    # Trap: noise added after normalisation would be 0.4 times as large in pixels.
    noise = DIGITS.pixels(new_x) - DIGITS.pixels(x)
    assert float(noise.std()) == pytest.approx(0.5, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0, abs=0.02)
    assert new_x.dtype == torch.float32
    assert new_y is y
    assert not x.any()
    assert torch.equal(NoisyFeatures(sigma=0.5).placed(DIGITS).on_data(x, y, rng())[0], new_x)


def test_no_noise_leaves_the_images_up_to_rounding() -> None:
    x = images()
    torch.testing.assert_close(NoisyFeatures(sigma=0.0).placed(DIGITS).on_data(x, LABELS, rng())[0], x)


# Effect on federated averaging ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attack", "loss"),
    [
        (LabelFlip(source=(1, 2, 3)), 0.15),
        (LabelReverse(), 0.3),
        (RandomLabels(), 0.3),
        (Backdoor(), 0.1),
        (NoisyFeatures(), 0.1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Attack) else "",
)
def test_bad_data_makes_the_mean_worse(attack: Attack, loss: float) -> None:
    attacked = outcome(attack)
    assert clean().accuracy > 0.85
    assert attacked.accuracy < clean().accuracy - 0.01
    assert attacked.loss > clean().loss + loss


@pytest.mark.parametrize(
    ("attack", "least"),
    [(LabelFlip(), 0.3), (LabelFlip(source=(1, 2, 3)), 0.3), (LabelReverse(), 0.1), (Backdoor(), 0.8)],
    ids=["one", "three", "reverse", "backdoor"],
)
def test_targeted_attacks_reach_their_goal_in_the_mean(attack: Attack, least: float) -> None:
    assert outcome(attack).success > least
    assert outcome(attack, attackers=0).success < 0.1


def test_boosting_lets_one_attacker_put_in_a_backdoor_that_training_alone_cannot() -> None:
    # One pixel, one client of eight: the others wash out what is not boosted.
    alone = outcome(Backdoor(size=1, share=0.3), attackers=1)
    boosted = outcome(Backdoor(size=1, share=0.3, boost=8.0), attackers=1)
    assert alone.success < 0.25
    assert boosted.success > 0.6
    assert boosted.accuracy > clean().accuracy - 0.05


PATHS = [
    "data:LabelFlip",
    "data:LabelReverse",
    "data:RandomLabels",
    "data:Backdoor",
    "data:NoisyFeatures",
    "unreliable:Blur",
    "unreliable:LowResolution",
    "unreliable:FewSteps",
    "reply:GaussianNoise",
    "reply:SameValue",
    "reply:Scaling",
    "reply:RandomWeights",
    "reply:FreeRider",
    "reply:InflatedCount",
    "reply:NotFinite",
    "ascent:GradientAscent",
]


@pytest.mark.parametrize("path", PATHS)
def test_every_attack_can_be_configured_and_keeps_its_settings(path: str) -> None:
    name = f"fedplat.clients.attacks.{path}"
    config = load(SMALL | {"attacks": [{"name": name, "clients": [2]}]}, "t")
    attack = config.attacks[0].build()
    # Trap: a setting with the name of a key that all attacks have, such as fraction, would never arrive.
    assert vars(attack) == vars(type(attack)())
    assert vars(attack).keys() == config.attacks[0].settings().keys()


@pytest.mark.parametrize("attack", [Backdoor(), NoisyFeatures(), Blur(), LowResolution()])
def test_attacks_on_images_are_refused_for_text_before_training(attack) -> None:
    with pytest.raises(UserError, match="works on images"):
        attack.placed(Scene(sample_shape=(80,)))
    attack.placed(Scene(sample_shape=(1, 8, 8)))
