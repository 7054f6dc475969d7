"""Strategies for Flower servers: import one, hand it to a ``ServerApp``.

from fedplat.strategies import Median

Median().start(grid, initial_arrays, num_rounds=10)
"""

from .baselines import Mean, Median, TrimmedMean
from .composed import FederatedStrategy
from .fed_credit import FedCredit
from .filtering import DivideAndConquer, Flame, SignGuard, SignVote
from .mud_hog import MudHog
from .preaggregators import AdaptiveClipping, Bucketing, Clipping, NearestNeighbourMixing
from .reports import ClientReport
from .robust import (
    RFA,
    Bulyan,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Meamed,
    MultiKrum,
    NormClipping,
)
from .selectors import AllClients, RandomFraction
from .similarity import RFFL, FLTrust, FoolsGold
from .subset_rules import (
    CovarianceFilter,
    MinimumDiameter,
    Monna,
    ResidualReweighting,
    SmallestEigenvalue,
)

__all__ = [
    "RFA",
    "RFFL",
    "AdaptiveClipping",
    "AllClients",
    "Bucketing",
    "Bulyan",
    "CenteredClipping",
    "ClientReport",
    "Clipping",
    "CovarianceFilter",
    "DivideAndConquer",
    "FLTrust",
    "FedCredit",
    "FederatedStrategy",
    "Flame",
    "FoolsGold",
    "GeometricMedian",
    "Krum",
    "Meamed",
    "Mean",
    "Median",
    "MinimumDiameter",
    "Monna",
    "MudHog",
    "MultiKrum",
    "NearestNeighbourMixing",
    "NormClipping",
    "RandomFraction",
    "ResidualReweighting",
    "SignGuard",
    "SignVote",
    "SmallestEigenvalue",
    "TrimmedMean",
]
