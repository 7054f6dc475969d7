"""``fedplat table``: a table of many runs, each run at most once."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError, unknown_name
from .common import INTERRUPTED, TERMINATED, Overrides, console
from .run import DEVICES, Terminated, sigterm_as_interrupt

if TYPE_CHECKING:
    from ..tables.cells import Plan
    from ..tables.runner import Watcher
    from ..tables.spec import Table

FAILED_CELLS = 1


def table(
    name: Annotated[str, typer.Argument(metavar="TABLE", show_default=False)],
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", metavar="A,B", help="These rows only.", show_default=False),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option("--columns", metavar="A,B", help="These columns only.", show_default=False),
    ] = None,
    blocks: Annotated[
        list[str] | None,
        typer.Option(
            "--blocks", metavar="A,B", help="Blocks of these values only; or AXIS=A,B.", show_default=False
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", min=1, help="Seeds for every cell.", show_default="the table's"),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="Rounds.", show_default="the table's")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller table, as its file says.")] = False,
    overrides: Overrides = None,
    jobs: Annotated[
        str,
        typer.Option(
            "--jobs",
            metavar="N|ray[:ADDRESS]",
            help="Cells at once, or a Ray cluster; the results do not depend on it.",
            show_default="one per core",
        ),
    ] = "",
    device: Annotated[
        str, typer.Option("--device", metavar="|".join(DEVICES), help="Where to compute.")
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="The table's folder.", show_default="tables/<table>[-quick]"
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run a random finished cell again and compare bits.")
    ] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Run cells again that failed.")] = False,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Only write the table, from the cells that are there.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but where the results are.")] = False,
) -> None:
    """Run what is missing of a table, and write it.

    TABLE is one that comes with fedplat, such as fed-credit (fedplat list tables shows all), or a TOML file.
    """
    from ..tables.cells import Options, plan
    from ..tables.spec import read_table

    if device not in DEVICES:
        raise unknown_name("--device", device, DEVICES)
    how_many = parse_jobs(jobs)
    stem, described = read_table(name)
    keep = chosen(described, rows, columns, blocks)
    planned = plan(stem, described, Options(seeds, rounds, quick, keep, tuple(overrides or ())))
    path = out or Path("tables") / (f"{stem}-quick" if quick else stem)
    command = command_of(name, rows, columns, blocks, seeds, rounds, quick, overrides, out)
    if check:
        _check(planned, path, device, quiet)
        return
    if not no_run:
        try:
            with sigterm_as_interrupt():
                _run(planned, path, command, how_many, device, retry, quiet)
        except KeyboardInterrupt as stop:
            _write(planned, path, command, quiet=True)
            print(
                f"stopped; every full round is saved, and what is there is in {path / 'table.md'}. To go on:"
                f"\n  {command}",
                file=sys.stderr,
            )
            raise typer.Exit(TERMINATED if isinstance(stop, Terminated) else INTERRUPTED) from None
    if _write(planned, path, command, quiet):
        raise typer.Exit(FAILED_CELLS)


def parse_jobs(text: str) -> int | str | None:
    """Return what ``--jobs`` asks for: a number, an address of Ray ("" for one of its own), or None.

    >>> parse_jobs("3"), parse_jobs("ray"), parse_jobs("ray:auto"), parse_jobs("")
    (3, '', 'auto', None)
    """
    if not text:
        return None
    if text.isdecimal() and int(text):
        return int(text)
    kind, _, address = text.partition(":")
    if kind != "ray":
        raise UserError(f"--jobs {text}: expected a number of cells to run at once, ray, or ray:ADDRESS")
    return address


def chosen(
    table: Table, rows: Sequence[str] | None, columns: Sequence[str] | None, blocks: Sequence[str] | None
) -> dict[str, list[str]]:
    """Return the values to keep by axis; raises UserError for a block that no axis, or several, have."""
    keep: dict[str, list[str]] = {}
    for axis, texts in ((table.rows, rows), (table.columns, columns)):
        if texts:
            keep[axis.name] = _names(texts)
    for text in blocks or ():
        axis_name, equals, values = text.rpartition("=")
        for value in _names([values]):
            having = [a.name for a in table.blocks if value in {v.name for v in a.values}]
            if equals:
                having = [axis_name]
            if len(having) > 1:
                raise UserError(f"--blocks {value}: {' and '.join(having)} have it; say AXIS={value}")
            if not having:
                raise unknown_name("block", value, [v.name for a in table.blocks for v in a.values])
            keep.setdefault(having[0], []).append(value)
    return keep


def _names(texts: Sequence[str]) -> list[str]:
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def command_of(
    name: str,
    rows: Sequence[str] | None,
    columns: Sequence[str] | None,
    blocks: Sequence[str] | None,
    seeds: int | None,
    rounds: int | None,
    quick: bool,
    overrides: Sequence[str] | None,
    out: Path | None,
) -> str:
    """Return the command line that makes a table, or goes on with it, quoted for a shell.

    >>> command_of("defences", ["mean"], None, None, 3, None, True, ["training.lr=0.1"], None)
    'fedplat table defences --rows mean --seeds 3 --quick --set training.lr=0.1'
    """
    words = ["fedplat", "table", name]
    for option, texts in (("--rows", rows), ("--columns", columns), ("--blocks", blocks)):
        words += [word for text in texts or () for word in (option, text)]
    words += [] if seeds is None else ["--seeds", str(seeds)]
    words += [] if rounds is None else ["--rounds", str(rounds)]
    words += ["--quick"] if quick else []
    words += [word for text in overrides or () for word in ("--set", text)]
    words += [] if out is None else ["--out", str(out)]
    return shlex.join(words)


def _run(
    planned: Plan, out: Path, command: str, jobs: int | str | None, device: str, retry: bool, quiet: bool
) -> None:
    from ..runtime.local import available_cores
    from ..tables.followed import Followed
    from ..tables.grid_view import Progress, view
    from ..tables.on_disk import FAILED, REFUSED
    from ..tables.runner import FolderLock, missing_jobs, run_here, share_cores

    with FolderLock(out):
        todo = missing_jobs(planned, out, device=device, retry=retry)
        states = states_of(planned, out)
        if todo and not quiet:
            typer.echo(f"{planned.table.title}: {len(todo)} of {len(states)} runs to do, in {out}")
        before = sum(state in (FAILED, REFUSED) for state in states.values())
        if before and not retry and not quiet:
            typer.echo(f"{before} failed before and stay as they are; --retry runs them again")
        if not todo:
            return
        for job in todo:
            states[job.identity] = "missing"

        def work(watcher: Watcher) -> None:
            if isinstance(jobs, str):
                from ..tables.ray_jobs import run_on_ray

                run_on_ray(todo, jobs, planned.table.resources, watcher)
            else:
                at_once, cores = share_cores(todo, jobs, available_cores())
                if jobs is not None and jobs > at_once:
                    watcher.note(f"--jobs {jobs}: {at_once} at once, for {available_cores()} cores")
                run_here(todo, at_once, cores, watcher)

        with view(Progress(planned, states), console(), quiet) as watcher:
            work(Followed(watcher, planned, out, command))


def states_of(planned: Plan, out: Path) -> dict[str, str]:
    """Return the state of every run of a table, by identity."""
    from ..tables.cells import cell_path
    from ..tables.on_disk import state_of

    return {i: state_of(cell_path(out, i), cell) for i, cell in planned.runs.items()}


def _write(planned: Plan, out: Path, command: str, quiet: bool) -> bool:
    """Write the table of what is there, print it, and return whether some of its cells failed."""
    from ..tables.on_disk import FAILED, entries_of
    from ..tables.render import terminal_tables, write_table

    entries = entries_of(planned, out)
    paths = write_table(planned, entries, out, command)
    failed = [
        f"failed: {', '.join(entry.position)}, seed {seed}: {outcome.reason}"
        for entry in entries.values()
        for seed, (_, outcome) in entry.runs.items()
        if outcome.state == FAILED
    ]
    if quiet:
        typer.echo(paths[0])
        return bool(failed)
    terminal = console()
    for grid in terminal_tables(planned, entries):
        terminal.print(grid)
    for line in failed:
        terminal.print(line, soft_wrap=True)
    terminal.print(f"table: {paths[0]}, and {', '.join(path.name for path in paths[1:])}", soft_wrap=True)
    return bool(failed)


def _check(planned: Plan, out: Path, device: str, quiet: bool) -> None:
    from ..runtime.local import available_cores
    from ..tables.check import check, choose

    cell = choose(planned, out)
    name = f"{', '.join(cell.position)}, seed {cell.seed}"
    if not quiet:
        typer.echo(f"running again: {name} (cells/{cell.identity})")
    found = check(cell, out, available_cores(), device, lambda number, accuracy: None)
    if found:
        for difference in found:
            typer.echo(f"differs: {name}: {difference}")
        raise typer.Exit(FAILED_CELLS)
    typer.echo(f"the same bits again: {name}")
