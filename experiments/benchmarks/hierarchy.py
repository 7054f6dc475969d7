"""``fedplat benchmark hierarchy``: what policies of client-to-edge association cost, without any training.

Two tables. The first is of rounds: seconds, joules and labels of each policy in the same drawn worlds. The
second is of decisions: how long they take in a large world, also as multiples of those of Plan A with Plan B.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedplat.errors import UserError
from fedplat.strategies.association.base import NOWHERE
from fedplat.strategies.association.checks import check_decision
from fedplat.strategies.association.simulate import simulate

from .common import Report, Section, chosen, middle
from .hierarchy_worlds import CLOUD, OURS, POLICIES, Drawn, drawn

PARTS = ("rounds", "decisions")
ROUND_COLUMNS = (
    *("policy", "T s", "E J", "U", "U asked", "U decided", "KLD", "worst KLD", "met %", "clients"),
    *("asked", "signals", "churn %", "decide ms", f"x {OURS}"),
)
DECISION_COLUMNS = (
    "policy",
    "clients",
    "edges",
    "before s",
    "decide ms",
    "slowest ms",
    f"x {OURS}",
    "rounds",
)
_PER_EDGE = 50
_MOST_TIMED = 10


@dataclass(frozen=True)
class Options:
    """What to run: ``repeats`` worlds of 60 clients, and one world of each number of ``clients`` to time.

    A policy that has decided for ``limit`` seconds, what it does before the first round included, is timed
    no further.
    """

    parts: tuple[str, ...] = PARTS
    policies: tuple[str, ...] = ()
    clients: tuple[int, ...] = (1000,)
    repeats: int = 5
    rounds: int = 60
    seed: int = 1
    limit: float = 20.0


QUICK: dict[str, Any] = {"repeats": 1, "rounds": 20, "clients": (200,), "limit": 5.0}


def check(options: Options) -> None:
    """Raise UserError for a part or policy that does not exist, or too few clients."""
    chosen("part", options.parts, PARTS)
    chosen("policy", options.policies, POLICIES)
    if few := [clients for clients in options.clients if clients < 1]:
        raise UserError(f"numbers of clients are 1 or more; found {few[0]}")


def measure(options: Options, report: Report) -> None:
    """Fill the report, one section per part."""
    report.options = asdict(options)
    if "rounds" in options.parts:
        report.add(rounds_section(options, report.say))
    if "decisions" in options.parts:
        for clients in sorted(options.clients):
            report.add(decisions_section(clients, options, report.say))


def rounds_section(options: Options, say: Callable[[str], None]) -> Section:
    """Return the table of rounds: means over rounds and worlds."""
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(options.seed, options.seed + options.repeats):
        edges = drawn(60, 5, options.rounds, seed)
        for name in chosen("policy", options.policies, POLICIES):
            say(f"{name}, world {seed}")
            there = edges.for_cloud() if name == CLOUD else edges
            result = simulate(there.world, there.states, there.limits, there.prices, POLICIES[name](), seed)
            found.setdefault(name, []).append(result.means())
    means = {
        name: {key: float(np.mean([one[key] for one in of])) for key in of[0]} for name, of in found.items()
    }
    ours = means[OURS]["decision_seconds"] if OURS in means else float("nan")
    rows = [
        dict(zip(ROUND_COLUMNS, (name, *_round_row(mean, ours)), strict=True)) for name, mean in means.items()
    ]
    notes = [
        f"60 clients, 5 edges of 5 to 10 clients, 4 edge rounds; {options.rounds} rounds, worlds of "
        f"{options.repeats} seeds, the same for all; random-least costs 1 in each",
        "met: edges with enough clients and a KLD of at most 0.3, of all edges in all rounds",
        "U asked adds 10 ms and 5 mJ per client asked, U decided also the time of deciding on this machine",
        "cloud: one edge, which is the cloud, ten times as far; labels there are those of all together",
    ]
    return Section("rounds", ROUND_COLUMNS, rows, notes)


def _round_row(mean: dict[str, float], ours: float) -> tuple[float, ...]:
    costs = (mean["seconds"], mean["joules"], mean["cost"], mean["cost_asked"], mean["cost_decided"])
    labels = (mean["divergence_mean"], mean["divergence_max"], 100 * mean["healthy"])
    signals = (mean["clients"], mean["probed"], mean["signals"], 100 * mean["churn"])
    return (*costs, *labels, *signals, 1e3 * mean["decision_seconds"], mean["decision_seconds"] / ours)


@dataclass(frozen=True)
class Timed:
    """Real seconds: of what comes before the first round, and of each decision."""

    before: float
    decisions: list[float]


def timed(name: str, there: Drawn, limit: float, seed: int) -> Timed:
    """Let a policy decide, ten rounds at most; all deliver."""
    policy = POLICIES[name]()
    start = time.perf_counter()
    policy.prepare(there.world, there.limits, there.prices, seed)
    before = time.perf_counter() - start
    decisions: list[float] = []
    for state in there.states[:_MOST_TIMED]:
        start = time.perf_counter()
        decision = policy.decide(state)
        decisions.append(time.perf_counter() - start)
        check_decision(there.world, state, there.limits, decision)
        policy.observe(state, decision, decision.edge_of != NOWHERE)
        if before + sum(decisions) > limit:
            break
    return Timed(before, decisions)


def decisions_section(clients: int, options: Options, say: Callable[[str], None]) -> Section:
    """Return the table of decisions in one world, with an edge for every 50 clients."""
    edges = max(2, clients // _PER_EDGE)
    there = drawn(clients, edges, _MOST_TIMED, options.seed)
    results: dict[str, Timed] = {}
    for name in chosen("policy", options.policies, POLICIES):
        say(f"{name}, {clients} clients")
        place = there.for_cloud() if name == CLOUD else there
        results[name] = timed(name, place, options.limit, options.seed)
    ours = middle(results[OURS].decisions) if OURS in results else float("nan")
    rows = []
    for name, result in results.items():
        at, each = middle(result.decisions), len(result.decisions)
        values = (
            *(name, clients, 1 if name == CLOUD else edges, result.before),
            *(1e3 * at, 1e3 * max(result.decisions), at / ours, each),
        )
        rows.append(dict(zip(DECISION_COLUMNS, values, strict=True)))
    notes = [
        "wall time of one thread: the median over rounds, the slowest of them, and what is done once before",
    ]
    return Section(f"decisions for {clients:,} clients", DECISION_COLUMNS, rows, notes)
