"""A strategy of four parts: who takes part, which model each gets, how replies combine, over which tiers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedplat.arrays import FlatArrays, Layout
from fedplat.compat import MessageType
from fedplat.rng import generator
from fedplat.security.validation import ReplyRefused, ReplyRules, scalar_metrics
from fedplat.updates import ClientUpdates

from .aggregators import Aggregate, Aggregator
from .nodes import Node, NodeDirectory
from .preaggregators import PreAggregator, Preprocessed
from .selectors import AllClients, Selector
from .submodels import FULL, FullModel, SubModelScheme, SubModelSpec
from .topology import Flat, Topology

log = logging.getLogger("fedplat")


@dataclass(frozen=True)
class ClientReport:
    """What became of one client's reply in one round.

    ``status`` is ``accepted``, ``refused`` (not a valid reply) or ``failed`` (the client sent an error);
    ``weight`` is its share in the new model, ``update_norm`` the L2 norm of its update; ``scores`` are
    further figures of the rule, such as a credibility.
    """

    node_id: int
    client: int
    status: str
    reason: str = ""
    num_examples: int | None = None
    weight: float = 0.0
    verdict: str = ""
    update_norm: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)


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
    arrayrecord_key: str
    configrecord_key: str


class FederatedStrategy(Strategy):
    """A Flower strategy composed of a selector, a sub-model scheme, an aggregator and a topology.

    Replies are matched by name, checked before anything is computed, and summed in the order of their
    partitions. A reply that is not valid is left out and listed in ``reports``; it never ends the run. If no
    reply is left, the model stays as it is.

    ``fraction_evaluate`` of the nodes evaluate the new model each round; at least ``min_nodes`` must connect
    within ``node_wait`` seconds. ``before`` are steps taken before the aggregator, see
    :mod:`fedplat.strategies.preaggregators`. ``seed`` feeds the selection and rules that draw.
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
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
    ) -> None:
        if not 0 <= fraction_evaluate <= 1:
            raise ValueError(f"fraction_evaluate must be between 0 and 1, got {fraction_evaluate}")
        self.aggregator = Preprocessed(aggregator, before, seed) if before else aggregator
        self.selector = selector or AllClients()
        self.submodels = submodels or FullModel()
        self.topology = topology or Flat()
        self.rules = rules or ReplyRules()
        self.reports: list[ClientReport] = []
        self.diagnostics: dict[str, float] = {}
        self._seed = seed
        self._fraction_evaluate = fraction_evaluate
        self._keys = arrayrecord_key, configrecord_key
        self._nodes = NodeDirectory(min_nodes, node_wait)
        self._reference: FlatArrays | None = None
        self._assigned: dict[int, tuple[SubModelSpec, Layout]] = {}

    # Training ----------------------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose the participants and write a message to each; equal sub-models share one record.

        Raises InfeasibleError if the aggregation rule cannot work on as many clients as are chosen.
        """
        nodes = self._nodes.online(grid)
        self.aggregator.check(self.selector.count(len(nodes)))
        chosen = self.selector.select(nodes, generator(self._seed, "select", server_round), server_round)
        # Floating arrays of any width take part in the arithmetic; they are sent in their own type.
        self._reference = FlatArrays.of_record(arrays, Layout.of_record(arrays, promote=True))
        self._assigned = {}
        contents: dict[SubModelSpec, RecordDict] = {}
        layouts: dict[SubModelSpec, Layout] = {}
        messages = []
        for node in chosen:
            spec = self.submodels.assign(node, None, server_round)
            if spec not in contents:
                part = self.submodels.extract(self._reference, spec)
                record = arrays if part is self._reference else part.to_record()
                contents[spec] = self._content(record, config, server_round, spec)
                layouts[spec] = part.layout
            self._assigned[node.node_id] = spec, layouts[spec]
            messages.append(
                Message(contents[spec], node.node_id, MessageType.TRAIN, group_id=str(server_round))
            )
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, combine the valid ones, and report on every one of them in ``reports``."""
        reference = self._reference
        if reference is None:
            raise RuntimeError("aggregate_train was called before configure_train")
        self.reports, self.diagnostics = [], {}
        valid = self._checked(replies, reference)
        if valid is None:
            log.warning("round %d: no valid reply, the model stays as it is", server_round)
            return None, None
        updates, metrics = valid
        refused = tuple(report.node_id for report in self.reports if report.status == "refused")
        updates = replace(updates, server_round=server_round, refused=refused)
        aggregate = self.topology.combine(
            updates.columns(0, updates.layout.num_params), self.aggregator, server_round
        )
        new = self._new_model(updates, aggregate, reference)
        self._report_accepted(updates, aggregate, metrics)
        self.diagnostics = dict(aggregate.diagnostics)
        shares = updates.num_examples / updates.num_examples.sum()
        return new.to_record(), MetricRecord(dict(_weighted_metrics(metrics, shares)))

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
        pairs = [(self._nodes[m.metadata.src_node_id], m) for m in replies]
        pairs.sort(key=lambda pair: (pair[0].partition is None, pair[0].key))
        nodes: list[Node] = []
        models: list[FlatArrays] = []
        coverages: list[torch.Tensor | None] = []
        counts: list[int] = []
        metrics: list[dict[str, float]] = []
        for node, message in pairs:
            if message.has_error():
                self._report(node, "failed", message.error.reason or f"error code {message.error.code}")
                continue
            spec, layout = self._assigned.get(node.node_id, (FULL, reference.layout))
            try:
                arrays = self.rules.arrays(message, layout)
                count = self.rules.num_examples(message)
            except ReplyRefused as refusal:
                self._report(node, "refused", str(refusal))
                continue
            model, coverage = self.submodels.restore(arrays, spec, reference)
            nodes.append(node)
            models.append(model)
            coverages.append(coverage)
            counts.append(count)
            metrics.append(scalar_metrics(message))
        if not nodes:
            return None
        updates = ClientUpdates.stack(
            models,
            reference,
            [n.node_id for n in nodes],
            counts,
            _stack_coverage(coverages, reference.layout),
        )
        finite = updates.finite_rows()
        for node, count, ok in zip(nodes, counts, finite, strict=True):
            if not ok:
                self._report(node, "refused", "the model has numbers that are not finite", count)
        if not finite.any():
            return None
        return updates.select(finite), [m for m, ok in zip(metrics, finite, strict=True) if ok]

    def _new_model(self, updates: ClientUpdates, aggregate: Aggregate, reference: FlatArrays) -> FlatArrays:
        layout, start = updates.layout, updates.layout.num_params
        vector = aggregate.vector
        if layout.dim > start:
            buffers = self.aggregator.buffers(updates.columns(start, layout.dim), aggregate)
            vector = torch.cat([vector, buffers])
        accepted = aggregate.accepted.numpy()
        side = _middle_of_integers(updates.side[accepted] if accepted.any() else updates.side, reference)
        new = FlatArrays(layout, vector.numpy(), side)
        for entry in layout.entries:
            if entry.in_vector and entry.name.endswith("running_var"):
                part = new.vector[entry.start : entry.stop]
                np.maximum(part, 0, out=part)
        return new

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
        counts = np.array([count for count, _ in pairs], np.float64)
        return MetricRecord(dict(_weighted_metrics([m for _, m in pairs], counts / counts.sum())))

    # State, reports ----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the strategy remembers from round to round, for a checkpoint."""
        return {"aggregator": self.aggregator.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` returned."""
        self.aggregator.load_state_dict(state["aggregator"])

    def summary(self) -> None:
        """Log the parts."""
        for part in ("selector", "submodels", "aggregator", "topology"):
            log.info("%s: %s", part, type(getattr(self, part)).__name__)

    def client_of(self, node_id: int) -> int:
        """Return the number a client is reported under: its partition, or its node id if it has not told."""
        return self._nodes[node_id].key

    def _report(self, node: Node, status: str, reason: str, num_examples: int | None = None) -> None:
        self.reports.append(ClientReport(node.node_id, node.key, status, reason, num_examples))

    def _report_accepted(
        self, updates: ClientUpdates, aggregate: Aggregate, metrics: list[dict[str, float]]
    ) -> None:
        for i, node_id in enumerate(updates.node_ids.tolist()):
            self.reports.append(
                ClientReport(
                    node_id,
                    self.client_of(node_id),
                    "accepted",
                    num_examples=int(updates.num_examples[i]),
                    weight=float(aggregate.weights[i]),
                    verdict=aggregate.verdicts.get(i, ""),
                    update_norm=float(updates.update_norms[i]),
                    metrics=metrics[i],
                    scores={name: float(values[i]) for name, values in aggregate.scores.items()},
                )
            )
        self.reports.sort(key=lambda report: report.client)


def _stack_coverage(coverages: list[torch.Tensor | None], layout: Layout) -> torch.Tensor | None:
    if all(coverage is None for coverage in coverages):
        return None
    everything = torch.ones(layout.dim, dtype=torch.bool)
    return torch.stack([everything if c is None else c for c in coverages])


def _middle_of_integers(sides: np.ndarray, reference: FlatArrays) -> np.ndarray:
    """Combine integer arrays, such as BatchNorm's counters, by the lower median, some client's own."""
    new = reference.side.copy()
    for entry in reference.layout.entries:
        if not entry.in_vector:
            values = np.ascontiguousarray(sides[:, entry.start : entry.stop]).view(entry.dtype)
            middle = np.sort(values, axis=0)[(len(values) - 1) // 2]
            new[entry.start : entry.stop] = middle.view(np.uint8)
    return new


def _weighted_metrics(metrics: list[dict[str, float]], shares: np.ndarray) -> dict[str, float]:
    """Average the metrics that more than half of the clients sent, except the sample counts themselves.

    A client may lack one, such as the loss of a training that skipped every batch; then the others count.
    """
    sent = Counter(name for m in metrics for name in m)
    averages = {}
    for name in sorted(sent.keys() - {"num-examples"}):
        having = [(s, m[name]) for s, m in zip(shares, metrics, strict=True) if name in m]
        if 2 * len(having) > len(metrics):
            averages[name] = float(sum(s * value for s, value in having) / sum(s for s, _ in having))
    return averages
