"""FedP3: layers shared out among the clients, the others pruned on their way, and its rules."""

from .aggregation import FedP3, LayerwiseRule, attention
from .scheme import FedP3Scheme

__all__ = ["FedP3", "FedP3Scheme", "LayerwiseRule", "attention"]
