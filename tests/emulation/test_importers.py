from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from fedplat.emulation.given import Given
from fedplat.emulation.importers import FORMATS, import_logs
from fedplat.emulation.network_traces import delivery_rates
from fedplat.errors import UserError

ALL = Given(mem_free_mb=500, down_mbps=20, up_mbps=5)


def pickled(path: Path, data: object, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(data, protocol))
    return path


def behaviour(active: list[float], inactive: list[float], finish: float = 100) -> dict[str, object]:
    return {"duration": 30, "active": active, "inactive": inactive, "finish_time": finish, "model": "x"}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_fedscale_capacity_gives_one_speed_for_both_directions(tmp_path: Path, protocol: int) -> None:
    data = {1: {"computation": 50.0, "communication": 8000.0}, 2: {"computation": "9", "communication": 250}}
    logs = import_logs("fedscale-capacity", pickled(tmp_path / "c", data, protocol), Given(mem_free_mb=700))
    assert logs.devices == ("1", "2")
    assert [(log.down_mbps[0], log.up_mbps[0], log.mem_free_mb[0]) for log in logs] == [
        (8, 8, 700),
        (0.25, 0.25, 700),
    ]
    only = import_logs("fedscale-capacity", tmp_path / "c", Given(mem_free_mb=700, limit=1))
    assert only.devices == ("1",)


def test_fedscale_behaviour_answers_rightly_in_any_order(tmp_path: Path) -> None:
    data = {7: behaviour([0, 30, 60], [10, 40, 70])}
    log = import_logs("fedscale-behaviour", pickled(tmp_path / "b", data), ALL)["7"]
    assert log.span_s == 100
    for time in (65, 5, 35, 5, 65, 135, 100, 1065):
        assert log.at(time).available, time
    for time in (10, 25, 45, 75, 99, 110):
        assert not log.at(time).available, time
    assert (log.at(0).mem_free_mb, log.at(0).down_mbps, log.at(0).up_mbps) == (500, 20, 5)


def test_fedscale_intervals_may_touch_overlap_and_reach_beyond_the_end(tmp_path: Path) -> None:
    data = {0: behaviour([20, 30, 35, 50, 90], [30, 40, 38, 50, 130])}
    log = import_logs("fedscale-behaviour", pickled(tmp_path / "b", data), ALL)["0"]
    truth = [20 <= time < 40 or time >= 90 for time in range(100)]
    assert [log.at(time).available for time in range(100)] == truth
    assert [log.at(time + 100).available for time in range(100)] == truth


class Evil:
    def __reduce__(self):
        return eval, ("1/0",)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (Evil(), "eval"),
        ({1: Evil()}, "eval"),
        (OrderedDict(a=1), "OrderedDict"),
        ({1: np.float64(3)}, "numpy"),
        (len, "len"),
    ],
)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_asks_for_anything_by_name_is_refused(tmp_path, data, named, protocol) -> None:
    for kind in ("fedscale-capacity", "fedscale-behaviour"):
        with pytest.raises(UserError, match=f"the pickle asks for .*{named}"):
            import_logs(kind, pickled(tmp_path / "evil", data, protocol), ALL)


def test_a_malicious_pickle_runs_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    class Writes:
        def __reduce__(self):
            return open, (str(mark), "w")

    with pytest.raises(UserError, match=r"asks for (_io|io)\.open"):
        import_logs("fedscale-capacity", pickled(tmp_path / "evil", Writes()), ALL)
    assert not mark.exists()


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x80\x04", b"\x80\x04N", b"(dp0\ng5\n.", b"\x80\x02P.", b"\x8e" + b"\xff" * 8]
)
def test_a_damaged_pickle_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(UserError, match=r"not a pickle, or damaged"):
        import_logs("fedscale-capacity", tmp_path / "p", ALL)


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        ("fedscale-capacity", [], "expected a table"),
        ("fedscale-capacity", {}, "expected a table"),
        ("fedscale-capacity", {1: 5}, "device 1"),
        ("fedscale-capacity", {(1,): {}}, "expected a table"),
        ("fedscale-capacity", {1: {"computation": 5}}, "missing communication"),
        ("fedscale-capacity", {1: {"communication": "fast"}}, "expected numbers"),
        ("fedscale-capacity", {1: {"communication": float("nan")}}, "expected finite numbers"),
        ("fedscale-behaviour", {1: {"active": [0]}}, "missing inactive, finish_time"),
        ("fedscale-behaviour", {1: behaviour([0, 5], [1])}, "needs its inactive time"),
        ("fedscale-behaviour", {1: behaviour([5], [1])}, "needs its inactive time"),
        ("fedscale-behaviour", {1: behaviour([0], [1], 0)}, "finish_time be above 0"),
        ("fedscale-behaviour", {1: behaviour([0], [1]) | {"finish_time": []}}, "expected one number"),
        ("fedscale-capacity", {1: {"communication": [1, 2]}}, "expected one number"),
        ("fedscale-capacity", {"a\nb": {"communication": 1}}, "a name needs"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, kind: str, data: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        import_logs(kind, pickled(tmp_path / "p", data), ALL)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_mahimahi_counts_packets_of_1500_bytes_per_window(tmp_path: Path) -> None:
    times = [*range(1, 1001), 1500, 1500, 2000, 2250]
    trace = write(tmp_path / "lte", "\n".join(map(str, times)))
    log = import_logs("mahimahi", trace, Given(mem_free_mb=1, up_mbps=2))["lte"]
    assert log.time_s.tolist() == [0, 1, 2, 2.25]
    assert log.down_mbps.tolist() == pytest.approx([12, 0.036, 0.048, 0.048])
    assert set(log.up_mbps.tolist()) == {2}
    assert log.at(2.25).down_mbps == pytest.approx(12)  # it repeats after its last delivery


@pytest.mark.parametrize("window_s", [0.1, 0.3, 1.0, 7.0, 1000.0])
def test_no_packet_is_lost_whatever_the_window(window_s: float) -> None:
    times = np.sort(np.random.default_rng(3).integers(0, 20_000, 500))
    edges, rates = delivery_rates(times, int(times[-1]), window_s)
    assert (rates[:-1] * np.diff(edges)).sum() == pytest.approx(500 * 12_000 / 1e6)


def test_a_downlink_takes_the_uplink_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "a.down", "1000\n2000\n3000\n")
    write(tmp_path / "a.up", "500\n600\n2000\n")
    write(tmp_path / "b", "1000\n")
    logs = import_logs("mahimahi", tmp_path, ALL)
    assert logs.devices == ("a", "b")
    assert logs["a"].time_s.tolist() == [0, 1, 2]
    assert logs["a"].down_mbps.tolist() == pytest.approx([0.012, 0.012, 0.012])
    assert logs["a"].up_mbps.tolist() == pytest.approx([0.024, 0.012, 0.012])
    assert logs["b"].up_mbps.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "no length"), ("0\n", "no length"), ("1\nx\n", "line 2"), ("5\n4\n", "line 2: 4 ms"),
     ("-1", "line 1"), ("1.5", "line 1"), ("9" * 15, "use longer windows")],
)  # fmt: skip
def test_other_delivery_times_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        import_logs("mahimahi", write(tmp_path / "t", text), ALL)


@pytest.mark.parametrize(
    ("name", "text"),
    [("p.json", "[[0, 1.5], [2, 3]]"), ("p.csv", "0,1.5\n2, 3\n"), ("p.txt", "# LTE\n0\t1.5\n\n2  3\n")],
)
def test_pairs_are_read_from_json_and_lines(tmp_path: Path, name: str, text: str) -> None:
    log = import_logs("pairs", write(tmp_path / name, text), ALL)["p"]
    assert log.time_s.tolist() == [0, 2]
    assert log.down_mbps.tolist() == [1.5, 3]
    assert log.up_mbps.tolist() == [5, 5]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("p.json", "{", "not JSON"), ("p.json", "[]", "expected a list"), ("p.json", "[[1]]", "pair 1"),
        ("p.json", "[[0, 1], [0, 2]]", "pair 2: its time"), ("p.json", '[[0, "x"]]', "expected numbers"),
        ("p.csv", "0,1\n1\n", "line 2"), ("p.csv", "s,mbps\n", "line 1"), ("p.csv", "0,-1\n", "0 or more"),
        ("p.csv", "", "no pairs"), ("p.csv", "0,nan\n", "finite"),
    ],
)  # fmt: skip
def test_other_pairs_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        import_logs("pairs", write(tmp_path / name, text), ALL)


def flash_file(tmp_path: Path, *messages: str) -> Path:
    data = {"u1": {"messages": "\n".join(messages), "model": "m"}}
    return write(tmp_path / "f.json", json.dumps(data))


def test_a_flash_phone_is_available_when_idle_charging_and_on_wifi(tmp_path: Path) -> None:
    source = flash_file(
        tmp_path,
        "2020-01-28 23:59:50\tscreen_on", "2020-01-28 23:59:55\t41.0%", "2020-01-29 00:00:00\tWIFI",
        "2020-01-29 00:00:10\tbattery_charged_on", "2020-01-29 00:00:20\tscreen_off",
        "2020-01-29 00:00:20\tphone_on", "2020-01-29 00:01:00\t4G", "2020-01-29 00:02:00\twifi",
        "2020-01-29 00:03:00\tbattery_charged_off", "2020-01-29 00:02:30\t80%",
    )  # fmt: skip
    log = import_logs("flash", source, ALL)["u1"]
    assert log.time_s.tolist() == [0, 5, 10, 20, 30, 70, 130, 160, 190]
    assert log.available.tolist() == [False] * 4 + [True, False, True, True, False]
    assert log.at(0).battery is None
    assert log.at(29).battery == 41
    assert log.at(165).battery == 80


@pytest.mark.parametrize(
    "message", ["yesterday\twifi", "2020-01-28 23:59:50\t101%", "2020-01-28 23:59:50\tx%", ""]
)
def test_other_flash_messages_are_refused(tmp_path: Path, message: str) -> None:
    with pytest.raises(UserError, match="message"):
        import_logs("flash", flash_file(tmp_path, message), ALL)


def sources(tmp_path: Path) -> dict[str, Path]:
    return {
        "fedscale-capacity": pickled(tmp_path / "c", {1: {"communication": 1}}),
        "fedscale-behaviour": pickled(tmp_path / "b", {1: behaviour([0], [1])}),
        "mahimahi": write(tmp_path / "m", "1\n"),
        "pairs": write(tmp_path / "p", "0 1\n"),
        "flash": flash_file(tmp_path, "2020-01-28 23:59:50\twifi"),
    }


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_what_a_format_lacks_must_be_given(tmp_path: Path, kind: str) -> None:
    source = sources(tmp_path)[kind]
    assert len(import_logs(kind, source, ALL)) == 1
    with pytest.raises(UserError, match=r"give it with --(mem-free|up|down)-mbp?s?"):
        import_logs(kind, source, Given(down_mbps=1))
    with pytest.raises(UserError, match="give it with --mem-free-mb"):
        import_logs(kind, source, Given(down_mbps=1, up_mbps=1))


def test_an_unknown_format_and_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'flash'"):
        import_logs("flsh", tmp_path)
    for wrong in ({"mem_free_mb": -1.0}, {"up_mbps": float("nan")}, {"window_s": 0.0}, {"limit": 0}):
        with pytest.raises(UserError, match="expected"):
            Given(**wrong)
    for kind in FORMATS:
        with pytest.raises(UserError, match=r"cannot be read|no trace"):
            import_logs(kind, tmp_path / "none", ALL)
        with pytest.raises(UserError, match=r"cannot be read|no trace"):
            import_logs(kind, tmp_path, ALL)
