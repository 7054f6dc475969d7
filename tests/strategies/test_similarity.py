from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord

from fedplat.arrays import LayoutError
from fedplat.registry import settings
from fedplat.strategies.aggregators import mean
from fedplat.strategies.aggregators.reputation import reputations
from fedplat.strategies.aggregators.trust import fltrust
from fedplat.strategies.similarity import RFFL, FLTrust

from ..flower_apps import record, replies_to
from .test_composed import START, SilentGrid, model
from .test_fed_credit import updates

ZERO = torch.zeros(2)
EAST, NORTH, WEST = torch.tensor([1.0, 0]), torch.tensor([0.0, 1]), torch.tensor([-1.0, 0])


def matrix(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, d)).astype(np.float32))


# Reputation (RFFL) ---------------------------------------------------------------------------------------


def test_reputations_by_hand() -> None:
    phi = torch.tensor([0.9, 0.9, 0.6, -0.4])
    # From zero: 0.05·phi, divided by its sum 0.1 → 0.45, 0.45, 0.3, −0.2; the last is below 1/12 and out.
    first, kept = reputations(torch.zeros(4), phi)
    assert kept.tolist() == [True, True, True, False]
    assert first.tolist() == pytest.approx([0.375, 0.375, 0.25, 0], abs=1e-6)
    # 0.95·0.375 + 0.05·1 = 0.40625 twice, 0.95·0.25 + 0.05·0 = 0.2375; together 1.05.
    second, _ = reputations(first[:3], torch.tensor([1.0, 1.0, 0.0]))
    assert second.tolist() == pytest.approx([0.40625 / 1.05, 0.40625 / 1.05, 0.2375 / 1.05], abs=1e-6)


def test_the_threshold_is_a_third_of_an_equal_share() -> None:
    shares = torch.tensor([0.47, 0.42, 0.11])
    assert reputations(shares, shares)[1].tolist() == [True, True, False]
    assert reputations(shares, shares, threshold=0.3)[1].tolist() == [True, True, True]


def test_without_any_agreement_nobody_is_judged() -> None:
    # Trap: dividing by a sum of 0 gives NaN, by a negative one it turns good into bad.
    for phi in (torch.zeros(3), torch.tensor([-0.9, -0.9, 0.5])):
        new, kept = reputations(torch.zeros(3), phi)
        assert new.tolist() == [0, 0, 0]
        assert bool(kept.all())


def test_the_first_round_weighs_by_samples_and_later_ones_by_reputation() -> None:
    rule = RFFL(clip=10.0).aggregator
    x = torch.stack([EAST, EAST, NORTH])
    first = rule(updates(x, counts=[1, 1, 2], reference=ZERO))
    assert first.weights.tolist() == [0.25, 0.25, 0.5]
    assert first.vector.tolist() == [0.5, 0.5]
    # All three agree with (1, 1) at 1/√2.
    assert first.scores["agreement"].tolist() == pytest.approx([0.5**0.5] * 3)
    second = rule(updates(x, counts=[1, 1, 2], reference=ZERO))
    assert second.weights.tolist() == pytest.approx([1 / 3] * 3)


def test_several_rounds_agree_with_numpy() -> None:
    n, d, rule = 6, 20, RFFL(clip=2.0).aggregator
    r, counts = np.zeros(n), np.arange(1, n + 1)
    for server_round in range(4):
        x = matrix(n, d, server_round) + 0.8
        result = rule(updates(x, counts=counts.tolist(), reference=torch.zeros(d)))
        rows = x.double().numpy()
        rows = rows * np.minimum(1, 2 / np.linalg.norm(rows, axis=1, keepdims=True))
        step = (counts / counts.sum() if server_round == 0 else r) @ rows
        np.testing.assert_allclose(result.vector, step, rtol=1e-5, atol=1e-6)
        phi = rows @ step / np.linalg.norm(rows, axis=1) / np.linalg.norm(step)
        r = 0.95 * r + 0.05 * phi
        r /= r.sum()
        assert r.min() > 1 / 3 / n  # nobody drops here
        np.testing.assert_allclose(result.scores["reputation"], n * r, rtol=1e-5)


def test_a_dropped_client_never_comes_back() -> None:
    # Trap: the authors' code goes on giving dropped clients 0.05·phi, so they regain weight.
    rule = RFFL().aggregator
    bad = torch.stack([EAST, EAST, EAST, WEST])
    rule(updates(bad, reference=ZERO))
    assert rule.dropped == {3}
    for _ in range(5):
        result = rule(updates(EAST.repeat(4, 1), reference=ZERO))
        assert result.weights[3] == 0
        assert not result.accepted[3]
        assert result.scores["reputation"][3] == 0
    assert result.diagnostics["dropped"] == 1


def test_if_only_dropped_clients_reply_the_model_and_its_buffers_stay() -> None:
    rule = RFFL().aggregator
    rule(updates(torch.stack([EAST, EAST, EAST, WEST]), reference=ZERO))
    alone = updates(NORTH[None], [3], reference=EAST)
    result = rule(alone)
    assert result.vector.tolist() == EAST.tolist()
    assert result.weights.tolist() == [0]
    # Trap: shares of zero would set BatchNorm's statistics to zero.
    assert rule.buffers(alone, result).tolist() == EAST.tolist()
    trusted = updates(EAST[None], [0], reference=NORTH)
    assert rule.buffers(trusted, rule(trusted)).tolist() == EAST.tolist()


def test_absent_clients_keep_their_reputation_and_newcomers_start_as_the_average() -> None:
    rule = RFFL().aggregator
    x = torch.stack([EAST, EAST, (EAST + NORTH) / 2, EAST])
    rule(updates(x, reference=ZERO))
    earned = dict(rule.reputation)
    assert sum(earned.values()) / 4 == pytest.approx(1)
    # Trap: a newcomer with a reputation of 0 would fall below the threshold at once.
    for _ in range(20):
        result = rule(updates(EAST.repeat(2, 1), [0, 9], reference=ZERO))
    assert rule.reputation[2] == earned[2]
    assert rule.dropped == set()
    assert result.weights.tolist() == pytest.approx([0.5, 0.5], abs=0.01)
    assert rule.reputation[0] == pytest.approx((earned[0] + 1) / 2, abs=0.02)


def test_updates_are_clipped() -> None:
    result = RFFL(clip=0.5).aggregator(updates(torch.stack([30 * EAST, 0.5 * NORTH]), reference=ZERO))
    assert result.vector.tolist() == pytest.approx([0.25, 0.25])


def test_one_client_and_equal_clients_give_their_update() -> None:
    for n in (1, 5):
        rule = RFFL(clip=100.0).aggregator
        for _ in range(3):
            result = rule(updates(matrix(1, 30).repeat(n, 1), reference=torch.zeros(30)))
            torch.testing.assert_close(result.vector, matrix(1, 30)[0])
            assert result.weights.tolist() == pytest.approx([1 / n] * n)
    still = RFFL().aggregator(updates(torch.ones(3, 4), reference=torch.ones(4)))
    assert still.vector.tolist() == [1] * 4


def test_the_order_of_clients_does_not_matter_for_reputations() -> None:
    x, first, second = matrix(7, 30) + 0.5, RFFL().aggregator, RFFL().aggregator
    order = torch.from_numpy(np.random.default_rng(1).permutation(7))
    before = x.clone()
    for _ in range(3):
        a = first(updates(x, reference=torch.zeros(30)))
        b = second(updates(x[order], order.tolist(), reference=torch.zeros(30)))
        torch.testing.assert_close(a.vector, b.vector)
        torch.testing.assert_close(a.weights[order], b.weights)
    assert torch.equal(x, before)


def test_a_restored_reputation_rule_goes_on_as_if_it_had_never_stopped() -> None:
    rule, restored = RFFL().aggregator, RFFL().aggregator
    nodes = [2**64 - 1, 3, 5, 7]
    for seed in range(3):
        x = torch.cat([matrix(3, 20, seed) + 1, matrix(1, 20, seed) - 1])
        rule(updates(x, nodes, reference=torch.zeros(20)))
    restored.load_state_dict(rule.state_dict())
    assert restored.dropped == {7}
    again = updates(matrix(4, 20, 9) + 1, nodes, reference=torch.zeros(20))
    a, b = rule(again), restored(again)
    assert torch.equal(a.vector, b.vector)
    assert torch.equal(a.scores["reputation"], b.scores["reputation"])


def test_reputation_shuts_out_turned_updates_where_the_mean_takes_them_in() -> None:
    d, rule = 50, RFFL(clip=100.0).aggregator
    for seed in range(3):
        honest = 0.1 * matrix(7, d, seed) + 0.2
        attacked = torch.cat([honest, -honest[:3]])
        result = rule(updates(attacked, reference=torch.zeros(d)))
    assert result.weights[7:].tolist() == [0, 0, 0]
    target = honest.mean(0)
    assert (result.vector - target).norm() < 0.3 * (mean(attacked).vector - target).norm()


# Trust (FLTrust) -----------------------------------------------------------------------------------------


def test_trust_by_hand() -> None:
    # Cosines with (0, 2): 0.6, 1, −1 → 0. All are brought to length 2: (1.6, 1.2) and (0, 2).
    x = torch.tensor([[8.0, 6.0], [0.0, 0.5], [0.0, -4.0]])
    result = fltrust(x, torch.tensor([0.0, 2.0]))
    assert result.scores["trust"].tolist() == pytest.approx([0.6, 1, 0])
    assert result.weights.tolist() == pytest.approx([0.375, 0.625, 0])
    assert result.accepted.tolist() == [True, True, False]
    # Trap: short updates are made longer too, not only long ones shorter.
    assert result.vector.tolist() == pytest.approx([0.6, 0.375 * 1.2 + 0.625 * 2])


def test_trust_agrees_with_numpy() -> None:
    x, root = matrix(8, 40) + 0.3, matrix(1, 40, 5)[0] + 0.3
    rows, g = x.double().numpy(), root.double().numpy()
    lengths = np.linalg.norm(rows, axis=1)
    trust = np.maximum(0, rows @ g / lengths / np.linalg.norm(g))
    expected = (trust / trust.sum()) @ (rows * np.linalg.norm(g) / lengths[:, None])
    np.testing.assert_allclose(fltrust(x, root).vector, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("root", [NORTH, torch.zeros(2)])
def test_if_nobody_is_trusted_nothing_moves_and_nothing_is_nan(root: torch.Tensor) -> None:
    result = fltrust(torch.stack([-NORTH, EAST, ZERO]), root)
    assert result.vector.tolist() == [0, 0]
    assert result.weights.tolist() == [0, 0, 0]
    assert not result.accepted.any()


def test_trusted_updates_never_move_the_model_further_than_the_root_does() -> None:
    x = torch.cat([matrix(5, 20) + 0.5, 1e30 * (matrix(2, 20) + 0.5), torch.zeros(1, 20)])
    root = 0.1 * torch.ones(20)
    result = fltrust(x, root)
    assert float(result.vector.norm()) <= float(root.norm()) * (1 + 1e-6)
    assert result.weights[7] == 0


def test_clients_equal_to_the_root_give_its_update_in_any_order_and_inputs_stay() -> None:
    x, root = matrix(7, 30), matrix(1, 30)[0]
    torch.testing.assert_close(fltrust(root.repeat(4, 1), root).vector, root)
    torch.testing.assert_close(fltrust(root[None], root).vector, root)
    before, order = x.clone(), torch.from_numpy(np.random.default_rng(1).permutation(7))
    first = fltrust(x, root)
    assert torch.equal(first.vector, fltrust(x, root).vector)
    torch.testing.assert_close(first.vector, fltrust(x[order], root).vector, rtol=1e-5, atol=1e-6)
    assert torch.equal(x, before)


def plus_one(arrays: ArrayRecord, server_round: int) -> ArrayRecord:
    return record(**{name: array.numpy() + np.float32(1) for name, array in arrays.items()})


def messages_of(strategy: FLTrust, nodes: list[int], server_round: int = 1):
    return strategy.configure_train(server_round, record(**START), ConfigRecord(), SilentGrid(nodes))


def test_the_root_is_trained_every_round_on_the_model_that_is_sent() -> None:
    seen = []

    def root(arrays: ArrayRecord, server_round: int) -> ArrayRecord:
        seen.append((server_round, {name: array.numpy().tolist() for name, array in arrays.items()}))
        return plus_one(arrays, server_round)

    strategy = FLTrust(root)
    for server_round in (1, 2):
        messages = messages_of(strategy, [11, 12], server_round)
        assert len(list(messages)) == 2
    assert seen == [(n, {"w": [0, 0], "b": [0]}) for n in (1, 2)]


def test_flower_replies_are_trusted_as_the_root_says() -> None:
    # The root update is (1, 1, 1); the opposite is not trusted, the long one is cut to the root's length.
    strategy = FLTrust(plus_one)
    models = {11: model(0.5), 12: model(-3), 13: model(40)}
    arrays, _ = strategy.aggregate_train(1, replies_to(messages_of(strategy, list(models)), models))
    assert arrays is not None
    assert arrays["w"].numpy().tolist() == pytest.approx([1, 1])
    assert [report.weight for report in strategy.reports] == pytest.approx([0.5, 0, 0.5])
    assert strategy.diagnostics["root norm"] == pytest.approx(3**0.5)
    assert strategy.diagnostics["trusted"] == 2


def test_buffers_of_the_root_do_not_count_and_those_of_untrusted_clients_are_not_taken() -> None:
    start = {"bn.running_mean": np.ones(1, np.float32), "w": np.zeros(2, np.float32)}

    def root(arrays: ArrayRecord, server_round: int) -> ArrayRecord:
        return record(**{"bn.running_mean": np.array([500], np.float32), "w": np.ones(2, np.float32)})

    strategy = FLTrust(root)
    for w, expected in ((3, 9), (-3, 1)):
        messages = strategy.configure_train(1, record(**start), ConfigRecord(), SilentGrid([11]))
        reply = {"bn.running_mean": np.array([9], np.float32), "w": np.full(2, w, np.float32)}
        arrays, _ = strategy.aggregate_train(1, replies_to(messages, {11: record(**reply)}))
        assert arrays is not None
        assert strategy.diagnostics["root norm"] == pytest.approx(2**0.5)
        assert arrays["bn.running_mean"].numpy().tolist() == [expected]


def test_a_root_model_that_is_not_finite_leaves_the_model_as_it_is() -> None:
    strategy = FLTrust(lambda arrays, _: model(float("nan")))
    messages = messages_of(strategy, [11, 12])
    arrays, _ = strategy.aggregate_train(1, replies_to(messages, {11: model(1), 12: model(2)}))
    assert arrays is not None
    assert arrays["w"].numpy().tolist() == [0, 0]
    assert strategy.diagnostics["trusted"] == 0


def test_a_root_that_is_missing_or_of_another_shape_is_told() -> None:
    with pytest.raises(RuntimeError, match="trained on the server's own data"):
        FLTrust(plus_one).aggregator(updates(EAST[None], reference=ZERO))
    wrong = record(w=np.zeros(3, np.float32), b=np.zeros(1, np.float32))
    with pytest.raises(LayoutError, match=r"shape \(3,\)"):
        messages_of(FLTrust(lambda arrays, _: wrong), [11])


def test_the_root_is_no_setting_and_the_number_of_its_samples_is() -> None:
    assert {s.name: s.default for s in settings(FLTrust)} == {"root_samples": 100}
    assert FLTrust(plus_one, root_samples=30).root_samples == 30


def test_trust_withstands_a_majority_of_turned_updates_where_the_mean_does_not() -> None:
    d = 50
    honest = 0.1 * matrix(3, d) + 0.2
    attacked = torch.cat([honest, -20 * honest, -5 * honest])
    root = 0.1 * matrix(1, d, 7)[0] + 0.2
    result, target = fltrust(attacked, root), honest.mean(0)
    assert result.weights[3:].tolist() == [0] * 6
    assert (result.vector - target).norm() < 0.1 * (mean(attacked).vector - target).norm()
