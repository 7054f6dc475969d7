"""``fedplat benchmark``: fedplat against others on this machine, and what its own parts cost or stand."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import UserError, unknown_name
from .common import console
from .run import sigterm_as_interrupt

if TYPE_CHECKING:
    from ..experiments.benchmarks.common import Section

# Those that run when none is named, and those that only run when they are.
ALL = ("engines", "aggregators", "scale")
WHICH = (
    *ALL,
    "signing",
    "secure-aggregation",
    "compression",
    "enforcement",
    "federation",
    "hierarchy",
    "leakage",
)
# What --only may name, and which of the options each benchmark knows, by the name of its setting.
PARTS = {
    "engines": ("training", "no-op", "gpu"),
    "aggregators": (
        *("mean", "median", "trimmed-mean", "krum", "multi-krum", "bulyan"),
        *("geometric-median", "fed-credit"),
    ),
    "scale": ("mean", "fed-credit"),
    "federation": ("engines", "kills"),
    "hierarchy": ("rounds", "decisions"),
    "leakage": ("inversion", "membership", "noise"),
}
_ONLY = {
    **{"engines": "parts", "aggregators": "rules", "scale": "strategies"},
    **dict.fromkeys(("federation", "hierarchy", "leakage"), "parts"),
}
_AGAINST = {"engines": "engines", "aggregators": "libraries", "hierarchy": "policies"}
_KNOWN = {
    "--models": dict.fromkeys(("engines", "scale", "secure-aggregation", "enforcement", "leakage"), "models"),
    "--clients": dict.fromkeys((*ALL, "secure-aggregation", "federation", "hierarchy"), "clients"),
    "--batch": dict.fromkeys(("engines", "enforcement", "leakage"), "batches"),
    "--samples": dict.fromkeys(("engines", "leakage"), "samples"),
    "--parameters": {"aggregators": "parameters"},
    "--against": _AGAINST,
    "--threads": {"aggregators": "threads"},
    "--megabytes": dict.fromkeys(("signing", "compression"), "megabytes"),
    "--minutes": {"federation": "minutes"},
    "--keep": dict.fromkeys(("federation", "leakage"), "keep"),
    "--repeats": dict.fromkeys(
        (*ALL, "signing", "secure-aggregation", "compression", "hierarchy", "leakage"), "repeats"
    ),
    "--seed": dict.fromkeys(WHICH, "seed"),
    "--limit": dict.fromkeys((*ALL, "federation", "hierarchy"), "limit"),
}
_DISAGREED = 1


def benchmark(
    which: Annotated[str | None, typer.Argument(metavar="[WHICH]", show_default=False)] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="The smallest sizes: about a minute each, federation ten.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="A,B", help="Parts of it: no-op, krum ...", show_default="all")
    ] = None,
    models: Annotated[
        str | None, typer.Option(metavar="A,B", help="Models to train or to move.", show_default=False)
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            metavar="N,M",
            help="Numbers of clients; sizes of a group; a federation's one.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        str | None, typer.Option(metavar="N,M", help="Batch sizes to train with.", show_default="10,64")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples that a client trains on per round.",
            show_default="600, fewer where that takes too long",
        ),
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option(metavar="N,M", help="Model sizes of aggregators.", show_default="1e5,1e6,1e7"),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Who takes part: fedplat, loop, ray, pfl, blazefl; fedplat, flower, byzfl.",
            show_default="all that is installed",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of aggregators.", show_default="one per core")
    ] = None,
    megabytes: Annotated[
        str | None,
        typer.Option(
            metavar="N,M", help="Sizes of replies to sign or compress, in MB.", show_default="1,10,100"
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0.5, help="How long a federation's clients are killed.", show_default="10"),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="A new folder: a federation's logs and runs, pictures of leakage.",
            show_default=False,
        ),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Turns that each of them takes.", show_default="2 or 3")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of data and models.", show_default="1")] = None,
    limit: Annotated[
        float | None,
        typer.Option(min=0.1, help="Longest time of one measurement, in seconds.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The JSON file.", show_default="runs/benchmark-<which>.json"),
    ] = None,
) -> None:
    """Measure fedplat on this machine, also against other engines and libraries.

    WHICH is engines (training rounds, clients that do nothing), aggregators
    (time and memory of the rules) or scale (10,000 clients); without it these
    three run, which takes hours. Or it is signing (of replies),
    secure-aggregation (its seconds and bytes per client), compression (of
    updates: how much smaller, and how long it takes), enforcement (the least
    limit of memory that a model trains under, beside its estimate), hierarchy
    (what policies for edges decide, and how fast), leakage (what a curious server
    learns from uploads, by the layers in them) or federation (a SuperLink and
    SuperNodes on this machine: the same results as without, and nothing lost
    when they are killed). The extra "bench" of this package brings
    pfl and ByzFL. Exit status 1: engines that did the same work came to different
    models, or a federation lost something.
    """
    if which is not None and which not in WHICH:
        raise unknown_name("benchmark", which, WHICH)
    wanted = select([which] if which else list(ALL), _words(only), named=which is not None)
    given: dict[str, Any] = {
        "--models": _words(models),
        "--clients": _numbers("--clients", clients),
        "--batch": _numbers("--batch", batch),
        "--samples": samples,
        "--parameters": _numbers("--parameters", parameters),
        "--against": _words(against),
        "--threads": threads,
        "--megabytes": _numbers("--megabytes", megabytes),
        "--minutes": minutes,
        "--keep": keep,
        "--repeats": repeats,
        "--seed": seed,
        "--limit": limit,
    }
    settings = {name: settings_of(name, given, parts) for name, parts in wanted.items()}
    if not hasattr(os, "fork"):
        raise UserError("benchmarks measure in forked processes, which this system does not have")
    _run(settings, quick, out or Path("runs") / f"benchmark-{which or 'all'}.json")


def select(names: Sequence[str], only: Sequence[str], named: bool = True) -> dict[str, tuple[str, ...]]:
    """Return the parts to run of every benchmark; an empty tuple stands for all of them.

    >>> select(["engines", "aggregators", "scale"], ["mean"])
    {'aggregators': ('mean',), 'scale': ('mean',)}
    """
    allowed = dict.fromkeys(part for name in names for part in PARTS.get(name, ()))
    if only and not allowed:
        raise UserError(f"--only belongs to {', '.join(PARTS)}, not to {', '.join(names)}")
    for part in only:
        if part not in allowed:
            raise unknown_name(f"part of {names[0]}" if named and len(names) == 1 else "part", part, allowed)
    parts = {name: tuple(part for part in PARTS.get(name, ()) if part in only) for name in names}
    return {name: found for name, found in parts.items() if found or not only}


def settings_of(name: str, given: dict[str, Any], parts: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings of one benchmark; raises UserError for an option that it does not have."""
    settings: dict[str, Any] = {_ONLY[name]: parts} if parts else {}
    for option, value in given.items():
        if value is None or value == ():
            continue
        if name not in _KNOWN[option]:
            raise UserError(f"{option} belongs to {' and '.join(_KNOWN[option])}, not to {name}")
        settings[_KNOWN[option][name]] = value
    return settings


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    try:
        numbers = tuple(int(float(word)) for word in _words(text))
    except (ValueError, OverflowError):
        numbers = (0,)
    if any(number < 1 for number in numbers):
        raise UserError(f"{option}: expected numbers from 1 on, for example {option} 10,100; got '{text}'")
    return numbers


def _run(settings: dict[str, dict[str, Any]], quick: bool, out: Path) -> None:
    # Before anything is imported: nobody is called, no warnings about settings of theirs, and a look for a
    # GPU that leaves it usable in forked processes.
    for variable in (
        "FLWR_TELEMETRY_ENABLED",
        "RAY_USAGE_STATS_ENABLED",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    ):
        os.environ.setdefault(variable, "0")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

    from ..experiments.benchmarks import (
        aggregators,
        compression,
        enforcement,
        engines,
        federation,
        hierarchy,
        leakage,
        scale,
        secure_aggregation,
        signing,
    )
    from ..experiments.benchmarks.common import Report, machine_line, write_json

    screen = console()
    screen.print(machine_line(), soft_wrap=True)
    modules: dict[str, Any] = {
        "engines": engines,
        "aggregators": aggregators,
        "scale": scale,
        "signing": signing,
        "secure-aggregation": secure_aggregation,
        "compression": compression,
        "enforcement": enforcement,
        "federation": federation,
        "hierarchy": hierarchy,
        "leakage": leakage,
    }
    reports: list[Report] = []
    status = 0
    planned = {
        name: modules[name].Options(**{**(modules[name].QUICK if quick else {}), **chosen})
        for name, chosen in settings.items()
    }
    for name, options in planned.items():
        modules[name].check(options)
    try:
        with sigterm_as_interrupt():
            for name, options in planned.items():
                report = Report(name, {}, _show, _tell)
                reports.append(report)
                try:
                    modules[name].measure(options, report)
                except engines.DisagreementError as error:
                    print(f"error: {error}", file=sys.stderr)
                    status = _DISAGREED
    finally:
        if any(report.sections for report in reports):
            write_json(reports, out)
            screen.print(f"results: {out}", soft_wrap=True)
    if status:
        raise typer.Exit(status)


def _show(section: Section) -> None:
    from ..experiments.benchmarks.common import table_of

    screen = console()
    if section.rows:
        screen.print(table_of(section))
    else:
        screen.print(section.title, style="bold")
    for note in section.notes:
        screen.print(f"  {note}", soft_wrap=True)
    for reason in section.skipped:
        screen.print(f"  skipped: {reason}", soft_wrap=True)
    screen.print()


def _tell(text: str) -> None:
    """Say what is being measured, where somebody may be waiting."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)
