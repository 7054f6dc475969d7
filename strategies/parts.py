"""The keyword arguments that all strategies have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from fedplat.emulation.schedule import DeviceSchedule
from fedplat.security.validation import ReplyRules

from .preaggregators import PreAggregator
from .selectors import AllClients, RandomFraction, Selector
from .submodels import SubModelScheme
from .topology import Topology


class StrategyParts(TypedDict, total=False):
    """The keyword arguments that every fedplat strategy passes on to :class:`FederatedStrategy`."""

    selector: Selector
    submodels: SubModelScheme
    topology: Topology
    before: Sequence[PreAggregator]
    seed: int
    rules: ReplyRules
    fraction_evaluate: float
    min_nodes: int
    node_wait: float
    stream_above: int
    devices: DeviceSchedule
    fraction_train: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str


def selector_of(selector: Selector | None, fraction_train: float) -> Selector:
    """Return who takes part: as the selector says, or so large a part of the clients, drawn each round."""
    if selector is not None and fraction_train != 1:
        raise ValueError("give a selector or fraction_train, not both")
    return selector or (AllClients() if fraction_train == 1 else RandomFraction(fraction=fraction_train))


def rules_of(rules: ReplyRules | None, weighted_by_key: str | None) -> ReplyRules:
    """Return what is asked of a reply, with the sample count under this name."""
    if rules is not None and weighted_by_key is not None:
        raise ValueError("weighted_by_key is part of rules; give one of them")
    return rules or (ReplyRules() if weighted_by_key is None else ReplyRules(weighted_by_key=weighted_by_key))
