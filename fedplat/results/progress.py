"""How a run goes on, told while it runs: bars in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from .tables import NOTHING
from .values import finite

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

Clock = Callable[[], float]


class Display:
    """An observer of a run that may own part of the screen inside its ``with`` block; this one is silent."""

    def note(self, text: str) -> None:
        """Something is worth knowing before the first strategy starts."""

    def begin(self, strategy: str, done: int, total: int) -> None:
        """A strategy starts, or goes on after ``done`` rounds."""

    def round(self, strategy: str, record: Mapping[str, Any]) -> None:
        """A round is over; ``record`` is its line of ``rounds.jsonl``."""

    def end(self, strategy: str) -> None:
        """A strategy is finished."""

    def __enter__(self) -> Self:
        """Return the display."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Let go of the screen."""


def display(
    rounds: int, known: Mapping[str, Sequence[Mapping[str, Any]]], console: Console, quiet: bool = False
) -> Display:
    """Return the display that suits where the output goes.

    ``known`` has the strategies to come and, for a resumed run, the records of the rounds done before.
    """
    if quiet:
        return Display()
    tracks = {name: Track(name, rounds) for name in known}
    for name, records in known.items():
        for record in records:
            tracks[name].look_at(record)
    return (Bars if console.is_terminal else Lines)(tracks, console)


@dataclass
class Track:
    """How far one strategy is; ``resumed`` rounds were done before this run."""

    name: str
    total: int
    clock: Clock = time.monotonic
    done: int = 0
    resumed: int = 0
    accuracy: float | None = None
    loss: float | None = None
    simulated: float | None = None
    own_tests: float | None = None
    own_models: float | None = None
    started: float | None = None
    last_round: float = 0.0
    seconds: float | None = None
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=15))

    def begin(self, done: int, total: int) -> None:
        """Note the start."""
        self.done = self.resumed = done
        self.total = total
        self.started = self.last_round = self.clock()

    def round(self, record: Mapping[str, Any]) -> None:
        """Note that a round is over."""
        now = self.clock()
        if record["round"] > self.done:
            self.recent.append(now - self.last_round)
        self.done, self.last_round = record["round"], now
        self.look_at(record)

    def look_at(self, record: Mapping[str, Any]) -> None:
        """Take over the figures of a round; those of a round without an evaluation leave the last ones be."""
        if record.get("accuracy") is not None:
            self.accuracy, self.loss = finite(record["accuracy"]), finite(record.get("loss"))
        if "own_tests" in record:
            self.own_tests = finite(record["own_tests"]["mean"])
        if "own_tests_after" in record:
            self.own_models = finite(record["own_tests_after"]["mean"])
        if record.get("simulated"):
            self.simulated = (self.simulated or 0.0) + (finite(record["simulated"]["seconds"]) or 0.0)

    def end(self) -> None:
        """Note the end."""
        if self.started is not None:
            self.seconds = self.clock() - self.started

    def seconds_left(self) -> float | None:
        """Return the time left at the speed of late, counting down within a round; None if not known."""
        if not self.recent:
            return None
        # The median, because a first round also starts the workers.
        left = median(self.recent) * (self.total - self.done) - (self.clock() - self.last_round)
        return max(0.0, left)

    def time(self) -> str:
        """Return the time left, or how long it took."""
        if self.seconds is not None:
            return "was done" if self.resumed == self.total else duration(self.seconds)
        left = self.seconds_left()
        return "" if left is None else f"{duration(left)} left"

    def figures(self) -> tuple[str, str]:
        """Return accuracy and loss as text."""
        accuracy = NOTHING if self.accuracy is None else f"{100 * self.accuracy:.1f} %"
        # A loss without a value beside an accuracy with one is a loss that was not finite.
        diverged = self.loss is None and self.accuracy is not None
        loss = "nan" if diverged else NOTHING if self.loss is None else f"{self.loss:.3g}"
        return accuracy, loss

    def own_accuracy(self) -> str:
        """Return how good the global model and the clients' own are for them; "" without own tests."""
        named = (("own tests", self.own_tests), ("own models", self.own_models))
        return ", ".join(f"{name} {100 * value:.1f} %" for name, value in named if value is not None)

    def simulated_time(self) -> str:
        """Return how long the rounds so far would have taken on the emulated devices, "" without any."""
        if self.simulated is None:
            return ""
        # On fast devices and small models a round takes a fraction of a second.
        text = f"{self.simulated:.2g} s" if self.simulated < 9.5 else duration(self.simulated)
        return f"{text} simulated"


def duration(seconds: float) -> str:
    """Return a time span in the form people say it.

    >>> duration(7.4), duration(95), duration(7380)
    ('7 s', '1 min 35 s', '2 h 03 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Lines(Display):
    """Plain lines: the start, about one in ten rounds, and the last one of each strategy."""

    def __init__(self, tracks: dict[str, Track], console: Console) -> None:
        self._tracks = tracks
        self._console = console

    def note(self, text: str) -> None:
        """Print a line."""
        self._print(text)

    def begin(self, strategy: str, done: int, total: int) -> None:
        """Say if a strategy goes on or was done."""
        self._tracks[strategy].begin(done, total)
        if done >= total:
            self._print(f"{strategy}: was done before")
        elif done:
            self._print(f"{strategy}: goes on after round {done} of {total}")

    def round(self, strategy: str, record: Mapping[str, Any]) -> None:
        """Print a line if it is this round's turn."""
        track = self._tracks[strategy]
        track.round(record)
        if track.done % tenth(track.total) and track.done != track.total:
            return
        accuracy, loss = track.figures()
        left = track.time() if track.done < track.total else ""
        line = f"{strategy}: round {track.done}/{track.total}, accuracy {accuracy}, loss {loss}"
        self._print(", ".join(filter(None, [line, track.own_accuracy(), track.simulated_time(), left])))

    def end(self, strategy: str) -> None:
        """Note the end."""
        self._tracks[strategy].end()

    def _print(self, line: str) -> None:
        # Rich would break lines at 80 columns where there is no terminal; log files want them whole.
        self._console.file.write(f"{line}\n")
        self._console.file.flush()


def tenth(total: int) -> int:
    """Return a tenth of the rounds, rounded up.

    >>> tenth(30), tenth(4), tenth(101)
    (3, 1, 11)
    """
    return -(-total // 10)


class Bars(Display):
    """One bar per strategy: name, bar, round, accuracy, loss, time left.

    The screen is only owned between a strategy's begin and end: the thread that redraws it must not live
    while the next strategy forks its workers, and nothing that they inherit may be redirected to it.
    """

    def __init__(self, tracks: dict[str, Track], console: Console) -> None:
        self._tracks = tracks
        self._console = console
        self._live: Live | None = None

    def note(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, soft_wrap=True, highlight=False)

    def begin(self, strategy: str, done: int, total: int) -> None:
        """Show the bars."""
        from rich.live import Live

        self._tracks[strategy].begin(done, total)
        self._stop()
        self._live = Live(
            get_renderable=self._table, console=self._console, refresh_per_second=4, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._live.start(refresh=True)

    def round(self, strategy: str, record: Mapping[str, Any]) -> None:
        """Move a bar."""
        self._tracks[strategy].round(record)

    def end(self, strategy: str) -> None:
        """Take the bars away until the next strategy starts."""
        self._tracks[strategy].end()
        self._stop()

    def __exit__(self, *raised: object) -> None:
        """Leave the bars as they are on the screen."""
        self._stop()
        if any(track.started is not None for track in self._tracks.values()):
            self._console.print(self._table())

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2, 0, 0), expand=False)
        wide = self._console.width >= 100
        simulated = wide and any(track.simulated is not None for track in self._tracks.values())
        own = wide and any(track.own_accuracy() for track in self._tracks.values())
        for place in range(6 + simulated + own):
            table.add_column(justify="left" if place < 2 else "right", no_wrap=True)
        for track in self._tracks.values():
            accuracy, loss = track.figures()
            waiting = track.started is None
            table.add_row(
                Text(track.name, style="dim" if waiting else "bold"),
                _bar(track, 30 if wide else 14),
                f"round {track.done}/{track.total}" if wide else f"{track.done}/{track.total}",
                "waits" if waiting else f"accuracy {accuracy}" if wide else accuracy,
                "" if waiting else f"loss {loss}",
                *([track.own_accuracy()] if own else []),
                *([track.simulated_time()] if simulated else []),
                track.time(),
            )
        return table


def _bar(track: Track, width: int) -> ProgressBar:
    from rich.progress_bar import ProgressBar

    # Rich's own colours for done and to do look the same in a terminal of 16 colours.
    return ProgressBar(
        total=track.total, completed=track.done, width=width,
        style="bright_black", complete_style="cyan", finished_style="green",
    )  # fmt: skip
