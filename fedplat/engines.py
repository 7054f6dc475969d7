"""Engines: what runs the clients of an experiment. Each of them gives a Flower grid to run strategies on."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from .clients.app import STRATEGY_KEY, make_client_app
from .clients.stacked.execution import Execution
from .errors import UserError
from .protection import client_mods
from .runtime.flower import FlowerGrid
from .runtime.local import FIRST_NODE_ID, LocalGrid
from .scenario_app import ScenarioApp, told_to_clients
from .strategies.nodes import NodeDirectory

if TYPE_CHECKING:
    from .experiment import Situation

_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Clients:
    """The clients that a strategy meets.

    ``numbers`` gives each node's client, which is its partition; ``identities`` what rules remember nodes by
    where node ids are drawn anew for every run; ``told`` what every message to a client has to say.
    """

    grid: LocalGrid | FlowerGrid
    numbers: dict[int, int]
    identities: dict[int, int] = field(default_factory=dict)
    told: ConfigRecord = field(default_factory=ConfigRecord)

    def states(self) -> dict[int, bytes]:
        """Return what clients remember, under the names that hold for every run."""
        return {self.identities.get(node, node): s for node, s in self.grid.node_states().items()}

    def load_states(self, states: Mapping[int, bytes]) -> None:
        """Put back what :meth:`states` returned."""
        nodes = {self.identities.get(node, node): node for node in self.numbers}
        self.grid.load_node_states({nodes[name]: s for name, s in states.items() if name in nodes})


class Engine(AbstractContextManager["Engine"], ABC):
    """Runs the clients of an experiment, one strategy after another."""

    name = ""
    groups = False
    """Whether a worker may train several clients at once."""
    simulated = True
    """Whether the clients are not real, and their keys and noise need not be secret."""

    @abstractmethod
    def clients(self, situation: Situation, strategy: str) -> AbstractContextManager[Clients]:
        """Return the clients for one of the strategies, ready to get messages inside the block."""

    def summary(self, execution: Execution) -> str:
        """Return in a line how clients are run."""
        return self.name

    @property
    def waits(self) -> dict[str, Any]:
        """How many nodes strategies wait for, if not for all, and for how long; keywords of a strategy."""
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class LocalEngine(Engine):
    """Worker processes on this machine; on a GPU, this process."""

    name = "local"
    groups = True

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers

    @contextmanager
    def clients(self, situation: Situation, strategy: str) -> Iterator[Clients]:
        """Start workers that are forked from this process and so have the data."""
        workers = 0 if situation.task.device != "cpu" else self._workers
        # A process's first optimiser imports torch's compiler, for seconds: once here, not in each worker.
        importlib.import_module("torch._dynamo")
        app = make_client_app(
            situation.task, situation.execution, *client_mods(situation.config, simulation=True)
        )
        with LocalGrid(app, situation.num_clients, workers=workers) as grid:
            numbers = {node: client for client, node in enumerate(grid.get_node_ids())}
            yield Clients(grid, numbers, told=ConfigRecord({STRATEGY_KEY: strategy}))

    def summary(self, execution: Execution) -> str:
        """Return how many clients a worker trains at once."""
        return execution.summary()


class SimulationEngine(Engine):
    """Flower's simulation: Ray actors on this machine or on a Ray cluster that runs already."""

    name = "flower-simulation"

    def __init__(self, device: str) -> None:
        self._device = device
        self._open = ExitStack()
        self._grid: FlowerGrid | None = None

    @contextmanager
    def clients(self, situation: Situation, strategy: str) -> Iterator[Clients]:
        """Start the simulation with the first strategy; the others use it too."""
        if self._grid is None:
            from .runtime.simulation import simulation

            resources = situation.config.flower
            app = ScenarioApp(simulation=True)
            self._grid = self._open.enter_context(
                simulation(app, situation.num_clients, **resources.model_dump())
            )
        yield ready_clients(self._grid, situation, strategy, self._device, same_machine=True)

    def __exit__(self, *exception: Any) -> None:
        self._open.__exit__(*exception)


class FederationEngine(Engine):
    """The nodes of a federation, on whose grid ``flwr run`` started this process: real, or ``simulated``.

    A run begins when every partition has a node, for which it waits ``node_wait`` seconds; its rounds go on
    with at least ``min_nodes``.
    """

    name = "flower"

    def __init__(self, grid: Grid, *, device: str, min_nodes: int, node_wait: float, simulated: bool) -> None:
        self._grid = FlowerGrid(grid, poll_seconds=0.02 if simulated else 0.5)
        self._device = device
        self._waits = {"min_nodes": min_nodes, "node_wait": node_wait}
        self.simulated = simulated

    @contextmanager
    def clients(self, situation: Situation, strategy: str) -> Iterator[Clients]:
        """Wait until every partition has a node; raises UserError that says which have none."""
        wait = float(self._waits["node_wait"])
        yield ready_clients(
            self._grid, situation, strategy, self._device, same_machine=self.simulated, wait=wait
        )

    @property
    def waits(self) -> dict[str, Any]:
        """What was asked for."""
        return dict(self._waits)


def of(name: str, *, workers: int | None = None, device: str = "auto") -> Engine:
    """Return an engine that runs clients for this process, by name; the third kind starts the run itself."""
    return LocalEngine(workers) if name == LocalEngine.name else SimulationEngine(device)


def ready_clients(
    grid: FlowerGrid,
    situation: Situation,
    strategy: str,
    device: str,
    *,
    same_machine: bool,
    wait: float = 300.0,
) -> Clients:
    """Return the clients behind one of Flower's grids, once each partition has a node.

    Raises UserError that names the partitions without one after ``wait`` seconds.
    """
    wanted, deadline = set(range(situation.num_clients)), time.monotonic() + wait
    nodes = NodeDirectory(1, wait)
    while missing := wanted - (numbers := nodes.numbers(grid)).keys():
        if time.monotonic() >= deadline:
            raise UserError(
                f"{len(list(grid.get_node_ids()))} nodes are connected after {wait:g} s, and of the "
                f"{situation.num_clients} partitions nobody holds {', '.join(map(str, sorted(missing)))} "
                f"alone. Each needs a SuperNode of its own, whose node config says 'partition-id=I'; a "
                f"simulation has as many as --federation-config 'num-supernodes={situation.num_clients}' says"
            )
        time.sleep(_POLL_SECONDS)
    execution = situation.execution
    assert execution is not None
    told = told_to_clients(situation.config, strategy, execution, device, same_machine=same_machine)
    numbers = {node: client for client, node in numbers.items() if client in wanted}
    # A simulation draws new node ids each time; in a deployment they are bound to the nodes' keys.
    identities = {node: FIRST_NODE_ID + c for node, c in numbers.items()} if same_machine else {}
    return Clients(grid, numbers, identities, told)
