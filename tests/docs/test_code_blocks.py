"""Every code block of the README and of the documentation does what it says."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fedplat.cli import main
from fedplat.config import load
from fedplat.scenarios import read_scenario
from fedplat.tables.spec import read_table

from .blocks import ROOT, Block, blocks_of, pages, read
from .commands import LEAST, Commands
from .given import given

PAGES = [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in pages() if blocks_of(page)]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that reports are made of."""
    path = tmp_path_factory.mktemp("docs") / "run"
    assert main(["run", "quickstart", *LEAST, "--out", str(path), "--workers", "1", "--quiet"]) == 0
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A page's own folder, from which its modules are imported, and forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_work(page: Path, folder: Path, finished_run: Path) -> None:
    _work_through(page, finished_run, everything=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_all_blocks_of_a_page_work_on_real_data(page: Path, folder: Path, finished_run: Path) -> None:
    found = _work_through(page, finished_run, everything=True)
    if not found:
        pytest.skip("the quick test runs all that there is on this page")


def _work_through(page: Path, finished_run: Path, everything: bool) -> list[str]:
    """Check a page's blocks in order; return what the quick test leaves out."""
    blocks = blocks_of(page)
    commands = Commands(finished_run, everything)
    more: list[str] = []
    if everything and not any(block.slow or block.commands for block in blocks):
        return more
    with ExitStack() as stack:
        namespace: dict[str, Any] = {}
        for block in blocks:
            if block.title:
                Path(block.title).parent.mkdir(parents=True, exist_ok=True)
                Path(block.title).write_text(block.text)
        for block in blocks:
            if block.output or block.language in ("", "text"):
                continue
            if block.language == "python":
                code = compile(block.text, block.where, "exec")
                if block.title or block.parse_only or (block.slow and not everything):
                    continue
                namespace = namespace or stack.enter_context(given())
                exec(code, namespace)
            elif block.language == "toml":
                _check_toml(block)
            else:
                for line in block.commands:
                    if block.slow and not everything:
                        more.append(commands.check(line, _resolved(block)))
                    else:
                        more.append(commands.check(line, block))
    return more


def _resolved(block: Block) -> Block:
    return Block(block.page, block.line, block.language, block.title, block.text, parse_only="because slow")


def _check_toml(block: Block) -> None:
    """Load a scenario or a table; what is only a part of a scenario is put on top of one."""
    values = tomllib.loads(block.text)
    if block.title.endswith("pyproject.toml") or block.parse_only:
        return
    if "rows" in values:
        path = Path(block.title or "block.toml")
        path.write_text(block.text)
        read_table(str(path))
    elif {"rounds", "model", "data"} <= values.keys():
        load({"name": "block", **values}, block.where)
    else:
        load(_on_top(read_scenario(block.on)[0], values), block.where)


def _on_top(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scenario with a block's keys; a part of another name takes nothing over."""
    found = dict(base)
    for key, value in values.items():
        there = found.get(key)
        merge = isinstance(value, dict) and isinstance(there, dict)
        same = merge and value.get("name", there.get("name")) == there.get("name")
        found[key] = {**there, **value} if same else value
    if "strategies" in values or "strategy" in values:
        kept = {} if "strategies" in values else base.get("strategy", {})
        found["strategy"] = {**kept, **values.get("strategy", {})}
        named = [name for name in found["strategy"] if name not in found["strategies"]]
        found["strategies"] = [*found["strategies"], *named]
    return found


def test_a_block_is_read_with_its_title_and_what_is_said_about_it() -> None:
    text = "<!-- docs: slow -->\n```bash\nfedplat run x \\\n  --quiet   # why\nmake a && make b\n```\n"
    text += '```toml title="a.toml"\n```\n'
    first, second = read(text, "page")
    assert first.slow
    assert first.commands == ["fedplat run x    --quiet", "make a", "make b"]
    assert (second.title, second.slow, second.line) == ("a.toml", False, 7)


@pytest.mark.parametrize(
    "text",
    [
        "<!-- docs: fast -->\n```bash\n```\n",
        "<!-- docs: parse-only -->\n```bash\n```\n",
        "<!-- docs: slow -->\nand no block\n",
        "```pythn\n```\n",
        "- so:\n    ```bash\n    ```\n",
    ],
)
def test_a_marker_or_a_language_that_means_nothing_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="page:"):
        list(read(text, "page"))


@pytest.mark.parametrize(
    "line",
    [
        "fedplat run quickstart --set training.lrr=1",
        "fedplat run quickstart --strategy medain",
        "fedplat show trimed-mean",
        "fedplat run quickstart --fast",
        "fedplt run quickstart",
        "superlink/start.sh",
    ],
)
def test_a_wrong_command_is_found(line: str, folder: Path, finished_run: Path) -> None:
    block = Block("page", 1, "bash", "", line)
    with pytest.raises(Exception, match=r"lrr|medain|trimed|--fast|fedplt|script"):
        Commands(finished_run, everything=False).check(line, block)


def test_a_block_without_a_scenario_of_its_own_goes_on_top_of_one() -> None:
    base = {
        "strategies": ["mean"],
        "data": {"name": "digits", "test_fraction": 0.1},
        "strategy": {"mean": {}},
    }
    assert _on_top(base, {"data": {"name": "mnist"}})["data"] == {"name": "mnist"}
    assert _on_top(base, {"data": {"root": "."}})["data"] == {**base["data"], "root": "."}
    assert _on_top(base, {"strategy": {"own": {"name": "krum"}}})["strategies"] == ["mean", "own"]
