"""Hand-computed values of the colluding attacks, and what each does to the rule it was made for."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from fedplat import updates
from fedplat.clients.attacks.collusion import (
    ALittleIsEnough,
    Collusion,
    InnerProduct,
    Mimic,
    RoundView,
    largest_hidden_z,
)
from fedplat.clients.attacks.optimised import FangKrum, FangMedian, MinMax, MinSum, krum_prefers
from fedplat.rng import generator
from fedplat.strategies.aggregators import krum, mean, median, trimmed_mean
from fedplat.strategies.aggregators.distances import squared_distances

ATTACKS = {
    "alie": ALittleIsEnough(z=1.5),
    "ipm": InnerProduct(),
    "min-max": MinMax(),
    "min-max unit": MinMax(perturbation="unit"),
    "min-sum sign": MinSum(perturbation="sign"),
    "fang-median": FangMedian(),
    "fang-krum": FangKrum(),
    "mimic": Mimic(),
}


@pytest.fixture(params=list(ATTACKS))
def attack(request: pytest.FixtureRequest) -> Collusion:
    return ATTACKS[request.param]


def view_of(honest, own, reference=None, *, seed: int = 0, clients: int | None = None, **more) -> RoundView:
    """Lay out the colluders' models first, then one that nobody may look at, then the honest ones."""
    honest, own = (torch.as_tensor(np.asarray(rows, np.float32)) for rows in (honest, own))
    p = max(honest.shape[-1], own.shape[-1])
    honest, own = honest.reshape(-1, p), own.reshape(-1, p)
    h, m = len(honest), len(own)
    return RoundView(
        torch.cat([own, torch.full((1, p), torch.nan), honest]),
        torch.zeros(p) if reference is None else torch.as_tensor(np.asarray(reference, np.float32)),
        honest=torch.arange(m + 1, m + 1 + h),
        own=torch.arange(m),
        honest_ids=tuple(range(m + 1, m + 1 + h)),
        own_ids=tuple(range(m)),
        clients=h + m if clients is None else clients,
        rng=generator(seed, "collusion", 0, 1),
        **more,
    )


def cloud(h: int, p: int, seed: int = 0, shift: float = 0.3) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(h, p)) + shift).astype(np.float32)


def all_of(view: RoundView, forged: torch.Tensor) -> torch.Tensor:
    """Return what the server gets: honest models first."""
    return torch.cat([view.models[view.honest], forged])


def error(vector: torch.Tensor, view: RoundView) -> float:
    return float((vector.double() - view.models[view.honest].double().mean(dim=0)).norm())


# For all -------------------------------------------------------------------


def test_a_second_call_gives_the_same_and_nothing_given_is_changed(attack: Collusion) -> None:
    first, second = (view_of(cloud(9, 40), cloud(3, 40, 1), cloud(1, 40, 2)[0]) for _ in range(2))
    models, reference = first.models.clone(), first.reference.clone()
    forged = attack.collude(first)
    assert forged.shape == (3, 40)
    assert forged.dtype == torch.float32
    assert forged.isfinite().all()
    assert torch.equal(forged, attack.collude(second))
    np.testing.assert_array_equal(first.models, models)
    assert torch.equal(first.reference, reference)


def test_columns_may_be_cut_into_any_chunks(attack: Collusion, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attack.collude(view_of(cloud(9, 40), cloud(3, 40, 1)))
    monkeypatch.setattr(updates, "_CHUNK_ELEMENTS", 60)
    pieces = attack.collude(view_of(cloud(9, 40), cloud(3, 40, 1)))
    np.testing.assert_allclose(pieces, whole, rtol=1e-6, atol=1e-6)


def test_every_attack_moves_the_mean_from_the_honest_one(attack: Collusion) -> None:
    view = view_of(cloud(9, 40), cloud(6, 40, 1))
    assert error(mean(all_of(view, attack.collude(view))).vector, view) > 0.1


def test_an_attack_that_moves_in_a_direction_ends_below_the_honest_mean() -> None:
    view = view_of(cloud(9, 40), cloud(6, 40, 1))
    honest = view.models[view.honest].mean(dim=0)
    for attack in ATTACKS.values():
        if not isinstance(attack, Mimic):
            assert float(mean(all_of(view, attack.collude(view))).vector @ honest) < float(honest @ honest)


def test_without_honest_replies_the_colluders_learn_from_their_own(attack: Collusion) -> None:
    own = cloud(5, 20)
    alone = attack.collude(view_of(np.zeros((0, 20)), own))
    assert alone.isfinite().all()
    if not isinstance(attack, Mimic):
        informed = type(attack)(**{**vars(attack), "knowledge": "own"})
        assert torch.equal(alone, informed.collude(view_of(cloud(9, 20, 3), own)))


@pytest.mark.parametrize("honest", [[[1.0, -2.0]], [[1.0, -2.0]] * 4])
def test_honest_clients_that_agree_leave_the_attacks_defined(attack: Collusion, honest: list) -> None:
    assert attack.collude(view_of(honest, [[0.0, 0.0]] * 2)).isfinite().all()


def test_honest_clients_that_do_not_move_leave_the_attacks_defined(attack: Collusion) -> None:
    forged = attack.collude(view_of([[1.0, 2.0]] * 4, [[0.0, 0.0]] * 2, [1.0, 2.0]))
    np.testing.assert_array_equal(forged, [[1.0, 2.0]] * 2)


# A little is enough, inner product -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "m", "z"),
    [
        (50, 24, 1.4260769),
        (50, 12, 0.3360381),
        (25, 5, 0.2533471),
        (20, 4, 0.1573107),
        (10, 2, 0.0),  # trap: a row "defended against ALIE" at 2 of 10 proves nothing
        (10, 1, -0.1397103),
    ],
)
def test_alie_hides_behind_as_many_as_a_majority_needs(n: int, m: int, z: float) -> None:
    assert largest_hidden_z(n, m) == pytest.approx(z, abs=1e-7)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 1), (5, 5), (2, 2)])
def test_alie_is_harmless_where_its_formula_has_no_value(n: int, m: int) -> None:
    assert largest_hidden_z(n, m) == 0


def test_alie_colluders_that_are_a_majority_need_one_supporter() -> None:
    assert largest_hidden_z(10, 6) == largest_hidden_z(8, 4) == pytest.approx(0.6744898)


def test_alie_shifts_the_mean_by_z_standard_deviations() -> None:
    forged = ALittleIsEnough(z=2.0).collude(view_of([[1, 10], [3, 10], [5, 13]], [[0, 0]], [100, 100]))
    # Means 3 and 11, deviations with denominator n: sqrt(8/3) and sqrt(2).
    np.testing.assert_allclose(forged, [[3 - 2 * (8 / 3) ** 0.5, 11 - 2 * 2**0.5]], rtol=1e-6)


def test_alie_counts_all_clients_also_those_with_another_attack() -> None:
    view = view_of([[0.0], [2.0]], [[0.0]], clients=25)
    assert ALittleIsEnough().collude(view).item() == pytest.approx(1 - largest_hidden_z(25, 1))


def test_alie_with_its_own_knowledge_looks_at_its_own_models_only() -> None:
    forged = ALittleIsEnough(z=1.0, knowledge="own").collude(view_of([[100.0]], [[1.0], [3.0]]))
    assert forged.flatten().tolist() == [1, 1]


def test_alie_that_does_no_harm_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    view = view_of(cloud(8, 3), cloud(2, 3))
    with caplog.at_level(logging.WARNING, "fedplat"):
        forged = [ALittleIsEnough().collude(view) for _ in range(2)]
    assert len(caplog.records) == 1
    assert "alie: z = 0 with 2 colluders among 10 clients does no harm" in caplog.text
    np.testing.assert_allclose(forged[1][0], view.models[view.honest].double().mean(dim=0), rtol=1e-6)


def test_alie_is_chosen_by_krum_more_often_than_chance_while_it_harms_the_mean() -> None:
    chosen = 0
    for seed in range(10):
        view = view_of(cloud(15, 50, seed), cloud(9, 50, 99))
        everyone = all_of(view, ALittleIsEnough(z=0.5).collude(view))
        chosen += int(krum(everyone, 9).weights.argmax()) >= 15
        inside = view.models[view.honest]
        assert (everyone[15:] >= inside.amin(dim=0)).float().mean() > 0.95
        assert error(mean(everyone).vector, view) > 1
    assert chosen == 10


def test_ipm_sends_the_scaled_negative_of_the_mean_update() -> None:
    view = view_of([[11.0, 20.0], [13.0, 24.0]], [[0.0, 0.0]] * 2, [10.0, 20.0])
    assert InnerProduct(epsilon=0.5).collude(view).tolist() == [[9, 19]] * 2


@pytest.mark.parametrize(("colluders", "sign"), [(4, 1), (7, 1), (9, -1)])
def test_ipm_turns_the_mean_around_once_epsilon_m_exceeds_the_honest(colluders: int, sign: int) -> None:
    view = view_of([[1.0]] * 4, [[0.0]] * colluders)
    result = mean(all_of(view, InnerProduct(epsilon=0.5).collude(view))).vector
    assert np.sign(result.item()) == sign


# Min-Max, Min-Sum -------------------------------------------------------------------


def test_min_max_goes_as_far_as_the_furthest_pair() -> None:
    # Mean 0 and deviation sqrt(8/3): from 2, the far end, a pair's distance of 4 reaches to −2.
    forged = MinMax().collude(view_of([[-2.0], [0.0], [2.0]], [[9.0]]))
    assert forged.item() == pytest.approx(-2)


def test_min_sum_goes_as_far_as_the_largest_sum_of_squares() -> None:
    # Sums of squared distances are 20, 8, 20; 3γ² + 8 = 20 gives 2.
    assert MinSum().collude(view_of([[-2.0], [0.0], [2.0]], [[9.0]])).item() == pytest.approx(-2)
    # From 0, 0, 3: mean 1, sums 9, 9, 18; 3γ² + 6 = 18 gives 2 below the mean.
    assert MinSum().collude(view_of([[0.0], [0.0], [3.0]], [[9.0]])).item() == pytest.approx(-1)


@pytest.mark.parametrize("perturbation", ["std", "unit", "sign"])
def test_min_max_and_min_sum_are_tight_and_push_where_they_say(perturbation) -> None:
    view = view_of(cloud(9, 40), cloud(3, 40, 1), cloud(1, 40, 2)[0])
    honest, reference = view.models[view.honest].double(), view.reference.double()
    pairs = squared_distances(honest)
    mu = honest.mean(dim=0)
    delta = mu - reference
    expected = {"std": -honest.std(dim=0, correction=0), "unit": -delta, "sign": -delta.sign()}[perturbation]
    for attack, measure, bound in [
        (MinMax(perturbation=perturbation), torch.amax, pairs.max()),
        (MinSum(perturbation=perturbation), torch.sum, pairs.sum(dim=1).max()),
    ]:
        forged = attack.collude(view)
        assert torch.equal(forged[0], forged[2])
        push = forged[0].double() - mu
        assert float(measure((forged[0].double() - honest).square().sum(dim=1))) == pytest.approx(
            float(bound), rel=1e-5
        )
        assert float(push @ expected / push.norm() / expected.norm()) == pytest.approx(1, abs=1e-6)
        further = mu + 1.001 * push
        assert float(measure((further - honest).square().sum(dim=1))) > float(bound)


def test_min_max_agrees_with_a_search_by_halving() -> None:
    view = view_of(cloud(7, 12, 5), cloud(2, 12, 1))
    honest = view.models[view.honest].numpy().astype(np.float64)
    mu, push = honest.mean(axis=0), -honest.std(axis=0)
    bound = max(np.linalg.norm(a - b) for a in honest for b in honest)
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        fits = max(np.linalg.norm(mu + middle * push - x) for x in honest) <= bound
        low, high = (middle, high) if fits else (low, middle)
    np.testing.assert_allclose(MinMax().collude(view)[0], mu + low * push, rtol=1e-5)


# Fang -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("honest", "reference", "low", "high"),
    [
        ([2, 4], 1, 1, 2),  # rising above zero: between half the minimum and the minimum
        ([-4, -2], -9, -8, -4),  # rising below zero: between twice the minimum and the minimum
        ([2, 4], 9, 4, 8),  # falling above zero: between the maximum and twice that
        ([-4, -2], 1, -2, -1),  # falling below zero: between the maximum and half of it
    ],
)
def test_fang_median_draws_beyond_the_honest(honest, reference, low: float, high: float) -> None:
    view = view_of([[x] * 200 for x in honest], [[0] * 200] * 2, [reference] * 200)
    forged = FangMedian().collude(view)
    assert ((forged >= low) & (forged <= high)).all()
    assert float(forged.std()) > 0.2 * (high - low)
    assert not torch.equal(forged[0], forged[1])


def test_fang_median_moves_the_median_and_the_trimmed_mean_beyond_the_honest_middle() -> None:
    view = view_of(cloud(9, 200, shift=1.0), cloud(6, 200, 1))
    everyone = all_of(view, FangMedian().collude(view))
    unharmed = all_of(view, view.models[view.own])
    honest = everyone[:9].mean(dim=0)
    for rule in (lambda x: median(x).vector, lambda x: trimmed_mean(x, 6).vector):
        assert ((honest - rule(everyone)) * honest.sign() > 0).all()
        assert error(rule(everyone), view) > 2 * error(rule(unharmed), view)


@pytest.mark.parametrize("colluders", [1, 3, 5])
def test_fang_krum_is_chosen_and_points_backwards(colluders: int) -> None:
    reference = cloud(1, 60, 2)[0]
    view = view_of(reference + cloud(12, 60, shift=0.1), reference + cloud(colluders, 60, 1), reference)
    forged = FangKrum().collude(view)
    result = krum(all_of(view, forged) - view.reference, colluders)
    assert int(result.weights.argmax()) >= 12
    honest = view.models[view.honest].double().mean(dim=0) - view.reference
    assert float(result.vector.double() @ honest) < 0
    step = float((forged[0] - view.reference).norm())
    distances = (forged[1:] - forged[0]).norm(dim=1)
    np.testing.assert_allclose(distances, 0.01 * step, rtol=1e-4)
    # Twice as far, and Krum would not have it.
    away = (view.models[view.honest] - view.reference - 2 * (forged[0] - view.reference)).double()
    between = squared_distances(view.models[view.honest])
    assert not krum_prefers(between, away.square().sum(dim=1), colluders, 0.02 * step)


def test_fang_krum_steps_along_signs_and_leaves_alone_what_does_not_move() -> None:
    honest = cloud(8, 6)
    honest[:, 2] = 0
    forged = FangKrum(spread=0.0).collude(view_of(honest, cloud(3, 6)))
    crafted = forged[0]
    assert crafted[2] == 0
    assert torch.equal(forged[1], crafted)
    moving = [0, 1, 3, 4, 5]
    assert torch.equal(crafted[moving].sign(), -torch.from_numpy(honest).mean(dim=0)[moving].sign())
    assert len(set(crafted[moving].abs().tolist())) == 1


def test_fang_krum_that_finds_no_step_stays_at_the_model_sent() -> None:
    # Clients close together and far from the model sent: nothing behind it is ever nearer to them.
    view = view_of(100 + 0.01 * cloud(12, 20), cloud(2, 20))
    assert float(FangKrum().collude(view).abs().max()) < 1e-5


# Mimic -------------------------------------------------------------------


def test_mimic_copies_the_client_furthest_out_along_the_main_direction() -> None:
    honest = [[0.0, 1.0], [1.0, -1.0], [-5.0, 0.5], [3.0, 0.0]]
    view = view_of(honest, [[9.0, 9.0]] * 3)
    assert Mimic().collude(view).tolist() == [[-5, 0.5]] * 3
    assert view.memory == {"victim": view.honest_ids[2]}


def test_mimic_gives_one_client_the_weight_of_many() -> None:
    view = view_of(np.eye(4), np.zeros((4, 4)))
    forged = Mimic(victim=view.honest_ids[1]).collude(view)
    np.testing.assert_allclose(mean(all_of(view, forged)).vector, [1 / 8, 5 / 8, 1 / 8, 1 / 8])
    assert view.memory == {}


def test_mimic_agrees_with_the_principal_direction_of_numpy() -> None:
    honest = cloud(11, 30, 7)
    centred = honest.astype(np.float64) - honest.mean(axis=0, dtype=np.float64)
    direction = np.linalg.svd(centred, full_matrices=False)[2][0]
    expected = honest[np.abs(centred @ direction).argmax()]
    np.testing.assert_array_equal(Mimic().collude(view_of(honest, cloud(1, 30)))[0], expected)


def test_mimic_keeps_its_victim_and_replaces_it_only_while_it_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = view_of([[0.0], [1.0], [7.0]], [[0.0]])
    Mimic().collude(first)
    later = view_of([[0.0], [100.0], [2.0]], [[0.0]], memory=dict(first.memory))
    assert Mimic().collude(later).item() == 2
    memory = dict(first.memory)
    away = view_of([[50.0], [0.0]], [[0.0]], memory=memory)
    with caplog.at_level(logging.WARNING, "fedplat"):
        assert [Mimic().collude(away).item() for _ in range(2)] == [50, 50]
    assert "client 4 is not among the honest ones of round 1" in caplog.text
    assert len(caplog.records) == 1
    assert memory["victim"] == 4


def test_mimic_takes_the_first_of_two_equally_far() -> None:
    assert Mimic().collude(view_of([[3.0, 1.0], [1.0, 2.0]], [[0.0, 0.0]]))[0].tolist() == [3, 1]
