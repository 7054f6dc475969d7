"""The site: a page for every part, whose examples run, and a strict build."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fedplat.cli import main
from fedplat.registry import KINDS, entries
from fedplat.scenarios import scenario_names

from .blocks import ROOT, Block, read
from .commands import Commands
from .given import given
from .test_code_blocks import _check_toml

sys.path.append(str(ROOT / "docs"))

from _site import docstrings, parts, reference
from _site.examples import command_for, flower_for

WITH_PAGES = [entry for kind in parts.OWN_PAGES for entry in entries(kind).values()]


def test_every_strategy_and_attack_has_a_page_and_every_other_part_is_listed() -> None:
    made = dict(parts.pages())
    for kind in KINDS:
        for name in entries(kind):
            if kind in parts.OWN_PAGES:
                page = made[f"{kind}/{name}.md"]
                assert f"({name}.md)" in made[f"{kind}/index.md"]
                assert "## Settings" in page
                assert "## In an experiment" in page
            else:
                assert f"## {name} " in made[f"reference/{kind}.md"]
    assert all(f"## {name}\n" in reference.scenarios_page() for name in scenario_names())


def test_a_page_tells_settings_with_defaults_and_ranges_and_what_is_inferred() -> None:
    page = parts.part_page(entries("strategies")["trimmed-mean"])
    assert "| `beta` | number | &gt;= 0, &lt; 0.5 | `0.2` |".replace("&gt;", ">") in page
    assert "**Source:** Yin et al., ICML 2018, option II" in page
    assert "Inferred: everybody is kept if no cluster is found" in parts.part_page(
        entries("strategies")["flame"]
    )
    assert "## What is inferred" not in page


@pytest.mark.parametrize("entry", WITH_PAGES, ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_the_command_and_the_scenario_of_a_page_are_right(entry: object, tmp_path: Path) -> None:
    page = parts.part_page(entry)
    for block in read(page, f"{entry.name}.md"):
        if block.language == "toml":
            on = "fedins-shapes" if entry.name in ("fedins", "fedbn") else "quickstart"
            _check_toml(Block(**{**vars(block), "on": on}))
        elif block.language == "bash":
            resolved = Block(**{**vars(block), "parse_only": "because the slow test runs it"})
            assert Commands(tmp_path, False).check(*block.commands, resolved) == "resolved"


def test_the_flower_examples_of_all_pages_run() -> None:
    with given() as names:
        for entry in WITH_PAGES:
            code = flower_for(entry, entry.load(), parts.public_name).replace("num_rounds=10", "num_rounds=1")
            code = code.replace("num_rounds=50", "num_rounds=1")
            exec(compile(code, f"{entry.name}.md", "exec"), dict(names))


@pytest.mark.slow
@pytest.mark.parametrize("entry", WITH_PAGES, ids=lambda entry: f"{entry.kind}-{entry.name}")
def test_the_command_of_a_page_runs(entry: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    least = ["--set", "rounds=1", "--set", "training.steps=1", "--workers", "1", "--quiet", "--out", "run"]
    if "fedins-shapes" in command_for(entry):
        short = ["--set", "model.backbone.epochs=1", "--set", "model.backbone.gate=0"]
        least += short if entry.name == "fedins" else []
    assert main([*shlex.split(command_for(entry))[1:], *least]) == 0


def test_docstrings_become_markdown() -> None:
    text = (
        "Takes ``x`` < 2 by :func:`~a.b.rule`.\n\n    rule(x)\n\n=== ====\n``a``  one\n``b``  two\n=== ====\n"
    )
    assert docstrings.of_text(text).splitlines()[0] == "Takes `x` &lt; 2 by `rule`."
    assert "```python\nrule(x)\n```" in docstrings.of_text(text)


def test_the_configuration_and_the_command_line_are_complete() -> None:
    keys, commands = reference.keys_page(), reference.command_page()
    for table in ("[data]", "[[attacks]]", "[privacy]", "[submodels]", "[topology]"):
        assert f"## `{table}`" in keys
    for name in ("fedplat run", "fedplat table", "fedplat deploy init", "fedplat devices show"):
        assert f"## {name}\n" in commands


def test_no_page_asks_another_machine_for_anything() -> None:
    raw = (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^  font: false", raw, re.MULTILINE)
    assert not re.search(r"analytics|gtag|cdn|https?://", raw)


def test_the_extras_of_the_project_have_what_the_site_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any("mkdocs-material" in need for need in project["optional-dependencies"]["docs"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs pip install 'fedplat[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    made = tmp_path / "site"
    assert (made / "strategies/krum/index.html").is_file()
    assert (made / "attacks/alie/index.html").is_file()
    # Nothing is loaded from elsewhere: scripts, styles, fonts and pictures are the site's own.
    loaded = re.compile(r'<(?:script|img|link)[^>]+(?:src|href)="(?:https?:)?//[^"]+"')
    for page in made.rglob("*.html"):
        assert not [m for m in loaded.findall(page.read_text()) if "canonical" not in m], page
