from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable

from fedplat.clients.mods.secure_aggregation import SecureAggregationMod
from fedplat.errors import UserError
from fedplat.runtime.local import LocalGrid
from fedplat.security.fixed_point import FixedPoint
from fedplat.security.secure_messages import KEYS, RECORD, SHARES, UNMASK, pack_ids
from fedplat.strategies import Krum, Mean
from fedplat.strategies.secure_aggregation import SecureAggregation, grouped

from ..flower_apps import record
from ..secure_apps import START, bits, lost, means, play, secure_app, trained

# What the server sees --------------------------------------------------------------------------------------


def test_what_a_client_sends_is_one_masked_array_and_a_count_of_one() -> None:
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=1)
    with LocalGrid(secure_app(), 3, workers=0) as grid:
        messages = list(strategy.configure_train(1, START, ConfigRecord(), grid))
        assert len({id(m.content) for m in messages}) == 1
        replies = grid.send_and_receive(messages)
    for reply in replies:
        assert set(reply.content) == {"arrays", "metrics"}
        assert dict(reply.content["metrics"]) == {"num-examples": 1}
        (array,) = reply.content["arrays"].values()
        assert array.numpy().dtype == np.uint32
        assert array.numpy().shape == (1003 + 1 + 3 + 1 + 1,)
    views = [reply.content["arrays"]["masked"].numpy() for reply in replies]
    assert not any((a == b).any() for a, b in [(views[0], views[1]), (views[1], views[2])])


def test_metrics_are_released_as_means_of_groups_and_only_if_the_client_says_so() -> None:
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=2, seed=3)
    with LocalGrid(secure_app(SecureAggregationMod(release_metrics=True)), 6, workers=0) as grid:
        messages = list(strategy.configure_train(1, START, ConfigRecord(), grid))
        _, metrics = strategy.aggregate_train(1, grid.send_and_receive(messages))
    assert dict(metrics) == {"train-loss": pytest.approx(2.5)}
    for number, group in strategy.members.items():
        assert strategy.strategy.reports[number].metrics["train-loss"] == pytest.approx(np.mean(group))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_update_that_is_not_finite_is_never_masked(bad: float) -> None:
    def behave(
        message: Message, partition: int, call_next: ClientAppCallable, context: Context
    ) -> Message | None:
        if message.metadata.message_type != "train" or partition != 2:
            return None
        return SecureAggregationMod()(message, context, poisoned)

    def poisoned(message: Message, context: Context) -> Message:
        arrays = {**{k: a.numpy() for k, a in START.items()}, "temperature": np.array(bad, np.float32)}
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": record(**arrays), "metrics": metrics}), reply_to=message)

    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=1)
    arrays = play(strategy, 4, behave)
    assert "not finite" in strategy.dropped[2]
    assert bits(arrays) == bits(means([[0, 1, 3]], FixedPoint(8.0, 32, 4), lambda p: 1)[0].to_record())


def test_values_outside_the_clip_range_are_clipped() -> None:
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=1, clip=0.25)
    arrays = play(strategy, 2)
    updates = [trained(START, p, 1)["w"].numpy() - START["w"].numpy() for p in range(2)]
    expected = START["w"].numpy() + np.mean([np.clip(u, -0.25, 0.25) for u in updates], axis=0)
    np.testing.assert_allclose(arrays["w"].numpy(), expected, atol=1e-6)


def test_a_wrong_masked_reply_is_refused_and_a_lie_in_the_mask_spoils_its_own_group_only() -> None:
    def lies(
        message: Message, partition: int, call_next: ClientAppCallable, context: Context
    ) -> Message | None:
        if message.metadata.message_type != "train" or partition not in wrong:
            return None
        reply = call_next(message, context)
        array = wrong[partition](reply.content["arrays"]["masked"].numpy())
        content = RecordDict({"arrays": record(masked=array), "metrics": reply.content["metrics"]})
        return Message(content, reply_to=message)

    groups = grouped(range(8), 2, 0, {})
    wrong = {groups[0][0]: lambda v: v[1:], groups[0][1]: lambda v: v.astype(np.float32)}
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=2, threshold=0.6)
    play(strategy, 8, lies)
    assert {"expected uint32 (1009,)" in strategy.dropped[p] for p in wrong} == {True}
    wrong = {groups[0][2]: lambda v: v - np.uint32(1)}
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=2)
    arrays = play(strategy, 8, lies)
    assert sorted(strategy.dropped) == groups[0]
    assert "the weights of 4 updates add up to 3" in strategy.dropped[groups[0][0]]
    assert bits(arrays) == bits(means([groups[1]], FixedPoint(8.0, 32, 4), lambda p: 1)[0].to_record())


def test_an_attacker_spoils_one_group_and_a_robust_rule_leaves_that_group_out() -> None:
    groups = grouped(range(15), 5, 2, {})
    attacker = groups[3][1]

    def attacks(
        message: Message, partition: int, call_next: ClientAppCallable, context: Context
    ) -> Message | None:
        if message.metadata.message_type != "train" or partition != attacker:
            return None
        return SecureAggregationMod()(message, context, huge)

    def huge(message: Message, context: Context) -> Message:
        arrays = {k: a.numpy() + a.numpy().dtype.type(7) for k, a in START.items()}
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": record(**arrays), "metrics": metrics}), reply_to=message)

    strategy = SecureAggregation(Krum(f=1, fraction_evaluate=0.0), groups=5, seed=2)
    arrays = play(strategy, 15, attacks)
    weights = {report.client: report.weight for report in strategy.reports}
    assert [weights[p] for p in groups[3]] == [0, 0, 0]
    assert np.abs(arrays["w"].numpy() - START["w"].numpy()).mean() < 1


# What clients refuse ---------------------------------------------------------------------------------------


def test_a_client_does_not_train_without_the_protocol_unless_it_was_told_it_may() -> None:
    plain = Mean(fraction_evaluate=0.0)
    play(plain, 3, lost("nothing"))
    assert {r.reason for r in plain.reports} == {
        "this client trains under secure aggregation only, and nobody asked for it"
    }
    play(plain, 3, lost("nothing"), required=False)
    assert {r.status for r in plain.reports} == {"accepted"}


def test_a_client_is_not_summed_with_fewer_than_it_wants() -> None:
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=2)
    play(strategy, 6, lost("nothing"), least_members=3)
    assert "a threshold of 2 among 3 members is refused" in strategy.dropped[0]
    assert "at least 3" in strategy.dropped[0]
    with pytest.raises(UserError, match="least_members must be at least 2"):
        SecureAggregationMod(least_members=1)


class Recording(LocalGrid):
    """A grid that remembers the last message of each type that a node got."""

    def __init__(self, n: int) -> None:
        super().__init__(secure_app(), n, workers=0)
        self.last: dict[str, Message] = {}

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.last |= {m.metadata.message_type: m for m in messages if m.metadata.dst_node_id == 1000}
        return super().send_and_receive(messages, timeout=timeout)

    def again(self, kind: str, **changes) -> str:
        """Send a remembered message once more, with other fields, and return the refusal."""
        old = self.last[kind]
        content = RecordDict({**old.content, RECORD: ConfigRecord({**old.content[RECORD], **changes})})
        (reply,) = super().send_and_receive([Message(content, 1000, kind)], timeout=10)
        return reply.error.reason if reply.has_error() else ""


def test_a_client_answers_every_question_once_and_only_in_the_round_of_its_keys() -> None:
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=1)
    with Recording(4) as grid:
        messages = list(strategy.configure_train(1, START, ConfigRecord(), grid))
        assert "shared already" in grid.again(SHARES)
        assert "another round" in grid.again(SHARES, round=2)
        assert "another round" in grid.again(SHARES, session=bytes(16))
        assert "the session is not one" in grid.again(SHARES, session=b"")
        assert "'threshold' is missing" in grid.again(SHARES, threshold="3")
        assert "cut off" in grid.again(SHARES, ids=b"123")
        grid.last["train"] = messages[0]
        assert "could wrap around" in grid.again("train", summands=3)
        assert "fewer than the threshold" in grid.again("train", groups=[pack_ids([1000, 1001])])
        assert "not those of this client's group" in grid.again("train", groups=[])
        assert "bits must be 32 or 64" in grid.again("train", bits=8)
        assert "not the one that the server says" in grid.again("train", clip=7.0)
        replies = grid.send_and_receive(messages)
        assert "sent already" in grid.again("train")
        strategy.aggregate_train(1, replies)
        assert "has answered for it already" in grid.again(UNMASK)
        assert "has answered for it already" in grid.again("train")
        assert grid.again(KEYS) == ""


def test_a_client_unmasks_only_for_enough_survivors() -> None:
    strategy = SecureAggregation(Mean(fraction_evaluate=0.0), groups=1)
    with Recording(4) as grid:
        replies = grid.send_and_receive(list(strategy.configure_train(1, START, ConfigRecord(), grid)))
        asked = dict(strategy._round.groups[0].sealed_for(1000))
        session = grid.last["train"].content[RECORD]
        fields = {name: session[name] for name in ("session", "round")}
        fields |= {"senders": pack_ids(list(asked)), "sealed": list(asked.values())}
        content = RecordDict({RECORD: ConfigRecord({**fields, "survivors": pack_ids([1000, 1001])})})
        grid.last[UNMASK] = Message(content, 1000, UNMASK)
        assert "2 survivors are fewer than the threshold, 3" in grid.again(UNMASK)
        assert "not those among whom" in grid.again(UNMASK, survivors=pack_ids([1001, 1002, 1003]))
        assert strategy.aggregate_train(1, replies)[0] is not None
        assert strategy.dropped == {}
