"""The server half of secure aggregation: a strategy sees the mean updates of groups, never a client's own."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from pydantic import Field

from fedplat.arrays import FlatArrays, Layout
from fedplat.errors import UserError
from fedplat.rng import generator
from fedplat.security.fixed_point import FixedPoint, vector_length
from fedplat.security.masking import Session
from fedplat.security.secure_group import SecureGroup
from fedplat.security.secure_messages import TOKEN_BYTES
from fedplat.security.validation import array_records
from fedplat.updates import ClientUpdates

from .aggregators import Aggregate, Aggregator
from .composed import FederatedStrategy
from .reports import ClientReport
from .secure_round import SecureRound
from .submodels import FullModel
from .wrapper import StrategyWrapper, client_of, diagnostics_of, innermost, reports_of

log = logging.getLogger("fedplat")

_LEAST_SIZE = 2


class SecureAggregation(StrategyWrapper):
    """Puts clients into groups and shows the strategy inside one mean update per group, nothing else.

    The strategy sees ``groups`` clients: the reply of number g is the model that was sent plus the mean
    update of group g, and its sample count is what that mean weighs. A robust rule inside judges groups, so
    that its preconditions, such as Krum's n ≥ 2f + 3, have to hold for their number; one lying client spoils
    one group at most. The clients' app needs
    :class:`fedplat.clients.mods.secure_aggregation.SecureAggregationMod`.

    A group's sum comes out, exactly, as long as ``threshold`` of its members (a part, more than half) stay to
    the end; otherwise the group is left out of the round and the others go on. Updates count equally, or by
    sample counts up to ``max_weight`` where that is above 1; nobody can check a count behind a mask. Values
    outside ±clip are clipped. With ``bits`` = 32 a masked update is as large as the model; 64 is for large
    weights. ``timeout`` bounds each of the three questions of a round, in seconds.

    Groups are drawn from the clients' numbers and ``seed``, differ in size by one at most, and stay as they
    are while the same clients take part. Bonawitz et al., CCS 2017; what is protected, and from whom, is in
    docs/secure-aggregation.md.

        SecureAggregation(Krum(f=1), groups=5).start(grid, initial_arrays, num_rounds=10)
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        groups: Annotated[int, Field(ge=1)],
        threshold: Annotated[float, Field(gt=0.5, le=1)] = 2 / 3,
        clip: Annotated[float, Field(gt=0)] = 8.0,
        bits: Literal[32, 64] = 32,
        max_weight: Annotated[int, Field(ge=1)] = 1,
        seed: int = 0,
        timeout: Annotated[float, Field(gt=0)] = 120.0,
    ) -> None:
        super().__init__(strategy)
        if groups < 1:
            raise UserError(f"groups must be at least 1, got {groups}")
        if not 0.5 < threshold <= 1:
            raise UserError(f"threshold must be above 0.5 and at most 1, got {threshold}")
        if not timeout > 0:
            raise UserError(f"timeout must be above 0 seconds, got {timeout}")
        self.groups = groups
        self.threshold = threshold
        self.timeout = timeout
        self._codec = FixedPoint(clip=clip, bits=bits, summands=_LEAST_SIZE, max_weight=max_weight)
        self._seed = seed
        self._homes: dict[int, int] = {}
        self._clients: dict[int, int] = {}
        self._round: SecureRound | None = None

    # Training ----------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Let the inner strategy choose the clients, group them, and bring each group to share its secrets.

        Waits for two answers of every client, up to ``timeout`` seconds each. Raises UserError if there are
        too few clients for so many groups, if not all get the same model, or if the rule inside cannot work
        on so many groups.
        """
        self._round, self._clients = None, {}
        with _judging_groups(self.strategy, self.groups):
            messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if not messages:
            return []
        received = _one_model(messages, self.strategy)
        nodes = [message.metadata.dst_node_id for message in messages]
        self._clients = {node_id: client_of(self.strategy, node_id) for node_id in nodes}
        self._round = now = self._begin(server_round, received, grid)
        now.share_secrets()
        return now.training_messages(messages)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum the masked updates, ask the survivors to unmask the sums, and hand the group means inside."""
        now = self._round
        if now is None:
            return self.strategy.aggregate_train(server_round, replies)
        now.add_up(replies)
        now.unmask()
        if isinstance(inner := innermost(self.strategy), FederatedStrategy):
            inner.expect_replies_of(now.groups)
        return self.strategy.aggregate_train(server_round, now.means())

    def _begin(self, server_round: int, received: FlatArrays, grid: Grid) -> SecureRound:
        if not self._homes and len(self._clients) < _LEAST_SIZE * self.groups:
            raise UserError(
                f"secure aggregation: {len(self._clients)} clients are too few for {self.groups} groups of "
                f"at least {_LEAST_SIZE}: lower groups, or let more clients take part"
            )
        placed = grouped(list(self._clients.values()), self.groups, self._seed, self._homes)
        here = {client: number for number, group in enumerate(placed) for client in group}
        self._homes = here | self._homes
        node_of = {client: node_id for node_id, client in self._clients.items()}
        session = Session(secrets.token_bytes(TOKEN_BYTES), server_round)
        groups = {
            number: SecureGroup([node_of[client] for client in group], self._least(len(group)), session)
            for number, group in enumerate(placed)
        }
        # One size for all, so that every group's mean has the same resolution.
        codec = replace(self._codec, summands=max(_LEAST_SIZE, *map(len, placed)))
        now = SecureRound(session, groups, codec, received, grid, self.timeout)
        for number, group in groups.items():
            if len(group.members) < _LEAST_SIZE:
                now.fail(number, f"{len(group.members)} of at least {_LEAST_SIZE} clients take part")
        return now

    def _least(self, size: int) -> int:
        """Return how many members of a group have to stay to the end."""
        return max(_LEAST_SIZE, size // 2 + 1, math.ceil(self.threshold * size - 1e-9))

    # What became of it -------------------------------------------------------------------------------------

    @property
    def members(self) -> dict[int, list[int]]:
        """The clients of each group in the last round, by group number."""
        return {number: self._numbers(group.members) for number, group in self._groups().items()}

    @property
    def dropped(self) -> dict[int, str]:
        """Why clients are in no group's mean of the last round, by client."""
        lost = self._round.dropped if self._round else {}
        return {self._clients[node_id]: reason for node_id, (_, reason) in sorted(lost.items())}

    @property
    def reports(self) -> Sequence[ClientReport]:
        """What became of each client in the last round.

        A client in a group's mean has the verdict and the scores of its group and an equal part of the
        group's weight. Its own sample count and the length of its own update are known to nobody.
        """
        lost = self._round.dropped if self._round else {}
        reports = [
            ClientReport(node_id, self._clients[node_id], status, reason)
            for node_id, (status, reason) in lost.items()
        ]
        for report in reports_of(self.strategy):
            group = self._groups().get(report.node_id)
            summed = [] if group is None else [n for n in group.survivors if n not in lost]
            reports += [
                replace(
                    report,
                    node_id=node_id,
                    client=self._clients[node_id],
                    num_examples=None,
                    update_norm=None,
                    weight=report.weight / len(summed),
                    metrics={k: v for k, v in report.metrics.items() if k != "num-examples"},
                )
                for node_id in summed
            ]
        return sorted(reports, key=lambda report: report.client)

    @property
    def diagnostics(self) -> Mapping[str, float]:
        """Figures of the last round: those of the strategy inside, groups summed, and clients dropped."""
        if self._round is None:
            return diagnostics_of(self.strategy)
        own = {"groups-summed": float(len(self._round.going_on)), "dropped": float(len(self._round.dropped))}
        return {**diagnostics_of(self.strategy), **own}

    def summary(self) -> None:
        """Log the settings."""
        log.info("secure aggregation: %d groups, threshold %.3g", self.groups, self.threshold)
        super().summary()

    def own_state(self) -> dict[str, Any]:
        """Return which group each client belongs to."""
        return {"homes": dict(self._homes)}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Put clients back into their groups."""
        self._homes = dict(state["homes"])

    def _groups(self) -> Mapping[int, SecureGroup]:
        return self._round.groups if self._round else {}

    def _numbers(self, nodes: Iterable[int]) -> list[int]:
        return sorted(self._clients[node_id] for node_id in nodes)


# Groups ----------------------------------------------------------------------------------------------------


def grouped(clients: Sequence[int], groups: int, seed: int, homes: Mapping[int, int]) -> list[list[int]]:
    """Return the clients of each group; sizes differ by one at most.

    A client stays at home, which ``homes`` tells by client, as long as its group has room; the others fill up
    the smallest groups. Who comes first is a permutation drawn from the seed, the same in every round.

    >>> grouped(range(7), groups=3, seed=1, homes={0: 2, 1: 2, 2: 1, 3: 0, 4: 1, 5: 0, 6: 2})
    [[3, 5], [2, 4], [0, 1, 6]]
    """
    order = sorted(clients, key=lambda client: (generator(seed, "secure-groups", client).random(), client))
    size, larger = divmod(len(order), groups)
    placed: list[list[int]] = [[] for _ in range(groups)]
    waiting = []
    for client in order:
        home = homes.get(client, -1)
        if not 0 <= home < groups or len(placed[home]) >= size + (larger > 0):
            waiting.append(client)
            continue
        larger -= len(placed[home]) == size
        placed[home].append(client)
    for client in waiting:
        min(placed, key=len).append(client)
    return [sorted(group) for group in placed]


class _ForGroups(Aggregator):
    """Stands for a rule while clients are chosen: the number of groups is what the rule has to fit."""

    def __init__(self, rule: Aggregator, groups: int) -> None:
        self.rule = rule
        self.groups = groups

    def check(self, clients: int) -> None:
        """Raise InfeasibleError if the rule cannot work on so many groups, however many clients there are."""
        self.rule.check(self.groups)

    def __call__(self, updates: ClientUpdates) -> Aggregate:
        """Apply the rule."""
        return self.rule(updates)


@contextmanager
def _judging_groups(strategy: Strategy, groups: int) -> Iterator[None]:
    """Let a fedplat strategy check its rule against the number of groups, not of clients."""
    inner = innermost(strategy)
    if not isinstance(inner, FederatedStrategy):
        yield
        return
    rule = inner.aggregator
    inner.aggregator = _ForGroups(rule, groups)
    try:
        yield
    finally:
        inner.aggregator = rule


def _one_model(messages: Sequence[Message], strategy: Strategy) -> FlatArrays:
    """Return the model that all messages carry; raises UserError if there is not exactly one."""
    inner = innermost(strategy)
    records = {id(record): record for message in messages for record in array_records(message)}
    parts = isinstance(inner, FederatedStrategy) and not isinstance(inner.submodels, FullModel)
    if len(records) != 1 or parts:
        raise UserError(
            "secure aggregation adds up updates of one model: it does not work with sub-models, or with a "
            "strategy that sends clients different arrays"
        )
    record = next(iter(records.values()))
    layout = Layout.of_record(record, promote=True)
    vector_length(layout)
    return FlatArrays.of_record(record, layout)
