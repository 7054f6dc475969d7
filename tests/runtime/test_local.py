from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, FedMedian, FedTrimmedAvg, Krum

from fedplat.arrays import FlatArrays, Layout
from fedplat.runtime.local import LocalGrid

from ..flower_apps import plain_app, record, with_workers_after

WORKERS = [0, 1, 2]


def ask(grid: LocalGrid, arrays: ArrayRecord | None = None, timeout: float | None = 60) -> list[Message]:
    content = RecordDict(
        {"arrays": arrays or record(w=np.zeros(3, np.float32)), "config": ConfigRecord({"k": 1})}
    )
    messages = [Message(content, node, "train") for node in grid.get_node_ids()]
    return grid.send_and_receive(messages, timeout=timeout)


def app_of(function) -> ClientApp:
    app = ClientApp()
    app.train()(function)
    return app


def answer(message: Message, value: float = 0.0, **metrics: float) -> Message:
    arrays = ArrayRecord([np.full(3, value, np.float32)])
    arrays = record(w=np.full(3, value, np.float32))
    return Message(
        RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics or {"m": 1})}), reply_to=message
    )


@pytest.mark.parametrize("workers", WORKERS)
def test_flowers_own_fedavg_and_a_plain_client_app_run_unchanged(workers: int) -> None:
    with LocalGrid(plain_app(), 4, workers=workers) as grid:
        result = FedAvg().start(
            grid, ArrayRecord([np.zeros((2, 3), np.float32), np.ones(1, np.float32)]), num_rounds=3
        )
    np.testing.assert_allclose(result.arrays["0"].numpy(), 3, rtol=1e-6)
    np.testing.assert_allclose(result.arrays["1"].numpy(), 4, rtol=1e-6)
    assert result.train_metrics_clientapp[3]["calls"] == pytest.approx(3)
    assert result.evaluate_metrics_clientapp[3]["total"] == pytest.approx(22, rel=1e-6)


@pytest.mark.parametrize("strategy", [FedMedian(), FedTrimmedAvg(), Krum(num_malicious_nodes=1)])
def test_flowers_strategies_that_empty_their_replies_run_unchanged(strategy) -> None:
    with LocalGrid(plain_app(), 5, workers=2) as grid:
        result = strategy.start(grid, ArrayRecord([np.zeros(4, np.float32)]), num_rounds=2)
    np.testing.assert_allclose(result.arrays["0"].numpy(), 2, rtol=1e-6)


def test_replies_come_in_the_order_of_the_messages_and_lie_in_one_matrix() -> None:
    def slow_first(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        time.sleep(0.2 if partition == 0 else 0)
        return answer(message, partition)

    with LocalGrid(app_of(slow_first), 4, workers=2) as grid:
        replies = ask(grid)
    assert [r.metadata.src_node_id for r in replies] == grid.get_node_ids()
    flats = [FlatArrays.behind(r.content["arrays"]) for r in replies]
    assert [f.row for f in flats] == [0, 1, 2, 3]
    assert flats[0].block.matrix[:, 0].tolist() == [0, 1, 2, 3]
    assert all(f.block is flats[0].block and np.shares_memory(f.vector, flats[0].block.matrix) for f in flats)


@pytest.mark.parametrize("workers", WORKERS)
def test_context_state_survives_and_what_a_failed_call_changed_is_dropped(workers: int) -> None:
    def counting(message: Message, context: Context) -> Message:
        calls = int(context.state["c"]["n"]) + 1 if "c" in context.state else 1
        context.state["c"] = ConfigRecord({"n": calls})
        if message.metadata.group_id == "fail":
            raise ValueError("no luck")
        return answer(message, calls=calls)

    with LocalGrid(app_of(counting), 1, workers=workers) as grid:
        content = RecordDict({"arrays": record(w=np.zeros(3, np.float32))})
        calls = []
        for group in ("a", "fail", "b"):
            (reply,) = grid.send_and_receive(
                [Message(content, grid.get_node_ids()[0], "train", group_id=group)]
            )
            calls.append(None if reply.has_error() else reply.content["metrics"]["calls"])
    assert calls == [1, None, 2]


def test_node_states_can_be_saved_and_put_back() -> None:
    with LocalGrid(plain_app(), 2, workers=1) as grid:
        arrays = ArrayRecord([np.zeros(1, np.float32)])
        ask(grid, arrays)
        states = grid.node_states()
    with LocalGrid(plain_app(), 2, workers=1) as grid:
        grid.load_node_states(states)
        assert [r.content["metrics"]["calls"] for r in ask(grid, arrays)] == [2, 2]


@pytest.mark.parametrize("workers", WORKERS)
def test_exception_exit_and_wrong_return_value_become_error_replies(workers: int) -> None:
    def misbehaving(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        if partition == 0:
            raise ValueError("boom")
        if partition == 1:
            raise SystemExit(3)
        return None if partition == 2 else answer(message)  # type: ignore[return-value]

    with LocalGrid(app_of(misbehaving), 4, workers=workers) as grid:
        replies = ask(grid)
        again = ask(grid)
    assert [r.has_error() for r in replies] == [True, True, True, False]
    reasons = [r.error.reason.splitlines()[0] for r in replies[:3]]
    assert reasons[0] == "ValueError: boom"
    assert reasons[1] == "SystemExit: 3"
    assert "returned NoneType instead of a Message" in reasons[2]
    assert [r.has_error() for r in again] == [True, True, True, False]


def test_killed_worker_is_replaced_and_its_clients_run_again(tmp_path: Path) -> None:
    def dies_once(message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        marker = tmp_path / "died"
        if partition == 2 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return answer(message, partition)

    with LocalGrid(app_of(dies_once), 6, workers=2) as grid:
        before = set()
        grid.start_workers()
        before = set(grid.worker_pids())
        replies = ask(grid)
        after = set(grid.worker_pids())
    assert [float(r.content["arrays"]["w"].numpy()[0]) for r in replies] == [0, 1, 2, 3, 4, 5]
    assert len(after) == 2
    assert len(before & after) == 1


def test_client_that_kills_every_worker_becomes_an_error_and_the_round_goes_on() -> None:
    def deadly(message: Message, context: Context) -> Message:
        if int(context.node_config["partition-id"]) == 1:
            os._exit(7)
        return answer(message)

    with LocalGrid(app_of(deadly), 4, workers=2) as grid:
        replies = ask(grid)
    assert [r.has_error() for r in replies] == [False, True, False, False]
    assert "died 2 times" in replies[1].error.reason
    assert "exit code 7" in replies[1].error.reason


def test_late_replies_are_dropped_and_the_next_round_is_not_disturbed() -> None:
    def slow_once(message: Message, context: Context) -> Message:
        if int(context.node_config["partition-id"]) == 0 and message.metadata.group_id != "2":
            time.sleep(30)
        return answer(message, 5)

    with LocalGrid(app_of(slow_once), 3, workers=2) as grid:
        replies = ask(grid, timeout=1.0)
        assert [r.metadata.src_node_id for r in replies] == grid.get_node_ids()[1:]
        content = RecordDict({"arrays": record(w=np.zeros(3, np.float32))})
        messages = [Message(content, n, "train", group_id="2") for n in grid.get_node_ids()]
        assert len(grid.send_and_receive(messages, timeout=60)) == 3


def test_clients_cannot_change_what_other_clients_receive() -> None:
    def greedy(message: Message, context: Context) -> Message:
        seen = message.content["arrays"]["w"].numpy()
        value = float(seen[0])
        seen += 100
        message.content["config"]["k"] = 99
        del message.content["arrays"]["w"]
        return answer(message, value, k=float(message.content["config"]["k"]))

    with LocalGrid(app_of(greedy), 5, workers=1) as grid:
        replies = ask(grid)
    assert [float(r.content["arrays"]["w"].numpy()[0]) for r in replies] == [0] * 5


def test_kept_replies_keep_their_values_over_later_rounds() -> None:
    count = {"round": 0}

    def numbered(message: Message, context: Context) -> Message:
        return answer(message, float(message.content["config"]["k"]))

    with LocalGrid(app_of(numbered), 2, workers=1) as grid:
        kept = []
        for k in range(4):
            content = RecordDict(
                {"arrays": record(w=np.zeros(3, np.float32)), "config": ConfigRecord({"k": k})}
            )
            kept.append(grid.send_and_receive([Message(content, n, "train") for n in grid.get_node_ids()]))
        count["round"] += 1
    values = [[float(r.content["arrays"]["w"].numpy()[0]) for r in replies] for replies in kept]
    assert values == [[0, 0], [1, 1], [2, 2], [3, 3]]


def test_memory_of_dropped_replies_is_used_again() -> None:
    with LocalGrid(plain_app(), 3, workers=1) as grid:
        addresses = set()
        for _ in range(6):
            replies = ask(grid, ArrayRecord([np.zeros(1000, np.float32)]))
            addresses.add(FlatArrays.behind(replies[0].content["arrays"]).block.matrix.ctypes.data)
            del replies
    assert len(addresses) <= 2


def test_reply_with_other_arrays_than_were_sent_arrives_as_it_is() -> None:
    def odd(message: Message, context: Context) -> Message:
        arrays = record(w=np.ones((2, 2), np.float64), extra=np.array([1, 2]))
        return Message(RecordDict({"arrays": arrays, "more": record(z=np.zeros(1))}), reply_to=message)

    with LocalGrid(app_of(odd), 2, workers=1) as grid:
        reply = ask(grid)[0]
    assert reply.content["arrays"]["w"].numpy().tolist() == [[1, 1], [1, 1]]
    assert reply.content["arrays"]["extra"].numpy().tolist() == [1, 2]
    assert reply.content["more"]["z"].numpy().tolist() == [0]


def test_messages_with_models_of_different_size_are_served_side_by_side() -> None:
    def echo(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": message.content["arrays"]}), reply_to=message)

    with LocalGrid(app_of(echo), 4, workers=2) as grid:
        models = [record(w=np.full(size, size, np.float32)) for size in (1, 2, 2, 3)]
        messages = [
            Message(RecordDict({"arrays": model}), node, "train")
            for model, node in zip(models, grid.get_node_ids(), strict=True)
        ]
        replies = grid.send_and_receive(messages)
    assert [r.content["arrays"]["w"].numpy().tolist() for r in replies] == [[1], [2, 2], [2, 2], [3, 3, 3]]


def test_integer_and_half_precision_arrays_come_back_with_type_and_value() -> None:
    sent = record(
        **{"w": np.ones(2, np.float32), "n": np.array(2**53 + 1, np.int64), "h": np.array([0.5], np.float16)}
    )

    def echo(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": ArrayRecord(dict(message.content["arrays"]))}), reply_to=message)

    with LocalGrid(app_of(echo), 1, workers=1) as grid:
        (reply,) = ask(grid, sent)
    for name, array in sent.items():
        np.testing.assert_array_equal(reply.content["arrays"][name].numpy(), array.numpy(), strict=True)


def test_push_and_pull_return_each_reply_once() -> None:
    with LocalGrid(plain_app(), 2, workers=1) as grid:
        content = RecordDict({"arrays": ArrayRecord([np.zeros(1, np.float32)])})
        ids = grid.push_messages([Message(content, n, "train") for n in grid.get_node_ids()])
        got: list[Message] = []
        while len(got) < 2:
            got += grid.pull_messages(ids)
        assert grid.pull_messages(ids) == []
    assert sorted(m.metadata.reply_to_message_id for m in got) == sorted(ids)


def test_worker_ends_when_the_server_is_killed(tmp_path: Path) -> None:
    def pid_of(message: Message, context: Context) -> Message:
        return answer(message, pid=os.getpid())

    child = os.fork()
    if child == 0:
        grid = LocalGrid(app_of(pid_of), 2, workers=2)
        pids = {int(r.content["metrics"]["pid"]) for r in ask(grid)} | set(grid.worker_pids())
        (tmp_path / "pids.part").write_text(" ".join(map(str, pids)))
        os.rename(tmp_path / "pids.part", tmp_path / "pids")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 20
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    assert pids
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_close_ends_all_workers_and_arrays_handed_out_stay_valid() -> None:
    with LocalGrid(plain_app(), 2, workers=2) as grid:
        replies = ask(grid, ArrayRecord([np.zeros(2, np.float32)]))
        pids = grid.worker_pids()
    assert not any(_alive(pid) for pid in pids)
    assert replies[0].content["arrays"]["0"].numpy().tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="closed"):
        ask(grid)


def test_bad_arguments_and_unknown_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_nodes must be at least 1"):
        LocalGrid(plain_app(), 0)
    with pytest.raises(ValueError, match="workers must be at least 0"):
        LocalGrid(plain_app(), 1, workers=-1)
    with LocalGrid(plain_app(), 1, workers=0) as grid, pytest.raises(ValueError, match="no node 5"):
        grid.push_messages([Message(RecordDict(), 5, "train")])


def test_no_messages_give_no_replies() -> None:
    with LocalGrid(plain_app(), 2, workers=2) as grid:
        assert grid.send_and_receive([]) == []
        assert grid.worker_pids() == [] or len(grid.worker_pids()) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_records_a_client_makes_behave_as_flowers_do_in_a_worker_too(workers: int) -> None:
    def making(message: Message, context: Context) -> Message:
        array = np.arange(3, dtype=np.float32)
        kept, given = ArrayRecord([array]), [np.ones(2, np.float64), np.array(3)]
        array += 100  # a record holds what the array was
        taken = ArrayRecord(given, keep_input=False)
        assert given == []
        state = {"a.weight": torch.ones(2, 2, requires_grad=True), "a.count": torch.tensor(7)}
        torch_record = ArrayRecord(state)
        assert len(torch_record["a.weight"].data) > 16
        assert torch_record.to_torch_state_dict()["a.count"].item() == 7
        with pytest.raises(ValueError, match=r"Object|plain numbers"):
            ArrayRecord([np.array([{}], dtype=object)])
        content = RecordDict({"kept": kept, "taken": taken, "torch": torch_record, "none": ArrayRecord()})
        return Message(content, reply_to=message)

    with LocalGrid(app_of(making), 1, workers=workers) as grid:
        (reply,) = ask(grid)
    assert not reply.has_error(), reply.error.reason
    assert reply.content["kept"]["0"].numpy().tolist() == [0, 1, 2]
    assert reply.content["taken"]["0"].numpy().dtype == np.float64
    assert reply.content["taken"]["1"].numpy() == 3
    assert reply.content["torch"]["a.weight"].numpy().tolist() == [[1, 1], [1, 1]]
    assert len(reply.content["none"]) == 0


def test_large_configs_and_replies_travel_both_ways_without_blocking() -> None:
    def verbose(message: Message, context: Context) -> Message:
        assert len(message.content["config"]["blob"]) == 1_000_000
        content = {
            "arrays": record(w=np.zeros(3, np.float32)),
            "more": ConfigRecord({"blob": bytes(1_500_000)}),
        }
        return Message(RecordDict(content), reply_to=message)

    with LocalGrid(app_of(verbose), 6, workers=2) as grid:
        for _ in range(3):
            messages = [
                Message(
                    RecordDict(
                        {
                            "arrays": record(w=np.zeros(3, np.float32)),
                            "config": ConfigRecord({"blob": bytes(1_000_000)}),
                        }
                    ),
                    node,
                    "train",
                )
                for node in grid.get_node_ids()
            ]
            assert len(grid.send_and_receive(messages, timeout=60)) == 6


def test_large_states_travel_both_ways_without_blocking() -> None:
    def hoarder(message: Message, context: Context) -> Message:
        big = np.arange(500_000, dtype=np.float32) + int(context.node_config["partition-id"])
        if "big" in context.state:
            assert context.state["big"]["a"].numpy()[0] == big[0]
        context.state["big"] = record(a=big)
        return answer(message)

    with LocalGrid(app_of(hoarder), 6, workers=2) as grid:
        for _ in range(3):
            assert not any(r.has_error() for r in ask(grid, timeout=120))


def test_no_worker_holds_the_memory_of_replies_that_nobody_has_any_more() -> None:
    with LocalGrid(plain_app(), 4, workers=2) as grid:
        for _ in range(3):
            replies = ask(grid)
            del replies
        assert not grid._pool._leased


def test_where_a_fork_could_not_train_clients_run_in_this_process() -> None:
    printed, warnings = with_workers_after(
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode():\n"
        "    torch.ones(1, requires_grad=True).sum().backward()\n"
    )
    assert printed == "[False, False] 0"
    assert "clients run one after another in this process" in warnings


def test_arrays_of_double_precision_keep_it_in_later_rounds_too() -> None:
    app, seen = ClientApp(), []

    @app.train()
    def train(message: Message, context: Context) -> Message:
        third = message.content["arrays"]["w"].numpy() + 1 / 3
        metrics = MetricRecord({"num-examples": 1, "third": float(third[0])})
        return Message(RecordDict({"arrays": record(w=third), "metrics": metrics}), reply_to=message)

    with LocalGrid(app, 2, workers=2) as grid:
        # As fedplat's strategies hand models on: doubles promoted into the float32 vector.
        start = record(w=np.zeros(3))
        sent = FlatArrays.of_record(start, Layout.of_record(start, promote=True)).to_record()
        for reply in ask(grid, sent):
            seen.append((float(reply.content["arrays"]["w"].numpy()[0]), reply.content["metrics"]["third"]))
    assert seen == [(1 / 3, 1 / 3)] * 2
