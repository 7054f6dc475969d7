"""The command line: ``fedplat run``, ``list``, ``show``, ``report``, ``watch``, ``partition``, ``benchmark``,
``deploy``, ``devices``, ``flower-app``.

Exit status: 0 for success, 2 for a user's mistake, 130 after Ctrl-C and 143 after SIGTERM, both with the
state of a run saved. Anything else that goes wrong is a fault of the program and keeps its traceback.

Whatever is slow to import (torch, flwr, NumPy, matplotlib) is imported inside the commands, so that help and
lists come at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import click
import typer

from .. import __version__
from ..errors import UserError
from . import (
    backbone,
    benchmark,
    deploy,
    devices,
    flower_app,
    listing,
    partition,
    report,
    run,
    show,
    table,
    watch,
    world,
)
from .common import INTERRUPTED, USER_ERROR

app = typer.Typer(
    name="fedplat",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("list")(listing.list_names)
app.command("show")(show.show)
app.command("report")(report.report)
app.command("watch")(watch.watch)
app.command("table")(table.table)
app.command("world")(world.world)
app.command("backbone")(backbone.backbone)
app.command("partition")(partition.partition)
app.command("benchmark")(benchmark.benchmark)
app.command("flower-app")(flower_app.flower_app)
app.add_typer(deploy.app, name="deploy")
app.add_typer(devices.app, name="devices")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedplat {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Federated learning under attack and on uneven devices.

    Begin with: fedplat run quickstart
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default this process's own, and return the exit status."""
    command = typer.main.get_command(app)
    try:
        status = command.main(
            args=None if arguments is None else list(arguments), prog_name="fedplat", standalone_mode=False
        )
    except UserError as error:
        return _complain(str(error))
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "fedplat"
        # Typer and Click both suggest the nearest command; once is enough.
        sentences = dict.fromkeys(error.format_message().replace(" Did you", "\nDid you").splitlines())
        return _complain(f"{' '.join(sentences)}\nTry '{where} --help'")
    except click.ClickException as error:
        return _complain(error.format_message())
    except KeyboardInterrupt:
        return INTERRUPTED
    except click.Abort as error:
        # Click turns an EOFError into an Abort as well, which would hide a fault such as a cut-off file.
        if isinstance(error.__cause__, EOFError):
            raise error.__cause__ from None
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def _complain(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return USER_ERROR
