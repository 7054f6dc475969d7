"""``fedplat world SCENARIO``: where clients and edge servers are, and who reaches whom in a round."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError, unknown_name
from .common import Overrides, Scenario, Seed, class_counts, client_count, console, load_config

if TYPE_CHECKING:
    from rich.table import Table

    from ..config import ExperimentConfig
    from ..emulation.wireless import Ints
    from ..emulation.world import World

_NOTHING = "–"


def world(
    scenario: Scenario,
    overrides: Overrides = None,
    seed: Seed = None,
    round_: Annotated[int, typer.Option("--round", min=1, metavar="G", help="The round to draw.")] = 1,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="NAME",
            help="The strategy whose edges are shown.",
            show_default="the first that has edges",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE.png",
            help="The picture.",
            show_default="runs/world-<scenario>-<config hash>-<round>.png",
        ),
    ] = None,
) -> None:
    """Draw a map of a scenario's clients and edge servers in a round, and print what each edge reaches.

    SCENARIO is a name that "fedplat list scenarios" shows, or a TOML file;
    SCENARIO:VARIANT is one of its variants.

    With [topology] name = "edges" each client is shown at the edge that the association sends it to, as if
    all delivered in the rounds before; else each that is there at the edge with its best mean channel.
    """
    if out is not None and out.suffix.lower() != ".png":
        raise UserError(f"--out {out}: expected a name that ends in .png")
    config = load_config(scenario, overrides, seed)
    if round_ > config.rounds:
        raise UserError(f"--round {round_}: {config.name} has {config.rounds} rounds")
    from ..emulation.situation import devices_of
    from ..emulation.world_figure import draw_world

    devices = devices_of(config, client_count(config), lambda: class_counts(config))
    if devices is None or (found := devices.world) is None:
        raise UserError(
            f"{config.name} is in no world: add a table [world] with a name that "
            f'"fedplat list worlds" shows, or try --set world.name=wireless'
        )
    assert config.world is not None
    name, edge_of = _decided(config, found, round_, strategy)
    title = f"{config.name}: world {config.world.name}, {name}, seed {config.seed}, round {round_}"
    reach = found.covered.sum(axis=1)
    screen = console()
    screen.print(
        f"{title}; {found.clients:,} clients and {found.edges:,} edges, {reach.mean():.3g} in a client's "
        f"reach on average, {reach.min()} at the least",
        soft_wrap=True,
    )
    before = f"{found.before.mean():.0%} before it and " if found.history else ""
    screen.print(
        f"there: {before}{found.available.mean():.0%} in the run, "
        f"{int(found.available[:, round_ - 1].sum()):,} clients in round {round_}",
        soft_wrap=True,
    )
    screen.print(edge_table(found, round_, edge_of))
    path = out or Path("runs") / f"world-{config.name}-{config.digest()}-{round_}.png"
    try:
        draw_world(found, round_, edge_of, path, title)
    except OSError as error:
        raise UserError(f"{path}: cannot write the picture: {error}") from error
    screen.print(f"picture: {path}", soft_wrap=True)


def _decided(config: ExperimentConfig, world: World, round_: int, strategy: str | None) -> tuple[str, Ints]:
    """Return who decides about a strategy's edges, and each client's edge (N,), below 0 for none."""
    from ..strategy_setup import edges_of

    if strategy is not None and strategy not in config.strategies:
        raise unknown_name("strategy", strategy, config.strategies)
    names = config.strategies if strategy is None else (strategy,)
    name = next((name for name in names if edges_of(config, name) == world.edges), None)
    if name is None:
        return "nearest edges", world.best_edge
    from ..engines import LocalEngine
    from ..experiment import build_situation
    from ..hierarchy_setup import build_hierarchy

    hierarchy = build_hierarchy(config, name, build_situation(config, "cpu"), LocalEngine())
    assert hierarchy is not None
    deciding = hierarchy.deciding
    edge_of = world.best_edge
    # In order: a policy may learn from the rounds before.
    for number in range(1, round_ + 1):
        edge_of = deciding.decide(number).edge_of
        deciding.observe(edge_of >= 0)
    association = config.topology_of(name).settings()["association"].name.rpartition(":")[2]
    alone = len(config.strategies) == 1 or name == association
    return (association if alone else f"{name}, {association}"), edge_of


def edge_table(world: World, round_: int, edge_of: Ints) -> Table:
    """Return a line per edge: clients in its reach, and how many are there; then those at it in the round.

    Rates are means over clients in Mbit/s: of the mean channel for those in reach, of the round's channel for
    those at the edge.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    heads = ("edge", "x, y [m]", "in reach", "there", "Mbit/s", "in round", "Mbit/s then", "to the cloud")
    for head in heads:
        table.add_column(head, justify="right")
    there = world.available[:, round_ - 1]
    mean, now = world.up_bps() / 1e6, world.up_bps(round_) / 1e6
    for edge in range(world.edges):
        reached = world.covered[:, edge]
        taking_part = there & (edge_of == edge)
        x, y = world.edge_m[edge]
        table.add_row(
            str(edge),
            f"{x:.0f}, {y:.0f}",
            f"{int(reached.sum()):,}",
            f"{world.available[reached].mean():.0%}" if reached.any() else _NOTHING,
            f"{mean[reached, edge].mean():.3g}" if reached.any() else _NOTHING,
            f"{int(taking_part.sum()):,}",
            f"{now[taking_part, edge].mean():.3g}" if taking_part.any() else _NOTHING,
            _link(float(world.cloud_seconds[edge]), float(world.cloud_bps[edge])),
        )
    return table


def _link(seconds: float, bps: float) -> str:
    """Return what a link takes: fixed seconds, a speed, or both."""
    from ..emulation.world import FREE_BPS

    if bps >= FREE_BPS:
        return f"{seconds:.3g} s"
    speed = f"{bps / 1e6:.3g} Mbit/s"
    return f"{seconds:.3g} s, {speed}" if seconds else speed
