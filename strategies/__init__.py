"""Strategies for Flower servers: import one, hand it to a ``ServerApp``.

from fedplat.strategies import Median

Median().start(grid, initial_arrays, num_rounds=10)
"""

from .baselines import Mean, Median, TrimmedMean
from .composed import ClientReport, FederatedStrategy
from .fed_credit import FedCredit
from .robust import Bulyan, CenteredClipping, GeometricMedian, Krum, Meamed, MultiKrum, NormClipping
from .selectors import AllClients, RandomFraction

__all__ = [
    "AllClients",
    "Bulyan",
    "CenteredClipping",
    "ClientReport",
    "FedCredit",
    "FederatedStrategy",
    "GeometricMedian",
    "Krum",
    "Meamed",
    "Mean",
    "Median",
    "MultiKrum",
    "NormClipping",
    "RandomFraction",
    "TrimmedMean",
]
