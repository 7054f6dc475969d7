"""What DP-FedP3's clients spend, against published values and an account of one's own."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from torch import nn

from fedplat.errors import UserError
from fedplat.fedp3_options import PartOptions
from fedplat.models.dense import mlp
from fedplat.models.fedp3_nets import fedp3_cnn
from fedplat.security.example_privacy import ORDERS, noise_for, sampled_epsilon, sampling_of
from fedplat.strategies.fedp3 import FedP3Scheme
from fedplat.strategies.fedp3.accounting import ExampleAccount
from fedplat.strategies.nodes import Node
from fedplat.strategies.submodels import SubModelContext
from fedplat.training_config import LocalTraining

DELTA = 1e-5


def by_hand(rate: float, noise: float, steps: int, delta: float) -> float:
    """Return epsilon by the moments of whole orders and the conversion of the first papers."""
    best = math.inf
    for order in range(2, 257):
        terms = [
            math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
            + k * math.log(rate) + (order - k) * math.log1p(-rate) + k * (k - 1) / (2 * noise**2)
            for k in range(order + 1)
        ]  # fmt: skip
        moment = float(np.logaddexp.reduce(terms)) / (order - 1)
        best = min(best, steps * moment - math.log(delta) / (order - 1))
    return best


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "published"),
    [
        (0.01, 4.0, 10_000, 1.26),  # Abadi et al., CCS 2016, section 3.2
        (256 / 60_000, 1.3, 15 * 60_000 // 256, 1.19),  # TensorFlow Privacy's tutorial on MNIST
        (256 / 60_000, 1.1, 60 * 60_000 // 256, 3.01),
        (256 / 60_000, 0.7, 45 * 60_000 // 256, 7.10),
    ],
)
def test_epsilon_is_the_published_one_but_for_the_better_conversion(
    rate: float, noise: float, steps: int, published: float
) -> None:
    assert by_hand(rate, noise, steps, DELTA) == pytest.approx(published, rel=0.01)
    ours = sampled_epsilon(rate, noise, steps, DELTA)
    assert 0.75 * published < ours <= published


@pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.0), (0.01, 4.0), (0.9, 0.6), (1.0, 3.0)])
def test_the_divergence_is_the_librarys(rate: float, noise: float) -> None:
    from dp_accounting import dp_event, rdp
    from dp_accounting.privacy_accountant import NeighboringRelation

    accountant = rdp.RdpAccountant(ORDERS, NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise)), 30)
    assert sampled_epsilon(rate, noise, 30, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)


def test_epsilon_grows_with_steps_and_rate_and_falls_with_noise() -> None:
    grown = [sampled_epsilon(0.1, 1.0, steps, DELTA) for steps in (0, 1, 10, 100)]
    assert grown == sorted(set(grown))
    assert grown[0] == 0
    assert sampled_epsilon(0.2, 1.0, 10, DELTA) > grown[2] > sampled_epsilon(0.1, 2.0, 10, DELTA)
    assert sampled_epsilon(0.1, 0.0, 1, DELTA) == math.inf
    for bad in ((1.1, 1.0, 1, DELTA), (0.1, -1.0, 1, DELTA), (0.1, 1.0, 1, 0.0), (0.1, math.nan, 1, DELTA)):
        with pytest.raises(UserError):
            sampled_epsilon(*bad)


def test_the_noise_that_is_found_just_reaches_the_epsilon_for_all() -> None:
    uses = [(0.1, 200), (0.05, 300), (0.2, 20)]
    noise = noise_for(2.0, DELTA, uses)
    spent = [sampled_epsilon(rate, noise, steps, DELTA) for rate, steps in uses]
    assert max(spent) <= 2.0
    assert max(sampled_epsilon(rate, noise * 0.995, steps, DELTA) for rate, steps in uses) > 2.0
    # About as the paper's formula has it: noise in proportion to q·sqrt(K·log(1/delta))/epsilon.
    twice = noise_for(2.0, DELTA, [(rate, 4 * steps) for rate, steps in uses])
    assert twice / noise == pytest.approx(2, rel=0.1)
    with pytest.raises(UserError, match="above 0"):
        noise_for(0.0, DELTA, uses)
    with pytest.raises(UserError, match="below a million"):
        noise_for(1e-3, DELTA, [(1.0, 10**14)])


def test_steps_and_rate_are_those_of_the_training() -> None:
    assert sampling_of(100, LocalTraining(batch_size=48, epochs=10)) == (0.48, 30)
    assert sampling_of(100, LocalTraining(batch_size=48, steps=7)) == (0.48, 7)
    assert sampling_of(10, LocalTraining(batch_size=48)) == (1.0, 1)
    assert sampling_of(0, LocalTraining()) == (0.0, 0)


def bound(build: Any = None, shape: tuple[int, ...] = (1, 4, 4), **settings: Any) -> FedP3Scheme:
    scheme = FedP3Scheme(**{"dp_clip": 1.0, "dp_delta": 1e-3, **settings})
    build = build or functools.partial(mlp, shape, 3, hidden=(8, 6, 5))
    scheme.bind(
        SubModelContext.of(
            build, shape, 3, training=LocalTraining(batch_size=10), clients=4, samples=lambda c: 50 + 50 * c
        )
    )
    return scheme


def spent(scheme: FedP3Scheme, *clients: int) -> float:
    for client in clients:
        assert scheme.assign(Node(client, client), None, 1) is not None
    return scheme.diagnostics["epsilon"]


def test_epsilon_in_the_results_grows_with_the_rounds_of_the_client_with_fewest_samples() -> None:
    scheme = bound(dp_noise=2.0)
    first = spent(scheme, 0, 1)
    assert first == sampled_epsilon(0.2, 2.0, 5, 1e-3)
    assert spent(scheme, 3) == first
    assert spent(scheme, 0) == sampled_epsilon(0.2, 2.0, 10, 1e-3) > first
    again = bound(dp_noise=2.0)
    again.load_state_dict(scheme.state_dict())
    assert again.diagnostics["epsilon"] == scheme.diagnostics["epsilon"]


def test_a_target_finds_the_noise_tells_the_clients_and_is_not_exceeded() -> None:
    scheme = bound(dp_epsilon=3.0, dp_rounds=4)
    spec = scheme.assign(Node(0, 0), None, 1)
    assert spec is not None
    options = PartOptions.of(dict(spec.config))
    assert options is not None
    assert scheme.account is not None
    assert (options.clip, options.noise) == (1.0, scheme.account.noise)
    assert 2.9 < spent(scheme, 0, 0, 0) <= 3.0
    assert scheme.assign(Node(0, 0), None, 5) is None
    assert "budget of epsilon = 3" in scheme.why(Node(0, 0))
    assert scheme.assign(Node(3, 3), None, 5) is not None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "dp_noise, or dp_epsilon"),
        ({"dp_noise": 1.0, "dp_epsilon": 1.0, "dp_rounds": 2}, "not both"),
        ({"dp_epsilon": 1.0}, "dp_rounds"),
        ({"dp_noise": 1e-200}, "no finite epsilon"),
        ({"dp_noise": 1.0, "dp_delta": 0.01}, "1/200"),
    ],
)
def test_settings_that_protect_nobody_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        bound(**settings)


def test_no_noise_at_all_gives_no_finite_epsilon() -> None:
    with pytest.raises(UserError, match="no finite epsilon"):
        ExampleAccount({0: 100}, LocalTraining(), delta=1e-3, noise=0.0)


def batch_normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


def test_models_with_batch_norm_are_refused() -> None:
    with pytest.raises(UserError, match="GroupNorm"):
        bound(batch_normed, (1, 4, 4), dp_noise=1.0)
    build = functools.partial(fedp3_cnn, (1, 32, 32), 3, channels=4, hidden=(8,), norm="group")
    assert bound(build, (1, 32, 32), dp_noise=1.0).account is not None
