"""``fedplat devices``: a scenario's devices, and logs of what devices have free; shown, made and imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError
from .common import console
from .device_schedule import HIDDEN, ScenarioOrCommand, schedule

if TYPE_CHECKING:
    from rich.table import Table

    from ..emulation.logs import DeviceLogs

app = typer.Typer(
    cls=ScenarioOrCommand,
    help="""What the devices of a scenario have, with "fedplat devices SCENARIO"; and logs of devices' memory,
    links, battery and availability.""",
    subcommand_metavar="SCENARIO | COMMAND [ARGS]...",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SHIPPED_NAME = "synthetic"

# What arguments are is said in the commands' docstrings: Typer 0.20 loses their help under Click 8.5.
Logs = Annotated[str, typer.Argument(metavar="LOGS", show_default=False)]
Format = Annotated[str, typer.Argument(metavar="FORMAT", show_default=False)]
Source = Annotated[Path, typer.Argument(metavar="SOURCE", show_default=False)]


app.command(HIDDEN, hidden=True)(schedule)


@app.callback()
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("show")
def show(
    logs: Logs,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE.png", help="Draw them too.", show_default=False)
    ] = None,
    most: Annotated[int, typer.Option("--most", min=1, help="How many devices the table lists.")] = 50,
) -> None:
    """Print what each device has: LOGS is a CSV file, a folder of them, or "synthetic" for the shipped set.

    Memory in MB, speeds in Mbit/s; medians are over time: a sample counts for as long as it holds.
    """
    if png is not None and png.suffix.lower() != ".png":
        raise UserError(f"--png {png}: expected a name that ends in .png")
    from ..emulation.figures import draw_logs
    from ..emulation.logs import read_logs
    from ..emulation.synthetic import synthetic_logs

    shipped = logs == SHIPPED_NAME and not Path(logs).exists()
    found = synthetic_logs() if shipped else read_logs(logs)
    screen = console()
    screen.print(log_table(found, most))
    if len(found) > most:
        screen.print(f"and {len(found) - most:,} more; --most lists more of them")
    if png is not None:
        devices = "1 device" if len(found) == 1 else f"{len(found):,} devices"
        try:
            draw_logs(found, png, f"{Path(logs).name}{' (shipped)' if shipped else ''}, {devices}")
        except OSError as error:
            raise UserError(f"{png}: cannot write the picture: {error}") from error
        screen.print(f"picture: {png}", soft_wrap=True)


@app.command("generate")
def generate(
    out: Annotated[Path, typer.Option("--out", metavar="FILE.csv", help="Where to.", show_default=False)],
    devices: Annotated[int, typer.Option("--devices", min=1, help="How many.")] = 24,
    hours: Annotated[float, typer.Option("--hours", help="How long; hour 0 is midnight.")] = 48.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The seed of everything random.")] = 1,
    step_s: Annotated[float, typer.Option("--step-s", help="Seconds between samples.")] = 900.0,
) -> None:
    """Make logs of devices that do not exist, from a seed; the shipped set is what the defaults make."""
    from ..emulation.logs import write_logs
    from ..emulation.synthetic import generate as make

    _refuse_to_overwrite(out)
    made = make(devices, hours, seed, step_s)
    write_logs(made, out)
    typer.echo(f"{out}: {len(made):,} synthetic devices, {sum(map(len, made)):,} samples")


@app.command("import")
def import_(
    kind: Format,
    source: Source,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder for devices.csv.", show_default=False)
    ],
    mem_free_mb: Annotated[
        float | None,
        typer.Option("--mem-free-mb", help="Free memory, which no format has.", show_default=False),
    ] = None,
    down_mbps: Annotated[
        float | None, typer.Option("--down-mbps", help="Downlink, for formats without.", show_default=False)
    ] = None,
    up_mbps: Annotated[
        float | None, typer.Option("--up-mbps", help="Uplink, for formats without.", show_default=False)
    ] = None,
    window_s: Annotated[float, typer.Option("--window-s", help="mahimahi: seconds per sample.")] = 1.0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Only the first devices.", show_default="all")
    ] = None,
) -> None:
    """Turn SOURCE, a public trace that you have, into DIR/devices.csv.

    FORMAT is fedscale-capacity, fedscale-behaviour, mahimahi, pairs or flash.

    Mind the trace's licence: what is made from it may not be yours to pass on.
    """
    from ..emulation.given import Given
    from ..emulation.importers import import_logs
    from ..emulation.logs import write_logs

    target = out / "devices.csv"
    _refuse_to_overwrite(target)
    made = import_logs(kind, source, Given(mem_free_mb, down_mbps, up_mbps, window_s, limit))
    write_logs(made, target)
    typer.echo(f"{target}: {len(made):,} devices, {sum(map(len, made)):,} samples")


def log_table(logs: DeviceLogs, most: int) -> Table:
    """Return a line per device: span, samples, memory, median speeds, share of time available."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ..emulation.summary import Summary

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("device", overflow="fold")
    for column in ("hours", "samples", "mem min", "mem median", "down", "up", "available"):
        table.add_column(column, justify="right")
    for log in logs.logs[:most]:
        of = Summary.of(log)
        table.add_row(
            Text(log.device), f"{log.span_s / 3600:.4g}", f"{len(log):,}", f"{of.memory_least:,.0f}",
            f"{of.memory_median:,.0f}", f"{of.down_median:.3g}", f"{of.up_median:.3g}", f"{of.available:.0%}",
        )  # fmt: skip
    return table


def _refuse_to_overwrite(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path} exists already; nothing is overwritten: choose another place or remove it")
