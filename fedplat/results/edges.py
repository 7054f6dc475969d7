"""What a run with edge servers came to, and what the report says of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .tables import NOTHING, markdown_table, three_digits
from .values import finite, mean
from .wording import named_part, settings_text

if TYPE_CHECKING:
    from .folder import RunFolder

Row = Mapping[str, Any]

_MEANS = (
    "used",
    "quorum",
    "healthy",
    "divergence_mean",
    "divergence_max",
    "probed",
    "changed",
    "signals",
    "cost",
)
_MOST_EDGES = 20
_HEADS = (
    "strategy", "clients per round", "enough clients %", "and good labels %", "divergence, mean",
    "divergence, worst", "asked", "told another edge", "messages", "cost", "decision ms",
)  # fmt: skip


def edges_summary(records: Iterable[Row]) -> dict[str, float | None]:
    """Return means over the rounds of what ``rounds.jsonl`` says of edges; {} for a run without any.

    ``quorum`` and ``healthy`` are the share of pairs of edge and round, ``cost`` is that of simulated seconds
    and joules on the scale of random clients, and ``decision_seconds`` is wall time.
    """
    known = [record for record in records if record.get("edges")]
    if not known:
        return {}
    return {
        **{key: mean(record["edges"].get(key) for record in known) for key in _MEANS},
        "decision_seconds": mean(record["seconds"].get("decide") for record in known),
        "bytes_down": sum(record["edges"]["bytes_down"] for record in known),
        "bytes_up": sum(record["edges"]["bytes_up"] for record in known),
    }


def edges_text(folder: RunFolder, summary: Row) -> str:
    """Return the section on edge servers of ``report.md``, "" for a run without any."""
    known = {name: row["edges"] for name, row in summary["strategies"].items() if row.get("edges")}
    if not known:
        return ""
    parts = [
        markdown_table(_HEADS, [[name, *_figures(row)] for name, row in known.items()]),
        "All are means over the rounds. Enough clients, and good labels: the share of edges and rounds in "
        "which so many clients delivered as an edge should have, and in which their labels were within the "
        "divergence (in nats) as well. Asked: for their costs of the round. Cost: of seconds and "
        "joules, each over that of random clients. Messages are those about who goes where. Decision ms is "
        "wall time.",
    ]
    for name in known:
        rows = list(folder.edges(name))
        parts.append(f"Edges of {name}:\n\n{_each(rows)}")
        if (picture := edges_picture(folder, name)).exists():
            parts.append(f"![The edges over the rounds, {name}]({picture.parent.name}/{picture.name})")
    return "\n\n".join(parts)


def edges_picture(folder: RunFolder, strategy: str) -> Path:
    """Return where the picture of a strategy's edges is."""
    return folder.log(strategy).path / "edges.png"


def draw_edges(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw the rows of an ``edges.jsonl``: weight in the model, clients and their labels, over the rounds."""
    from .client_figure import draw_clients

    shown = [
        {
            "round": row["round"],
            "client": row["edge"],
            "weight": row["weight"],
            "attack": row["attack"],
            "clients": row["delivered"],
            "divergence": row["divergence"],
        }
        for row in rows
    ]
    draw_clients(shown, path, title)


def topology_said(config: Row) -> dict[str, str]:
    """Say in words which edge servers a scenario has, from the resolved configuration; {} for none."""
    said = {}
    if world := config.get("world"):
        said["World"] = named_part("worlds", world)
    tables = {"": config.get("topology") or {}}
    for name, chosen in (config.get("strategy") or {}).items():
        tables[name] = chosen.get("topology") or {}
    for name, table in tables.items():
        if table.get("name", "flat") != "flat":
            inner = {key: value for key, value in table.items() if key not in ("name", "edge", "association")}
            who = named_part("associations", table["association"])
            said[f"Edges of {name}" if name else "Edges"] = (
                f"each with {named_part('strategies', table['edge'])}; who is where: {who}; "
                f"{settings_text(inner)}"
            )
        elif name and table:
            said[f"Edges of {name}"] = "none"
    return said


def _figures(row: Row) -> list[str]:
    shares = {key: finite(row.get(key)) for key in ("quorum", "healthy")}
    percent = [NOTHING if value is None else f"{100 * value:.1f}" for value in shares.values()]
    seconds = finite(row.get("decision_seconds"))
    others = [
        _text(row.get(key)) for key in ("divergence_mean", "divergence_max", "probed", "changed", "signals")
    ]
    return [
        _text(row.get("used")),
        *percent,
        *others,
        _text(row.get("cost")),
        NOTHING if seconds is None else three_digits(1e3 * seconds),
    ]


def _each(rows: Sequence[Row]) -> str:
    numbers = sorted({row["edge"] for row in rows})[:_MOST_EDGES]
    heads = ("edge", "rounds with a model", "clients", "weight %", "divergence", "simulated s", "J", "attack")
    cells = []
    for number in numbers:
        own = [row for row in rows if row["edge"] == number]
        weight = mean(row["weight"] for row in own)
        attacks = sorted({row["attack"] for row in own if row["attack"]})
        cells.append(
            [
                str(number),
                f"{sum(row['status'] == 'accepted' for row in own)} of {len(own)}",
                _text(mean(row["delivered"] for row in own)),
                NOTHING if weight is None else f"{100 * weight:.1f}",
                _text(mean(row["divergence"] for row in own)),
                _text(mean(row.get("seconds") for row in own)),
                _text(mean(row.get("joules") for row in own)),
                ", ".join(attacks) or NOTHING,
            ]
        )
    return markdown_table(heads, cells)


def _text(value: Any) -> str:
    number = finite(value)
    return NOTHING if number is None else three_digits(number)
