from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedplat.emulation.logs import DeviceLog, DeviceLogs, read_logs, write_logs
from fedplat.errors import UserError

HEADER = "time_s,mem_free_mb,down_mbps,up_mbps"


def log_of(times: list[float], name: str = "a") -> DeviceLog:
    """A log whose memory tells the place of the sample."""
    ones = np.ones(len(times))
    return DeviceLog(name, np.array(times), np.arange(len(times)) * 1.0, ones, ones)


LOG = log_of([10, 20, 50])


@pytest.mark.parametrize(
    ("time", "wrapped", "clamped"),
    [
        (-1e9, 0, 0), (9.999, 0, 0),  # before the first sample the first one holds
        (10, 0, 0), (19.999, 0, 0), (20, 1, 1), (49.999, 1, 1),
        (50, 0, 2), (59.999, 0, 2), (60, 1, 2), (89.9, 1, 2), (90, 0, 2), (100, 1, 2), (50 + 40 * 1000, 0, 2),
    ],
)  # fmt: skip
def test_a_sample_holds_from_its_time_to_the_next(time: float, wrapped: int, clamped: int) -> None:
    assert LOG.at(time).mem_free_mb == LOG.at(time, "wrap").mem_free_mb == wrapped
    assert LOG.at(time, "clamp").mem_free_mb == clamped


def test_a_log_of_one_sample_never_changes() -> None:
    for beyond in ("wrap", "clamp"):
        assert log_of([5]).index_at([[-1, 5], [6, 1e9]], beyond).tolist() == [[0, 0], [0, 0]]


times_lists = st.lists(st.floats(0, 1e6), min_size=1, max_size=20, unique=True).map(sorted)


@given(times_lists, st.lists(st.floats(-1e7, 1e7), min_size=1, max_size=30), st.randoms())
def test_the_order_of_questions_does_not_matter(times, asked, random) -> None:
    log = log_of(times)
    order = list(range(len(asked)))
    random.shuffle(order)
    for beyond in ("wrap", "clamp"):
        at_once = log.index_at(asked, beyond)
        one_by_one = {place: int(log.index_at(asked[place], beyond)) for place in order}
        assert [one_by_one[place] for place in range(len(asked))] == at_once.tolist()
        for time, index in zip(asked, at_once.tolist(), strict=True):
            inside = times[0] <= time < times[-1]
            scanned = max([place for place, begins in enumerate(times) if begins <= time], default=0)
            assert not inside or index == scanned
            assert 0 <= index < max(len(times) - (beyond == "wrap"), 1)


@given(st.integers(0, 39), st.integers(0, 50))
def test_a_wrapped_log_repeats(phase: int, periods: int) -> None:
    assert LOG.index_at(10 + phase + 40 * periods) == LOG.index_at(10 + phase)


def test_the_published_availability_case_has_the_true_answers() -> None:
    log = DeviceLog(
        "a",
        np.array([0, 10, 30, 40, 60, 70, 100]),
        *np.ones((3, 7)),
        available=np.array([1, 0, 1, 0, 1, 0, 0]),
    )
    for order in ([65], [5, 65], [35, 5], [65, 165, 35, 5]):
        assert all(log.at(time).available for time in order)
    assert not any(log.at(time).available for time in (10, 75, 100 + 15))


def test_arrays_cannot_be_changed_and_are_copies() -> None:
    times = np.array([0.0, 1.0])
    log = DeviceLog("a", times, times, times, times, battery=times, available=times)
    times[1] = 7
    assert log.time_s.tolist() == [0, 1]
    for name in ("time_s", "mem_free_mb", "down_mbps", "up_mbps", "battery", "available"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(log, name)[0] = 1


def test_a_file_per_device_and_one_table_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(f"{HEADER},available,battery\n0,5,1,2,1,50\n1.5,6,1,2,0,\n")
    (tmp_path / "y.csv").write_text("up_mbps,down_mbps,mem_free_mb,time_s\n9,8,7,3\n")
    table = tmp_path / "table" / "all.csv"
    logs = read_logs(tmp_path)
    assert logs.devices == ("x", "y")
    write_logs(logs, table)
    assert table.read_text() == (
        f"device,{HEADER},battery,available\nx,0,5,1,2,50,1\nx,1.5,6,1,2,,0\ny,3,7,8,9,,1\n"
    )
    again = read_logs(table)
    assert again.at("x", 0) == logs.at("x", 0)
    assert again.at("x", 2, "clamp").battery is None
    assert again.at("y", 99) == logs.at("y", 99)
    before = table.read_bytes()
    assert write_logs(again, table).read_bytes() == before


@given(times_lists, st.floats(0, 1e300), st.floats(0, 100))
def test_what_is_written_reads_the_same_to_the_bit(tmp_path_factory, times, value, battery) -> None:
    path = tmp_path_factory.mktemp("logs") / "a.csv"
    values = np.full(len(times), value)
    log = DeviceLog('a,"b" ü', np.array(times), values, values, values, np.full(len(times), battery))
    (again,) = read_logs(write_logs(DeviceLogs((log,)), path))
    assert again.device == log.device
    for name in ("time_s", "mem_free_mb", "down_mbps", "up_mbps", "battery"):
        assert np.array_equal(getattr(again, name), getattr(log, name))


def test_lines_of_several_devices_may_be_mixed(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text(f"device,{HEADER}\nb,5,1,1,1\na,0,2,1,1\nb,6,3,1,1\n")
    logs = read_logs(path)
    assert logs.devices == ("b", "a")
    assert logs["b"].time_s.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: missing column time_s"),
        ("time_s,mem_free_mb,up_mbps\n", "line 1: missing column down_mbps"),
        (f"{HEADER},batery\n", "line 1: unknown column 'batery': did you mean 'battery'"),
        (f"{HEADER},up_mbps\n", "line 1: column up_mbps comes twice"),
        (f"{HEADER}\n", "no samples"),
        (f"{HEADER}\n0,1,1,1\n1,1,1\n", "line 3: 3 fields, expected 4"),
        (f"{HEADER}\n0,1,1,1\n\n", "line 3: 0 fields"),
        (f"{HEADER}\n0,1,1,1,1\n", "line 2: 5 fields"),
        (f"{HEADER}\n0,fast,1,1\n", "line 2: mem_free_mb is 'fast'"),
        (f"{HEADER}\n0,,1,1\n", "line 2: mem_free_mb is ''"),
        (f"{HEADER}\n0,1,-1,1\n", "line 2: down_mbps is '-1'"),
        (f"{HEADER}\n-1,1,1,1\n", "line 2: time_s is '-1'"),
        (f"{HEADER}\n0,1,1,nan\n", "line 2: up_mbps is 'nan'"),
        (f"{HEADER}\n0,1,inf,1\n", "line 2: down_mbps is 'inf'"),
        (f"{HEADER}\n0,1,1,1\n5,1,1,1\n4,1,1,1\n", "line 4: time_s 4 goes back"),
        (f"{HEADER}\n0,1,1,1\n5,1,1,1\n5,1,1,1\n", "line 4: time_s 5 is the time of the line before"),
        (f"{HEADER},battery\n0,1,1,1,101\n", "line 2: battery is '101', expected 0 to 100"),
        (f"{HEADER},available\n0,1,1,1,2\n", "line 2: available is '2', expected 0 or 1"),
        (f"{HEADER},available\n0,1,1,1,\n", "line 2: available is ''"),
        (f"device,{HEADER}\n ,0,1,1,1\n", "line 2: device is empty"),
        (f'{HEADER}\n0,1,1,"1\n', "not a CSV file"),
    ],
)
def test_a_malformed_line_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_logs(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_what_cannot_be_read_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_logs(tmp_path / "none.csv")
    with pytest.raises(UserError, match=r"no \.csv file"):
        read_logs(tmp_path)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a CSV file"):
        read_logs(tmp_path)


def test_wrong_questions_and_logs_are_refused() -> None:
    with pytest.raises(UserError, match="unknown value of beyond 'loop'"):
        LOG.at(0, "loop")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not finite"):
        LOG.index_at([0, np.nan])
    with pytest.raises(UserError, match="unknown device 'b'"):
        DeviceLogs((LOG,)).at("b", 0)
    with pytest.raises(UserError, match="two logs"):
        DeviceLogs((LOG, LOG))
    with pytest.raises(UserError, match="at least one"):
        DeviceLogs(())
    with pytest.raises(UserError, match="must increase"):
        log_of([1, 1])
    with pytest.raises(UserError, match="as long as"):
        DeviceLog("a", np.zeros(1), np.zeros(2), np.zeros(1), np.zeros(1))
    with pytest.raises(UserError, match="negative"):
        DeviceLog("a", np.zeros(1), -np.ones(1), np.zeros(1), np.zeros(1))
