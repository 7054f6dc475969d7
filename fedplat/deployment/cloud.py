"""The cloud of a federation whose edges are processes of their own: a server whose clients are edges."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from .. import experiment
from ..clients.attacks import Collusion
from ..config import AggregationConfig, ExperimentConfig, PrivacyConfig, SecurityConfig
from ..config_parts import CompressionConfig
from ..engines import Clients, FederationEngine
from ..errors import UserError
from ..hierarchy_setup import Hierarchy, build_hierarchy
from ..results.folder import RunFolder
from ..scenario_app import told_to_clients
from ..strategies.composed import FederatedStrategy
from ..strategies.nodes import NodeDirectory
from ..strategy_setup import edges_of, strategy_of
from .edge_client import EDGE_SCENARIO, EDGE_TIMEOUT

if TYPE_CHECKING:
    from flwr.serverapp.strategy import Strategy

    from ..experiment import Observer, Situation
    from ..strategies.hierarchy import EdgeGrid

_POLL_SECONDS = 1.0


class CloudEngine(FederationEngine):
    """The edges of a federation: nodes that answer with what their clients trained.

    ``config`` is the scenario as the edges have to know it. A run begins when every edge has joined, for
    which it waits ``node_wait`` seconds; its rounds go on with at least ``min_nodes``.
    """

    name = "flower-edges"

    def __init__(
        self, grid: Grid, config: ExperimentConfig, *, device: str, min_nodes: int, node_wait: float
    ) -> None:
        super().__init__(grid, device=device, min_nodes=min_nodes, node_wait=node_wait, simulated=False)
        self._config = config

    @contextmanager
    def clients(self, situation: Situation, strategy: str) -> Iterator[Clients]:
        """Wait until every edge is there; raises UserError that says which are not."""
        wanted = set(range(edges_of(self._config, strategy) or 0))
        wait = float(self._waits["node_wait"])
        deadline, nodes = time.monotonic() + wait, NodeDirectory(1, wait)
        while missing := wanted - (numbers := nodes.numbers(self._grid)).keys():
            if time.monotonic() >= deadline:
                raise UserError(
                    f"after {wait:g} s these edges have not joined: {', '.join(map(str, sorted(missing)))}. "
                    f"Each is a SuperNode whose node config has partition-id, its number, and edge-bridge: "
                    f"fedplat deploy init --edges makes it so"
                )
            time.sleep(_POLL_SECONDS)
        assert situation.execution is not None
        told = told_to_clients(self._config, strategy, situation.execution, self._device, same_machine=False)
        for_edges = ConfigRecord(
            {
                **told,
                EDGE_SCENARIO: json.dumps(told_to_edges(self._config)),
                EDGE_TIMEOUT: float(self._config.timeout),
            }
        )
        yield Clients(self._grid, {n: edge for edge, n in numbers.items() if edge in wanted}, told=for_edges)


def told_to_edges(config: ExperimentConfig) -> dict[str, Any]:
    """Return the scenario as edges are told it: all but where the cloud's own files lie."""
    scenario = config.to_dict()
    for name in ("description", "flower"):
        scenario.pop(name, None)
    scenario["data"].pop("root", None)
    scenario["security"].pop("signing_keys", None)
    return scenario


def check(config: ExperimentConfig) -> None:
    """Raise UserError for a scenario that no edges of machines of their own can run."""
    for name in config.strategies:
        topology = config.topology_of(name)
        if topology.name != "edges":
            raise UserError(
                f"strategy '{name}' has no edges, and tier=\"cloud\" needs them: set topology.name=edges "
                f"and topology.edges to their number"
            )
        association = topology.settings()["association"]
        if association.name != "fixed":
            raise UserError(
                f"strategy '{name}': association '{association.name}' sends clients to other edges, which "
                f"machines cannot do: a client is at the edge that it is connected to. Take 'fixed'"
            )
    if config.emulates_devices:
        raise UserError(
            "devices, links and worlds are emulated by the clients' server, which the cloud is not: leave "
            "out [devices], [availability] and [world], or use a simulation"
        )


def run(
    config: ExperimentConfig,
    folder: RunFolder,
    grid: Grid,
    *,
    device: str,
    min_nodes: int,
    node_wait: float,
    observer: Observer,
) -> None:
    """Run every strategy that the folder does not hold finished, as the cloud of edges that are its nodes.

    Rows of ``clients.jsonl`` are about edges, by number: the cloud knows of nobody else. Raises UserError for
    what cannot be run so, and if edges are missing at the beginning.
    """
    check(config)
    situation = experiment.build_situation(config, "cpu")
    colluding = [a for a in situation.task.attacks.values() if isinstance(a, Collusion)]
    if colluding:
        raise UserError(
            f"attack '{colluding[0].label}': colluding clients see the replies of others, which here nobody "
            f"does but each edge for itself; use a simulation"
        )
    execution = experiment.execution_for(situation.task, folder, 1)
    situation = replace(situation, execution=execution)
    engine = CloudEngine(grid, config, device=device, min_nodes=min_nodes, node_wait=node_wait)
    plain = _unprotected(config)
    experiment.describe_run(folder, situation, execution, engine)
    with engine:
        for name in config.strategies:
            log = folder.log(name)
            if log.finished:
                observer.begin(name, config.rounds, config.rounds)
            else:
                strategy = _strategy(config, name, situation, min_nodes=min_nodes, node_wait=node_wait)
                hierarchy = build_hierarchy(plain, name, situation, engine)
                assert hierarchy is not None
                far = Afar(**vars(hierarchy))
                # Who attacks is, as far as the cloud can see, an edge.
                task = replace(situation.task, attacks=dict(far.attacks))
                at_cloud = replace(situation, config=plain, task=task)
                experiment.run_strategy(name, strategy, at_cloud, log, engine, observer, far)
            observer.end(name)


@dataclass(frozen=True)
class Afar(Hierarchy):
    """Edge servers that are elsewhere: nothing of them is put around the grid, whose nodes they are."""

    def around(self, grid: Grid, clients: Clients) -> tuple[EdgeGrid | None, Grid]:
        """Return no grid of edges, and the grid as it is."""
        return None, grid


def _strategy(
    config: ExperimentConfig, name: str, situation: Situation, *, min_nodes: int, node_wait: float
) -> Strategy:
    """Return the strategy of the cloud, which goes on when edges are lost."""
    strategy = strategy_of(
        config.strategy_part(name),
        config,
        name,
        situation,
        seed=config.seed,
        min_nodes=min_nodes,
        node_wait=node_wait,
    )
    if isinstance(strategy, FederatedStrategy):
        strategy.aggregator.check(edges_of(config, name) or 1)
    return strategy


def _unprotected(config: ExperimentConfig) -> ExperimentConfig:
    """Return the scenario without what is between clients and their edges."""
    return config.model_copy(
        update={
            "security": SecurityConfig(),
            "privacy": PrivacyConfig(),
            "aggregation": AggregationConfig(),
            "compression": CompressionConfig(),
        }
    )


__all__ = ["Afar", "CloudEngine", "check", "run", "told_to_edges"]
