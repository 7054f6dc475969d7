"""Pages about the shipped scenarios, the command line, a scenario's keys, and the Python interface."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import click
import typer
from pydantic import BaseModel

from fedplat.cli import app
from fedplat.cli.setting_table import describe, value_text
from fedplat.config import ExperimentConfig
from fedplat.config_parts import Part
from fedplat.scenarios import read_scenario, scenario_names, variant_names

from .docstrings import fence, of_docstring, plain, table

PYTHON = {
    "strategies": ("fedplat.strategies", "Strategies for a `ServerApp`, steps before a rule, wrappers."),
    "aggregators": ("fedplat.strategies.aggregators", "Rules as plain functions on a matrix of updates."),
    "attacks": ("fedplat.clients.attacks", "What clients that lie do; those on the reply are client mods."),
    "runtime": ("fedplat.runtime", "Engines: grids that run a `ClientApp` on this machine."),
    "rounds": ("fedplat.rounds", "The loop over the rounds of any strategy on any grid."),
    "updates": ("fedplat.updates", "The replies of a round as one matrix."),
    "registry": ("fedplat.registry", "Names, and what is behind them."),
}


def pages() -> Iterator[tuple[str, str]]:
    """Yield the address and the Markdown of every page of the reference that is not about parts."""
    yield "reference/scenarios.md", scenarios_page()
    yield "reference/command-line.md", command_page()
    yield "reference/scenario-file.md", keys_page()
    for name, (module, summary) in PYTHON.items():
        yield f"reference/python/{name}.md", module_page(module, summary)


def scenarios_page() -> str:
    """Return the page that lists the scenarios that come with fedplat."""
    sections = [
        "# Scenarios",
        "A scenario is a situation: data, who holds it, model, local training, attacks. `fedplat show NAME` "
        "prints one with every default, `fedplat run NAME` runs it, "
        "`fedplat run NAME:VARIANT` one of its variants.",
    ]
    for name in scenario_names():
        raw, _ = read_scenario(name)
        facts = [
            ["data", f"`{raw['data']['name']}`"],
            ["clients", f"{raw['partition'].get('clients') or 'as many as the data have'}"],
            ["model", f"`{raw['model']['name']}`"],
            ["rounds", str(raw["rounds"])],
            ["strategies", ", ".join(f"`{s}`" for s in raw.get("strategies", ["mean"]))],
            ["attacks", ", ".join(f"`{a['name']}`" for a in raw.get("attacks", [])) or "none"],
            ["variants", ", ".join(f"`{v}`" for v in variant_names(name))],
        ]
        sections.append(f"## {name}\n\n{plain(str(raw.get('description', '')))}.")
        sections.append(table(["", ""], [row for row in facts if row[1]]))
    return "\n\n".join(sections) + "\n"


def command_page() -> str:
    """Return the page of the command line: every command with its arguments and options."""
    root = typer.main.get_command(app)
    sections = [
        "# Command line",
        "Exit status: 0 success, 2 a mistake in what you typed or wrote, 130 stopped by Ctrl-C and 143 by "
        "SIGTERM, both with the state of a run saved. `fedplat COMMAND --help` tells the same as this page.",
    ]
    sections += list(_commands(root, "fedplat"))
    return "\n\n".join(sections) + "\n"


def keys_page() -> str:
    """Return the page of a scenario file's tables and keys."""
    sections = [
        "# Scenario file",
        "A TOML file, in which a named part takes the settings of what it names besides the keys below. "
        "`fedplat show quickstart` prints one with all defaults; `--set key.path=value` changes a key on the "
        "command line. A key that nobody knows is refused, with the nearest right one.",
    ]
    simple, tables = [], []
    for name, field in ExperimentConfig.model_fields.items():
        part = _model_in(field.annotation)
        if part is None:
            if name != "strategy":
                simple.append(_row(name, field))
            continue
        kind = part.kind if issubclass(part, Part) else ""
        heading = f"[[{name}]]" if name == "attacks" else f"[{name}]"
        rows = [_row(key, inner) for key, inner in part.model_fields.items()]
        names = f"Names: [{kind}]({_place(kind)})." if kind else ""
        tables.append("\n\n".join([f"## `{heading}`", of_docstring(part), names, table(_HEADINGS, rows)]))
    sections += ["## At the top", table(_HEADINGS, simple), *tables]
    return "\n\n".join(section for section in sections if section) + "\n"


def module_page(name: str, summary: str) -> str:
    """Return the page of what a module offers."""
    module = importlib.import_module(name)
    sections = [f"# {name}", summary, of_docstring(module) if not hasattr(module, "__path__") else ""]
    names = getattr(module, "__all__", None) or [
        key for key, value in vars(module).items() if not key.startswith("_") and _lives_in(value, name)
    ]
    for key in names:
        sections.append(_thing(key, getattr(module, key)))
    return "\n\n".join(section for section in sections if section) + "\n"


_HEADINGS = ("key", "type", "allowed", "default", "meaning")


def _commands(command: click.Command, path: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from _commands(inner, f"{path} {name}")
        return
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    words = " ".join([path, "[OPTIONS]", *(str(a.make_metavar(click.Context(command))) for a in arguments)])
    rows = []
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden and option.name != "help":
            record = option.get_help_record(click.Context(command)) or ("", "")
            rows.append([f"`{record[0]}`", plain(record[1])])
    text = plain(inspect.cleandoc(command.help or ""))
    yield "\n\n".join(
        [
            f"## {path}",
            fence("text", words),
            text,
            table(["option", ""], rows) if rows else "It has no options.",
        ]
    )


def _row(name: str, field: Any) -> list[str]:
    what = describe(Annotated[field.annotation, field])
    default = "must be given" if field.is_required() else f"`{value_text(field.get_default())}`"
    return [f"`{name}`", what.type, plain(what.allowed), default, plain(what.meaning)]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((found for inner in get_args(annotation) if (found := _model_in(inner))), None)


def _place(kind: str) -> str:
    return f"../{kind}/index.md" if kind in ("strategies", "attacks") else f"{kind}.md"


def _lives_in(value: Any, module: str) -> bool:
    return isinstance(value, type | types.FunctionType) and value.__module__ == module


def _thing(name: str, value: Any) -> str:
    if not callable(value):
        return f"## {name}"
    lines = [f"## {name}", fence("python", _signature(name, value)), of_docstring(value)]
    if inspect.isclass(value):
        for key, member in vars(value).items():
            if not key.startswith("_") and inspect.isfunction(member) and inspect.getdoc(member):
                lines += [f"### {name}.{key}", fence("python", _signature(key, member)), of_docstring(member)]
    return "\n\n".join(lines)


def _signature(name: str, value: Any) -> str:
    try:
        text = f"{name}{inspect.signature(value)}"
    except (TypeError, ValueError):
        return name
    # What annotations are is told in the docstrings; what matters here are the names and the defaults.
    signature = inspect.signature(value)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = f"{name}{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}"
    return text if len(text) < 100 else text.replace("(", "(\n    ", 1).replace(", ", ",\n    ")
