from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from io import BytesIO

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedplat.arrays import FlatArrays
from fedplat.clients.attacks import Attack, Scene, Schedule, SignFlip, dispatch
from fedplat.clients.attacks.collusion import ALittleIsEnough, Collusion, InnerProduct, Mimic, RoundView
from fedplat.clients.attacks.optimised import FangKrum, FangMedian, MinMax
from fedplat.clients.collusion_grid import CollusionGrid
from fedplat.runtime.local import LocalGrid
from fedplat.strategies import Mean
from fedplat.updates import ClientUpdates

from ..flower_apps import record, with_partition_query
from ..strategies.test_composed import SilentGrid

START = {
    "w": np.array([10, 20], np.float32),
    "bn.running_var": np.array([4], np.float32),
    "n": np.array(7),
}


class Spy(Collusion):
    """Send the round's number, and remember what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.views: list[RoundView] = []

    def collude(self, view: RoundView) -> torch.Tensor:
        self.views.append(view)
        return torch.full((len(view.own), view.models.shape[1]), float(view.server_round))


def app_of(
    attacks: Mapping[int, Attack] | None = None, fails: Iterable[int] = (), diverges: Iterable[int] = ()
) -> ClientApp:
    """Client i moves w by (i + 1, −i), its variance by i and its counter by 1."""
    app = ClientApp(mods=[dispatch(attacks or {})])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        if i in fails:
            return Message(Error(2, "failed honestly"), reply_to=message)
        sent = {name: array.numpy() for name, array in message.content["arrays"].items()}
        sent["w"] = sent["w"] + np.array([i + 1, np.nan if i in diverges else -i], sent["w"].dtype)
        sent["bn.running_var"] = sent["bn.running_var"] + np.float32(i)
        sent["n"] = sent["n"] + 1
        content = {"model": record(**sent), "metrics": MetricRecord({"num-examples": i + 1})}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"seen": message.content["arrays"]}), reply_to=message)

    return with_partition_query(app)


def messages_to(nodes: Iterable[int], kind: str = "train", server_round: int = 1, **arrays) -> list[Message]:
    config = ConfigRecord({"server-round": server_round})
    content = RecordDict({"arrays": record(**(START | arrays)), "config": config})
    return [Message(content, node, kind) for node in nodes]


def colluding(engine: LocalGrid, attacks: Mapping[int, Attack]) -> CollusionGrid:
    nodes = list(engine.get_node_ids())
    return CollusionGrid(
        engine, {nodes[i]: a for i, a in attacks.items()}, {n: i for i, n in enumerate(nodes)}
    )


def replies_of(
    attacks: Mapping[int, Attack],
    n: int = 5,
    *,
    workers: int = 0,
    kind: str = "train",
    server_round: int = 1,
    arrays: Mapping[str, np.ndarray] | None = None,
    **app,
) -> list[Message]:
    with LocalGrid(app_of(attacks, **app), n, workers=workers) as engine:
        grid = colluding(engine, attacks)
        return grid.send_and_receive(
            messages_to(grid.get_node_ids(), kind, server_round, **(arrays or {})), timeout=60
        )


def weights(replies: Iterable[Message]) -> list[list[float]]:
    return [reply.content["model"]["w"].numpy().tolist() for reply in replies]


HONEST = [[11.0, 20.0], [12.0, 19.0], [13.0, 18.0], [14.0, 17.0], [15.0, 16.0]]


@pytest.mark.parametrize("workers", [0, 2])
def test_colluders_send_what_their_attack_makes_of_the_honest_replies(workers: int) -> None:
    attack = InnerProduct(epsilon=1.0)
    replies = replies_of({1: attack, 3: attack}, workers=workers)
    # The honest move by (1, 0), (3, −2) and (5, −4).
    assert weights(replies) == [HONEST[0], [7, 22], HONEST[2], [7, 22], HONEST[4]]


def test_only_parameters_are_forged() -> None:
    # Trap: a forged variance can be negative and gives NaN at evaluation.
    attack = InnerProduct()
    reply = replies_of({1: attack})[1]
    assert reply.content["model"]["bn.running_var"].numpy().tolist() == [5]
    assert reply.content["model"]["n"].numpy() == 8
    assert reply.content["metrics"]["num-examples"] == 2


@pytest.mark.parametrize("attack", [ALittleIsEnough(z=1.0), FangMedian(), FangKrum(), MinMax(), Mimic()])
def test_the_number_of_workers_does_not_change_a_bit(attack: Collusion) -> None:
    runs = [weights(replies_of({0: attack, 4: attack}, 7, workers=workers)) for workers in (0, 2, 2)]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0] != HONEST


@pytest.mark.parametrize("workers", [0, 2])
def test_forged_replies_stay_rows_of_the_shared_matrix(workers: int) -> None:
    attack = InnerProduct()
    replies = replies_of({0: attack, 2: attack}, workers=workers)
    models = [FlatArrays.behind(reply.content["model"]) for reply in replies]
    assert [model.row for model in models] == [0, 1, 2, 3, 4]
    stacked = ClientUpdates.stack(models, models[0], range(5), [1] * 5)
    assert np.shares_memory(stacked.params.numpy(), models[0].block.matrix)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_forged_rows_belong_to_their_reply_alone(workers: int) -> None:
    attack = Spy()
    with LocalGrid(app_of(), 3, workers=workers) as engine:
        grid = colluding(engine, {1: attack})
        nodes = grid.get_node_ids()
        first = grid.send_and_receive(messages_to(nodes, server_round=1))
        sent = messages_to(nodes, server_round=2)
        second = grid.send_and_receive(sent)
        assert weights(first)[1] == [1, 1]
        assert weights(second)[1] == [2, 2]
        assert sent[1].content["arrays"]["w"].numpy().tolist() == [10, 20]
        attack.views.clear()
        del first, second
        gc.collect()
        # The memory goes back to the pool: the next round's replies are trained anew, not left over.
        assert weights(engine.send_and_receive(messages_to(nodes))) == HONEST[:3]


def test_the_view_names_who_is_who_and_leaves_other_attackers_out() -> None:
    spy, other = Spy(), Spy()
    attacks = {1: spy, 4: spy, 2: SignFlip(), 5: other}
    replies = replies_of(attacks, 7)
    (view,) = spy.views
    assert (view.own_ids, view.honest_ids, view.clients) == ((1, 4), (0, 3, 6), 7)
    assert view.models[view.honest].tolist() == [[11, 20], [14, 17], [17, 14]]
    assert view.reference.tolist() == [10, 20]
    assert other.views[0].own_ids == (5,)
    assert other.views[0].honest_ids == (0, 3, 6)
    # Drawn from another stream, so that two groups do not send the same noise.
    assert other.views[0].rng.random() != spy.views[0].rng.random()
    assert weights(replies)[2] == [7, 22]
    assert weights(replies)[1] == weights(replies)[4] == weights(replies)[5] == [1, 1]


def test_two_groups_do_not_see_each_others_forgeries() -> None:
    a, b = InnerProduct(epsilon=1.0), Mimic(victim=0)
    assert weights(replies_of({1: a, 2: b, 3: b, 4: a})) == [[11, 20], [9, 20], [11, 20], [11, 20], [9, 20]]


def test_an_attacker_outside_its_schedule_is_honest_and_counts_as_such() -> None:
    late = InnerProduct(epsilon=1.0).placed(Scene(), Schedule(start=2))
    spy = Spy()
    assert weights(replies_of({0: late, 4: spy}, server_round=1))[0] == HONEST[0]
    assert spy.views[-1].honest_ids == (0, 1, 2, 3)
    assert weights(replies_of({0: late, 4: spy}, server_round=2))[0] == [7, 22]
    assert spy.views[-1].honest_ids == (1, 2, 3)


def test_only_training_is_touched() -> None:
    attack = InnerProduct()
    for reply in replies_of({1: attack}, kind="evaluate"):
        assert reply.content["seen"]["w"].numpy().tolist() == [10, 20]


def test_a_colluder_that_fails_stays_failed_and_one_that_diverges_stays_so() -> None:
    spy = Spy()
    replies = replies_of({1: spy, 2: spy, 3: spy}, fails=(0, 1), diverges=(2, 4))
    assert [reply.has_error() for reply in replies] == [True, True, False, False, False]
    assert replies[1].error.reason == "failed honestly"
    assert np.isnan(weights(replies[2:])[0][1])
    (view,) = spy.views
    assert (view.own_ids, view.honest_ids, view.clients) == ((3,), (), 1)
    assert weights(replies[2:])[1] == [1, 1]


def test_a_round_in_which_nobody_replies_passes() -> None:
    attack = InnerProduct()
    assert all(reply.has_error() for reply in replies_of({1: attack}, fails=range(5)))
    replies = replies_of({1: attack}, diverges=range(5))
    assert all(np.isnan(row[1]) for row in weights(replies))


def test_without_honest_replies_the_colluders_use_what_they_trained() -> None:
    attack = InnerProduct(epsilon=1.0)
    assert weights(replies_of({0: attack, 1: attack}, 2)) == [[8.5, 20.5]] * 2


def test_models_of_other_types_are_forged_in_a_new_record_of_their_type() -> None:
    attack = InnerProduct(epsilon=1.0)
    replies = replies_of({1: attack}, 3, arrays={"w": np.array([10, 20], np.float64)})
    forged = replies[1].content["model"]["w"].numpy()
    assert forged.dtype == np.float64
    assert forged.tolist() == [8, 21]
    assert replies[1].content["model"]["bn.running_var"].numpy().tolist() == [5]
    assert replies[1].content["metrics"]["num-examples"] == 2
    assert list(replies[1].content["model"]) == list(START)


class FlowersGrid(SilentGrid):
    """Answer with ordinary Flower records, the same objects in every call."""

    def __init__(self, replies: list[Message]) -> None:
        self.replies = replies

    def send_and_receive(self, messages, *, timeout=None):
        return self.replies


def answers(messages: list[Message], models: Mapping[int, dict]) -> list[Message]:
    return [
        Message(RecordDict({"model": record(**models[m.metadata.dst_node_id])}), reply_to=m) for m in messages
    ]


def test_replies_of_other_engines_are_copied_and_theirs_left_as_they_are() -> None:
    attack = InnerProduct(epsilon=1.0)
    messages = messages_to([8, 5, 6])
    models = {n: START | {"w": START["w"] + np.float32(n)} for n in (5, 6, 8)}
    inner = FlowersGrid(answers(messages, models))
    grid = CollusionGrid(inner, {5: attack})
    results = [weights(grid.send_and_receive(messages)) for _ in range(2)]
    assert results == [[[18, 28], [3, 13], [16, 26]]] * 2
    assert weights(inner.replies) == [[18, 28], [15, 25], [16, 26]]
    forged = grid.send_and_receive(messages)[1]
    assert forged.metadata.src_node_id == 5
    assert forged.metadata.reply_to_message_id == inner.replies[1].metadata.reply_to_message_id


def test_clients_that_were_sent_another_model_are_not_compared() -> None:
    spy = Spy()
    wide = messages_to([1, 2, 3])
    narrow = messages_to([4, 5], w=np.array([10], np.float32))
    shifted = messages_to([6], w=np.array([0, 0], np.float32))
    messages = wide + narrow + shifted
    models = {n: dict(START) for n in (1, 2, 3, 6)} | {n: START | {"w": START["w"][:1]} for n in (4, 5)}
    replies = CollusionGrid(FlowersGrid(answers(messages, models)), {1: spy, 5: spy}).send_and_receive(
        messages
    )
    assert [(view.own_ids, view.honest_ids) for view in spy.views] == [((1,), (2, 3)), ((5,), (4,))]
    assert weights(replies) == [[1, 1], [10, 20], [10, 20], [10], [1], [10, 20]]


@pytest.mark.parametrize("wrong", [{"w": np.zeros(3, np.float32)}, {"v": np.zeros(2, np.float32)}])
def test_a_malformed_reply_is_neither_forged_nor_looked_at(wrong: dict) -> None:
    spy = Spy()
    messages = messages_to([1, 2, 3, 4])
    replies = answers(messages, {1: START, 2: START, 3: START | wrong, 4: START | wrong})
    result = CollusionGrid(FlowersGrid(replies), {1: spy, 3: spy}).send_and_receive(messages)
    assert result[2] is replies[2]
    assert (spy.views[0].own_ids, spy.views[0].honest_ids) == ((1,), (2,))


def test_a_restored_grid_continues_bit_by_bit() -> None:
    mimic, noise = Mimic(), FangMedian()
    with LocalGrid(app_of(), 6, workers=0) as engine:
        whole = colluding(engine, {0: mimic, 1: noise})
        nodes = whole.get_node_ids()
        whole.send_and_receive(messages_to(nodes, server_round=1))
        assert whole.state_dict() == {"0": {"victim": 2}, "1": {}}
        file = BytesIO()
        torch.save(whole.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        # Without client 4 the one furthest out is client 5, so that a grid that forgot would copy it.
        later = messages_to(nodes[:4] + nodes[5:], server_round=2)
        expected = weights(whole.send_and_receive(later))
        assert weights(colluding(engine, {0: mimic, 1: noise}).send_and_receive(later)) != expected
        resumed = colluding(engine, {0: mimic, 1: noise})
        resumed.load_state_dict(state)
        assert weights(resumed.send_and_receive(later)) == expected
        assert resumed.state_dict() == whole.state_dict()


def test_attacks_keep_no_state_so_a_second_run_chooses_anew() -> None:
    mimic = Mimic()
    with LocalGrid(app_of(), 5, workers=0) as engine:
        first = colluding(engine, {0: mimic})
        first.send_and_receive(messages_to(first.get_node_ids()))
    assert colluding(engine, {0: mimic}).state_dict() == {"0": {}}


def test_all_else_is_the_engines() -> None:
    with LocalGrid(app_of(), 2, workers=0) as engine:
        grid = CollusionGrid(engine, {})
        assert list(grid.get_node_ids()) == engine.get_node_ids()
        assert [node.node_id for node in grid.get_nodes()] == engine.get_node_ids()
        assert grid.run is engine.run
        grid.load_node_states({1000: b"x"})
        assert grid.node_states() == {1000: b"x"}
        grid.load_node_states({})
        ids = grid.push_messages(messages_to(grid.get_node_ids()))
        assert weights(grid.pull_messages(ids) + grid.pull_messages(ids)) == HONEST[:2]
        with pytest.raises(AttributeError):
            grid.nothing_of_that_name  # noqa: B018


@pytest.mark.parametrize("strategy", [FedAvg, Mean])
@pytest.mark.parametrize("workers", [0, 2])
def test_strategies_run_over_it_and_are_harmed(strategy, workers: int) -> None:
    results = []
    for attacks in ({}, {3: InnerProduct(epsilon=10.0)}):
        with LocalGrid(app_of(), 4, workers=workers) as engine:
            grid = colluding(engine, attacks)
            result = strategy(fraction_evaluate=0.0).start(grid, record(**START), num_rounds=2, timeout=60)
        results.append(result.arrays["w"].numpy()[0])
    assert results[0] > 10 > results[1]
