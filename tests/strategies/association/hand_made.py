"""Small worlds with numbers that can be followed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedplat.strategies.association.base import Costs, EdgeWorld, Limits, RoundState


def hand_made(
    seconds: Any,
    joules: Any = None,
    counts: Any = None,
    covered: Any = None,
    *,
    least: int = 1,
    most: int = 9,
    divergence: float = 0.3,
    edge_rounds: int = 1,
    cloud_seconds: float = 0.0,
    cloud_joules: float = 0.0,
) -> tuple[EdgeWorld, Limits]:
    """Return a world of given costs (N, M), where everybody sees every edge and has the same two labels."""
    times = np.array(seconds, np.float64)
    energy = np.ones_like(times) if joules is None else np.array(joules, np.float64)
    clients, edges = times.shape
    labels = np.full((clients, 2), 5.0) if counts is None else np.array(counts, np.float64)
    classes = labels.shape[1]
    world = EdgeWorld(
        covered=np.ones(times.shape, bool) if covered is None else np.array(covered, bool),
        counts=labels,
        samples=labels.sum(axis=1).astype(np.int64),
        history=np.ones((clients, 4), bool),
        mean=Costs(times, energy),
        cloud_seconds=np.full(edges, cloud_seconds),
        cloud_joules=np.full(edges, cloud_joules),
        edge_rounds=edge_rounds,
    )
    target = np.full(classes, 1 / classes) if classes else np.zeros(0)
    return world, Limits(np.full(edges, least), np.full(edges, most), divergence, target)


def all_there(world: EdgeWorld, number: int = 1, absent: tuple[int, ...] = ()) -> RoundState:
    """Return a round of mean costs with everybody but a few."""
    present = np.ones(world.clients, bool)
    present[list(absent)] = False
    return RoundState(number, present, world.mean)
