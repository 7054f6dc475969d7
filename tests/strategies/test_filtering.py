from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.cluster import HDBSCAN

from fedplat.strategies import NormClipping
from fedplat.strategies.aggregators import InfeasibleError, mean, norm_clipping
from fedplat.strategies.aggregators.flame import flame, majority_cluster
from fedplat.strategies.aggregators.foolsgold import pairwise_cosines
from fedplat.strategies.aggregators.signs import sign_vote, signguard
from fedplat.strategies.aggregators.spectral import dnc, outlier_scores, removal_count
from fedplat.strategies.filtering import DivideAndConquer, Flame

from .test_fed_credit import updates


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def matrix(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(rng(seed).normal(size=(n, d)).astype(np.float32))


RULES = {
    "flame": flame,
    "signguard": lambda x: signguard(x, rng()),
    "signguard with similarity": lambda x: signguard(x, rng(), similarity=True),
    "dnc": lambda x: dnc(x, (len(x) - 1) // 3, rng(), iterations=3, subset=25),
    "sign vote": sign_vote,
}


@pytest.fixture(params=list(RULES))
def rule(request: pytest.FixtureRequest):
    return RULES[request.param]


def test_the_order_of_clients_does_not_matter(rule) -> None:
    x = torch.cat([matrix(8, 40) + 0.5, matrix(3, 40, 1) - 0.5])
    order = torch.from_numpy(rng(3).permutation(11))
    first, turned = rule(x), rule(x[order])
    torch.testing.assert_close(first.vector, turned.vector, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first.weights[order], turned.weights)
    assert first.accepted[order].tolist() == turned.accepted.tolist()


def test_inputs_stay_and_a_second_call_is_equal(rule) -> None:
    x = torch.cat([matrix(8, 40) + 0.5, matrix(3, 40, 1) - 0.5])
    before = x.clone()
    first, second = rule(x), rule(x)
    assert torch.equal(x, before)
    assert torch.equal(first.vector, second.vector)
    assert torch.equal(first.weights, second.weights)
    assert first.weights.sum().item() == pytest.approx(1)
    assert bool((first.weights[~first.accepted] == 0).all())


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_equal_updates_give_that_update_from_any_number_of_clients(rule, n: int) -> None:
    x = matrix(1, 30)
    result = rule(x.repeat(n, 1))
    expected = x[0].sign() if rule is sign_vote else x[0]
    torch.testing.assert_close(result.vector, expected)
    assert result.weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_few_clients_and_zero_updates_are_no_error(rule, n: int) -> None:
    for x in (matrix(n, 30), torch.zeros(n, 30)):
        result = rule(x)
        assert bool(result.vector.isfinite().all())
        assert bool(result.accepted.any())
        assert result.weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize("name", ["flame", "signguard", "signguard with similarity", "dnc", "sign vote"])
def test_huge_updates_of_a_minority_do_not_get_in(name: str) -> None:
    # Trap: squares of 1e30 overflow float32, and infinity minus infinity is NaN.
    honest = matrix(8, 200) * 0.3 + 1
    result = RULES[name](torch.cat([honest, torch.full((2, 200), -1e30)]))
    assert float(result.vector.abs().max()) < 3


# FLAME -----------------------------------------------------------------------------------------------------


def test_flame_keeps_the_majority_and_clips_to_the_median_length_of_all() -> None:
    # Lengths 1, 2, 4, 3: the median is 2.5, with the outlier's length counted. Trap: the median of those kept
    # is 2. Only the third is cut.
    x = torch.tensor([[1.0, 0, 0], [2, 0, 0], [4, 0, 0], [-3, 0, 0]])
    result = flame(x)
    assert result.accepted.tolist() == [True, True, True, False]
    assert result.vector.tolist() == pytest.approx([5.5 / 3, 0, 0])
    assert result.diagnostics == {"bound": 2.5, "sigma": 0}
    # Shares 1, 1 and 2.5/4 of a third each.
    assert result.weights.tolist() == pytest.approx([8 / 21, 8 / 21, 5 / 21, 0])


def test_the_cluster_is_that_of_scikit_learn() -> None:
    for seed in range(5):
        x = matrix(11, 30, seed) + 0.4
        unit = x.double().numpy() / np.linalg.norm(x.double().numpy(), axis=1, keepdims=True)
        labels = HDBSCAN(
            min_cluster_size=6, min_samples=2, allow_single_cluster=True, metric="precomputed", copy=True
        ).fit_predict(np.clip(1 - unit @ unit.T, 0, 2))
        kept = majority_cluster(1 - pairwise_cosines(x))
        assert kept.tolist() == (labels == 0).tolist()
        assert int(kept.sum()) >= 6


def test_clients_are_compared_by_what_is_given_for_it() -> None:
    x = torch.tensor([[1.0, 0], [1, 0], [1, 0], [-1, 0], [-1, 0]])
    other = x[[3, 0, 4, 1, 2]]
    assert flame(x).accepted.tolist() == [True, True, True, False, False]
    assert flame(x, other).accepted.tolist() == [False, True, False, True, True]


def test_models_are_compared_or_updates_as_the_setting_says() -> None:
    reference = torch.tensor([0.0, 10.0, 0.0])
    deltas = torch.tensor([[1.0, 0, 0.1], [2, 0, 0.1], [3, 0, 0], [-2, 0, 0], [-1, 0, 0]])
    x = updates(reference + deltas, reference=reference)
    # The models' angles are 1, 2, 3, −2, −1 tenths; three of the five nearest each other are not the first.
    by_models = Flame(noise=0.0).aggregator(x)
    by_updates = Flame(noise=0.0, compare="updates").aggregator(x)
    assert by_updates.accepted.tolist() == [True, True, True, False, False]
    assert by_models.accepted.tolist() == flame(deltas, reference + deltas).accepted.tolist()
    torch.testing.assert_close(by_updates.vector, reference + flame(deltas).vector)


def test_noise_has_the_size_that_was_asked_for_and_comes_from_the_seed_and_the_round() -> None:
    x = torch.ones(5, 20_000)
    quiet = flame(x)
    loud = flame(x, noise=0.01, rng=rng())
    bound = 20_000**0.5
    assert loud.diagnostics["sigma"] == pytest.approx(0.01 * bound)
    assert float((loud.vector - quiet.vector).std()) == pytest.approx(0.01 * bound, rel=0.03)
    with pytest.raises(ValueError, match="noise needs a random generator"):
        flame(x, noise=0.01)
    one = replace(updates(x, reference=torch.zeros(20_000)), server_round=1)
    vectors = [Flame(seed=seed).aggregator(one).vector for seed in (1, 1, 2)]
    other_round = Flame(seed=1).aggregator(replace(one, server_round=2)).vector
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])
    assert not torch.equal(vectors[0], other_round)


def test_flame_leaves_turned_and_scaled_updates_out_where_the_mean_takes_them_in() -> None:
    honest = matrix(7, 60) * 0.2 + 0.2
    for attack in (-honest[:3], -10 * honest[:3], 10 * (matrix(1, 60, 9) + 0.02 * matrix(3, 60, 4))):
        attacked = torch.cat([honest, attack])
        x = updates(attacked, reference=torch.zeros(60))
        for compare in ("models", "updates"):
            result = Flame(compare=compare).aggregator(x)
            assert not result.accepted[7:].any()
            target = honest.mean(0)
            assert (result.vector - target).norm() < 0.6 * (mean(attacked).vector - target).norm()


# Divide and conquer ----------------------------------------------------------------------------------------


def test_outlier_scores_by_hand() -> None:
    # Mean (1, 1); the centred rows lie along (1, 1) with parts −√2, −√2, 2√2.
    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 3.0]])
    assert outlier_scores(x).tolist() == pytest.approx([2, 2, 8])


def test_outlier_scores_are_those_of_a_singular_value_decomposition() -> None:
    # Trap: scores of models, not of what is left after centring, would all be huge and alike.
    x = matrix(9, 50) * torch.linspace(3, 0.1, 50) + 100
    rows = x.double().numpy()
    rows = rows - rows.mean(0)
    top = np.linalg.svd(rows, full_matrices=False)[2][0]
    np.testing.assert_allclose(outlier_scores(x), (rows @ top) ** 2, rtol=1e-6, atol=1e-9)


def test_the_highest_c_times_f_are_left_out() -> None:
    x = torch.tensor([[0.0], [1], [2], [3], [4], [60]])
    assert dnc(x, 1, rng()).accepted.tolist() == [True] * 5 + [False]
    # The mean is 70/6, so the next after 60 is 0, then 1.
    assert dnc(x, 1, rng(), c=2.0).accepted.tolist() == [False] + [True] * 4 + [False]
    assert dnc(x, 2, rng(), c=1.25).vector.item() == pytest.approx(3)
    assert dnc(x, 0, rng()).vector.item() == pytest.approx(70 / 6)
    # Trap: int(1.1 x 1) would be 1 for any c below 2.
    assert removal_count(1.1, 1) == 2


def test_several_passes_keep_who_survives_all_of_them() -> None:
    # Each coordinate has its own outlier; a pass that looks at one coordinate finds one of them.
    x = 0.01 * matrix(8, 3)
    x[torch.tensor([0, 1, 2]), torch.arange(3)] += 50
    one = dnc(x, 1, rng(), subset=1)
    assert int(one.accepted.sum()) == 7
    many = dnc(x, 1, rng(), subset=1, iterations=30)
    assert many.accepted.tolist() == [False] * 3 + [True] * 5


def test_if_the_passes_leave_nobody_those_kept_most_often_are_taken() -> None:
    x = torch.eye(3)
    result = dnc(x, 2, rng(), iterations=9, subset=1)
    assert bool(result.accepted.any())
    assert bool(result.vector.isfinite().all())


@pytest.mark.parametrize(("f", "c"), [(4, 1.0), (5, 1.0), (3, 1.1), (-1, 1.0)])
def test_leaving_everybody_out_is_refused_with_the_inequality(f: int, c: float) -> None:
    with pytest.raises(InfeasibleError, match="must be less than n = 4"):
        dnc(matrix(4, 5), f, rng(), c=c)
    if f > 0:
        with pytest.raises(InfeasibleError, match=f"{c:g} x {f} = 4|{c:g} x {f} = 5"):
            DivideAndConquer(f=f, c=c).aggregator.check(4)


def test_passes_and_coordinates_must_be_there() -> None:
    for bad in ({"iterations": 0}, {"subset": 0}):
        with pytest.raises(ValueError, match="must be at least 1"):
            dnc(matrix(4, 5), 1, rng(), **bad)


def test_a_round_uses_the_declared_f_the_most_below_half_or_what_still_fits() -> None:
    zero = torch.zeros(20)
    used = {
        (f, c, n): DivideAndConquer(f=f, c=c)
        .aggregator(updates(matrix(n, 20), reference=zero))
        .diagnostics["f"]
        for f, c, n in [
            (None, 1.0, 9),
            (None, 1.0, 10),
            (None, 3.0, 9),
            (3, 1.0, 9),
            (3, 1.0, 3),
            (3, 1.0, 1),
        ]
    }
    assert list(used.values()) == [4, 4, 2, 3, 2, 0]
    DivideAndConquer().aggregator.check(1)


def test_dnc_moves_the_model_and_draws_other_coordinates_every_round() -> None:
    x = 0.01 * matrix(8, 3)
    x[torch.tensor([0, 1, 2]), torch.arange(3)] += 50
    reference = torch.full((3,), 7.0)
    rule = DivideAndConquer(f=1, subset=1, seed=2).aggregator
    sent = updates(reference + x, reference=reference)
    results = [rule(replace(sent, server_round=n)) for n in range(12)]
    assert {int((~r.accepted).nonzero()) for r in results} == {0, 1, 2}
    assert torch.equal(rule(replace(sent, server_round=5)).vector, results[5].vector)


def test_dnc_leaves_colluding_updates_out_where_the_mean_takes_them_in() -> None:
    honest = matrix(8, 60)
    # A shift of 1.5 standard deviations hides in every coordinate, but not in the sum of them.
    attack = (honest.mean(0) - 1.5 * honest.std(0)).repeat(3, 1)
    attacked = torch.cat([honest, attack])
    result = DivideAndConquer(f=3).aggregator(updates(attacked, reference=torch.zeros(60)))
    assert result.accepted.tolist() == [True] * 8 + [False] * 3
    torch.testing.assert_close(result.vector, honest.mean(0))
    assert (mean(attacked).vector - honest.mean(0)).norm() > 1


# Norm clipping with noise ----------------------------------------------------------------------------------


def test_clipping_noise_has_the_size_that_was_asked_for() -> None:
    x = matrix(5, 20_000)
    quiet = norm_clipping(x, 1.0)
    loud = norm_clipping(x, 1.0, noise=0.05, rng=rng())
    assert float((loud.vector - quiet.vector).std()) == pytest.approx(0.05, rel=0.03)
    assert torch.equal(loud.weights, quiet.weights)
    assert torch.equal(loud.vector, norm_clipping(x, 1.0, noise=0.05, rng=rng()).vector)
    assert torch.equal(norm_clipping(x, 1.0, noise=0.0, rng=rng()).vector, quiet.vector)


def test_clipping_noise_comes_from_the_seed_and_the_round() -> None:
    x = replace(updates(matrix(5, 50), reference=torch.zeros(50)), server_round=1)
    vectors = [NormClipping(noise=0.1, seed=seed).aggregator(x).vector for seed in (1, 1, 2)]
    assert torch.equal(vectors[0], vectors[1])
    assert not torch.equal(vectors[0], vectors[2])
    other_round = NormClipping(noise=0.1, seed=1).aggregator(replace(x, server_round=2)).vector
    assert not torch.equal(vectors[0], other_round)
    assert torch.equal(NormClipping(seed=1).aggregator(x).vector, NormClipping(seed=2).aggregator(x).vector)


@pytest.mark.parametrize(("noise", "words"), [(-0.1, "negative"), (float("nan"), "negative"), (0.1, "needs")])
def test_impossible_noise_is_refused(noise: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        norm_clipping(matrix(3, 2), 1.0, noise=noise)
