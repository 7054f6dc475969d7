"""The charts over the rounds: accuracy, loss, attacks, time, bytes, devices, edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..simulated import Progress
from ..values import finite
from .charts import Chart, Series, View, chart, has_points, lines_view, series_traces, short, wants_log

Record = Mapping[str, Any]
Records = Sequence[Mapping[str, Sequence[Record]]]
"""The rounds by strategy, of each seed."""
Figure = Callable[[Record], Any]
Section = dict[str, Any]
Axes = Mapping[str, Mapping[str, Any]]

_FROM_ZERO = {"rangemode": "tozero"}
_UNITS = {
    "B": (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)),
    "J": (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0)),
    "s": (("h", 3600.0), ("min", 60.0), ("s", 1.0)),
}


def curve_section(names: Sequence[str], records: Records, rounds: int) -> Section | None:
    """Return accuracy, loss, the attackers' part and what there is besides, over the rounds."""
    # A little more than the rounds, so that the marks of the first and the last one are whole.
    edge = 0.015 * max(rounds, 1)
    axis: Axes = {"xaxis": {"range": [-edge, max(rounds, 1) + edge]}}
    from_zero: Axes = {**axis, "yaxis": _FROM_ZERO}

    def percent(
        name: str, title: str, figure: Figure, y_title: str, about: str = "", axes: Axes = axis
    ) -> Chart | None:
        named = of_rounds(names, records, figure, 100)
        if not has_points(named):
            return None
        return chart(name, title, [[lines_view(named, y_title, axes)]], about=about)

    charts = [percent("accuracy", "Accuracy", told("accuracy"), "test accuracy, %")]
    loss = of_rounds(names, records, told("loss"))
    if has_points(loss):
        charts.append(
            chart("loss", "Loss", [[lines_view(loss, "test loss", axis)]], log="y", log_on=wants_log(loss))
        )
    charts.append(
        percent(
            "attackers-weight", "Weight of the attackers",
            told("attack", "weight", trained=True),
            "share of the new model, %", "How much of each new model came from clients that attack.",
            from_zero,
        )
    )  # fmt: skip
    attacks = _attack_names(records)
    views = []
    for attack in attacks:
        named = of_rounds(names, records, told("attack", "success", attack), 100)
        views.append(lines_view(named, "predicted as the attack wants, %", from_zero))
    if views:
        charts.append(chart("attack-success", "Success of the attacks", [views], options=attacks))
    charts.append(_detection_chart(names, records, from_zero))
    charts.append(
        percent("own-models", "Own models", told("own_tests_after", "mean"),
                "accuracy on the client's own tests, %", "Mean over the clients that do not attack.")
    )  # fmt: skip
    charts.append(
        percent("own-tests", "Global model on the clients' own tests",
                told("own_tests", "mean"), "accuracy, %",
                "Mean over the clients that do not attack.")
    )  # fmt: skip
    return section("curves", "Over the rounds", charts, band_said(records))


def _detection_chart(
    names: Sequence[str], records: Records, axes: Mapping[str, Mapping[str, Any]]
) -> Chart | None:
    figures = {"precision": "precision", "recall": "recall", "honest left out": "honest_left_out"}
    flagged = any(
        (r.get("detection") or {}).get("flagged") for one in records for rows in one.values() for r in rows
    )
    if not flagged:
        return None
    views = []
    for key in figures.values():
        named = of_rounds(names, records, told("detection", key), 100)
        views.append(lines_view(named, "%", axes))
    return chart(
        "detection", "Finding the attackers", [views], options=list(figures),
        about="Clients that a strategy calls malicious or, if it calls nobody anything, gives no weight.",
    )  # fmt: skip


def cost_section(names: Sequence[str], records: Records) -> Section | None:
    """Return wall time, bytes and, with emulated devices, simulated seconds and joules."""
    named = of_rounds(names, records, _seconds)
    charts: list[Chart | None] = []
    if has_points(named):
        charts.append(
            chart(
                "seconds",
                "Wall time per round",
                [[lines_view(named, "s on this machine", {"yaxis": _FROM_ZERO})]],
                log="y",
            )
        )
    ways: dict[str, Figure] = {
        "both directions": _bytes,
        "to the clients": told("bytes_down", trained=True),
        "from the clients": told("bytes_up", trained=True),
    }
    views = [_scaled(of_rounds(names, records, figure), "B", "per round") for figure in ways.values()]
    if any(view["traces"] for view in views):
        charts.append(chart("bytes", "Sent per round", [views], options=list(ways)))
    charts += [_simulated(names, records, *what) for what in (
        ("simulated-seconds", "Simulated time per round", "seconds", "s", "What it took on the devices."),
        ("joules", "Energy per round", "joules", "J", "Of all devices, on training and on their links."),
    )]  # fmt: skip
    charts.append(_progress_chart(names, records))
    charts.append(_missed_chart(names, records))
    return section("cost", "Cost", charts, band_said(records))


def _simulated(names: Sequence[str], records: Records, name: str, title: str, key: str, unit: str,
               about: str) -> Chart | None:  # fmt: skip
    named = of_rounds(names, records, told("simulated", key, trained=True))
    return (
        chart(name, title, [[_scaled(named, unit, "")]], about=about, log="y") if has_points(named) else None
    )


def _progress_chart(names: Sequence[str], records: Records) -> Chart | None:
    """Return accuracy over what it cost on emulated devices, of the first seed."""
    runs = {name: Progress.of([r for r in records[0][name] if r.get("simulated")]) for name in names}
    views, options = [], []
    for option, costs_of, kind in (
        ("simulated time", lambda p: p.seconds, "s"),
        ("energy", lambda p: p.joules, "J"),
        ("bytes", lambda p: p.bytes, "B"),
    ):  # fmt: skip
        unit, divisor = unit_of(max((c for p in runs.values() for c in costs_of(p) if c), default=0.0), kind)
        traces = []
        for index, progress in enumerate(runs.values()):
            pairs = [
                (cost / divisor, 100 * accuracy)
                for cost, accuracy in zip(costs_of(progress), progress.accuracy, strict=True)
                if cost is not None and accuracy is not None
            ]
            found = series_traces(names[index], index, [dict(enumerate(y for _, y in pairs))])
            for trace in found:
                trace["x"] = [short(x, 5) for x, _ in pairs]
            traces += found
        if traces:
            options.append(option)
            layout = {"xaxis": {"title": {"text": unit}}, "yaxis": {"title": {"text": "test accuracy, %"}}}
            views.append({"traces": traces, "layout": layout})
    about = "Up to each round, of both directions" + (", with the first seed." if len(records) > 1 else ".")
    return (
        chart("progress", "Accuracy for its cost", [views], options=options, about=about) if views else None
    )


def _missed_chart(names: Sequence[str], records: Records) -> Chart | None:
    """Return how many replies devices did not deliver, by round."""
    keys = {"late": "late", "out of memory": "out_of_memory", "dropped": "dropped", "away": "away"}
    views, options = [], []
    for option, key in keys.items():
        named = of_rounds(names, records, told("simulated", key, trained=True))
        if any(v for seeds in named.values() for series in seeds for v in series.values()):
            options.append(option)
            views.append(lines_view(named, "clients"))
    return (
        chart("missed", "Replies that devices did not deliver", [views], options=options) if views else None
    )


def edge_section(names: Sequence[str], records: Records) -> Section | None:
    """Return what edge servers cost and how they were, over the rounds; None without edges."""
    figures = {
        "cost": ("cost", 1.0, "seconds and joules, 1 at random"),
        "healthy edges": ("healthy", 100.0, "with enough clients and a good mix of labels, %"),
        "enough clients": ("quorum", 100.0, "edges with enough clients, %"),
        "divergence": ("divergence_mean", 1.0, "of the labels, nats"),
    }
    views, options = [], []
    for option, (key, scale, title) in figures.items():
        named = of_rounds(names, records, told("edges", key), scale)
        if has_points(named):
            options.append(option)
            views.append(lines_view(named, title))
    charts = [chart("edges", "Edges over the rounds", [views], options=options)] if views else []
    for name, title, key, unit in (
        ("edge-bytes", "Sent between edges and cloud per round", "bytes", "B"),
        ("decision", "Deciding who reports where", "decide", "s"),
    ):
        named = of_rounds(names, records, told("seconds", "decide") if key == "decide" else _edge_bytes)
        if any(v for seeds in named.values() for series in seeds for v in series.values()):
            view = _scaled(named, unit, "") if unit == "B" else lines_view(named, "s of wall time")
            charts.append(chart(name, title, [[view]], **({"log": "y"} if unit == "s" else {})))
    return section("edges", "Edge servers", charts, band_said(records))


def _edge_bytes(record: Record) -> Any:
    edges = record.get("edges")
    return edges["bytes_down"] + edges["bytes_up"] if edges else None


def _seconds(record: Record) -> float | None:
    known = [value for value in map(finite, record["seconds"].values()) if value is not None]
    return sum(known) if record["round"] else None


def _bytes(record: Record) -> Any:
    return record["bytes_down"] + record["bytes_up"] if record["round"] else None


# Parts of charts -------------------------------------------------------------------------------------------


def told(*keys: str, trained: bool = False) -> Figure:
    """Return what finds a figure in a round's record by its keys, None where it is not told.

    With ``trained`` the record of the initial model, round 0, tells nothing.

    >>> told("attack", "weight")({"round": 3, "attack": {"weight": 0.25}})
    0.25
    >>> told("bytes_up", trained=True)({"round": 0, "bytes_up": 0})
    """

    def figure(record: Record) -> Any:
        found: Any = None if trained and not record["round"] else record
        for key in keys:
            found = (found or {}).get(key)
        return found

    return figure


def of_rounds(
    names: Sequence[str], records: Records, figure: Figure, scale: float = 1.0
) -> dict[str, list[Series]]:
    """Return a figure by strategy, seed and round, where it is known and finite."""
    return {
        name: [
            {r["round"]: scale * value for r in one[name] if (value := finite(figure(r))) is not None}
            for one in records
        ]
        for name in names
    }


def unit_of(most: float, kind: str) -> tuple[str, float]:
    """Return the largest unit of which there are at least two, and what it divides by.

    >>> unit_of(3000.0, "s"), unit_of(5e6, "B")
    (('min', 60.0), ('MB', 1000000.0))
    """
    return next((unit for unit in _UNITS[kind] if most >= 2 * unit[1]), _UNITS[kind][-1])


def _scaled(named: Mapping[str, Sequence[Series]], kind: str, said: str) -> View:
    most = max((v for seeds in named.values() for series in seeds for v in series.values()), default=0.0)
    unit, divisor = unit_of(most, kind)
    scaled = {
        name: [{number: v / divisor for number, v in series.items()} for series in seeds]
        for name, seeds in named.items()
    }
    return lines_view(scaled, f"{unit} {said}".strip(), {"yaxis": _FROM_ZERO})


def section(name: str, title: str, charts: Sequence[Chart | None], text: str = "") -> Section | None:
    """Return a section of the page, None if it would be empty."""
    found = [chart for chart in charts if chart]
    return {"id": name, "title": title, "text": text, "charts": found} if found else None


def band_said(records: Records) -> str:
    """Say what lines and bands are, where there are several seeds."""
    count = len(records)
    return (
        f"Lines are means over {count} seeds, bands reach from the lowest to the highest."
        if count > 1
        else ""
    )


def _attack_names(records: Records) -> list[str]:
    return sorted(
        {
            name
            for one in records
            for rows in one.values()
            for r in rows
            for name in (r.get("attack") or {}).get("success", {})
        }
    )
