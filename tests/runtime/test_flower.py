"""What is put around Flower's own grids, with the local engine in their place."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedplat.runtime.around import GridWrapper
from fedplat.runtime.flower import STATE_QUERY, FlowerGrid, answer_state_query
from fedplat.runtime.local import LocalGrid

from ..flower_apps import plain_app, record


class Unordered(GridWrapper):
    """A grid that, like Flower's, has its nodes and its replies in no order; keeps some replies back."""

    silent: Iterable[str] = ()

    def get_node_ids(self) -> list[int]:
        ids = list(self._grid.get_node_ids())
        random.Random(3).shuffle(ids)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = [
            m for m in self._grid.pull_messages(message_ids) if m.metadata.src_node_id not in self.silent
        ]
        return found[::-1]


def messages(grid: FlowerGrid) -> list[Message]:
    content = RecordDict({"arrays": record(a=np.zeros(2, np.float32))})
    return [Message(content, node, MessageType.TRAIN) for node in grid.get_node_ids()]


def test_nodes_and_replies_come_in_a_stable_order() -> None:
    with LocalGrid(plain_app(), 5, workers=0) as engine:
        grid = FlowerGrid(Unordered(engine), poll_seconds=0)
        assert grid.get_node_ids() == sorted(grid.get_node_ids())
        replies = grid.send_and_receive(messages(grid)[::-1], timeout=30)
        assert [m.metadata.src_node_id for m in replies] == grid.get_node_ids()[::-1]
        assert grid.send_and_receive([]) == []


def test_a_wait_ends_and_says_which_nodes_were_silent(caplog: pytest.LogCaptureFixture) -> None:
    with LocalGrid(plain_app(), 3, workers=0) as engine:
        inner = Unordered(engine)
        inner.silent = {1001}
        grid = FlowerGrid(inner, poll_seconds=0)
        with caplog.at_level(logging.WARNING, "fedplat"):
            replies = grid.send_and_receive(messages(grid), timeout=0.2)
    assert [m.metadata.src_node_id for m in replies] == [1000, 1002]
    assert "1 of 3 replies did not arrive within 0.2 s: nodes [1001]" in caplog.text


def counting_app() -> ClientApp:
    """Count calls in the state, and answer questions about it as the app of a scenario does."""

    class Counting(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            if message.metadata.message_type == STATE_QUERY:
                return answer_state_query(message, context.state)
            if context.node_config["partition-id"] != 0:
                calls = int(context.state["count"]["calls"]) + 1 if "count" in context.state else 1
                context.state["count"] = ConfigRecord({"calls": calls})
            return Message(RecordDict(), reply_to=message)

    return Counting()


def test_what_clients_remember_can_be_saved_and_put_back_over_messages() -> None:
    with LocalGrid(counting_app(), 3, workers=0) as engine:
        grid = FlowerGrid(engine, poll_seconds=0, saves_states=True)
        grid.send_and_receive(messages(grid))
        saved = grid.node_states()
        assert saved.keys() == {1001, 1002}
        assert saved == engine.node_states()
        grid.send_and_receive(messages(grid))
        assert grid.node_states() != saved
        grid.load_node_states(saved)
        assert grid.node_states() == saved
        assert FlowerGrid(engine, poll_seconds=0).node_states() == {}
