"""Flower's own simulation, which runs clients in Ray actors, as a grid to use from outside."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import thread as pool_threads
from contextlib import contextmanager
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from ..errors import UserError
from .flower import FlowerGrid

log = logging.getLogger("fedplat")

_POLL_SECONDS = 0.02
_START_SECONDS = 300.0
_STOP_SECONDS = 15.0


@contextmanager
def simulation(
    client_app: ClientApp,
    num_nodes: int,
    *,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    address: str = "",
    start_seconds: float = _START_SECONDS,
) -> Iterator[FlowerGrid]:
    """Run Flower's simulation with ``num_nodes`` virtual SuperNodes for as long as the block lasts.

    Each client gets ``num_cpus`` cores and ``num_gpus`` of a GPU, fractions allowed, which decides how many
    run at once. ``address`` joins a Ray cluster that runs already (``auto`` finds the one of this machine);
    without it, Ray is started here. Any Flower strategy can use the grid.

    Raises UserError if Ray does not start, or gives no place to run a client, within ``start_seconds``.
    """
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # its errors reach us as replies and exceptions
    # Ray's advice would let clients without a share of a GPU use all of it.
    warnings.filterwarnings("ignore", message="Tip: In future versions of Ray", category=FutureWarning)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handed_over: list[Grid] = []
    ready, done, failure = threading.Event(), threading.Event(), [None]
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        handed_over.append(grid)
        ready.set()
        done.wait()

    def run() -> None:
        try:
            run_simulation(
                server, client_app, num_nodes, backend_config=_backend_config(num_cpus, num_gpus, address)
            )
        except BaseException as error:
            failure[0] = error  # type: ignore[call-overload]
        finally:
            done.set()
            ready.set()

    thread = threading.Thread(target=run, name="flower-simulation", daemon=True)
    thread.start()
    try:
        if not ready.wait(start_seconds) or failure[0] is not None:
            raise _start_error(failure[0], start_seconds)
        grid = SimulationGrid(handed_over[0], failure)
        deadline = time.monotonic() + start_seconds
        while len(grid.get_node_ids()) < num_nodes:  # the grid is there before its nodes are
            if failure[0] is not None or time.monotonic() >= deadline:
                raise _start_error(failure[0], start_seconds)
            time.sleep(_POLL_SECONDS)
        yield grid
    finally:
        done.set()
        # Clients at work are waited for at first: Ray may hang if it ends while somebody waits for a result.
        thread.join(_STOP_SECONDS)
        if thread.is_alive():
            threading.Thread(target=_shut_down_ray, daemon=True).start()
            thread.join(_STOP_SECONDS)
        if thread.is_alive():
            _let_go_of_pool_threads()


class SimulationGrid(FlowerGrid):
    """The grid of a simulation in another thread; raises UserError where that thread has come to its end."""

    def __init__(self, grid: Grid, failure: list[Any]) -> None:
        super().__init__(grid, poll_seconds=_POLL_SECONDS, saves_states=True)
        self._failure = failure

    def pull_messages(self, message_ids: Any) -> list[Any]:
        """Return the replies that are there by now."""
        if self._failure[0] is not None:
            raise _start_error(self._failure[0], 0.0)
        return list(super().pull_messages(message_ids))


def _backend_config(num_cpus: float, num_gpus: float, address: str) -> dict[str, dict[str, Any]]:
    init: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address:
        init["address"] = address
    return {"init_args": init, "client_resources": {"num_cpus": num_cpus, "num_gpus": num_gpus}}


def _start_error(cause: BaseException | None, waited: float) -> UserError:
    if cause is None:
        return UserError(
            f"Flower's simulation gave no sign within {waited:g} s: is the Ray cluster reachable, and is "
            f"there memory to start Ray?"
        )
    root = cause
    while root.__cause__ is not None:
        root = root.__cause__
    return UserError(
        f"Flower's simulation has stopped: {root}. Every client needs the cores and the share of a GPU that "
        f"[flower] num_cpus and num_gpus say, on one machine; 'ray status' shows what a cluster has"
    )


def _let_go_of_pool_threads() -> None:
    """Keep Python from waiting at its end for Flower's threads, which wait for a Ray that is no more."""
    getattr(pool_threads, "_threads_queues", {}).clear()


def _shut_down_ray() -> None:
    import ray

    ray.shutdown()
