from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Iterator

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedplat.arrays import FlatArrays, Layout
from fedplat.runtime import waves
from fedplat.runtime.local import LocalGrid
from fedplat.runtime.waves import engine_for, in_waves, wave_bytes

from ..flower_apps import record

DIM = 1000


@pytest.fixture(autouse=True)
def _small_waves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waves, "_WAVE_BYTES", 1)


def app_of(before=lambda i: None) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        i = int(context.node_config["partition-id"])
        before(i)
        calls = int(context.state["count"]["calls"]) + 1 if "count" in context.state else 1  # type: ignore
        context.state["count"] = MetricRecord({"calls": calls})
        arrays = message.content["arrays"]
        arrays = record(w=arrays["w"].numpy() + np.float32(i))
        metrics = MetricRecord({"num-examples": i + 1, "calls": calls})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def messages_for(grid: LocalGrid) -> list[Message]:
    content = RecordDict({"arrays": record(w=np.zeros(DIM, np.float32))})
    return [Message(content, node, "train") for node in grid.get_node_ids()]


def value(reply: Message) -> float:
    arrays = reply.content["arrays"]
    assert isinstance(arrays, ArrayRecord)
    return float(arrays["w"].numpy()[0])


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("at_a_time", [1, 3, 100])
def test_replies_come_in_the_order_of_the_messages_whatever_the_waves(workers: int, at_a_time: int) -> None:
    slow = app_of(lambda i: time.sleep(0.005 * (i % 3 == 0)))
    with LocalGrid(slow, 17, workers=workers) as grid:
        for calls in (1, 2):
            replies = list(in_waves(grid, messages_for(grid), at_a_time=at_a_time))
            assert [value(reply) for reply in replies] == list(range(17))
            assert {reply.content["metrics"]["calls"] for reply in replies} == {calls}
        assert list(in_waves(grid, [], at_a_time=at_a_time)) == []


def test_replies_taken_at_a_time_are_neighbours_in_one_matrix() -> None:
    with LocalGrid(app_of(), 20, workers=2) as grid:
        replies = in_waves(grid, messages_for(grid), at_a_time=5)
        while block := list(itertools.islice(replies, 5)):
            models = [FlatArrays.behind(reply.content["arrays"]) for reply in block]
            assert all(model is not None and model.block is models[0].block for model in models)  # type: ignore
            rows = [model.row for model in models if model is not None]
            assert rows == list(range(rows[0], rows[0] + 5))


def test_no_more_than_a_few_waves_are_in_memory() -> None:
    with LocalGrid(app_of(), 60, workers=2) as grid:
        most = 0
        for reply in in_waves(grid, messages_for(grid), at_a_time=3):
            del reply
            most = max(most, sum(b.nbytes for b in grid._pool._leased.values()))
        # Waves of 3: one dealt with, two for the workers, one that a worker remembers; each with its model.
        assert most <= 4 * (3 + 1) * 4 * DIM + 8 * 4096
        assert most < 60 * 4 * DIM / 2


def test_a_client_that_raises_or_kills_its_worker_costs_its_own_reply_only() -> None:
    def fault(i: int) -> None:
        if i == 4:
            raise ValueError("boom")
        if i == 9:
            os._exit(3)

    with LocalGrid(app_of(fault), 14, workers=2) as grid:
        replies = list(in_waves(grid, messages_for(grid), at_a_time=2))
    assert [i for i, reply in enumerate(replies) if reply.has_error()] == [4, 9]
    assert [value(r) for r in replies if not r.has_error()] == [i for i in range(14) if i not in (4, 9)]


def test_after_the_timeout_the_missing_replies_are_given_up_and_later_clients_are_not_asked() -> None:
    def stuck(i: int) -> None:
        if i in (6, 7):
            time.sleep(60)

    with LocalGrid(app_of(stuck), 30, workers=2) as grid:
        start = time.monotonic()
        messages = messages_for(grid)
        replies = list(in_waves(grid, messages, at_a_time=2, timeout=1.0))
        assert time.monotonic() - start < 30
        assert [value(reply) for reply in replies][:6] == list(range(6))
        assert {6, 7}.isdisjoint(value(reply) for reply in replies)
        assert len(replies) < 12
        assert not any(grid._queues)


def take(replies: Iterator[Message], count: int) -> None:
    for _ in itertools.islice(replies, count):
        pass


@pytest.mark.parametrize("workers", [0, 2])
def test_a_caller_that_stops_leaves_an_engine_that_goes_on_and_holds_nothing(workers: int) -> None:
    with LocalGrid(app_of(), 40, workers=workers) as grid:
        messages = messages_for(grid)
        replies = in_waves(grid, messages, at_a_time=2)
        take(replies, 7)
        replies.close()
        del replies
        assert not any(grid._queues)
        assert not any(worker.units for worker in grid._workers)
        again = list(in_waves(grid, messages_for(grid), at_a_time=2))
        assert [value(reply) for reply in again] == list(range(40))
        del again
        gc.collect()


def test_an_engine_that_changes_what_a_round_returns_is_asked_for_the_whole_round() -> None:
    class Own(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            return []

    with Own(app_of(), 2, workers=0) as own, LocalGrid(app_of(), 2, workers=0) as grid:
        assert engine_for(own, []) is None
        assert engine_for(grid, []) is grid


def test_the_memory_of_waves_does_not_grow_with_the_number_of_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(waves, "_WAVE_BYTES", 64 << 20)
    layout = Layout.of({"w": ((1_663_370,), "float32")})
    # Blocks of 5 rows of 6.65 MB, waves of 10, of which 2 workers need one and 32 workers seven.
    assert wave_bytes(layout, 5, 2) == 2 * 10 * 4 * 1_663_370
    assert wave_bytes(layout, 5, 32) == 8 * 10 * 4 * 1_663_370
