from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedplat import updates as updates_module
from fedplat.strategies.aggregators import mean
from fedplat.strategies.aggregators.foolsgold import distinctness, foolsgold, pairwise_cosines
from fedplat.strategies.similarity import FoolsGold

from .test_fed_credit import updates

# Two sybils, a client at a cosine of 0.75 with them, and one that is opposed to all.
FOUR = torch.tensor([[1.0, 0], [1, 0], [0.75, math.sqrt(1 - 0.75**2)], [-1, 0]])


def matrix(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32))


def oracle(x: np.ndarray) -> np.ndarray:
    """FoolsGold's weights with plain loops, before they are scaled to sum to 1."""
    n = len(x)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    c = unit @ unit.T
    v = np.array([max(0.0, *(c[i, j] for j in range(n) if j != i)) for i in range(n)])
    p = c.copy()
    for i in range(n):
        for j in range(n):
            if v[j] > v[i]:
                p[i, j] = c[i, j] * v[i] / v[j]
    a = np.array([1 - max(0.0, *(p[i, j] for j in range(n) if j != i)) for i in range(n)])
    a = np.minimum(a / a.max(), 0.99)
    return np.clip(np.log(a / (1 - a)) + 0.5, 0, 1)


def test_sybils_get_nothing_and_distinct_clients_everything() -> None:
    x = torch.tensor([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    result = foolsgold(x)
    assert result.weights.tolist() == [0, 0, 0.5, 0.5]
    assert result.scores["distinctness"].tolist() == [0, 0, 1, 1]
    assert result.vector.tolist() == [0, 0.5, 0.5]
    assert result.accepted.tolist() == [False, False, True, True]


def test_pardoning_lets_a_client_count_that_resembles_sybils() -> None:
    # v = 1, 1, 0.75, 0: the third's cosines shrink to 0.75² and a = 0.4375. Trap: without pardoning a is 0.25
    # and ln(0.25 / 0.75) + 0.5 is below 0.
    third = math.log(0.4375 / 0.5625) + 0.5
    found = distinctness(pairwise_cosines(FOUR)).tolist()
    assert found == pytest.approx([0, 0, third, 1], abs=1e-6)
    expected = [0, 0, third / (1 + third), 1 / (1 + third)]
    assert foolsgold(FOUR).weights.tolist() == pytest.approx(expected, abs=1e-6)


def test_values_are_rescaled_by_the_largest_before_the_logit() -> None:
    # a = 0.1, 0.1, 0.2 becomes 0.5, 0.5, 1: ln 1 + 0.5 for the first two.
    # Trap: without rescaling all three would be below 0 and cut off.
    c = torch.tensor([[1, 0.9, 0.8], [0.9, 1, 0.8], [0.8, 0.8, 1]], dtype=torch.float64)
    v, pardoned = 0.9, 0.8 * 0.8 / 0.9
    a = [1 - v, 1 - v, 1 - pardoned]
    first = max(0.0, math.log(a[0] / (a[2] - a[0])) + 0.5)
    assert distinctness(c).tolist() == pytest.approx([first, first, 1], abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_weights_agree_with_plain_loops(seed: int) -> None:
    x = matrix(7, 5, seed) + 0.7
    np.testing.assert_allclose(distinctness(pairwise_cosines(x)), oracle(x.double().numpy()), atol=1e-9)


def test_cosines_agree_with_numpy_for_any_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    x = matrix(6, 50) + 100
    unit = x.double().numpy() / np.linalg.norm(x.double().numpy(), axis=1, keepdims=True)
    # Trap: sums in float32 blur the fourth decimal, in which these clients differ.
    np.testing.assert_allclose(pairwise_cosines(x), unit @ unit.T, rtol=0, atol=1e-12)
    monkeypatch.setattr(updates_module, "_CHUNK_ELEMENTS", 20)
    np.testing.assert_allclose(pairwise_cosines(x), unit @ unit.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_equal_clients_count_alike_and_give_their_update(n: int) -> None:
    # Trap: all weights are 0, and MUD-HoG's baseline answers 0/0 = NaN. One client has nobody to resemble.
    x = matrix(1, 30).repeat(n, 1)
    result = foolsgold(x)
    assert torch.equal(result.vector, x[0])
    assert result.weights.tolist() == pytest.approx([1 / n] * n)


def test_rounding_does_not_make_a_twin_distinct() -> None:
    # Trap: cosines of 1 − 1e-16 leave a = 1e-16, which rescaling by the largest would turn into 1.
    c = torch.full((3, 3), 1 - 1e-15, dtype=torch.float64)
    c[0, 1] = c[1, 0] = 1
    assert distinctness(c).tolist() == [0, 0, 0]


def test_clients_without_an_update_are_distinct_from_all_and_never_nan() -> None:
    result = foolsgold(torch.zeros(3, 4))
    assert result.vector.tolist() == [0] * 4
    assert result.weights.tolist() == pytest.approx([1 / 3] * 3)


def test_huge_updates_do_not_overflow() -> None:
    # Trap: the float32 square of 1e30 is infinite, and infinity over infinity is NaN.
    result = foolsgold(torch.cat([matrix(4, 20), torch.full((2, 20), 1e30)]))
    assert result.weights[4:].tolist() == [0, 0]
    assert bool(result.vector.isfinite().all())


def test_the_order_of_clients_does_not_matter_and_inputs_stay() -> None:
    x = matrix(9, 40) + 0.5
    before = x.clone()
    order = torch.from_numpy(np.random.default_rng(3).permutation(9))
    first, second = foolsgold(x), foolsgold(x)
    assert torch.equal(first.vector, second.vector)
    assert torch.equal(x, before)
    turned = foolsgold(x[order])
    torch.testing.assert_close(turned.weights, first.weights[order])
    torch.testing.assert_close(turned.vector, first.vector, rtol=1e-5, atol=1e-6)


START = torch.zeros(2)


def test_history_is_the_sum_of_updates_and_not_of_models() -> None:
    reference = torch.tensor([10.0, 20.0])
    rule = FoolsGold().aggregator
    for _ in range(2):
        rule(updates(FOUR + reference, reference=reference))
    kept = rule.state_dict()["history"]
    np.testing.assert_allclose(torch.stack([kept[str(i)] for i in range(4)]), 2 * FOUR, rtol=1e-5)


def test_history_sees_sybils_that_hide_in_a_single_round() -> None:
    # The sybils 0 and 1 are orthogonal in each round, but push to (1, 1, 0, 0) over two.
    first = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    second = torch.tensor([[0.0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    remembering, forgetting = FoolsGold().aggregator, FoolsGold(history=False).aggregator
    for x in (first, second):
        with_history = remembering(updates(x, reference=torch.zeros(4)))
        without = forgetting(updates(x, reference=torch.zeros(4)))
    assert with_history.weights.tolist() == [0, 0, 0.5, 0.5]
    assert without.weights.tolist() == [0.25] * 4


def test_history_belongs_to_the_node_and_survives_its_absence() -> None:
    a, b = FoolsGold().aggregator, FoolsGold().aggregator
    a(updates(FOUR, [5, 2**64 - 1, 7, 8], reference=START))
    a(updates(FOUR[:1], [7], reference=START))
    last = updates(FOUR[[3, 2, 0]], [8, 7, 5], reference=START)
    result = a(last)
    assert a.state_dict()["history"]["7"].tolist() == pytest.approx((2 * FOUR[2] + FOUR[0]).tolist())
    b.load_state_dict(
        {"history": {"8": FOUR[3].clone(), "7": FOUR[2] + FOUR[0], "5": FOUR[0].clone()}},
    )
    assert torch.equal(b(last).vector, result.vector)


def test_a_restored_rule_goes_on_as_if_it_had_never_stopped() -> None:
    rule, restored = FoolsGold().aggregator, FoolsGold().aggregator
    zero = torch.zeros(20)
    for seed in range(3):
        rule(updates(matrix(5, 20, seed) + 0.5, reference=zero))
    saved = rule.state_dict()
    restored.load_state_dict(saved)
    again = updates(matrix(5, 20, 9) + 0.5, reference=zero)
    expected = rule(again)
    # What was saved is a copy: the rule has gone on since.
    restored_result = restored(again)
    assert torch.equal(expected.vector, restored_result.vector)
    assert torch.equal(expected.weights, restored_result.weights)
    assert rule.state_bytes(5, 20) == sum(4 * total.numel() for total in saved["history"].values())


def test_without_history_nothing_is_kept() -> None:
    rule = FoolsGold(history=False).aggregator
    rule(updates(FOUR, reference=START))
    assert rule.state_dict() == {"history": {}}
    assert rule.state_bytes(5, 20) == 0


@pytest.mark.parametrize("history", [True, False])
def test_sybils_are_kept_out_where_the_mean_takes_them_in(history: bool) -> None:
    # Honest clients of different data; sybils share one goal and scale it.
    d, rule = 60, FoolsGold(history=history).aggregator
    goal = -3 * matrix(1, d, 99)[0]
    for seed in range(3):
        honest = matrix(7, d, 1) + 0.2 * matrix(7, d, seed + 2)
        attacked = torch.cat([honest, goal + 0.05 * matrix(4, d, seed + 50)])
        result = rule(updates(attacked, reference=torch.zeros(d)))
    assert result.weights[7:].max() < 0.02
    assert result.weights[:7].min() > 0.1
    target = honest.mean(0)
    assert (result.vector - target).norm() < 0.3 * (mean(attacked).vector - target).norm()
