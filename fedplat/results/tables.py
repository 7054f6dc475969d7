"""The comparison of strategies as a table: for the terminal, Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .simulated import TARGETS

if TYPE_CHECKING:
    from rich.table import Table as RichTable

NOTHING = "–"

_LONG = 1e5
_HEADING_WIDTH = 8

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One figure of a strategy: its CSV name, its heading, where it is found and how it is written.

    ``rank`` says how soon a terminal of 80 columns has room for it; 0 is never. ``{target}`` in a heading
    is the accuracy in % at which costs are compared, ``{joules}`` a unit of energy that fits. Without
    ``zero`` a 0 alone does not show the column. Without ``digits`` there are three significant ones.
    """

    key: str
    heading: str
    value: Callable[[Row], float | None]
    scale: float = 1.0
    digits: int | None = 2
    rank: int = 0
    zero: bool = True

    def known(self, row: Row) -> bool:
        """Return whether this strategy has something to show."""
        value = self.value(row)
        return value is not None and (self.zero or value != 0)

    def text(self, row: Row) -> str:
        """Return the figure as it is shown."""
        value = self.value(row)
        if value is None:
            return NOTHING
        value *= self.scale
        if self.digits is None:
            return three_digits(value)
        # A diverging loss may have a dozen digits.
        return f"{value:,.{self.digits}f}" if abs(value) < _LONG else f"{value:.2e}"


def three_digits(value: float) -> str:
    """Return a number with three significant digits; before the point none is cut.

    >>> three_digits(12345.6), three_digits(0.01234), three_digits(60.0), three_digits(0.0)
    ('12,346', '0.0123', '60.0', '0')
    """
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1e-3 else f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"


def _best(row: Row) -> float | None:
    best: float | None = row["best_over_rounds"]["accuracy"]
    return best


def _worst(row: Row) -> float | None:
    return row["worst_class"]["accuracy"] if row["worst_class"] else None


def _success(row: Row) -> float | None:
    return max((rate for rate in row["attack_success"].values() if rate is not None), default=None)


def _found(key: str) -> Callable[[Row], float | None]:
    return lambda row: row["detection"].get(key)


def _megabytes(row: Row) -> float | None:
    return (row["bytes_down"] + row["bytes_up"]) / row["rounds"] if row["rounds"] else None


def _simulated(key: str) -> Callable[[Row], float | None]:
    return lambda row: (row.get("simulated") or {}).get(key)


def _to_target(key: str) -> Callable[[Row], float | None]:
    return lambda row: ((row.get("simulated") or {}).get("to_target") or {}).get(key)


def _own(when: str, key: str) -> Callable[[Row], float | None]:
    return lambda row: (row.get(when) or {}).get(key)


def _edges(key: str) -> Callable[[Row], float | None]:
    return lambda row: (row.get("edges") or {}).get(key)


COLUMNS = (
    Column("accuracy", "accuracy %", lambda row: row["accuracy"], 100, rank=1),
    Column(
        "accuracy_mean_of_last", "mean of last 5 %", lambda row: row["accuracy_mean_of_last"], 100, rank=8
    ),
    Column("worst_class_accuracy", "worst class %", _worst, 100, rank=6),
    Column("loss", "loss", lambda row: row["loss"], digits=3, rank=9),
    Column("accuracy_loss", "loss to clean run", lambda row: row.get("accuracy_loss"), 100, rank=2),
    Column("attack_success", "attack success %", _success, 100, digits=1, rank=2),
    Column("attackers_weight", "attackers' weight %", lambda row: row["attackers_weight"], 100, 1, rank=3),
    Column("detection_precision", "detection precision %", _found("precision"), 100, digits=1, rank=5),
    Column("detection_recall", "detection recall %", _found("recall"), 100, digits=1, rank=5),
    Column("detection_f1", "detection F1 %", _found("f1"), 100, digits=1),
    Column("honest_left_out", "honest left out %", _found("honest_left_out"), 100, digits=1, rank=7),
    Column("first_round_all_out", "first round all out", _found("first_all_out"), digits=0),
    Column("all_out_since", "all out since round", _found("all_out_since"), digits=0),
    Column("epsilon", "epsilon", lambda row: row.get("epsilon"), rank=2),
    Column("own_tests", "own tests %", _own("own_tests", "mean"), 100, rank=2),
    Column("own_tests_worst", "own tests, worst 10 %", _own("own_tests", "worst-10"), 100, rank=6),
    Column("own_tests_spread", "own tests, spread", _own("own_tests", "spread"), 100, rank=9),
    Column("own_models", "own models %", _own("own_tests_after", "mean"), 100, rank=2),
    Column("own_models_worst", "own models, worst 10 %", _own("own_tests_after", "worst-10"), 100, rank=3),
    Column("own_models_spread", "own models, spread", _own("own_tests_after", "spread"), 100, rank=8),
    Column(
        "replies_left_out", "replies refused", lambda row: row["refused"] + row["failed"], digits=0, rank=10
    ),
    Column(
        "simulated_seconds_per_round",
        "simulated s per round",
        _simulated("per_round_seconds"),
        1,
        None,
        rank=4,
    ),
    Column("joules", "{joules}", _simulated("joules"), 1, None, rank=4),
    Column("late", "late", _simulated("late"), digits=0, rank=4, zero=False),
    Column("out_of_memory", "out of memory", _simulated("out_of_memory"), digits=0, rank=4, zero=False),
    Column("dropped", "dropped", _simulated("dropped"), digits=0, rank=4, zero=False),
    Column(
        "simulated_seconds_to_target", "simulated s to {target} %", _to_target("seconds"), 1, None, rank=3
    ),
    Column("joules_to_target", "{joules} to {target} %", _to_target("joules"), 1, None, rank=7),
    Column("bytes_to_target", "MB to {target} %", _to_target("bytes"), 1e-6, None, rank=8),
    Column("edges_healthy", "healthy edges %", _edges("healthy"), 100, digits=1, rank=5),
    Column("edges_cost", "cost per round", _edges("cost"), 1, None, rank=4),
    Column("seconds_per_round", "s per round", lambda row: row["seconds"]["per_round"]["all"], rank=4),
    Column("bytes_per_round", "MB per round", _megabytes, 1e-6),
    Column("best_accuracy_over_rounds", "(best over rounds %)", _best, 100),
)

EXPLANATION = (
    "Accuracy, worst class and loss are those of the model after the last round, on the test set; "
    "the mean is over the last 5 evaluations, without the initial model. "
    "Attackers' weight is the share of each new model that came from attackers, averaged over the rounds. "
    "Attack success is the rate of the most successful attack: how many test samples it had predicted as it "
    "wants. Detection precision, recall, F1 and honest clients left out are means over the last 5 rounds; "
    "a strategy flags the clients it calls malicious or, if it gives no verdicts, those it gives no weight. "
    "Loss to clean run is the difference in accuracy, in points, to the same strategy when nobody attacks. "
    "All out: no attacker had any weight, in the first such round and from which round to the end. "
    "Epsilon is the differential privacy that the client who spent most has spent, at the delta given below. "
    "The best accuracy over the rounds is picked by looking at the test set: it is given for orientation "
    "and says nothing about what a strategy reaches."
)

DEVICES_EXPLANATION = (
    "Simulated s are simulated seconds: what the rounds would have taken on the devices of the schedule. "
    "They have nothing to do with the other s, the wall time of the run. J and kJ are the energy that the "
    "devices spent, on training and on their links. Late, out of memory and dropped count replies over "
    "all rounds that a device did not deliver: it would have been too late, its memory was too small for "
    "the training, or it was gone before it had sent. The costs to an accuracy are those up to the first "
    "evaluation that reaches it, with bytes of both directions; it is the highest of {targets} % that "
    "every strategy reached, leaving aside those that did not reach the lowest."
)

EDGES_EXPLANATION = (
    "Healthy edges are the share of edges and rounds with as many clients, and as good a mix of their "
    "labels, as an edge should have. The cost of a round is that of its simulated seconds and joules, with 1 "
    "for random clients at random edges."
)


OWN_TESTS_EXPLANATION = (
    "Own tests are the accuracy of the global model on the samples that each client holds out: the mean over "
    "the clients that do not attack, the mean of the worst tenth of them, and the standard deviation in "
    "points. Own models are the same of what each client has for itself: the model that its strategy makes "
    "its own or, where there is none, the one that it had just after its local training, of the clients that "
    "took part in the round."
)


def shown_columns(summary: Row) -> list[Column]:
    """Return the columns that hold a figure for at least one strategy, in their order."""
    rows = list(summary["strategies"].values())
    target = f"{100 * (summary.get('target') or 0):.3g}"
    most = max((_simulated("joules")(row) or 0.0 for row in rows), default=0.0)
    unit, scale = ("kJ", 1e-3) if most >= 1e3 else ("J", 1.0)
    shown = []
    for column in COLUMNS:
        if any(map(column.known, rows)):
            heading = column.heading.replace("{target}", target).replace("{joules}", unit)
            energy = column.heading.startswith("{joules}")
            shown.append(replace(column, heading=heading, scale=scale if energy else column.scale))
    return shown


def row_names(summary: Row) -> list[str]:
    """Return the strategies' names, with what is special about their runs.

    >>> rounds = {"rounds": 3, "finished": False, "diverged": False}
    >>> row_names({"rounds": 30, "strategies": {"mean": rounds}})
    ['mean (round 3 of 30)']
    """
    names = []
    for name, row in summary["strategies"].items():
        whole = row["finished"] and row["rounds"] >= summary["rounds"]
        remarks = [] if whole else [f"round {row['rounds']} of {summary['rounds']}"]
        remarks += ["diverged"] if row["diverged"] else []
        names.append(f"{name} ({', '.join(remarks)})" if remarks else name)
    return names


def cells(summary: Row) -> list[list[str]]:
    """Return the shown cells as text, the strategy's name first."""
    columns = shown_columns(summary)
    rows = summary["strategies"].values()
    return [
        [name, *(column.text(row) for column in columns)]
        for name, row in zip(row_names(summary), rows, strict=True)
    ]


def explanation(summary: Row) -> str:
    """Say what the figures are, those of emulated devices and of edges only where there are any."""
    rows, said = summary["strategies"].values(), [EXPLANATION]
    if any(row.get("simulated") for row in rows):
        targets = ", ".join(f"{100 * target:.3g}" for target in TARGETS)
        said.append(DEVICES_EXPLANATION.format(targets=targets))
    if any(row.get("own_tests") or row.get("own_tests_after") for row in rows):
        said.append(OWN_TESTS_EXPLANATION)
    if any(row.get("edges") for row in rows):
        said.append(EDGES_EXPLANATION)
    return " ".join(said)


def headings(summary: Row) -> list[str]:
    """Return the headings that belong to :func:`cells`."""
    return ["strategy", *(column.heading for column in shown_columns(summary))]


def rich_table(summary: Row) -> RichTable:
    """Return the comparison for a terminal of 80 columns; the report has all columns."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    columns = _fitting(summary, 80)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("strategy", overflow="fold", vertical="bottom")
    for index, column in enumerate(columns):
        heading = Text("\n".join(_heading_lines(column)))
        table.add_column(heading, justify="right", no_wrap=True, style="" if index else "bold")
    for name, row in zip(row_names(summary), summary["strategies"].values(), strict=True):
        table.add_row(Text(name.replace(" (", "\n(")), *(Text(column.text(row)) for column in columns))
    return table


def _heading_lines(column: Column) -> list[str]:
    return textwrap.wrap(column.heading, _HEADING_WIDTH, break_long_words=False)


def _fitting(summary: Row, width: int) -> list[Column]:
    """Return the columns for so many characters: those of the first ranks that fit, in their usual order."""
    rows, names = summary["strategies"].values(), row_names(summary)
    left = width - 2 - max((len(line) for name in names for line in name.split(" (")), default=0)
    shown = shown_columns(summary)
    ranked = sorted((column for column in shown if column.rank), key=lambda column: column.rank)
    chosen = []
    for column in ranked:
        texts = [*_heading_lines(column), *(column.text(row) for row in rows)]
        left -= 2 + max(map(len, texts))
        if left < 0:
            break
        chosen.append(column)
    return [column for column in shown if column in chosen]


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """Return a Markdown table; the first ``text_columns`` are set left, the others right.

    >>> print(markdown_table(["name", "n"], [["a|b", "1"]]))
    | name | n |
    | :-- | --: |
    | a\\|b | 1 |
    """
    rules = [":--" if index < text_columns else "--:" for index in range(len(heads))]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, rules, *escaped])


def markdown(summary: Row) -> str:
    """Return the comparison as a Markdown table."""
    return markdown_table(headings(summary), cells(summary))


def csv_text(summary: Row) -> str:
    """Return the comparison as CSV: all columns, unrounded, shares between 0 and 1, bytes, joules and s."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        ["strategy", "rounds", "finished", "diverged", *(column.key for column in COLUMNS), "target"]
    )
    for name, row in summary["strategies"].items():
        state = [name, row["rounds"], str(row["finished"]).lower(), str(row["diverged"]).lower()]
        values = [*(column.value(row) for column in COLUMNS), summary.get("target")]
        writer.writerow([*state, *("" if value is None else value for value in values)])
    return file.getvalue()


def latex(summary: Row) -> str:
    r"""Return the comparison as a LaTeX ``tabular`` that needs the package booktabs."""
    heads = headings(summary)
    lines = [
        f"% {summary['scenario']}, seed {summary['seed']}, configuration {summary['digest']}; needs booktabs",
        rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        r"\toprule",
        " & ".join(map(escape_latex, heads)) + r" \\",
        r"\midrule",
        *(" & ".join(map(escape_latex, row)) + r" \\" for row in cells(summary)),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", NOTHING: "--",
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
}  # fmt: skip


def escape_latex(text: str) -> str:
    r"""Return a text with what LaTeX reads as a command taken literally.

    >>> print(escape_latex("50% of n_k"))
    50\% of n\_k
    """
    return "".join(_LATEX.get(letter, letter) for letter in text)
