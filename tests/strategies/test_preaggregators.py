"""Steps before a rule; each comment names the trap that a value guards against."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from fedplat import updates as updates_module
from fedplat.arrays import FlatArrays, Layout
from fedplat.strategies.aggregators import Aggregate, Aggregator, InfeasibleError, mean, median
from fedplat.strategies.aggregators.mixing import (
    adaptive_bound,
    bucketing,
    clip_factors,
    mixed,
    nearest_neighbours,
)
from fedplat.strategies.baselines import MeanRule, MedianRule, TrimmedMeanRule
from fedplat.strategies.fed_credit import FedCredit
from fedplat.strategies.preaggregators import (
    AdaptiveClipping,
    Bucketing,
    Clipping,
    NearestNeighbourMixing,
    PreAggregator,
    Preprocessed,
)
from fedplat.strategies.robust import GeometricMedianRule, krum_rule
from fedplat.updates import ClientUpdates
from fedplat.verdicts import HONEST

STEPS = {
    "bucketing": Bucketing(size=2),
    "mixing": NearestNeighbourMixing(f=2),
    "clipping": Clipping(bound=3.0),
    "adaptive clipping": AdaptiveClipping(f=2),
}


@pytest.fixture(params=list(STEPS))
def step(request: pytest.FixtureRequest) -> PreAggregator:
    return STEPS[request.param]


def matrix(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32))


def updates_of(
    deltas: torch.Tensor, reference: torch.Tensor | float = 0.0, counts: list[int] | None = None
) -> ClientUpdates:
    n, d = deltas.shape
    layout = Layout.of({"w": ((d,), "float32")})
    side = np.zeros(0, np.uint8)
    sent = torch.as_tensor(reference).expand(d).float().contiguous()
    models = [FlatArrays(layout, (sent + row).numpy(), side) for row in deltas]
    nodes = range(100, 100 + n)
    return ClientUpdates.stack(models, FlatArrays(layout, sent.numpy(), side), nodes, counts or [1] * n)


class Echo(Aggregator):
    """Takes its first row, and scores and judges every row."""

    f: int | None = None

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        self.seen = updates
        first = torch.arange(len(updates)) == 0
        rows = torch.arange(len(updates), dtype=torch.float64)
        verdicts = dict.fromkeys(range(len(updates)), HONEST)
        return Aggregate(updates.params[0], first.double(), first, verdicts, {"x": 1.0}, {"row": rows})


# Pure functions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "size", "sizes"), [(6, 2, [2, 2, 2]), (7, 3, [1, 3, 3]), (3, 5, [3])])
def test_buckets_hold_every_client_once_and_a_row_is_a_mean(n: int, size: int, sizes: list[int]) -> None:
    mixing = bucketing(n, size, np.random.default_rng(0))
    assert sorted((mixing > 0).sum(dim=1).tolist()) == sizes
    assert (mixing > 0).sum(dim=0).tolist() == [1] * n
    assert mixing.sum(dim=1).tolist() == pytest.approx([1] * len(sizes))


def test_buckets_follow_the_generator_and_differ_between_draws() -> None:
    draws = [bucketing(20, 2, np.random.default_rng(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    with pytest.raises(ValueError, match="at least one client"):
        bucketing(4, 0, np.random.default_rng(0))


def test_a_rule_that_used_nobody_still_used_nobody() -> None:
    class Nobody(Aggregator):
        def __call__(self, updates: ClientUpdates) -> Aggregate:
            n = len(updates)
            return Aggregate(updates.reference, torch.zeros(n).double(), torch.zeros(n, dtype=torch.bool))

    result = Preprocessed(Nobody(), [NearestNeighbourMixing(), Clipping()])(updates_of(matrix(5, 3)))
    assert result.weights.tolist() == [0] * 5
    assert not result.accepted.any()


@pytest.mark.parametrize(("n", "f"), [(5, 1), (9, 3), (8, 0)])
def test_nearest_neighbours_are_those_of_numpy(n: int, f: int) -> None:
    x = matrix(n, 30).numpy().astype(np.float64)
    near = np.linalg.norm(x[:, None] - x[None], axis=2).argsort(axis=1, kind="stable")[:, : n - f]
    ours = mixed(torch.from_numpy(x).float(), nearest_neighbours(torch.from_numpy(x).float(), f))
    np.testing.assert_allclose(ours, x[near].mean(axis=1), rtol=1e-5, atol=1e-6)


def test_a_client_is_its_own_nearest_neighbour_even_among_equals() -> None:
    # Trap: sorting distances alone would mix only the first two of five equal clients.
    mixing = nearest_neighbours(torch.ones(5, 3), 2)
    assert bool((mixing.diagonal() > 0).all())
    assert mixing.sum(dim=1).tolist() == pytest.approx([1] * 5)


def test_distances_between_models_do_not_cancel() -> None:
    # Trap: in float32, a·a + b·b − 2a·b puts these models at distances of zero and below.
    x = (4096 + torch.tensor([0, 0.5, 1.25, 1, 8]))[:, None].repeat(1, 4)
    assert (nearest_neighbours(x, 2) > 0).tolist() == [
        [True, True, False, True, False],
        [True, True, False, True, False],
        [False, True, True, True, False],
        [False, True, True, True, False],
        [False, False, True, True, True],
    ]


@pytest.mark.parametrize(("n", "f"), [(4, 2), (1, 1), (5, -1)])
def test_mixing_and_adaptive_clipping_need_an_honest_majority(n: int, f: int) -> None:
    for function in (nearest_neighbours, lambda x, f: adaptive_bound(x.norm(dim=1), f)):
        with pytest.raises(InfeasibleError, match=f"must be less than n = {n}"):
            function(matrix(n, 3), f)


def test_clipping_leaves_short_and_zero_updates_alone() -> None:
    # Trap: bound / 0 is infinite, and infinity times zero is NaN.
    assert clip_factors(torch.tensor([0.0, 1.0, 2.0, 8.0]), 2.0).tolist() == [1, 1, 1, 0.25]
    assert clip_factors(torch.tensor([0.0, 3e38]), float("inf")).tolist() == [1, 1]
    assert clip_factors(torch.tensor([0.0, 5.0]), 0.0).tolist() == [1, 0]
    for bound in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="must not be negative"):
            clip_factors(torch.ones(2), bound)


@pytest.mark.parametrize(
    ("norms", "f", "bound"),
    [
        ([1, 2, 3, 4, 5], 1, 4),  # floor(2·1·4/5) = 1 clipped
        ([5, 1, 4, 2, 3], 2, 3),  # floor(2·2·3/5) = 2 clipped
        ([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], 3, 5),  # floor(2·3·7/10) = 4 clipped
        ([1, 2, 3], 0, 3),
        ([7], 0, 7),
    ],
)
def test_adaptive_bound_by_hand(norms: list[float], f: int, bound: float) -> None:
    assert adaptive_bound(torch.tensor(norms, dtype=torch.float64), f) == bound


def test_the_number_of_clipped_updates_is_counted_in_whole_numbers() -> None:
    # Trap: int((2 * 33 / 242) * (242 - 33)) is 56, but 2·33·209/242 is exactly 57.
    assert adaptive_bound(torch.arange(1.0, 243.0), 33) == 242 - 57


def test_mixing_is_the_same_in_chunks_and_moves_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    x, mixing = matrix(6, 50), nearest_neighbours(matrix(6, 50), 2)
    expected = mixing.numpy() @ x.numpy().astype(np.float64)
    for _ in range(2):
        np.testing.assert_allclose(mixed(x, mixing), expected, rtol=1e-6, atol=1e-7)
        factors = torch.linspace(0, 1, 6, dtype=torch.float64)
        scaled = mixed(x + 100, factors, torch.full((50,), 100.0)) - 100
        np.testing.assert_allclose(scaled, factors[:, None] * x, atol=3e-5)
        monkeypatch.setattr(updates_module, "_CHUNK_ELEMENTS", 20)


def test_a_mean_of_sub_models_is_over_those_who_trained_an_element() -> None:
    # Trap: filling the untrained elements with zeros gives [2, 1] here; 3 is what nobody trained.
    x = torch.tensor([[4.0, 2.0, 9.0], [9.0, 4.0, 9.0]]) + 100
    coverage = torch.tensor([[True, True, False], [False, True, False]])
    sent = torch.full((3,), 100.0)
    half = torch.full((1, 2), 0.5, dtype=torch.float64)
    assert mixed(x, half, sent, coverage).tolist() == [[104, 103, 100]]
    new = Preprocessed(Echo(), [Bucketing(size=2)])
    new(replace(updates_of(x - 100, 100.0), coverage=coverage))
    assert new.rule.seen.params.tolist() == [[104, 103, 100]]
    assert new.rule.seen.coverage.tolist() == [[True, True, False]]


# Rules behind steps ------------------------------------------------------------------------------------


def test_trimmed_mean_after_mixing_agrees_with_numpy() -> None:
    x, f = matrix(9, 60), 2
    exact = x.numpy().astype(np.float64)
    near = np.linalg.norm(exact[:, None] - exact[None], axis=2).argsort(axis=1)[:, : 9 - f]
    expected = stats.trim_mean(exact[near].mean(axis=1), f / 9 + 1e-9, axis=0)
    rule = Preprocessed(TrimmedMeanRule(f / 9), [NearestNeighbourMixing(f=f)])
    np.testing.assert_allclose(rule(updates_of(x)).vector, expected, rtol=1e-5, atol=1e-6)


def test_the_mean_after_adaptive_clipping_by_hand() -> None:
    # Lengths 5, 1, 10 about the model sent; with f = 1, ⌊2·1·2/3⌋ = 1 is clipped, to 5.
    deltas = torch.tensor([[3.0, 4.0], [0.0, 1.0], [6.0, 8.0]])
    result = Preprocessed(MeanRule(weighted=False), [AdaptiveClipping(f=1)])(updates_of(deltas, 100.0))
    np.testing.assert_allclose(result.vector, (102, 103), rtol=1e-6)
    np.testing.assert_allclose(result.weights, (0.4, 0.4, 0.2), rtol=1e-6)
    assert result.diagnostics["clipped"] == 1


def test_krum_after_buckets_uses_more_than_one_of_different_honest_clients() -> None:
    # On very different honest clients Krum follows one of them; buckets of two bring the mean nearer.
    honest = 5 * torch.eye(12, 30) + 1
    plain, bucketed = krum_rule(1, 1), Preprocessed(krum_rule(1, 1), [Bucketing(size=2)], seed=4)
    target = honest.mean(dim=0)
    far = (plain(updates_of(honest)).vector - target).norm()
    result = bucketed(updates_of(honest))
    assert (result.vector - target).norm() < 0.75 * far
    assert result.weights.tolist().count(0.5) == 2
    assert int(result.accepted.sum()) == 2


def test_a_bucket_keeps_the_weights_of_the_mean() -> None:
    x, counts = matrix(6, 20), [1, 2, 3, 4, 5, 6]
    result = Preprocessed(MeanRule(weighted=True), [Bucketing(size=3)], seed=1)(updates_of(x, counts=counts))
    torch.testing.assert_close((result.weights @ x.double()).float(), result.vector)
    assert result.weights.sum().item() == pytest.approx(1)


@pytest.mark.parametrize(
    "rule", [krum_rule(2, 1), krum_rule(2, 3), MedianRule(), MeanRule(True), GeometricMedianRule(1e-6)]
)
@pytest.mark.parametrize("nothing", [Bucketing(size=1), Clipping(bound=float("inf")), AdaptiveClipping(f=0)])
def test_a_step_that_changes_nothing_leaves_the_rule_bit_equal(rule, nothing) -> None:
    updates = updates_of(matrix(9, 40), 0.3, list(range(1, 10)))
    plain, behind = rule(updates), Preprocessed(rule, [nothing])(updates)
    assert torch.equal(plain.vector, behind.vector)
    torch.testing.assert_close(plain.weights, behind.weights, rtol=1e-15, atol=0)
    assert torch.equal(plain.accepted, behind.accepted)


def test_mixing_that_suspects_nobody_gives_the_mean_behind_any_rule() -> None:
    x = matrix(7, 30)
    for rule in (krum_rule(0, 1), MedianRule(), GeometricMedianRule(1e-6)):
        result = Preprocessed(rule, [NearestNeighbourMixing(f=0)])(updates_of(x))
        torch.testing.assert_close(result.vector, mean(x).vector, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result.weights, 1 / 7)


@pytest.mark.parametrize("name", ["mixing", "clipping", "adaptive clipping"])
def test_order_of_clients_does_not_matter(name: str) -> None:
    x = matrix(9, 40) * torch.linspace(0.2, 2, 9)[:, None]
    order = torch.from_numpy(np.random.default_rng(3).permutation(9))
    rule = Preprocessed(krum_rule(2, 1), [STEPS[name]])
    one, other = rule(updates_of(x)), rule(updates_of(x[order]))
    torch.testing.assert_close(one.vector, other.vector, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.weights[order], other.weights, rtol=1e-5, atol=1e-6)


def test_inputs_stay_and_a_second_call_is_equal(step: PreAggregator) -> None:
    # Trap: ByzFL's Clipping and ARC write into the vectors they are given.
    updates = updates_of(10 * matrix(9, 40), 0.5)
    before, sent = updates.params.clone(), updates.reference.clone()
    rule = Preprocessed(MedianRule(), [step], seed=3)
    first, second = rule(updates), rule(updates)
    assert torch.equal(updates.params, before)
    assert torch.equal(updates.reference, sent)
    assert torch.equal(first.vector, second.vector)
    assert torch.equal(first.weights, second.weights)
    assert not torch.equal(first.vector, MedianRule()(updates).vector)


def test_equal_clients_and_a_single_client_give_that_update(step: PreAggregator) -> None:
    x = 0.1 * matrix(1, 30)
    for n in (1, 7):
        result = Preprocessed(MedianRule(), [step])(updates_of(x.repeat(n, 1)))
        torch.testing.assert_close(result.vector, x[0])
        assert result.weights.sum().item() == pytest.approx(1)


def test_shares_say_what_the_new_model_is_made_of() -> None:
    x = matrix(10, 50)
    steps = [NearestNeighbourMixing(f=2), Bucketing(size=3)]
    result = Preprocessed(krum_rule(0, 2), steps, seed=2)(updates_of(x))
    torch.testing.assert_close((result.weights @ x.double()).float(), result.vector, rtol=1e-5, atol=1e-6)


def test_an_update_clipped_to_nothing_still_has_a_share() -> None:
    # Most updates are zero, so the adaptive bound is 0 and Echo's client is clipped to nothing.
    x = torch.tensor([[1.0], [0.0], [0.0]])
    result = Preprocessed(Echo(), [AdaptiveClipping(f=1)])(updates_of(x))
    assert result.vector.tolist() == [0]
    assert result.weights.tolist() == [1, 0, 0]


def test_what_a_rule_sees_of_buckets_makes_sense() -> None:
    rule = Echo()
    counts = [1, 2, 4, 8, 16, 32, 64]
    result = Preprocessed(rule, [Bucketing(size=3)], seed=7)(updates_of(matrix(7, 5), counts=counts))
    seen, rows = rule.seen, result.scores["row"].tolist()
    assert len(seen) == 3
    for row in range(3):
        members = [i for i in range(7) if rows[i] == row]
        assert seen.node_ids[row] == 100 + members[0]
        assert seen.num_examples[row] == sum(counts[i] for i in members)
    np.testing.assert_allclose(seen.update_norms, seen.deltas().norm(dim=1), rtol=1e-5)
    assert result.verdicts == {}
    assert result.diagnostics == {"x": 1.0}


def test_verdicts_and_scores_stay_with_their_clients_where_rows_are_clients() -> None:
    for before in ([NearestNeighbourMixing(f=2)], [Clipping(bound=0.1), NearestNeighbourMixing()]):
        result = Preprocessed(Echo(), before)(updates_of(matrix(5, 6)))
        assert result.verdicts == dict.fromkeys(range(5), HONEST)
        assert result.scores["row"].tolist() == [0, 1, 2, 3, 4]


def test_buckets_change_from_round_to_round_but_not_with_the_seed_and_round() -> None:
    updates = updates_of(matrix(12, 5))
    rule = Preprocessed(krum_rule(1, 1), [Bucketing(size=2)], seed=5)
    one, again, later = (rule(replace(updates, server_round=r)).weights for r in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, later)


@pytest.mark.parametrize(
    ("rule", "before", "n", "words"),
    [
        (krum_rule(2, 1), [Bucketing(size=2)], 12, "2f + 2 = 6 must be less than n = 6"),
        (krum_rule(2, 1), [Bucketing(size=3)], 14, "2f + 2 = 6 must be less than n = 5"),
        (MedianRule(), [NearestNeighbourMixing(f=4)], 8, "2f = 8 must be less than n = 8"),
        (MedianRule(), [Bucketing(size=2), NearestNeighbourMixing(f=4)], 16, "less than n = 8"),
        (MedianRule(), [AdaptiveClipping(f=5)], 9, "2f = 10 must be less than n = 9"),
        (FedCredit().aggregator, [Bucketing(size=2)], 9, "remembers clients"),
    ],
)
def test_what_cannot_work_is_refused_before_training(rule, before, n: int, words: str) -> None:
    with pytest.raises(InfeasibleError) as error:
        Preprocessed(rule, before).check(n)
    assert words in str(error.value)


def test_what_can_work_is_not_refused() -> None:
    # ⌈13/2⌉ = 7 buckets are enough for Krum with f = 2; 6 would not be.
    Preprocessed(krum_rule(2, 1), [Bucketing(size=2)]).check(13)
    Preprocessed(FedCredit().aggregator, [Bucketing(size=1), AdaptiveClipping()]).check(3)
    Preprocessed(MedianRule(), list(STEPS.values())).check(10)


def test_a_step_takes_the_f_of_its_rule_then_the_most_that_fits() -> None:
    x = matrix(9, 20)
    told = Preprocessed(krum_rule(1, 1), [NearestNeighbourMixing()])(updates_of(x))
    same = Preprocessed(krum_rule(1, 1), [NearestNeighbourMixing(f=1)])(updates_of(x))
    assert torch.equal(told.vector, same.vector)
    most = Preprocessed(MedianRule(), [NearestNeighbourMixing()])(updates_of(x))
    four = Preprocessed(MedianRule(), [NearestNeighbourMixing(f=4)])(updates_of(x))
    assert torch.equal(most.vector, four.vector)


def test_a_short_round_uses_the_f_that_still_fits() -> None:
    x = matrix(5, 20)
    for kind in (NearestNeighbourMixing, AdaptiveClipping):
        short = Preprocessed(MedianRule(), [kind(f=4)])(updates_of(x))
        assert torch.equal(short.vector, Preprocessed(MedianRule(), [kind(f=2)])(updates_of(x)).vector)


def test_state_and_buffers_are_those_of_the_rule() -> None:
    rule = Preprocessed(FedCredit().aggregator, [Clipping(bound=1.0)])
    updates = updates_of(matrix(5, 6), 1.0)
    aggregate = rule(updates)
    restored = Preprocessed(FedCredit().aggregator, [Clipping(bound=1.0)])
    restored.load_state_dict(rule.state_dict())
    assert torch.equal(rule(updates).vector, restored(updates).vector)
    assert rule.state_bytes(5, 6) == rule.rule.state_bytes(5, 6) > 0
    expected = (aggregate.weights @ updates.params.double()).float()
    assert torch.equal(rule.buffers(updates, aggregate), expected)
    behind = Preprocessed(MedianRule(), [Bucketing(size=2)])
    assert torch.equal(behind.buffers(updates, behind(updates)), median(updates.params).vector)


def test_mixing_and_clipping_bring_a_rule_nearer_the_honest_mean_under_attack() -> None:
    # Honest clients of three kinds, two clients that pull far away from all of them.
    kinds = 3 * matrix(3, 60, 5)
    honest = kinds.repeat(3, 1) + 0.1 * matrix(9, 60)
    attacked = torch.cat([honest, -8 * honest[:2]])
    target, updates = honest.mean(dim=0), updates_of(attacked)

    def miss(rule: Aggregator) -> float:
        return float((rule(updates).vector - target).norm())

    assert miss(Preprocessed(krum_rule(2, 1), [NearestNeighbourMixing(f=2)])) < 0.6 * miss(krum_rule(2, 1))
    assert miss(Preprocessed(MedianRule(), [NearestNeighbourMixing(f=2)])) < miss(MedianRule())
    plain = MeanRule(weighted=False)
    assert miss(Preprocessed(plain, [AdaptiveClipping(f=2)])) < 0.4 * miss(plain)
    assert miss(Preprocessed(plain, [Clipping(bound=20.0)])) < 0.4 * miss(plain)
