"""Aggregation rules as pure functions on the matrix (n, d) of a round's updates."""

from .base import Aggregate, Aggregator, CoordinateWise, InfeasibleError, RoundPlan, RunningAggregate
from .coordinatewise import mean, median, trimmed_mean, weighted_median
from .flame import flame
from .foolsgold import foolsgold
from .geometric import centered_clipping, geometric_median, norm_clipping, smoothed_weiszfeld
from .krum import bulyan, krum, meamed, multi_krum
from .residuals import residual_reweighting
from .signs import sign_vote, signguard
from .spectral import dnc
from .subsets import covariance_filter, minimum_diameter, monna, smallest_eigenvalue
from .trust import fltrust

__all__ = [
    "Aggregate",
    "Aggregator",
    "CoordinateWise",
    "InfeasibleError",
    "RoundPlan",
    "RunningAggregate",
    "bulyan",
    "centered_clipping",
    "covariance_filter",
    "dnc",
    "flame",
    "fltrust",
    "foolsgold",
    "geometric_median",
    "krum",
    "meamed",
    "mean",
    "median",
    "minimum_diameter",
    "monna",
    "multi_krum",
    "norm_clipping",
    "residual_reweighting",
    "sign_vote",
    "signguard",
    "smallest_eigenvalue",
    "smoothed_weiszfeld",
    "trimmed_mean",
    "weighted_median",
]
