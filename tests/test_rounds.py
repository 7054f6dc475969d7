from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedplat.rounds import rounds
from fedplat.runtime.local import LocalGrid
from fedplat.strategies import Mean

from .flower_apps import plain_app, record


class Recorder(LocalGrid):
    """A grid that notes every call of a strategy, of itself and of the evaluation, in one list."""

    def __init__(self) -> None:
        super().__init__(plain_app(), 3, workers=0)
        self.calls: list[tuple] = []

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.calls.append(("send_and_receive", [m.metadata.message_type for m in messages], timeout))
        return super().send_and_receive(messages, timeout=timeout)


def noted(base: type, grid: Recorder):
    class Noted(base):
        def summary(self):
            grid.calls.append(("summary",))

        def configure_train(self, server_round, arrays, config, g):
            grid.calls.append(("configure_train", server_round, arrays["0"].numpy().tolist(), dict(config)))
            return super().configure_train(server_round, arrays, config, g)

        def aggregate_train(self, server_round, replies):
            grid.calls.append(("aggregate_train", server_round, len(list(replies))))
            arrays, metrics = super().aggregate_train(server_round, replies)
            return (None, metrics) if server_round == 2 else (arrays, metrics)

        def configure_evaluate(self, server_round, arrays, config, g):
            grid.calls.append(("configure_evaluate", server_round, arrays["0"].numpy().tolist()))
            return super().configure_evaluate(server_round, arrays, config, g)

        def aggregate_evaluate(self, server_round, replies):
            grid.calls.append(("aggregate_evaluate", server_round, len(list(replies))))
            return super().aggregate_evaluate(server_round, replies)

    return Noted()


def test_calls_are_those_of_flowers_start_in_the_same_order() -> None:
    histories = []
    for base in (FedAvg, Mean):
        for use_start in (True, False):
            grid = Recorder()
            strategy = noted(base, grid)

            def evaluate(number, arrays, grid=grid):
                grid.calls.append(("evaluate_fn", number, arrays["0"].numpy().tolist()))
                return MetricRecord({"sum": float(arrays["0"].numpy().sum())})

            start = ArrayRecord([np.zeros(2, np.float32)])
            config = ConfigRecord({"lr": 0.5})
            if use_start:
                result = strategy.start(grid, start, 3, timeout=50, train_config=config, evaluate_fn=evaluate)
                final, server = result.arrays, result.evaluate_metrics_serverapp
                trained, evaluated = result.train_metrics_clientapp, result.evaluate_metrics_clientapp
            else:
                done = list(
                    rounds(strategy, grid, start, 3, timeout=50, train_config=config, evaluate_fn=evaluate)
                )
                final = done[-1].arrays
                server = {r.number: r.server_metrics for r in done}
                trained = {r.number: r.train_metrics for r in done if r.train_metrics is not None}
                evaluated = {r.number: r.client_metrics for r in done if r.client_metrics is not None}
            histories.append((grid.calls, final["0"].numpy().tolist(), server, trained, evaluated))
            grid.close()
        assert histories[-2] == histories[-1]


def test_a_run_can_begin_after_any_round() -> None:
    def run(after: int, arrays: ArrayRecord) -> list:
        with LocalGrid(plain_app(), 2, workers=0) as grid:
            return list(
                rounds(Mean(), grid, arrays, 4, after=after, evaluate_fn=lambda n, a: MetricRecord({"n": n}))
            )

    whole = run(-1, ArrayRecord([np.zeros(1, np.float32)]))
    assert [r.number for r in whole] == [0, 1, 2, 3, 4]
    rest = run(2, whole[2].arrays)
    assert [r.number for r in rest] == [3, 4]
    assert rest[-1].arrays["0"].data == whole[-1].arrays["0"].data
    assert run(4, whole[4].arrays) == []


def test_bytes_are_those_of_the_arrays_sent_and_received() -> None:
    start = record(w=np.zeros(100, np.float32), n=np.array(1, np.int64))
    with LocalGrid(plain_app(), 3, workers=0) as grid:
        (current,) = rounds(Mean(fraction_evaluate=0), grid, start, 1)
    assert current.bytes_down == 3 * 408
    assert current.bytes_up == 3 * 408
    assert current.failures == {}


def test_failures_name_nodes_that_sent_an_error_and_nodes_that_were_silent() -> None:
    class Lossy(LocalGrid):
        def send_and_receive(self, messages, *, timeout=None):
            return [
                r
                for r in super().send_and_receive(messages, timeout=timeout)
                if r.metadata.src_node_id != 1001
            ]

    def fails(message: Message, context) -> Message:
        if context.node_config["partition-id"] == 0:
            raise ValueError("boom")
        return Message(
            RecordDict({"arrays": message.content["arrays"], "m": MetricRecord({"num-examples": 1})}),
            reply_to=message,
        )

    app = ClientApp()
    app.train()(fails)
    with Lossy(app, 3, workers=0) as grid:
        (current,) = rounds(Mean(fraction_evaluate=0), grid, record(w=np.zeros(1, np.float32)), 1)
    assert current.failures[1000].startswith("ValueError: boom")
    assert current.failures[1001] == "no reply before the timeout"
    assert 1002 not in current.failures
