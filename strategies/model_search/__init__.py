"""Dynamic model search: each round, each client gets the sub-model that makes the most of its device.

Source: Yao, "Revisiting System-Heterogeneous Federated Learning through Dynamic Model Search", IEEE BigData
2024 (arXiv 2409.08858), as far as its abstract and released code tell; see docs/dynamic-model-selection.md.
"""

from .costs import Counts, SpaceCosts
from .scheme import ModelSearch
from .search import EarlyStop, Evolution, Problem, best_of, evolution, random_early_stop, utilisation
from .space import Knob, SearchSpace, search_space

__all__ = [
    "Counts",
    "EarlyStop",
    "Evolution",
    "Knob",
    "ModelSearch",
    "Problem",
    "SearchSpace",
    "SpaceCosts",
    "best_of",
    "evolution",
    "random_early_stop",
    "search_space",
    "utilisation",
]
