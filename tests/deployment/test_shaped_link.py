from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedplat
from fedplat.deployment.plan import create
from fedplat.deployment.processes import Machines
from fedplat.deployment.settings import FILE, read_settings, settings_text
from fedplat.deployment.shaped_link import ShapedLink, parse_address
from fedplat.deployment.token_bucket import TokenBucket
from fedplat.emulation.logs import DeviceLog
from fedplat.errors import UserError

from .test_loopback import free_ports, lines_of, text_of

LOCAL = "127.0.0.1"


# The bucket -------------------------------------------------------------------------------------------------


def test_a_full_bucket_lets_its_burst_pass_at_once_and_then_waits() -> None:
    bucket = TokenBucket(8_000_000, 10_000, now=0.0)  # 1 MB/s
    assert bucket.take(25_000, 0.0) == 10_000
    assert bucket.take(15_000, 0.0) == 0
    assert bucket.wait_s(15_000, 0.0) == pytest.approx(1448 / 1e6)
    assert bucket.take(15_000, 0.005) == 5_000


def test_it_fills_no_further_than_the_burst() -> None:
    bucket = TokenBucket(8_000, 500, now=0.0)
    assert bucket.take(500, 0.0) == 500
    assert bucket.take(10_000, 3600.0) == 500


def test_a_changed_rate_counts_from_the_time_of_the_change() -> None:
    bucket = TokenBucket(8_000, 10_000, now=0.0)  # 1 kB/s
    assert bucket.take(10_000, 0.0) == 10_000
    bucket.set_rate(80_000, 1.0)  # 1,000 bytes have come by now; then 10 kB/s
    assert bucket.take(10_000, 1.2) == 3_000


def test_at_rate_0_nothing_passes_and_without_a_limit_everything() -> None:
    bucket = TokenBucket(0, 100, now=0.0)
    assert bucket.take(100, 0.0) == 100
    assert bucket.take(1, 1e9) == 0
    assert bucket.wait_s(1, 1e9) == math.inf
    bucket.set_rate(math.inf, 1e9)
    assert bucket.take(1 << 30, 1e9) == 1 << 30
    assert bucket.wait_s(1 << 30, 1e9) == 0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(8_000, 1_000, now=10.0)
    assert bucket.take(1_000, 10.0) == 1_000
    assert bucket.take(1, 5.0) == 0
    assert bucket.take(500, 10.5) == 500


@given(
    st.floats(1e3, 1e10),
    st.integers(1, 1 << 20),
    st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 2)), max_size=40),
)
def test_never_more_than_the_burst_and_what_has_come_in_is_taken(
    rate: float, burst: int, asked: list[tuple[int, float]]
) -> None:
    bucket, now, total = TokenBucket(rate, burst, now=0.0), 0.0, 0
    for wanted, pause in asked:
        now += pause
        taken = bucket.take(wanted, now)
        assert 0 <= taken <= wanted
        total += taken
        assert total <= burst + rate / 8 * now + 1


@given(st.floats(1e3, 1e10), st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_after_the_wait_that_it_tells_something_passes(rate: float, burst: int, wanted: int) -> None:
    bucket = TokenBucket(rate, burst, now=0.0)
    bucket.take(burst, 0.0)
    assert bucket.take(wanted, bucket.wait_s(wanted, 0.0)) >= 1


@pytest.mark.parametrize(("rate", "burst"), [(-1, 10), (math.nan, 10), (1, 0)])
def test_a_bucket_without_sense_is_refused(rate: float, burst: int) -> None:
    with pytest.raises(UserError, match="expected"):
        TokenBucket(rate, burst, 0.0)


# The relay --------------------------------------------------------------------------------------------------


class Server:
    """Accepts connections; each is handled by ``handle`` in a thread of its own."""

    def __init__(self, handle: Callable[[socket.socket], None]) -> None:
        self._socket = socket.create_server((LOCAL, 0))
        self.address = self._socket.getsockname()[:2]
        self._handle = handle
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                one, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(one,), daemon=True).start()

    def _one(self, one: socket.socket) -> None:
        with one:
            one.settimeout(30)
            self._handle(one)

    def close(self) -> None:
        self._socket.close()


def all_of(one: socket.socket) -> bytes:
    parts = []
    while part := one.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def reverse(one: socket.socket) -> None:
    """Read until the other side has ended its sending, then answer."""
    one.sendall(all_of(one)[::-1])


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(reverse)
    yield made
    made.close()


def exchanged(link: ShapedLink, data: bytes) -> bytes:
    with socket.create_connection(link.address, timeout=30) as one:
        sender = threading.Thread(target=lambda: (one.sendall(data), one.shutdown(socket.SHUT_WR)))
        sender.start()
        answer = all_of(one)
        sender.join()
    return answer


class VirtualTime:
    """A clock that stands still but for those who sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def test_bytes_arrive_as_they_are_in_order_both_ways_and_are_counted(server: Server) -> None:
    data = os.urandom(1_000_000)
    with ShapedLink((LOCAL, 0), server.address) as link:
        assert exchanged(link, data) == data[::-1]
    assert (link.bytes_up, link.bytes_down) == (1_000_000, 1_000_000)
    assert (link.connections, link.failed) == (1, 0)


def test_a_side_that_has_ended_its_sending_still_receives(server: Server) -> None:
    # The server answers only once it has seen the end, which therefore has to be passed on.
    with ShapedLink((LOCAL, 0), server.address) as link:
        assert exchanged(link, b"") == b""
        assert exchanged(link, b"abc") == b"cba"


def test_a_megabyte_takes_as_long_as_the_speed_says(server: Server) -> None:
    clock, size, burst = VirtualTime(), 1_000_000, 50_000
    link = ShapedLink(
        (LOCAL, 0), server.address, up_bps=8e6, burst=burst, clock=clock, sleep=clock.sleep
    )  # 1 MB/s
    with link:
        exchanged(link, bytes(size))
    assert clock.now == pytest.approx((size - burst) / 1e6, abs=0.01)


def test_connections_share_the_speed(server: Server) -> None:
    clock, size, burst = VirtualTime(), 200_000, 50_000
    with ShapedLink(
        (LOCAL, 0), server.address, up_bps=8e6, burst=burst, clock=clock, sleep=clock.sleep
    ) as link:
        threads = [threading.Thread(target=exchanged, args=(link, bytes(size))) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert clock.now >= (5 * size - burst) / 1e6 - 0.01
    assert link.bytes_up == 5 * size
    assert link.connections == 5


def test_each_direction_has_its_own_speed(server: Server) -> None:
    clock, size, burst = VirtualTime(), 300_000, 1_000
    with ShapedLink(
        (LOCAL, 0), server.address, down_bps=8e5, up_bps=8e6, burst=burst, clock=clock, sleep=clock.sleep
    ) as link:
        exchanged(link, bytes(size))
    # The server answers only after it has everything: one after the other.
    assert clock.now == pytest.approx(0.3 + 3.0, abs=0.05)


def test_latency_delays_each_way_once(server: Server) -> None:
    clock = VirtualTime()
    with ShapedLink((LOCAL, 0), server.address, latency_s=0.25, clock=clock, sleep=clock.sleep) as link:
        assert exchanged(link, b"abc") == b"cba"
    assert clock.now >= 0.5


def test_a_link_that_is_shut_passes_nothing_until_it_is_opened(server: Server) -> None:
    with (
        ShapedLink((LOCAL, 0), server.address, down_bps=0, up_bps=0, burst=1) as link,
        socket.create_connection(link.address, timeout=30) as one,
    ):
        one.sendall(b"abcdef")
        one.shutdown(socket.SHUT_WR)
        one.settimeout(0.3)
        with pytest.raises(TimeoutError):
            one.recv(1)
        assert link.bytes_up <= 1  # the burst
        assert link.bytes_down == 0
        link.set_rates(math.inf, math.inf)
        one.settimeout(30)
        assert all_of(one) == b"fedcba"


def test_speeds_follow_a_log_from_its_first_sample_on(server: Server) -> None:
    clock = VirtualTime()
    log = DeviceLog("a", [100, 110, 120], [1, 1, 1], [8, 1, 8], [2, 4, 2], available=[True, True, False])
    link = ShapedLink((LOCAL, 0), server.address, clock=clock)
    assert link.rates == (math.inf, math.inf)
    link.follow(log)
    assert link.rates == (8e6, 2e6)
    clock.now = 10.0
    assert link.rates == (1e6, 4e6)
    clock.now = 20.0
    assert link.rates == (8e6, 2e6)  # it begins again
    link.follow(log, "clamp")
    clock.now = 45.0
    assert link.rates == (0, 0)  # not available
    link.set_rates(5, 6)
    clock.now = 50.0
    assert link.rates == (5, 6)


def test_a_target_that_is_not_there_ends_the_connection_and_not_the_relay(server: Server) -> None:
    with socket.create_server((LOCAL, 0)) as other:
        nobody = other.getsockname()[:2]
    with ShapedLink((LOCAL, 0), nobody) as link:
        for _ in range(2):
            with socket.create_connection(link.address, timeout=30) as one:
                assert all_of(one) == b""
        assert link.failed == link.connections == 2
        link.target = server.address
        assert exchanged(link, b"abc") == b"cba"


def test_stopping_closes_connections_and_frees_the_port() -> None:
    held = threading.Event()
    waiting = Server(lambda one: (held.wait(30), None)[1])
    link = ShapedLink((LOCAL, 0), waiting.address).start()
    address = link.address
    with socket.create_connection(address, timeout=30) as one:
        one.sendall(b"abc")
        deadline = time.monotonic() + 30
        while not link.bytes_up and time.monotonic() < deadline:
            time.sleep(0.01)
        link.stop()
        link.stop()
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""
    held.set()
    waiting.close()
    with ShapedLink(address, waiting.address):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "shaped-link"]


def test_a_port_that_is_taken_is_told(server: Server) -> None:
    with pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1"):
        ShapedLink(server.address, server.address).start()


def test_a_link_without_sense_is_refused(server: Server) -> None:
    with pytest.raises(UserError, match="latency"):
        ShapedLink((LOCAL, 0), server.address, latency_s=-1)
    with pytest.raises(UserError, match="rate"):
        ShapedLink((LOCAL, 0), server.address, up_bps=-1)
    with pytest.raises(UserError, match="not been started"):
        _ = ShapedLink((LOCAL, 0), server.address).address


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:a", "::1:90"])
def test_an_address_needs_a_host_and_a_port(text: str) -> None:
    with pytest.raises(UserError, match=r"--to .*expected HOST:PORT"):
        parse_address(text, "--to")


# The command ------------------------------------------------------------------------------------------------


def run_command(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedplat", "deploy", "link", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_the_command_relays_until_it_is_interrupted_and_tells_the_bytes(server: Server) -> None:
    port = free_ports(1)
    process = run_command(
        *("--listen", f"{LOCAL}:{port}", "--to", f"{LOCAL}:{server.address[1]}", "--down-mbps", "100")
    )
    assert process.stdout is not None
    assert "100 Mbit/s down, no limit up" in process.stdout.readline()
    with socket.create_connection((LOCAL, port), timeout=30) as one:
        one.sendall(b"abc")
        one.shutdown(socket.SHUT_WR)
        assert all_of(one) == b"cba"
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=30)
    assert "3 bytes down, 3 bytes up, 1 connections, 0 without an answer" in told
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--device", "a"], "--device needs --log"),
        (["--log", "LOGS", "--down-mbps", "1"], "--log gives the speeds"),
        (["--log", "LOGS"], "choose one with --device"),
        (["--log", "LOGS", "--device", "c"], "unknown device"),
    ],
)
def test_the_command_tells_what_does_not_go_together(tmp_path: Path, arguments: list[str], told: str) -> None:
    path = tmp_path / "logs.csv"
    path.write_text("device,time_s,mem_free_mb,down_mbps,up_mbps\na,0,1,1,1\nb,0,1,1,1\n")
    given = [str(path) if word == "LOGS" else word for word in arguments]
    process = run_command("--to", f"{LOCAL}:9", *given)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert told in " ".join(errors.split())


# A federation -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_supernode_behind_a_slow_link_trains_to_the_end_over_tls(tmp_path: Path) -> None:
    port = free_ports(5)
    made = create(tmp_path / "federation", supernodes=2, port=port, first_node_port=port + 1)
    place = made.supernodes[0]
    settings = read_settings(place)
    host, _, _ = settings["SUPERLINK"].rpartition(":")
    with ShapedLink((host, port + 4), (host, port), down_bps=50e6, up_bps=20e6) as link:
        (place / FILE).write_bytes(settings_text("Slow.", {**settings, "SUPERLINK": f"{host}:{port + 4}"}))
        with Machines(made.folder, timeout=400) as machines:
            machines.start_all()
            before = link.bytes_down, link.bytes_up
            run = machines.submit(
                Path(fedplat.__file__).parent / "flower_app",
                'scenario="quickstart" strategy="mean" rounds=1 out="result" '
                'overrides="partition.clients=2 attacks=[]"',
            )
            status = machines.wait_for_run(run, 600)
            assert status == "finished:completed", text_of(machines.log("superlink"))[-3000:]
        result = made.superlink / "work" / "result" / "mean"
    clients = lines_of(result / "clients.jsonl")
    assert {line["status"] for line in clients} == {"accepted"}
    payload = lines_of(result / "rounds.jsonl")[-1]["bytes_up"] / 2
    assert link.bytes_down - before[0] > payload
    assert link.bytes_up - before[1] > payload
