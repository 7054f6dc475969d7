"""``fedplat watch``: a run or a table in the browser, while it goes on."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from .common import INTERRUPTED

PORT = 8765


def watch(
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port on this machine; 0 takes a free one.")
    ] = PORT,
    browser: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open a browser.", show_default="if there is a screen"),
    ] = None,
) -> None:
    """Show a run or a table as a page that follows it, until Ctrl-C.

    DIR is the folder of a run or of a table; it may also appear later. The page is
    there for browsers on this machine only.
    """
    from ..results.live import PageServer

    with PageServer(folder, port) as server:
        typer.echo(f"{folder}: {server.address} (Ctrl-C ends this)")
        if not folder.exists():
            typer.echo(f"{folder} is not there yet; the page waits for it")
        if has_screen() if browser is None else browser:
            _open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def has_screen() -> bool:
    """Whether somebody sits before this machine's own screen, as far as the environment tells."""
    if any(os.environ.get(name) for name in ("SSH_CONNECTION", "CI")) or not sys.stdout.isatty():
        return False
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")
    )


def _open(address: str) -> None:
    import webbrowser

    # Some browsers keep the caller waiting until they are closed.
    threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()
