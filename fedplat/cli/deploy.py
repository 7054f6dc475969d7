"""``fedplat deploy``: the folders of a federation's machines, made and checked, and slow links."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError
from .common import USER_ERROR, console
from .run import sigterm_as_interrupt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..deployment.check import Finding
    from ..emulation.logs import DeviceLog

app = typer.Typer(
    help="A federation on real machines: keys, certificates, start scripts, checks.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# What arguments are is said in the commands' docstrings: Typer 0.20 loses their help under Click 8.5.
Folder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False)]
Hosts = Annotated[
    list[str] | None,
    typer.Option(
        "--host",
        metavar="NAME-OR-IP",
        help="What the SuperLink is reached under; the first one is what clients are told. May be repeated.",
        show_default="localhost",
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Option(
        "--host", metavar="NAME-OR-IP", help="A name or an address. May be repeated.", show_default=False
    ),
]
Days = Annotated[int, typer.Option("--days", min=1, help="How long the certificate is valid.")]


@app.callback()
def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("init")
def init(
    folder: Folder,
    host: Hosts = None,
    supernodes: Annotated[int, typer.Option("--supernodes", min=1, help="How many clients.")] = 3,
    port: Annotated[int, typer.Option("--port", help="The SuperLink's port.")] = 8000,
    days: Days = 365,
    first_node_port: Annotated[
        int, typer.Option("--first-node-port", help="The first SuperNode's own local port; others follow.")
    ] = 9094,
    edges: Annotated[
        int,
        typer.Option(
            "--edges", min=0, help="Edge servers between clients and SuperLink.", show_default="none"
        ),
    ] = 0,
    edge_host: Annotated[
        list[str] | None,
        typer.Option(
            "--edge-host",
            metavar="NAME-OR-IP",
            help="What each edge's SuperLink is reached under: once for each edge.",
            show_default="localhost",
        ),
    ] = None,
) -> None:
    """Make DIR with one folder per machine: keys, certificates, settings and start scripts.

    With --edges, clients are dealt out among edges, each with a SuperLink of its own. Nothing is ever
    overwritten.
    """
    from ..deployment.plan import GUIDE, create
    from ..deployment.plan_edges import create_with_edges

    if edge_host and not edges:
        raise UserError("--edge-host needs --edges, the number of edges")
    if edges:
        create_with_edges(
            folder,
            host or (),
            edges=edges,
            edge_hosts=edge_host or (),
            supernodes=supernodes,
            port=port,
            first_node_port=first_node_port,
            days=days,
        )
    else:
        create(
            folder, host or (), supernodes=supernodes, port=port, first_node_port=first_node_port, days=days
        )
    typer.echo((folder / GUIDE).read_text(), nl=False)


@app.command("add-supernode")
def add_supernode(
    folder: Folder,
    count: Annotated[int, typer.Option("--count", min=1, help="How many.")] = 1,
    first_node_port: Annotated[
        int | None,
        typer.Option(
            "--first-node-port", help="The first one's own local port.", show_default="the next free"
        ),
    ] = None,
) -> None:
    """Make the folders of more SuperNodes in DIR; existing files stay as they are."""
    from ..deployment.plan import Federation, add_supernodes

    made = Federation(folder)
    for path in add_supernodes(folder, count, first_node_port=first_node_port):
        typer.echo(
            f"{path}: give it to its machine, {made.operator}/supernode-keys/{path.name}.pub to the operator "
            f"(register.sh again), and {made.superlink}/signing-keys/{path.name}.pub to the SuperLink"
        )
    typer.echo(
        "The other SuperNodes keep the number of partitions they were told: PARTITIONS in settings.env"
    )


@app.command("renew")
def renew(folder: Folder, host: Names = None, days: Days = 365) -> None:
    """Give DIR/superlink a new key and certificate; clients need nothing new. The old ones are kept.

    Without --host it is made for the same names as the old one.
    """
    from ..deployment.plan import Federation
    from ..deployment.plan import renew as renew_certificate

    for path in renew_certificate(folder, host or (), days=days):
        typer.echo(f"kept: {path}")
    place = Federation(folder).superlink
    typer.echo(f"new: {place / 'superlink.crt'} and superlink.key; restart the SuperLink with them")


@app.command("check")
def check(folder: Folder, host: Names = None) -> None:
    """Check DIR, a whole federation or one machine's folder; exit status 2 if something would not work.

    With --host, whether clients that connect under that name would accept the SuperLink.
    """
    from ..deployment.check import ERROR, WARNING
    from ..deployment.check import check as look

    findings = look(folder, host or ())
    _print(findings)
    counts = {level: sum(finding.level == level for finding in findings) for level in (ERROR, WARNING)}
    told = [f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts.items() if count]
    typer.echo(", ".join(told) or "all is well")
    if counts[ERROR]:
        raise typer.Exit(USER_ERROR)


@app.command("link")
def link(
    to: Annotated[str, typer.Option("--to", metavar="HOST:PORT", help="Where to: the SuperLink.")],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="What the SuperNode connects to instead.")
    ] = "127.0.0.1:9093",
    down_mbps: Annotated[
        float | None,
        typer.Option("--down-mbps", min=0, help="Mbit/s to the SuperNode.", show_default="no limit"),
    ] = None,
    up_mbps: Annotated[
        float | None,
        typer.Option("--up-mbps", min=0, help="Mbit/s from the SuperNode.", show_default="no limit"),
    ] = None,
    latency_ms: Annotated[float, typer.Option("--latency-ms", min=0, help="Delay of each direction.")] = 0.0,
    logs: Annotated[
        Path | None,
        typer.Option("--log", metavar="LOGS", help="Speeds from device logs instead.", show_default=False),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="Whose log.", show_default="the only one")
    ] = None,
) -> None:
    """Relay a SuperNode's connections to its SuperLink at the speeds of a slow link, until Ctrl-C.

    TLS passes untouched. With --log, speeds follow a device's log from its first sample on, over and over.
    """
    import threading

    from ..deployment.shaped_link import ShapedLink, parse_address

    source, target = parse_address(listen, "--listen"), parse_address(to, "--to")
    log = _device_log(logs, device, down_mbps, up_mbps)
    down, up = (math.inf if speed is None else speed * 1e6 for speed in (down_mbps, up_mbps))
    relay = ShapedLink(source, target, down_bps=down, up_bps=up, latency_s=latency_ms / 1e3)
    if log is not None:
        relay.follow(log)
    with sigterm_as_interrupt(), relay:
        if log is not None:
            speeds = f"as the log of {log.device} has it, {len(log)} samples over {log.span_s:g} s"
        else:
            speeds = f"{_speed(down)} down, {_speed(up)} up"
        typer.echo(f"{listen} -> {to}: {speeds}, {latency_ms:g} ms each way; Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
    typer.echo(
        f"{relay.bytes_down:,} bytes down, {relay.bytes_up:,} bytes up, {relay.connections} connections, "
        f"{relay.failed} without an answer"
    )


def _device_log(
    logs: Path | None, device: str | None, down_mbps: float | None, up_mbps: float | None
) -> DeviceLog | None:
    if logs is None:
        if device is not None:
            raise UserError("--device needs --log, the logs that the device is in")
        return None
    if down_mbps is not None or up_mbps is not None:
        raise UserError("--log gives the speeds: leave out --down-mbps and --up-mbps")
    from ..emulation.logs import read_logs

    found = read_logs(logs)
    if device is None and len(found) > 1:
        raise UserError(f"{logs} has {len(found)} devices: choose one with --device, as {found.devices[0]}")
    return found[found.devices[0] if device is None else device]


def _speed(bps: float) -> str:
    return "no limit" if math.isinf(bps) else f"{bps / 1e6:g} Mbit/s"


def _print(findings: Sequence[Finding]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("", "where", "what", "what to do"):
        table.add_column(column, overflow="fold")
    styles = {"ok": "green", "warning": "yellow", "error": "bold red"}
    for finding in findings:
        table.add_row(
            Text(finding.level, style=styles[finding.level]),
            Text(str(finding.where)),
            Text(finding.what),
            Text(finding.remedy),
        )
    console().print(table)
