"""Strategies for Flower servers: import one, hand it to a ``ServerApp``.

from fedplat.strategies import Median

Median().start(grid, initial_arrays, num_rounds=10)
"""

from .baselines import Mean, Median, TrimmedMean
from .composed import FederatedStrategy
from .differential_privacy import CentralPrivacy, LocalPrivacyAccount
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
from .secure_aggregation import SecureAggregation
from .selectors import AllClients, RandomFraction
from .signed_updates import SignedUpdates
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
    "CentralPrivacy",
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
    "LocalPrivacyAccount",
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
    "SecureAggregation",
    "SignGuard",
    "SignVote",
    "SignedUpdates",
    "SmallestEigenvalue",
    "TrimmedMean",
]
