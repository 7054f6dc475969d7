"""``fedplat deploy``: the folders of a federation's machines, made and checked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import USER_ERROR, console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..deployment.check import Finding

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
) -> None:
    """Make DIR with one folder per machine: keys, certificates, settings and start scripts.

    Nothing is ever overwritten.
    """
    from ..deployment.plan import GUIDE, create

    made = create(
        folder, host or (), supernodes=supernodes, port=port, first_node_port=first_node_port, days=days
    )
    typer.echo((made.folder / GUIDE).read_text(), nl=False)


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
