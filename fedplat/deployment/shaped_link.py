"""A TCP relay that lets through only so many bits per second: a slow link where there is a fast one.

It copies bytes and looks at none, so TLS passes untouched: a SuperNode is told the relay's address instead of
the SuperLink's, and everything else stays. ``down`` is towards the one who connects, ``up`` away from it. All
connections of a relay share one bucket per direction, as a device's share its link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType

from ..emulation.logs import Beyond, DeviceLog
from ..errors import UserError
from .token_bucket import MBIT, TokenBucket

log = logging.getLogger("fedplat")

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]
_CHUNK = 16 << 10  # the most that one connection sends before another's turn
_LOOK_AGAIN_S = 0.1  # how late a change of the speed may be noticed
_IN_FLIGHT = 1024  # chunks that wait for their latency to pass
_CONNECT_S = 10.0
DOWN, UP = 0, 1


class ShapedLink:
    """A relay from ``listen`` to ``target`` (host, port), running in a thread from ``start`` to ``stop``.

    Speeds are in bit/s; infinite ones do not limit, and at 0 nothing passes. ``burst`` bytes may pass at once
    after a pause. ``latency_s`` delays what is sent, each way. ``clock`` and ``sleep`` are for tests.

    Bytes are counted as they are delivered: ``bytes_down`` and ``bytes_up``. A connection whose one side has
    ended goes on the other way. If the target does not answer, the connection is closed, and the
    relay goes on.

        with ShapedLink(("127.0.0.1", 9093), ("superlink", 9092), down_bps=20e6, up_bps=5e6) as link:
            ...
            link.set_rates(1e6, 1e6)
    """

    def __init__(
        self,
        listen: tuple[str, int],
        target: tuple[str, int],
        *,
        down_bps: float = math.inf,
        up_bps: float = math.inf,
        burst: int = 64 << 10,
        latency_s: float = 0.0,
        clock: Clock = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        if not (0 <= latency_s < math.inf):
            raise UserError(f"a link's latency of {latency_s} s: expected seconds, 0 or more")
        self.target = target
        self.latency_s = latency_s
        self._listen = listen
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._buckets = [TokenBucket(rate, burst, clock()) for rate in (down_bps, up_bps)]
        self._bytes = [0, 0]
        self._log: tuple[DeviceLog, Beyond, float] | None = None
        self._connections = self._failed = 0
        self._address: tuple[str, int] | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens; with port 0 asked for, the one that was free. Raises UserError before start."""
        if self._address is None:
            raise UserError("this link has not been started")
        return self._address

    @property
    def bytes_down(self) -> int:
        """Bytes delivered to those who connect."""
        return self._bytes[DOWN]

    @property
    def bytes_up(self) -> int:
        """Bytes delivered to the target."""
        return self._bytes[UP]

    @property
    def connections(self) -> int:
        """How many connections there have been."""
        return self._connections

    @property
    def failed(self) -> int:
        """How many of them did not reach the target."""
        return self._failed

    @property
    def rates(self) -> tuple[float, float]:
        """The speeds now, down and up, in bit/s."""
        with self._lock:
            self._look_at_log()
            return self._buckets[DOWN].rate_bps, self._buckets[UP].rate_bps

    def set_rates(self, down_bps: float, up_bps: float) -> None:
        """Change the speeds, also of what is being sent; ends following a log."""
        with self._lock:
            self._log = None
            self._set_rates(down_bps, up_bps)

    def follow(self, device: DeviceLog, beyond: Beyond = "wrap") -> None:
        """Take the speeds from a device's log from now on, whose first sample is now.

        While the log says that the device is not available, nothing passes.
        """
        with self._lock:
            self._log = device, beyond, self._clock()
            self._look_at_log()

    def start(self) -> ShapedLink:
        """Begin to listen; returns itself. Raises UserError if the address cannot be had."""
        if self._thread is not None:
            raise UserError("this link is running already")
        host, port = self._listen
        try:
            server = socket.create_server((host, port), family=_family(host, port))
        except OSError as error:
            raise UserError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        server.setblocking(False)
        self._address = server.getsockname()[:2]
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(server, ready)), name="shaped-link", daemon=True
        )
        self._thread.start()
        ready.wait()
        return self

    def stop(self) -> None:
        """Close all connections and the port; what is on the way is lost. A second call does nothing."""
        if self._thread is None:
            return
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._thread = None

    def __enter__(self) -> ShapedLink:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _set_rates(self, down_bps: float, up_bps: float) -> None:
        now = self._clock()
        for bucket, rate in zip(self._buckets, (down_bps, up_bps), strict=True):
            if rate != bucket.rate_bps:
                bucket.set_rate(rate, now)

    def _look_at_log(self) -> None:
        if self._log is not None:
            device, beyond, start = self._log
            sample = device.at(float(device.time_s[0]) + self._clock() - start, beyond)
            speeds = (sample.down_mbps, sample.up_mbps) if sample.available else (0.0, 0.0)
            self._set_rates(speeds[0] * MBIT, speeds[1] * MBIT)

    # In the thread ------------------------------------------------------------------------------------------

    async def _serve(self, server: socket.socket, ready: threading.Event) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._turns = [asyncio.Lock(), asyncio.Lock()]  # served in order, so connections take turns
        tasks: set[asyncio.Task[None]] = set()
        accepting = asyncio.create_task(self._accept(server, tasks))
        ready.set()
        await self._stopping.wait()
        for task in (accepting, *tasks):
            task.cancel()
        await asyncio.gather(accepting, *tasks, return_exceptions=True)
        server.close()

    async def _accept(self, server: socket.socket, tasks: set[asyncio.Task[None]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(server)
            except OSError as error:  # too many open files, or a connection that is gone again
                log.warning("a connection was not accepted: %s", error)
                await asyncio.sleep(_LOOK_AGAIN_S)
                continue
            self._connections += 1
            task = asyncio.create_task(self._connect(client))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _connect(self, client: socket.socket) -> None:
        with client:
            client.setblocking(False)
            try:
                target = await asyncio.wait_for(_connected(self.target), _CONNECT_S)
            except OSError as error:  # TimeoutError is one
                self._failed += 1
                host, port = self.target
                log.warning("%s:%d cannot be reached: %s", host, port, error.strerror or "no answer")
                return
            with target:
                for one in (client, target):
                    with contextlib.suppress(OSError):
                        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ways = [
                    asyncio.create_task(self._carry(client, target, UP)),
                    asyncio.create_task(self._carry(target, client, DOWN)),
                ]
                try:
                    await asyncio.gather(*ways)
                except OSError as error:  # reset by either side: no use in carrying on the other way
                    log.debug("a connection broke: %s", error)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _carry(self, source: socket.socket, sink: socket.socket, way: int) -> None:
        """Carry one direction to its end, and tell the receiver of the end."""
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_IN_FLIGHT if self.latency_s else 1)
        delivering = asyncio.create_task(self._deliver(on_the_way, sink, way))
        reading = asyncio.create_task(self._read(source, on_the_way, way))
        try:
            await asyncio.gather(reading, delivering)
        finally:
            for task in (reading, delivering):
                task.cancel()
            await asyncio.gather(reading, delivering, return_exceptions=True)

    async def _read(
        self, source: socket.socket, on_the_way: asyncio.Queue[tuple[float, bytes]], way: int
    ) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, _CHUNK):
            while data:
                count = await self._pass(len(data), way)
                await on_the_way.put((self._clock() + self.latency_s, data[:count]))
                data = data[count:]
        await on_the_way.put((self._clock() + self.latency_s, b""))

    async def _deliver(
        self, on_the_way: asyncio.Queue[tuple[float, bytes]], sink: socket.socket, way: int
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await on_the_way.get()
            if (early := due - self._clock()) > 0:
                await self._sleep(early)
            if not data:
                with contextlib.suppress(OSError):  # it may be gone altogether
                    sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(sink, data)
            self._bytes[way] += len(data)

    async def _pass(self, wanted: int, way: int) -> int:
        """Wait for a turn and for some tokens; return how many bytes may pass now, at least one."""
        async with self._turns[way]:
            while True:
                with self._lock:
                    self._look_at_log()
                    bucket = self._buckets[way]
                    now = self._clock()
                    if count := bucket.take(wanted, now):
                        return count
                    wait = bucket.wait_s(wanted, now)
                await self._sleep(min(wait, _LOOK_AGAIN_S))


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Return the host and port of ``host:port``; IPv6 addresses in brackets. Raises UserError.

    >>> parse_address("[::1]:9093", "--listen")
    ('::1', 9093)
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    number = int(port) if port.isascii() and port.isdecimal() else 0
    if not host or not 0 < number < 65536 or (":" in host and not text.startswith("[")):
        raise UserError(f"{what} {text}: expected HOST:PORT, with a port from 1 to 65535")
    return host, number


def _family(host: str, port: int) -> int:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]


async def _connected(target: tuple[str, int]) -> socket.socket:
    """Return a connection to the first address of the target's that answers; raises OSError."""
    loop = asyncio.get_running_loop()
    trouble: OSError = OSError("no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(*target, type=socket.SOCK_STREAM):
        with _closed_on_error(socket.socket(family, kind, protocol)) as one:
            one.setblocking(False)
            try:
                await loop.sock_connect(one, address)
                return one
            except OSError as error:
                trouble = error
                one.close()
    raise trouble


@contextlib.contextmanager
def _closed_on_error(one: socket.socket) -> Iterator[socket.socket]:
    try:
        yield one
    except BaseException:
        one.close()
        raise


__all__ = ["ShapedLink", "TokenBucket", "parse_address"]
