"""How many threads arithmetic takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Keep torch, if it is in use at all, to so many threads inside the block; 0 leaves them as they are."""
    torch = sys.modules.get("torch")
    if torch is None or not count:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def one_thread() -> AbstractContextManager[None]:
    """Keep torch to one thread inside the block.

    Clients compute the same bits here as in a worker, and sums the same on any number of cores. Where other
    processes have the other cores, threads that wait for one another are many times slower than one.
    """
    return torch_threads(1)
