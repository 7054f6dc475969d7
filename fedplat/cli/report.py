"""``fedplat report``: tables and pictures of a run, made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UserError
from .common import console

if TYPE_CHECKING:
    from ..results.folder import RunFolder

_MOST_LINES = 12


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", show_default=False)],
    clean: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The same run without attackers, to state losses against."),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write DIR/tensorboard, for TensorBoard.")
    ] = False,
    mlflow: Annotated[bool, typer.Option("--mlflow", help="Also log to MLflow.")] = False,
) -> None:
    """Rebuild the tables, the pictures and report.html of a run, also of one that is not finished.

    DIR is the run's folder. Several that differ in nothing but the seed get one report.html, with the spread
    over the seeds, in the first one's folder. The folder of a table gets a report.html of the table.
    """
    from ..results.sinks import export_folders

    _write_pages(folders, clean)
    export_folders(folders, [n for n, on in (("tensorboard", tensorboard), ("mlflow", mlflow)) if on])


def _write_pages(folders: Sequence[Path], clean: Path | None) -> None:
    from ..results.folder import RunFolder
    from ..results.page import is_table, write_page, write_table_page
    from ..results.report import page_of, write_report

    tables = [folder for folder in folders if is_table(folder)]
    if tables and (len(folders) > 1 or clean):
        raise UserError(
            f"{tables[0]} is the folder of a table: give it alone, without other folders or --clean"
        )
    if tables:
        typer.echo(f"page: {write_table_page(tables[0])}")
        return
    runs = [RunFolder.existing(folder) for folder in folders]
    if len(runs) > 1 and clean:
        raise UserError("--clean is for one run: the page over several seeds states no losses")
    if len(runs) > 1:
        write_page(runs, page_of(runs[0]))
        seeds = ", ".join(str(run.config.seed) for run in runs)
        console().print(f"page over seeds {seeds}: {page_of(runs[0])}", soft_wrap=True)
        return
    print_results(runs[0], write_report(runs[0], RunFolder.existing(clean) if clean else None))


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
    from ..results.report import page_of, picture_of
    from ..results.tables import rich_table

    if quiet:
        typer.echo(run.path / "report.md")
        typer.echo(picture_of(run))
        typer.echo(page_of(run))
        return
    out = console()
    if not summary["finished"]:
        out.print("This run is not finished; the figures are those of the rounds done so far.", style="bold")
    out.print(rich_table(summary))
    for line in left_out_lines(summary["left_out"]):
        out.print(line, soft_wrap=True)
    out.print(f"report:  {run.path / 'report.md'}", soft_wrap=True)
    out.print(f"picture: {picture_of(run)}", soft_wrap=True)
    out.print(f"page:    {page_of(run)}", soft_wrap=True)
