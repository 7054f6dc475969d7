"""The charts of one strategy's clients: weight, scores and verdicts over the rounds, and the mix-ups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ...verdicts import HONEST, TARGETED, UNRELIABLE, UNTARGETED, VERDICTS
from ..client_figure import score_names
from ..folder import RunFolder
from ..simulated import missed
from ..values import finite
from .charts import View, chart, plain, short
from .curves import Section, section

Row = Mapping[str, Any]

MOST_ROUNDS, MOST_CLIENTS = 200, 500
_MOST_CELLS = 250_000
_MOST_SCORES = 6
_LATE_ROUNDS = 5

WEIGHT, NO_WEIGHT, REFUSED = "part of the model", "no weight", "refused"
STATES = {
    HONEST: "honest", UNRELIABLE: "unreliable", UNTARGETED: "untargeted", TARGETED: "targeted",
    WEIGHT: "weight", NO_WEIGHT: "noweight", REFUSED: "refused", "failed": "failed", "late": "late",
    "out of memory": "memory", "dropped": "dropped", "away": "away",
}  # fmt: skip
"""What may become of a client in a round, with the name of its colour."""
_ORDER = list(STATES)
_STRIP = {"domain": [0, 0.025], "showticklabels": False, "fixedrange": True, "showgrid": False, "ticks": ""}
_MAP = {"domain": [0.04, 1], "showgrid": False, "type": "category"}


@dataclass
class Clients:
    """What one strategy's ``clients.jsonl`` says of each client: what it is, and by round what became of it.

    ``values`` has the weight and every score by client and round.
    """

    kinds: dict[int, tuple[str, str]] = field(default_factory=dict)
    states: dict[int, dict[int, str]] = field(default_factory=dict)
    values: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict)
    verdicts: bool = False

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Clients:
        """Read the rows once."""
        found = cls()
        for row in rows:
            client, number = row["client"], row["round"]
            found.kinds[client] = (row.get("truth") or HONEST, row.get("attack") or "")
            found.states.setdefault(client, {})[number] = state_of(row)
            found.verdicts |= bool(row["verdict"])
            for name in ("weight", *score_names([row])):
                if (value := finite(row.get(name))) is not None and row["status"] != "failed":
                    found.values.setdefault(name, {}).setdefault(client, {})[number] = value
        return found

    @property
    def order(self) -> list[int]:
        """Return the clients as charts list them: honest ones first, then by attack, then by number."""
        return sorted(self.kinds, key=lambda c: (self.kinds[c][0] != HONEST, self.kinds[c][1], c))

    @property
    def rounds(self) -> list[int]:
        """Return the rounds that are known."""
        return sorted(set(chain.from_iterable(self.states.values())))

    @property
    def measures(self) -> list[str]:
        """Return what has values that say something, the weight first."""
        scores = sorted(name for name in self.values if name != "weight")
        return ["weight", *scores[:_MOST_SCORES]] if self.values else []


def state_of(row: Row) -> str:
    """Return what became of a client in a round, one of :data:`STATES`.

    >>> state_of({"status": "accepted", "verdict": "", "weight": 0.0})
    'no weight'
    >>> state_of({"status": "failed", "verdict": "", "weight": 0.0, "reason": "late: 70 s of 60 s"})
    'late'
    """
    if row["status"] == "failed":
        return missed(row) or "failed"
    if row["status"] == "refused":
        return REFUSED
    if row["verdict"] in VERDICTS:
        return str(row["verdict"])
    return NO_WEIGHT if row["weight"] == 0 else WEIGHT


def client_sections(folder: RunFolder, names: Sequence[str], several: bool = False) -> list[Section | None]:
    """Return the section on clients, with a choice of strategy; of the first seed if there are several."""
    known = {name: Clients.of(folder.clients(name)) for name in names}
    known = {name: clients for name, clients in known.items() if clients.kinds}
    if not known:
        return []
    maps = sum(len(clients.measures) + 1 for clients in known.values())
    cells = _MOST_CELLS // max(maps, 1)
    measures = list(dict.fromkeys(chain.from_iterable(clients.measures for clients in known.values())))
    options = [name.replace("_", " ") for name in measures]
    values = [[value_view(clients, name, cells) for name in measures] for clients in known.values()]
    spans = {f"last {_LATE_ROUNDS} rounds": _LATE_ROUNDS, "all rounds": 0}
    charts = [
        chart(
            "weights", "Weight and scores of the clients", values, options=options, wide=True,
            choice="figure",
            about="Rows are clients, attackers below; the strip on the left is what each is.",
        ),
        chart(
            "verdicts", "What became of the clients",
            [[verdict_view(clients, cells)] for clients in known.values()], wide=True,
            about="The verdict of a rule that gives some, else whether there was weight.",
        ),
        chart(
            "confusion", "What clients are, and what they were taken for",
            [[confusion_view(clients, late) for late in spans.values()] for clients in known.values()],
            options=list(spans), wide=True,
            about="Counted over clients and rounds, without replies that never came.",
        ),
    ]  # fmt: skip
    text = f"With seed {folder.config.seed}." if several else ""
    found = section("clients", "Clients", charts, text)
    if found:
        told = [name for name, clients in known.items() if clients.verdicts or len(clients.measures) > 1]
        found["select"] = {"label": "strategy", "options": list(known), "first": (told or list(known))[0]}
    return [found]


def value_view(clients: Clients, name: str, cells: int = _MOST_CELLS) -> View | None:
    """Return the heat map of one figure of every client in every round, None where there is none."""
    if name not in clients.values:
        return None
    rows, rounds, note = thinned(clients.order, clients.rounds, cells)
    found = clients.values[name]
    scale = 100 if name == "weight" else 1
    matrix = [[short(_times(found.get(c, {}).get(r), scale), 3) for r in rounds] for c in rows]
    label = "weight, %" if name == "weight" else name.replace("_", " ")
    trace = {
        "type": "heatmap", "x": rounds, "y": _labels(clients, rows), "z": matrix, "colorscale": "@seq",
        "hovertemplate": f"client %{{y}}, round %{{x}}: %{{z}}<extra>{plain(label)}</extra>",
        "hoverongaps": False,
        "colorbar": {
            "orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0.04, "xanchor": "left", "len": 0.6,
            "thickness": 9, "title": {"text": plain(label), "side": "top"}, "outlinewidth": 0,
        },
    }  # fmt: skip
    kinds = [kind for kind in VERDICTS if any(clients.kinds[c][0] == kind for c in rows)]
    return _matrix_view([trace, _truth_strip(clients, rows), *_legend(kinds)], len(rows), note)


def verdict_view(clients: Clients, cells: int = _MOST_CELLS) -> View | None:
    """Return what became of every client in every round; None if nobody was judged or left out."""
    known = set(chain.from_iterable(of_round.values() for of_round in clients.states.values()))
    if known <= {WEIGHT}:
        return None
    rows, rounds, note = thinned(clients.order, clients.rounds, cells)
    letters = ["".join(_letter(clients.states[c].get(r)) for r in rounds) for c in rows]
    trace = {
        "type": "heatmap", "x": rounds, "y": _labels(clients, rows), "letters": letters, "words": _ORDER,
        **_kind_colours(), "xgap": 1 if len(rounds) <= 60 else 0, "ygap": 1 if len(rows) <= 60 else 0,
        "hovertemplate": "client %{y}, round %{x}: %{text}<extra></extra>", "hoverongaps": False,
    }  # fmt: skip
    kinds = {clients.kinds[c][0] for c in rows}
    shown = [state for state in _ORDER if state in known or state in kinds]
    return _matrix_view([trace, _truth_strip(clients, rows), *_legend(shown)], len(rows), note)


def confusion_view(clients: Clients, late: int = 0) -> View | None:
    """Return the counts of :func:`confusion` as a heat map, None where there is nothing to tell."""
    truths, states, counts = confusion(clients, late)
    if not states or set(states) <= {WEIGHT}:
        return None
    shares = [[short(count / max(sum(row), 1)) for count in row] for row in counts]
    trace = {
        "type": "heatmap", "x": [_brief(state).replace("part of ", "part of<br>") for state in states],
        "y": [plain(truth).replace(" (", "<br>(") for truth in truths],
        "z": shares, "zmin": 0, "zmax": 1, "colorscale": "@seq", "showscale": False, "xgap": 2, "ygap": 2,
        "text": [[f"{count:,}<br>{100 * share:.0f} %" if (share := count / max(sum(row), 1)) else "0"
                  for count in row] for row in counts],
        "texttemplate": "%{text}", "hovertemplate": "%{y}, taken for %{x}: %{text}<extra></extra>",
    }  # fmt: skip
    layout = {
        "hovermode": "closest",
        "xaxis": {
            "side": "top",
            "showgrid": False,
            "fixedrange": True,
            "title": {"text": "taken for"},
            "tickangle": 0,
        },
        "yaxis": {"autorange": "reversed", "showgrid": False, "fixedrange": True},
    }
    return {"traces": [trace], "layout": layout, "height": 110 + 56 * len(truths)}


def confusion(clients: Clients, late: int = 0) -> tuple[list[str], list[str], list[list[int]]]:
    """Return what clients are (honest, or their attack), what they were taken for, and how often.

    Counts are over clients and rounds, the last ``late`` rounds or, with 0, all. Replies that failed are no
    verdict; one that was refused is one.
    """
    rounds = set(clients.rounds[-late:])
    counts: Counter[tuple[str, str]] = Counter()
    for client, of_round in clients.states.items():
        kind, attack = clients.kinds[client]
        truth = HONEST if kind == HONEST else f"{attack} ({_brief(kind)})"
        for number, state in of_round.items():
            if number in rounds and state in _ORDER[: _ORDER.index("failed")]:
                counts[truth, state] += 1
    truths = sorted({truth for truth, _ in counts}, key=lambda truth: (truth != HONEST, truth))
    seen = {state for _, state in counts}
    # Every verdict has its column, so that one that was never given is seen.
    shown = [s for s in _ORDER if s in seen or (clients.verdicts and s in VERDICTS)]
    return truths, shown, [[counts[truth, state] for state in shown] for truth in truths]


def thinned(clients: Sequence[int], rounds: Sequence[int], cells: int) -> tuple[list[int], list[int], str]:
    """Return the clients and rounds that fit, evenly picked, the last one among them, and a note on the rest.

    >>> thinned([0, 1], [1, 2, 3, 4], 4)
    ([0, 1], [2, 4], 'Shown are 2 of 4 rounds, evenly picked.')
    """
    rows = _picked(clients, min(MOST_CLIENTS, max(cells, 1)))
    shown = _picked(rounds, min(MOST_ROUNDS, max(cells // max(len(rows), 1), 1)))
    left = [
        f"{len(few):,} of {len(many):,} {name}"
        for few, many, name in ((rows, clients, "clients"), (shown, rounds, "rounds"))
        if len(few) < len(many)
    ]
    return rows, shown, f"Shown are {' and '.join(left)}, evenly picked." if left else ""


def _picked(items: Sequence[int], most: int) -> list[int]:
    count = len(items)
    if count <= most:
        return list(items)
    return [items[(index + 1) * count // most - 1] for index in range(most)]


# Parts of views --------------------------------------------------------------------------------------------


def _matrix_view(traces: list[dict[str, Any]], clients: int, note: str) -> View:
    layout = {
        "hovermode": "closest", "xaxis": _MAP, "xaxis2": _STRIP,
        "yaxis": {
            "title": {"text": "client"}, "type": "category", "autorange": "reversed", "showgrid": False,
            "ticks": "", "anchor": "free", "position": 0,
        },
    }  # fmt: skip
    return {
        "traces": traces,
        "layout": layout,
        "height": max(300, min(150 + 13 * clients, 720)),
        "note": note,
    }


def _truth_strip(clients: Clients, rows: Sequence[int]) -> dict[str, Any]:
    said = [clients.kinds[c][1] or clients.kinds[c][0] for c in rows]
    return {
        "type": "heatmap", "x": ["is"], "y": _labels(clients, rows), "xaxis": "x2", **_kind_colours(),
        "letters": [_letter(clients.kinds[c][0]) for c in rows], "words": _ORDER,
        "customdata": [[plain(text)] for text in said],
        "hovertemplate": "client %{y} is %{customdata}<extra></extra>",
    }  # fmt: skip


def _labels(clients: Clients, rows: Sequence[int]) -> list[str]:
    return [f"{c}" for c in rows]


def _kind_colours() -> dict[str, Any]:
    count = len(_ORDER)
    scale = [
        [(index + side) / count, f"@{name}"] for index, name in enumerate(STATES.values()) for side in (0, 1)
    ]
    return {"zmin": -0.5, "zmax": count - 0.5, "colorscale": scale, "showscale": False}


def _legend(states: Sequence[str]) -> list[dict[str, Any]]:
    """Return traces without points, for the legend of a heat map."""
    return [
        {
            "type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": state,
            "hoverinfo": "skip", "marker": {"color": f"@{STATES[state]}", "symbol": "square", "size": 11},
        }
        for state in states
    ]  # fmt: skip


def _letter(state: str | None) -> str:
    return "." if state is None else chr(ord("a") + _ORDER.index(state))


def _times(value: float | None, scale: float) -> float | None:
    return None if value is None else scale * value


def _brief(state: str) -> str:
    """Return a verdict in few letters: what is not honest or unreliable is malicious anyway."""
    return state.removeprefix("malicious-")
