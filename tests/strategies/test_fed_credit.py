from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedplat.arrays import FlatArrays, Layout
from fedplat.strategies import FedCredit, Mean
from fedplat.strategies.aggregators import mean
from fedplat.strategies.aggregators.credibility import attitudes, cosines, mixed, updated
from fedplat.updates import ClientUpdates

START = torch.tensor([1.0, 1.0, 0.0, 0.0])


def updates(x, nodes=None, counts=None, refused=(), reference=START) -> ClientUpdates:
    x = torch.as_tensor(x, dtype=torch.float32)
    layout = Layout.of({"w": ((x.shape[1],), "float32")})
    side = np.zeros(0, np.uint8)
    models = [FlatArrays(layout, row.numpy().copy(), side) for row in x]
    nodes = list(range(len(x))) if nodes is None else nodes
    made = ClientUpdates.stack(
        models, FlatArrays(layout, reference.numpy(), side), nodes, counts or [1] * len(x)
    )
    return replace(made, refused=tuple(refused))


def honest(n: int, seed: int = 0, d: int = 4) -> torch.Tensor:
    noise = np.random.default_rng(seed).normal(scale=0.05, size=(n, d)).astype(np.float32)
    return torch.ones(d) * torch.tensor([1.0, 1.0] + [0.0] * (d - 2)) + torch.from_numpy(noise)


def close(values) -> pytest.approx:
    return pytest.approx(values, abs=1e-6)


def test_the_cosine_sees_direction_and_not_length() -> None:
    w = torch.tensor([1.0, 2.0, 2.0])
    rows = torch.stack([w, -w, 5 * w, 0 * w, torch.tensor([2.0, -2.0, 1.0])])
    # The third row documents a blind spot: scaling a model does not change its cosine.
    assert cosines(rows, w).tolist() == [1, -1, 1, 0, 0]
    assert cosines(rows, 0 * w).tolist() == [0] * 5


def test_cosines_agree_with_numpy_in_float64() -> None:
    # Trap: honest and poisoned clients differ in the third decimal, which float32 sums blur.
    x = np.random.default_rng(1).normal(1, 0.01, size=(5, 200_000)).astype(np.float32)
    exact = x.astype(np.float64)
    w = exact[0]
    expected = exact @ w / np.linalg.norm(exact, axis=1) / np.linalg.norm(w)
    np.testing.assert_allclose(
        cosines(torch.from_numpy(x), torch.from_numpy(x[0])), expected, rtol=0, atol=1e-13
    )


def test_one_good_and_one_bad_round_by_hand() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert updated(one, 0.9 * one, 0.5, "sum").item() == close(1.506531)
    assert updated(one, -one, 0.5, "sum").item() == 0
    assert updated(one, 0.9 * one, 0.5, "ewma").item() == close(math.exp(-0.5) + (1 - math.exp(-0.5)) * 0.9)


def test_attitudes_by_hand() -> None:
    s = torch.tensor([0.9, 0.8, 0.7, -0.5], dtype=torch.float64)
    last = torch.tensor([0.95, 0.7, math.nan, -0.5], dtype=torch.float64)
    assert attitudes(s, "none").tolist() == close([0.9, 0.8, 0.7, 0])
    assert attitudes(s, "scale", gamma=0.5).tolist() == close([0.9, 0.8, 0.7, 0])
    assert attitudes(s - 0.3, "scale", gamma=0.5).tolist() == close([0.6, 0.5, 0.4, 0])
    assert attitudes(s, "mean", rho=2).tolist() == close([0.9, 0.8, 0.7, -2])
    assert attitudes(s, "prev", previous=last).tolist() == close([-1, 0.8, 0.7, 0])
    # Median 0.75, deviations 0.15, 0.05, 0.05, 1.25: MAD 0.1, times 1.4826.
    assert attitudes(s, "signed_mad", k=2).tolist() == close([0.9, 0.8, 0.7, -1])
    assert attitudes(s, "signed_mad", k=9).tolist() == close([0.9, 0.8, 0.7, 0])


def test_nearly_identical_clients_are_not_flagged_by_rounding() -> None:
    s = torch.tensor([1.0, 1.0, 1.0, 1 - 1e-7], dtype=torch.float64)
    assert bool((attitudes(s, "signed_mad") > 0).all())


def test_weights_by_hand() -> None:
    d, c = torch.tensor([0.75, 0.25], dtype=torch.float64), torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert mixed(d, c, 0.5, "linear").tolist() == close([0.5, 0.5])
    assert mixed(d, c, 0.5, "geometric").tolist() == close([0.5, 0.5])  # √0.75 = √(0.25·3)
    assert mixed(d, c, 0.5, "product").tolist() == close([0.5, 0.5])
    for alpha, expected in ((0.0, [0.75, 0.25]), (1.0, [0.25, 0.75])):
        for mix in ("linear", "geometric"):
            assert mixed(d, c, alpha, mix).tolist() == close(expected)


def test_a_client_without_credibility_has_no_weight_unless_the_mix_is_linear() -> None:
    d, c = torch.full((4,), 0.25, dtype=torch.float64), torch.tensor([0, 1.0, 1, 1], dtype=torch.float64)
    assert mixed(d, c, 0.5, "geometric")[0] == 0
    assert mixed(d, c, 0.5, "product")[0] == 0
    assert mixed(d, c, 0.5, "linear")[0].item() == close(0.125)
    assert mixed(d, 0 * c, 0.5, "geometric").tolist() == d.tolist()


def test_alpha_zero_is_federated_averaging_and_so_is_equal_credibility() -> None:
    x = updates(honest(6), counts=[1, 2, 3, 4, 5, 6])
    expected = Mean().aggregator(x)
    result = FedCredit(alpha=0.0).aggregator(x)
    assert torch.equal(result.vector, expected.vector)
    assert torch.equal(result.weights, expected.weights)
    equal = updates(honest(1).repeat(5, 1), counts=[1, 2, 3, 4, 5])
    for mix in ("linear", "geometric", "product"):
        strategy = FedCredit(mix=mix, alpha=1.0 if mix == "product" else 0.0)
        weights = strategy.aggregator(equal).weights
        torch.testing.assert_close(weights, torch.arange(1, 6).double() / 15)


def test_the_order_of_clients_does_not_matter_and_inputs_stay() -> None:
    x = honest(7)
    order = torch.from_numpy(np.random.default_rng(1).permutation(7))
    nodes = order.tolist()
    first, second = FedCredit(), FedCredit()
    before = x.clone()
    for _ in range(3):
        a = first.aggregator(updates(x))
        b = second.aggregator(updates(x[order], nodes))
        torch.testing.assert_close(a.vector, b.vector)
        torch.testing.assert_close(a.weights[order], b.weights)
    assert torch.equal(x, before)
    assert first.aggregator.credibility == pytest.approx(second.aggregator.credibility)


def test_an_absent_client_decays_a_refused_one_is_punished_and_a_newcomer_starts_at_one() -> None:
    rule = FedCredit().aggregator
    rule(updates(honest(4)))
    earned = dict(rule.credibility)
    rule(updates(honest(2), [0, 9], refused=[3, 8]))
    assert rule.credibility[1] == close(earned[1] * math.exp(-0.5))
    assert rule.credibility[3] == close(max(0.0, earned[3] * math.exp(-0.5) - 1))
    assert rule.credibility[8] == 0
    assert rule.credibility[9] == close(math.exp(-0.5) + float(cosines(honest(2)[1:], START)[0]))


def test_without_an_attitude_the_moving_average_is_the_discounted_history() -> None:
    rule, kept = FedCredit(attitude="none", history="ewma").aggregator, math.exp(-0.5)
    rows = [honest(3, seed) for seed in range(5)]
    for x in rows:
        rule(updates(x))
    past = [cosines(x, START)[1].item() for x in rows]
    expected = kept**5 + sum((1 - kept) * kept ** (4 - t) * s for t, s in enumerate(past))
    assert rule.credibility[1] == close(expected)


def test_clip_norm_takes_the_effect_out_of_scaling() -> None:
    scaled = torch.cat([honest(6), (START + 50 * (honest(7)[6] - START))[None]])
    plain = FedCredit(attitude="none").aggregator(updates(scaled)).vector - START
    clipped = FedCredit(attitude="none", clip_norm=True).aggregator(updates(scaled)).vector - START
    assert clipped.norm() < 0.3 * plain.norm()


def test_equal_base_leaves_claimed_sample_counts_out() -> None:
    x = updates(honest(5), counts=[1, 1, 1, 1, 10**6])
    assert FedCredit().aggregator(x).weights[4] > 0.9
    assert FedCredit(base="equal").aggregator(x).weights[4] < 0.3


def test_old_credibility_lets_the_first_attack_through() -> None:
    x = torch.cat([honest(6), -honest(2)])
    assert FedCredit(order="old").aggregator(updates(x)).weights[7].item() == close(1 / 8)
    assert FedCredit().aggregator(updates(x)).weights[7] == 0


@pytest.mark.parametrize("similarity", ["model", "update"])
def test_turned_models_lose_their_weight_where_the_mean_takes_them_in(similarity: str) -> None:
    good = honest(7, d=30) + 0.1
    x = torch.cat([good, -good[:3]])
    start = torch.tensor([1.0, 1.0] + [0.0] * 28)
    result = FedCredit(similarity=similarity).aggregator(updates(x, reference=start))
    assert result.weights[7:].tolist() == [0, 0, 0]
    target = good.mean(0)
    assert (result.vector - target).norm() < 0.3 * (mean(x).vector - target).norm()


def test_a_restored_rule_goes_on_as_if_it_had_never_stopped() -> None:
    rule = FedCredit(attitude="prev").aggregator
    for seed in range(3):
        rule(updates(honest(5, seed), [2**64 - 1, 3, 5, 7, 9]))
    restored = FedCredit(attitude="prev").aggregator
    restored.load_state_dict(rule.state_dict())
    a, b = (r(updates(honest(5, 9), [2**64 - 1, 3, 5, 7, 9])) for r in (rule, restored))
    assert torch.equal(a.vector, b.vector)
    assert torch.equal(a.scores["credibility"], b.scores["credibility"])


def test_the_linear_mix_cannot_stop_an_attack_of_any_length() -> None:
    x = torch.cat([honest(6), -100 * honest(2)])
    assert FedCredit(mix="linear").aggregator(updates(x)).vector[0] < -10
    assert FedCredit().aggregator(updates(x)).vector[0] > 0.9
