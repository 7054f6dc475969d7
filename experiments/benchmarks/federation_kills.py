"""The part ``kills`` of ``fedplat benchmark federation``: what a run keeps when its processes are killed.

While a run goes on, SuperNodes are killed with all their processes at random moments and started again. Then
the SuperLink of a run is killed; started again, it is given the same command. What the runs left on disk is
checked line by line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedplat.deployment.processes import SUPERLINK, Machines
from fedplat.errors import UserError
from fedplat.results.folder import StrategyLog
from fedplat.rng import generator

from .common import Report, Section
from .federation_checks import DECAY, Story, count_lines, named, same_bits, trouble_of
from .federation_runs import (
    LOCAL,
    PATIENCE,
    RESULT,
    Options,
    command_of,
    federation_at,
    lines_of,
    percent,
    run_command,
    run_config,
    submit,
    wait_for,
)

STRATEGY = "fed-credit"
# Without an attitude a credibility is the sum of similarities: what is left of it can be computed from them.
CREDIT = ("attitude=none", f"decay={DECAY}", "history=sum")
# Where an attacker is the only one there, the model is its own: a matter of rules, not of what is lost.
_PEACE = "attacks=[]"
GAPS = 30.0, 90.0
MOST_DOWN = 2
KILLS = ("s", "killed", "in round", "what the results say", "s until online", "attempts")
_JOIN = 30.0
_TRAINING = 4.0


@dataclass(frozen=True)
class Planned:
    """A kill that is planned: after so many seconds, the first of these that is there."""

    at: float
    order: tuple[str, ...]


@dataclass
class Kill:
    """A kill: who, when, in which round, and how long and how many attempts its return took."""

    name: str
    at: float
    round: int
    back: float | None = None
    attempts: int | None = None
    trouble: str = ""


def plan(seed: int, seconds: float, names: Sequence[str]) -> list[Planned]:
    """Return random kills, 30 to 90 seconds apart, within so many seconds; the same for the same seed."""
    rng = generator(seed, "benchmark-kills")
    planned: list[Planned] = []
    at = float(rng.uniform(*GAPS))
    while at <= seconds:
        planned.append(Planned(at, tuple(names[i] for i in rng.permutation(len(names)))))
        at += float(rng.uniform(*GAPS))
    return planned


def victim(order: Sequence[str], down: Iterable[str]) -> str | None:
    """Return the first that is there; None if as many are down as may be.

    >>> victim(["b", "a"], ["b"]), victim(["b", "a", "c"], ["b", "c"])
    ('a', None)
    """
    away = set(down)
    return None if len(away) >= MOST_DOWN else next((name for name in order if name not in away), None)


@dataclass
class Killer:
    """Kills SuperNodes by plan and brings each back in a thread of its own."""

    machines: Machines
    planned: list[Planned]
    rounds: Path
    kills: list[Kill] = field(default_factory=list)
    spared: int = 0
    threads: list[threading.Thread] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Do what is due."""
        now = time.monotonic() - self.start
        while self.planned and self.planned[0].at <= now:
            name = victim(self.planned.pop(0).order, [kill.name for kill in self.kills if kill.back is None])
            if name is None:
                self.spared += 1
                continue
            self.kills.append(kill := Kill(name, now, next_round(self.rounds)))
            self.machines.kill(name)
            thread = threading.Thread(target=self._bring_back, args=(kill,), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _bring_back(self, kill: Kill) -> None:
        try:
            kill.attempts = self.machines.rejoin(kill.name, PATIENCE)
        except (UserError, KeyError) as error:  # KeyError: all machines have been stopped meanwhile
            kill.trouble = str(error).splitlines()[0]
            return
        kill.back = time.monotonic() - self.start - kill.at

    def join(self, seconds: float) -> None:
        """Wait for all that are coming back."""
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(max(0.1, deadline - time.monotonic()))


def next_round(path: Path) -> int:
    """Return the round that is going on, by the rounds that are on disk."""
    return max((int(line["round"]) for line in lines_of(path)), default=-1) + 1


def measure_kills(options: Options, report: Report, folder: Path) -> list[str]:
    """Fill the report and return what was lost."""
    made = federation_at(folder, options.clients[0])
    with Machines(made.folder, timeout=PATIENCE) as machines:
        report.say("starting a federation")
        machines.start_all()
        wrong = _kill_supernodes(options, report, machines)
        return wrong + _kill_superlink(options, report, machines)


def _kill_supernodes(options: Options, report: Report, machines: Machines) -> list[str]:
    names = [path.name for path in machines.federation.supernodes]
    result = machines.federation.folder.joinpath(*RESULT, "kills", STRATEGY)
    # A round with somebody lost takes a minute, others a quarter of it: some are left for the end.
    rounds = max(6, round(2.5 * options.minutes))
    before = dict(machines.node_ids)
    run = submit(machines, run_config(_peaceful(options), "kills", rounds=rounds))
    killer = Killer(machines, plan(options.seed, 60 * options.minutes, names), result / "rounds.jsonl")
    report.say(f"{len(killer.planned)} kills in {options.minutes:g} minutes, {rounds} rounds")
    story = Story(rounds)
    try:
        last = result / "model.pt"
        story.status = wait_for(machines, run, last.exists, options.limit, killer.look)
        killer.join(PATIENCE)
        story.online = machines.statuses()
    finally:
        # Nobody may start anything once the machines are stopped.
        if any(thread.is_alive() for thread in killer.threads):
            machines.stop()
            killer.join(_JOIN)
    story.read(result, before, machines.federation)
    rows = [_kill_row(kill, killer.kills[number:], story) for number, kill in enumerate(killer.kills, 1)]
    trouble = trouble_of(story) + [
        f"{k.name} did not come back: {k.trouble or 'no answer'}" for k in killer.kills if k.back is None
    ]
    notes = [
        f"{options.scenario} without attackers, {len(names)} SuperNodes, seed {options.seed}",
        f"{STRATEGY} with {', '.join(CREDIT)}, so that credibilities follow from the lines on disk",
        f"killed with SIGKILL, {GAPS[0]:.0f} to {GAPS[1]:.0f} s apart, at most {MOST_DOWN} down at once "
        f"({killer.spared} kills left out for that, {len(killer.planned)} since the run was over)",
        _summary(trouble, story, len(killer.kills)),
    ]
    report.add(Section("SuperNodes killed in a run", KILLS, rows, notes))
    report.add(_rounds_section(story, names))
    return trouble


def _kill_superlink(options: Options, report: Report, machines: Machines) -> list[str]:
    names = [path.name for path in machines.federation.supernodes]
    result = machines.federation.folder.joinpath(*RESULT, "superlink-killed", STRATEGY)
    peaceful = _peaceful(options)
    config = run_config(peaceful, "superlink-killed")
    killed_in = max(2, options.rounds // 2)
    rows: list[dict[str, Any]] = []
    start = time.monotonic()

    def note(what: str) -> None:
        rows.append({"s": time.monotonic() - start, "what": what})
        report.say(what)

    run = submit(machines, config)
    note(f"run submitted, {options.rounds} rounds")
    before = dict(machines.node_ids)
    _wait_for_round(result / "rounds.jsonl", killed_in, options.limit)
    time.sleep(_TRAINING)  # into the round's training
    done = next_round(result / "rounds.jsonl") - 1
    machines.kill(SUPERLINK)
    note(f"SuperLink killed with its ServerApp in round {done + 1}")
    machines.start(SUPERLINK)
    machines.wait_for_superlink(PATIENCE)
    note("started again, and well")
    machines.wait_for_supernodes(names, PATIENCE)
    note(f"says of all {len(names)} SuperNodes that they are online")
    again = submit(machines, config)
    note("the same command submitted")
    story = Story(options.rounds)
    ended: list[str] = []

    def look() -> None:
        if len(ended) == 0 and next_round(result / "rounds.jsonl") > done + 1:
            ended.append(machines.run_status(run))
            note(f"round {done + 1} is done by the new run; the killed run is {ended[0]}")

    story.status = wait_for(machines, again, (result / "model.pt").exists, options.limit, look)
    note(f"new run {story.status}; the killed one: {machines.run_status(run)}")
    story.online = machines.statuses()
    story.read(result, before, machines.federation)
    trouble = trouble_of(story)
    if not trouble and count_lines(story)["accepted"] == len(story.clients):
        report.say("the same without a federation")
        trouble += _compared(peaceful, machines, result)
        note(f"model and lines on clients {'DIFFER from' if trouble else 'are those of'} a run on {LOCAL}")
    notes = [_summary(trouble, story, 1)]
    report.add(Section("SuperLink killed in a run", ("s", "what"), rows, notes))
    return [f"after the SuperLink was killed: {text}" for text in trouble]


def _wait_for_round(path: Path, number: int, limit: float) -> None:
    deadline = time.monotonic() + limit
    while next_round(path) < number:
        if time.monotonic() > deadline:
            raise UserError(f"{path}: round {number} did not begin within {limit:.0f} s")
        time.sleep(0.2)


def _compared(options: Options, machines: Machines, result: Path) -> list[str]:
    """Run the same on the local engine, without a stop, and return what is not as there."""
    out = machines.federation.folder / f"run-{LOCAL}"
    run_command(machines, LOCAL, command_of(options, LOCAL, out), options.limit)
    ours, theirs = (StrategyLog(path).load_checkpoint()["arrays"] for path in (out / STRATEGY, result))
    found = [] if same_bits(ours, theirs) else [f"the model is not the one of the {LOCAL} engine"]
    if lines_of(out / STRATEGY / "clients.jsonl") != lines_of(result / "clients.jsonl"):
        found.append(f"lines on clients are not those of the {LOCAL} engine")
    return found


def _peaceful(options: Options) -> Options:
    """Return the options of a run without attackers, whose credibilities can be computed again."""
    settings = (*options.settings, _PEACE, *(f"strategy.{STRATEGY}.{setting}" for setting in CREDIT))
    return replace(options, strategies=(STRATEGY,), settings=settings)


def _kill_row(kill: Kill, later: Sequence[Kill], story: Story) -> dict[str, Any]:
    client = int(kill.name.rpartition("-")[2])
    again = next((other.round for other in later if other.name == kill.name), story.total + 1)
    said = named(story.of(client), kill.round, max(kill.round, again - 1))
    values = kill.at, kill.name, kill.round, said, kill.back, kill.attempts
    return dict(zip(KILLS, values, strict=True))


def _rounds_section(story: Story, names: Sequence[str]) -> Section:
    rows = []
    for line in story.rounds:
        row = {
            "round": line["round"],
            "accuracy %": percent(line["accuracy"]),
            "s": sum(line["seconds"].values()),
        }
        for client, name in enumerate(names):
            found = story.of(client).get(line["round"])
            row[name] = found["status"] if found else "not asked" if line["round"] else "–"
        rows.append(row)
    return Section("its rounds", ("round", "accuracy %", "s", *names), rows)


def _summary(trouble: list[str], story: Story, kills: int) -> str:
    if trouble:
        return f"LOST: {'; '.join(trouble)}"
    counts = count_lines(story)
    return (
        f"nothing lost: {story.total} rounds, each once; {kills} kills; "
        f"{counts['accepted']} replies accepted, {counts['failed']} failed with a reason, "
        f"{counts['refused']} refused, a line for every client asked; node ids and signing keys as before; "
        f"{counts['credibilities']} credibilities follow from those before"
    )
