"""The code blocks of a Markdown page, and what a comment before one says about it.

A block with ``title="NAME"`` is a file of that name. A comment ``<!-- docs: ... -->`` before a block is:

``slow``                    it takes long, and runs with the slow tests only
``parse-only because WHY``  it is checked as far as that goes without running it
``on SCENARIO``             what a TOML block's keys are put on top of, in place of the quickstart
``output``                  it is something printed, not something to type
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LANGUAGES = {"python", "bash", "console", "toml", "text", ""}

_FENCE = re.compile(r"^```(\w*)(?:\s+title=\"([^\"]+)\")?\s*$")
_MARKER = re.compile(r"^<!-- docs: (.+?) -->$")


@dataclass(frozen=True)
class Block:
    """A code block: where it is, its language, file name, text, and what is said about it."""

    page: str
    line: int
    language: str
    title: str
    text: str
    slow: bool = False
    parse_only: str = ""
    on: str = "quickstart"
    output: bool = False

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The command lines: comments and prompts left out, lines that go on joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        bare = (re.sub(r"(^|\s)#(\s.*)?$", "", line).strip() for line in lines)
        return [part.strip() for line in bare for part in line.split("&&") if part.strip()]


def pages() -> list[Path]:
    """Return the pages whose blocks are run: the README and everything in docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: Path) -> list[Block]:
    return list(read(page.read_text(), page.relative_to(ROOT).as_posix()))


def read(text: str, page: str) -> Iterator[Block]:
    """Yield the blocks of a page; raises ValueError for a marker, or a language, that means nothing."""
    marker, opened, head = "", 0, ("", "")
    inside: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if inside is not None:
            if line.strip() == "```":
                yield _block(page, opened, head, inside, marker)
                inside, marker = None, ""
            else:
                inside.append(line)
        elif line.startswith("```"):
            if not (match := _FENCE.match(line)) or match[1] not in LANGUAGES:
                raise ValueError(
                    f"{page}:{number}: {line}: expected one of {sorted(LANGUAGES)}, perhaps a title"
                )
            head, opened, inside = (match[1], match[2] or ""), number, []
        elif line.lstrip().startswith("```"):
            raise ValueError(f"{page}:{number}: an indented block, which no test would see")
        elif match := _MARKER.match(line.strip()):
            marker = match[1]
            _flags(marker, f"{page}:{number}")
        elif line.strip() and marker:
            raise ValueError(f"{page}:{number}: a marker, '{marker}', and no block after it")


def _block(page: str, line: int, head: tuple[str, str], lines: list[str], marker: str) -> Block:
    return Block(page, line, *head, "\n".join(lines) + "\n", **_flags(marker, f"{page}:{line}"))


def _flags(marker: str, where: str) -> dict[str, Any]:
    head, _, rest = marker.partition(" ")
    if marker in ("", "slow", "output"):
        return {marker: True} if marker else {}
    if head == "parse-only" and rest.startswith("because ") and len(rest) > 12:
        return {"parse_only": rest}
    if head == "on" and rest and " " not in rest:
        return {"on": rest}
    raise ValueError(f"{where}: <!-- docs: {marker} --> is no marker; see {Path(__file__).name}")
