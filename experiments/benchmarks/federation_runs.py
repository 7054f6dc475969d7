"""What the federation's benchmark runs: a command of fedplat's, or a SuperLink and SuperNodes on loopback.

Both are machines of one federation's folder, so that nothing of either outlives the benchmark.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedplat
from fedplat.cli.common import load_config
from fedplat.deployment.plan import Federation, create
from fedplat.deployment.processes import Machines
from fedplat.errors import UserError

from .common import chosen

PARTS = ("engines", "kills")
LOCAL, SIMULATION = "local", "flower-simulation"
SIGNED = "security.signed_updates=true"
# Relative to where the ServerApp runs, which is the SuperLink's folder for work.
KEYS = "security.signing_keys=../signing-keys"
RESULT = ("superlink", "work")
PATIENCE = 400.0
"""Longest wait for one thing that a federation does, such as a node's return; the machine may be busy."""

_ASK, _ASK_AT_THE_END, _LOOK = 30.0, 3.0, 0.5


@dataclass(frozen=True)
class Options:
    """What to run: a scenario with ``settings``, on so many ``clients``; kills go on for so many ``minutes``.

    ``limit`` is the longest that one run may take, in seconds. ``keep`` is a folder that does not exist yet,
    for the federations, their logs and their results, which otherwise are deleted.
    """

    parts: tuple[str, ...] = PARTS
    scenario: str = "fed-credit-mnist-noniid:sign-flip"
    strategies: tuple[str, ...] = ("fed-credit", "mean")
    clients: tuple[int, ...] = (4,)
    rounds: int = 8
    settings: tuple[str, ...] = ("model.name=cnn-hfl", "training.steps=60")
    minutes: float = 10.0
    seed: int = 1
    limit: float = 2_400.0
    keep: Path | None = None


QUICK: dict[str, Any] = {
    "scenario": "quickstart",
    "clients": (3,),
    "rounds": 3,
    "settings": (),
    "minutes": 2.0,
}


def check(options: Options) -> None:
    """Raise UserError for a part that does not exist, or what no federation can run."""
    chosen("part", options.parts, PARTS)
    if len(options.clients) != 1 or not 2 <= options.clients[0] <= 20:
        found = ",".join(map(str, options.clients))
        raise UserError(
            f"a federation on this machine has one number of clients, from 2 to 20; found {found}"
        )
    if not 0 < options.minutes <= 24 * 60:
        raise UserError(
            f"clients are killed for more than 0 minutes and at most a day; got {options.minutes:g}"
        )
    if options.keep is not None and options.keep.exists():
        raise UserError(f"{options.keep} exists already; give a folder that does not")
    load_config(options.scenario, settings_of(options), options.seed, options.strategies)


def settings_of(options: Options, rounds: int = 0) -> list[str]:
    """Return all settings of a run as ``KEY=VALUE``, the same for every engine.

    >>> settings_of(Options(settings=("model.name=mlp",)))
    ['rounds=8', 'partition.clients=4', 'model.name=mlp', 'security.signed_updates=true']
    """
    clients = options.clients[0]
    return [f"rounds={rounds or options.rounds}", f"partition.clients={clients}", *options.settings, SIGNED]


def command_of(options: Options, engine: str, out: Path) -> list[str]:
    """Return the command that runs everything on one of this machine's engines.

    The local one trains clients one at a time, as machines of their own do: in groups, some models get other
    last digits.
    """
    words = [sys.executable, "-m", "fedplat", "run", options.scenario]
    words += ["--strategy", ",".join(options.strategies), "--seed", str(options.seed), "--out", str(out)]
    words += [word for setting in settings_of(options) for word in ("--set", setting)]
    alone = ["--group-size", "1"] if engine == LOCAL else []
    return [*words, "--engine", engine, "--device", "cpu", *alone, "--quiet"]


def run_config(options: Options, out: str, *, rounds: int = 0) -> str:
    """Return the run config that lets a federation run the same.

    >>> run_config(Options(settings=(), strategies=("mean",)), "r", rounds=2).split(" ", 4)[3:]
    ['out="r"', 'device="cpu" overrides="rounds=2 partition.clients=4 security.signed_updates=true \
security.signing_keys=../signing-keys"']
    """
    overrides = " ".join([*settings_of(options, rounds), KEYS])
    if '"' in overrides:
        raise UserError(f"settings of a federation's run cannot have quotation marks: {overrides}")
    return (
        f'scenario="{options.scenario}" strategy="{",".join(options.strategies)}" seed={options.seed} '
        f'out="{out}" device="cpu" overrides="{overrides}"'
    )


def federation_at(folder: Path, supernodes: int) -> Federation:
    """Make a federation for this machine's loopback, with ports that are free now."""
    port = free_ports(supernodes + 1)
    return create(folder, supernodes=supernodes, port=port, first_node_port=port + 1)


def free_ports(count: int) -> int:
    """Return the first of so many free ports in a row, below those that outgoing connections take."""
    # Benchmarks that start at the same time begin to look in different places.
    for first in range(20_000 + os.getpid() % 300 * 30, 31_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise UserError(f"no {count} free ports in a row on this machine")


def run_command(machines: Machines, name: str, command: Sequence[str], limit: float) -> float:
    """Run a command to its end, with its log beside those of the machines, and return its seconds.

    Raises UserError, with the log's last lines, if it fails or takes longer than ``limit`` seconds.
    """
    machines.log(name).parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    try:
        status = machines.launch(name, command).wait(limit)
    except subprocess.TimeoutExpired:
        status = -1
    seconds = time.perf_counter() - start
    machines.kill(name)
    if status:
        how = f"exit status {status}" if status > 0 else f"nothing after {limit:.0f} s"
        last = machines.log(name).read_text(errors="replace").strip().splitlines()[-3:]
        raise UserError(f"{name} ended with {how}: {' | '.join(last)}")
    return seconds


def submit(machines: Machines, config: str) -> int:
    """Start a run of fedplat's app on the federation and return its id."""
    return machines.submit(Path(fedplat.__file__).parent / "flower_app", config)


def wait_for(
    machines: Machines,
    run: int,
    done: Callable[[], bool],
    limit: float,
    look: Callable[[], None] = lambda: None,
) -> str:
    """Wait until a run has ended and return how; ``look`` is called twice a second meanwhile.

    Flower is asked now and then, and only when ``done`` more often: the answer costs seconds of a core.
    """
    start = time.monotonic()
    asked = start
    while True:
        look()
        now = time.monotonic()
        if now - asked >= (_ASK_AT_THE_END if done() else _ASK):
            asked = now
            status = machines.run_status(run)
            if status.startswith("finished"):
                return status
        if now - start > limit:
            return f"not finished after {limit:.0f} s"
        time.sleep(_LOOK)


def percent(share: float | None) -> float | None:
    """Return a share in %; None, of a round without an evaluation, stays None.

    >>> percent(0.25), percent(None)
    (25.0, None)
    """
    return None if share is None else 100 * share


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON objects; one that is still being written is left out."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
