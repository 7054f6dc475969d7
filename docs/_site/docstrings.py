"""Docstrings as Markdown: roles, literals and indented code become what a Markdown page has for them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

_ROLE = re.compile(r":(?:func|class|meth|mod):`~?\.?([^`]+)`")
_LITERAL = re.compile(r"``(.+?)``", re.DOTALL)
_CODE = re.compile(r"(`[^`]*`)")
_SENTENCE = re.compile(r"(?<=[.:])\s+(?=[A-Z`])")
_ABBREVIATION = re.compile(r"(?:et al|cf|e\.g|i\.e|vs|Dr|El)\.$")


def of_docstring(thing: Any) -> str:
    """Return a thing's docstring as Markdown; empty if it has none of its own.

    >>> def rule():
    ...     '''Mean of ``x`` by :func:`weights`.
    ...
    ...     It is n < 2.
    ...
    ...         rule(x)
    ...     '''
    >>> print(of_docstring(rule))
    Mean of `x` by `weights`.
    <BLANKLINE>
    It is n &lt; 2.
    <BLANKLINE>
    ```python
    rule(x)
    ```
    """
    return of_text(inspect.getdoc(thing) or "")


def of_text(text: str) -> str:
    """Return a cleaned docstring as Markdown."""
    return "\n\n".join(_block(block) for block in _blocks(text))


def usage_of(thing: Any) -> str:
    """Return the first indented code block of a docstring; empty if there is none."""
    for block in _blocks(inspect.getdoc(thing) or ""):
        if block.startswith("    "):
            return inspect.cleandoc(block)
    return ""


def without_code(text: str) -> str:
    """Return a docstring without its code blocks."""
    return "\n\n".join(block for block in _blocks(text) if not block.startswith(("    ", ">>>", "===")))


def inferred(text: str) -> list[str]:
    """Return the sentences of a docstring that say what is inferred, where a paper is silent.

    >>> inferred("Votes. Inferred: a tie moves nothing. Needs n > 2.")
    ['Inferred: a tie moves nothing.']
    """
    found = []
    for block in _blocks(without_code(text)):
        sentences: list[str] = []
        for part in _SENTENCE.split(block.replace("\n", " ")):
            broken = sentences and (_ABBREVIATION.search(sentences[-1]) or sentences[-1].endswith(":"))
            sentences[len(sentences) - bool(broken) :] = [f"{sentences[-1]} {part}" if broken else part]
        found += [sentence for sentence in sentences if "inferred" in sentence.lower()]
    return found


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, without the columns that are empty in every row."""
    kept = [i for i, heading in enumerate(headings) if not i or any(row[i] for row in rows)]
    lines = [[headings[i] for i in kept], ["---"] * len(kept)]
    lines += [[_cell(row[i]) for i in kept] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fence(language: str, text: str) -> str:
    """Return a code block."""
    return f"```{language}\n{text.strip()}\n```"


def plain(text: str) -> str:
    """Return text in which nothing but literals means anything to Markdown."""
    text = _LITERAL.sub(r"`\1`", _ROLE.sub(lambda m: f"`{m[1].split('.')[-1]}`", text))
    parts = _CODE.split(text)
    return "".join(part if i % 2 else _escaped(part) for i, part in enumerate(parts))


def _cell(text: str) -> str:
    """Return text for a cell: a bar outside of code would begin the next one."""
    parts = _CODE.split(text.replace("\n", " "))
    return "".join(part if i % 2 else part.replace("|", "&#124;") for i, part in enumerate(parts))


def _escaped(text: str) -> str:
    text = text.replace("<", "&lt;").replace("|", "&#124;").replace("__", r"\_\_")
    return re.sub(r"(?<![\w*])\*(?=\w)|(?<=\w)\*(?![\w*])|(?<=\w)\*(?=\w)", r"\\*", text)


def _blocks(text: str) -> list[str]:
    """Split at empty lines; neighbouring indented blocks stay one."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if found and block.startswith("    ") and found[-1].startswith("    "):
            found[-1] += "\n\n" + block
        elif block.strip():
            found.append(block)
    return found


def _block(block: str) -> str:
    if block.startswith(">>>"):
        return fence("pycon", block)
    if block.startswith("==="):
        return _grid(block)
    if block.startswith("    "):
        code = inspect.cleandoc(block)
        return fence("python" if _is_python(code) else "text", code)
    return plain(block)


def _grid(block: str) -> str:
    """Return a simple table of reStructuredText as one of Markdown."""
    lines = block.splitlines()
    edge = len(lines[0].split()[0])
    rows: list[list[str]] = []
    for line in lines[1:]:
        first, rest = line[:edge].strip(), line[edge:].strip()
        if line.startswith("==="):
            continue
        if first or not rows:
            rows.append([plain(first), plain(rest)])
        else:
            rows[-1][1] += " " + plain(rest)
    return table(["", ""], rows)


def _is_python(code: str) -> bool:
    try:
        compile(code, "docstring", "exec")
    except SyntaxError:
        return False
    return True
