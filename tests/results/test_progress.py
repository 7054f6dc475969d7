import io
from contextlib import suppress

import pytest
from rich.console import Console

from fedplat.results.progress import Bars, Display, Lines, Track, display

from . import NAN, round_record
from .device_records import simulated


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(shown: Display, rounds: int, done: int = 0) -> None:
    with shown:
        shown.begin("mean", done, rounds)
        for number in range(done + 1 if done else 0, rounds + 1):
            shown.round("mean", round_record(number, 0.5 if number % 2 == 0 else None))
        shown.end("mean")


def test_time_left_counts_down_within_a_round_and_is_not_misled_by_a_slow_first_one() -> None:
    clock = Clock()
    track = Track("mean", 10, clock)
    track.begin(0, 10)
    assert track.seconds_left() is None
    for number, now in enumerate([30.0, 32.0, 34.0, 36.0], start=1):
        clock.now = now
        track.round(round_record(number, 0.5))
    assert track.seconds_left() == pytest.approx(12.0)
    clock.now += 1.5
    assert track.seconds_left() == pytest.approx(10.5)


def test_rounds_of_an_earlier_run_say_nothing_about_the_time_left() -> None:
    clock = Clock()
    track = Track("mean", 100, clock)
    track.begin(90, 100)
    assert track.seconds_left() is None
    clock.now = 5.0
    track.round(round_record(91, 0.5))
    assert track.seconds_left() == pytest.approx(45.0)


def test_without_a_terminal_there_is_a_line_for_each_tenth_and_no_escape_code() -> None:
    file = io.StringIO()
    play(display(42, {"mean": []}, Console(file=file)), 42)
    lines = file.getvalue().splitlines()
    numbers = [line.split("round ")[1].split("/")[0] for line in lines]
    assert numbers == ["0", "5", "10", "15", "20", "25", "30", "35", "40", "42"]
    assert "\x1b" not in file.getvalue()
    assert "accuracy 50.0 %" in lines[-1]


def test_a_resumed_strategy_says_where_it_goes_on_and_keeps_its_last_figures() -> None:
    file = io.StringIO()
    known = {"mean": [round_record(n, 0.25) for n in range(4)]}
    shown = display(5, known, Console(file=file))
    with shown:
        shown.begin("mean", 3, 5)
        shown.round("mean", round_record(4, None))
        shown.end("mean")
    assert file.getvalue().splitlines()[0] == "mean: goes on after round 3 of 5"
    assert "round 4/5, accuracy 25.0 %, loss 1" in file.getvalue()


def test_in_a_terminal_every_strategy_has_one_line_at_the_end() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    shown = display(3, {"mean": [], "median": []}, console)
    assert isinstance(shown, Bars)
    play(shown, 3)
    last = console.file.getvalue().split("\x1b[2K")[-1]  # type: ignore[attr-defined]
    assert last.count("mean ") == 1
    assert last.count("median ") == 1
    assert "3/3" in last
    assert "waits" in last


def test_a_loss_that_is_not_finite_is_shown_as_such() -> None:
    track = Track("mean", 3)
    track.round(round_record(1, 0.1, NAN))
    assert track.figures() == ("10.0 %", "nan")


def test_quiet_shows_nothing() -> None:
    file = io.StringIO()
    shown = display(3, {"mean": []}, Console(file=file), quiet=True)
    assert not isinstance(shown, Lines | Bars)
    play(shown, 3)
    assert file.getvalue() == ""


def test_bars_let_go_of_the_terminal_when_a_run_fails() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    shown = display(3, {"mean": []}, console)
    with suppress(KeyboardInterrupt), shown:
        shown.begin("mean", 0, 3)
        raise KeyboardInterrupt
    show_cursor = "\x1b[?25h"
    assert console.file.getvalue().count(show_cursor) == 1  # type: ignore[attr-defined]


def test_simulated_time_is_told_beside_the_wall_time_left() -> None:
    file = io.StringIO()
    known = {"mean": [round_record(n, 0.25, simulated=simulated(n)) for n in range(3)]}
    shown = display(4, known, Console(file=file))
    with shown:
        shown.begin("mean", 2, 4)
        for number in (3, 4):
            shown.round("mean", round_record(number, 0.5, simulated=simulated(number)))
        shown.end("mean")
    lines = file.getvalue().splitlines()
    assert lines[1].startswith("mean: round 3/4, accuracy 50.0 %, loss 1, 3 min 00 s simulated, ")
    assert lines[2] == "mean: round 4/4, accuracy 50.0 %, loss 1, 4 min 00 s simulated"


@pytest.mark.parametrize(("width", "told"), [(120, True), (80, False)])
def test_bars_tell_simulated_time_where_there_is_room(width: int, told: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    shown = display(1, {"mean": []}, console)
    with shown:
        shown.begin("mean", 0, 1)
        shown.round("mean", round_record(1, 0.5, simulated=simulated(1)))
        shown.end("mean")
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("1 min 00 s simulated" in text) == told
