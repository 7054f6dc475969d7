"""``fedplat report``: tables and pictures of a run, made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import console

if TYPE_CHECKING:
    from ..results.folder import RunFolder

_MOST_LINES = 12


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    clean: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The same run without attackers, to state losses against."),
    ] = None,
) -> None:
    """Rebuild the tables and the pictures of a run, also of one that is not finished.

    DIR is the run's folder.
    """
    from ..results.folder import RunFolder
    from ..results.report import write_report

    run = RunFolder.existing(folder)
    print_results(run, write_report(run, RunFolder.existing(clean) if clean else None))


def left_out_lines(left_out: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return who was left out and why; strategies are joined, and so are clients with the same to tell.

    What emulated devices did not deliver is a line for each reason, with the number of clients.
    """
    from ..results.simulated import MISSED

    told: dict[tuple[int, str], list[str]] = {}
    devices: dict[str, dict[str, int]] = {reason: {} for reason in MISSED.values()}
    ids_of: dict[str, set[int]] = {reason: set() for reason in devices}
    for strategy, clients in left_out.items():
        for client in clients:
            for item in client["reasons"]:
                if (reason := item["reason"]) in devices:
                    devices[reason][strategy] = devices[reason].get(strategy, 0) + item["rounds"]
                    ids_of[reason].add(client["client"])
                    continue
                told.setdefault((client["client"], item["reason"]), []).append(
                    f"{strategy} {item['rounds']}x"
                )
    who: dict[tuple[str, str], list[int]] = {}
    for (client_id, reason), where in sorted(told.items()):
        who.setdefault((reason, ", ".join(where)), []).append(client_id)
    lines = [
        f"left out: {len(ids_of[reason])} client{'s' * (len(ids_of[reason]) > 1)}, {reason} "
        f"({', '.join(f'{strategy} {count}x' for strategy, count in counts.items())})"
        for reason, counts in devices.items()
        if counts
    ]
    lines += [
        f"left out: client{'s' * (len(ids) > 1)} {', '.join(map(str, ids))}, {reason} ({where})"
        for (reason, where), ids in who.items()
    ]
    hidden = len(lines) - _MOST_LINES
    return lines if hidden <= 0 else [*lines[:_MOST_LINES], f"left out: {hidden} more, see the report"]


def print_results(run: RunFolder, summary: dict[str, Any], quiet: bool = False) -> None:
    """Print the comparison of a run and where its files are; if ``quiet``, only the latter."""
    from ..results.report import picture_of
    from ..results.tables import rich_table

    if quiet:
        typer.echo(run.path / "report.md")
        typer.echo(picture_of(run))
        return
    out = console()
    if not summary["finished"]:
        out.print("This run is not finished; the figures are those of the rounds done so far.", style="bold")
    out.print(rich_table(summary))
    for line in left_out_lines(summary["left_out"]):
        out.print(line, soft_wrap=True)
    out.print(f"report:  {run.path / 'report.md'}", soft_wrap=True)
    out.print(f"picture: {picture_of(run)}", soft_wrap=True)
