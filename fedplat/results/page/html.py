"""The page itself: one HTML file with everything in it, which asks no network for anything."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..folder import without_nan, write_atomically
from .plotly_js import library

_COPY = '<button type="button" class="copy">Copy</button>'
_SELF, _NONE = "'self'", "'none'"
_STATES = {"finished": "finished", "unfinished": "not finished"}


def page_html(data: Mapping[str, Any], live: bool = False) -> str:
    """Return the whole page for what :func:`~fedplat.results.page.page_data` or ``table_data`` returned.

    With ``live`` it asks the server that it came from for ``data.json`` every few seconds, draws anew what
    has changed, and stops when the run is finished. Without scripts the tables and texts are still there.
    """
    plotly, script = library(), _file("page.js")
    allowed = f"'sha256-{_sha256(script)}' 'sha256-{plotly.sha256}'"
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; script-src {allowed}; "
        f"style-src 'unsafe-inline'; img-src data: blob:; connect-src {_SELF if live else _NONE}"
    )
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"{" data-live" if live else ""}>',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(_page_title(data))}</title>",
            f"<style>\n{_file('page.css')}</style>",
            "</head>",
            "<body>",
            *_body(data),
            f'<script type="application/json" id="data">{json_text(data)}</script>',
            f'<script type="text/plain" id="plotly">{plotly.packed}</script>',
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


def write_html(data: Mapping[str, Any], path: Path) -> None:
    """Write the page to a file, in one step."""
    write_atomically(path, page_html(data).encode())


def json_text(value: Any) -> str:
    """Return JSON that may stand in a script element, whatever texts are in it.

    >>> json_text({"name": "</script><b>"})
    '{"name":"\\\\u003c/script>\\\\u003cb>"}'
    """
    try:
        text = _dumps(value)
    except ValueError:
        text = _dumps(without_nan(value))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def table_html(table: Mapping[str, Any]) -> str:
    """Return a table whose headings sort it, in a box of its own that scrolls sideways.

    Texts are set left, numbers right; sorting is by the number ``v`` that a cell has, or else by its text.
    """
    left = table["text_columns"]
    heads = "".join(
        f'<th scope="col"{_left(index, left)}><button type="button">{escape(head)}</button></th>'
        for index, head in enumerate(table["heads"])
    )
    rows = []
    for row in table["rows"]:
        swatch = "" if row.get("style") is None else f'<i class="swatch s{row["style"] % 7}"></i>'
        cells = "".join(_cell(cell, index, left) for index, cell in enumerate(row["cells"], start=1))
        rows.append(f'<tr><th scope="row">{swatch}{escape(row["name"])}</th>{cells}</tr>')
    note = f'<p class="about">{escape(table["note"])}</p>' if table.get("note") else ""
    return (
        f'<div class="scroll"><table id="table-{escape(table["id"])}"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{note}"
    )


def _cell(cell: Mapping[str, Any], index: int, left: int) -> str:
    value = "" if cell["v"] is None else f' data-v="{cell["v"]!r}"'
    text = escape(cell["t"])
    if cell.get("best"):
        text = f"<strong>{text}</strong>"
    beside = "".join(f"<small>{escape(line)}</small>" for line in cell.get("beside", ()))
    return f"<td{_left(index, left)}{value}>{text}{beside}</td>"


def _left(index: int, left: int) -> str:
    return ' class="text"' if index < left else ""


def _body(data: Mapping[str, Any]) -> list[str]:
    parts = ["<header>", f"<h1>{escape(data['title'])}</h1>"]
    parts.append(f'<p id="status" role="status">{escape(status_text(data))}</p>')
    if data["description"]:
        parts.append(f"<p>{escape(data['description'])}</p>")
    parts += [
        "</header>",
        "<main>",
        '<noscript><p class="warn">The charts need JavaScript; all else is here.</p>',
    ]
    parts += ["</noscript>", '<p id="trouble" class="warn" hidden></p>']
    parts += [f'<p class="warn">{escape(text)}</p>' for text in data.get("warnings", ())]
    parts.append('<section id="comparison"><h2>Comparison</h2><div id="choices"></div>')
    parts.append('<div id="tables">')
    for table in data["tables"]:
        heading = f"<h3>{escape(table['title'])}</h3>" if table["title"] else ""
        parts.append(f"<article>{heading}{table_html(table)}</article>")
    parts.append("</div>")
    parts.append(
        f"<details><summary>What the figures are</summary><p>{escape(data['explanation'])}</p></details>"
    )
    parts += ["</section>", '<div id="charts"></div>']
    if data["situation"]:
        parts += ["<section><h2>The situation</h2>", _facts(data["situation"]), "</section>"]
    if data["kind"] == "run":
        parts.append('<section id="left-out"><h2>Replies left out</h2>')
        parts.append(table_html(data["left_out"]) if data["left_out"] else f"<p>{_NONE_LEFT_OUT}</p>")
        parts.append("</section>")
    parts += ["<section><h2>Run it again</h2>", *map(_command, data["commands"])]
    if runs := data.get("runs"):
        parts += [
            "<details><summary>Every run, with its own command</summary>",
            table_html(runs),
            "</details>",
        ]
    if data["config"]:
        parts.append(
            "<p>The configuration holds every value, also the defaults. The same versions on the same kind "
            "of device give the same figures, apart from the times.</p>"
        )
        parts.append(
            f'<details><summary>Configuration (config.toml)</summary><div class="code"><button type="button" '
            f'class="copy">Copy</button><pre>{escape(data["config"])}</pre></div></details>'
        )
    parts += [
        "</section>",
        "<section><h2>Environment</h2>",
        _facts(data["environment"]),
        "</section>",
        "</main>",
    ]
    return parts


_NONE_LEFT_OUT = "None: every reply of every client was accepted."


def status_text(data: Mapping[str, Any]) -> str:
    """Return the line below the title: seed, how far the run is, and versions."""
    status = data["status"]
    parts = [data["subtitle"], _STATES[status["state"]]]
    if status["state"] != "finished":
        done = ", ".join(f"{name} {number}" for name, number in status.get("done", {}).items())
        of = f" of {status['rounds']}" if status.get("rounds") else ""
        parts[-1] += f" ({done}{' rounds' + of if done else ''})" if done else ""
        parts.append(f"last written {status['updated']}" if status["updated"] else "nothing written yet")
    parts += [
        f"{name} {version}"
        for name, version in data["versions"].items()
        if name in ("fedplat", "flwr", "torch")
    ]
    return " · ".join(filter(None, parts))


def _page_title(data: Mapping[str, Any]) -> str:
    return f"{data['title']} – fedplat"


def _facts(facts: Sequence[Sequence[str]]) -> str:
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in facts)
    return f"<dl>{rows}</dl>"


def _command(command: str) -> str:
    return f'<div class="code">{_COPY}<pre>{escape(command)}</pre></div>'


@cache
def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
