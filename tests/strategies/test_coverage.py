"""What every registered rule owes clients with sub-models, and NumPy loops over the simplest of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedplat import updates as updates_module
from fedplat.arrays import FlatArrays, Layout
from fedplat.registry import entries
from fedplat.strategies.aggregators import (
    Aggregate,
    Aggregator,
    bulyan,
    krum,
    mean,
    median,
    multi_krum,
    trimmed_mean,
    weighted_median,
)
from fedplat.strategies.aggregators.coordinatewise import mean_around_median
from fedplat.strategies.aggregators.coverage import (
    Covered,
    covered_cosines,
    covered_distances,
    covered_step,
    pair_sums,
    peer_cosines,
)
from fedplat.strategies.aggregators.distances import squared_distances
from fedplat.updates import ClientUpdates

# Those that train on the server take part in tests/strategies/test_fedconv*.py.
NAMES = sorted(entries("strategies").keys() - {"fedconv-weights", "server-alone"})
# Samples and noise are drawn for so many elements, so that more elements give other numbers.
SETTINGS = {"signguard": {"sample": 1.0}, "flame": {"noise": 0.0}, "mud-hog": {"warmup": 0, "min_samples": 3}}
N, D = 11, 60


def rule_of(name: str, dim: int = D) -> Aggregator:
    target, settings = entries("strategies")[name].load(), SETTINGS.get(name, {})
    if name != "fltrust":
        return target(**settings).aggregator
    rule = target(lambda record, server_round: record).aggregator
    trained = np.random.default_rng(9).normal(size=dim).astype(np.float32)
    rule.root = torch.from_numpy(trained)
    return rule


def updates_of(
    deltas: np.ndarray, mask: np.ndarray | None, seed: int = 0, reference: np.ndarray | None = None
) -> ClientUpdates:
    """Updates from a random model; where the mask is false a row has the model's own value."""
    n, d = deltas.shape
    if reference is None:
        reference = np.random.default_rng(100 + seed).normal(size=d).astype(np.float32)
    params = (reference + deltas).astype(np.float32)
    if mask is not None:
        params = np.where(mask, params, reference)
    layout = Layout.of({"w": ((d,), "float32")})
    side = np.zeros(0, np.uint8)
    models = [FlatArrays(layout, row, side) for row in params]
    coverage = None if mask is None else torch.from_numpy(mask)
    nodes, counts = list(range(50, 50 + n)), list(range(3, 3 + n))
    return ClientUpdates.stack(models, FlatArrays(layout, reference, side), nodes, counts, coverage)


def crowd(n: int = N, d: int = D, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=d) + 0.5 * rng.normal(size=(n, d))).astype(np.float32)


def masks(n: int = N, d: int = D, seed: int = 0, share: float = 0.6) -> np.ndarray:
    mask = np.random.default_rng(1000 + seed).random((n, d)) < share
    mask[:, 0], mask[:, -4:], mask[0, -4:] = True, False, False
    mask[4, -2] = True  # of the last four elements three are nobody's and one is client 4's alone
    return mask


def prefixes(n: int = N, d: int = D) -> np.ndarray:
    """Nested sub-models of three sizes."""
    return np.arange(d) < np.array([d, d // 2, d // 4])[np.arange(n) % 3][:, None]


def with_an_empty_one() -> np.ndarray:
    mask = masks()
    mask[6] = False
    return mask


def run(name: str, rounds: list[ClientUpdates], dim: int = D) -> list[Aggregate]:
    rule = rule_of(name, dim)
    return [rule(replace(updates, server_round=i)) for i, updates in enumerate(rounds, 1)]


# What holds for all rules ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_of_everything_is_no_mask_bit_for_bit(name: str) -> None:
    full = np.ones((N, D), bool)
    plain = run(name, [updates_of(crowd(seed=i), None, i) for i in range(3)])
    masked = run(name, [updates_of(crowd(seed=i), full, i) for i in range(3)])
    for one, other in zip(plain, masked, strict=True):
        assert torch.equal(one.vector, other.vector)
        assert torch.equal(one.weights, other.weights)
        assert one.verdicts == other.verdicts


@pytest.mark.parametrize("name", NAMES)
def test_elements_that_nobody_covers_change_nothing_elsewhere_and_keep_every_bit(name: str) -> None:
    more = 17
    plain, padded = [], []
    for i in range(3):
        deltas, rng = crowd(seed=i), np.random.default_rng(i)
        reference = rng.normal(size=D + more).astype(np.float32)
        reference[D : D + 3] = -0.0, 1e-42, 3e38
        wide = np.concatenate([deltas, rng.normal(size=(N, more)).astype(np.float32)], axis=1)
        mask = np.repeat(np.arange(D + more)[None] < D, N, axis=0)
        plain.append(updates_of(deltas, None, reference=reference[:D]))
        padded.append(updates_of(wide, mask, reference=reference))
    rule, wider = rule_of(name), rule_of(name)
    if name == "fltrust":
        wider.root = torch.cat([rule.root, torch.ones(more)])
    for i, (one, other) in enumerate(zip(plain, padded, strict=True), 1):
        a, b = rule(replace(one, server_round=i)), wider(replace(other, server_round=i))
        torch.testing.assert_close(b.vector[:D], a.vector, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(b.weights, a.weights, rtol=1e-5, atol=1e-5)
        assert b.verdicts == a.verdicts
        assert torch.equal(b.accepted, a.accepted)
        assert b.vector[D:].numpy().tobytes() == other.reference[D:].numpy().tobytes()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", [masks, prefixes, with_an_empty_one])
def test_what_only_some_cover_stays_finite_within_their_range_and_else_as_it_was(name: str, make) -> None:
    mask = make()
    rounds = [updates_of(crowd(seed=i), mask, i) for i in range(3)]
    before = [(u.params.clone(), u.reference.clone()) for u in rounds]
    nobody = ~mask.any(axis=0)
    for updates, result, (params, reference) in zip(rounds, run(name, rounds), before, strict=True):
        assert result.vector.isfinite().all()
        assert result.weights.isfinite().all()
        assert float(result.weights.sum()) == pytest.approx(1)
        assert bool((result.weights >= 0).all())
        kept = result.vector.numpy()[nobody].tobytes()
        assert kept == updates.reference.numpy()[nobody].tobytes()
        assert torch.equal(updates.params, params)
        assert torch.equal(updates.reference, reference)
        # Of the others, two make values of their own, and one makes updates longer.
        if name not in ("sign-vote", "residual-reweighting", "fltrust"):
            both = np.concatenate([updates.params.numpy(), updates.reference.numpy()[None]])
            assert bool((result.vector.numpy() >= both.min(axis=0) - 1e-4).all())
            assert bool((result.vector.numpy() <= both.max(axis=0) + 1e-4).all())


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"flame", "signguard"}))
def test_the_order_of_clients_with_their_masks_does_not_matter(name: str) -> None:
    # Left out are rules whose clusters may depend on the order of equally near clients.
    order = np.random.default_rng(5).permutation(N)
    mask, deltas = masks(), crowd()
    plain = updates_of(deltas, mask)
    turned = updates_of(deltas[order], mask[order])
    turned = replace(turned, node_ids=plain.node_ids[order], num_examples=plain.num_examples[order])
    a, b = run(name, [plain])[0], run(name, [turned])[0]
    torch.testing.assert_close(b.vector, a.vector, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(b.weights, a.weights[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_short_round_of_sub_models_moves_what_they_cover_and_no_more(name: str, n: int) -> None:
    mask = np.arange(D) < np.array([[D // 2], [D // 3], [D // 4]])[:n]
    updates = updates_of(crowd(n), mask)
    result = run(name, [updates])[0]
    assert result.vector.isfinite().all()
    assert not torch.equal(result.vector[: D // 4], updates.reference[: D // 4])
    assert torch.equal(result.vector[D // 2 :], updates.reference[D // 2 :])


@pytest.mark.parametrize("name", NAMES)
def test_the_width_of_chunks_does_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [updates_of(crowd(seed=i), masks(), i) for i in range(2)]
    one = run(name, rounds)
    monkeypatch.setattr(updates_module, "_CHUNK_ELEMENTS", 7 * N)
    for a, b in zip(one, run(name, rounds), strict=True):
        torch.testing.assert_close(b.vector, a.vector, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(b.weights, a.weights, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "name",
    ["mean", "median", "trimmed-mean", "meamed", "geometric-median", "rfa", "fed-credit"],
)
def test_where_one_client_covers_the_new_value_is_its_own(name: str) -> None:
    updates = updates_of(crowd(), masks())
    vector = run(name, [updates])[0].vector
    assert vector[-2] == updates.params[4, -2] != updates.reference[-2]


@pytest.mark.parametrize("name", NAMES)
def test_buffers_follow_those_who_cover_them(name: str) -> None:
    rule, updates = rule_of(name), updates_of(crowd(), prefixes())
    found = rule(updates)
    mask = np.zeros((N, D), bool)
    mask[:, :5], mask[::2, 5:10] = True, True
    buffers = rule.buffers(updates_of(crowd(seed=3), mask, 3), found)
    sent = updates_of(crowd(seed=3), mask, 3).reference
    assert buffers[10:].numpy().tobytes() == sent[10:].numpy().tobytes()
    assert not torch.equal(buffers[:5], sent[:5])


# Against loops -----------------------------------------------------------------------------------------


def column_wise(x: np.ndarray, mask: np.ndarray, kept: np.ndarray, of) -> np.ndarray:
    return np.array([of(x[m, j], m) if (m := mask[:, j]).any() else kept[j] for j in range(x.shape[1])])


def window(values: np.ndarray, keep: int) -> float:
    ordered, middle = np.sort(values), np.median(values)
    spans = [ordered[i : i + keep] for i in range(len(values) - keep + 1)]
    return min(spans, key=lambda s: max(middle - s[0], s[-1] - middle)).mean()


def loops(x: np.ndarray, mask: np.ndarray, kept: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    n = len(x)

    def trimmed(values: np.ndarray, trim: int) -> float:
        m = len(values)
        cut = min(-(-trim * m // n), (m - 1) // 2)
        return np.sort(values)[cut : m - cut].mean()

    def nearest(values: np.ndarray, keep: int) -> float:
        m = len(values)
        return window(values, max(-(-keep * m // n), 2 - m % 2))

    def repeated(values: np.ndarray, m: np.ndarray) -> float:
        return np.median(np.repeat(values, counts[m]))

    return {
        "mean": column_wise(x, mask, kept, lambda v, m: np.average(v, weights=counts[m])),
        "median": column_wise(x, mask, kept, lambda v, m: np.median(v)),
        "weighted median": column_wise(x, mask, kept, repeated),
        "trimmed": column_wise(x, mask, kept, lambda v, m: trimmed(v, 3)),
        "meamed": column_wise(x, mask, kept, lambda v, m: nearest(v, n - 4)),
        "few": column_wise(x, mask, kept, lambda v, m: nearest(v, 3)),
    }


@pytest.mark.parametrize("seed", range(4))
def test_rules_per_coordinate_agree_with_loops(seed: int) -> None:
    x, mask = crowd(seed=seed), masks(seed=seed, share=(0.3, 0.5, 0.7, 0.9)[seed])
    kept, counts = crowd(1, seed=77)[0], np.random.default_rng(seed).integers(1, 9, N)
    covered = Covered(torch.from_numpy(mask), torch.from_numpy(kept))
    t, w = torch.from_numpy(x), torch.from_numpy(counts)
    found = {
        "mean": mean(t, w, covered),
        "median": median(t, covered),
        "weighted median": weighted_median(t, w, covered),
        "trimmed": trimmed_mean(t, 3, covered),
        "meamed": mean_around_median(t, N - 4, covered=covered),
        "few": mean_around_median(t, 3, covered=covered),
    }
    for name, expected in loops(x.astype(np.float64), mask, kept, counts).items():
        np.testing.assert_allclose(found[name].vector, expected, rtol=1e-6, atol=1e-6, err_msg=name)


def loop_distances(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    n, d = x.shape
    squared = np.full((n, n), np.nan)
    for i in range(n):
        for j in range(n):
            both = mask[i] & mask[j]
            if i != j and both.any():
                squared[i, j] = ((x[i] - x[j])[both] ** 2).sum() * d / both.sum()
    squared[np.isnan(squared)] = np.nanmedian(squared)
    np.fill_diagonal(squared, 0)
    return squared


@pytest.mark.parametrize("seed", range(4))
def test_krum_agrees_with_loops_over_what_two_clients_share(seed: int) -> None:
    mask = masks(seed=seed, share=(0.1, 0.3, 0.5, 0.9)[seed])
    updates = updates_of(crowd(seed=seed), mask)
    x, kept = updates.params.double().numpy(), updates.reference
    squared, f = loop_distances(x, mask), 3
    covered = Covered.by(updates)
    np.testing.assert_allclose(squared_distances(updates.params, covered), squared, rtol=1e-9)
    scores = np.sort(squared + np.diag([np.inf] * N), axis=1)[:, : N - f - 2].sum(axis=1)
    best = int(scores.argmin())
    expected = np.where(mask[best], updates.params[best], kept)
    np.testing.assert_array_equal(krum(updates.params, f, covered).vector, expected)
    chosen = np.argsort(scores, kind="stable")[:5]
    several = column_wise(x[chosen], mask[chosen], kept.numpy(), lambda v, _: v.mean())
    np.testing.assert_allclose(multi_krum(updates.params, f, 5, covered).vector, several, rtol=1e-6)


def test_clients_without_anything_in_common_are_neither_near_nor_far() -> None:
    mask = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]], bool)
    x = torch.tensor([[0.0, 0, 0, 0], [2, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 3]])
    squared = squared_distances(x, Covered(torch.from_numpy(mask)))
    # Known: 4·2, 1·2, 1·2 and 9·2, of which the median is 5.
    assert squared.tolist() == [[0, 8, 2, 5], [8, 0, 2, 5], [2, 2, 0, 18], [5, 5, 18, 0]]
    alone = torch.eye(3, dtype=torch.bool)
    assert squared_distances(torch.eye(3), Covered(alone)).tolist() == torch.zeros(3, 3).tolist()


def test_bulyan_keeps_what_none_of_the_chosen_covers() -> None:
    deltas, mask = crowd(), np.ones((N, D), bool)
    deltas[7:9] += 50
    mask[:, 10], mask[7, 10] = False, True
    updates = updates_of(deltas, mask)
    result = bulyan(updates.params, 2, Covered.by(updates))
    assert not result.weights[7:9].any()
    assert result.vector[10] == updates.reference[10]


def test_sums_distances_and_cosines_agree_with_loops() -> None:
    x, mask, point = crowd(), masks(), crowd(1, seed=8)[0]
    covered, t, p = Covered(torch.from_numpy(mask)), torch.from_numpy(x), torch.from_numpy(point)
    away, alike = covered_distances(t, p, covered), covered_cosines(t, p, covered)
    pairs, peers = pair_sums(t, covered), peer_cosines(t, p, covered)

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    for i in range(N):
        own = mask[i]
        assert float(away[i]) == pytest.approx(np.linalg.norm((x[i] - point)[own]), rel=1e-6)
        assert float(alike[i]) == pytest.approx(cosine(x[i, own], point[own]), abs=1e-6)
        for j in range(N):
            both = own & mask[j]
            assert float(peers.cosines[i, j]) == pytest.approx(cosine(x[j, both], point[both]), abs=1e-6)
            assert float(pairs.cosines()[i, j]) == pytest.approx(cosine(x[i, both], x[j, both]), abs=1e-6)
    factors, weights = torch.rand(N).double(), torch.rand(N).double()
    expected = (factors.numpy() @ (x * mask)) / np.maximum(weights.numpy() @ mask, 1e-300)
    np.testing.assert_allclose(covered_step(t, factors, weights, covered), expected, rtol=1e-5, atol=1e-6)


def test_who_has_no_weight_is_not_read_and_what_only_it_covers_keeps_every_bit() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [torch.nan, torch.inf, 4.0]])
    mask = torch.tensor([[True, False, False], [True, True, False]])
    kept, weights = torch.tensor([9.0, -0.0, 1e-42]), torch.tensor([5.0, 0.0])
    covered = Covered(mask, kept)
    for vector in (
        mean(x, weights, covered).vector,
        weighted_median(x, weights, covered).vector,
        covered_step(x, weights.double(), weights.double(), covered),
    ):
        assert vector[0] == 1
        assert vector[1:].numpy().tobytes() == kept[1:].numpy().tobytes()
