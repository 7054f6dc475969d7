from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.emulation.availability import (
    Table,
    always,
    bernoulli,
    bernoulli_chances,
    daily,
    daily_wave,
    label_chances,
    label_dependent,
    log_normal,
    log_normal_chances,
    markov,
    markov_chances,
    markov_settings,
    with_history,
)
from fedplat.errors import UserError

COUNTS = np.array([[5, 0, 0, 0], [0, 1, 0, 2], [0, 0, 7, 1], [0, 0, 0, 4]])
PROCESSES: dict[str, Callable[..., Table]] = {
    "always": always,
    "bernoulli": bernoulli,
    "markov": markov,
    "log-normal": partial(log_normal, beta=0.4),
    "daily": partial(daily, beta=0.4),
    "label-dependent": label_dependent,
}
every_process = pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES)


def counts_of(nodes: int) -> np.ndarray:
    return np.resize(COUNTS, (nodes, 4))


def within(frequency: np.ndarray, chance: np.ndarray, draws: int, errors: float = 3) -> np.ndarray:
    return np.abs(frequency - chance) <= errors * np.sqrt(chance * (1 - chance) / draws) + 1e-12


@every_process
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 6), rounds=st.integers(1, 9), more=st.integers(1, 5))
def test_more_rounds_only_append_and_more_history_only_prepends(process, seed, nodes, rounds, more) -> None:
    counts = counts_of(nodes)
    table = process(nodes, rounds, seed, counts)
    assert table.shape == (nodes, rounds)
    assert table.dtype == np.bool_
    assert np.array_equal(process(nodes, rounds + more, seed, counts)[:, :rounds], table)
    before, during = with_history(process, nodes, rounds, more, seed, counts)
    assert np.array_equal(during, table)
    longer, _ = with_history(process, nodes, rounds, more + 3, seed, counts)
    assert np.array_equal(longer[:, 3:], before)


@pytest.mark.parametrize("name", ["always", "bernoulli", "markov", "label-dependent"])
def test_more_nodes_only_append(name: str) -> None:
    few, many = (PROCESSES[name](n, 12, 3, counts_of(n), 5) for n in (4, 9))
    assert np.array_equal(many[:4], few)


@pytest.mark.parametrize("name", [name for name in PROCESSES if name != "always"])
def test_another_seed_gives_another_table_and_the_same_seed_the_same(name: str) -> None:
    tables = [PROCESSES[name](4, 60, seed, COUNTS, 10) for seed in (1, 1, 2)]
    assert np.array_equal(tables[0], tables[1])
    assert not np.array_equal(tables[0], tables[2])


def test_always_is_always() -> None:
    assert always(3, 4, 0, None, 2).all()


def test_frequencies_of_independent_processes_are_the_true_chances_within_three_standard_errors() -> None:
    rounds, history = 4000, 1000
    for process, chances in (
        (bernoulli, bernoulli_chances(40, 1)),
        (partial(log_normal, beta=0.5), log_normal_chances(40, 1, 0.5)),
        (label_dependent, label_chances(counts_of(40))),
    ):
        before, during = with_history(process, 40, rounds, history, 1, counts_of(40))
        # One in 370 lies further out by chance: of 80 none or one.
        outside = ~within(before.mean(axis=1), chances, history)
        assert outside.sum() + (~within(during.mean(axis=1), chances, rounds)).sum() <= 1


def test_bernoulli_chances_fill_their_range() -> None:
    chances = bernoulli_chances(2000, 3, (0.3, 0.95))
    assert chances.min() >= 0.3
    assert chances.max() <= 0.95
    assert chances.mean() == pytest.approx(0.625, abs=3 * 0.65 / 12**0.5 / 2000**0.5)
    assert bernoulli(5, 9, 0, p=(1, 1)).all()
    assert not bernoulli(5, 9, 0, p=(0, 0)).any()


def test_the_markov_chain_has_its_long_run_share_from_the_first_round_on_in_both_directions() -> None:
    nodes, span = 4000, ((0.8, 0.8), (0.3, 0.3))
    share = 0.3 / (1 - 0.8 + 0.3)
    assert markov_chances(*markov_settings(nodes, 0, *span)) == pytest.approx(np.full(nodes, share))
    table = markov(nodes, 12, 0, None, 12, stay_on=span[0], turn_on=span[1])
    # Across nodes each round is an independent sample of the share.
    assert within(table.mean(axis=0), np.full(24, share), nodes, 4).all()


def test_a_markov_chain_stays_and_returns_as_its_settings_say_before_and_after_round_one() -> None:
    nodes, rounds, stay, turn = 50, 600, 0.9, 0.3
    table = markov(nodes, rounds, 7, None, rounds, stay_on=(stay, stay), turn_on=(turn, turn))
    share = turn / (1 - stay + turn)
    for part in (table[:, :rounds], table[:, rounds:], table[:, rounds - 30 : rounds + 30]):
        now, then = part[:, :-1], part[:, 1:]
        for chance, kept in ((stay, then[now]), (turn, then[~now])):
            assert within(kept.mean(), np.float64(chance), kept.size)
    # Autocorrelation at lag k is (stay - turn)^k.
    centred = table - share
    for lag in (1, 2, 4):
        found = (centred[:, :-lag] * centred[:, lag:]).mean() / (share * (1 - share))
        assert found == pytest.approx((stay - turn) ** lag, abs=0.03)


def test_absences_are_burstier_than_independent_ones() -> None:
    chain = markov(200, 300, 1, stay_on=(0.95, 0.95), turn_on=(0.1, 0.1))
    coins = bernoulli(200, 300, 1, p=(2 / 3, 2 / 3))
    assert chain.mean() == pytest.approx(coins.mean(), abs=0.03)
    changes = [(table[:, 1:] != table[:, :-1]).mean() for table in (chain, coins)]
    assert changes[0] < 0.3 * changes[1]


def test_log_normal_chances_are_as_unequal_as_beta_says() -> None:
    assert (log_normal_chances(20, 1, 0) == 1).all()
    chances = log_normal_chances(5000, 1, 0.4)
    assert chances.max() == 1
    assert np.log(chances).std() == pytest.approx(-np.log(0.6), rel=0.05)
    # The same normal numbers, stretched.
    assert np.log(log_normal_chances(50, 1, 0.4)) / np.log(0.6) == pytest.approx(
        np.log(log_normal_chances(50, 1, 0.2)) / np.log(0.8)
    )


def test_the_daily_wave_has_a_period_of_a_day_and_the_extremes_of_its_formula() -> None:
    rounds = np.arange(-50, 100)
    wave = daily_wave(rounds)
    assert np.allclose(wave[24:], wave[:-24])
    assert all(not np.allclose(wave[lag:], wave[:-lag]) for lag in range(1, 24))
    assert (wave.min(), wave.max()) == (pytest.approx(0.1), pytest.approx(0.9))
    # By hand: round 2 is hour 3, sin(pi / 4); round 23 is hour 24, sin(2 pi).
    assert daily_wave(np.array([2, 23])) == pytest.approx([0.4 * 2**-0.5 + 0.5, 0.5])


def test_the_nodes_that_are_there_follow_the_day() -> None:
    table = daily(2000, 48, 1, None, 24, beta=0)
    expected = daily_wave(np.arange(-23, 49))
    assert within(table.mean(axis=0), expected, 2000, 4).all()


def test_label_dependent_chances_are_as_computed_by_hand() -> None:
    # Least labels 0, 1, 2 and 3 of a largest label of 3.
    assert label_chances(COUNTS, 0.6) == pytest.approx([0.4, 0.6, 0.8, 1.0])
    assert (label_chances(COUNTS, 0) == 1).all()
    assert label_chances(np.array([[4], [1]]), 0.5) == pytest.approx([0.5, 0.5])


def test_class_counts_are_asked_for_only_where_they_are_needed() -> None:
    asked = []

    def counts() -> np.ndarray:
        asked.append(1)
        return COUNTS

    for name, process in PROCESSES.items():
        asked.clear()
        assert np.array_equal(process(4, 5, 1, counts, 2), process(4, 5, 1, COUNTS, 2))
        assert bool(asked) == (name == "label-dependent")
    with pytest.raises(UserError, match="a class each"):
        label_dependent(4, 5, 1, lambda: None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: label_dependent(2, 3, 0), "samples that have a class each"),
        (lambda: label_dependent(3, 3, 0, COUNTS), "4 rows of class counts for 3 nodes"),
        (lambda: label_chances(COUNTS, 1.1), "beta is 1.1"),
        (lambda: log_normal(2, 3, 0, beta=1.0), "beta is 1.0"),
        (lambda: daily(2, 3, 0, beta=-0.1), "beta is -0.1"),
        (lambda: daily_wave(np.array([1]), 0), "rounds_per_day"),
        (lambda: bernoulli(2, 3, 0, p=(0.9, 0.1)), "from low to high"),
        (lambda: bernoulli(2, 3, 0, p=(0.9, 1.1)), "from low to high"),
        (lambda: markov(2, 3, 0, stay_on=(float("nan"), 1)), "stay_on"),
        (lambda: markov(2, 3, 0, turn_on=(-0.1, 1)), "turn_on"),
        (lambda: always(0, 3, 0), "0 nodes"),
        (lambda: always(1, 3, -1), "seed -1"),
        (lambda: always(1, 3, 0, None, -1), "-1 rounds of history"),
    ],
)
def test_impossible_settings_are_refused(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        wrong()
