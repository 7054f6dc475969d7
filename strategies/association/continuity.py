"""How likely clients are to be there in the rounds to come, judged by the rounds they were there before.

Of the paper (Wu et al., arXiv 2502.09303) only the idea is known, by way of its summaries: a client's
*continuity* is estimated from its past. Both formulas are inferred.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .base import Bools, Floats

Mode = Literal["freq", "run"]


def frequency(history: Bools) -> Floats:
    """Return each client's smoothed share of rounds (N,): (1 + rounds there) / (H + 2).

    ``history`` is (N, H). Laplace's rule: no client is taken to be there always or never, and one without
    any history is there half of the time.

    >>> frequency(np.array([[True, True, False, True], [False] * 4])).round(3).tolist()
    [0.667, 0.167]
    """
    return (1.0 + history.sum(axis=1)) / (history.shape[1] + 2.0)


def chain(history: Bools) -> tuple[Floats, Floats]:
    """Return the smoothed chances to stay and to come back from one round to the next, (N,) each.

    ``history`` is (N, H), oldest first. A chain of two states is fitted to its H - 1 steps, each chance with
    Laplace's rule.

    >>> stay, turn = chain(np.array([[True, True, True, False, False, True]]))
    >>> stay.tolist(), turn.tolist()
    ([0.6], [0.5])
    """
    before, after = history[:, :-1], history[:, 1:]
    stay = (1.0 + (before & after).sum(axis=1)) / (before.sum(axis=1) + 2.0)
    turn = (1.0 + (~before & after).sum(axis=1)) / ((~before).sum(axis=1) + 2.0)
    return stay, turn


def unbroken(history: Bools, rounds: int) -> Floats:
    """Return the chances (N,) to be there for so many rounds without a break: pi * stay^(rounds - 1).

    pi = turn / (1 - stay + turn) is the fitted chain's long-run share. Raises ValueError below 1 round.

    >>> unbroken(np.array([[True, True, True, False, False, True]]), 2).round(4).tolist()
    [0.3333]
    """
    if rounds < 1:
        raise ValueError(f"a run lasts 1 round at least, not {rounds}")
    stay, turn = chain(history)
    return turn / (1.0 - stay + turn) * stay ** (rounds - 1)


def continuity(history: Bools, mode: Mode = "freq", horizon: int = 5) -> Floats:
    """Return each client's continuity (N,), in (0, 1): :func:`frequency`, or :func:`unbroken` by ``run``."""
    return unbroken(history, horizon) if mode == "run" else frequency(history)


class SlidingWindow:
    """The last ``length`` rounds of who was there, (N, up to length): the history, then what was seen.

    >>> window = SlidingWindow(np.array([[True, True, True]]), 2)
    >>> window.add(np.array([False]))
    >>> window.table.tolist()
    [[True, False]]
    """

    def __init__(self, history: Bools, length: int) -> None:
        self.length = length
        self.table: Bools = history[:, max(0, history.shape[1] - length) :].astype(np.bool_)

    def add(self, present: Bools) -> None:
        """Append a round (N,), and forget the oldest if there are too many."""
        longer = np.concatenate([self.table, present[:, None]], axis=1)
        self.table = longer[:, max(0, longer.shape[1] - self.length) :]
