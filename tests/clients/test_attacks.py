from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedplat.clients.attacks import ReplyAttack, Scene, Schedule, SignFlip, Wanted, choose_attackers, dispatch
from fedplat.errors import UserError
from fedplat.runtime.local import LocalGrid

from ..flower_apps import record


def honest_app(attack) -> ClientApp:
    """Return models that are the received one plus (1, 2), as a client with an attack as its mod."""
    app = ClientApp(mods=[attack])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        if message.content["config"].get("fail"):
            return Message(Error(2, "failed honestly"), reply_to=message)
        received = {name: array.numpy() for name, array in message.content["arrays"].items()}
        received["w"] = received["w"] + np.array([1, 2], np.float32)
        received["bn.running_var"] = received["bn.running_var"] + np.float32(1)
        return Message(
            RecordDict({"model": record(**received), "m": MetricRecord({"num-examples": 3})}),
            reply_to=message,
        )

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return Message(RecordDict({"seen": message.content["arrays"]}), reply_to=message)

    return app


START = {"w": np.array([10, 20], np.float32), "bn.running_var": np.array([4], np.float32), "n": np.array(7)}


def reply_of(
    attack, kind: str = "train", fail: bool = False, server_round: int = 1, **arrays: np.ndarray
) -> Message:
    with LocalGrid(honest_app(attack), 2, workers=0) as grid:
        config = ConfigRecord({"fail": fail, "server-round": server_round})
        content = RecordDict({"arrays": record(**(START | arrays)), "config": config})
        (reply,) = grid.send_and_receive([Message(content, grid.get_node_ids()[1], kind)])
    return reply


def test_sign_flip_of_the_update_turns_it_around_the_received_model() -> None:
    reply = reply_of(SignFlip())
    assert reply.content["model"]["w"].numpy().tolist() == [9, 18]
    assert reply_of(SignFlip(factor=-4.0)).content["model"]["w"].numpy().tolist() == [6, 12]
    assert reply.content["m"]["num-examples"] == 3


def test_sign_flip_of_the_weights_turns_the_trained_model() -> None:
    assert reply_of(SignFlip(of="weights")).content["model"]["w"].numpy().tolist() == [-11, -22]


def test_factor_one_is_honest() -> None:
    assert reply_of(SignFlip(factor=1.0)).content["model"]["w"].numpy().tolist() == [11, 22]


def test_buffers_and_counters_are_sent_as_they_are() -> None:
    # Trap: a flipped variance is negative and gives NaN at evaluation.
    model = reply_of(SignFlip(of="weights")).content["model"]
    assert model["bn.running_var"].numpy().tolist() == [5]
    assert model["n"].numpy() == 7


def test_other_types_of_weights_are_turned_as_well_and_keep_their_type() -> None:
    reply = reply_of(SignFlip(of="weights"), w=np.array([0.5, 1.5], np.float64))
    assert reply.content["model"]["w"].numpy().tolist() == [-1.5, -3.5]
    assert reply.content["model"]["w"].numpy().dtype == np.float64


def test_only_training_replies_are_touched_and_errors_pass_through() -> None:
    assert reply_of(SignFlip(), kind="evaluate").content["seen"]["w"].numpy().tolist() == [10, 20]
    assert reply_of(SignFlip(), fail=True).error.reason == "failed honestly"


def test_each_client_behaves_as_its_own_attack_says() -> None:
    mod = dispatch({0: SignFlip(), 1: SignFlip(factor=-2.0)})
    assert reply_of(mod).content["model"]["w"].numpy().tolist() == [8, 16]
    assert reply_of(dispatch({0: SignFlip()})).content["model"]["w"].numpy().tolist() == [11, 22]


def test_attackers_are_drawn_with_the_seed_alone() -> None:
    drawn = choose_attackers(20, [Wanted(0.3)], seed=1)
    assert drawn == choose_attackers(20, [Wanted(0.3)], seed=1)
    assert drawn != choose_attackers(20, [Wanted(0.3)], seed=2)
    assert len(set(drawn[0])) == 6


def test_no_client_gets_two_attacks() -> None:
    fixed, half, rest = choose_attackers(10, [Wanted(clients=(3, 1)), Wanted(0.5), Wanted(0.3)], seed=4)
    assert fixed == [1, 3]
    assert (len(half), len(rest)) == (5, 3)
    assert sorted(fixed + half + rest) == list(range(10))


@pytest.mark.parametrize(("fraction", "count"), [(0.0, 0), (0.3, 12), (0.475, 19), (1.0, 40)])
def test_a_fraction_is_rounded_to_whole_clients(fraction: float, count: int) -> None:
    assert len(choose_attackers(40, [Wanted(fraction)], seed=1)[0]) == count


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([Wanted(clients=(1,)), Wanted(clients=(1,))], "client 1 is named by two attacks"),
        ([Wanted(clients=(10,))], "client 10 is not among the clients 0 to 9"),
        ([Wanted(0.8), Wanted(0.3)], "3 attackers wanted, 2 clients are left"),
    ],
)
def test_impossible_requests_are_refused(requests: list, words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_attackers(10, requests, seed=1)


def test_the_attack_works_as_a_mod_of_a_plain_flower_app() -> None:
    app = ClientApp(mods=[SignFlip(of="weights")])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = ArrayRecord([np.ones(2, np.float32)])
        return Message(
            RecordDict({"arrays": arrays, "m": MetricRecord({"num-examples": 1})}), reply_to=message
        )

    with LocalGrid(app, 1, workers=0) as grid:
        content = RecordDict({"arrays": ArrayRecord([np.zeros(2, np.float32)])})
        (reply,) = grid.send_and_receive([Message(content, grid.get_node_ids()[0], "train")])
    assert reply.content["arrays"]["0"].numpy().tolist() == [-1, -1]


def test_the_richest_in_a_class_are_taken_in_order_and_ids_come_first() -> None:
    counts = np.array([[0, 5], [0, 9], [0, 9], [0, 1], [0, 7]])
    requests = [Wanted(count=1), Wanted(count=2, richest_in=1), Wanted(clients=(1,))]
    drawn, richest, fixed = choose_attackers(5, requests, 1, counts)
    assert (richest, fixed) == ([2, 4], [1])
    assert drawn[0] in (0, 3)
    with pytest.raises(UserError, match="class 2 is not there; the classes are 0 to 1"):
        choose_attackers(5, [Wanted(count=1, richest_in=2)], 1, counts)


def test_a_schedule_turns_an_attack_on_and_off() -> None:
    turned = SignFlip().placed(Scene(), Schedule(start=3, on=1, off=1))
    heights = [reply_of(turned, server_round=n).content["model"]["w"].numpy()[0] for n in range(1, 7)]
    assert heights == [11, 11, 9, 11, 9, 11]


def test_a_forged_reply_keeps_what_was_trained_and_received() -> None:
    class Careless(ReplyAttack):
        def forge(self, trained, received, rng):
            return trained * 0 + np.float32(rng.normal())

        def claimed(self, num_examples: int) -> int:
            return 10 * num_examples

    a, b = (reply_of(Careless(), server_round=n) for n in (1, 1))
    assert a.content["m"]["num-examples"] == 30
    assert a.content["model"]["w"].numpy().tolist() == b.content["model"]["w"].numpy().tolist()
    other = reply_of(Careless(), server_round=2).content["model"]["w"].numpy().tolist()
    assert other != a.content["model"]["w"].numpy().tolist()
