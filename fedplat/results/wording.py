"""Settings and facts in words, as the report writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..registry import KINDS, SINGULAR, entries
from .tables import NOTHING


def named_part(kind: str, table: Mapping[str, Any], skip: tuple[str, ...] = ()) -> str:
    """Return a named part as ``name, what it is (source; setting = value, ...)``."""
    name = table["name"]
    entry = entries(kind).get(name) if kind in KINDS else None
    text = (
        f"{name}, {entry.summary}" if entry else f"{name} ({SINGULAR.get(kind, kind)} given by import path)"
    )
    given = settings_text({key: value for key, value in table.items() if key not in ("name", *skip)})
    inner = "; ".join(filter(None, [entry.source if entry else "", given]))
    return f"{text} ({inner})" if inner else text


def settings_text(values: Mapping[str, Any]) -> str:
    """Return ``setting = value, ...``.

    >>> settings_text({"lr": 0.1, "nesterov": True, "steps": [1, 2]})
    'lr = 0.1, nesterov = true, steps = 1, 2'
    """
    return ", ".join(f"{key} = {value_text(value)}" for key, value in values.items())


def value_text(value: Any) -> str:
    """Return a value as a configuration file would have it, more or less.

    >>> value_text([{"name": "low", "mb": 100}, {"name": "high", "mb": 2000}])
    'low (mb = 100); high (mb = 2000)'
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
        named = [(item.get("name"), {k: v for k, v in item.items() if k != "name"}) for item in value]
        texts = [(name, settings_text(rest)) for name, rest in named]
        return "; ".join(f"{name} ({text})" if name else text for name, text in texts)
    if isinstance(value, list | tuple):
        return ", ".join(map(value_text, value))
    if isinstance(value, Mapping):
        return settings_text(value)
    return NOTHING if value is None else str(value)


def bullets(facts: Mapping[str, str]) -> str:
    """Return facts as a Markdown list."""
    return "\n".join(f"- {key}: {value}" for key, value in facts.items())
