"""``fedplat benchmark federation``: a scenario on every engine, and a federation whose clients are killed.

``engines``: what the local engine, Flower's simulation and a federation of processes with TLS, registered
keys and signed updates come to, and how long each takes. ``kills``: see :mod:`.federation_kills`.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fedplat.deployment.processes import Machines
from fedplat.errors import UserError
from fedplat.results.folder import StrategyLog

from .common import Report, Section, chosen, middle, quiet
from .engines import DisagreementError
from .federation_checks import Model, same_bits
from .federation_kills import measure_kills
from .federation_runs import (
    LOCAL,
    PARTS,
    PATIENCE,
    QUICK,
    RESULT,
    SIMULATION,
    Options,
    check,
    command_of,
    federation_at,
    lines_of,
    percent,
    run_command,
    run_config,
    submit,
    wait_for,
)

DEPLOYMENT = "deployment"
TOLERANCE = 1e-6
_SHOWN = 12


@dataclass(frozen=True)
class Outcome:
    """What an engine made of a strategy: its rounds, its lines by client, and the final model."""

    rounds: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    model: Model


Outcomes = dict[str, dict[str, Outcome]]
"""By engine, then by strategy."""


def measure(options: Options, report: Report) -> None:
    """Fill the report; raises DisagreementError, when all is done, for what should have been otherwise."""
    quiet()
    report.options = asdict(options)
    if data := os.environ.get("FEDPLAT_DATA"):
        os.environ["FEDPLAT_DATA"] = str(Path(data).resolve())  # clients run in folders of their own
    parts = {"engines": _measure_engines, "kills": measure_kills}
    wrong: list[str] = []
    with nullcontext(options.keep) if options.keep else TemporaryDirectory() as place:
        for name in chosen("part", options.parts, parts):
            wrong += parts[name](options, report, Path(place) / name)
    if wrong:
        raise DisagreementError("; ".join(wrong))


def _measure_engines(options: Options, report: Report, folder: Path) -> list[str]:
    outcomes: Outcomes = {}
    took: list[dict[str, Any]] = []
    skipped: list[str] = []
    made = federation_at(folder, options.clients[0])
    with Machines(made.folder, timeout=PATIENCE) as machines:
        for name in (LOCAL, SIMULATION, DEPLOYMENT):
            report.say(name)
            try:
                took_here: tuple[float | None, float]
                if name == DEPLOYMENT:
                    found, took_here = _deployed(machines, options)
                else:
                    result = folder / f"run-{name}"
                    seconds = run_command(machines, name, command_of(options, name, result), options.limit)
                    found, took_here = _outcomes(result, options), (None, seconds)
            except UserError as error:
                skipped.append(f"{name}: {error}")
                if name == LOCAL:
                    break  # there is nothing to compare the others with
                continue
            outcomes[name] = found
            took.append(dict(zip(("engine", "s to start", "s in all"), (name, *took_here), strict=True)))
    what = f"{options.scenario}, {options.clients[0]} clients, signed updates, seed {options.seed}"
    engines = tuple(outcomes)
    accuracies = Section(
        f"accuracy by round, in %: {what}",
        ("strategy", "round", *engines),
        [row for strategy in options.strategies for row in accuracy_rows(strategy, outcomes)],
        skipped=skipped,
    )
    report.add(accuracies)
    report.add(_times(outcomes, took, options))
    rows = agreement_rows(outcomes)
    notes = [
        f"same bits: of every array of the final model, as {LOCAL}'s; up to {TOLERANCE:g} would be tolerated",
        "lines: of clients.jsonl, whose status, weight or verdict is another than locally",
        *unusual(outcomes),
    ]
    report.add(Section("agreement with the local engine", AGREEMENT, rows, notes))
    report.failed += skipped
    return [*skipped, *disagreements(rows)]


def _deployed(machines: Machines, options: Options) -> tuple[dict[str, Outcome], tuple[float, float]]:
    """Start a federation, run everything on it, and return what came out, with the seconds of both."""
    start = time.perf_counter()
    machines.start_all()
    started = time.perf_counter()
    run = submit(machines, run_config(options, "result"))
    result = machines.federation.folder.joinpath(*RESULT, "result")
    last = result / options.strategies[-1] / "model.pt"
    status = wait_for(machines, run, last.exists, options.limit)
    if status != "finished:completed":
        raise UserError(f"the federation's run ended as '{status}', see {machines.log('superlink')}")
    return _outcomes(result, options), (started - start, time.perf_counter() - start)


def _outcomes(result: Path, options: Options) -> dict[str, Outcome]:
    found = {}
    for strategy in options.strategies:
        folder = result / strategy
        log = StrategyLog(folder)
        if not log.finished:
            raise UserError(f"{folder}: the run did not come to its end")
        rounds, clients = lines_of(folder / "rounds.jsonl"), lines_of(folder / "clients.jsonl")
        # The same arrays as in model.pt, which is written from it.
        found[strategy] = Outcome(rounds, clients, log.load_checkpoint()["arrays"])
    return found


# Tables ----------------------------------------------------------------------------------------------------


def accuracy_rows(strategy: str, outcomes: Outcomes) -> list[dict[str, Any]]:
    """Return a row per round of a strategy, with the accuracy in % under each engine's name."""
    by_round: dict[int, dict[str, Any]] = {}
    for engine, of in outcomes.items():
        for line in of[strategy].rounds:
            row = by_round.setdefault(line["round"], {"strategy": strategy, "round": line["round"]})
            row[engine] = percent(line["accuracy"])
    return [by_round[number] for number in sorted(by_round)]


def _times(outcomes: Outcomes, took: list[dict[str, Any]], options: Options) -> Section:
    rows = []
    for strategy in options.strategies:
        for engine, of in outcomes.items():
            rows.append({"strategy": strategy, "engine": engine, **time_row(of[strategy].rounds)})
    notes = [
        f"{row['engine']}: {row['s in all']:.1f} s from the command to the end, for all strategies"
        + (
            f", of which {row['s to start']:.1f} until all SuperNodes were online"
            if row["s to start"]
            else ""
        )
        for row in took
    ]
    return Section("seconds and bytes", ("strategy", "engine", *TIMES), rows, notes)


TIMES = ("s first round", "s median of others", "s all rounds", "MB down", "MB up")


def time_row(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Return seconds, and the median bytes of a round in MB, of rounds from 1 on."""
    trained = [line for line in rounds if line["round"] > 0]
    seconds = [sum(line["seconds"].values()) for line in trained]
    values = (
        seconds[0],
        middle(seconds[1:] or seconds),
        sum(seconds),
        *(middle([line[key] for line in trained]) / 1e6 for key in ("bytes_down", "bytes_up")),
    )
    return dict(zip(TIMES, values, strict=True))


AGREEMENT = (
    *("strategy", "engine", "accuracy %", "same bits", "max difference"),
    *("accuracies that differ", "lines that differ", "refused", "failed"),
)


def agreement_rows(outcomes: Outcomes) -> list[dict[str, Any]]:
    """Return a row per strategy and engine that compares it with the local engine; none without that one."""
    rows = []
    for strategy in outcomes.get(LOCAL, {}):
        ours = outcomes[LOCAL][strategy]
        for engine, of in outcomes.items():
            theirs = of[strategy]
            accuracies = zip(_by_round(ours, "accuracy"), _by_round(theirs, "accuracy"), strict=False)
            lines = _judgements(ours.clients).items() ^ _judgements(theirs.clients).items()
            values = (
                *(strategy, engine, percent(theirs.rounds[-1]["accuracy"])),
                "yes" if same_bits(ours.model, theirs.model) else "no",
                difference(ours.model, theirs.model),
                sum(a != b for a, b in accuracies) + abs(len(ours.rounds) - len(theirs.rounds)),
                len({key for key, _ in lines}),
                *(
                    sum(line["status"] == status for line in theirs.clients)
                    for status in ("refused", "failed")
                ),
            )
            rows.append(dict(zip(AGREEMENT, values, strict=True)))
    return rows


def _by_round(outcome: Outcome, key: str) -> list[Any]:
    return [line[key] for line in outcome.rounds]


def _judgements(lines: list[dict[str, Any]]) -> dict[tuple[int, int], tuple[Any, ...]]:
    return {
        (line["round"], line["client"]): (line["status"], line["weight"], line["verdict"]) for line in lines
    }


def difference(ours: Model, theirs: Model) -> float:
    """Return the largest absolute difference of two numbers; infinite where the arrays do not correspond.

    >>> import torch
    >>> difference({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 2.5])})
    0.5
    """
    if same_bits(ours, theirs):
        return 0.0
    if {n: a.shape for n, a in ours.items()} != {n: a.shape for n, a in theirs.items()}:
        return float("inf")
    gaps = [np.abs(a.double().numpy() - theirs[n].double().numpy()) for n, a in ours.items() if a.numel()]
    return float(max(gap.max() for gap in gaps)) if all(np.isfinite(g).all() for g in gaps) else float("inf")


def disagreements(rows: list[dict[str, Any]]) -> list[str]:
    """Say which engines' models are not the local engine's, and whose clients did not take part as there."""
    return [
        f"{row['engine']}, {row['strategy']}: the final model differs by {row['max difference']:.3g} from "
        f"{LOCAL}'s, and {row['lines that differ']} lines on clients do"
        for row in rows
        if not row["max difference"] <= TOLERANCE
    ]


def unusual(outcomes: Outcomes) -> list[str]:
    """Say who was refused or failed; the first dozen, and how many more."""
    found = [
        f"{engine}, {strategy}, round {line['round']}: client {line['client']} {line['status']}, "
        f"{line['reason']}"
        for engine, of in outcomes.items()
        for strategy, outcome in of.items()
        for line in outcome.clients
        if line["status"] != "accepted"
    ]
    more = [f"and {len(found) - _SHOWN} more lines like these"] if len(found) > _SHOWN else []
    return [*found[:_SHOWN], *more]


__all__ = ["PARTS", "QUICK", "Options", "check", "measure"]
