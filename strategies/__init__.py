"""Strategies for Flower servers: import one, hand it to a ``ServerApp``.

from fedplat.strategies import Median

Median().start(grid, initial_arrays, num_rounds=10)
"""

from .baselines import Mean, Median, TrimmedMean
from .composed import ClientReport, FederatedStrategy
from .selectors import AllClients, RandomFraction

__all__ = [
    "AllClients",
    "ClientReport",
    "FederatedStrategy",
    "Mean",
    "Median",
    "RandomFraction",
    "TrimmedMean",
]
