"""Aggregation rules as pure functions on the matrix (n, d) of a round's updates."""

from .base import Aggregate, Aggregator, CoordinateWise, InfeasibleError
from .coordinatewise import mean, median, trimmed_mean
from .geometric import centered_clipping, geometric_median, norm_clipping
from .krum import bulyan, krum, meamed, multi_krum

__all__ = [
    "Aggregate",
    "Aggregator",
    "CoordinateWise",
    "InfeasibleError",
    "bulyan",
    "centered_clipping",
    "geometric_median",
    "krum",
    "meamed",
    "mean",
    "median",
    "multi_krum",
    "norm_clipping",
    "trimmed_mean",
]
