"""What single rules make of sub-models: whom they blame, what they remember, and against whom they hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedplat.strategies.aggregators import centered_clipping, geometric_median, norm_clipping
from fedplat.strategies.aggregators.coverage import Covered
from fedplat.strategies.aggregators.credibility import attitudes, cosines
from fedplat.strategies.aggregators.distances import squared_distances
from fedplat.strategies.aggregators.foolsgold import foolsgold
from fedplat.strategies.aggregators.history import Histories
from fedplat.strategies.aggregators.krum import krum_scores
from fedplat.strategies.aggregators.signs import sign_vote
from fedplat.strategies.aggregators.spectral import outlier_scores
from fedplat.strategies.aggregators.trust import fltrust
from fedplat.strategies.fed_credit import FedCredit
from fedplat.strategies.mud_hog import MudHog
from fedplat.strategies.preaggregators import (
    AdaptiveClipping,
    Bucketing,
    Clipping,
    NearestNeighbourMixing,
    PreAggregator,
    transformed,
)
from fedplat.strategies.similarity import FoolsGold
from fedplat.updates import ClientUpdates
from fedplat.verdicts import UNTARGETED

from .test_coverage import rule_of, updates_of

WIDTHS = (1.0, 0.5, 0.25, 0.125)


def levels(n: int, d: int, widths: tuple[float, ...] = WIDTHS) -> np.ndarray:
    """Nested prefixes, the widest first, by turns."""
    sizes = [max(1, int(d * width)) for width in widths]
    return np.arange(d) < np.array([sizes[i % len(sizes)] for i in range(n)])[:, None]


def flipped_crowd(seed: int, n: int = 20, d: int = 400, flippers: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Updates of which the last ones are turned round and enlarged, and the step that the others agree on."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=d).astype(np.float32)
    deltas = truth + rng.normal(size=(n, d)).astype(np.float32)
    deltas[n - flippers :] *= -5
    return deltas, truth


# Against those who turn the sign -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("median", "trimmed-mean", "krum", "multi-krum", "bulyan", "meamed", "geometric-median", "monna"),
        *("fed-credit", "mud-hog", "mda", "caf", "flame", "dnc", "residual-reweighting", "fltrust"),
    ],
)
def test_among_sub_models_robust_rules_end_nearer_the_truth_than_the_mean(name: str) -> None:
    n, d = 20, 400
    mask = levels(n, d)
    rule, plain = rule_of(name, d), rule_of("mean", d)
    model = np.random.default_rng(7).normal(size=d).astype(np.float32)
    wrong, wrong_mean = 0.0, 0.0
    for i in range(4):
        deltas, truth = flipped_crowd(i)
        updates = updates_of(deltas, mask, reference=model)
        updates = replace(updates, server_round=i + 1, num_examples=np.ones(n, np.int64))
        if name == "fltrust":
            noise = np.random.default_rng(i + 50).normal(size=d).astype(np.float32)
            rule.root = updates.reference + torch.from_numpy(truth + noise)
        goal = updates.reference + torch.from_numpy(truth)
        wrong += float((rule(updates).vector - goal).norm())
        wrong_mean += float((plain(updates).vector - goal).norm())
    assert wrong < 0.9 * wrong_mean


def test_fed_credit_and_mud_hog_tell_large_and_small_attackers_alike() -> None:
    n, d = 20, 400
    bad = np.arange(n) >= n - 4  # one of each size
    credit, hog = FedCredit().aggregator, MudHog(warmup=0).aggregator
    for i in range(4):
        updates = replace(updates_of(flipped_crowd(i)[0], levels(n, d)), server_round=i + 1)
        found, judged = credit(updates), hog(updates)
    credibility = found.scores["credibility"].numpy()
    assert credibility[bad].max() < credibility[~bad].min()
    assert [i for i, word in judged.verdicts.items() if word == UNTARGETED] == np.flatnonzero(bad).tolist()


# Honest clients of all sizes ---------------------------------------------------------------------------


def honest(seed: int, n: int, d: int, width: float, differ: float) -> tuple[ClientUpdates, np.ndarray]:
    """Honest updates that ``differ`` in size by client, as data do; half of the clients train a part."""
    rng = np.random.default_rng(seed)
    small = rng.permutation(n) < n // 2
    mask = np.where(small[:, None], np.arange(d) < int(d * width), True)
    sizes = np.exp(differ * rng.normal(size=(n, 1)))
    deltas = 0.3 * rng.normal(size=d) + 0.3 * sizes * rng.normal(size=(n, d))
    return updates_of(deltas.astype(np.float32), mask, seed), small


@pytest.mark.parametrize("differ", [0.05, 0.15])
@pytest.mark.parametrize("width", [1 / 4, 1 / 16])
def test_krum_leaves_out_honest_small_and_large_clients_about_as_often(width: float, differ: float) -> None:
    # Trap: the plain distance between rows is short where few elements differ, so the large ones go. Over few
    # elements chance moves a score more; where clients differ by little else, some more of the small ones go.
    n, f, left_out = 40, 8, np.zeros((2, 2))
    for seed in range(40):
        updates, small = honest(seed, n, 1024, width, differ)
        for row, covered in enumerate((Covered.by(updates), None)):
            scores = krum_scores(squared_distances(updates.params, covered), n - f - 2)
            worst = scores.sort(stable=True).indices[-f:].numpy()
            left_out[row] += small[worst].mean(), (~small[worst]).mean()
    ours, plain = left_out / 40
    assert ours[0] < (0.53 if differ > 0.1 else 0.6)
    assert ours[1] < 0.6
    assert plain[1] > 0.95


@pytest.mark.parametrize("differ", [0.05, 0.15])
@pytest.mark.parametrize("width", [1 / 4, 1 / 64])
def test_fed_credit_flags_few_honest_clients_of_any_size(width: float, differ: float) -> None:
    # Trap: over few elements a cosine varies more, so small clients stick out among all clients' cosines.
    flagged = np.zeros((2, 2))
    for seed in range(40):
        updates, small = honest(seed, 40, 2048, width, differ)
        result = FedCredit().aggregator(updates)
        similarity = result.scores["similarity"]
        judged = result.scores["credibility"].numpy() == 0
        alone = attitudes(similarity, "signed_mad").numpy() < 0
        flagged[0] += judged[small].mean(), judged[~small].mean()
        flagged[1] += alone[small].mean(), alone[~small].mean()
    ours, plain = flagged / 40
    assert ours[0] < 0.09
    assert ours[1] < 0.09
    if width < 0.1 and differ < 0.1:
        assert plain[0] > 1.5 * ours[0]


@pytest.mark.parametrize("attitude", ["none", "scale", "mean", "prev", "signed_mad"])
@pytest.mark.parametrize("choice", [{}, {"similarity": "update"}, {"clip_norm": True}, {"order": "old"}])
def test_fed_credit_remembers_clients_by_identity_whatever_they_cover(attitude: str, choice: dict) -> None:
    n, d = 12, 80
    rule = FedCredit(attitude=attitude, **choice).aggregator
    for i in range(3):
        mask = np.roll(levels(n, d), i, axis=0)  # every client gets another size
        result = rule(replace(updates_of(flipped_crowd(i, n, d, 2)[0], mask), server_round=i + 1))
        assert result.vector.isfinite().all()
    assert list(rule.credibility) == list(range(50, 50 + n))
    np.testing.assert_allclose(list(rule.credibility.values()), result.scores["credibility"])
    again = FedCredit(attitude=attitude, **choice).aggregator
    again.load_state_dict(rule.state_dict())
    assert again.credibility == rule.credibility


def test_fed_credit_compares_a_model_with_the_part_it_was_sent() -> None:
    mask = levels(8, 40)
    updates = updates_of(flipped_crowd(0, 8, 40, 0)[0], mask)
    similarity = FedCredit().aggregator(updates).scores["similarity"]
    for i in range(8):
        part = torch.from_numpy(mask[i])
        expected = cosines(updates.params[i : i + 1, part], updates.reference[part])
        assert float(similarity[i]) == pytest.approx(float(expected))


# MUD-HoG and FoolsGold remember by element -------------------------------------------------------------


def test_histories_count_the_rounds_in_which_an_element_was_trained() -> None:
    reference = np.zeros(4, np.float32)
    rounds = [
        (np.array([[1.0, 2, 3, 4], [10, 20, 30, 40]]), None),
        (np.array([[3.0, 4, 5, 6], [30, 40, 50, 60]]), np.array([[1, 1, 0, 0], [1, 1, 1, 1]], bool)),
        (np.array([[5.0, 6, 7, 8], [50, 60, 70, 80]]), np.array([[1, 0, 0, 0], [0, 1, 1, 1]], bool)),
    ]
    histories = Histories(2)
    for deltas, mask in rounds:
        slots = histories.record(updates_of(deltas.astype(np.float32), mask, reference=reference))
    assert histories.short(slots).tolist() == [[4, 4, 0, 0], [30, 50, 60, 70]]
    assert histories.short_covered(slots).mask.tolist() == [[True, True, False, False], [True] * 4]
    assert histories.long[slots].tolist() == [[9, 6, 3, 4], [40, 120, 150, 180]]
    # Per element the mean over its rounds, times three rounds: (9, 9, 9, 12) and (60, 120, 150, 180).
    rows = np.array([[9.0, 9, 9, 12], [60, 120, 150, 180]])
    np.testing.assert_allclose(histories.long_products(slots), rows @ rows.T)


@pytest.mark.parametrize("window", [1, 3])
def test_histories_with_sub_models_survive_a_checkpoint_and_newcomers(window: int) -> None:
    def updates(i: int, n: int) -> ClientUpdates:
        mask = np.roll(levels(n, 24), i, axis=0) if i != 2 else None
        return updates_of(flipped_crowd(i, n, 24, 1)[0], mask)

    straight, stopped = Histories(window), Histories(window)
    for i, n in enumerate([3, 3, 4, 6]):
        straight.record(updates(i, n))
        stopped.record(updates(i, n))
        fresh = Histories(window)
        fresh.load_state_dict(stopped.state_dict())
        stopped = fresh
    slots = torch.arange(6)
    assert torch.equal(straight.short(slots), stopped.short(slots))
    assert torch.equal(straight.short_covered(slots).mask, stopped.short_covered(slots).mask)
    assert np.array_equal(straight.long_products(slots), stopped.long_products(slots))


@pytest.mark.parametrize("mode", ["intended", "reference"])
def test_mud_hog_continues_from_a_checkpoint_where_sizes_change(mode: str) -> None:
    def updates(i: int) -> ClientUpdates:
        mask = None if i == 0 else np.roll(levels(12, 80), i, axis=0)
        return replace(updates_of(flipped_crowd(i, 12, 80, 2)[0], mask, i), server_round=i + 1)

    rule, other = (MudHog(mode=mode, warmup=1, window=2).aggregator for _ in range(2))
    for i in range(5):
        expected = rule(updates(i))
        found = other(updates(i))
        assert torch.equal(found.vector, expected.vector)
        assert found.verdicts == expected.verdicts
        fresh = MudHog(mode=mode, warmup=1, window=2).aggregator
        fresh.load_state_dict(other.state_dict())
        other = fresh


def test_mud_hog_does_not_blame_honest_clients_for_their_size() -> None:
    n, d, blamed = 24, 512, np.zeros(2)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        small = rng.permutation(n) < n // 2
        mask = np.where(small[:, None], np.arange(d) < d // 4, True)
        own = 0.5 * rng.normal(size=(n, d))
        rule = MudHog(warmup=1).aggregator
        for i in range(5):
            deltas = np.ones(d) + own + 0.5 * rng.normal(size=(n, d))
            result = rule(replace(updates_of(deltas.astype(np.float32), mask, i), server_round=i + 1))
        words = np.array([result.verdicts.get(i, "honest") != "honest" for i in range(n)])
        blamed += words[small].mean(), words[~small].mean()
    assert blamed[0] / 4 < 0.1
    assert blamed[1] / 4 < 0.1


def test_foolsgold_remembers_what_was_ever_trained_and_continues_from_a_checkpoint() -> None:
    def updates(i: int) -> ClientUpdates:
        deltas = flipped_crowd(i, 6, 24, 0)[0]
        deltas[5] = deltas[4]  # sybils
        mask = None if i == 3 else np.roll(levels(6, 24, (0.5, 0.25)), 6 * i, axis=1)
        mask = mask if mask is None else np.concatenate([mask[:5], mask[4:5]])
        return updates_of(deltas, mask, i)

    rule, other = (FoolsGold().aggregator for _ in range(2))
    for i in range(5):
        expected, found = rule(updates(i)), other(updates(i))
        assert torch.equal(found.vector, expected.vector)
        assert expected.scores["distinctness"][4:].tolist() == [0, 0]
        fresh = FoolsGold().aggregator
        fresh.load_state_dict(other.state_dict())
        other = fresh
    assert "trained" not in rule.state_dict()  # in the fourth round everybody trained everything


# By hand -----------------------------------------------------------------------------------------------

LEFT = Covered(torch.tensor([[True, True, False, False], [True, True, True, True]]))


def test_clipping_takes_the_norm_of_the_covered_part_and_the_mean_over_those_who_cover() -> None:
    x = torch.tensor([[3.0, 4, 9, 9], [0, 0.3, 0.4, 0]])
    result = norm_clipping(x, 1.0, torch.tensor([1.0, 3.0]), covered=LEFT)
    torch.testing.assert_close(result.vector, torch.tensor([0.15, 0.425, 0.4, 0]))
    result = centered_clipping(x, 1.0, covered=LEFT)
    torch.testing.assert_close(result.vector, torch.tensor([0.3, 0.55, 0.4, 0]))
    rng, noise = np.random.default_rng(0), np.random.default_rng(0).standard_normal(4)
    nobody = Covered(torch.tensor([[True, True, True, False]] * 2))
    noisy = norm_clipping(torch.zeros(2, 4), 1.0, noise=0.5, rng=rng, covered=nobody).vector
    np.testing.assert_allclose(noisy, [*(0.5 * noise[:3]), 0], rtol=1e-6)


def test_trust_compares_with_the_part_of_the_root_that_a_client_covers() -> None:
    root, x = torch.tensor([0.0, 3, 4, 0]), torch.tensor([[0.0, 1, 0, 0], [0, 0, 5, 0]])
    result = fltrust(x, root, LEFT)
    # Over its part the first points where the root does, which is 3 long there; the second 4/5 of it.
    torch.testing.assert_close(result.scores["trust"], torch.tensor([1.0, 0.8]).double())
    torch.testing.assert_close(result.vector, torch.tensor([0, 3 / 1.8, 5, 0]))


def test_a_vote_counts_those_who_cover() -> None:
    x = torch.tensor([[1.0, 1, -9, -9], [1.0, -1, 1, -1]])
    result = sign_vote(x, LEFT)
    assert result.vector.tolist() == [1, 0, 1, -1]
    assert result.scores["agreement"].tolist() == [0.5, 0.75]


def test_foolsgold_sees_twins_of_different_sizes() -> None:
    rows = torch.tensor([[1.0, 2, 0, 0], [1, 2, 5, 6], [2, -1, 1, 0]])
    mask = torch.tensor([[True, True, False, False], [True] * 4, [True] * 4])
    assert foolsgold(rows).weights[0] > 0
    assert foolsgold(rows, covered=Covered(mask)).scores["distinctness"].tolist() == [0, 0, 1]


def test_outlier_scores_are_along_the_part_that_a_client_covers() -> None:
    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 3.0], [3.0, 0.0]])
    mask = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    scores = outlier_scores(x, Covered(mask))
    # Means over those who cover: 1.5 and 1; the last covers the first column alone, where it is 1.5 off.
    assert float(scores[3]) == pytest.approx(2.25)
    assert float(scores[2]) == pytest.approx(1.5**2 + 2**2, rel=0.1)


def test_the_geometric_median_of_parts_has_no_better_neighbour() -> None:
    rng = np.random.default_rng(0)
    n, d = 9, 6
    x, mask = torch.from_numpy(rng.normal(size=(n, d))).float(), torch.from_numpy(rng.random((n, d)) < 0.7)
    mask[0] = True
    result = geometric_median(x, covered=Covered(mask), tolerance=1e-9)

    def objective(z: torch.Tensor) -> float:
        off = ((x - z).double() * mask).square().sum(dim=1).sqrt()
        return float((off * (mask.sum(dim=1) / d).sqrt()).sum())

    best = objective(result.vector)
    assert result.diagnostics["objective"] == pytest.approx(best)
    for _ in range(50):
        assert objective(result.vector + 0.05 * torch.from_numpy(rng.normal(size=d)).float()) > best


# Steps before a rule -----------------------------------------------------------------------------------


def test_steps_before_a_rule_keep_what_is_not_covered() -> None:
    n, d, rng = 12, 80, np.random.default_rng(0)
    updates = updates_of(flipped_crowd(0, n, d, 2)[0], levels(n, d))
    for step in (NearestNeighbourMixing(f=2), Clipping(bound=2.0), AdaptiveClipping(f=2)):
        seen = transformed(updates, step.mixing(updates, None, rng))
        off = ~seen.coverage
        assert torch.equal(seen.params[off], updates.reference.expand(n, d)[off])
        assert bool((seen.coverage >= updates.coverage).all())


@pytest.mark.parametrize("step", [Bucketing(size=2), NearestNeighbourMixing(f=2), AdaptiveClipping(f=2)])
def test_steps_take_a_mask_of_everything_for_none(step: PreAggregator) -> None:
    deltas = flipped_crowd(0, 12, 80, 2)[0]
    seen = []
    for mask in (None, np.ones((12, 80), bool)):
        updates = updates_of(deltas, mask)
        seen.append(transformed(updates, step.mixing(updates, None, np.random.default_rng(0))))
    assert torch.equal(seen[0].params, seen[1].params)
    assert seen[1].partial is None


def test_adaptive_clipping_does_not_take_large_sub_models_for_long_updates() -> None:
    deltas = np.random.default_rng(0).normal(size=(8, 400)).astype(np.float32)
    deltas[7] *= 5
    updates = updates_of(deltas, levels(8, 400))  # the last is of the smallest size
    factors = AdaptiveClipping(f=1).mixing(updates, None, np.random.default_rng(0))
    assert factors.argmin() == 7
    assert bool((factors[:7] == 1).all())


def test_mixing_with_the_nearest_goes_by_what_two_clients_share() -> None:
    deltas = np.array([[0.0, 0, 0, 0], [0.1, 0, 0, 0], [0.1, 0.1, 0, 0], [1, 1, 0, 0]], np.float32)
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]], bool)
    updates = updates_of(deltas, mask, reference=np.zeros(4, np.float32))
    mixing = NearestNeighbourMixing(f=1).mixing(updates, None, np.random.default_rng(0))
    assert (mixing[:3, 3] == 0).all()
    assert (mixing[3] > 0).tolist() == [False, True, True, True]
