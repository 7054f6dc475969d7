"""A strategy of four parts: who takes part, which model each gets, how replies combine, over which tiers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedplat.arrays import FlatArrays, Layout
from fedplat.compat import MessageType
from fedplat.emulation.schedule import DeviceSchedule
from fedplat.rng import generator
from fedplat.security.validation import ReplyRefused, ReplyRules, is_refusal, scalar_metrics
from fedplat.spill import give_back_freed_memory
from fedplat.threads import one_thread
from fedplat.updates import ClientUpdates

from .aggregators import Aggregate, Aggregator, InfeasibleError, RoundPlan, RunningAggregate
from .nodes import Node, NodeDirectory, budget_of, present, sender
from .parts import rules_of, selector_of
from .preaggregators import PreAggregator, Preprocessed
from .replies import (
    STREAM_ABOVE,
    TRIM_EVERY,
    Accepted,
    accepted_reports,
    new_model,
    plan_of_round,
    rows_per_block,
    stack_coverage,
    weighted_metrics,
)
from .reports import ClientReport
from .selectors import Selector
from .submodel_round import parts_for
from .submodels import FULL, FullModel, SubModelScheme, SubModelSpec
from .topology import Flat, Topology

log = logging.getLogger("fedplat")


class FederatedStrategy(Strategy):
    """A Flower strategy composed of a selector, a sub-model scheme, an aggregator and a topology.

    Replies are matched by name, checked before anything is computed, and summed in the order of their
    partitions. A reply that is not valid is left out and listed in ``reports``; it never ends the run. If no
    reply is left, the model stays as it is.

    ``fraction_evaluate`` of the nodes evaluate the new model each round; at least ``min_nodes`` must connect
    within ``node_wait`` seconds. ``before`` are steps taken before the aggregator, see
    :mod:`fedplat.strategies.preaggregators`. ``seed`` feeds the selection and rules that draw.

    Flower's keywords are understood: ``fraction_train`` draws so large a part of the clients each round, the
    most of the three ``min_*_nodes`` has to connect, and ``weighted_by_key`` names the sample count.

    ``identities`` gives, by node id, the number under which rules remember a client, where that is not the
    node id itself but, for instance, tied to a key.

    ``devices`` says what each node has in each round: who is away is not asked, sub-models are fitted to it,
    and a round in which too few are there for the aggregator leaves the model as it is.

    A round whose updates take more than ``stream_above`` bytes is combined in blocks as the replies come, if
    the rule can do that and nothing but the rule needs to see the updates; see :meth:`replies_at_a_time`.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        *,
        selector: Selector | None = None,
        submodels: SubModelScheme | None = None,
        topology: Topology | None = None,
        before: Sequence[PreAggregator] = (),
        seed: int = 0,
        rules: ReplyRules | None = None,
        fraction_evaluate: float = 1.0,
        min_nodes: int = 1,
        node_wait: float = 300.0,
        stream_above: int = STREAM_ABOVE,
        devices: DeviceSchedule | None = None,
        fraction_train: float = 1.0,
        min_train_nodes: int = 1,
        min_evaluate_nodes: int = 1,
        min_available_nodes: int = 1,
        weighted_by_key: str | None = None,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
    ) -> None:
        if not 0 <= fraction_evaluate <= 1:
            raise ValueError(f"fraction_evaluate must be between 0 and 1, got {fraction_evaluate}")
        self.aggregator = Preprocessed(aggregator, before, seed) if before else aggregator
        self.selector = selector_of(selector, fraction_train)
        self.submodels = submodels or FullModel()
        self.topology = topology or Flat()
        self.rules = rules_of(rules, weighted_by_key)
        self.reports: list[ClientReport] = []
        self.diagnostics: dict[str, float] = {}
        self.identities: dict[int, int] = {}
        self._seed = seed
        self._fraction_evaluate = fraction_evaluate
        self._stream_above = stream_above
        self._devices = devices
        self._keys = arrayrecord_key, configrecord_key
        needed = max(min_nodes, min_train_nodes, min_evaluate_nodes, min_available_nodes)
        self._nodes = NodeDirectory(needed, node_wait)
        self._reference: FlatArrays | None = None
        self._plan: RoundPlan | None = None
        self._assigned: dict[int, tuple[SubModelSpec, Layout]] = {}
        self._left_out: list[ClientReport] = []
        self._asked: list[Metadata] = []

    # Training ----------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose the participants and write a message to each; equal sub-models share one record.

        Raises InfeasibleError if the aggregation rule cannot work on as many clients as are chosen.
        """
        nodes = self._nodes.online(grid)
        self.aggregator.check(self.selector.count(len(nodes)))
        chosen = self._chosen(present(nodes, self._devices, server_round), server_round)
        # Floating arrays of any width take part in the arithmetic; they are sent in their own type.
        self._reference = FlatArrays.of_record(arrays, Layout.of_record(arrays, promote=True))
        budgets = [(node, budget_of(self._devices, node, server_round)) for node in chosen]
        parts = parts_for(self.submodels, budgets, self._reference, arrays, server_round)
        if parts.left_out and (reason := self._too_few(len(parts.chosen), server_round)):
            parts = parts.for_nobody(reason)
        self._left_out = parts.left_out
        self._assigned = {node.node_id: (spec, parts.layouts[spec]) for node, spec in parts.chosen}
        contents = {
            spec: self._content(record, config, server_round, spec) for spec, record in parts.records.items()
        }
        messages = [
            Message(contents[spec], node.node_id, MessageType.TRAIN, group_id=str(server_round))
            for node, spec in parts.chosen
        ]
        self._plan = plan_of_round(self._reference, server_round, len(messages))
        self._asked = [message.metadata for message in messages]
        return messages

    def _chosen(self, nodes: list[Node], server_round: int) -> list[Node]:
        """Return the participants of a round; nobody if too few nodes are there."""
        if not nodes or self._too_few(self.selector.count(len(nodes)), server_round):
            return []
        return self.selector.select(nodes, generator(self._seed, "select", server_round), server_round)

    def _too_few(self, clients: int, server_round: int) -> str:
        """Return why so many are too few for the rule to work on, which is logged; empty if they are not."""
        try:
            self.aggregator.check(clients)
        except InfeasibleError as error:
            log.warning("round %d: nobody is asked, with %d nodes there: %s", server_round, clients, error)
            return str(error)
        return ""

    def replies_at_a_time(self) -> int | None:
        """Return how many replies of the round just configured are combined at a time; None means all.

        If it is a number, ``aggregate_train`` may be given an iterator: it draws so many replies, keeps
        nothing of their memory, and draws the next. They must then come in the order of the messages.
        """
        reference, plan = self._reference, self._plan
        if reference is None or plan is None:
            return None
        if 4 * plan.clients * reference.layout.dim <= self._stream_above:
            return None
        nodes = [self._nodes[node_id] for node_id in self._assigned]
        possible = (
            isinstance(self.submodels, FullModel)
            and isinstance(self.topology, Flat)
            and nodes == sorted(nodes, key=_place)
            # A strategy that looks at the replies itself expects to find them all.
            and type(self).aggregate_train is FederatedStrategy.aggregate_train
            and self.aggregator.running(plan) is not None
        )
        return rows_per_block(reference.layout) if possible else None

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, combine the valid ones, and report on every one of them in ``reports``."""
        reference = self._reference
        if reference is None:
            raise RuntimeError("aggregate_train was called before configure_train")
        self.reports, self.diagnostics = list(self._left_out), {}
        at_a_time = self.replies_at_a_time()
        running = self.aggregator.running(self._plan) if at_a_time and self._plan else None
        if at_a_time and running is not None:
            done = self._in_blocks(replies, at_a_time, reference, running)
        else:
            done = self._at_once(replies, reference, server_round)
        if done is None:
            log.warning("round %d: no valid reply, the model stays as it is", server_round)
            return None, None
        accepted, aggregate = done
        new = self.submodels.finish_round(new_model(accepted, aggregate, reference), server_round)
        self._report_accepted(accepted, aggregate)
        self.diagnostics = {**aggregate.diagnostics, **self.submodels.diagnostics}
        shares = accepted.num_examples / accepted.num_examples.sum()
        key = self.rules.weighted_by_key
        return new.to_record(), MetricRecord(dict(weighted_metrics(accepted.metrics, shares, key)))

    def expect_replies_of(self, node_ids: Iterable[int]) -> None:
        """Let the replies of the round just configured come from these, such as groups, instead of nodes."""
        if self._reference is not None:
            self._assigned = dict.fromkeys(node_ids, (FULL, self._reference.layout))

    def _at_once(
        self, replies: Iterable[Message], reference: FlatArrays, server_round: int
    ) -> tuple[Accepted, Aggregate] | None:
        """Combine all valid replies as one matrix; None if there is none."""
        valid = self._checked(replies, reference)
        if valid is None:
            return None
        updates, metrics = valid
        updates = replace(updates, server_round=server_round, refused=self._refused())
        p, d = updates.layout.num_params, updates.layout.dim
        aggregate = self.topology.combine(updates.columns(0, p), self.aggregator, server_round)
        if d > p:
            buffers = self.aggregator.buffers(updates.columns(p, d), aggregate)
            aggregate = replace(aggregate, vector=torch.cat([aggregate.vector, buffers]))
        return Accepted.of(updates, metrics), aggregate

    def _in_blocks(
        self,
        replies: Iterable[Message],
        at_a_time: int,
        reference: FlatArrays,
        running: RunningAggregate,
    ) -> tuple[Accepted, Aggregate] | None:
        """Combine the valid replies as they come, so many at a time; None if there is none."""
        if isinstance(replies, Sequence):
            replies = sorted(replies, key=lambda m: _place(self._nodes[m.metadata.src_node_id]))
        blocks: list[Accepted] = []
        coming = iter(replies)
        with closing(running), one_thread():
            while self._take(islice(coming, at_a_time), reference, running, blocks):
                if len(blocks) % TRIM_EVERY == 0:
                    give_back_freed_memory()
            return (Accepted.joined(blocks), running.finish(self._refused())) if blocks else None

    def _take(
        self,
        coming: Iterator[Message],
        reference: FlatArrays,
        running: RunningAggregate,
        blocks: list[Accepted],
    ) -> bool:
        """Combine one block, all that refers to which ends with this call; False if nothing has come."""
        replies = list(coming)
        if valid := self._checked(replies, reference):
            running.add(valid[0])
            blocks.append(Accepted.of(*valid))
        return bool(replies)

    def _content(
        self, record: ArrayRecord, config: ConfigRecord, server_round: int, spec: SubModelSpec
    ) -> RecordDict:
        arrays_key, config_key = self._keys
        settings = {**config, **dict(spec.config), "server-round": server_round}
        return RecordDict({arrays_key: record, config_key: ConfigRecord(settings)})

    def _checked(
        self, replies: Iterable[Message], reference: FlatArrays
    ) -> tuple[ClientUpdates, list[dict[str, float]]] | None:
        """Return the valid replies as a matrix, and their metrics; report the others. None if none is."""
        asked = {m.message_id: m.dst_node_id for m in self._asked if m.message_id}
        pairs = [(self._nodes[sender(m, asked)], m) for m in replies]
        pairs.sort(key=lambda pair: _place(pair[0]))
        nodes: list[Node] = []
        received: list[tuple[FlatArrays, SubModelSpec]] = []
        counts: list[int] = []
        metrics: list[dict[str, float]] = []
        for node, message in pairs:
            if nodes and node == nodes[-1]:
                self._report(node, "refused", "a second reply to one message")
                continue
            if message.has_error():
                status = "refused" if is_refusal(message) else "failed"
                self._report(node, status, message.error.reason or f"error code {message.error.code}")
                continue
            if node.node_id not in self._assigned:
                self._report(node, "refused", "the node was not asked")
                continue
            spec, layout = self._assigned[node.node_id]
            try:
                arrays = self.rules.arrays(message, layout)
                count = self.rules.num_examples(message)
            except ReplyRefused as refusal:
                self._report(node, "refused", str(refusal))
                continue
            nodes.append(node)
            received.append((arrays, spec))
            counts.append(count)
            metrics.append(scalar_metrics(message))
        if not nodes:
            return None
        restored = self.submodels.restore_all(received, reference)
        updates = ClientUpdates.stack(
            [model for model, _ in restored],
            reference,
            [self._identity(n.node_id) for n in nodes],
            counts,
            stack_coverage([coverage for _, coverage in restored], reference.layout),
        )
        finite = updates.finite_rows()
        for node, count, ok in zip(nodes, counts, finite, strict=True):
            if not ok:
                self._report(node, "refused", "the model has numbers that are not finite", count)
        if not finite.any():
            return None
        return updates.select(finite), [m for m, ok in zip(metrics, finite, strict=True) if ok]

    # Evaluation on the clients -----------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask a random ``fraction_evaluate`` of the nodes to evaluate the whole model."""
        if self._fraction_evaluate == 0:
            return []
        nodes = self._nodes.online(grid)
        count = max(1, round(self._fraction_evaluate * len(nodes)))
        rng = generator(self._seed, "select-evaluate", server_round)
        chosen = sorted(rng.choice(len(nodes), size=count, replace=False).tolist())
        content = self._content(arrays, config, server_round, FULL)
        return [
            Message(content, nodes[i].node_id, MessageType.EVALUATE, group_id=str(server_round))
            for i in chosen
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Average the clients' metrics, weighted by their believable sample counts."""
        pairs = []
        for message in sorted(replies, key=lambda m: self._nodes[m.metadata.src_node_id].key):
            try:
                if message.has_content():
                    pairs.append((self.rules.num_examples(message), scalar_metrics(message)))
            except ReplyRefused as refusal:
                log.info("evaluation reply of node %d left out: %s", message.metadata.src_node_id, refusal)
        if not pairs:
            return None
        counts, key = np.array([count for count, _ in pairs], np.float64), self.rules.weighted_by_key
        return MetricRecord(dict(weighted_metrics([m for _, m in pairs], counts / counts.sum(), key)))

    # State, reports ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the strategy remembers from round to round, for a checkpoint."""
        return {"aggregator": self.aggregator.state_dict(), "submodels": self.submodels.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self.aggregator.load_state_dict(state["aggregator"])
        self.submodels.load_state_dict(state.get("submodels", {}))

    def summary(self) -> None:
        """Log the parts."""
        for part in ("selector", "submodels", "aggregator", "topology"):
            log.info("%s: %s", part, type(getattr(self, part)).__name__)

    def client_of(self, node_id: int) -> int:
        """Return the number a client is reported under: its partition, or its node id if it has not told."""
        return self._nodes[node_id].key

    def _report(self, node: Node, status: str, reason: str, num_examples: int | None = None) -> None:
        self.reports.append(ClientReport(node.node_id, node.key, status, reason, num_examples))

    def _refused(self) -> tuple[int, ...]:
        return tuple(self._identity(r.node_id) for r in self.reports if r.status == "refused")

    def _identity(self, node_id: int) -> int:
        return self.identities.get(node_id, node_id)

    def _report_accepted(self, accepted: Accepted, aggregate: Aggregate) -> None:
        node_of = {self._identity(node_id): node_id for node_id in self._assigned}
        node_ids = [node_of.get(identity, identity) for identity in accepted.node_ids.tolist()]
        clients = [self.client_of(node_id) for node_id in node_ids]
        kinds = [self._assigned[node_id][0].kind for node_id in node_ids]
        self.reports += accepted_reports(accepted, aggregate, node_ids, clients, kinds)
        self.reports.sort(key=lambda report: report.client)


def _place(node: Node) -> tuple[bool, int]:
    """Order nodes by partition; those that do not tell theirs come last, by id."""
    return node.partition is None, node.key
