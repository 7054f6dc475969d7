"""An edge server: to its clients a server, to the cloud a client that answers with what they trained."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedplat.edge_keys import EDGE, EDGE_ROUND
from fedplat.errors import UserError
from fedplat.security.privacy import BudgetSpent
from fedplat.security.validation import array_records, scalar_metrics

from ..aggregators import InfeasibleError
from ..composed import FederatedStrategy
from ..nodes import sender
from ..reports import ClientReport
from ..wrapper import client_of, innermost, reports_of

log = logging.getLogger("fedplat")

EDGE_EMPTY_CODE = 1003
"""Error code of the reply of an edge that has no model to send."""

_COUNT = "num-examples"


class Edge:
    """Runs ``edge_rounds`` rounds of a strategy of its own for each message of the cloud.

    The strategy may be any of Flower's, with whatever is around it; it belongs to this edge alone. Its rounds
    begin with the model in the message, and the answer has the last one's, the strategy's metrics, and as
    ``num-examples`` the samples of the clients that delivered in the last of them in which anybody did. All
    of them have the cloud's round as ``server-round``; messages to clients also say which ``number`` the edge
    has, and which of its rounds it is.

    An edge for whose rule there are too few clients, fewer than ``least_clients``, or of whose clients nobody
    delivers answers with an error: it sits out. Nothing is known here of how the cloud is reached::

        reply = Edge(Median(), edge_rounds=4).run(message, grid)

    :meth:`begin`, :meth:`ask`, :meth:`take` and :meth:`answer` are the steps of it, for whoever runs several
    edges side by side.
    """

    def __init__(
        self, strategy: Strategy, *, edge_rounds: int = 1, number: int = 0, least_clients: int = 1
    ) -> None:
        if edge_rounds < 1:
            raise UserError(f"edge_rounds is {edge_rounds}, expected 1 or more")
        self.strategy = strategy
        self.edge_rounds = edge_rounds
        self.number = number
        # Flower's own strategies would wait for ever for the nodes that they want.
        self.least_clients = max(least_clients, 1, getattr(innermost(strategy), "min_available_nodes", 1))
        self.reports: list[ClientReport] = []
        self.delivered: set[int] = set()
        self.samples = 0
        self.why = ""
        self.spent: BudgetSpent | None = None
        self._message: Message | None = None
        self._asked: list[Message] | None = None

    def run(self, message: Message, grid: Grid, *, timeout: float | None = None) -> Message:
        """Answer a message of the cloud, for training or evaluation, with the help of the clients of a grid.

        ``timeout`` bounds each wait for replies, in seconds.
        """
        if message.metadata.message_type.split(".")[0] == "evaluate":
            return self.evaluate(message, grid, timeout=timeout)
        self.begin(message)
        for number in range(1, self.edge_rounds + 1):
            questions = self.ask(number, grid)
            self.take(list(grid.send_and_receive(questions, timeout=timeout)) if questions else [])
        return self.answer()

    # Training, step by step --------------------------------------------------------------------------------

    def begin(self, message: Message) -> None:
        """Take the cloud's model as one's own."""
        self._message = message
        self._name, self.model = _model_in(message)
        self._config = _config_in(message)
        self.server_round = int(self._config["server-round"])  # type: ignore[arg-type]
        self._metrics: dict[str, float] = {}
        self.reports, self.delivered = [], set()
        self.samples, self.why, self.spent = 0, "", None

    def ask(self, number: int, grid: Grid) -> list[Message]:
        """Return the messages of one of the edge's rounds, from 1, to the clients that the grid has."""
        self._asked, self.reports, self.delivered = None, [], set()
        clients = len(list(grid.get_node_ids()))
        if clients < self.least_clients:
            self.why = f"{clients} clients are at this edge" if clients else "no client is at this edge"
            return []
        told = ConfigRecord({**self._config, EDGE: self.number, EDGE_ROUND: number})
        try:
            # Records of a round are shared by many messages: Flower's strategies write into what they get.
            messages = list(self.strategy.configure_train(self.server_round, self.model, told, grid))
        except InfeasibleError as error:
            self.why = str(error)
            return []
        except BudgetSpent as error:
            self.why, self.spent = str(error), error
            return []
        self._asked = messages
        return messages

    def take(self, replies: Sequence[Message]) -> None:
        """Let the strategy combine the replies to what was just asked; without any the model stays."""
        if self._asked is None:
            return
        ours = isinstance(innermost(self.strategy), FederatedStrategy)
        new, metrics = None, None
        if ours or self._asked:
            new, metrics = self.strategy.aggregate_train(self.server_round, replies)
        self._look_at(replies)
        if new is None:
            self.why = self.why or "no client delivered"
            return
        self.model, self.samples = new, max(self._samples(replies), 1)
        self._metrics = {k: float(v) for k, v in (metrics or {}).items() if isinstance(v, int | float)}

    def answer(self) -> Message:
        """Return the reply to the cloud: the model, or why there is none."""
        message = self._message
        if message is None:
            raise RuntimeError("answer was called before begin")
        if not self.samples:
            return self._nothing(message, self.why or "no client delivered")
        # The count of the clients' samples stands for the edge's own.
        metrics = MetricRecord({**self._metrics, _COUNT: self.samples})
        return Message(RecordDict({self._name: self.model, "metrics": metrics}), reply_to=message)

    def evaluate(self, message: Message, grid: Grid, *, timeout: float | None = None) -> Message:
        """Return the metrics of the cloud's model on the edge's clients, as the strategy averages them."""
        _, arrays = _model_in(message)
        config = _config_in(message)
        number = int(config["server-round"])  # type: ignore[arg-type]
        questions = (
            list(self.strategy.configure_evaluate(number, arrays, ConfigRecord({**config}), grid))
            if list(grid.get_node_ids())
            else []
        )
        answers = list(grid.send_and_receive(questions, timeout=timeout)) if questions else []
        metrics = self.strategy.aggregate_evaluate(number, answers) if answers else None
        if metrics is None:
            return self._nothing(message, "no client evaluated")
        counted = sum(_count(answer, self._count_key) for answer in answers if answer.has_content())
        content = RecordDict({"metrics": MetricRecord({**metrics, _COUNT: max(counted, 1)})})
        return Message(content, reply_to=message)

    # What became of it -------------------------------------------------------------------------------------

    @property
    def _count_key(self) -> str:
        inner = innermost(self.strategy)
        rules = inner.rules if isinstance(inner, FederatedStrategy) else inner
        return str(getattr(rules, "weighted_by_key", _COUNT))

    def _samples(self, replies: Iterable[Message]) -> int:
        """Return the samples of those who delivered; behind secure sums, what the groups weigh."""
        inner = innermost(self.strategy)
        if isinstance(inner, FederatedStrategy):
            return sum(r.num_examples or 0 for r in inner.reports if r.status == "accepted")
        return sum(_count(reply, self._count_key) for reply in replies if reply.has_content())

    def _look_at(self, replies: Iterable[Message]) -> None:
        """Note what became of each client asked, also of those who said nothing."""
        asked = {
            m.metadata.message_id: m.metadata.dst_node_id for m in self._asked or () if m.metadata.message_id
        }
        missing = {m.metadata.dst_node_id: "no reply before the timeout" for m in self._asked or ()}
        for reply in replies:
            node = sender(reply, asked)
            missing.pop(node, None)
            if reply.has_error():
                missing[node] = reply.error.reason or f"error code {reply.error.code}"
        told = list(reports_of(self.strategy))
        known = {report.node_id for report in told}
        told += [
            ClientReport(node, client_of(self.strategy, node), "failed", reason)
            for node, reason in missing.items()
            if node not in known
        ]
        self.reports = sorted(told, key=lambda report: report.client)
        unused = {report.node_id for report in self.reports if report.status != "accepted"}
        self.delivered = {m.metadata.dst_node_id for m in self._asked or ()} - unused

    def _nothing(self, message: Message, reason: str) -> Message:
        return Message(Error(EDGE_EMPTY_CODE, f"the edge sits out: {reason}"), reply_to=message)


def _count(reply: Message, key: str) -> int:
    return int(scalar_metrics(reply).get(key, 0))


def _model_in(message: Message) -> tuple[str, ArrayRecord]:
    names = [name for name, record in message.content.items() if isinstance(record, ArrayRecord)]
    if len(names) != 1:
        raise UserError(f"a message to an edge has to bring one model, this one has {len(names)}")
    return names[0], array_records(message)[0]


def _config_in(message: Message) -> ConfigRecord:
    """Return the record that says which round it is, with what else clients have to be told."""
    for record in message.content.values():
        if isinstance(record, ConfigRecord) and "server-round" in record:
            return record
    raise UserError("a message to an edge has to say its 'server-round'")
