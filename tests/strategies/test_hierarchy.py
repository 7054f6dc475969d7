from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedplat.edge_keys import EDGE, EDGE_ROUND
from fedplat.errors import UserError
from fedplat.runtime.around import GridWrapper
from fedplat.runtime.local import LocalGrid
from fedplat.strategies import FedCredit, Krum, Mean, Median
from fedplat.strategies.association.base import (
    NOWHERE,
    AssociationPolicy,
    Costs,
    Decision,
    EdgeWorld,
    Limits,
    Prices,
    RoundState,
)
from fedplat.strategies.association.checks import DecisionError
from fedplat.strategies.hierarchy import Deciding, Edge, EdgeGrid, Fixed, everywhere, no_limits
from fedplat.strategies.hierarchy.edge import EDGE_EMPTY_CODE

from ..flower_apps import record, with_partition_query

START = {"w": np.array([0.0, 1.0, 2.0], np.float32)}
SAMPLES = [10, 20, 30, 40, 50, 60]


def step_app() -> ClientApp:
    """Go half the way to the client's own number, and tell what the message said."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        if client == 5:
            raise ValueError("client 5 never delivers")
        config = message.content["config"]
        calls = int(context.state["count"]["calls"]) + 1 if "count" in context.state else 1
        context.state["count"] = ConfigRecord({"calls": calls})
        model = {
            n: Array(np.asarray((a.numpy() + client) / 2, np.float32))
            for n, a in message.content["arrays"].items()
        }
        told = {
            "calls": calls,
            "edge": config[EDGE],
            "edge-round": config[EDGE_ROUND],
            "round": config["server-round"],
        }
        metrics = MetricRecord({"num-examples": SAMPLES[client], **told})
        return Message(RecordDict({"arrays": ArrayRecord(model), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        total = float(message.content["arrays"]["w"].numpy().sum())
        metrics = MetricRecord({"num-examples": SAMPLES[client], "total": total, "client": client})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return with_partition_query(app)


@pytest.fixture
def grid() -> Iterable[LocalGrid]:
    with LocalGrid(step_app(), 6, workers=0) as grid:
        yield grid


class Counting(GridWrapper):
    """Notes how many training messages went out at a time."""

    def __init__(self, grid: LocalGrid) -> None:
        super().__init__(grid)
        self.sent: list[int] = []

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        sent = list(messages)
        if sent and sent[0].metadata.message_type == "train":
            self.sent.append(len(sent))
        return super().send_and_receive(sent, timeout=timeout)


def by_hand(clients: list[int], start: np.ndarray, rounds: int) -> tuple[np.ndarray, int]:
    """Return an edge's model after its rounds, and the samples that delivered."""
    own = [client for client in clients if client != 5]
    shares = np.array([SAMPLES[client] for client in own], np.float64)
    model = start.astype(np.float64)
    for _ in range(rounds):
        model = sum(s * (model + c) / 2 for s, c in zip(shares / shares.sum(), own, strict=True))
    return model, int(shares.sum())


class Given(AssociationPolicy):
    """The decisions of a test, one after another."""

    def __init__(self, *decisions: list[int]) -> None:
        self.decisions = list(decisions)
        self.seen: list[list[bool]] = []

    def decide(self, state: RoundState) -> Decision:
        return Decision(np.array(self.decisions[state.number - 1]))

    def observe(self, state: RoundState, decision: Decision, delivered: Any) -> None:
        self.seen.append(delivered.tolist())


def deciding(
    policy: AssociationPolicy, edges: int, clients: int = 6, absent: tuple[int, ...] = ()
) -> Deciding:
    world = everywhere(clients, edges, samples=SAMPLES[:clients])
    present = np.array([client not in absent for client in range(clients)])
    return Deciding(
        policy, world, no_limits(clients, edges), Prices(), lambda g: RoundState(g, present, world.mean)
    )


def train(cloud: Strategy, grid: EdgeGrid, number: int = 1, start: dict[str, np.ndarray] = START) -> Any:
    messages = list(cloud.configure_train(number, record(**start), ConfigRecord(), grid))
    return cloud.aggregate_train(number, grid.send_and_receive(messages))


def test_two_tiers_of_means_are_those_computed_by_hand(grid: LocalGrid) -> None:
    counting = Counting(grid)
    edges = EdgeGrid(counting, [Edge(Mean(), edge_rounds=3) for _ in range(2)])
    cloud = Mean()
    arrays, _ = train(cloud, edges)
    first, n = by_hand([0, 2, 4], START["w"], 3)
    second, m = by_hand([1, 3, 5], START["w"], 3)
    expected = (n * first + m * second) / (n + m)
    assert arrays["w"].numpy() == pytest.approx(expected, rel=1e-6)
    # All edges' clients are asked at once, once per round of the edges.
    assert counting.sent == [6, 6, 6]
    assert [report.num_examples for report in cloud.reports] == [90, 60]
    assert sum(report.weight for report in cloud.reports) == pytest.approx(1)
    weights = {report.client: report.weight for report in cloud.reports}
    clients = edges.client_reports(weights)
    assert [edge for edge, _ in clients] == [0, 1] * 3
    assert [report.weight for _, report in clients] == pytest.approx([n / 150 for n in SAMPLES[:5]] + [0])
    assert clients[5][1].status == "failed"


def test_clients_are_told_the_round_of_the_cloud_their_edge_and_its_round(grid: LocalGrid) -> None:
    edges = EdgeGrid(grid, [Edge(Mean(), edge_rounds=2) for _ in range(2)])
    train(Mean(), edges, number=7)
    for edge, report in edges.client_reports({}):
        if report.status == "accepted":
            told = report.metrics
            assert (told["round"], told["edge"], told["edge-round"], told["calls"]) == (7, edge, 2, 2)


@pytest.mark.parametrize("edges", [1, 2, 3])
def test_one_round_at_the_edges_is_federated_averaging(edges: int, grid: LocalGrid) -> None:
    # A flat strategy gives messages without an edge, which this app does not take.
    flat, _ = Edge(Mean()).strategy, None
    messages = list(flat.configure_train(1, record(**START), ConfigRecord({EDGE: 0, EDGE_ROUND: 1}), grid))
    expected, _ = flat.aggregate_train(1, grid.send_and_receive(messages))
    arrays, _ = train(Mean(), EdgeGrid(grid, [Edge(Mean()) for _ in range(edges)]))
    if edges == 1:
        assert arrays["w"].numpy().tobytes() == expected["w"].numpy().tobytes()
    else:
        assert arrays["w"].numpy() == pytest.approx(expected["w"].numpy(), rel=1e-6)


def test_flowers_own_strategies_are_the_cloud_and_the_edges(grid: LocalGrid) -> None:
    edges = EdgeGrid(grid, [Edge(FedAvg(), edge_rounds=2) for _ in range(2)])
    result = FedAvg().start(edges, record(**START), num_rounds=1)
    ours = EdgeGrid(grid, [Edge(Mean(), edge_rounds=2) for _ in range(2)])
    expected, _ = train(Mean(), ours)
    assert result.arrays["w"].numpy() == pytest.approx(expected["w"].numpy(), rel=1e-6)
    # Clients evaluate the cloud's model, and count by their samples at both tiers.
    metrics = result.evaluate_metrics_clientapp[1]
    assert metrics["total"] == pytest.approx(float(result.arrays["w"].numpy().sum()), rel=1e-6)
    assert metrics["client"] == pytest.approx(np.average(range(6), weights=SAMPLES))


def test_any_rule_works_at_the_edges_and_another_at_the_cloud(grid: LocalGrid) -> None:
    edges = EdgeGrid(grid, [Edge(Median(), edge_rounds=1) for _ in range(3)])
    cloud = FedCredit()
    arrays, _ = train(cloud, edges)
    medians = [START["w"] / 2 + c for c in ((0 + 3) / 4, (1 + 4) / 4, 2 / 2)]
    assert arrays["w"].numpy() == pytest.approx(
        sum(r.weight * m for r, m in zip(cloud.reports, medians, strict=True)), rel=1e-5
    )


def test_an_edge_without_clients_or_of_which_none_delivers_sits_out(grid: LocalGrid) -> None:
    policy = Given([0, 0, NOWHERE, NOWHERE, NOWHERE, 1], [NOWHERE] * 6)
    edges = EdgeGrid(grid, [Edge(Mean()) for _ in range(3)], deciding(policy, 3))
    cloud = Mean()
    arrays, _ = train(cloud, edges)
    expected, samples = by_hand([0, 1], START["w"], 1)
    assert arrays["w"].numpy() == pytest.approx(expected, rel=1e-6)
    assert [(r.status, r.num_examples, r.weight) for r in cloud.reports] == [
        ("accepted", samples, 1), ("failed", None, 0), ("failed", None, 0),
    ]  # fmt: skip
    assert cloud.reports[1].reason == "the edge sits out: no client delivered"
    assert cloud.reports[2].reason == "the edge sits out: no client is at this edge"
    assert policy.seen == [[True, True, False, False, False, False]]
    assert train(cloud, edges, number=2) == (None, None)
    assert [report.status for report in cloud.reports] == ["failed"] * 3


def test_a_rule_that_cannot_work_on_an_edge_s_clients_leaves_that_edge_out(grid: LocalGrid) -> None:
    policy = Given([0, 0, 0, 0, 1, NOWHERE])
    edges = EdgeGrid(grid, [Edge(Krum(f=0)) for _ in range(2)], deciding(policy, 2))
    cloud = Mean()
    train(cloud, edges)
    assert [report.status for report in cloud.reports] == ["accepted", "failed"]
    assert "Krum" in cloud.reports[1].reason
    assert [report.client for _, report in edges.client_reports({0: 1.0})] == [0, 1, 2, 3]


def test_decisions_that_cannot_be_are_refused(grid: LocalGrid) -> None:
    edges = EdgeGrid(grid, [Edge(Mean()) for _ in range(2)], deciding(Given([0] * 6), 2, absent=(3,)))
    with pytest.raises(DecisionError, match="3 absent"):
        train(Mean(), edges)
    with pytest.raises(UserError, match="3 edges for an association with 2"):
        EdgeGrid(grid, [Edge(Mean()) for _ in range(3)], deciding(Fixed(), 2))
    with pytest.raises(UserError, match="at least one edge"):
        EdgeGrid(grid, [])
    with pytest.raises(UserError, match="edge_rounds"):
        Edge(Mean(), edge_rounds=0)


def test_an_edge_runs_alone_from_a_message_of_any_cloud(grid: LocalGrid) -> None:
    config = ConfigRecord({"server-round": 3, "more": "told"})
    message = Message(RecordDict({"model": record(**START), "config": config}), 77, "train")
    reply = Edge(Mean(), edge_rounds=2, number=4).run(message, grid)
    expected, samples = by_hand(list(range(6)), START["w"], 2)
    assert reply.content["model"]["w"].numpy() == pytest.approx(expected, rel=1e-6)
    assert reply.content["metrics"]["num-examples"] == samples
    assert reply.content["metrics"]["edge"] == pytest.approx(4)
    assert reply.metadata.src_node_id == 77
    question = Message(RecordDict({"model": record(**START), "config": config}), 77, "evaluate")
    answer = Edge(Mean()).run(question, grid)
    assert answer.content["metrics"]["num-examples"] == sum(SAMPLES)
    nobody = Edge(Mean(), least_clients=7).run(message, grid)
    assert nobody.error.code == EDGE_EMPTY_CODE
    assert "6 clients" in nobody.error.reason
    with pytest.raises(UserError, match="server-round"):
        Edge(Mean()).run(Message(RecordDict({"model": record(**START)}), 77, "train"), grid)


def test_edges_and_association_go_on_from_a_checkpoint(grid: LocalGrid) -> None:
    def new() -> EdgeGrid:
        return EdgeGrid(grid, [Edge(FedCredit(), edge_rounds=2) for _ in range(2)])

    first = new()
    train(Mean(), first)
    second = new()
    second.load_state_dict(first.state_dict())
    ends = [train(Mean(), edges, number=2)[0]["w"].numpy().tobytes() for edges in (first, second)]
    assert ends[0] == ends[1]
    assert train(Mean(), new(), number=2)[0]["w"].numpy().tobytes() != ends[0]


def test_messages_that_edges_have_no_answer_to_are_errors_and_pushed_ones_are_answered(
    grid: LocalGrid,
) -> None:
    edges = EdgeGrid(grid, [Edge(Mean()) for _ in range(2)])
    node = edges.get_node_ids()[1]
    (reply,) = edges.send_and_receive([Message(RecordDict(), node, "query.else")])
    assert "no answer" in reply.error.reason
    ids = edges.push_messages([Message(RecordDict(), node, "query")])
    (told,) = edges.pull_messages(ids)
    assert told.content["node"]["partition-id"] == 1
    assert told.metadata.reply_to_message_id == ids[0]
    assert edges.pull_messages(ids) == []
    with pytest.raises(ValueError, match="nodes are edges"):
        edges.send_and_receive([Message(RecordDict(), grid.get_node_ids()[0], "query")])


def test_a_mod_changes_what_an_edge_sends(grid: LocalGrid) -> None:
    def broken(message: Message, context: Context, call_next: Any) -> Message:
        assert context.node_config["partition-id"] == 7
        call_next(message, context)
        return Message(Error(9, "broken"), reply_to=message)

    cloud = Mean()
    train(cloud, EdgeGrid(grid, [Edge(Mean()) for _ in range(2)], mods={1: broken}))
    assert [report.status for report in cloud.reports] == ["accepted", "failed"]


# Fixed associations ----------------------------------------------------------------------------------------


def seats(policy: Fixed, counts: np.ndarray, edges: int, covered: np.ndarray | None = None) -> list[int]:
    clients = len(counts)
    world = everywhere(clients, edges)
    world = EdgeWorld(
        world.covered if covered is None else covered, counts.astype(float), world.samples, world.history,
        world.mean, world.cloud_seconds, world.cloud_joules,
    )  # fmt: skip
    policy.prepare(world, no_limits(clients, edges, counts.shape[1]), Prices(), 1)
    state = RoundState(1, np.ones(clients, np.bool_), world.mean)
    return policy.decide(state).edge_of.tolist()


def test_clients_of_one_class_are_placed_as_in_hierfavg() -> None:
    classes = np.arange(50) % 10
    counts = np.eye(10)[classes] * 7
    for place, distinct in (("edge-iid", 10), ("edge-non-iid", 5)):
        edge_of = np.array(seats(Fixed(place=place), counts, 5))  # type: ignore[arg-type]
        assert np.bincount(edge_of).tolist() == [10] * 5
        assert [len(set(classes[edge_of == edge])) for edge in range(5)] == [distinct] * 5
    blocks = seats(Fixed(place="blocks"), counts[:7], 3)
    assert blocks == [0, 0, 0, 1, 1, 2, 2]
    assert seats(Fixed(), counts[:5], 2) == [0, 1, 0, 1, 0]
    with pytest.raises(UserError, match="by the labels"):
        seats(Fixed(place="edge-iid"), np.zeros((4, 0)), 2)


def test_a_client_out_of_reach_of_its_edge_gets_the_next_and_absent_ones_keep_their_seat() -> None:
    covered = np.array([[False, True, False], [True, False, True], [False, False, False]])
    assert seats(Fixed(), np.ones((3, 2)), 3, covered) == [1, 2, NOWHERE]
    policy = Fixed()
    world = everywhere(3, 2)
    policy.prepare(world, no_limits(3, 2), Prices(), 1)
    for present in ([True, False, True], [True, True, True], [False, True, True]):
        decision = policy.decide(RoundState(1, np.array(present), world.mean))
        assert decision.edge_of.tolist() == [
            e if p else NOWHERE for e, p in zip([0, 1, 0], present, strict=True)
        ]
    assert decision.changed == 0


def test_figures_are_those_of_who_delivered() -> None:
    world = EdgeWorld(
        np.ones((4, 2), np.bool_), np.array([[4.0, 0], [0, 4], [4, 0], [2, 2]]), np.full(4, 4),
        np.zeros((4, 0), np.bool_), Costs(np.ones((4, 2)), np.ones((4, 2))), np.zeros(2), np.zeros(2),
    )  # fmt: skip
    limits = Limits(np.array([2, 1]), np.array([4, 4]), 0.1, np.array([0.5, 0.5]))
    state = RoundState(1, np.ones(4, np.bool_), world.mean)
    now = Deciding(Given([0, 0, 0, 1]), world, limits, Prices(), lambda g: state)
    now.decide(1)
    now.observe(np.array([True, True, False, True]))
    figures = now.figures()
    assert (figures["healthy"], figures["quorum"], figures["used"], figures["signals"]) == (1, 1, 4, 4)
    now.observe(np.array([True, False, True, False]))
    figures = now.figures()
    assert figures["divergence_mean"] == pytest.approx(np.log(2))
    assert (figures["healthy"], figures["quorum"]) == (0, 0.5)
