from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedplat.strategies.aggregators import mean
from fedplat.strategies.aggregators.signs import largest_cluster, sign_shares, sign_vote, signguard
from fedplat.strategies.filtering import SignGuard, SignVote

from .test_fed_credit import updates


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def matrix(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(rng(seed).normal(size=(n, d)).astype(np.float32))


# SignGuard -------------------------------------------------------------------------------------------------


def test_sign_shares_by_hand_and_on_some_coordinates() -> None:
    x = torch.tensor([[1.0, 0, -2, 3, 0], [-1, -1, -1, -1, 5]])
    assert sign_shares(x).tolist() == [[0.4, 0.4, 0.2], [0.2, 0, 0.8]]
    assert sign_shares(x, torch.tensor([1, 2])).tolist() == [[0, 0.5, 0.5], [0, 0, 1]]


def test_the_length_filter_keeps_what_lies_from_a_tenth_to_three_times_the_median() -> None:
    lengths = torch.tensor([0.09, 0.1, 1.0, 1.0, 1.0, 3.0, 3.1])
    x = lengths[:, None] * torch.tensor([[1.0, 0.0]])
    result = signguard(x, rng(), sample=1.0)
    assert result.accepted.tolist() == [False, True, True, True, True, True, False]
    # Cut to the median 1: (0.1 + 1 + 1 + 1 + 1) / 5. Trap: without clipping it is 6.1 / 5.
    assert result.vector.tolist() == pytest.approx([0.82, 0])
    assert result.diagnostics["unusual length"] == 2


def test_the_sign_filter_keeps_the_largest_cluster() -> None:
    mostly_up = torch.ones(5, 100)
    mostly_up[torch.arange(5), torch.arange(5) * 10] = -1
    x = torch.cat([mostly_up, -mostly_up[:3]])
    result = signguard(x, rng(), sample=1.0)
    assert result.accepted.tolist() == [True] * 5 + [False] * 3
    assert result.diagnostics["unusual signs"] == 3
    torch.testing.assert_close(result.vector, mostly_up.mean(0))


def test_only_a_sample_of_the_coordinates_is_looked_at() -> None:
    # The liars differ in 30 of 3,000 coordinates; one coordinate in a hundred is looked at.
    x = torch.ones(6, 3000)
    x[4:, :30] = -1
    assert signguard(x, rng(), sample=1.0).accepted.tolist() == [True] * 4 + [False] * 2
    kept = [int(signguard(x, rng(seed), sample=0.01).accepted.sum()) for seed in range(30)]
    assert set(kept) == {4, 6}


def test_similarity_sees_a_permutation_that_signs_cannot() -> None:
    # The liars have the honest mix of signs, in other coordinates.
    honest = matrix(7, 300) * 0.3 + torch.tensor([1.0] * 200 + [-1.0] * 100)
    x = torch.cat([honest, honest[:3].flip(1)])
    assert not signguard(x, rng(), sample=1.0, similarity=True).accepted[7:].any()
    assert signguard(x, rng(), sample=1.0).accepted[7:].any()


def test_if_no_client_passes_both_filters_the_length_decides() -> None:
    # Three short ones with the same signs are the cluster, but their length is unusual.
    short = 0.01 * torch.ones(3, 40)
    usual = torch.ones(4, 40)
    for row, ones in enumerate((8, 16, 24, 30)):
        usual[row, :ones] = -1
    result = signguard(torch.cat([short, usual]), rng(), sample=1.0)
    assert result.accepted.tolist() == [False] * 3 + [True] * 4


def test_a_cluster_of_one_place_needs_no_radius() -> None:
    # Trap: a radius of 0 is refused by scikit-learn.
    assert largest_cluster(torch.ones(4, 3)).tolist() == [True] * 4
    assert largest_cluster(torch.tensor([[0.0], [0], [0], [0], [1]])).tolist() == [True] * 4 + [False]


@pytest.mark.parametrize(
    "bad", [{"sample": 0.0}, {"sample": 1.5}, {"lower": 1.1}, {"upper": 1.9}, {"lower": float("nan")}]
)
def test_filters_that_could_leave_nobody_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="need 0 < sample <= 1"):
        signguard(matrix(4, 5), rng(), **bad)


def test_signguard_moves_the_model_and_draws_other_coordinates_every_round() -> None:
    honest = torch.ones(6, 3000)
    honest[4:, :30] = -1
    reference = torch.full((3000,), 10.0)
    strategy = SignGuard(sample=0.01, seed=3)
    x = updates(reference + honest, reference=reference)
    results = [strategy.aggregator(replace(x, server_round=n)) for n in range(30)]
    assert {int(r.accepted.sum()) for r in results} == {4, 6}
    again = strategy.aggregator(replace(x, server_round=7))
    assert torch.equal(again.vector, results[7].vector)
    assert bool((results[0].vector[30:] == 11).all())


def test_signguard_leaves_turned_updates_out_where_the_mean_takes_them_in() -> None:
    honest = matrix(7, 3000) * 0.5 + 0.2
    attacked = torch.cat([honest, -honest[:3]])
    for similarity in (False, True):
        strategy = SignGuard(similarity=similarity)
        result = strategy.aggregator(updates(attacked, reference=torch.zeros(3000)))
        assert not result.accepted[7:].any()
        target = honest.mean(0)
        assert (result.vector - target).norm() < (mean(attacked).vector - target).norm()


# Majority vote ---------------------------------------------------------------------------------------------


def test_votes_by_hand() -> None:
    # Up, up, down; a tie of up, down and an abstention; two abstentions and one down.
    x = torch.tensor([[0.1, 5.0, 0.0], [9.0, -0.2, 0.0], [-70.0, 0.0, -1.0]])
    result = sign_vote(x)
    assert result.vector.tolist() == [1, 0, -1]
    # They agree with 1, 1 and 2 of the votes; abstaining on the tie is agreeing.
    assert result.scores["agreement"].tolist() == pytest.approx([1 / 3, 1 / 3, 2 / 3])
    assert result.weights.tolist() == pytest.approx([0.25, 0.25, 0.5])
    reference = torch.tensor([1.0, 2.0, 3.0])
    moved = SignVote(lr=0.5).aggregator(updates(reference + x, reference=reference)).vector
    assert moved.tolist() == [1.5, 2, 2.5]


def test_if_nobody_ever_agrees_all_count_alike() -> None:
    assert sign_vote(torch.tensor([[1.0], [-1.0]])).weights.tolist() == [0.5, 0.5]


def test_votes_agree_with_numpy() -> None:
    x = matrix(9, 500)
    np.testing.assert_array_equal(sign_vote(x).vector, np.sign(np.sign(x.numpy()).sum(0)))


def test_length_wins_no_vote_where_it_wins_the_mean() -> None:
    honest = matrix(7, 200) * 0.3 + 1
    attacked = torch.cat([honest, -100 * honest[:3]])
    step = SignVote(lr=1.0).aggregator(updates(attacked, reference=torch.zeros(200))).vector
    assert bool((step == 1).all())
    assert bool((mean(attacked).vector < 0).all())
