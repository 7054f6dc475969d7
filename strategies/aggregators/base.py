"""What an aggregation rule returns, and the thin class that puts one into a strategy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fedplat.errors import UserError
from fedplat.updates import ClientUpdates

from .coverage import Covered, covered_mean


@dataclass(frozen=True)
class Aggregate:
    """The outcome of an aggregation rule.

    ``vector`` (d,) float32 is the new model, ``weights`` (n,) float64 each client's share in it (they sum
    to 1, or are 0 if nobody was used; where sub-models cover parts, it is the share between those who cover),
    ``accepted`` (n,) bool who had any share. ``verdicts`` judges clients
    by row, where the rule does, in the words of :mod:`fedplat.verdicts`. ``scores`` are further figures per
    client (n,), such as a credibility, and ``diagnostics`` figures of the round; both end up in the records
    of a run.
    """

    vector: torch.Tensor
    weights: torch.Tensor
    accepted: torch.Tensor
    verdicts: Mapping[int, str] = field(default_factory=dict)
    diagnostics: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)


class InfeasibleError(UserError):
    """A rule's parameters do not allow the number of clients at hand; the message gives the inequality."""


@dataclass(frozen=True)
class RoundPlan:
    """What is known of a round before its first reply.

    ``reference`` (d,) is the model sent, of which the first ``num_params`` elements are parameters and the
    rest buffers; ``clients`` is the number of clients asked.
    """

    reference: torch.Tensor
    num_params: int
    server_round: int
    clients: int


class RunningAggregate(ABC):
    """A rule at work on one round's updates, which come in blocks of clients and are gone afterwards.

    The outcome is that of the rule on all updates at once, up to rounding. What the rule remembers from round
    to round changes in :meth:`finish` only, so that a round given up half way leaves no trace.
    """

    @abstractmethod
    def add(self, updates: ClientUpdates) -> None:
        """Take the next clients with all d elements, buffers included; their memory is used again."""

    @abstractmethod
    def finish(self, refused: tuple[int, ...]) -> Aggregate:
        """Return the outcome over the clients of all blocks, at least one; ``vector`` has the buffers too.

        ``refused`` names the nodes whose replies were not valid.
        """

    def close(self) -> None:  # noqa: B027
        """Give back what the rule holds besides memory."""


class Aggregator(ABC):
    """A rule with its parameters. State, where a rule has any, is keyed by node id and can be saved."""

    @abstractmethod
    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Combine the updates of one round; the updates are left as they are."""

    def check(self, clients: int) -> None:  # noqa: B027
        """Raise InfeasibleError if the rule cannot work on so many clients; called before the first round."""

    def buffers(self, updates: ClientUpdates, aggregate: Aggregate) -> torch.Tensor:
        """Combine float buffers (n, b), such as BatchNorm's running statistics, by the shares just found.

        Of buffers that not all clients cover, those who do are combined, and what is left stays as it is.
        """
        if (covered := Covered.by(updates)) is not None:
            return covered_mean(updates.params, aggregate.weights, covered)
        return (aggregate.weights @ updates.params.double()).float()

    def running(self, plan: RoundPlan) -> RunningAggregate | None:
        """Return the rule ready to take updates in blocks; None if it has to see all of them at once."""
        return None

    def disk_bytes(self, clients: int, dim: int) -> int:
        """Return how large a temporary file the rule needs where it takes updates in blocks."""
        return 0

    def sensitivity(self, clients: int) -> float:
        """Return how far the new model may move if one client's update becomes zero; infinity if unknown.

        In units of the longest update's L2 norm, over parameters and buffers together, for equal sample
        counts and whatever the rule remembers. It is for rules of your own; what is known of those that come
        with fedplat is in :mod:`fedplat.strategies.sensitivity`.
        """
        return math.inf

    def state_bytes(self, clients: int, dim: int) -> int:
        """Return how many bytes the rule keeps from round to round, for so many clients and parameters."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Return what the rule remembers from round to round, as tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Put back what :meth:`state_dict` returned."""


class CoordinateWise(Aggregator):
    """A rule that treats every coordinate by itself, so buffers are simply more coordinates."""

    def buffers(self, updates: ClientUpdates, aggregate: Aggregate) -> torch.Tensor:
        """Apply the same rule to the buffers."""
        return self(updates).vector
