"""Nested records as flat ones, for everything that knows columns or named numbers only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten(record: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """Return a record whose tables and lists are flattened: their keys and places become part of the name.

    An empty table or list leaves nothing.

    >>> flatten({"round": 1, "attack": {"success": {"flip": 0.5}}, "per_class": [0.1, None], "none": {}})
    {'round': 1, 'attack.success.flip': 0.5, 'per_class.0': 0.1, 'per_class.1': None}
    """
    return dict(_items("", record, separator))


def numbers(record: Mapping[str, Any], separator: str = "/") -> dict[str, float]:
    """Return the finite numbers of a record under flattened names; true is 1.

    >>> numbers({"loss": float("nan"), "verdict": "", "attack": {"weight": 0.25, "out": True}})
    {'attack/weight': 0.25, 'attack/out': 1.0}
    """
    from .values import finite

    found = {name: finite(value) for name, value in _items("", record, separator)}
    return {name: value for name, value in found.items() if value is not None}


def _items(prefix: str, value: Any, separator: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        pairs = ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        pairs = ((str(index), item) for index, item in enumerate(value))
    else:
        yield prefix, value
        return
    for key, item in pairs:
        yield from _items(f"{prefix}{separator}{key}" if prefix else key, item, separator)
