"""The worlds that ``fedplat benchmark hierarchy`` runs policies in: drawn by the platform's own models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fedplat.emulation.availability import bernoulli
from fedplat.emulation.hardware import draw_hardware
from fedplat.emulation.world_settings import wireless
from fedplat.rng import generator
from fedplat.strategies.association.bandit import Cocs
from fedplat.strategies.association.base import (
    AssociationPolicy,
    Costs,
    EdgeWorld,
    Floats,
    Limits,
    Prices,
    RoundState,
)
from fedplat.strategies.association.cloud import Cloud, cloud_states, cloud_world
from fedplat.strategies.association.exchange import Hfel
from fedplat.strategies.association.greedy import CostGreedy, QualityGreedy, Share
from fedplat.strategies.association.online_search import OnlineSearch
from fedplat.strategies.association.plan_policies import PlanA, PlanAB, PlanB
from fedplat.strategies.association.random_choice import AllOnline, RandomLeast, RandomMost
from fedplat.strategies.association.reference import reference_prices

OURS, CLOUD = "plan-ab", "cloud"
POLICIES: dict[str, Callable[[], AssociationPolicy]] = {
    "plan-a": PlanA,
    OURS: PlanAB,
    "plan-b": PlanB,
    "online-search": OnlineSearch,
    "cost-greedy": CostGreedy,
    "quality-greedy": QualityGreedy,
    "share": Share,
    "cocs": Cocs,
    "hfel": Hfel,
    "random-least": RandomLeast,
    "random-most": RandomMost,
    "all-online": AllOnline,
    CLOUD: Cloud,
}
# The small model for MNIST, five epochs, 28 by 28 samples of a byte.
PARAMETERS, EPOCHS, SAMPLE_BITS = 21_840, 5, 8 * 784
EDGE_ROUNDS, LEAST, MOST, DIVERGENCE = 4, 5, 10, 0.3
CLASSES, EACH, SAMPLES = 10, 2, (200, 800)


@dataclass(frozen=True, eq=False)
class Drawn:
    """A world with its rounds, limits and prices, and what clients spend on training alone, (N,) each."""

    world: EdgeWorld
    states: list[RoundState]
    limits: Limits
    prices: Prices
    training: tuple[Floats, Floats]

    def for_cloud(self) -> Drawn:
        """Return the same without edges: clients report to the cloud, which takes ten times as long."""
        world, limits = cloud_world(self.world, self.limits, self._transfers(self.world.mean))
        states = cloud_states(self.states, [self._transfers(state.costs) for state in self.states])
        return replace(self, world=world, limits=limits, states=states)

    def _transfers(self, costs: Costs) -> Costs:
        seconds, joules = self.training
        return Costs(costs.seconds - seconds[:, None], costs.joules - joules[:, None])


def drawn(clients: int, edges: int, rounds: int, seed: int) -> Drawn:
    """Draw a world of as many square kilometres as five edges need, each client with two of ten classes.

    Clients are there with chances of 0.3 to 0.95. The numbers are the inferred defaults of the platform.
    """
    counts = label_counts(clients, seed)
    samples = counts.sum(axis=1).astype(np.int64)
    world = wireless(
        clients,
        rounds,
        seed,
        lambda history: bernoulli(clients, rounds, seed, None, history),
        draw_hardware(clients, seed, cycles_from="bits"),
        edges=edges,
        side_m=1000.0 * math.sqrt(edges / 5),
    )
    work = world.work(0, EPOCHS * samples * SAMPLE_BITS, 4 * PARAMETERS)
    known = world.edge_world(work, counts, samples, EDGE_ROUNDS)
    states = [world.state(number, work) for number in range(1, rounds + 1)]
    target = np.full(CLASSES, 1 / CLASSES)
    limits = Limits(np.full(edges, LEAST), np.full(edges, MOST), DIVERGENCE, target)
    prices = reference_prices(known, states, limits, seed)
    return Drawn(known, states, limits, prices, (work.seconds, work.joules))


def label_counts(clients: int, seed: int) -> Floats:
    """Return label histograms (N, 10): 200 to 800 samples of two classes each, about half and half."""
    counts = np.zeros((clients, CLASSES))
    for client in range(clients):
        rng = generator(seed, "benchmark-hierarchy", client)
        classes = rng.choice(CLASSES, EACH, replace=False)
        samples = rng.integers(SAMPLES[0], SAMPLES[1] + 1)
        counts[client, classes] = rng.multinomial(samples, np.full(EACH, 1 / EACH))
    return counts
