"""``fedplat devices SCENARIO``: what every client's device has in every round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperGroup

from ..errors import UserError, nearest
from .common import Overrides, Scenario, Seed, class_counts, client_count, console, load_config

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from ..emulation.hardware import Hardware
    from ..emulation.schedule import DeviceSchedule

HIDDEN = "schedule"
_NOTHING = "–"


class ScenarioOrCommand(TyperGroup):
    """A group of commands in which a first word that is no command is a scenario."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command, which for a scenario is the hidden one; raises for a mistyped command."""
        first = args[0]
        command = self.get_command(ctx, HIDDEN)
        if first in self.commands or command is None or first.startswith("-") or self._mistyped(first):
            return super().resolve_command(ctx, args)
        return HIDDEN, command, args

    def _mistyped(self, word: str) -> bool:
        from ..scenarios import scenario_names

        names = scenario_names()
        if word.partition(":")[0] in names or ".toml" in word or "/" in word:
            return False
        commands = [name for name, command in self.commands.items() if not command.hidden]
        return nearest(word, commands) is not None and nearest(word, [*commands, *names]) in commands


def schedule(
    scenario: Scenario,
    overrides: Overrides = None,
    seed: Seed = None,
    png: Annotated[
        Path | None,
        typer.Option(
            "--png",
            metavar="FILE.png",
            help="The picture.",
            show_default="runs/devices-<scenario>-<config hash>.png",
        ),
    ] = None,
    most: Annotated[int, typer.Option("--most", min=1, help="How many clients the table lists.")] = 50,
) -> None:
    """Print what every client's device has over the rounds of a scenario, and draw it.

    SCENARIO is a name that "fedplat list scenarios" shows, or a TOML file;
    SCENARIO:VARIANT is one of its variants.

    Memory in MB, speeds in Mbit/s, medians over the rounds in which it is there.
    """
    if png is not None and png.suffix.lower() != ".png":
        raise UserError(f"--png {png}: expected a name that ends in .png")
    config = load_config(scenario, overrides, seed)
    from ..emulation.schedule_figure import draw_schedule
    from ..emulation.situation import devices_of

    found = devices_of(config, client_count(config), lambda: class_counts(config))
    if found is None:
        raise UserError(
            f"{config.name} has no emulated devices: add a table [devices] with a name that "
            f'"fedplat list devices" shows, or try --set devices.name=classes'
        )
    table = found.schedule
    title = f"{config.name}: devices {config.devices.name}, availability {config.availability.name}"
    screen = console()
    there = table.available.sum(axis=0)
    screen.print(
        f"{title}, seed {config.seed}; {table.nodes:,} clients, {table.rounds:,} rounds, "
        f"{there.mean():.3g} clients there on average, {there.min()} at the least",
        soft_wrap=True,
    )
    screen.print(schedule_table(table, found.hardware, most))
    if table.nodes > most:
        screen.print(f"and {table.nodes - most:,} more; --most lists more of them")
    path = png or Path("runs") / f"devices-{config.name}-{config.digest()}.png"
    try:
        draw_schedule(table, path, f"{title}, seed {config.seed}")
    except OSError as error:
        raise UserError(f"{path}: cannot write the picture: {error}") from error
    screen.print(f"picture: {path}", soft_wrap=True)


def schedule_table(schedule: DeviceSchedule, hardware: Hardware, most: int) -> Table:
    """Return a line per client: memory, speeds, processor, share of the rounds there, drops."""
    import numpy as np
    from rich import box
    from rich.table import Table

    from ..emulation.schedule import MB, MBIT

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    drops = schedule.drops if schedule.drops is not None else np.zeros_like(schedule.available)
    heads = ["client", "mem min", "mem median", "down", "up", "GHz", "available"]
    for head in [*heads, *(["drops"] if drops.any() else [])]:
        table.add_column(head, justify="right")
    for node in range(min(schedule.nodes, most)):
        there = schedule.available[node]
        memory, down, up = (
            budgets[node][there] for budgets in (schedule.memory_bytes, schedule.down_bps, schedule.up_bps)
        )
        cells = [
            _amount(memory, MB, np.min),
            _amount(memory, MB),
            _amount(down, MBIT),
            _amount(up, MBIT),
            f"{hardware.cpu_hz[node] / 1e9:.3g}",
            f"{there.mean():.0%}",
            *([str(int(drops[node].sum()))] if drops.any() else []),
        ]
        table.add_row(str(node), *cells)
    return table


def _amount(values: np.ndarray, unit: float, middle: Callable[[np.ndarray], Any] | None = None) -> str:
    """Return the median, or what ``middle`` makes of values, in a unit, to three digits."""
    import numpy as np

    from ..emulation.ranges import MOST

    if not len(values):
        return _NOTHING
    amount = float((middle or np.median)(values)) / unit
    return "no limit" if amount >= MOST else f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
