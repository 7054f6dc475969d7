"""Where clients and edge servers stand, who reaches whom, and how good the channels between them are.

Clients n = 0..N-1 and edges m = 0..M-1 in a square; metres, bit/s, watts. What is drawn for a client depends
on the seed and the client alone, and fading on the seed and the round too: more clients, more edges and more
rounds only append. The model is the usual one of wireless edge learning: path loss by distance, optional
shadowing that stays, optional fading that is drawn anew each round, sub-channels without interference.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UserError, unknown_name
from ..rng import generator
from .hardware import path_gain

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Layout = Literal["regular", "drawn"]


def client_positions(clients: int, side_m: float, seed: int) -> Floats:
    """Return where clients are (N, 2), uniform over the square."""
    return np.stack([generator(seed, "world client", n).random(2) for n in range(clients)]) * side_m


def edge_positions(edges: int, side_m: float, layout: Layout = "regular", seed: int = 0) -> Floats:
    """Return where edge servers are (M, 2): in rows that fill the square, or ``drawn`` uniformly over it.

    Five are at the centres of the quadrants and of the square. Others are in about as many rows as there are
    edges in a row, each row spread evenly, which for square numbers is a grid.

    >>> edge_positions(5, 1000.0).tolist()
    [[250.0, 250.0], [750.0, 250.0], [500.0, 500.0], [250.0, 750.0], [750.0, 750.0]]
    >>> edge_positions(1, 1000.0).tolist(), edge_positions(3, 900.0).round().tolist()
    ([[500.0, 500.0]], [[225.0, 225.0], [675.0, 225.0], [450.0, 675.0]])
    """
    if edges < 1 or not 0 < side_m < math.inf:
        raise UserError(f"{edges} edges in a square of {side_m} m: expected 1 or more, and a size above 0")
    if layout == "drawn":
        return np.stack([generator(seed, "world edge", m).random(2) for m in range(edges)]) * side_m
    if layout != "regular":
        raise unknown_name("layout", str(layout), ("regular", "drawn"))
    rows = [2, 1, 2] if edges == 5 else _rows(edges)
    places = [
        ((column + 0.5) / count, (row + 0.5) / len(rows) if edges != 5 else (0.25, 0.5, 0.75)[row])
        for row, count in enumerate(rows)
        for column in range(count)
    ]
    return np.array(places) * side_m


def _rows(edges: int) -> list[int]:
    rows = max(round(math.sqrt(edges)), 1)
    each, more = divmod(edges, rows)
    return [each + (row < more) for row in range(rows)]


def distances(client_m: Floats, edge_m: Floats) -> Floats:
    """Return how far each client is from each edge (N, M)."""
    return np.asarray(np.linalg.norm(client_m[:, None] - edge_m[None], axis=2))


def coverage(distance_m: Floats, range_m: float) -> Bools:
    """Return whose range each client is in (N, M); one out of everybody's range reaches the nearest edge.

    >>> coverage(np.array([[300.0, 400.0], [700.0, 600.0]]), 450.0).tolist()
    [[True, True], [False, True]]
    """
    covered = distance_m <= range_m
    lost = ~covered.any(axis=1)
    covered[lost, distance_m[lost].argmin(axis=1)] = True
    return np.asarray(covered)


def mean_gains(distance_m: Floats, shadowing_db: float, seed: int) -> Floats:
    """Return what part of the power arrives, without fading (N, M).

    Shadowing is log-normal, drawn once per pair, with this standard deviation; 0: none.
    """
    if not shadowing_db:
        return np.asarray(path_gain(distance_m / 1000))
    clients, edges = distance_m.shape
    drawn = [generator(seed, "world shadowing", n).standard_normal(edges) for n in range(clients)]
    return np.asarray(path_gain(distance_m / 1000, shadowing_db * np.stack(drawn)))


def fading(clients: int, edges: int, round_: int, seed: int) -> Floats:
    """Return the factor of each channel in a round (N, M): exponential with mean 1 (Rayleigh fading)."""
    # A generator for each edge: there are far fewer of them than clients.
    draws = [generator(seed, "world fading", round_, m).random(clients) for m in range(edges)]
    return -np.log1p(-np.stack(draws, axis=1))


def fading_of(client: int, edge: int, round_: int, seed: int) -> float:
    """Return the factor of one channel, as in :func:`fading`."""
    return float(-np.log1p(-generator(seed, "world fading", round_, edge).random(client + 1)[client]))


def mean_rate(
    bandwidth_hz: ArrayLike, transmit_w: ArrayLike, gain: ArrayLike, noise_w_per_hz: ArrayLike
) -> Any:
    """Return the mean bit/s over Rayleigh fading of a channel with this mean gain.

    With s the mean signal-to-noise ratio it is B exp(1/s) E1(1/s) / ln 2, which is below the rate of the mean
    gain. The mean *seconds* would be infinite, since deep fades come often enough for that, so what a client
    takes on average is told as its bits over its mean rate.

    >>> from fedplat.emulation.hardware import shannon_rate
    >>> [round(float(rate(1e6, 0.1, 1e-11, 1e-20)) / 1e6, 2) for rate in (mean_rate, shannon_rate)]
    [5.88, 6.66]
    """
    from scipy.special import exp1

    band, noise = np.asarray(bandwidth_hz, np.float64), np.asarray(noise_w_per_hz, np.float64)
    signal = np.asarray(transmit_w, np.float64) * np.asarray(gain, np.float64)
    inverse = noise * band / np.maximum(signal, np.finfo(np.float64).tiny)
    # exp(x) E1(x) tends to 1 / (x + 1); far out, its factors are beyond what numbers can hold.
    near = np.minimum(inverse, 500.0)
    return band / math.log(2) * np.where(inverse < 500.0, np.exp(near) * exp1(near), 1 / (inverse + 1))
