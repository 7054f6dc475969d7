"""How a table goes on, told while it runs: one live grid in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Self

from ..results.progress import duration, tenth
from .cells import Cell, Plan, Position
from .on_disk import DONE, FAILED, MISSING, REFUSED, SKIPPED, STARTED

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table as RichTable

RUNNING = "running"
_STYLES = {DONE: "green", RUNNING: "bold cyan", FAILED: "bold red", REFUSED: "yellow"}
_MARKS = {MISSING: "·", SKIPPED: "–", FAILED: "failed", REFUSED: "cannot"}
_LINES_BESIDE = 6


class Progress:
    """How far each run of a table is."""

    def __init__(
        self, plan: Plan, states: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.plan = plan
        self.runs = plan.runs
        self.states = dict(states)
        self.accuracy: dict[str, float] = {}
        self._rounds: dict[str, int] = {}
        self._clock = clock
        self._began = clock()
        self._made = 0
        self._cells: dict[Position, list[Cell]] = {}
        for cell in plan.cells:
            self._cells.setdefault(cell.position, []).append(cell)

    def start(self, identity: str) -> None:
        """Note that a run is at work."""
        self.states[identity] = RUNNING

    def round(self, identity: str, number: int, accuracy: float | None) -> None:
        """Note how far it is; the first time tells where it goes on."""
        if identity in self._rounds:
            self._made += max(0, number - self._rounds[identity])
        self._rounds[identity] = number
        if accuracy is not None:
            self.accuracy[identity] = accuracy

    def end(self, identity: str, state: str) -> None:
        """Note that it is over."""
        self.states[identity] = state

    def counts(self) -> str:
        """Return how many runs are in which state."""
        count = Counter(self.states.values())
        waiting = count[MISSING] + count[STARTED]
        texts = [f"{count[DONE]} done", f"{count[RUNNING]} running", f"{waiting} waiting"]
        texts += [f"{count[FAILED]} failed"] if count[FAILED] else []
        texts += [f"{count[REFUSED]} cannot work"] if count[REFUSED] else []
        return ", ".join(texts)

    def seconds_left(self) -> float | None:
        """Return the time left if rounds go on as fast as so far; None as long as that is not known."""
        if not self._made:
            return None
        open_ = [i for i, state in self.states.items() if state in (RUNNING, MISSING, STARTED)]
        rounds = sum(self.runs[i].config.rounds - self._rounds.get(i, 0) for i in open_)
        return rounds * (self._clock() - self._began) / self._made

    def summary(self) -> str:
        """Return the counts and the time left."""
        left = self.seconds_left()
        return self.counts() if left is None else f"{self.counts()}, about {duration(left)} left"

    def name(self, identity: str) -> str:
        """Return what people call a run."""
        cell = self.runs[identity]
        shown = [
            next(value.shown for value in axis.values if value.name == name)
            for axis, name in zip(self.plan.table.axes, cell.position, strict=True)
        ]
        seed = f", seed {cell.seed}" if self.plan.seeds > 1 else ""
        return f"{', '.join(shown)}{seed}"

    def mark(self, position: Position) -> tuple[str, str]:
        """Return what stands in a cell of the grid, and its style."""
        cells = self._cells.get(position, [])
        states = [self.states[cell.identity] for cell in cells]
        if not states:
            return _MARKS[SKIPPED], "dim"
        state = next(s for s in (FAILED, REFUSED, RUNNING, STARTED, MISSING, DONE) if s in states)
        style = _STYLES.get(state, "dim")
        if state == DONE:
            known = [self.accuracy[c.identity] for c in cells if c.identity in self.accuracy]
            return (f"{100 * sum(known) / len(known):.1f}" if known else "done"), style
        if state == RUNNING:
            cell = next(c for c in cells if self.states[c.identity] == RUNNING)
            return f"{self._rounds.get(cell.identity, 0)}/{cell.config.rounds}", style
        if state in (STARTED, MISSING) and DONE in states:
            return f"{states.count(DONE)} of {len(states)}", style
        return _MARKS.get(state, "begun"), style


class Silent:
    """Says nothing."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def start(self, identity: str) -> None:
        """A run starts, or goes on."""
        self.progress.start(identity)

    def round(self, identity: str, number: int, accuracy: float | None) -> None:
        """A run has come this far."""
        self.progress.round(identity, number, accuracy)

    def end(self, identity: str, state: str, reason: str) -> None:
        """A run is over."""
        self.progress.end(identity, state)

    def note(self, text: str) -> None:
        """Something is worth knowing."""

    def tick(self) -> None:
        """Time passes."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Lines(Silent):
    """A line for every run that starts and ends, and for about one in ten rounds."""

    def __init__(self, progress: Progress, console: Console) -> None:
        super().__init__(progress)
        self._file = console.file

    def start(self, identity: str) -> None:
        """Say so."""
        super().start(identity)
        self.note(f"{self.progress.name(identity)}: starts")

    def round(self, identity: str, number: int, accuracy: float | None) -> None:
        """Say so if it is this round's turn."""
        super().round(identity, number, accuracy)
        total = self.progress.runs[identity].config.rounds
        if number and number < total and number % tenth(total) == 0:
            shown = "" if accuracy is None else f", accuracy {100 * accuracy:.1f} %"
            self.note(f"{self.progress.name(identity)}: round {number}/{total}{shown}")

    def end(self, identity: str, state: str, reason: str) -> None:
        """Say how it ended, and how the table stands."""
        super().end(identity, state, reason)
        accuracy = self.progress.accuracy.get(identity)
        shown = f", accuracy {100 * accuracy:.1f} %" if state == DONE and accuracy is not None else ""
        told = {REFUSED: f"cannot work: {reason}", FAILED: f"failed: {reason}"}.get(state, f"{state}{shown}")
        self.note(f"{self.progress.name(identity)}: {told} ({self.progress.summary()})")

    def note(self, text: str) -> None:
        """Print a line, whole, however long it is."""
        self._file.write(f"{text}\n")
        self._file.flush()


class Grid(Silent):
    """The table itself on the screen, its cells filling; of many blocks those with running cells alone."""

    def __init__(self, progress: Progress, console: Console) -> None:
        super().__init__(progress)
        self._console = console
        self._live: Live | None = None

    def __enter__(self) -> Self:
        from rich.live import Live

        self._live = Live(self.picture(), console=self._console, refresh_per_second=4, transient=True)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.update(self.picture())
            self._live.stop()

    def end(self, identity: str, state: str, reason: str) -> None:
        """Say why it failed, above the grid, where it stays."""
        super().end(identity, state, reason)
        if state in (FAILED, REFUSED):
            self.note(f"{self.progress.name(identity)}: {_MARKS[state]}: {reason}")
        self.tick()

    def note(self, text: str) -> None:
        """Print a line above the grid."""
        self._console.print(text, soft_wrap=True, highlight=False)

    def tick(self) -> None:
        """Draw it anew."""
        if self._live:
            self._live.update(self.picture())

    def picture(self) -> RichTable:
        """Return blocks one under another, as many as fit, and the counts."""
        from rich.table import Table

        stack = Table.grid()
        room = self._console.height - _LINES_BESIDE
        rows = len(self.progress.plan.table.rows.values) + 4
        blocks = self._by_interest()
        shown = blocks[: max(1, room // rows)]
        for block in shown:
            stack.add_row(self._block(block))
        if hidden := len(blocks) - len(shown):
            stack.add_row(f"and {hidden} more block{'s' * (hidden > 1)}")
        stack.add_row(self.progress.summary())
        return stack

    def _by_interest(self) -> list[Position]:
        """Return the blocks, those with running cells first."""
        axes = self.progress.plan.table.blocks
        blocks = list(itertools.product(*([value.name for value in axis.values] for axis in axes)))
        busy = {
            cell.position[:-2]
            for identity, cell in self.progress.runs.items()
            if self.progress.states[identity] == RUNNING
        }
        return sorted(blocks, key=lambda block: block not in busy)

    def _block(self, block: Position) -> RichTable:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = self.progress.plan.table
        title = ", ".join(
            f"{axis.shown} {next(v.shown for v in axis.values if v.name == name)}"
            for axis, name in zip(table.blocks, block, strict=True)
        )
        grid = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
        grid.add_column(Text(table.rows.shown))
        for column in table.columns.values:
            grid.add_column(Text(column.shown), justify="right", no_wrap=True)
        for row in table.rows.values:
            marks = [self.progress.mark((*block, row.name, column.name)) for column in table.columns.values]
            grid.add_row(Text(row.shown), *(Text(text, style) for text, style in marks))
        return grid


def view(progress: Progress, console: Console, quiet: bool = False) -> Silent:
    """Return the display that suits where the output goes."""
    if quiet:
        return Silent(progress)
    return (Grid if console.is_terminal else Lines)(progress, console)
