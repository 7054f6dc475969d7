"""Aggregation rules as pure functions on the matrix (n, d) of a round's updates."""

from .base import Aggregate, Aggregator, CoordinateWise, InfeasibleError
from .coordinatewise import mean, median, trimmed_mean

__all__ = [
    "Aggregate",
    "Aggregator",
    "CoordinateWise",
    "InfeasibleError",
    "mean",
    "median",
    "trimmed_mean",
]
