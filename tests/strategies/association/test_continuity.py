from __future__ import annotations

import numpy as np
import pytest

from fedplat.strategies.association.continuity import SlidingWindow, chain, continuity, frequency, unbroken


def test_frequency_is_laplaces_rule() -> None:
    history = np.array([[True, False, True, True], [False] * 4, [True] * 4])
    assert frequency(history).tolist() == pytest.approx([4 / 6, 1 / 6, 5 / 6])


def test_a_client_without_history_is_there_half_of_the_time() -> None:
    nothing = np.zeros((3, 0), np.bool_)
    assert continuity(nothing, "freq").tolist() == [0.5] * 3
    assert unbroken(nothing, 1).tolist() == [0.5] * 3


def test_an_unbroken_run_is_the_share_times_staying_on_for_the_other_rounds() -> None:
    # Three steps from presence, of which one ends it; two from absence, of which one does.
    history = np.array([[True, True, True, False, False, True]])
    stay, turn = chain(history)
    assert (stay[0], turn[0]) == (3 / 5, 2 / 4)
    share = (2 / 4) / (1 - 3 / 5 + 2 / 4)
    assert unbroken(history, 1)[0] == pytest.approx(share)
    assert continuity(history, "run", 4)[0] == pytest.approx(share * (3 / 5) ** 3)


def test_a_run_lasts_a_round_at_least() -> None:
    with pytest.raises(ValueError, match="1 round at least"):
        unbroken(np.ones((1, 5), np.bool_), 0)


def test_continuity_lies_within_three_standard_errors_of_the_true_chance() -> None:
    rng = np.random.default_rng(0)
    chance = rng.uniform(0.3, 0.95, 500)
    history = rng.random((500, 1000)) < chance[:, None]
    error = np.abs(frequency(history) - chance) / np.sqrt(chance * (1 - chance) / 1000)
    # Of 500 normal errors one or two lie beyond three standard errors, and none beyond four and a half.
    assert (error <= 3).mean() > 0.99
    assert error.max() < 4.5


def test_bursts_favour_the_client_whose_rounds_come_together() -> None:
    together = [True] * 10 + [False] * 10
    scattered = [True, False] * 10
    history = np.array([together, scattered])
    assert frequency(history)[0] == frequency(history)[1]
    run = continuity(history, "run", 5)
    assert run[0] > 3 * run[1]


def test_the_window_forgets_the_oldest_round() -> None:
    window = SlidingWindow(np.array([[True, True, False], [False, True, True]]), 2)
    assert window.table.tolist() == [[True, False], [True, True]]
    window.add(np.array([True, False]))
    assert window.table.tolist() == [[False, True], [True, False]]


def test_a_window_grows_up_to_its_length() -> None:
    window = SlidingWindow(np.zeros((1, 0), np.bool_), 2)
    for present in (True, False, True):
        window.add(np.array([present]))
    assert window.table.tolist() == [[False, True]]
