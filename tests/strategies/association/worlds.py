"""Random worlds of clients and edges for tests, drawn without any of the platform's own models."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fedplat.strategies.association.base import (
    NOWHERE,
    Costs,
    EdgeWorld,
    Floats,
    Ints,
    Limits,
    Prices,
    RoundState,
    round_joules,
    round_seconds,
)

CLASSES = 10
RANGE_KM = 0.45
BANDWIDTH_HZ = 1e6
NOISE_W = 10 ** ((-174 - 30) / 10) * BANDWIDTH_HZ
MODEL_BITS = 32 * 21_840
SAMPLE_BITS = 8 * 784
EPOCHS = 5


def small_world(
    seed: int,
    clients: int = 60,
    edges: int = 5,
    rounds: int = 10,
    *,
    history: int = 100,
    presence: tuple[float, float] = (0.3, 0.95),
    least: int = 5,
    most: int = 10,
    divergence: float = 0.3,
    classes_each: int = 2,
    fading: bool = True,
) -> tuple[EdgeWorld, list[RoundState], Limits, Prices]:
    """Draw a world of two classes per client on a square with overlapping edges, and its rounds.

    Five edges are the quadrants' centres and the middle of 1 km x 1 km; other numbers lie on a grid on a
    square of as much area per edge. Clients out of everybody's range are in that of the nearest edge. The
    prices are such that random clients, ``least`` at each edge, cost 1 on average.
    """
    rng = np.random.default_rng([seed, clients, edges])
    at, side = _edge_positions(edges)
    where = rng.uniform(0, side, (clients, 2))
    km = np.linalg.norm(where[:, None] - at[None], axis=2)
    covered = (km <= RANGE_KM) | (km == km.min(axis=1, keepdims=True))
    gain = 10 ** (-(128.1 + 37.6 * np.log10(np.maximum(km, 0.01))) / 10)
    watts = rng.uniform(0.1, 0.2, clients)

    samples = rng.integers(200, 801, clients)
    counts = np.zeros((clients, CLASSES))
    for client in range(clients):
        classes = rng.choice(CLASSES, classes_each, replace=False)
        share = rng.multinomial(samples[client], np.full(classes_each, 1 / classes_each))
        counts[client, classes] = share

    hertz = rng.uniform(1e9, 2e9, clients)
    cycles = EPOCHS * samples * SAMPLE_BITS * rng.uniform(15, 30, clients)
    training_seconds, training_joules = cycles / hertz, 1e-28 * cycles * hertz**2

    def costs(fade: Floats | float) -> Costs:
        rate = BANDWIDTH_HZ * np.log2(1 + watts[:, None] * gain * fade / NOISE_W)
        upload = MODEL_BITS / rate
        return Costs(training_seconds[:, None] + upload, training_joules[:, None] + watts[:, None] * upload)

    chance = rng.uniform(*presence, clients)
    world = EdgeWorld(
        covered=covered,
        counts=counts,
        samples=samples,
        history=rng.random((clients, history)) < chance[:, None],
        mean=costs(1.0),
        cloud_seconds=rng.uniform(0.5, 1.0, edges),
        cloud_joules=rng.uniform(0.2, 0.5, edges),
        edge_rounds=4,
    )
    states = [
        RoundState(
            number,
            rng.random(clients) < chance,
            costs(np.maximum(rng.exponential(size=(clients, edges)), 1e-3) if fading else 1.0),
        )
        for number in range(1, rounds + 1)
    ]
    limits = Limits(np.full(edges, least), np.full(edges, most), divergence, np.full(CLASSES, 1 / CLASSES))
    return world, states, limits, _prices(world, states, limits, rng)


def _edge_positions(edges: int) -> tuple[Floats, float]:
    if edges == 5:
        return np.array([[0.25, 0.25], [0.75, 0.25], [0.25, 0.75], [0.75, 0.75], [0.5, 0.5]]), 1.0
    side = math.sqrt(edges / 5)
    columns = math.ceil(math.sqrt(edges))
    rows = math.ceil(edges / columns)
    cells = [
        ((c + 0.5) * side / columns, (r + 0.5) * side / rows) for r in range(rows) for c in range(columns)
    ]
    return np.array(cells[:edges]), side


def _prices(world: EdgeWorld, states: list[RoundState], limits: Limits, rng: np.random.Generator) -> Prices:
    seconds, joules = [1e-9], [1e-9]
    for state in states:
        edge_of = random_least(world, state, limits, rng)
        if (edge_of != NOWHERE).any():
            seconds.append(round_seconds(world, state.costs, edge_of))
            joules.append(round_joules(world, state.costs, edge_of))
    first = 1 if len(seconds) > 1 else 0
    return Prices(seconds_ref=float(np.mean(seconds[first:])), joules_ref=float(np.mean(joules[first:])))


def random_least(world: EdgeWorld, state: RoundState, limits: Limits, rng: np.random.Generator) -> Ints:
    """Return present clients in random order, each at a random edge in reach that has not its least yet."""
    edge_of = np.full(world.clients, NOWHERE)
    size = np.zeros(world.edges, np.int64)
    for client in rng.permutation(np.flatnonzero(state.present)):
        open_edges = np.flatnonzero(world.covered[client] & (size < limits.least))
        if len(open_edges):
            edge_of[client] = rng.choice(open_edges)
            size[edge_of[client]] += 1
    return edge_of


def renumbered(world: EdgeWorld, order: Ints) -> EdgeWorld:
    """Return the same world, in which client n is who was number ``order[n]``."""
    return replace(
        world,
        covered=world.covered[order],
        counts=world.counts[order],
        samples=world.samples[order],
        history=world.history[order],
        mean=Costs(world.mean.seconds[order], world.mean.joules[order]),
    )
