"""How many threads arithmetic takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch, if it is in use at all, to one thread inside the block.

    Clients compute the same bits here as in a worker, and sums the same on any number of cores. Where other
    processes have the other cores, threads that wait for one another are many times slower than one.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
