"""Which world a scenario is in: the names of the table ``[world]`` and their settings.

Each is a function ``(clients, rounds, seed, presence, hardware)`` that returns a :class:`World`; its
keyword-only parameters are its settings. ``presence(history)`` returns who is there, (clients, history +
rounds): how far a world looks back is among its own settings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from ..errors import UserError
from ..rng import generator
from .availability import ClassCounts, Table
from .hardware import HIERFAVG_CHANNEL, NOISE_W_PER_HZ, Hardware, shannon_rate
from .ranges import Amount, Amounts, Positive, check_range
from .wireless import Floats, Layout, client_positions, coverage, distances, edge_positions, mean_gains
from .world import FREE_BPS, Radio, World

if TYPE_CHECKING:
    from ..config import ExperimentConfig

Presence = Callable[[int], Table]
Edges = Annotated[int, Field(ge=1, description="edge servers")]
History = Annotated[int, Field(ge=0, description="rounds before the run in which clients were watched")]
Side = Annotated[Positive, Field(description="side of the square that clients are in")]
Fading = Annotated[bool, Field(description="channels get better and worse from round to round")]
Download = Annotated[bool, Field(description="downloads take time and energy too")]

EDGE_TRANSMIT_W = 1.0


def wireless(
    clients: int, rounds: int, seed: int, presence: Presence, hardware: Hardware, *,
    edges: Edges = 5,
    side_m: Side = 1000.0,
    layout: Annotated[Layout, Field(description="edges in rows over the square, or drawn")] = "regular",
    range_m: Annotated[Positive, Field(description="how far an edge reaches")] = 450.0,
    bandwidth_mhz: Annotated[Positive, Field(description="of each client's sub-channel")] = 1.0,
    noise_dbm_per_hz: Annotated[float, Field(allow_inf_nan=False, description="thermal noise")] = -174.0,
    fading: Fading = True,
    shadowing_db: Annotated[Amount, Field(description="deviation, drawn once per pair; 0: none")] = 0.0,
    history: History = 100,
    cloud_seconds: Annotated[Amounts, Field(description="edge to cloud and back, from, to")] = (0.5, 1.0),
    cloud_joules: Annotated[Amounts, Field(description="likewise, from and to")] = (0.2, 0.5),
    cloud_mbps: Annotated[Positive | None, Field(description="adds the model's bits over it")] = None,
    count_download: Download = False,
    edge_transmit_w: Annotated[Positive, Field(description="power of an edge, for downloads")] = (
        EDGE_TRANSMIT_W
    ),
) -> World:  # fmt: skip
    """Clients uniform over a square that edges with overlapping ranges cover; radio by path loss and fading.

    All numbers are inferred: usual ones of the literature on wireless hierarchical learning. A client out of
    everybody's range reaches its nearest edge.
    """
    return _world(
        clients, rounds, seed, presence, hardware, edges, side_m, layout, range_m, history,
        gain=lambda metres: mean_gains(metres, shadowing_db, seed),
        cloud=(cloud_seconds, cloud_joules),
        cloud_bps=FREE_BPS if cloud_mbps is None else cloud_mbps * 1e6,
        radio=Radio(
            bandwidth_mhz * 1e6,
            NOISE_W_PER_HZ if noise_dbm_per_hz == -174 else 10 ** (noise_dbm_per_hz / 10) / 1000,
            fading,
            edge_transmit_w if count_download else None,
        ),
    )  # fmt: skip


def hierfavg(
    clients: int, rounds: int, seed: int, presence: Presence, hardware: Hardware, *,
    edges: Edges = 5,
    side_m: Side = 1000.0,
    history: History = 100,
    cloud_slower: Annotated[Positive, Field(description="link to the cloud: so many times slower")] = 10.0,
    count_download: Download = False,
) -> World:  # fmt: skip
    """Every client reaches every edge over equal channels that never change; edges are in rows.

    With hardware ``hierfavg`` these are the costs of Liu et al., ICC 2020: 5.67 Mbit/s up, a tenth of that
    from an edge to the cloud; energy is that of the clients. Constants as recalled; their arithmetic agrees
    with the paper's table. Where clients stand is for pictures only.
    """
    channel = HIERFAVG_CHANNEL
    radio = Radio(channel["bandwidth_hz"], channel["noise_w_per_hz"], False)
    rate = float(
        shannon_rate(radio.bandwidth_hz, channel["transmit_w"], channel["gain"], radio.noise_w_per_hz)
    )
    return _world(
        clients, rounds, seed, presence, hardware, edges, side_m, "regular", 2 * side_m, history,
        gain=lambda metres: np.full(metres.shape, channel["gain"]),
        cloud=((0.0, 0.0), (0.0, 0.0)),
        cloud_bps=rate / cloud_slower,
        radio=Radio(
            radio.bandwidth_hz, radio.noise_w_per_hz, False, channel["transmit_w"] if count_download else None
        ),
    )  # fmt: skip


def _world(
    clients: int, rounds: int, seed: int, presence: Presence, hardware: Hardware, edges: int, side_m: float,
    layout: Layout, range_m: float, history: int, *, gain: Callable[[Floats], Floats],
    cloud: tuple[tuple[float, float], tuple[float, float]], cloud_bps: float, radio: Radio,
) -> World:  # fmt: skip
    if clients < 1 or rounds < 1 or seed < 0 or history < 0:
        raise UserError(
            f"a world of {clients} clients and {rounds} rounds, seed {seed}, {history} rounds of history: "
            "expected 1 or more clients and rounds, a seed and a history of 0 or more"
        )
    for name, span in zip(("cloud_seconds", "cloud_joules"), cloud, strict=True):
        check_range(name, span)
    client_m, edge_m = client_positions(clients, side_m, seed), edge_positions(edges, side_m, layout, seed)
    metres = distances(client_m, edge_m)
    there = presence(history)
    if there.shape != (clients, history + rounds):
        raise UserError(
            f"a table of who is there of {there.shape}, expected {(clients, history + rounds)}: clients, and "
            "rounds of the history and of the run"
        )
    low, high = np.array(cloud, np.float64).T
    draws = np.stack([generator(seed, "world cloud", edge).random(2) for edge in range(edges)])
    seconds, joules = (low + draws * (high - low)).T
    return World(
        client_m, edge_m, range_m, coverage(metres, range_m), gain(metres), there, history, seconds, joules,
        np.full(edges, cloud_bps), radio, hardware, seed,
    )  # fmt: skip


def world_of(config: ExperimentConfig, clients: int, class_counts: ClassCounts = None) -> World | None:
    """Draw the world of a scenario; None for one that is in none.

    Who is there is by ``[availability]``, what clients compute and send with is by ``[hardware]``.
    ``class_counts`` (clients, classes), or what returns them, are for an availability that depends on them.
    """
    if config.world is None:
        return None

    def presence(history: int) -> Table:
        table: Table = config.availability.build(clients, config.rounds, config.seed, class_counts, history)
        return table

    hardware = config.hardware.build(clients, config.seed)
    world: World = config.world.build(clients, config.rounds, config.seed, presence, hardware)
    return world
