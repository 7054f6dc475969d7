"""Figures as Plotly takes them, as plain dictionaries with names in place of colours.

A colour is a text such as ``"@s0"``, that of the first strategy, or ``"@s0/0.2"`` with an opacity: the page
puts in what suits a light or a dark background.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..values import finite

Chart = dict[str, Any]
View = dict[str, Any]
Series = Mapping[int, float]
"""A figure by round."""

COLOURS = 7
_DASHES = ("solid", "dash", "dot")
_FEW = 12
_BAND = 0.16
_DECADES_FOR_LOG = 2.0


def short(value: float | None, digits: int = 4) -> float | None:
    """Return a number with so many significant digits, to keep files small; None for one that is not finite.

    >>> short(0.123456), short(1234567.0), short(2.0), short(None), short(float("nan"))
    (0.1235, 1235000, 2, None, None)
    """
    number = finite(value)
    if number is None:
        return None
    rounded = float(f"{number:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def plain(text: str) -> str:
    """Return a text that Plotly, which knows some HTML and placeholders, shows as it is.

    >>> plain("<b>%{x}"), plain("a & b")
    ('&lt;b>% {x}', 'a &amp; b')
    """
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "% {")


def chart(name: str, title: str, views: Sequence[Sequence[View | None]], **more: Any) -> Chart:
    """Return a chart: ``views`` by the section's choice, then by its own ``options``.

    ``about`` is a sentence below the title, ``log`` an axis that has a switch, ``height`` in pixels.
    """
    return {"id": name, "title": title, "views": [list(row) for row in views], "height": 360, **more}


def colour(index: int, opacity: float | None = None) -> str:
    """Return the colour of the n-th strategy, the same in all charts."""
    return f"@s{index % COLOURS}" + ("" if opacity is None else f"/{opacity:g}")


def line(index: int) -> dict[str, Any]:
    """Return colour and dashes of the n-th strategy's lines; 21 differ.

    >>> line(8)
    {'color': '@s1', 'dash': 'dash', 'width': 2}
    """
    return {"color": colour(index), "dash": _DASHES[index // COLOURS % len(_DASHES)], "width": 2}


def series_traces(name: str, index: int, seeds: Sequence[Series], digits: int = 5) -> list[dict[str, Any]]:
    """Return a line, the mean over the seeds, with a band from the lowest to the highest of them.

    Only the seeds that have a round count for it. One seed has no band.
    """
    rounds = sorted({number for series in seeds for number in series})
    if not rounds:
        return []
    found = [[series[number] for series in seeds if number in series] for number in rounds]
    traces = []
    if len(seeds) > 1 and any(len(values) > 1 for values in found):
        edge = {
            "type": "scatter", "mode": "lines", "x": rounds, "legendgroup": name, "showlegend": False,
            "hoverinfo": "skip", "line": {"width": 0, "color": colour(index)},
        }  # fmt: skip
        traces.append({**edge, "y": [short(min(values), digits) for values in found]})
        traces.append(
            {**edge, "y": [short(max(values), digits) for values in found], "fill": "tonexty"}
            | {"fillcolor": colour(index, _BAND)}
        )
    means = [short(math.fsum(values) / len(values), digits) for values in found]
    traces.append(
        {
            "type": "scatter", "mode": "lines+markers" if len(rounds) <= _FEW else "lines",
            "name": plain(name), "legendgroup": name, "x": rounds, "y": means, "line": line(index),
            "marker": {"size": 5},
        }
    )  # fmt: skip
    return traces


def lines_view(
    named: Mapping[str, Sequence[Series]],
    y_title: str,
    axes: Mapping[str, Mapping[str, Any]] | None = None,
) -> View:
    """Return a view of lines, one per name, each given as its seeds' series; axes may get more settings."""
    traces = [
        trace
        for index, (name, seeds) in enumerate(named.items())
        for trace in series_traces(name, index, seeds)
    ]
    last = max((trace["x"][-1] for trace in traces), default=0)
    axis = {"title": {"text": "round"}, **({"dtick": 1} if last <= _FEW else {})}
    return {
        "traces": traces,
        "layout": {
            "xaxis": {**axis, **(axes or {}).get("xaxis", {})},
            "yaxis": {"title": {"text": y_title}, **(axes or {}).get("yaxis", {})},
        },
    }


def wants_log(named: Mapping[str, Sequence[Series]]) -> bool:
    """Whether positive values span so much that a log scale shows more."""
    known = [v for seeds in named.values() for series in seeds for v in series.values() if v > 0]
    return bool(known) and max(known) / min(known) > 10**_DECADES_FOR_LOG


def has_points(named: Mapping[str, Sequence[Series]]) -> bool:
    """Whether there is anything to draw."""
    return any(series for seeds in named.values() for series in seeds)
