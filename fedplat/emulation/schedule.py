"""What each node has in each round: one table, drawn before a run, the same for every method compared.

``DeviceSchedule[node, round]`` is a :class:`Budget`; nodes count from 0, rounds from 1. A budget depends on
the seed, the settings, the node and the round: not on the order asked, nor on how many nodes or rounds
the table has (except that sharing classes out depends on the number of nodes).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..rng import generator
from .logs import Beyond, DeviceLogs
from .ranges import MOST
from .windows import over_windows

MB = 1e6
MBIT = 1e6
COLUMNS = ("node", "round", "memory_bytes", "down_bps", "up_bps", "available", "drops")
FLAGS = ("available", "drops")


@dataclass(frozen=True)
class Budget:
    """What a node may use in a round: bytes of memory, bit/s down and up; or that it is away.

    A node that ``drops`` is there and trains, and is gone before it has uploaded anything.
    """

    memory_bytes: int
    down_bps: int
    up_bps: int
    available: bool
    drops: bool = False


@dataclass(frozen=True)
class Level:
    """A device class or a state: MB, Mbit/s, the chance of being available, and the share of the nodes."""

    memory_mb: float
    down_mbps: float
    up_mbps: float
    availability: float = 1.0
    share: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            most = 1.0 if field.name == "availability" else MOST
            if not 0 <= value <= most:
                raise UserError(f"{field.name} is {value}, expected 0 to {most:g}")


@dataclass(frozen=True, eq=False)
class DeviceSchedule:
    """Budgets of all nodes and rounds as read-only int64 arrays (nodes, rounds); column 0 is round 1.

    Without ``drops``, no node drops out in the middle of a round; a node that is away cannot.
    """

    memory_bytes: NDArray[np.int64]
    down_bps: NDArray[np.int64]
    up_bps: NDArray[np.int64]
    available: NDArray[np.bool_]
    drops: NDArray[np.bool_] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        shape = np.shape(self.memory_bytes)
        if self.drops is None:
            object.__setattr__(self, "drops", np.zeros(shape, np.bool_))
        for field in fields(self):
            array = np.array(getattr(self, field.name), np.bool_ if field.name in FLAGS else np.int64)
            if array.ndim != 2 or array.shape != shape or not array.size or array.min() < 0:
                raise UserError(f"{field.name}: expected a table (nodes, rounds) of numbers, 0 or more")
            array.flags.writeable = False
            object.__setattr__(self, field.name, array)
        if bool((self.drops & ~self.available).any()):
            raise UserError("drops: a node that is away in a round cannot drop out in the middle of it")

    @property
    def nodes(self) -> int:
        """How many nodes."""
        return int(self.memory_bytes.shape[0])

    @property
    def rounds(self) -> int:
        """How many rounds."""
        return int(self.memory_bytes.shape[1])

    def __getitem__(self, key: tuple[int, int]) -> Budget:
        node, round_ = key
        if not (0 <= node < self.nodes and 1 <= round_ <= self.rounds):
            raise IndexError(
                f"node {node}, round {round_}: nodes 0 to {self.nodes - 1}, rounds 1 to {self.rounds}"
            )
        at = (node, round_ - 1)
        return Budget(
            int(self.memory_bytes[at]), int(self.down_bps[at]), int(self.up_bps[at]),
            bool(self.available[at]), bool(self.drops[at]),
        )  # fmt: skip

    def with_availability(self, available: NDArray[np.bool_]) -> DeviceSchedule:
        """Return the same with the nodes that are not ``available`` (nodes, rounds) away too.

        Raises UserError for a table of another shape.
        """
        if np.shape(available) != self.available.shape:
            raise UserError(
                f"availability of {np.shape(available)} for a schedule of {self.available.shape} "
                "(nodes, rounds): they have to be of one shape"
            )
        both = self.available & np.asarray(available, np.bool_)
        return replace(self, available=both, drops=self.drops & both)

    def with_drops(self, probability: float, seed: int) -> DeviceSchedule:
        """Return the same with nodes that drop out in the middle of a round, each time by chance.

        A node that is there may drop out; who does is drawn for all rounds, so it does not matter whether
        availability is put in before or after. Those that dropped out before, still do.
        Raises UserError unless the probability is in [0, 1].
        """
        if not 0 <= probability <= 1:
            raise UserError(f"the probability of dropping out is {probability}, expected 0 to 1")
        _check(self.nodes, self.rounds, seed)
        drawn = _draws(self.nodes, self.rounds, seed, "schedule drops", 1)[..., 0] < probability
        return replace(self, drops=self.available & (self.drops | drawn))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceSchedule):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    __hash__ = None  # type: ignore[assignment]

    def save(self, path: Path | str) -> Path:
        """Write the table as CSV, a line per node and round; :meth:`load` gives an equal schedule."""
        path = Path(path)
        node, round_ = np.indices(self.memory_bytes.shape)
        parts = (node, round_ + 1, *(getattr(self, name) for name in COLUMNS[2:]))
        table = np.stack([part.astype(np.int64).ravel() for part in parts], axis=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savetxt(path, table, fmt="%d", delimiter=",", header=",".join(COLUMNS), comments="")
        except OSError as error:
            raise UserError(f"{path}: cannot write the schedule: {error}") from error
        return path

    @classmethod
    def load(cls, path: Path | str) -> DeviceSchedule:
        """Read what :meth:`save` wrote; raises UserError with the line of whatever is malformed."""
        path = Path(path)
        rows: list[tuple[int, ...]] = []
        try:
            with path.open(newline="", encoding="utf-8") as file:
                lines = csv.reader(file, strict=True)
                if tuple(next(lines, ())) != COLUMNS:
                    raise UserError(f"{path}, line 1: expected {','.join(COLUMNS)}")
                for line in lines:
                    where = f"{path}, line {lines.line_num}"
                    if len(line) != len(COLUMNS) or not all(_whole(text) for text in line):
                        raise UserError(f"{where}: expected {len(COLUMNS)} whole numbers")
                    row = tuple(int(text) for text in line)
                    if not 1 >= row[-2] >= row[-1]:
                        raise UserError(
                            f"{where}: available and drops are 0 or 1, and what is away cannot drop out"
                        )
                    rows.append(row)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise UserError(f"{path}: cannot read the schedule: {error}") from error
        if not rows:
            raise UserError(f"{path}: no budgets after the line of column names")
        table = np.array(rows, np.int64)
        rounds = int(table[:, 1].max())
        nodes = len(table) // max(rounds, 1)
        # The product first: a wild round number must not make a table of its size.
        complete = nodes * rounds == len(table) and bool(
            (table[:, 0] == np.repeat(np.arange(nodes), rounds)).all()
            and (table[:, 1] == np.tile(np.arange(1, rounds + 1), nodes)).all()
        )
        if not complete:
            raise UserError(f"{path}: expected every round of every node once, in order: the table has gaps")
        memory, down, up, available, drops = table[:, 2:].T.reshape(5, nodes, rounds)
        return cls(memory, down, up, available.astype(np.bool_), drops.astype(np.bool_))


def trace_schedule(
    logs: DeviceLogs, nodes: int, rounds: int, seed: int, interval_s: float,
    offset_s: float | None = 0.0, beyond: Beyond = "wrap", window_s: float = 0.0,
) -> DeviceSchedule:  # fmt: skip
    """Look logs up at ``offset_s`` + round * ``interval_s``, on the clock of the logs.

    Node i has the log at place i of a seeded permutation, which begins again if there are more nodes than
    logs. ``offset_s`` None: each node begins at its own time, uniform over its log, so that nodes with the
    same log differ.

    With a ``window_s``, a round has what holds through the seconds from that time on: the least free memory,
    the harmonic mean of each speed over time, so that as many bytes get through as over the real link, and
    nothing where a speed is 0 at any time; and the node is available if it is all the time.

    Raises UserError unless the interval is above 0 and the window 0 or more.
    """
    _check(nodes, rounds, seed)
    finite = np.isfinite([interval_s, offset_s or 0.0, window_s]).all()
    if not finite or interval_s <= 0 or window_s < 0:
        raise UserError(
            f"interval {interval_s} s, offset {offset_s} s, window {window_s} s: expected finite numbers, "
            "the interval above 0 and the window 0 or more"
        )
    order = generator(seed, "schedule devices").permutation(len(logs))
    values = np.empty((4, nodes, rounds))
    for node in range(nodes):
        log = logs.logs[int(order[node % len(logs)])]
        offset = offset_s
        if offset is None:
            offset = float(log.time_s[0] + log.span_s * generator(seed, "schedule offset", node).random())
        values[:, node] = over_windows(log, offset + np.arange(1, rounds + 1) * interval_s, window_s, beyond)
    memory, down, up, available = values
    return _of_units(memory, down, up, available)


def uniform_schedule(
    nodes: int, rounds: int, seed: int, memory_mb: tuple[float, float], down_mbps: tuple[float, float],
    up_mbps: tuple[float, float], availability: float = 1.0,
) -> DeviceSchedule:  # fmt: skip
    """Draw each number uniformly between two, anew for every node and round; a node may be away by chance."""
    _check(nodes, rounds, seed)
    low, high = (Level(memory_mb[i], down_mbps[i], up_mbps[i], availability) for i in (0, 1))
    bounds = np.array([[level.memory_mb, level.down_mbps, level.up_mbps] for level in (low, high)])
    if (bounds[0] > bounds[1]).any():
        raise UserError(f"memory {memory_mb}, down {down_mbps}, up {up_mbps}: each must go from low to high")
    draws = _draws(nodes, rounds, seed, "schedule uniform", 4)
    values = bounds[0] + draws[..., :3] * (bounds[1] - bounds[0])
    memory, down, up = np.moveaxis(values, 2, 0)
    return _of_units(memory, down, up, draws[..., 3] < availability)


def class_schedule(
    nodes: int, rounds: int, seed: int, classes: Sequence[Level] | Mapping[str, Level]
) -> DeviceSchedule:
    """Give each node one class for ever: as many nodes as its share says, to the nearest.

    Which nodes they are is drawn from the seed. Only whether it is available is drawn anew each round.
    """
    _check(nodes, rounds, seed)
    levels = list(classes.values()) if isinstance(classes, Mapping) else list(classes)
    shares = np.array([level.share for level in levels])
    if not levels or shares.sum() <= 0:
        raise UserError("classes: expected at least one, with a share above 0")
    ideal = shares / shares.sum() * nodes
    counts = np.floor(ideal + 1e-9).astype(np.int64)
    for place in np.argsort(counts - ideal, kind="stable")[: nodes - int(counts.sum())]:
        counts[place] += 1
    which = generator(seed, "schedule classes").permutation(np.repeat(np.arange(len(levels)), counts))
    draws = _draws(nodes, rounds, seed, "schedule class availability", 1)[..., 0]
    return _of_levels(levels, np.repeat(which[:, None], rounds, axis=1), draws)


def markov_schedule(
    nodes: int, rounds: int, seed: int, good: Level, bad: Level, stay_good: float = 0.9, stay_bad: float = 0.7
) -> DeviceSchedule:
    """Let every node move between two states, each round staying with the chance given.

    The first round is drawn from the chain's long-run shares, so no round differs from another by itself
    (from an even chance if both states are never left).
    """
    _check(nodes, rounds, seed)
    if not (0 <= stay_good <= 1 and 0 <= stay_bad <= 1):
        raise UserError(f"chances to stay are {stay_good} and {stay_bad}, expected 0 to 1")
    leaves = (1 - stay_good) + (1 - stay_bad)
    draws = _draws(nodes, rounds, seed, "schedule markov", 2)
    in_bad = np.empty((nodes, rounds), np.int64)
    in_bad[:, 0] = draws[:, 0, 0] < ((1 - stay_good) / leaves if leaves else 0.5)
    for column in range(1, rounds):
        before = in_bad[:, column - 1]
        stays = draws[:, column, 0] < np.where(before, stay_bad, stay_good)
        in_bad[:, column] = np.where(stays, before, 1 - before)
    return _of_levels([good, bad], in_bad, draws[..., 1])


def _check(nodes: int, rounds: int, seed: int) -> None:
    if nodes < 1 or rounds < 1 or seed < 0:
        raise UserError(
            f"{nodes} nodes, {rounds} rounds, seed {seed}: expected 1 or more, and a seed of 0 or more"
        )


def _draws(nodes: int, rounds: int, seed: int, purpose: str, count: int) -> NDArray[np.float64]:
    """Return U[0, 1) draws (nodes, rounds, count); row by row, so more rounds only append."""
    return np.stack([generator(seed, purpose, node).random((rounds, count)) for node in range(nodes)])


def _of_levels(
    levels: Sequence[Level], which: NDArray[np.int64], draws: NDArray[np.float64]
) -> DeviceSchedule:
    table = np.array([[v.memory_mb, v.down_mbps, v.up_mbps, v.availability] for v in levels])
    memory, down, up, chance = np.moveaxis(table[which], 2, 0)
    return _of_units(memory, down, up, draws < chance)


def _of_units(
    memory_mb: NDArray[np.float64], down: NDArray[np.float64], up: NDArray[np.float64],
    available: NDArray[np.generic],
) -> DeviceSchedule:  # fmt: skip
    if max(float(values.max()) for values in (memory_mb, down, up)) > MOST:
        raise UserError(f"a memory or speed is above {MOST:g} MB or Mbit/s: check the units of the logs")
    memory_bytes, down_bps, up_bps = (
        np.rint(values * unit).astype(np.int64)
        for values, unit in ((memory_mb, MB), (down, MBIT), (up, MBIT))
    )
    return DeviceSchedule(memory_bytes, down_bps, up_bps, available.astype(np.bool_))


def _whole(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19 and int(text) < 1 << 63
