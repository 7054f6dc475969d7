from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy
from flwr.simulation import run_simulation

from fedplat.clients.mods.signing import SigningMod
from fedplat.compat import SERVER_NODE_ID, make_error_message, make_message
from fedplat.errors import UserError
from fedplat.rounds import rounds
from fedplat.runtime.local import LocalGrid
from fedplat.security.signatures import (
    CHALLENGE,
    SIGNATURE,
    identity_of,
    simulation_key,
    simulation_keys,
)
from fedplat.security.validation import is_refusal
from fedplat.strategies.baselines import Mean
from fedplat.strategies.fed_credit import FedCredit
from fedplat.strategies.signed_updates import SignedUpdates
from fedplat.strategies.submodels import FullModel, SubModelSpec
from fedplat.strategies.wrapper import StrategyWrapper, load_state, state_of

from ..flower_apps import plain_app, record, with_partition_query
from .test_composed import SilentGrid, model

NODES = [11, 12, 13, 14]
KEYS = simulation_keys(1, 6)
START = {"w": np.zeros(2, np.float32), "b": np.zeros(1, np.float32)}
INNER = {
    "mean": Mean,
    "fed-credit": FedCredit,
    "flower": lambda: FedAvg(fraction_evaluate=0.0),
}


def key(partition: int):
    return simulation_key(1, partition)


def identity(partition: int) -> int:
    return identity_of(key(partition).public_key().public_bytes_raw())


def ask(strategy: Strategy, server_round: int = 1, nodes: Iterable[int] = NODES) -> dict[int, Message]:
    grid = SilentGrid(list(nodes))
    messages = strategy.configure_train(server_round, record(**START), ConfigRecord({"lr": 0.1}), grid)
    return {message.metadata.dst_node_id: message for message in messages}


def answer(message: Message, partition: int, value: float = 1.0, count: int = 1) -> Message:
    """Answer a message as the client with the key of this partition does."""

    def train(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": count, "loss": 0.5})
        return Message(RecordDict({"arrays": model(value), "metrics": metrics}), reply_to=message)

    context = Context(1, message.metadata.dst_node_id, {}, RecordDict(), {})
    return SigningMod(key(partition))(message, context, train)


def answers(asked: dict[int, Message], values: dict[int, float] | None = None) -> dict[int, Message]:
    """Let every node answer with the key of its place in NODES."""
    values = values or {}
    return {n: answer(m, NODES.index(n), values.get(n, 1.0)) for n, m in asked.items()}


def changed(reply: Message, **records: object) -> Message:
    """Change records of a reply on its way; None takes one out."""
    content = RecordDict()
    for name, value in {**dict(reply.content.items()), **records}.items():
        if value is not None:
            content[name] = value
    return make_message(reply.metadata, content)


def relabelled(message: Message, **fields: object) -> Message:
    """Return a message whose metadata say something else."""
    metadata = copy.copy(message.metadata)
    metadata.__dict__.update({f"_{name}": value for name, value in fields.items()})
    if message.has_error():
        return make_error_message(metadata, message.error)
    return make_message(metadata, message.content)


def reasons(strategy: StrategyWrapper) -> dict[int, str]:
    return {r.node_id: r.reason for r in strategy.reports if r.status == "refused"}


class Seen(StrategyWrapper):
    """Notes what the strategy inside gets to see."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]):
        self.replies = list(replies)
        return super().aggregate_train(server_round, self.replies)


# Forgeries -------------------------------------------------------------------------------------------------

Forge = Callable[[dict[int, Message], dict[int, Message], Message], Message]
FORGERIES: dict[str, tuple[Forge, str]] = {
    "not signed": (
        lambda asked, now, before: changed(answer(asked[12], 1, 100), **{SIGNATURE: None}),
        "the reply is not signed",
    ),
    "a key nobody registered": (
        lambda asked, now, before: answer(asked[12], 50, 100),
        "signed with a key that is not registered",
    ),
    "the signature of another reply": (
        lambda asked, now, before: changed(
            answer(asked[12], 1, 100), **{SIGNATURE: now[12].content[SIGNATURE]}
        ),
        "the arrays are not those that were signed",
    ),
    "no signature of that key": (
        lambda asked, now, before: changed(
            answer(asked[12], 1, 100),
            **{SIGNATURE: ConfigRecord({**now[12].content[SIGNATURE], "signature": bytes(64)})},
        ),
        "the signature is not one of the key",
    ),
    "other arrays": (
        lambda asked, now, before: changed(now[12], arrays=model(100)),
        "the arrays are not those that were signed",
    ),
    "more samples": (
        lambda asked, now, before: changed(
            answer(asked[12], 1, 100), metrics=MetricRecord({"num-examples": 99, "loss": 0.5})
        ),
        "'metrics.num-examples' is not what was signed",
    ),
    "another metric": (
        lambda asked, now, before: changed(
            answer(asked[12], 1, 100), metrics=MetricRecord({"num-examples": 1, "loss": 0.0})
        ),
        "'metrics.loss' is not what was signed",
    ),
    "the reply of the round before": (lambda asked, now, before: before, "signed for round 1, not 2"),
    "the reply of another node": (
        lambda asked, now, before: relabelled(answer(asked[11], 0, 100), src_node_id=12),
        "signed for node 11, not 12",
    ),
    "the key of another node": (
        lambda asked, now, before: answer(asked[12], 0, 100),
        "signed with the key 'SHA256:",
    ),
    "another registered key": (
        lambda asked, now, before: answer(asked[12], 5, 100),
        "changed its key: 'SHA256:",
    ),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_reply_never_reaches_the_strategy(forgery: str, inner: str) -> None:
    forge, reason = FORGERIES[forgery]
    seen = Seen(INNER[inner]())
    strategy = SignedUpdates(seen, KEYS)
    first = ask(strategy, 1)
    strategy.aggregate_train(1, list(answers(first).values()))
    before = answer(first[12], 1, 100)
    asked = ask(strategy, 2)
    replies = answers(asked)
    replies[12] = forge(asked, replies, before)
    arrays, _ = strategy.aggregate_train(2, list(replies.values()))
    assert arrays is not None
    np.testing.assert_allclose(arrays["w"].numpy(), 1, rtol=1e-6)
    refused = [message for message in seen.replies if is_refusal(message)]
    assert [message.metadata.src_node_id for message in refused] == [12]
    assert reason in (refused[0].error.reason or "")
    if inner != "flower":
        assert reasons(strategy) == {12: refused[0].error.reason}


def test_a_reply_of_another_run_is_refused() -> None:
    strategy = SignedUpdates(Mean(), KEYS)
    asked = ask(strategy)
    elsewhere = answer(relabelled(asked[12], run_id=7), 1, 100)
    # Trap: where runs have the same number, as those of a simulation, only the challenge differs.
    same_number = answer(ask(SignedUpdates(Mean(), KEYS))[13], 2, 100)
    arrays, _ = strategy.aggregate_train(1, list({**answers(asked), 12: elsewhere, 13: same_number}.values()))
    assert arrays is not None
    assert arrays["w"].numpy().tolist() == [1, 1]
    assert reasons(strategy) == {
        12: "signed for run 7, not 1",
        13: "signed for another challenge: the reply to another message",
    }


def test_a_node_that_was_not_asked_is_not_heard() -> None:
    strategy = SignedUpdates(Mean(), KEYS)
    asked = ask(strategy, nodes=NODES[:3])
    stranger = relabelled(answer(asked[11], 0, 100), src_node_id=14)
    strategy.aggregate_train(1, [*answers(asked).values(), stranger])
    assert reasons(strategy) == {14: "the node was not asked in this round"}


@pytest.mark.parametrize("inner", INNER)
def test_a_second_reply_to_one_message_does_not_count(inner: str) -> None:
    seen = Seen(INNER[inner]())
    strategy = SignedUpdates(seen, KEYS)
    asked = ask(strategy)
    replies = [*answers(asked).values(), answer(asked[12], 1, 100)]
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    np.testing.assert_allclose(arrays["w"].numpy(), 1, rtol=1e-6)
    assert [m.error.reason for m in seen.replies if m.has_error()] == ["a second reply to one message"]


def test_errors_pass_untouched_and_what_came_is_left_as_it_is() -> None:
    seen = Seen(Mean())
    strategy = SignedUpdates(seen, KEYS)
    asked = ask(strategy)
    replies = list(answers(asked).values())
    replies[1] = Message(Error(2, "boom"), reply_to=asked[12])
    replies[2] = changed(replies[2], arrays=model(100))
    before = list(replies)
    strategy.aggregate_train(1, iter(replies))
    assert seen.replies[:2] == replies[:2]
    assert seen.replies[1] is replies[1]
    assert all(a is b for a, b in zip(before, replies, strict=True))
    assert replies[2].has_content()
    assert {r.node_id: r.status for r in strategy.reports} == {
        11: "accepted",
        12: "failed",
        13: "refused",
        14: "accepted",
    }


def test_a_lost_node_is_named_by_the_message_that_it_was_sent() -> None:
    strategy = SignedUpdates(Mean(), KEYS)
    asked = ask(strategy)
    for node, message in asked.items():  # as Flower does when it sends them
        message.metadata.__dict__["_message_id"] = f"message-{node}"
    replies = answers(asked)
    lost = relabelled(Message(Error(5, "gone"), reply_to=asked[12]), src_node_id=SERVER_NODE_ID)
    strategy.aggregate_train(1, list({**replies, 12: lost}.values()))
    assert {r.node_id: r.reason for r in strategy.reports if r.status == "failed"} == {12: "gone"}


def test_with_no_reply_left_the_model_stays() -> None:
    strategy = SignedUpdates(Mean(), KEYS)
    asked = ask(strategy)
    assert strategy.aggregate_train(1, [answer(m, 50) for m in asked.values()]) == (None, None)
    assert strategy.aggregate_train(1, []) == (None, None)


# Questions -------------------------------------------------------------------------------------------------


def test_every_round_asks_with_a_new_challenge_and_keeps_the_callers_config() -> None:
    strategy, config = SignedUpdates(Mean(), KEYS), ConfigRecord({"lr": 0.1})
    found = set()
    for server_round in (1, 2, 3):
        messages = strategy.configure_train(server_round, record(**START), config, SilentGrid(NODES))
        asked = [message.content[CHALLENGE] for message in messages]
        assert all(question["server-round"] == server_round for question in asked)
        found |= {question["challenge"] for question in asked}
    assert dict(config) == {"lr": 0.1}
    assert len(found) == 3
    assert all(len(challenge) == 16 for challenge in found)


class Halves(FullModel):
    """Tells odd nodes something else than even ones."""

    def assign(self, node, profile, server_round) -> SubModelSpec:
        return SubModelSpec("odd" if node.node_id % 2 else "even", config=(("odd", node.node_id % 2),))


def test_equal_contents_stay_one_object_and_different_ones_keep_theirs() -> None:
    inner = Mean(submodels=Halves())
    plain = ask(inner)
    asked = ask(SignedUpdates(inner, KEYS))
    assert len({id(message.content) for message in asked.values()}) == 2
    for node, message in asked.items():
        assert message.content["config"]["odd"] == node % 2
        assert dict(message.content["config"]) == dict(plain[node].content["config"])
        assert message.content["config"]["lr"] == 0.1


# Keys and nodes --------------------------------------------------------------------------------------------


def play(strategy: SignedUpdates, who: dict[int, int], server_round: int = 1, online=None) -> None:
    """Play a round in which nodes answer with the keys of these partitions."""
    asked = ask(strategy, server_round, online or who)
    strategy.aggregate_train(server_round, [answer(asked[n], p) for n, p in who.items()])


@pytest.mark.parametrize("turn", [1, -1])
def test_two_nodes_with_one_key_are_both_refused(turn: int) -> None:
    strategy = SignedUpdates(Mean(), KEYS)
    play(strategy, dict([(11, 0), (12, 1), (13, 1)][::turn]))
    assert set(reasons(strategy)) == {12, 13}
    assert all("2 nodes signed with the key" in reason for reason in reasons(strategy).values())
    assert strategy.names.keys() == {11}


@pytest.mark.parametrize("turn", [1, -1])
def test_of_two_nodes_with_one_key_the_one_it_is_bound_to_stands(turn: int) -> None:
    strategy = SignedUpdates(Mean(), KEYS)
    play(strategy, {11: 0, 12: 1})
    play(strategy, dict([(12, 1), (13, 1)][::turn]), 2)
    assert list(reasons(strategy)) == [13]
    assert "of node 12, which is connected" in reasons(strategy)[13]


def test_the_key_of_a_connected_node_is_taken_from_no_other_even_while_it_is_silent() -> None:
    strategy = SignedUpdates(Mean(), KEYS)
    play(strategy, {11: 0, 12: 1})
    play(strategy, {11: 0, 13: 1}, 2, online=[11, 12, 13])
    assert "of node 12, which is connected" in reasons(strategy)[13]


def test_a_node_with_several_keys_in_one_round_gets_none() -> None:
    strategy = SignedUpdates(Mean(), KEYS)
    asked = ask(strategy)
    strategy.aggregate_train(1, [answer(asked[11], 0), answer(asked[11], 1), answer(asked[12], 2)])
    assert reasons(strategy) == {11: "signed with several keys in one round"}


def test_a_client_that_registers_anew_keeps_its_history() -> None:
    inner = FedCredit()
    strategy = SignedUpdates(inner, KEYS)
    play(strategy, {11: 0, 12: 1})
    assert inner.identities == {11: identity(0), 12: identity(1)}
    play(strategy, {11: 0, 99: 1}, 2)
    assert inner.identities == {11: identity(0), 99: identity(1)}
    assert [r.status for r in strategy.reports] == ["accepted", "accepted"]


def test_a_node_whose_key_another_took_over_comes_back_as_a_stranger() -> None:
    inner = Mean()
    strategy = SignedUpdates(inner, KEYS)
    play(strategy, {11: 0, 12: 1})
    play(strategy, {11: 0, 13: 1}, 2)
    play(strategy, {11: 0, 12: 1, 13: 1}, 3)
    assert list(reasons(strategy)) == [12]
    assert 12 not in inner.identities


def test_a_refused_reply_counts_against_the_node_and_never_against_the_key_it_names() -> None:
    inner = FedCredit()
    strategy = SignedUpdates(inner, KEYS)
    play(strategy, {n: NODES.index(n) for n in NODES})
    asked = ask(strategy, 2)
    replies = answers(asked)
    replies[12] = changed(replies[12], arrays=model(5))
    replies[13] = answer(asked[13], 0)  # the key of node 11
    strategy.aggregate_train(2, list(replies.values()))
    assert set(reasons(strategy)) == {12, 13}
    credibility = {int(k): v for k, v in inner.state_dict()["aggregator"]["credibility"].items()}
    assert credibility.keys() == {identity(i) for i in range(4)}
    assert max(credibility[identity(1)], credibility[identity(2)]) < credibility[identity(0)]
    assert credibility[identity(0)] == credibility[identity(3)]


def test_a_key_that_was_withdrawn_may_be_replaced_and_its_client_starts_anew(tmp_path: Path) -> None:
    def publish(*partitions: int) -> None:
        for path in tmp_path.glob("*.pub"):
            path.unlink()
        for partition in partitions:
            public = key(partition).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            (tmp_path / f"site-{partition}.pub").write_bytes(public)

    publish(0, 1, 2)
    inner = Mean()
    strategy = SignedUpdates(inner, tmp_path)
    play(strategy, {11: 0, 12: 1})
    assert strategy.names == {11: "site-0", 12: "site-1"}
    play(strategy, {11: 0, 12: 2}, 2)
    assert reasons(strategy) == {12: "changed its key: 'site-1' before, now 'site-2'"}
    publish(0, 2)
    play(strategy, {11: 0, 12: 1}, 3)
    assert "not registered" in reasons(strategy)[12]
    play(strategy, {11: 0, 12: 2}, 4)
    assert reasons(strategy) == {}
    assert inner.identities == {11: identity(0), 12: identity(2)}
    publish()
    play(strategy, {11: 0, 12: 2}, 5)
    assert reasons(strategy) == {}, "an emptied folder is a mistake, not the end of a run"


def test_what_is_known_of_keys_survives_a_resume() -> None:
    inner = FedCredit()
    strategy = SignedUpdates(inner, KEYS)
    play(strategy, {11: 0, 12: 1})
    state = state_of(strategy)
    inner = FedCredit()
    again = SignedUpdates(inner, KEYS)
    load_state(again, state)
    assert inner.identities == {11: identity(0), 12: identity(1)}
    play(again, {11: 0, 12: 5}, 2)
    assert "changed its key" in reasons(again)[12]


def test_keys_that_cannot_be_read_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \*\.pub file"):
        SignedUpdates(Mean(), tmp_path)


# Whole runs ------------------------------------------------------------------------------------------------


def signed_app(seed: int = 1, partition: int | None = None) -> ClientApp:
    """Sign the replies of the plain app, whose clients may all say that they are one partition."""
    app, plain = ClientApp(mods=[SigningMod.for_simulation(seed)]), plain_app()
    app.train()(plain)
    app.evaluate()(plain)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        own = int(context.node_config["partition-id"]) if partition is None else partition
        return Message(RecordDict({"node": ConfigRecord({"partition-id": own})}), reply_to=message)

    return app


@pytest.mark.parametrize(("inner", "workers"), [("mean", 0), ("mean", 2), ("fed-credit", 0), ("flower", 0)])
def test_a_signed_run_gives_the_bits_of_an_unsigned_one(inner: str, workers: int) -> None:
    rng = np.random.default_rng(3)
    initial = ArrayRecord([rng.normal(size=(5, 7)).astype(np.float32), np.array(0.1, np.float32)])

    def run(app: ClientApp, wrap: Callable[[Strategy], Strategy]) -> list[np.ndarray]:
        with LocalGrid(app, 4, workers=workers) as grid:
            strategy = wrap(INNER[inner]())
            *_, last = rounds(strategy, grid, initial, 3)
        if isinstance(strategy, SignedUpdates):
            assert len(strategy.names) == 4
        return last.arrays.to_numpy_ndarrays()

    # Flower's strategies sum in an order that they draw.
    tolerance = 1e-6 if inner == "flower" else 0
    plain = run(with_partition_query(plain_app()), lambda strategy: strategy)
    signed = run(signed_app(), lambda strategy: SignedUpdates(strategy, simulation_keys(1, 4)))
    # A client that signs also serves a server that does not ask.
    unasked = run(signed_app(), lambda strategy: strategy)
    for ours in (signed, unasked):
        for found, expected in zip(ours, plain, strict=True):
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=0)


def test_clients_without_their_keys_are_left_out_of_a_run() -> None:
    with LocalGrid(signed_app(seed=2), 3, workers=0) as grid:
        strategy = SignedUpdates(Mean(), simulation_keys(1, 3))
        result = strategy.start(grid, ArrayRecord([np.zeros(2, np.float32)]), num_rounds=1)
    assert not result.arrays
    assert all("not registered" in reason for reason in reasons(strategy).values())
    assert len(reasons(strategy)) == 3


def test_what_a_client_calls_itself_plays_no_part() -> None:
    with LocalGrid(signed_app(partition=0), 3, workers=0) as grid:
        nodes = list(grid.get_node_ids())
        inner = Mean()
        strategy = SignedUpdates(inner, simulation_keys(1, 3))
        *_, last = rounds(strategy, grid, ArrayRecord([np.zeros(2, np.float32)]), 2)
    assert last.arrays["0"].numpy().tolist() == [2, 2]
    assert [r.status for r in strategy.reports] == ["accepted"] * 3
    assert inner.identities == {node: identity(i) for i, node in enumerate(nodes)}


def test_a_strategy_that_streams_is_given_what_was_verified() -> None:
    with LocalGrid(signed_app(), 4, workers=0) as grid:
        strategy = SignedUpdates(Mean(stream_above=1), simulation_keys(1, 4)[:3])
        *_, last = rounds(strategy, grid, ArrayRecord([np.zeros(2, np.float32)]), 2)
    assert last.arrays["0"].numpy().tolist() == [2, 2]
    assert len(reasons(strategy)) == 1


@pytest.mark.slow
def test_signatures_pass_through_flowers_own_simulation() -> None:
    statuses: list[str] = []
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = SignedUpdates(Mean(min_nodes=2), simulation_keys(1, 2))
        strategy.start(grid, ArrayRecord([np.zeros(2, np.float32)]), num_rounds=2)
        statuses.extend(report.status for report in strategy.reports)

    run_simulation(server, signed_app(), num_supernodes=2)
    assert statuses == ["accepted", "accepted"]
