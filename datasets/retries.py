"""Bounded repetition of a random draw, and advice when no draw fits."""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError

Draw = Callable[[], NDArray[np.int64]]

_TRIAL_DRAWS = 10
_TRIAL_STEPS = 8


def first_fit(
    scheme: str,
    drawer: Callable[[int, float], Draw],
    clients: int,
    min_samples: int,
    max_tries: int,
    **skew: tuple[float, float],
) -> NDArray[np.int64]:
    """Return the first drawn counts (rows, clients) that give every client ``min_samples`` samples.

    ``drawer(clients, value)`` makes the draw; ``skew`` names the setting behind ``value``, with its value and
    the factor that makes the split more even. After ``max_tries`` draws raises UserError with the best
    minimum reached and with settings that did fit when tried.
    """
    ((setting, (value, factor)),) = skew.items()
    draw = drawer(clients, value)
    best = 0
    for _ in range(max_tries):
        counts = draw()
        smallest = _smallest(counts)
        if smallest >= min_samples:
            return counts
        best = max(best, smallest)
    fits = [f"min_samples = {best}"] if best > 0 else []
    steps = range(1, _TRIAL_STEPS + 1)
    fits += _first(setting, (value * factor**k for k in steps), lambda v: drawer(clients, v), min_samples)
    fewer = (clients // 2**k for k in steps if clients // 2**k > 0)
    fits += _first("clients", fewer, lambda n: drawer(int(n), value), min_samples)
    fits += ["a larger max_tries"] if best > 0 else []
    advice = ", or ".join(fits) or "a more even split, fewer clients or a smaller min_samples"
    raise UserError(
        f"partition '{scheme}' with {setting} = {value:g}: in {max_tries} draws the smallest of {clients} "
        f"clients never got more than {best} samples, and min_samples asks for {min_samples}. "
        f"What would fit: {advice}"
    )


def _smallest(counts: NDArray[np.int64]) -> int:
    return int(counts.sum(axis=0).min())


def _first(
    name: str, values: Iterable[float], drawer: Callable[[float], Draw], min_samples: int
) -> list[str]:
    for value in values:
        draw = drawer(value)
        hits = sum(_smallest(draw()) >= min_samples for _ in range(_TRIAL_DRAWS))
        if 2 * hits >= _TRIAL_DRAWS:
            return [f"{name} = {value:g}"]
    return []
