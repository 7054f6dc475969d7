"""A strategy around a strategy: what goes out and what comes in passes through it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from .composed import FederatedStrategy
from .reports import ClientReport


class StrategyWrapper(Strategy):
    """Passes everything on to another strategy, Flower's own or ours; subclasses change what they are about.

    Wrappers may be nested. :meth:`own_state` and :meth:`load_own_state` are what a subclass itself remembers.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the inner strategy's messages."""
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the inner strategy combine the replies."""
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the inner strategy's messages."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Let the inner strategy combine the metrics."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the inner strategy's settings."""
        self.strategy.summary()

    @property
    def reports(self) -> Sequence[ClientReport]:
        """What became of each client's reply in the last round; empty for a strategy that does not tell."""
        return reports_of(self.strategy)

    @property
    def diagnostics(self) -> Mapping[str, float]:
        """Figures of the last round."""
        return diagnostics_of(self.strategy)

    def own_state(self) -> dict[str, Any]:
        """Return what the wrapper remembers from round to round, as tensors and plain values."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`own_state` returned."""


def innermost(strategy: Strategy) -> Strategy:
    """Return the strategy inside all wrappers."""
    while isinstance(strategy, StrategyWrapper):
        strategy = strategy.strategy
    return strategy


def reports_of(strategy: Strategy) -> Sequence[ClientReport]:
    """Return a strategy's reports on the last round; none if it makes none."""
    return strategy.reports if isinstance(strategy, FederatedStrategy | StrategyWrapper) else ()


def diagnostics_of(strategy: Strategy) -> Mapping[str, float]:
    """Return a strategy's figures of the last round; none if it has none."""
    return strategy.diagnostics if isinstance(strategy, FederatedStrategy | StrategyWrapper) else {}


def client_of(strategy: Strategy, node_id: int) -> int:
    """Return the number that a node is reported under."""
    inner = innermost(strategy)
    return inner.client_of(node_id) if isinstance(inner, FederatedStrategy) else node_id


def state_of(strategy: Strategy) -> dict[str, Any]:
    """Return what a strategy and the wrappers around it remember; empty for one that cannot tell."""
    if isinstance(strategy, StrategyWrapper):
        return {"own": strategy.own_state(), "strategy": state_of(strategy.strategy)}
    return strategy.state_dict() if isinstance(strategy, FederatedStrategy) else {}


def load_state(strategy: Strategy, state: Mapping[str, Any]) -> None:
    """Put back what :func:`state_of` returned for the same strategy with the same wrappers."""
    if isinstance(strategy, StrategyWrapper):
        strategy.load_own_state(state["own"])
        load_state(strategy.strategy, state["strategy"])
    elif isinstance(strategy, FederatedStrategy):
        strategy.load_state_dict(state)
