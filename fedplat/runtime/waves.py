"""Training rounds whose replies do not fit into memory: messages go out, and replies come in, in waves."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Generator, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from ..arrays import Layout
from ..security.validation import array_records
from .buffers import rows_nbytes
from .local import LocalGrid

log = logging.getLogger("fedplat")

_WAVE_BYTES = 64 << 20


def engine_for(grid: Grid, messages: Sequence[Message]) -> LocalGrid | None:
    """Return the engine that can answer these messages in waves; None if the grid wants them all at once.

    A grid around another one says which it is by a method ``engine_for`` of its own.
    """
    if isinstance(grid, LocalGrid):
        # An engine that treats the replies of a round in a way of its own has to get the whole round.
        return grid if type(grid).send_and_receive is LocalGrid.send_and_receive else None
    own = getattr(grid, "engine_for", None)
    return own(messages) if own is not None else None


def in_waves(
    grid: LocalGrid, messages: Sequence[Message], *, at_a_time: int, timeout: float | None = None
) -> Generator[Message, None, None]:
    """Yield the replies in the order of the messages, of which only a few waves are under way at a time.

    The workers have the next wave while the caller deals with one; a wave's replies share one matrix, whose
    memory is used again once the caller has let go of them. Waves are whole multiples of ``at_a_time``
    replies, so a caller that takes so many at once finds them side by side. How clients fall into waves does
    not depend on the number of workers. The replies that are missing ``timeout`` seconds after the first was
    asked for are given up, and so is everything if the caller stops.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    grid.start_workers()
    workers = len(grid.worker_pids())
    size = _wave_size(_row_bytes(messages), at_a_time)
    most = _waves_under_way(size, workers)
    waiting = deque(messages[start : start + size] for start in range(0, len(messages), size))
    under_way: deque[list[str]] = deque()
    try:
        while waiting or under_way:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if left == 0 and waiting:
                unasked = sum(map(len, waiting))
                log.warning("%d of %d clients were not asked within %g s", unasked, len(messages), timeout)
                waiting.clear()
            while waiting and len(under_way) < most:
                under_way.append(grid.push_messages(waiting.popleft()))
            if under_way:
                replies = deque(grid.collect(under_way[0], left))
                under_way.popleft()
                while replies:
                    yield replies.popleft()
                    if workers:
                        grid.pull_messages(())  # hand out work that waits
    finally:
        for ids in under_way:
            grid.collect(ids, 0.0)


def wave_bytes(layout: Layout, at_a_time: int, workers: int) -> int:
    """Return the bytes of the replies that are in memory at once."""
    row = rows_nbytes(layout, 1)
    size = _wave_size(row, at_a_time)
    return _waves_under_way(size, workers) * size * row


def _row_bytes(messages: Sequence[Message]) -> int:
    records = array_records(messages[0]) if messages else []
    return max((rows_nbytes(Layout.of_record(record), 1) for record in records), default=1)


def _wave_size(row_bytes: int, at_a_time: int) -> int:
    """Return how many replies a wave has: about 64 MiB of them, a multiple of ``at_a_time``."""
    return max(1, round(_WAVE_BYTES / max(row_bytes, 1) / at_a_time)) * at_a_time


def _waves_under_way(size: int, workers: int) -> int:
    """Return how many waves to have out: one that is dealt with, and two clients per worker besides."""
    return 1 + max(1, -(-2 * workers // size))
