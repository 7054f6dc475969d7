"""How far one client can move what a strategy makes of clipped updates: what central privacy scales noise by.

All bounds are in units of the clip norm C and hold where every update, parameters and float buffers together,
is at most C long and all sample counts are equal. ``reach`` bounds how far the new model lies from the one
sent, ``change`` how far it moves if one of n clients sends the zero update instead of its own; any rule has
change ≤ 2·reach, whatever it remembers of the clients. The bounds stand here together, rather than each with
its rule, since a wrong one breaks a promise that no test of the rule would see.

Why they hold, for updates x₁ … xₙ no longer than C:

* A mean with shares is no longer than C; one with equal shares moves by C/n. Nor is one of updates shortened
  first longer, where the buffers are a mean with the shares that are left, scaled to sum to 1.
* Trimmed mean m, k values cut off at either end: per coordinate the k values cut off beyond mⱼ and the n − 2k
  kept have squares that add up to (n − k)·mⱼ² or more. So ‖m‖² ≤ C²·n/(n − k), which may be longer than C.
  If one of n values changes, the sum of the kept ones changes by b − a at most, where b and a are the k-th
  largest and smallest of the others. As k values are b or more, k are a or less, and b counts where it is
  positive and a where it is negative, Σⱼ (b − a)² ≤ 2·(n − 1)·C²/k.
* Mean m of a window of values around the median: those in it and those beyond it on the side of mⱼ are half
  of all or more. So ‖m‖² ≤ 2·C². Buffers that are a mean with other shares add C² to the square.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.serverapp import strategy as flowers
from flwr.serverapp.strategy import Strategy

from fedplat.errors import UserError

from .aggregators import Aggregator
from .aggregators.coordinatewise import trim_count
from .baselines import MeanRule, MedianRule, TrimmedMeanRule
from .composed import FederatedStrategy
from .fed_credit import CredibilityRule
from .filtering import DivideAndConquerRule, FlameRule, SignGuardRule, SignVoteRule
from .mud_hog import MudHogRule
from .preaggregators import AdaptiveClipping, Bucketing, Clipping, NearestNeighbourMixing, Preprocessed
from .robust import (
    Bulyan,
    ClippingRule,
    DeclaredRule,
    GeometricMedianRule,
    Krum,
    Meamed,
    MultiKrum,
    SmoothedWeiszfeldRule,
)
from .similarity import FoolsGoldRule, ReputationRule, TrustRule
from .submodels import FullModel
from .subset_rules import CovarianceFilter, MinimumDiameter, MonnaRule, ResidualRule, SmallestEigenvalue
from .topology import Flat
from .wrapper import StrategyWrapper

Sensitivity = Callable[[int], float]


@dataclass(frozen=True)
class Bound:
    """``reach`` and ``change`` in clip norms; see the module."""

    reach: float
    change: float

    @classmethod
    def within(cls, reach: float) -> Bound:
        """Return what is known of a rule of which only the reach is."""
        return cls(reach, 2 * reach)


BALL = Bound.within(1.0)
AROUND_MEDIAN = Bound.within(math.sqrt(3))


def trimmed_bound(clients: int, trim: int) -> Bound:
    """Return the bound of the coordinate-wise mean without ``trim`` values at either end; 2·trim < clients.

    >>> trimmed_bound(20, 0).change, round(trimmed_bound(20, 4).change, 3), trimmed_bound(3, 1).change
    (0.05, 0.257, 2.0)
    """
    if trim == 0:
        return Bound(1.0, 1 / clients)
    reach = math.sqrt(clients / (clients - trim))
    return Bound(reach, min(2 * reach, math.sqrt(2 * (clients - 1) / trim) / (clients - 2 * trim)))


# What is said of a kind of rule, or of a strategy whose rule is one of a general kind: a bound for n clients,
# or why there is none. Exact classes only: a subclass may do anything.
_Known = dict[type, Callable[[Any, int], Bound | str]]

_RULES: _Known = {
    MeanRule: lambda rule, n: trimmed_bound(n, 0),
    MedianRule: lambda rule, n: (
        Bound.within(math.sqrt(2)) if rule.weighted else trimmed_bound(n, (n - 1) // 2)
    ),
    TrimmedMeanRule: lambda rule, n: trimmed_bound(n, min(trim_count(rule.beta, n), (n - 1) // 2)),
    GeometricMedianRule: lambda rule, n: BALL,
    SmoothedWeiszfeldRule: lambda rule, n: BALL,
    # After several steps of centred clipping the shares for the buffers are those of the last one.
    ClippingRule: lambda rule, n: BALL if rule.steps in (None, 1) else Bound.within(math.sqrt(2)),
    MonnaRule: lambda rule, n: BALL,
    DivideAndConquerRule: lambda rule, n: BALL,
    SignGuardRule: lambda rule, n: BALL,
    FoolsGoldRule: lambda rule, n: BALL,
    ReputationRule: lambda rule, n: BALL,
    CredibilityRule: lambda rule, n: BALL,
    # If nobody is left it takes the median.
    MudHogRule: lambda rule, n: AROUND_MEDIAN,
    FlameRule: lambda rule, n: (
        BALL if rule.noise == 0 else "its own noise is as large as the updates are long; set noise = 0"
    ),
    SignVoteRule: lambda rule, n: "its step is lr per coordinate, whatever the updates' length",
    TrustRule: lambda rule, n: "its step is as long as the server's own update, which is not clipped",
    ResidualRule: lambda rule, n: "it may put values onto a line that leads beyond all updates",
}

_STRATEGIES: _Known = {
    Krum: lambda strategy, n: BALL,
    MultiKrum: lambda strategy, n: BALL,
    MinimumDiameter: lambda strategy, n: BALL,
    CovarianceFilter: lambda strategy, n: BALL,
    SmallestEigenvalue: lambda strategy, n: BALL,
    Bulyan: lambda strategy, n: AROUND_MEDIAN,
    Meamed: lambda strategy, n: AROUND_MEDIAN,
}

_MOMENTUM = "it adds to the updates what it keeps of earlier rounds"

_FLOWERS: _Known = {
    flowers.FedAvg: lambda strategy, n: trimmed_bound(n, 0),
    flowers.FedProx: lambda strategy, n: trimmed_bound(n, 0),
    flowers.FedMedian: lambda strategy, n: trimmed_bound(n, (n - 1) // 2),
    flowers.FedTrimmedAvg: lambda strategy, n: trimmed_bound(n, int(strategy.beta * n)),
    flowers.Krum: lambda strategy, n: BALL,
    flowers.MultiKrum: lambda strategy, n: BALL,
    flowers.Bulyan: lambda strategy, n: (
        AROUND_MEDIAN
        if strategy.selection_rule is flowers.Bulyan().selection_rule
        else "nothing is known of its own rule of selection"
    ),
    flowers.FedAvgM: lambda strategy, n: _MOMENTUM,
    flowers.FedAdagrad: lambda strategy, n: _MOMENTUM,
    flowers.FedAdam: lambda strategy, n: _MOMENTUM,
    flowers.FedYogi: lambda strategy, n: _MOMENTUM,
    flowers.QFedAvg: lambda strategy, n: "its weights follow the clients' losses",
}

_STEPS = (Bucketing, NearestNeighbourMixing, Clipping, AdaptiveClipping)
_HARMLESS = {"__init__", "configure_evaluate", "aggregate_evaluate", "summary"}


def sensitivity_of(strategy: Strategy) -> Sensitivity:
    """Return how far one of n clients can move a strategy's new model, in clip norms, as a function of n.

    Raises UserError, with the reason, for a strategy that has no bound or none that is known; a rule of one's
    own tells its bound by :meth:`Aggregator.sensitivity`.

    >>> from fedplat.strategies import Krum, Mean
    >>> sensitivity_of(Mean())(20), sensitivity_of(Krum())(20)
    (0.05, 2.0)
    """
    name = type(strategy).__name__
    # Whether there is a bound does not depend on the number of clients.
    if isinstance(found := _bound(strategy, 1), str):
        raise UserError(
            f"central privacy cannot say how far one client can move {name}: {found}. Take another strategy, "
            "such as mean, or give sensitivity, the distance in clip norms, if you can prove one"
        )

    def sensitivity(clients: int) -> float:
        bound = _bound(strategy, clients)
        return math.inf if isinstance(bound, str) else bound.change

    return sensitivity


def _bound(strategy: Strategy, clients: int) -> Bound | str:
    if isinstance(strategy, StrategyWrapper):
        return "it is around another strategy; put central privacy directly around that one, inside it"
    if not isinstance(strategy, FederatedStrategy):
        told = _FLOWERS.get(type(strategy))
        return told(strategy, clients) if told else "it is not one of those whose bound is known"
    if not isinstance(strategy.submodels, FullModel) or not isinstance(strategy.topology, Flat):
        return "bounds are known for whole models and one server only"
    bound = _rule_bound(strategy.aggregator, strategy, clients)
    if isinstance(bound, str):
        return bound
    between = type(strategy).__mro__[: type(strategy).__mro__.index(FederatedStrategy)]
    own = {name for kind in between for name in vars(kind) if hasattr(FederatedStrategy, name)}
    changed = sorted(name for name in own - _HARMLESS if callable(getattr(strategy, name)))
    return f"it does its own {', '.join(changed)}" if changed else bound


def _rule_bound(rule: Aggregator, strategy: FederatedStrategy, clients: int) -> Bound | str:
    if type(rule) is Preprocessed:
        if unknown := [type(step).__name__ for step in rule.before if type(step) not in _STEPS]:
            return f"nothing is known of the step {unknown[0]} before the rule"
        left = clients
        for step in rule.before:
            left = step.clients_after(left)
        mixed = _rule_bound(rule.rule, strategy, left)
        plain = _rule_bound(rule.rule, strategy, clients)
        if isinstance(mixed, str) or isinstance(plain, str):
            return mixed if isinstance(mixed, str) else str(plain)
        # One client may change every row that the rule sees; the buffers are combined without the steps.
        return Bound.within(math.hypot(mixed.reach, plain.reach))
    if told := _RULES.get(type(rule)):
        return told(rule, clients)
    if type(rule) is DeclaredRule and (told := _STRATEGIES.get(type(strategy))):
        return told(strategy, clients)
    change = rule.sensitivity(clients)
    if not math.isfinite(change):
        return f"its rule {type(rule).__name__} does not tell"
    return Bound(math.inf, change)
