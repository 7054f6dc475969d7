from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedplat.emulation.grid import EmulatedGrid
from fedplat.emulation.hardware import Hardware
from fedplat.emulation.schedule import DeviceSchedule
from fedplat.emulation.timeline import Policy, Timeline, Work
from fedplat.rounds import Round, rounds
from fedplat.runtime.local import LocalGrid
from fedplat.strategies import Krum, Mean

from ..flower_apps import record, with_partition_query

NODES = 4
START = record(w=np.zeros(250, np.float32))  # 1,000 bytes
BYTES = 1000
# 1 Hz, one FLOP per cycle: training takes as many seconds as FLOPs.
HARDWARE = Hardware(
    *np.array([[1.0] * NODES, [1.0] * NODES, [0.0] * NODES, [2.0] * NODES, [1.0] * NODES, [0.0] * NODES])
)


def app(trained: list[int] | None = None) -> ClientApp:
    """Add 1 + the partition to the model, and note who has trained."""
    made = ClientApp()

    @made.train()
    def train(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        if trained is not None:
            trained.append(client)
        weights = message.content["arrays"]["w"].numpy() + np.float32(1 + client)
        content = RecordDict({"arrays": record(w=weights), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    return with_partition_query(made)


def schedule(rounds: int = 2, **rows: Iterable[Any]) -> DeviceSchedule:
    """1 s down and 2 s up for everybody, except where a row per node says otherwise."""
    given = {"memory_bytes": [100] * NODES, "down_bps": [8 * BYTES] * NODES, "up_bps": [4 * BYTES] * NODES,
             "available": [True] * NODES, "drops": [False] * NODES} | rows  # fmt: skip
    return DeviceSchedule(
        **{name: np.repeat(np.array(row)[:, None], rounds, axis=1) for name, row in given.items()}
    )


def emulated(
    grid: LocalGrid, devices: DeviceSchedule, policy: Policy, flops: Iterable[float] = (3.0,) * NODES
) -> EmulatedGrid:
    work = [Work(50, each, 0.0) for each in flops]
    numbers = {node: client for client, node in enumerate(grid.get_node_ids())}
    return EmulatedGrid(
        grid, devices, Timeline(HARDWARE, policy), policy, clients=numbers,
        work_of=lambda message, client: work[client],
    )  # fmt: skip


def run(
    strategy: Any, devices: DeviceSchedule, policy: Policy, flops: Iterable[float] = (3.0,) * NODES,
    trained: list[int] | None = None,
) -> tuple[list[Round], list[dict[str, Any]], list[str]]:  # fmt: skip
    done, records, outcomes = [], [], []
    with LocalGrid(app(trained), NODES, workers=0) as grid:
        around = emulated(grid, devices, policy, flops)
        for current in rounds(strategy, around, START, devices.rounds):
            done.append(current)
            records.append(around.record(current.number))
            outcomes.append(" ".join(device.outcome for device in around.devices_in(current.number)))
    return done, records, outcomes


def mean_of(*clients: int) -> float:
    return float(np.mean([1 + client for client in clients]))


def value(arrays: ArrayRecord) -> float:
    return float(arrays["w"].numpy()[0])


def test_devices_that_can_do_everything_change_no_result() -> None:
    around, records, outcomes = run(Mean(min_nodes=NODES, fraction_evaluate=0.0), schedule(), Policy())
    with LocalGrid(app(), NODES, workers=0) as grid:
        plain = list(rounds(Mean(min_nodes=NODES, fraction_evaluate=0.0), grid, START, 2))
    assert [value(a.arrays) for a in around] == [value(b.arrays) for b in plain]
    assert around[-1].bytes_up == plain[-1].bytes_up == NODES * BYTES
    assert outcomes == ["delivered delivered delivered delivered"] * 2
    assert [row["seconds"] for row in records] == [1 + 3 + 2] * 2
    assert records[0]["joules_compute"] == pytest.approx(NODES * 3.0)
    assert records[0]["joules_transfer"] == pytest.approx(NODES * 2.0)


def test_what_a_device_cannot_do_is_not_done_and_the_others_make_the_model() -> None:
    trained: list[int] = []
    devices = schedule(memory_bytes=[100, 49, 100, 100], drops=[False, False, True, False])
    done, records, outcomes = run(
        Mean(min_nodes=NODES, fraction_evaluate=0.0), devices, Policy(deadline_s=7.0), (3, 3, 3, 5), trained
    )
    assert outcomes[0] == "delivered out-of-memory dropped late"
    assert value(done[0].arrays) == mean_of(0)
    assert trained == [0, 0]
    assert sorted(done[0].failures.values()) == [
        "dropped: the device was gone before it sent its reply", "late: 8 s of 7 s",
        "out of memory: 5e-05 of 4.9e-05 MB",
    ]  # fmt: skip
    assert records[0]["seconds"] == 7.0
    assert records[0]["violations"] == 2


def test_a_server_that_waits_lets_the_slowest_set_the_time() -> None:
    done, records, outcomes = run(
        Mean(min_nodes=NODES, fraction_evaluate=0.0), schedule(), Policy(4.0, "wait"), (3, 3, 3, 50)
    )
    assert outcomes[0] == "delivered delivered delivered delivered"
    assert value(done[0].arrays) == mean_of(0, 1, 2, 3)
    assert records[0]["seconds"] == 53.0
    assert records[0]["violations"] == NODES


def test_a_strategy_that_knows_the_devices_asks_those_that_are_there() -> None:
    devices = schedule(available=[True, False, True, False])
    strategy = Mean(min_nodes=NODES, fraction_evaluate=0.0, devices=devices)
    done, records, outcomes = run(strategy, devices, Policy())
    assert outcomes[0] == "delivered delivered"
    assert value(done[0].arrays) == mean_of(0, 2)
    assert records[0]["asked"] == records[0]["available"] == 2


def test_a_strategy_that_does_not_know_them_waits_for_nobody_until_the_deadline() -> None:
    devices = schedule(available=[True, False, True, False])
    flowers = FedAvg(min_train_nodes=NODES, min_available_nodes=NODES, fraction_evaluate=0.0)
    done, records, outcomes = run(flowers, devices, Policy(deadline_s=20.0))
    assert sorted(outcomes[0].split()) == ["away", "away", "delivered", "delivered"]
    assert value(done[0].arrays) == mean_of(0, 2)
    assert records[0]["away"] == 2
    assert records[0]["seconds"] == 20.0


def test_a_round_with_nobody_there_leaves_the_model_and_lasts_until_its_deadline() -> None:
    devices = schedule(available=[False] * NODES)
    strategy = Mean(min_nodes=NODES, fraction_evaluate=0.0, devices=devices)
    done, records, outcomes = run(strategy, devices, Policy(deadline_s=9.0))
    assert outcomes == ["", ""]
    assert value(done[-1].arrays) == 0.0
    assert [row["seconds"] for row in records] == [9.0, 9.0]


def test_too_few_devices_for_a_rule_skip_the_round_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    available = np.array([[True, True], [True, True], [True, False], [True, False]])
    devices = schedule().with_availability(available)
    strategy = Krum(f=0, min_nodes=NODES, fraction_evaluate=0.0, devices=devices)
    done, _, outcomes = run(strategy, devices, Policy())
    assert len(outcomes[0].split()) == NODES
    assert outcomes[1] == ""
    assert value(done[1].arrays) == value(done[0].arrays) != 0.0
    assert "round 2: nobody is asked, with 2 nodes there" in caplog.text


def test_a_client_that_fails_by_itself_is_told_apart_from_its_device() -> None:
    broken = ClientApp()

    @broken.train()
    def train(message: Message, context: Context) -> Message:
        raise ValueError("no data")

    devices = schedule(1)
    with LocalGrid(with_partition_query(broken), NODES, workers=0) as grid:
        around = emulated(grid, devices, Policy())
        (done,) = rounds(Mean(min_nodes=NODES, fraction_evaluate=0.0), around, START, 1)
        assert {device.outcome for device in around.devices_in(1)} == {"failed"}
        assert around.record(1)["failed"] == NODES
    assert all("no data" in reason for reason in done.failures.values())


def test_the_initial_model_costs_no_device_anything() -> None:
    with LocalGrid(app(), NODES, workers=0) as grid:
        zeros = emulated(grid, schedule(), Policy()).record(0)
    assert zeros["seconds"] == zeros["joules"] == zeros["asked"] == zeros["available"] == 0
