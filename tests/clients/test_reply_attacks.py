from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedplat.clients.attacks import Attack, ReplyAttack, Scene
from fedplat.clients.attacks.ascent import GradientAscent
from fedplat.clients.attacks.reply import (
    FreeRider,
    GaussianNoise,
    InflatedCount,
    NotFinite,
    RandomWeights,
    SameValue,
    Scaling,
)
from fedplat.clients.training import train_one
from fedplat.models import build
from fedplat.models.dense import softmax_regression
from fedplat.models.flat import FlatModel
from fedplat.strategies.aggregators import mean
from fedplat.training_config import LocalTraining
from fedplat.verdicts import UNTARGETED

from .test_attacks import reply_of
from .test_data_attacks import clean, outcome, rng

ATTACKS = [
    GaussianNoise(),
    SameValue(),
    Scaling(),
    RandomWeights(),
    FreeRider(noise=0.1),
    InflatedCount(),
    NotFinite(share=0.5),
]
by_name = pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)


def vectors(size: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    """Return a trained and a received model."""
    draws = rng(11)
    received = draws.normal(0.5, 2.0, size).astype(np.float32)
    return received + draws.normal(0, 0.1, size).astype(np.float32), received


@by_name
def test_forging_depends_on_the_draw_alone_and_leaves_the_models(attack: ReplyAttack) -> None:
    trained, received = vectors(1000)
    before = trained.copy(), received.copy()
    first, second = (attack.forge(trained, received, rng(4)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal((trained, received), before)
    assert first.dtype == np.float32
    assert first.shape == trained.shape
    assert attack.kind == UNTARGETED


@by_name
def test_buffers_and_counters_are_sent_as_they_are(attack: ReplyAttack) -> None:
    # Trap: noise or a factor on a variance makes it negative, and evaluation NaN.
    model = reply_of(attack).content["model"]
    assert model["bn.running_var"].numpy().tolist() == [5]
    assert model["n"].numpy() == 7


@by_name
def test_only_the_one_who_inflates_claims_other_samples(attack: ReplyAttack) -> None:
    claimed = reply_of(attack).content["m"]["num-examples"]
    assert claimed == (30 if isinstance(attack, InflatedCount) else 3)


def test_gaussian_noise_has_its_size_around_the_trained_model() -> None:
    trained, received = vectors()
    noise = GaussianNoise(sigma=0.01).forge(trained, received, rng()) - trained
    assert float(noise.std()) == pytest.approx(0.01, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0, abs=3e-4)
    # The length of MUD-HoG's noise on its net for MNIST.
    long = GaussianNoise(sigma=0.01).forge(np.zeros(81_194, np.float32), received, rng())
    assert float(np.linalg.norm(long)) == pytest.approx(2.85, abs=0.02)


def test_noise_differs_between_rounds_and_runs() -> None:
    def sent(seed: int, server_round: int) -> list[float]:
        attack = GaussianNoise().placed(Scene(seed=seed))
        return reply_of(attack, server_round=server_round).content["model"]["w"].numpy().tolist()

    assert sent(1, 1) == sent(1, 1)
    assert sent(1, 1) != sent(1, 2)
    assert sent(1, 1) != sent(2, 1)


@pytest.mark.parametrize(
    ("attack", "sent"),
    [
        (SameValue(), [1, 1]),
        (SameValue(value=-2.5), [-2.5, -2.5]),
        (Scaling(), [20, 40]),
        (Scaling(factor=4.0), [14, 28]),
        (Scaling(factor=1.0), [11, 22]),
        (GaussianNoise(sigma=0.0), [11, 22]),
        (FreeRider(), [10, 20]),
        (InflatedCount(), [11, 22]),
        (RandomWeights(sigma=0.0), [0, 0]),
    ],
)
def test_what_is_sent_for_10_20_received_and_11_22_trained(attack: Attack, sent: list[float]) -> None:
    assert reply_of(attack).content["model"]["w"].numpy().tolist() == sent


def test_scaling_by_n_replaces_the_model_in_a_mean_of_n() -> None:
    trained, received = np.array([1, 2], np.float32), np.array([3, 5], np.float32)
    sent = Scaling(factor=8.0).forge(trained, received, rng())
    combined = mean(torch.from_numpy(np.stack([received] * 7 + [sent]))).vector
    assert combined.tolist() == [1, 2]


def test_random_weights_are_as_spread_as_the_received_ones_and_otherwise_unrelated() -> None:
    trained, received = vectors()
    sent = RandomWeights().forge(trained, received, rng())
    assert float(sent.std()) == pytest.approx(float(received.std()), rel=0.02)
    assert float(sent.mean()) == pytest.approx(0, abs=0.06)
    assert abs(float(np.corrcoef(sent, trained)[0, 1])) < 0.03
    other = RandomWeights(sigma=0.3).forge(trained, received, rng())
    assert float(other.std()) == pytest.approx(0.3, rel=0.02)


def test_a_disguised_free_rider_is_noise_away_from_what_it_received() -> None:
    trained, received = vectors()
    noise = FreeRider(noise=0.2).forge(trained, received, rng()) - received
    assert float(noise.std()) == pytest.approx(0.2, rel=0.02)
    assert FreeRider().on_training(LocalTraining(epochs=5)).steps == 1


@pytest.mark.parametrize(("factor", "claim"), [(10.0, 70), (0.5, 4), (1.0, 7)])
def test_claims_are_whole_samples(factor: float, claim: int) -> None:
    assert InflatedCount(factor=factor).claimed(7) == claim


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(("share", "count"), [(1.0, 50), (0.1, 5), (0.001, 1)])
def test_so_many_parameters_are_not_finite(value: str, share: float, count: int) -> None:
    trained, received = vectors(50)
    sent = NotFinite(value=value, share=share).forge(trained, received, rng())  # type: ignore[arg-type]
    spoilt = ~np.isfinite(sent)
    assert spoilt.sum() == count
    np.testing.assert_array_equal(sent[spoilt], np.full(count, float(value), np.float32))
    np.testing.assert_array_equal(sent[~spoilt], trained[~spoilt])


def test_ascent_is_the_opposite_of_a_step_of_descent() -> None:
    x, y = torch.linspace(-1, 1, 24).view(6, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    moved = []
    for factor in (1.0, GradientAscent().loss_factor(), GradientAscent(factor=-3.0).loss_factor()):
        model = FlatModel(build(softmax_regression, (1, 2, 2), 3, seed=1))
        before = model.vector.clone()
        train_one(model, LocalTraining(batch_size=6), x, y, rng(), loss_factor=factor)
        moved.append(model.vector - before)
    torch.testing.assert_close(moved[1], -moved[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(moved[2], -3 * moved[0], rtol=1e-5, atol=1e-7)
    assert GradientAscent.kind == UNTARGETED


# Effect on federated averaging ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attack", "accuracy"),
    [
        (GaussianNoise(), 0.6),
        (SameValue(), 0.4),
        (Scaling(), 0.7),
        (RandomWeights(), 0.6),
        (FreeRider(), 0.84),
        (GradientAscent(), 0.3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Attack) else "",
)
def test_forged_replies_ruin_the_mean_or_hold_it_back(attack: Attack, accuracy: float) -> None:
    attacked = outcome(attack)
    assert clean().accuracy > 0.85
    assert attacked.accuracy < accuracy
    assert not attacked.loss < clean().loss + 0.15


def test_small_noise_is_nearly_harmless() -> None:
    # MUD-HoG's size of noise: found by detectors, hardly felt by the mean of a net as small as this.
    assert outcome(GaussianNoise(sigma=0.01)).accuracy > clean().accuracy - 0.02


def test_inflated_counts_give_their_multiple_of_the_weight_until_the_server_bounds_them() -> None:
    weights = [report.weight for report in outcome(InflatedCount(), 1, num_rounds=1).reports]
    # 180 samples claimed as 1800 among 8 clients of 180 or, two of them, 179.
    assert weights[0] == pytest.approx(1800 / (1800 + 5 * 180 + 2 * 179))
    assert sum(weights) == pytest.approx(1)


def test_one_who_inflates_decides_the_mean() -> None:
    class Both(InflatedCount):
        def forge(self, trained, received, rng):
            return SameValue().forge(trained, received, rng)

    assert outcome(Both(factor=100.0), 1).accuracy < 0.2 < outcome(SameValue(), 1).accuracy


def test_a_mean_without_checks_is_lost_to_a_single_nan_and_the_server_refuses_it() -> None:
    trained, received = vectors(100)
    sent = NotFinite(share=0.01).forge(trained, received, rng())
    assert int(mean(torch.from_numpy(np.stack([trained, sent]))).vector.isnan().sum()) == 1
    attacked = outcome(NotFinite(share=0.01))
    reasons = [report.reason for report in attacked.reports]
    assert reasons == ["the model has numbers that are not finite"] * 3 + [""] * 5
    assert math.isfinite(attacked.loss)
    assert attacked.accuracy > 0.8
