"""``fedplat show``: what is behind a name."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import UserError, nearest
from ..registry import KINDS, SINGULAR, Entry, entries, find
from ..scenarios import read_scenario, scenario_names, variant_names
from .common import console

if TYPE_CHECKING:
    from rich.console import Console

    from ..config import ExperimentConfig

_ROLE = re.compile(r":(?:func|class|meth|mod):`([^`]+)`")
_IN_A_SCENARIO = {
    "strategies": '[strategy.{name}], and "{name}" among strategies = [...]',
    "pre-aggregators": '[[strategy.STRATEGY.before]], name = "{name}"',
    "selectors": '[selection], name = "{name}"',
    "attacks": '[[attacks]], name = "{name}"',
    "models": '[model], name = "{name}"',
    "datasets": '[data], name = "{name}"',
    "partitions": '[partition], name = "{name}"',
    "devices": '[devices], name = "{name}"',
    "hardware": '[hardware], name = "{name}"',
    "availability": '[availability], name = "{name}"',
    "compressors": '[compression], name = "{name}"',
    "submodels": '[submodels] or [strategy.STRATEGY.submodels], name = "{name}"',
    "personal": '[personal] or [strategy.STRATEGY.personal], name = "{name}"',
    "topologies": '[topology] or [strategy.STRATEGY.topology], name = "{name}"',
    "worlds": '[world], name = "{name}"',
    "associations": '[topology], association = "{name}" or {{ name = "{name}", ... }}',
}


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
) -> None:
    """Show a scenario with all its defaults, or a part with its source and settings.

    NAME is one that "fedplat list" shows, or a scenario's TOML file.
    """
    screen = console()
    plain = name.partition(":")[0]
    is_scenario = plain in scenario_names() or plain.endswith(".toml")
    found = [entries(kind)[name] for kind in KINDS if name in entries(kind)]
    if name.startswith("hf:"):
        found = [find("partitions" if name.endswith("Partitioner") else "datasets", name)]
    if not is_scenario and not found:
        known = [*scenario_names(), *(other for kind in KINDS for other in entries(kind))]
        close = nearest(name, known)
        hint = f"did you mean '{close}'? " if close else ""
        raise UserError(f"nothing is called '{name}': {hint}All names: fedplat list")
    if is_scenario:
        _show_scenario(screen, name)
    for number, entry in enumerate(found):
        if number or is_scenario:
            screen.print()
        _show_entry(screen, entry)


def _show_scenario(screen: Console, name: str) -> None:
    import tomli_w

    from ..config import load

    raw, where = read_scenario(name)
    config = load(raw, where)
    values = config.to_dict()
    description = values.pop("description")
    screen.print(f"scenario {values['name']}", style="bold")
    if description:
        screen.print(description)
    if variants := variant_names(name):
        screen.print(
            f"variants: {', '.join(variants)} (fedplat run {name.partition(':')[0]}:{variants[0]} ...)"
        )
    screen.print(_memory(config), soft_wrap=True)
    screen.print("\nWith all defaults:\n")
    screen.print(tomli_w.dumps(values), end="", soft_wrap=True)


def _memory(config: ExperimentConfig) -> str:
    """Say what a run will need at the server, as far as that can be known without downloading data."""
    from ..needs import megabytes, needs_of
    from ..spill import spill_folder

    try:
        needs = needs_of(config)
    except UserError as error:
        return f"server memory: not known, since the data is not here ({error})"
    parts = []
    if set(needs.streamed) != set(config.strategies):
        parts.append(megabytes(needs.updates))
    if needs.streamed:
        names = ", ".join(needs.streamed)
        parts.append(f"about {megabytes(needs.waves)} at a time ({names})")
    texts = [
        f"server memory: {' or '.join(parts)} for the updates of {needs.clients} clients with "
        f"{needs.parameters:,} parameters"
    ]
    texts += [f"{name} keeps {megabytes(size)}" for name, size in needs.kept.items()]
    texts += [
        f"{name} needs {megabytes(size)} in {spill_folder()} for a temporary file"
        for name, size in needs.streamed.items()
        if size
    ]
    return "; ".join(texts)


def _show_entry(screen: Console, entry: Entry) -> None:
    from .setting_table import all_settings, setting_table

    target = entry.load()
    screen.print(f"{SINGULAR[entry.kind]} {entry.name}", style="bold")
    screen.print(entry.summary)
    screen.print(f"source: {entry.source or '–'}")
    screen.print(f"code:   {entry.target}", soft_wrap=True)
    screen.print(f"in a scenario: {_IN_A_SCENARIO[entry.kind].format(name=entry.name)}")
    if documentation := inspect.getdoc(target):
        screen.print("\n" + _ROLE.sub(r"\1", documentation))
    rows = all_settings(entry.kind, target)
    screen.print()
    screen.print(setting_table(rows) if rows else "It has no settings.")
