from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedplat.emulation import (
    Budget,
    DeviceLog,
    DeviceLogs,
    DeviceSchedule,
    Level,
    class_schedule,
    generate,
    markov_schedule,
    trace_schedule,
    uniform_schedule,
)
from fedplat.emulation.windows import over_windows
from fedplat.errors import UserError

LOGS = generate(5, 24, 1)
LOW, HIGH = Level(100, 1, 0.5, 0.5, share=3), Level(4000, 50, 20, share=1)
MAKERS: dict[str, Callable[[int, int, int], DeviceSchedule]] = {
    "trace": lambda nodes, rounds, seed: trace_schedule(LOGS, nodes, rounds, seed, 700),
    "trace, own offsets": lambda nodes, rounds, seed: trace_schedule(LOGS, nodes, rounds, seed, 700, None),
    "uniform": lambda n, r, seed: uniform_schedule(n, r, seed, (100, 200), (1, 2), (0.5, 1), 0.7),
    "classes": lambda nodes, rounds, seed: class_schedule(nodes, rounds, seed, [LOW, HIGH]),
    "markov": lambda nodes, rounds, seed: markov_schedule(nodes, rounds, seed, HIGH, LOW),
}
every_mode = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every_mode
def test_equal_settings_give_equal_schedules_and_another_seed_another(make) -> None:
    assert make(8, 30, 1) == make(8, 30, 1)
    assert make(8, 30, 1) != make(8, 30, 2)


@every_mode
def test_a_budget_does_not_depend_on_the_order_asked(make) -> None:
    schedule = make(4, 6, 3)
    keys = [(node, round_) for node in range(4) for round_ in range(1, 7)]
    forwards = {key: schedule[key] for key in keys}
    assert {key: schedule[key] for key in reversed(keys)} == forwards


@every_mode
def test_more_rounds_only_add_rounds(make) -> None:
    short, long = make(6, 5, 9), make(6, 20, 9)
    assert all(short[node, round_] == long[node, round_] for node in range(6) for round_ in range(1, 6))


@pytest.mark.parametrize("name", ["trace", "trace, own offsets", "uniform", "markov"])
def test_more_nodes_only_add_nodes(name: str) -> None:
    few, many = MAKERS[name](3, 5, 9), MAKERS[name](12, 5, 9)
    assert all(few[node, round_] == many[node, round_] for node in range(3) for round_ in range(1, 6))


@every_mode
def test_a_saved_schedule_loads_the_same(make, tmp_path: Path) -> None:
    schedule = make(3, 4, 5).with_drops(0.5, 2)
    assert schedule.drops.any()
    path = schedule.save(tmp_path / "run" / "devices.csv")
    again = DeviceSchedule.load(path)
    assert again == schedule
    assert again.save(tmp_path / "again.csv").read_bytes() == path.read_bytes()
    assert path.read_text().splitlines()[0] == "node,round,memory_bytes,down_bps,up_bps,available,drops"


def step_log(name: str, base: float) -> DeviceLog:
    return DeviceLog(
        name, np.array([0, 100, 200]), np.array([base, base + 1, base + 2]), np.array([1.5, 2, 3]),
        np.array([0.25, 1, 1]), available=np.array([1, 0, 1]),
    )  # fmt: skip


def test_a_trace_is_looked_up_at_the_offset_plus_the_round_times_the_interval() -> None:
    logs = DeviceLogs((step_log("a", 10),))
    wraps = trace_schedule(logs, 1, 4, 0, interval_s=60, offset_s=30)  # 90, 150, 210, 270 s
    assert wraps[0, 1] == Budget(10_000_000, 1_500_000, 250_000, True)
    assert wraps[0, 2] == Budget(11_000_000, 2_000_000, 1_000_000, False)
    assert wraps[0, 3] == wraps[0, 1]
    assert trace_schedule(logs, 1, 4, 0, 60, 30, "clamp")[0, 3] == Budget(
        12_000_000, 3_000_000, 1_000_000, True
    )


def test_every_log_is_used_before_one_is_used_again() -> None:
    logs = DeviceLogs(tuple(step_log(name, 10 * i) for i, name in enumerate("abcde")))
    orders = set()
    for seed in range(5):
        memory = trace_schedule(logs, 12, 1, seed, 50).memory_bytes[:, 0].tolist()
        assert sorted(memory[:5]) == [0, 10_000_000, 20_000_000, 30_000_000, 40_000_000]
        assert memory[5:10] == memory[:5]
        assert memory[10:] == memory[:2]
        orders.add(tuple(memory))
    assert len(orders) > 1


def test_nodes_with_the_same_log_differ_by_their_own_offsets() -> None:
    logs = DeviceLogs((LOGS.logs[0],))
    together = trace_schedule(logs, 2, 20, 0, 900)
    apart = trace_schedule(logs, 2, 20, 0, 900, offset_s=None)
    assert (together.memory_bytes[0] == together.memory_bytes[1]).all()
    assert (apart.memory_bytes[0] != apart.memory_bytes[1]).any()


def test_uniform_numbers_fill_their_ranges() -> None:
    schedule = uniform_schedule(100, 100, 1, (43, 223), (2, 4), (1, 1), availability=0.25)
    memory = schedule.memory_bytes / 1e6
    assert memory.min() >= 43
    assert memory.max() <= 223
    assert memory.mean() == pytest.approx(133, abs=3)
    assert memory.std() == pytest.approx(180 / 12**0.5, abs=2)
    assert (schedule.up_bps == 1_000_000).all()
    assert schedule.available.mean() == pytest.approx(0.25, abs=0.02)
    assert abs(np.corrcoef(memory.ravel(), schedule.down_bps.ravel())[0, 1]) < 0.05


def test_classes_are_fixed_and_as_many_as_their_shares_say() -> None:
    schedule = class_schedule(8, 200, 1, {"low": LOW, "high": HIGH})
    low = (schedule.memory_bytes == 100_000_000).all(axis=1)
    high = (schedule.memory_bytes == 4_000_000_000).all(axis=1)
    assert (low.sum(), high.sum()) == (6, 2)
    assert schedule.available[high].all()
    assert schedule.available[low].mean() == pytest.approx(0.5, abs=0.06)
    thirds = class_schedule(10, 1, 0, [Level(n, 1, 1) for n in (1, 2, 3)])
    assert sorted(np.bincount(thirds.memory_bytes[:, 0] // 1_000_000)[1:].tolist()) == [3, 3, 4]


def test_the_markov_states_have_their_long_run_share_and_stay() -> None:
    schedule = markov_schedule(200, 200, 1, HIGH, LOW, stay_good=0.9, stay_bad=0.6)
    bad = schedule.memory_bytes == 100_000_000
    assert bad.mean() == pytest.approx(0.1 / 0.5, abs=0.02)
    assert bad[:, 0].mean() == pytest.approx(0.2, abs=0.1)
    assert bad[:, 1:][bad[:, :-1]].mean() == pytest.approx(0.6, abs=0.02)
    assert (~bad[:, 1:])[~bad[:, :-1]].mean() == pytest.approx(0.9, abs=0.02)
    never = markov_schedule(50, 10, 1, HIGH, LOW, 1, 1).memory_bytes
    assert (never == never[:, :1]).all()
    always = markov_schedule(5, 10, 1, HIGH, LOW, 0, 0).memory_bytes
    assert (always[:, 1:] != always[:, :-1]).all()


def test_a_schedule_cannot_be_changed_or_asked_beyond_its_table() -> None:
    schedule = MAKERS["uniform"](2, 3, 1)
    with pytest.raises(ValueError, match="read-only"):
        schedule.memory_bytes[0, 0] = 1
    for key in ((-1, 1), (2, 1), (0, 0), (0, 4)):
        with pytest.raises(IndexError, match="nodes 0 to 1, rounds 1 to 3"):
            schedule[key]


def test_who_is_away_is_away_by_the_log_or_by_the_process() -> None:
    schedule = MAKERS["classes"](6, 40, 1)
    there = np.random.default_rng(0).random((6, 40)) < 0.5
    both = schedule.with_availability(there)
    assert np.array_equal(both.available, schedule.available & there)
    assert np.array_equal(both.memory_bytes, schedule.memory_bytes)
    assert both.with_availability(there) == both
    assert schedule.with_availability(np.ones((6, 40), bool)) == schedule


def test_as_many_drop_out_as_the_chance_says_and_only_of_those_that_are_there() -> None:
    schedule = MAKERS["classes"](60, 80, 1)
    assert not schedule.drops.any()
    dropping = schedule.with_drops(0.3, 5)
    assert not (dropping.drops & ~dropping.available).any()
    there = int(schedule.available.sum())
    assert abs(dropping.drops.sum() / there - 0.3) < 3 * (0.21 / there) ** 0.5
    assert np.array_equal(schedule.with_drops(1, 5).drops, schedule.available)
    assert schedule.with_drops(0, 5) == schedule
    assert schedule.with_drops(0.3, 6) != dropping
    node, column = np.argwhere(dropping.drops)[0].tolist()
    assert dropping[node, column + 1].drops


def test_drops_come_node_by_node_and_whichever_of_them_and_availability_is_put_in_first() -> None:
    few, many = (MAKERS["uniform"](n, r, 1).with_drops(0.4, 2).drops for n, r in ((3, 5), (9, 20)))
    # The chance to be there is the same, so what differs could only be the drops.
    assert np.array_equal(many[:3, :5], few)
    schedule = MAKERS["uniform"](5, 30, 1)
    there = np.random.default_rng(1).random((5, 30)) < 0.6
    assert schedule.with_drops(0.4, 2).with_availability(there) == schedule.with_availability(
        there
    ).with_drops(0.4, 2)


def slow_log() -> DeviceLog:
    return DeviceLog(
        "a", np.array([0, 10, 30, 40]), np.array([8, 6, 7, 9]), np.array([2, 4, 0, 1]),
        np.array([1, 1, 2, 1]), available=np.array([1, 1, 0, 1]),
    )  # fmt: skip


def test_a_window_has_the_least_memory_and_speeds_that_move_the_same_bytes() -> None:
    logs = DeviceLogs((slow_log(),))
    # [5, 20): 5 s of 2 Mbit/s and 10 s of 4: 15 / (5 / 2 + 10 / 4) = 3.
    assert trace_schedule(logs, 1, 1, 0, 5, window_s=15)[0, 1] == Budget(
        6_000_000, 3_000_000, 1_000_000, True
    )
    # [5, 30) ends as the link goes down; a moment more and nothing gets through.
    assert trace_schedule(logs, 1, 1, 0, 5, window_s=25)[0, 1] == Budget(
        6_000_000, 3_333_333, 1_000_000, True
    )
    stuck = trace_schedule(logs, 1, 1, 0, 5, window_s=25.01)[0, 1]
    assert (stuck.down_bps, stuck.available) == (0, False)
    # [20, 40): 10 s of 1 Mbit/s and 10 s of 2 up.
    assert trace_schedule(logs, 1, 1, 0, 20, window_s=20)[0, 1].up_bps == 1_333_333


def test_a_window_goes_on_where_the_log_begins_again_or_its_end_holds() -> None:
    logs = DeviceLogs((slow_log(),))
    # [38, 48): 2 s of 2 Mbit/s, then again the first 8 s of 1 Mbit/s.
    wraps = trace_schedule(logs, 1, 1, 0, 38, window_s=10)[0, 1]
    assert (wraps.memory_bytes, wraps.up_bps) == (7_000_000, round(1e6 * 10 / (2 / 2 + 8)))
    clamps = trace_schedule(logs, 1, 1, 0, 50, 0, "clamp", 100)[0, 1]
    assert clamps == Budget(9_000_000, 1_000_000, 1_000_000, True)
    # Longer than the log: all of it, more than once.
    long = trace_schedule(logs, 1, 1, 0, 7, window_s=100)[0, 1]
    assert (long.memory_bytes, long.down_bps, long.available) == (6_000_000, 0, False)
    # Two periods of 30 s of 1 and 10 s of 2, and 20 s of 1 from 7 s on.
    assert long.up_bps == round(1e6 * 100 / (2 * 35 + 20))


def by_counting(log: DeviceLog, start: float, window: float, beyond: str) -> list[float]:
    times = start + (np.arange(round(window * 4)) + 0.5) / 4  # all changes are at quarters of a second
    index = log.index_at(times, beyond)  # type: ignore[arg-type]
    means = [
        0.0 if not speeds[index].all() else 1 / float(np.mean(1 / speeds[index]))
        for speeds in (log.down_mbps, log.up_mbps)
    ]
    return [float(log.mem_free_mb[index].min()), *means, float(log.available[index].all())]  # type: ignore[index]


@pytest.mark.parametrize("beyond", ["wrap", "clamp"])
def test_windows_anywhere_agree_with_counting_every_moment(beyond) -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        count = int(rng.integers(1, 8))
        times = np.cumsum(rng.integers(1, 20, count)) / 4
        down = rng.uniform(0.5, 9, count) * (rng.random(count) > 0.1)
        log = DeviceLog(
            "a", times, rng.integers(1, 50, count), down, rng.uniform(0.1, 3, count),
            available=rng.random(count) > 0.2,
        )  # fmt: skip
        starts, window = rng.integers(-40, 300, 5) / 4, float(rng.choice([0.25, 3, 10, 33.5, 120]))
        found = over_windows(log, starts, window, beyond)
        expected = [by_counting(log, start, window, beyond) for start in starts.tolist()]
        assert pytest.approx(np.array(expected), rel=1e-9) == found.T


def test_a_window_of_no_length_is_the_instant() -> None:
    log, starts = LOGS.logs[0], np.arange(0, 100_000, 777.0)
    index = log.index_at(starts)
    found = over_windows(log, starts, 0)
    assert np.array_equal(found[:3], np.stack([log.mem_free_mb, log.down_mbps, log.up_mbps])[:, index])
    assert over_windows(log, starts, 1e-3) == pytest.approx(found, rel=1e-6)


HEAD = "node,round,memory_bytes,down_bps,up_bps,available,drops\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1"), ("node,round\n", "line 1"), (HEAD, "no budgets"),
        (HEAD.replace(",drops", "") + "0,1,5,5,5,1\n", "line 1: expected .*,drops"),
        (HEAD + "0,1,5,5,5,1\n", "line 2"), (HEAD + "0,1,5,5,5,2,0\n", "line 2: available and drops"),
        (HEAD + "0,1,5,5,5,1,0\n0,2,5,5,5,1,2\n", "line 3"), (HEAD + "0,1,5,5,5,0,1\n", "line 2"),
        (HEAD + "0,1,-5,5,5,1,0\n", "line 2"), (HEAD + "0,1,5.5,5,5,1,0\n", "line 2"),
        (HEAD + "0,1,5,5,5,1,0\n0,3,5,5,5,1,0\n", "gaps"),
        (HEAD + "0,1,5,5,5,1,0\n0,1,5,5,5,1,0\n", "gaps"),
        (HEAD + "0,0,5,5,5,1,0\n", "gaps"), (HEAD + "0,999999999999,5,5,5,1,0\n", "gaps"),
    ],
)  # fmt: skip
def test_a_malformed_schedule_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "s.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=said):
        DeviceSchedule.load(path)


def test_a_schedule_that_is_not_there_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        DeviceSchedule.load(tmp_path / "none.csv")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: trace_schedule(LOGS, 0, 1, 0, 1), lambda: trace_schedule(LOGS, 1, 1, 0, 0),
        lambda: trace_schedule(LOGS, 1, 1, 0, 1, float("nan")), lambda: MAKERS["uniform"](1, 0, 0),
        lambda: MAKERS["uniform"](1, 1, -1), lambda: uniform_schedule(1, 1, 0, (2, 1), (1, 1), (1, 1)),
        lambda: class_schedule(1, 1, 0, []), lambda: class_schedule(1, 1, 0, [Level(1, 1, 1, share=0)]),
        lambda: markov_schedule(1, 1, 0, HIGH, LOW, 1.1), lambda: Level(1, 1, 1, 1.5),
        lambda: trace_schedule(LOGS, 1, 1, 0, 1, window_s=-1),
        lambda: trace_schedule(LOGS, 1, 1, 0, 1, window_s=float("inf")),
        lambda: MAKERS["uniform"](2, 3, 1).with_drops(1.5, 0),
        lambda: MAKERS["uniform"](2, 3, 1).with_drops(0.5, -1),
        lambda: MAKERS["uniform"](2, 3, 1).with_availability(np.ones((3, 2), bool)),
        lambda: MAKERS["uniform"](2, 3, 1).with_availability(np.ones(3, bool)),
        lambda: DeviceSchedule(*np.ones((3, 1, 1), int), np.zeros((1, 1)), np.ones((1, 1))),
        lambda: DeviceSchedule(*np.ones((3, 1, 1), int), np.ones((1, 1)), np.ones((1, 2))),
        lambda: Level(-1, 1, 1),
        lambda: Level(1, float("nan"), 1), lambda: Level(1e13, 1, 1),
        lambda: trace_schedule(DeviceLogs((step_log("a", 1e13),)), 1, 1, 0, 1),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(UserError):
        wrong()
