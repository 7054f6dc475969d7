"""The chart of who holds what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .charts import Chart, chart, plain
from .curves import Section, section

_MOST_CLIENTS = 1000
_MOST_CLASSES = 40
_MAX_HEIGHT = 420


def partition_section(environment: Mapping[str, Any]) -> Section | None:
    """Return what each client holds, from the facts of environment.json; None if they do not say.

    ``label_counts`` (clients, classes) makes stacked bars, ``samples_per_client`` plain ones.
    """
    counts: Sequence[Sequence[int]] = environment.get("label_counts") or ()
    samples: Sequence[int] = environment.get("samples_per_client") or [sum(row) for row in counts]
    if not samples:
        return None
    classes = environment.get("classes") or ()
    attackers = environment.get("attackers") or {}
    clients = [_name(number, attackers) for number in range(len(samples))][:_MOST_CLIENTS]
    note = "" if len(samples) <= _MOST_CLIENTS else f"The first {_MOST_CLIENTS} of {len(samples):,} clients."
    if counts and len(counts[0]) <= _MOST_CLASSES:
        bars = [
            _bar(clients, [row[label] for row in counts[:_MOST_CLIENTS]], str(name), label)
            for label, name in enumerate(_names(classes, len(counts[0])))
        ]
        about = "Training samples of each client, by class"
    else:
        bars = [_bar(clients, list(samples[:_MOST_CLIENTS]), "samples", None)]
        about = "Training samples of each client"
    about += "; those that attack have a star." if attackers else "."
    view = {
        "traces": bars,
        "note": note,
        "layout": {
            "barmode": "stack", "bargap": 0.12 if len(clients) <= 100 else 0, "hovermode": "closest",
            "xaxis": {"title": {"text": "client"}, "type": "category", "showgrid": False},
            "yaxis": {"title": {"text": "samples"}},
            "legend": {"traceorder": "normal"},
        },
    }  # fmt: skip
    found: Chart = chart("partition", "Who holds what", [[view]], about=about, wide=True, height=_MAX_HEIGHT)
    return section("partition", "Partition", [found])


def _bar(clients: Sequence[str], values: Sequence[int], name: str, label: int | None) -> dict[str, Any]:
    of_class = "" if label is None else f" of class {plain(name)}"
    return {
        "type": "bar", "x": clients, "y": values, "name": plain(name), "showlegend": label is not None,
        "marker": {"color": "@s0" if label is None else f"@c{label % 20}", "line": {"width": 0}},
        "hovertemplate": f"client %{{x}}: %{{y}}{of_class}<extra></extra>",
    }  # fmt: skip


def _name(number: int, attackers: Mapping[str, str]) -> str:
    return f"{number}*" if str(number) in attackers else str(number)


def _names(classes: Sequence[str], count: int) -> list[str]:
    return [*classes[:count], *(str(label) for label in range(len(classes), count))]
