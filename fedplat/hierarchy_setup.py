"""Edge servers in an experiment: their strategies, who decides about their clients, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from .arrays import Layout, payload_bytes
from .clients.attacks import Attack, Collusion, ReplyAttack
from .clients.collusion_grid import CollusionGrid
from .config import ExperimentConfig
from .emulation.availability import Table
from .emulation.edge_rounds import CloudLinks
from .emulation.schedule import Budget
from .emulation.situation import Devices
from .emulation.workload import TaskWork
from .emulation.world import ClientWork, World
from .engines import Clients, Engine
from .errors import UserError
from .protection import protected
from .rng import seed_sequence
from .strategies.association.base import Costs, EdgeWorld, Floats, RoundState
from .strategies.association.quality import noisy_histograms
from .strategies.association.reference import reference_prices
from .strategies.composed import FederatedStrategy
from .strategies.differential_privacy import share_accounts
from .strategies.hierarchy import FIRST_EDGE_ID, Deciding, Edge, EdgeGrid, Edges
from .strategies.submodels import FullModel
from .strategies.wrapper import innermost
from .strategy_setup import edges_of, strategy_of
from .submodel_setup import schedule_for, scheme_for

if TYPE_CHECKING:
    from .experiment import Situation


@dataclass(frozen=True)
class Hierarchy:
    """The edge servers of one strategy of a run: not yet at work, see :meth:`around`.

    ``links`` are those of edges to the cloud, and ``budget_at`` is what a client has at an edge in a round;
    both are for emulated devices. ``attacks`` tells, by number, which edges attack.
    """

    edges: list[Edge]
    deciding: Deciding
    links: CloudLinks
    budget_at: Callable[[int, int, int], Budget] | None = None
    attacks: Mapping[int, Attack] = field(default_factory=dict)

    def around(self, grid: Grid, clients: Clients) -> tuple[EdgeGrid | None, Grid]:
        """Return the grid of edges, and the one around it that the cloud meets, where edges collude."""
        for edge in self.edges:
            if isinstance(inner := innermost(edge.strategy), FederatedStrategy):
                inner.identities |= clients.identities
        mods = {number: attack for number, attack in self.attacks.items() if isinstance(attack, ReplyAttack)}
        edges = EdgeGrid(grid, self.edges, self.deciding, clients=clients.numbers, mods=mods)
        nodes = {FIRST_EDGE_ID + number: number for number in range(len(self.edges))}
        # Numbered after the clients, with whom no edge is to be confused.
        numbers = {node: len(clients.numbers) + number for node, number in nodes.items()}
        attacks = {node: self.attacks[number] for node, number in nodes.items() if number in self.attacks}
        return edges, CollusionGrid(edges, attacks, numbers)

    @property
    def model_of(self) -> Strategy:
        """A strategy that tells which parts of the model clients get."""
        return self.edges[0].strategy


def build_hierarchy(
    config: ExperimentConfig, name: str, situation: Situation, engine: Engine
) -> Hierarchy | None:
    """Build the edge servers of one of the strategies; None for one that has none.

    Raises InfeasibleError if their rule cannot even work on all clients that an edge may have, and UserError
    for what does not go together.
    """
    count = edges_of(config, name)
    if count is None:
        return None
    settings: Edges = config.topology_of(name).build()
    attacks = edge_attacks(config, count, situation)
    edges = [_edge(config, name, situation, engine, settings, number, count) for number in range(count)]
    share_accounts([edge.strategy for edge in edges])
    inner = innermost(edges[0].strategy)
    if isinstance(inner, FederatedStrategy):
        at_most = min(settings.most or situation.num_clients, situation.num_clients)
        inner.aggregator.check(config.aggregation.secure_groups or inner.selector.count(at_most))
    world, state_of = _world_and_states(config, settings, situation, count)
    true_counts = world.counts
    if settings.histogram_epsilon is not None:
        told = noisy_histograms(world.counts, settings.histogram_epsilon, config.seed)
        world = replace(world, counts=told)
    limits = settings.limits(situation.num_clients, count, world.counts)
    prices = settings.prices(1.0, 1.0)
    if situation.devices is not None:
        states = [state_of(number) for number in range(1, config.rounds + 1)]
        prices = reference_prices(world, states, limits, config.seed, prices)
    deciding = Deciding(
        settings.policy(), world, limits, prices, state_of, config.seed, true_counts=true_counts
    )
    budget_at = _budgets(situation.devices, settings, count) if situation.devices else None
    return Hierarchy(edges, deciding, CloudLinks(world.cloud_seconds, world.cloud_joules), budget_at, attacks)


def edge_attacks(config: ExperimentConfig, edges: int, situation: Situation) -> dict[int, Attack]:
    """Return how each attacking edge behaves, by number.

    Raises UserError for edges that are not there, and for attacks on samples, of which an edge has none.
    """
    found: dict[int, Attack] = {}
    for index, attack in situation.edge_attacks:
        for edge in config.attacks[index].edges or ():
            if not isinstance(attack, ReplyAttack | Collusion):
                raise UserError(
                    f"attacks.{index}: '{config.attacks[index].name}' is about samples and training, and an "
                    f"edge has none; take one that is about what is sent, such as 'sign-flip'"
                )
            if edge >= edges and edges > 1:
                raise UserError(f"attacks.{index}: edge {edge} of 0 to {edges - 1}")
            if edge < edges:
                found.setdefault(edge, attack)
    return found


def _edge(
    config: ExperimentConfig,
    name: str,
    situation: Situation,
    engine: Engine,
    settings: Edges,
    number: int,
    edges: int,
) -> Edge:
    scheme = scheme_for(config, name, situation)
    devices = situation.devices
    schedule = None
    if devices is not None:
        # Only sub-models have to fit the link; whether a device is there is the same at every edge.
        fits = not isinstance(scheme, FullModel) and not _is_cloud(devices, edges)
        schedule = devices.at_edge(number) if fits else devices.schedule
        if _is_cloud(devices, edges):
            schedule = devices.straight_to_cloud(settings.cloud_slower)
    strategy = strategy_of(
        settings.edge,
        config,
        name,
        situation,
        # One edge draws as the one server of a flat run does.
        seed=config.seed if edges == 1 else _seed_of(config.seed, number),
        selector=config.selection.build(),
        scheme=scheme,
        devices=schedule_for(config, scheme, schedule),
        min_nodes=1,
        node_wait=float(engine.waits.get("node_wait", 300.0)),
    )
    strategy = protected(strategy, config, situation.num_clients, simulation=engine.simulated)
    least = 2 * config.aggregation.secure_groups or 1
    return Edge(strategy, edge_rounds=settings.edge_rounds, number=number, least_clients=least)


def _seed_of(seed: int, edge: int) -> int:
    return int(seed_sequence(seed, "edge", edge).generate_state(1)[0])


# What deciders know ------------------------------------------------------------------------------------


def _world_and_states(
    config: ExperimentConfig, settings: Edges, situation: Situation, edges: int
) -> tuple[EdgeWorld, Callable[[int], RoundState]]:
    """Return what is known before the run, and what is so in a round."""
    from .experiment import counts_of

    task, devices = situation.task, situation.devices
    clients, k2 = situation.num_clients, settings.edge_rounds
    counts = counts_of(task.dataset, task.parts)
    table = np.zeros((clients, 0)) if counts is None else counts.astype(np.float64)
    samples = np.array([len(part) for part in task.parts], np.int64)
    everybody = config.emulation.ask == "all"
    if devices is not None and devices.world is not None:
        world = devices.world
        work = _work_in(world, config, situation)
        known = world.edge_world(work, table, samples, k2, payload_bytes(situation.initial))
        if _is_cloud(devices, edges):
            known = replace(
                known,
                covered=np.ones((clients, 1), np.bool_),
                mean=_straight(world, work, None, settings.cloud_slower),
                cloud_seconds=np.zeros(1),
                cloud_joules=np.zeros(1),
            )

        def in_world(number: int) -> RoundState:
            state = world.state(number, work)
            if _is_cloud(devices, edges):
                state = replace(state, costs=_straight(world, work, number, settings.cloud_slower))
            return replace(state, present=np.ones_like(state.present)) if everybody else state

        return known, in_world
    history: Table = np.zeros((clients, 0), np.bool_)
    if settings.history:
        process = config.availability.build(
            clients, config.rounds, config.seed, lambda: counts, settings.history
        )
        history = process[:, : settings.history]
    costs = _costs_without_world(config, situation, edges)
    known = EdgeWorld(
        np.ones((clients, edges), np.bool_),
        table,
        samples,
        history,
        costs(None),
        np.full(edges, settings.cloud_seconds),
        np.full(edges, settings.cloud_joules),
        k2,
    )

    def in_schedule(number: int) -> RoundState:
        there = np.ones(clients, np.bool_)
        if devices is not None and not everybody:
            there = devices.schedule.available[:, number - 1]
        return RoundState(number, there, costs(number))

    return known, in_schedule


def _is_cloud(devices: Devices, edges: int) -> bool:
    """Whether the one edge of a run stands for the cloud of a world of several."""
    return edges == 1 and devices.world is not None and devices.world.edges > 1


def _straight(world: World, work: ClientWork, number: int | None, slower: float) -> Costs:
    """Return the costs (N, 1) of reporting straight to the cloud, as the devices' links then are."""
    nodes, best = np.arange(world.clients), world.best_edge
    up = 8 * work.bytes_up / np.maximum(world.up_bps(number)[nodes, best] // slower, 1)
    down = 8 * work.bytes_down / np.maximum(world.down_bps(number)[nodes, best] // slower, 1)
    radio = world.hardware.transfer_joules(slice(None), down, up)
    return Costs((down + work.seconds + up)[:, None], (work.joules + radio)[:, None])


def _work_in(world: World, config: ExperimentConfig, situation: Situation) -> ClientWork:
    work = TaskWork(situation.task)
    works = [work.of(client) for client in range(situation.num_clients)]
    up, down = _sizes(config, situation)
    return world.work(np.array([w.flops for w in works]), np.array([w.sample_bits for w in works]), up, down)


def _sizes(config: ExperimentConfig, situation: Situation) -> tuple[int, int]:
    """Return the bytes of a whole model up, at least, and down."""
    least: int = config.compression.build().least_bytes(Layout.of_record(situation.initial))
    return least, payload_bytes(situation.initial)


def _costs_without_world(
    config: ExperimentConfig, situation: Situation, edges: int
) -> Callable[[int | None], Costs]:
    """Return what gives the costs (N, M) of a round, the same at each edge; of none: with mean speeds."""
    devices, clients = situation.devices, situation.num_clients
    if devices is None:
        nothing = np.zeros((clients, edges))
        return lambda number: Costs(nothing, nothing)
    work = TaskWork(situation.task)
    works = [work.of(client) for client in range(clients)]
    everyone: Any = slice(None)
    hardware, schedule = devices.hardware, devices.schedule
    cycles = hardware.cycles(
        everyone, np.array([w.flops for w in works]), np.array([w.sample_bits for w in works])
    )
    compute, joules = hardware.compute_seconds(everyone, cycles), hardware.compute_joules(everyone, cycles)
    up, down = _sizes(config, situation)

    def column(values: Floats) -> Floats:
        return np.repeat(values[:, None], edges, axis=1)

    def costs(number: int | None) -> Costs:
        def speed(table: np.ndarray) -> Floats:
            chosen = table.mean(axis=1) if number is None else table[:, number - 1]
            return np.maximum(chosen, 1)

        seconds_up, seconds_down = 8 * up / speed(schedule.up_bps), 8 * down / speed(schedule.down_bps)
        radio = hardware.transfer_joules(everyone, seconds_down, seconds_up)
        return Costs(column(seconds_down + compute + seconds_up), column(joules + radio))

    return costs


def _budgets(devices: Devices, settings: Edges, edges: int) -> Callable[[int, int, int], Budget]:
    """Return what gives the budget of a client, at an edge, in a round."""
    if not _is_cloud(devices, edges):
        return devices.budget_at
    schedule = devices.straight_to_cloud(settings.cloud_slower)
    return lambda client, edge, server_round: schedule[client, server_round]
