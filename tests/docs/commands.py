"""What is done with a command line of a page: run for real where that is cheap, else resolved.

To resolve ``fedplat run``, or any command about a scenario, is to load the scenario with all its overrides,
which checks every name, key and value; of a table, one cell is planned. Options are parsed by the command
itself. What uses data that needs no files is run for real, with one round of one step, and of several runs on
a page the first. The slow tests run all of them, a cell of each table, and, where ``FEDPLAT_DATA`` has the
data, each page's first command that needs it. A command that nobody knows is an error.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import click
import typer

from fedplat.cli import app, main
from fedplat.cli.benchmark import WHICH
from fedplat.cli.common import load_config
from fedplat.cli.table import chosen
from fedplat.tables.cells import Options, plan
from fedplat.tables.spec import Table, read_table

from .blocks import ROOT, Block

NEEDS_NO_FILES = {"digits", "shapes"}
LEAST = ["--set", "rounds=1", "--set", "training.steps=1"]
CHEAP = {"list", "show", "flower-app", "deploy init", "deploy check", "devices generate", "devices show"}
ABOUT_A_SCENARIO = {"run", "partition", "world", "backbone", "devices"}
OUTSIDE: dict[str, Callable[[list[str]], bool]] = {
    "ssh": lambda words: True,
    "source": lambda words: words[1] == ".venv/bin/activate",
    "ls": lambda words: Path(words[1]).exists(),
    "make": lambda words: all(f"\n{name}:" in (ROOT / "Makefile").read_text() for name in words[1:]),
    "mkdocs": lambda words: words[1] in ("build", "serve"),
    "pip": lambda words: words[1] == "install" and _extras_exist(words),
    "pytest": lambda words: True,
    "python": lambda words: words[1] == "-m",
    "python3": lambda words: words[1] == "-m",
    "ruff": lambda words: True,
    "git": lambda words: True,
    "tensorboard": lambda words: True,
    "mlflow": lambda words: True,
    "flwr": lambda words: _flower_run(words),
}


class Commands:
    """The command lines of one page, in its folder, in order."""

    def __init__(self, finished_run: Path, everything: bool) -> None:
        self.finished_run = finished_run
        self.everything = everything
        self.runs = 0
        self.runs_on_files = 0

    def check(self, line: str, block: Block) -> str:
        """Run or resolve a line and return which; raises AssertionError, or UserError, if it is wrong."""
        words = shlex.split(line)
        while "=" in words[0] and not words[0].startswith("-"):
            words.pop(0)  # variables
        name = Path(words[0]).name
        if name.endswith(".sh"):
            found = [path for path in Path().rglob(name) if str(path).endswith(words[0])]
            assert found or block.parse_only, f"{block.where}: no script {words[0]}"
            return "found"
        if name != "fedplat":
            assert name in OUTSIDE, f"{block.where}: what is '{name}'?"
            assert OUTSIDE[name](words) or block.parse_only, f"{block.where}: {line}"
            return "known"
        return self._fedplat(words[1:], block)

    def _fedplat(self, words: list[str], block: Block) -> str:
        _, values, path = parsed(words)
        if path == "devices" and "scenario" not in values:
            values["scenario"] = words[1]
        if path in ("report", "watch"):
            words = self._with_run(words, values)
        if path == "table":
            files = self._table(values) or not self.everything
        elif path in ABOUT_A_SCENARIO:
            files = self._scenario(path, values)
        else:
            files = path not in CHEAP and path != "report"
            if path == "benchmark" and values["which"]:
                assert values["which"] in WHICH, f"{block.where}: no benchmark {values['which']}"
        if block.parse_only or (files and not self._wanted(path)) or self._is_more_of_the_same(path, values):
            if path == "run" and values["out"] and not Path(values["out"]).exists():
                shutil.copytree(self.finished_run, values["out"])
            return "resolved"
        self.runs += path == "run"
        self.runs_on_files += files
        if path in ("run", "table"):
            words = cheaper(path, words, values)
        assert main(words) == 0, f"{block.where}: fedplat {shlex.join(words)}"
        return "run"

    def _is_more_of_the_same(self, path: str, values: dict[str, Any]) -> bool:
        """Whether the quick test leaves a command to the slow one: a page's first run stands for all."""
        return not self.everything and ((path == "run" and self.runs > 0) or bool(values.get("clean")))

    def _wanted(self, path: str) -> bool:
        return (
            self.everything
            and not self.runs_on_files
            and path in {*ABOUT_A_SCENARIO, "table"}
            and bool(os.environ.get("FEDPLAT_DATA"))
        )

    def _scenario(self, path: str, values: dict[str, Any]) -> bool:
        """Load the scenario with its changes; return whether it needs files, or a machine's Ray."""
        config = load_config(
            values["scenario"], values.get("overrides"), values.get("seed"), values.get("strategy") or ()
        )
        used = {config.data.name, config.data.settings().get("of", "digits")} - {"subset"}
        return (bool(used - NEEDS_NO_FILES) and ":" not in config.data.name) or values.get(
            "engine", "local"
        ) != "local"

    def _table(self, values: dict[str, Any]) -> bool:
        stem, table = read_table(values["name"])
        keep = chosen(table, values["rows"], values["columns"], values["blocks"])
        options = Options(1, 1, values["quick"], one_cell(table, keep), tuple(values["overrides"] or ()))
        (cell, *_), *_ = [list(plan(stem, table, options).runs.values())]
        return cell.config.data.name not in NEEDS_NO_FILES

    def _with_run(self, words: list[str], values: dict[str, Any]) -> list[str]:
        """Put a finished run where a report looks for one that was only resolved, or has a made-up hash."""
        for index, word in enumerate(words[1:], 1):
            if word.startswith("-") or "/" not in word:
                continue
            words[index] = word = word.replace("*", "1a2b3c4d")
            if not Path(word).exists():
                shutil.copytree(self.finished_run, word)
        return words


def parsed(words: list[str]) -> tuple[click.Command, dict[str, Any], str]:
    """Let the commands parse their arguments and options; return the last one, its values and its path."""
    command: click.Command = typer.main.get_command(app)
    path: list[str] = []
    context = None
    while True:
        context = command.make_context(path[-1] if path else "fedplat", list(words), parent=context)
        if not isinstance(command, click.Group) or not (rest := [*context._protected_args, *context.args]):
            return command, dict(context.params), " ".join(path)
        name, inner, words = command.resolve_command(context, rest)
        assert inner is not None
        if getattr(inner, "hidden", False):
            return (
                inner,
                dict(inner.make_context("devices", list(words), parent=context).params),
                " ".join(path),
            )
        command = inner
        path.append(str(name))


def cheaper(path: str, words: list[str], values: dict[str, Any]) -> list[str]:
    """Return a command with as little work as shows that it works."""
    if path == "run":
        known = values.get("overrides") or []
        more = [*LEAST, "--workers", "1", "--quiet"]
        if any(text.startswith("training=") for text in known):
            more = more[:2] + more[4:]
        return [word for word in words if word != "--quiet"] + more
    table: Table = read_table(values["name"])[1]
    keep = one_cell(table, chosen(table, values["rows"], values["columns"], values["blocks"]))
    axes = [axis for axis in (table.rows, table.columns, *table.blocks) if axis.name in keep]
    kept: list[str] = []
    for axis in axes:
        option = {table.rows.name: "--rows", table.columns.name: "--columns"}.get(axis.name, "--blocks")
        prefix = f"{axis.name}=" if option == "--blocks" else ""
        kept += [option, prefix + ",".join(keep[axis.name])]
    plain = ["table", values["name"], *kept, "--seeds", "1", "--rounds", "1", "--jobs", "1", "--quiet"]
    plain += ["--set", "training.steps=1", *(["--quick"] if values["quick"] else [])]
    plain += ["--check"] if values["check"] else []
    return plain + [w for text in values["overrides"] or () for w in ("--set", text)] + _out(values)


def one_cell(table: Table, keep: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the first value of every axis, of those kept; the quick part is kept, too."""
    found = {}
    quick = table.quick.keep if table.quick else {}
    for axis in (table.rows, table.columns, *table.blocks):
        names = keep.get(axis.name) or quick.get(axis.name) or [value.name for value in axis.values]
        found[axis.name] = list(names[:1])
    return found


def _out(values: dict[str, Any]) -> list[str]:
    return ["--out", str(values["out"])] if values["out"] else []


@cache
def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _extras_exist(words: list[str]) -> bool:
    named = re.findall(r"\[([\w,-]+)\]", " ".join(words))
    return {extra for text in named for extra in text.split(",")} <= set(_project()["optional-dependencies"])


def _flower_run(words: list[str]) -> bool:
    """Return whether an app is there, and its configuration has all the keys that are given."""
    if words[1] != "run":
        return words[1] in ("ls", "log", "stop", "supernode")
    project = tomllib.loads((Path(words[2]) / "pyproject.toml").read_text())
    given: list[str] = []
    if "--run-config" in words:
        given = re.findall(r"([\w-]+)=", re.sub(r"\"[^\"]*\"", "", words[words.index("--run-config") + 1]))
    return set(given) <= set(project["tool"]["flwr"]["app"]["config"])
