"""Pre-aggregators: what is done to the updates before any rule combines them.

They are for rules that honest but different clients mislead: mixing brings honest updates closer together,
clipping shortens the longest. Any rule can stand behind any number of them, in the order given::

    Preprocessed(rule, [AdaptiveClipping(f=2), NearestNeighbourMixing(f=2)])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from fedplat.rng import generator
from fedplat.updates import ClientUpdates, update_norms

from .aggregators import Aggregate, Aggregator, InfeasibleError
from .aggregators.coverage import Covered
from .aggregators.distances import distances_to
from .aggregators.mixing import (
    adaptive_bound,
    bucketing,
    check_adaptive,
    check_neighbours,
    clip_factors,
    mixed,
    mixed_coverage,
    nearest_neighbours,
)

Liars = Annotated[int, Field(ge=0)] | None


class PreAggregator(ABC):
    """One step before a rule. It keeps no state.

    The number of lying clients that a step assumes is its own ``f``, else the one that the rule behind it was
    told, else the most that the step allows; a short round uses the largest that still fits.
    """

    @abstractmethod
    def mixing(self, updates: ClientUpdates, f: int | None, rng: np.random.Generator) -> torch.Tensor:
        """Return factors (n,), or a mixing matrix (k, n), to apply to the updates, which stay as they are.

        ``f`` is what the rule behind this step was told. See :mod:`fedplat.strategies.aggregators.mixing`.
        """

    def check(self, clients: int, f: int | None) -> None:  # noqa: B027
        """Raise InfeasibleError if the step cannot work on so many clients."""

    def clients_after(self, clients: int) -> int:
        """Return how many rows the next step sees."""
        return clients


class Bucketing(PreAggregator):
    """Puts the clients into random buckets of ``size`` and hands on the mean of each.

    The rule sees ⌈n/size⌉ rows, of which a lying client spoils one at most, so its f stays and has to fit
    that number. Sample counts of a bucket are added up, its mean is plain. New buckets every round, from the
    run's seed. Not for rules that remember clients. O(n²·d / size). Karimireddy et al., ICLR 2022.

        Preprocessed(rule, [Bucketing(size=2)])
    """

    def __init__(self, *, size: Annotated[int, Field(ge=1)] = 2) -> None:
        self.size = size

    def mixing(self, updates: ClientUpdates, f: int | None, rng: np.random.Generator) -> torch.Tensor:
        """Return the buckets of this round."""
        return bucketing(len(updates), self.size, rng)

    def clients_after(self, clients: int) -> int:
        """Return the number of buckets."""
        return -(-clients // self.size)


class _Declared(PreAggregator):
    """A step that is told the number of lying clients; needs 2f < n."""

    def __init__(self, f: int | None) -> None:
        self.f = f

    def assumed(self, clients: int, f: int | None) -> int:
        """Return the f for a round of so many clients, where the rule was told ``f``."""
        most = (clients - 1) // 2
        declared = f if self.f is None else self.f
        return most if declared is None else min(declared, most)


class NearestNeighbourMixing(_Declared):
    """Replaces every client's update by the mean of the n − f updates nearest to it, itself among them.

    Needs 2f < n. Distances are exact to float64. O(n²·d). Allouah et al., AISTATS 2023. Inferred: client i
    keeps its sample count, and a verdict on row i is about client i.

        Preprocessed(rule, [NearestNeighbourMixing(f=2)])
    """

    def __init__(self, *, f: Liars = None) -> None:
        super().__init__(f)

    def check(self, clients: int, f: int | None) -> None:
        """Raise InfeasibleError unless 2f < n."""
        check_neighbours(clients, self.assumed(clients, f) if self.f is None else self.f)

    def mixing(self, updates: ClientUpdates, f: int | None, rng: np.random.Generator) -> torch.Tensor:
        """Return who is mixed with whom."""
        return nearest_neighbours(updates.params, self.assumed(len(updates), f), Covered.by(updates))


class Clipping(PreAggregator):
    """Scales updates down to an L2 norm of ``bound`` where they are longer.

    bound must suit the length of honest updates: compare with ``update_norm`` in clients.jsonl. O(n·d).
    Sun et al., 2019.

        Preprocessed(rule, [Clipping(bound=1.0)])
    """

    def __init__(self, *, bound: Annotated[float, Field(gt=0)] = 1.0) -> None:
        self.bound = bound

    def mixing(self, updates: ClientUpdates, f: int | None, rng: np.random.Generator) -> torch.Tensor:
        """Return the factors."""
        return clip_factors(distances_to(updates.params, updates.reference), self.bound)


class AdaptiveClipping(_Declared):
    """Clips the ⌊2f(n − f)/n⌋ longest updates to the length of the longest of the others.

    Needs 2f < n, and no bound. Lengths over N of d elements count √(d/N) times. O(n·d). Allouah et al., 2024,
    arXiv 2405.14432 (ARC).

        Preprocessed(rule, [AdaptiveClipping(f=2)])
    """

    def __init__(self, *, f: Liars = None) -> None:
        super().__init__(f)

    def check(self, clients: int, f: int | None) -> None:
        """Raise InfeasibleError unless 2f < n."""
        check_adaptive(clients, self.assumed(clients, f) if self.f is None else self.f)

    def mixing(self, updates: ClientUpdates, f: int | None, rng: np.random.Generator) -> torch.Tensor:
        """Return the factors."""
        norms = distances_to(updates.params, updates.reference)
        if (covered := Covered.by(updates)) is not None:
            # A small sub-model's update is not shorter than others for having fewer elements.
            norms = norms * covered.stretch.sqrt()
        return clip_factors(norms, adaptive_bound(norms, self.assumed(len(updates), f)))


class Preprocessed(Aggregator):
    """A rule behind some pre-aggregators, itself a rule.

    Shares are led back to the clients and scaled to sum to 1; what clipping takes away goes to the model that
    was sent. Scores of a bucket are those of all its members; verdicts on buckets are dropped, since they do
    not tell who. Buffers are combined by the rule itself, as if nothing stood before it. ``diagnostics``
    tells how many updates were clipped.
    """

    def __init__(self, rule: Aggregator, before: Sequence[PreAggregator], seed: int = 0) -> None:
        self.rule = rule
        self.before = tuple(before)
        self.seed = seed

    @property
    def f(self) -> int | None:
        """How many lying clients the rule was told to expect, if it was told."""
        f = getattr(self.rule, "f", None)
        return f if isinstance(f, int) else None

    def check(self, clients: int) -> None:
        """Raise InfeasibleError if a step, or the rule on what the steps leave, cannot work."""
        for step in self.before:
            step.check(clients, self.f)
            left = step.clients_after(clients)
            if left < clients and self.rule.state_bytes(clients, 1) > 0:
                raise InfeasibleError(
                    f"{type(step).__name__} hides the {clients} clients in {left} changing groups, "
                    f"but {type(self.rule).__name__} remembers clients from round to round"
                )
            clients = left
        self.rule.check(clients)

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Transform the updates, apply the rule, and lead its outcome back to the clients."""
        seen = updates
        steps: list[torch.Tensor] = []
        for place, step in enumerate(self.before):
            rng = generator(self.seed, "before-rule", place, updates.server_round)
            steps.append(step.mixing(seen, self.f, rng))
            seen = transformed(seen, steps[-1])
        return _of_clients(self.rule(seen), steps, len(updates))

    def buffers(self, updates: ClientUpdates, aggregate: Aggregate) -> torch.Tensor:
        """Let the rule combine the clients' own buffers, which are neither mixed nor clipped."""
        return self.rule.buffers(updates, aggregate)

    def state_bytes(self, clients: int, dim: int) -> int:
        """Return what the rule keeps; the steps keep nothing."""
        return self.rule.state_bytes(clients, dim)

    def state_dict(self) -> dict[str, Any]:
        """Return what the rule remembers."""
        return self.rule.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what the rule remembered."""
        self.rule.load_state_dict(state)


def transformed(updates: ClientUpdates, mixing: torch.Tensor) -> ClientUpdates:
    """Return the updates as the next step sees them; the same object if ``mixing`` changes nothing.

    With fewer rows than clients, a row bears the node id of its first member and the samples of all of them.
    """
    if _changes_nothing(mixing):
        return updates
    covered = None if mixing.ndim == 1 else updates.partial
    params = mixed(updates.params, mixing, updates.reference, covered)
    p = updates.layout.num_params
    new = replace(updates, params=params, update_norms=update_norms(params[:, :p], updates.reference[:p]))
    if mixing.ndim == 2:
        new = replace(new, coverage=None if covered is None else mixed_coverage(covered, mixing))
    if len(mixing) < len(updates):
        members = mixing.numpy() > 0
        first = members.argmax(axis=1)
        new = replace(
            new,
            node_ids=updates.node_ids[first],
            num_examples=members @ updates.num_examples,
            side=updates.side[first],
        )
    return new


def _changes_nothing(mixing: torch.Tensor) -> bool:
    if mixing.ndim == 1:
        return bool((mixing == 1).all())
    return mixing.shape[0] == mixing.shape[1] and torch.equal(mixing, torch.eye(len(mixing)).double())


def _of_clients(result: Aggregate, steps: list[torch.Tensor], clients: int) -> Aggregate:
    """Lead a rule's outcome on transformed updates back to the clients they came from."""
    weights, accepted = result.weights, result.accepted.double()
    row_of = torch.arange(len(weights))
    clipped = [int((mixing < 1).sum()) for mixing in steps if mixing.ndim == 1]
    for mixing in reversed(steps):
        if mixing.ndim == 1:
            weights = weights * mixing
            continue
        weights, accepted = weights @ mixing, accepted @ mixing
        if mixing.shape[0] < mixing.shape[1]:
            row_of = row_of[mixing.argmax(dim=0)]
    diagnostics = {"clipped": float(sum(clipped))} if clipped else {}
    if not bool(weights.sum() > 0):
        weights = accepted  # every update with a share was clipped to nothing, or nobody had one
    return replace(
        result,
        weights=weights / weights.sum() if bool(weights.sum() > 0) else weights,
        accepted=accepted > 0,
        verdicts=result.verdicts if len(result.weights) == clients else {},
        diagnostics={**result.diagnostics, **diagnostics},
        scores={name: values[row_of] for name, values in result.scores.items()},
    )
