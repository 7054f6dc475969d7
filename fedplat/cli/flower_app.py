"""``fedplat flower-app``: the app for ``flwr run`` as a folder of one's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError

INSTALLED = Path(__file__).parent.parent / "flower_app"


def flower_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)] = Path("fedplat-app"),
) -> None:
    """Write the Flower app that runs any scenario with "flwr run" to DIR, by default fedplat-app.

    It is a few lines that use the fedplat installed on the server and on the clients; its pyproject.toml has
    the run config with its defaults, which are yours to change.
    """
    if folder.exists():
        raise UserError(f"{folder} is there already and is not overwritten; name another folder")
    shutil.copytree(INSTALLED, folder, ignore=shutil.ignore_patterns("__pycache__"))
    typer.echo(
        f"{folder}: start it with\n  flwr run {folder} --run-config 'scenario=\"quickstart\"' "
        f"--federation-config 'num-supernodes=20' --stream"
    )
