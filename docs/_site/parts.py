"""A page per strategy and attack, and one per kind of other parts, from the registry and the docstrings."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tomli_w

from fedplat import strategies
from fedplat.catalogue import PREFIXED
from fedplat.cli.setting_table import all_settings, describe, value_text
from fedplat.clients import attacks
from fedplat.registry import KINDS, SINGULAR, Entry, Setting, entries, settings

from .docstrings import fence, inferred, of_docstring, of_text, plain, table, without_code
from .examples import command_for, flower_for, scenario_for

OWN_PAGES = ("strategies", "attacks")
LISTED = tuple(kind for kind in KINDS if kind not in OWN_PAGES)

INTRODUCTIONS = {
    "strategies": "How the server combines what clients send. Every one is a "
    "`flwr.serverapp.strategy.Strategy`, and a name in a scenario's `strategies`. "
    "`f` is always the number of clients declared to be liars; left "
    "out, it is the most that the rule stands.",
    "attacks": "What clients that lie, or are unreliable, do. Each is a `[[attacks]]` table of a scenario; "
    "one on the reply is also a Flower client mod, and one by collusion sits between strategy and engine.",
    "pre-aggregators": "Steps taken before a strategy's rule, in the order of `before`.",
    "selectors": "Who takes part in a round: `[selection]` of a scenario.",
    "models": "`[model]` of a scenario.",
    "datasets": "`[data]` of a scenario. Every set also takes `root`, a local copy, and `download`.",
    "partitions": "How training samples are spread over `clients` clients: `[partition]` of a scenario.",
    "devices": "What memory and links each client's device has in each round: `[devices]` of a scenario. See "
    "[emulated devices](../emulated-devices.md).",
    "hardware": "How fast devices compute, and what energy that takes: `[hardware]` of a scenario.",
    "availability": "In which rounds a device is there: `[availability]` of a scenario.",
    "compressors": "What clients send: `[compression]` of a scenario. See [compression](../compression.md).",
    "submodels": "Which part of the model a client gets: `[submodels]` of a scenario, or `submodels` of a "
    "strategy. See [sub-models](../submodels.md).",
    "personal": "How clients make the model their own: `[personal]` of a scenario, or `personal` of a "
    "strategy. See [personal models](../personal-models.md).",
    "topologies": "Whether there are edge servers: `[topology]` of a scenario. See [edges](../hierarchy.md).",
    "worlds": "Where clients and edge servers are: `[world]` of a scenario. See "
    "[the world](../hierarchy-world.md).",
    "associations": "Who reports to which edge: `topology.association` of a scenario. See "
    "[edges](../hierarchy.md).",
}


def pages() -> Iterator[tuple[str, str]]:
    """Yield the address and the Markdown of every page about parts."""
    for kind in OWN_PAGES:
        yield f"{kind}/index.md", _index(kind)
        for entry in entries(kind).values():
            yield f"{kind}/{entry.name}.md", part_page(entry)
    for kind in LISTED:
        yield f"reference/{kind}.md", kind_page(kind)


def part_page(entry: Entry) -> str:
    """Return the page of one strategy or attack."""
    target = entry.load()
    text = inspect.getdoc(target) or ""
    title = f"# {entry.name}\n\n{entry.summary[:1].upper()}{entry.summary[1:]}."
    sections = [
        title,
        _facts(entry),
        of_text(without_code(text)),
        "## Settings\n\n" + setting_rows(entry, target),
    ]
    if sentences := inferred(text):
        sections.append(
            "## What is inferred\n\nWhere the publication is silent, this is our reading:\n\n"
            + "\n".join(f"- {plain(sentence)}" for sentence in sentences)
        )
    sections.append("## In an experiment\n\n" + fence("bash", command_for(entry)))
    sections.append("or, in a scenario file:\n\n" + fence("toml", tomli_w.dumps(scenario_for(entry))))
    if code := flower_for(entry, target, public_name):
        sections.append("## In a Flower app\n\n" + fence("python", code) + "\n\n" + _given(entry, code))
    return "\n\n".join(sections) + "\n"


def kind_page(kind: str) -> str:
    """Return the page that lists all parts of a kind, with their settings."""
    title = kind[:1].upper() + kind[1:].replace("-", " ").replace("submodels", "sub-models")
    sections = [f"# {title}", INTRODUCTIONS[kind]]
    rows = [[f"[`{e.name}`](#{_anchor(e.name)})", e.summary] for e in entries(kind).values()]
    rows += [[f"`{prefix}:{rest}`", summary] for prefix, (_, rest, summary) in PREFIXED.get(kind, {}).items()]
    sections.append(table(["name", ""], rows))
    for entry in entries(kind).values():
        target = entry.load()
        sections.append(f"## {entry.name} {{ #{_anchor(entry.name)} }}\n\n{_facts(entry)}")
        sections += [of_docstring(target), setting_rows(entry, target, common=False)]
    return "\n\n".join(sections) + "\n"


def setting_rows(entry: Entry, target: Callable[..., Any], common: bool = True) -> str:
    """Return the settings of a part as a table: type, what is allowed, default, meaning."""
    own = settings(target)
    shared = [row for row in all_settings(entry.kind, target) if row.name not in {s.name for s in own}]
    found = _rows(own) if own else "It has no settings of its own."
    if common and shared:
        found += f"\n\nEvery {SINGULAR[entry.kind]} also takes:\n\n{_rows(shared)}"
    return found


def public_name(target: Any) -> tuple[str, str]:
    """Return the module and the name under which users import a class."""
    name, module = target.__name__, str(target.__module__)
    packages = (strategies, attacks, importlib.import_module(module.rpartition(".")[0]))
    return next((p.__name__ for p in packages if getattr(p, name, None) is target), module), name


def _rows(rows: list[Setting]) -> str:
    cells = []
    for row in rows:
        what = describe(row.annotation)
        default = "must be given" if row.required else f"`{value_text(row.default)}`"
        cells.append([f"`{row.name}`", what.type, plain(what.allowed), default, plain(what.meaning)])
    return table(["setting", "type", "allowed", "default", "meaning"], cells)


def _facts(entry: Entry) -> str:
    source = f"**Source:** {plain(entry.source)}<br>\n" if entry.source else ""
    return f"{source}**Code:** `{entry.target}`"


def _index(kind: str) -> str:
    rows = [[f"[{e.name}]({e.name}.md)", plain(e.summary), plain(e.source)] for e in entries(kind).values()]
    return "\n\n".join(
        [
            f"# {kind.capitalize()}",
            INTRODUCTIONS[kind],
            table(["name", "", "source"], rows),
            f"One of your own: [add a{' strategy' if kind == 'strategies' else 'n attack'}]"
            f"(../extend/{'aggregator' if kind == 'strategies' else 'attack'}.md).",
        ]
    )


def _given(entry: Entry, code: str) -> str:
    if "grid" not in code:
        return ""
    return (
        "`grid` and `initial_arrays` are what Flower's `ServerApp` hands to `main`, and the model to begin "
        "with; a whole app is in [a strategy in your Flower app](../tutorials/flower-user.md)."
    )


def _anchor(name: str) -> str:
    return name.replace(".", "-")
