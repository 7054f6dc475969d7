"""The whole rule on made-up crowds; comments with B1 to B12 name faults of the released code."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedplat.arrays import FlatArrays, Layout
from fedplat.strategies.aggregators import mean, median
from fedplat.strategies.aggregators.hog_standing import SIGN_FLIP
from fedplat.strategies.mud_hog import MudHog, MudHogRule
from fedplat.updates import ClientUpdates
from fedplat.verdicts import HONEST, TARGETED, UNRELIABLE, UNTARGETED

from .test_composed import aggregate, model

DIM = 800
MODES = pytest.mark.parametrize("mode", ["intended", "reference"])


def updates(deltas, nodes=None, reference=None) -> ClientUpdates:
    deltas = torch.as_tensor(deltas, dtype=torch.float32)
    start = torch.zeros(deltas.shape[1]) if reference is None else reference
    layout = Layout.of({"w": ((deltas.shape[1],), "float32")})
    side = np.zeros(0, np.uint8)
    models = [FlatArrays(layout, (start + row).numpy(), side) for row in deltas]
    nodes = list(range(len(deltas))) if nodes is None else nodes
    return ClientUpdates.stack(models, FlatArrays(layout, start.numpy(), side), nodes, [1] * len(deltas))


def unit(rng: np.random.Generator, *shape: int) -> np.ndarray:
    x = rng.normal(size=(*shape, DIM))
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@dataclass(frozen=True)
class Crowd:
    """Updates in the manner of recorded ones: a common direction, one of their own that stays, fresh noise.

    They grow with a client's data, of which the first has most, and shrink over the rounds. Targeted
    attackers share a second direction; once they are left out their updates grow, two of them fast. In this
    order: honest, unreliable, sign flipping, noisy, targeted.
    """

    honest: int = 17
    unreliable: int = 4
    flipping: int = 5
    noisy: int = 6
    targeted: int = 8
    seed: int = 0

    @property
    def n(self) -> int:
        return self.honest + self.unreliable + self.flipping + self.noisy + self.targeted

    @property
    def fine(self) -> int:
        return self.honest + self.unreliable

    def round(self, t: int) -> np.ndarray:
        fixed, fresh = np.random.default_rng(self.seed), np.random.default_rng([self.seed, t])
        common, aim = unit(fixed, 2)
        size = fixed.uniform(0.7, 1.4, self.n)[:, None]
        size[0], size[self.honest : self.fine] = 2.4, 1
        out = size * common / (1 + 0.1 * t) + 0.3 * unit(fixed, self.n) + 0.3 * unit(fresh, self.n)
        poor = slice(self.honest, self.fine)
        out[poor] = 0.15 * out[poor] + 0.35 * unit(fresh, self.unreliable)
        out[self.fine : self.fine + self.flipping] *= -1
        start = self.fine + self.flipping
        out[start : start + self.noisy] += 5 * unit(fresh, self.noisy)
        if self.targeted:
            growth = np.full(self.targeted, 0.02)
            growth[-2:] = 0.45, 0.5
            out[-self.targeted :] += (0.8 + growth * max(t - 4, 0))[:, None] * aim
        return out

    def bad(self) -> list[int]:
        return list(range(self.fine, self.n))


def rule(**settings) -> MudHogRule:
    made = MudHog(**settings).aggregator
    assert isinstance(made, MudHogRule)
    return made


def left_out(result) -> list[int]:
    return torch.nonzero(result.weights == 0).flatten().tolist()


def test_the_released_code_confirms_signs_and_noise_in_round_5_quality_in_6_aims_in_7() -> None:
    crowd, made = Crowd(), rule(mode="reference", eps=0.8)
    kinds = ("sign_flip", "additive_noise", "unreliable", "targeted")
    for t in range(1, 9):
        figures = made(updates(crowd.round(t))).diagnostics
        expected = [5 * (t >= 5), 6 * (t >= 5), 4 * (t >= 6), 8 * (t >= 7)]
        assert [figures[f"{kind}_confirmed"] for kind in kinds] == expected


@pytest.mark.parametrize("seed", range(3))
def test_every_attacker_of_the_largest_setting_stays_out_and_every_other_client_in(seed: int) -> None:
    crowd, made = Crowd(seed=seed), rule()
    for t in range(1, 19):
        result = made(updates(crowd.round(t)))
        if t <= 3:
            assert left_out(result) == []
            assert set(result.verdicts.values()) == {HONEST}
            continue
        assert left_out(result) == crowd.bad()
        words = [result.verdicts[i] for i in range(crowd.n)]
        assert words[21:32] == [UNTARGETED] * 11
        assert words[32:] == [TARGETED] * 8
        assert words[:17].count(UNRELIABLE) <= 1
        assert words[:17].count(HONEST) >= 16
        assert words[17:21] == [UNRELIABLE if t >= 6 else HONEST] * 4
    confirmed = made.standing.confirmed.sum(axis=0).tolist()
    assert confirmed == [5, 6, 8]
    assert made.histories.nodes == list(range(40))


def test_a_repaired_window_alone_acquits_the_noisy_clients() -> None:
    # B12: targeted attackers who are left out grow until they are the farthest points, and the largest gap
    # then lies between them and the noisy ones.
    crowd, theirs, ours = Crowd(), rule(mode="reference", eps=0.8), rule()
    theirs.histories.frozen = False
    noisy = set(range(26, 32))
    for t in range(1, 19):
        one = updates(crowd.round(t))
        repaired, intended = (noisy & set(left_out(made(one))) for made in (theirs, ours))
        if t >= 5:
            assert intended == noisy
        if 5 <= t <= 6:
            assert repaired == noisy
        if t >= 16:
            assert repaired == set()


@pytest.mark.parametrize("targeted", [3, 5, 8])
def test_few_targeted_attackers_are_found_too(targeted: int) -> None:
    crowd, made = Crowd(honest=29, unreliable=0, flipping=0, noisy=0, targeted=targeted), rule()
    for t in range(1, 13):
        result = made(updates(crowd.round(t)))
    assert left_out(result) == crowd.bad()


@pytest.mark.parametrize("seed", range(4))
def test_nobody_is_left_out_where_nobody_attacks(seed: int) -> None:
    # B6: two-means always finds a minority, and the released code leaves it out in every round.
    crowd = Crowd(honest=40, unreliable=0, flipping=0, noisy=0, targeted=0, seed=seed)
    ours, theirs = rule(), rule(mode="reference", eps=0.8)
    out, accused = [], []
    for t in range(1, 13):
        one = updates(crowd.round(t))
        out.append(len(left_out(ours(one))))
        accused.append(len(left_out(theirs(one))))
    assert max(out) <= 2
    assert min(accused[3:]) >= 3


def test_an_attack_that_starts_late_is_seen_unless_the_window_is_frozen() -> None:
    # B1
    crowd = Crowd(unreliable=0, noisy=0, targeted=0)
    ours, theirs = rule(), rule(mode="reference", eps=0.8)
    seen = []
    for t in range(1, 13):
        deltas = crowd.round(t)
        if t < 8:
            deltas[crowd.bad()] *= -1
        results = [made(updates(deltas)) for made in (ours, theirs)]
        seen.append([int(result.diagnostics["sign_flip_suspects"]) for result in results])
    assert seen[:8] == [[0, 0]] * 8
    assert seen[9:] == [[5, 0]] * 3
    assert left_out(results[0]) == crowd.bad()


def test_the_released_code_averages_first_time_sign_flippers() -> None:
    # B5
    crowd = Crowd(unreliable=0, noisy=0, targeted=0)
    for mode, expected in (("reference", []), ("intended", crowd.bad())):
        made = rule(mode=mode, eps=0.8)
        for t in range(1, 5):
            result = made(updates(crowd.round(t)))
        assert [i for i in crowd.bad() if i in left_out(result)] == expected
        assert result.diagnostics["sign_flip_suspects"] == 5
        assert left_out(made(updates(crowd.round(5))))[-5:] == crowd.bad()


def test_unreliable_clients_count_by_their_weight_and_the_shares_sum_to_one() -> None:
    crowd = Crowd()
    for settings, psi in (({}, 0.5), ({"unreliable_weight": 0.0}, 0.0), ({"mode": "reference"}, 1.0)):
        made = rule(eps=0.8, **settings)
        for t in range(1, 8):
            start = torch.full((DIM,), 0.1 * t)
            one = updates(crowd.round(t), reference=start)
            result = made(one)
        slack = made.standing.unreliable.copy()
        slack[made.standing.malicious] = False
        kept = np.array([i not in left_out(result) or bool(slack[i]) for i in range(40)])
        deltas = one.deltas().double()
        many, few = kept & ~slack, kept & slack
        assert few.any()
        expected = (deltas[many].sum(0) + psi * deltas[few].sum(0)) / (many.sum() + psi * few.sum())
        torch.testing.assert_close(result.vector, (start + expected).float(), rtol=0, atol=1e-6)
        assert float(result.weights.sum()) == pytest.approx(1)


def test_attackers_move_the_mean_and_not_this_rule() -> None:
    crowd, made = Crowd(), rule()
    for t in range(1, 10):
        one = updates(crowd.round(t))
        result = made(one)
    target = one.params[: crowd.honest].mean(0)
    assert (result.vector - target).norm() < 0.3 * (mean(one.params).vector - target).norm()


@MODES
def test_the_order_of_clients_does_not_matter_and_inputs_stay(mode: str) -> None:
    crowd, rng = Crowd(), np.random.default_rng(5)
    a, b = rule(mode=mode, eps=0.8), rule(mode=mode, eps=0.8)
    for t in range(1, 10):
        deltas, order = crowd.round(t), rng.permutation(40)
        one = updates(deltas)
        before = one.params.clone()
        first, second = a(one), b(updates(deltas[order], order.tolist()))
        assert torch.equal(one.params, before)
        torch.testing.assert_close(first.weights[torch.from_numpy(order)], second.weights)
        torch.testing.assert_close(first.vector, second.vector)
        assert [first.verdicts[i] for i in order] == [second.verdicts[i] for i in range(40)]


@MODES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_rule_goes_on_to_the_bit(mode: str, dtype: str) -> None:
    crowd, made = Crowd(), rule(mode=mode, history_dtype=dtype)
    nodes = [2**64 - 1 - i for i in range(40)]
    for t in range(1, 7):
        made(updates(crowd.round(t), nodes))
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    restored = rule(mode=mode, history_dtype=dtype)
    restored.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for t in range(7, 11):
        some = np.arange(40) % 5 != t % 5
        one = updates(crowd.round(t)[some], np.array(nodes, np.uint64)[some].tolist())
        a, b = made(one), restored(one)
        assert torch.equal(a.vector, b.vector)
        assert a.verdicts == b.verdicts
        assert a.diagnostics == b.diagnostics
    assert made.rounds == restored.rounds == 10


def test_absent_clients_keep_their_standing_and_newcomers_are_judged() -> None:
    crowd, made = Crowd(), rule()
    for t in range(1, 8):
        made(updates(crowd.round(t)))
    held = made.standing.suspicion.copy(), made.standing.confirmed.copy()
    some = np.r_[0:25, 32:40]  # the noisy are away, and so is one of the sign flippers
    made(updates(crowd.round(8)[some], some.tolist()))
    away = np.setdiff1d(np.arange(40), some)
    assert (made.standing.suspicion[away] == held[0][away]).all()
    assert (made.standing.confirmed[away] == held[1][away]).all()
    new = Crowd(honest=19).round(9)[[17, 18]]
    deltas = np.concatenate([crowd.round(9), new, -new])
    result = made(updates(deltas))
    assert left_out(result) == [*crowd.bad(), 42, 43]


@MODES
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_few_clients_get_a_model_and_a_verdict_each(mode: str, n: int) -> None:
    made, crowd = rule(mode=mode, eps=0.8), Crowd(honest=n, unreliable=0, flipping=0, noisy=0, targeted=0)
    for t in range(1, 8):
        result = made(updates(crowd.round(t)))
        assert bool(torch.isfinite(result.vector).all())
        assert set(result.verdicts) == set(range(n))
        if mode == "intended":
            assert left_out(result) == []


@MODES
def test_equal_and_zero_updates_give_that_update(mode: str) -> None:
    for row in (np.zeros(DIM), np.linspace(-1, 1, DIM)):
        made = rule(mode=mode)
        for _ in range(7):
            result = made(updates(np.tile(row, (8, 1))))
            np.testing.assert_allclose(result.vector, row, atol=1e-6)
        assert left_out(result) == []


def test_a_zero_update_among_others_is_no_sign_flip() -> None:
    # Trap: the cosine of a zero vector is NaN.
    crowd, made = Crowd(honest=20, unreliable=0, flipping=0, noisy=0, targeted=0), rule()
    for t in range(1, 8):
        deltas = crowd.round(t)
        deltas[3] = 0
        result = made(updates(deltas))
    assert left_out(result) == []
    assert result.diagnostics["sign_flip_suspects"] == 0


@pytest.mark.parametrize("scale", [1e6, 1e30, 3e38])
def test_huge_updates_are_left_out_and_hide_nobody(scale: float) -> None:
    crowd, made = Crowd(), rule()
    for t in range(1, 10):
        deltas = crowd.round(t)
        deltas[26] *= scale / np.abs(deltas[26]).max()
        result = made(updates(deltas))
    assert set(left_out(result)) >= set(crowd.bad())
    assert bool(torch.isfinite(result.vector).all())


def test_if_nobody_is_left_it_is_the_coordinate_wise_median() -> None:
    made = rule()
    one = updates(Crowd().round(1))
    made(one)
    made.standing.malicious[:] = True
    made.standing.confirmed[:, SIGN_FLIP] = True
    made.rounds = 3
    made.standing.suspicion[:, SIGN_FLIP] = 5
    result = made(one)
    assert torch.equal(result.vector, median(one.params).vector)
    assert set(result.verdicts.values()) == {UNTARGETED}


def test_warmup_and_delays_are_settings() -> None:
    crowd = Crowd()
    made = rule(warmup=0, untargeted_delay=1, targeted_delay=1, window=1)
    made(updates(crowd.round(1)))
    assert made.standing.confirmed.sum(axis=0).tolist()[0] == 5
    slow = rule(untargeted_delay=9)
    for t in range(1, 8):
        result = slow(updates(crowd.round(t)))
    assert left_out(result) == crowd.bad()
    assert result.diagnostics["sign_flip_confirmed"] == 0


def test_scores_and_figures_are_told_for_every_round() -> None:
    crowd, made = Crowd(), rule()
    for t in range(1, 6):
        result = made(replace(updates(crowd.round(t)), server_round=t))
        assert result.scores["suspicion"].shape == (40,)
        assert result.diagnostics["left_out"] == len(left_out(result))
    assert result.scores["suspicion"].max() == 2
    assert result.diagnostics["separation"] > 0.22
    assert 0 < result.diagnostics["eps"] < 5


def test_a_strategy_reports_verdicts_and_suspicion() -> None:
    strategy = MudHog(warmup=0, untargeted_delay=1)
    models = {node: model(1.0 + 0.01 * node) for node in range(1, 8)} | {8: model(-1.0)}
    arrays, _ = aggregate(strategy, models)
    assert arrays is not None
    np.testing.assert_allclose(arrays["w"].numpy(), 1.04, atol=1e-6)
    last = strategy.reports[-1]
    assert [last.verdict, last.weight, last.scores] == [UNTARGETED, 0, {"suspicion": 1}]
    assert {report.verdict for report in strategy.reports[:-1]} == {HONEST}
    assert strategy.diagnostics["left_out"] == 1
