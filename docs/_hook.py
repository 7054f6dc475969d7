"""MkDocs' hook: adds the generated pages, and tells in words where the repository's other files are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from _site import parts, reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
_DOCS = Path(__file__).parent


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every generated page below the entry of the navigation that names its folder."""
    made = {address: text for pages in (parts.pages, reference.pages) for address, text in pages()}
    config.extra["generated"] = made
    config.nav = [_expanded(entry, made) for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those in the folder."""
    for address, text in config.extra["generated"].items():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files that are not part of the site into their names in the repository."""
    here = (_DOCS / page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        picture, text, target, _ = match.groups()
        path = (here / target).resolve()
        if picture or "://" in target or path.is_relative_to(_DOCS) or not path.exists():
            return match[0]
        name = path.relative_to(_DOCS.parent).as_posix()
        return f"`{name}`" if text.strip("`") in (name, path.name) else f"{text} (`{name}`)"

    return _LINK.sub(replaced, markdown)


def _expanded(entry: Any, made: dict[str, str]) -> Any:
    """Return an entry in which ``{title: folder/}`` has the folder's generated pages."""
    if isinstance(entry, dict):
        return {title: _expanded(inner, made) for title, inner in entry.items()}
    if isinstance(entry, list):
        return [_expanded(inner, made) for inner in entry]
    if isinstance(entry, str) and entry.endswith("/"):
        inside = [a for a in made if a.startswith(entry) and "/" not in a.removeprefix(entry)]
        return sorted(inside, key=lambda a: (not a.endswith("index.md"), a))
    return entry
