"""FedConv: models made smaller and larger by convolutions, its learned mean, and the controls to compare."""

from .controls import FullFinetuned, PrefixFinetuned, Standalone
from .scheme import FedConvScheme
from .weights import LearnedWeights, ServerAlone

__all__ = [
    "FedConvScheme",
    "FullFinetuned",
    "LearnedWeights",
    "PrefixFinetuned",
    "ServerAlone",
    "Standalone",
]
