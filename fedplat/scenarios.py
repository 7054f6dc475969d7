"""Scenario files: finding one by name, reading it, and changing values in it from the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from .errors import UserError, unknown_name

_WHO_AND_WHEN = {"clients", "fraction", "count", "richest_in", "start", "on", "off"}
_KEPT_WITH_A_NEW_NAME = {"name", "root", "download"} | _WHO_AND_WHEN


def scenario_names() -> list[str]:
    """Return the names of the scenarios that come with fedplat."""
    folder = files("fedplat.experiments").joinpath("scenarios")
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def read_scenario(scenario: str) -> tuple[dict[str, Any], str]:
    """Return a scenario's values and the name to use for it in messages.

    ``scenario`` is a name or a path to a TOML file, and may go on with ``:variant``: the values of the table
    ``[variants.<variant>]`` then replace those of the same key. Without it the file's ``variant`` is taken,
    if it names one. Raises UserError if there is no such file or variant, or it is not TOML.
    """
    raw, where, variant = _read(scenario)
    variants, usual = raw.pop("variants", {}), raw.pop("variant", "")
    if variant := variant or str(usual):
        if not isinstance(variants, dict) or variant not in variants:
            raise UserError(f"{where}: {unknown_name('variant', variant, variants)}")
        _merge(raw, variants[variant])
        raw["name"] = f"{raw['name']}-{variant}"
    return raw, where


def variant_names(scenario: str) -> list[str]:
    """Return the names of a scenario's variants."""
    return list(_read(scenario)[0].get("variants", {}))


def _read(scenario: str) -> tuple[dict[str, Any], str, str]:
    """Return a scenario's values, its name in messages, and the variant asked for."""
    head, _, variant = scenario.rpartition(":")
    if head.endswith(".toml") or head in scenario_names():
        return *_read_file(head), variant
    return *_read_file(scenario), ""


def _merge(raw: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(raw.get(key), dict):
            _merge(raw[key], value)
        else:
            raw[key] = value


def _read_file(scenario: str) -> tuple[dict[str, Any], str]:
    if scenario.endswith(".toml") or "/" in scenario:
        path = Path(scenario)
        if not path.is_file():
            raise UserError(f"{scenario}: there is no such file")
        return _parse(path.read_bytes(), scenario, path.stem), scenario
    if scenario not in scenario_names():
        raise unknown_name("scenario", scenario, scenario_names())
    source = files("fedplat.experiments").joinpath("scenarios", f"{scenario}.toml")
    return _parse(source.read_bytes(), scenario, scenario), scenario


def _parse(content: bytes, where: str, name: str) -> dict[str, Any]:
    try:
        return {"name": name, **tomllib.loads(content.decode())}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: not a TOML file: {error}") from None


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    """Set values in place from ``key.path=value`` texts; values are read as TOML, or else as plain text.

    List elements are addressed by number (``attacks.0.fraction=0.3``). Giving a part another ``name`` drops
    the settings of the old one. Raises UserError for a text without ``=`` or a path through a plain value.
    """
    pairs = []
    for text in overrides:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise UserError(f"--set {text}: expected KEY=VALUE, for example --set training.lr=0.05")
        pairs.append((key.strip().split("."), _value(value.strip())))
    # Names first, so that a new part's settings given beside its name are not dropped with the old ones.
    for path, value in sorted(pairs, key=lambda pair: pair[0][-1] != "name"):
        _set(raw, path, value)


def _set(raw: dict[str, Any], path: list[str], value: Any) -> None:
    current: Any = raw
    for depth, step in enumerate(path[:-1]):
        if isinstance(current, list):
            current = _element(current, step, path)
        elif isinstance(current, dict):
            current = current.setdefault(step, {})
        if not isinstance(current, dict | list):
            raise UserError(
                f"--set {'.'.join(path)}: '{'.'.join(path[: depth + 1])}' is a value, not a table"
            )
    if isinstance(current, list):
        _element(current, path[-1], path)
        current[int(path[-1])] = value
        return
    if path[-1] == "name" and len(path) > 1 and current.get("name") != value:
        for key in current.keys() - _KEPT_WITH_A_NEW_NAME:
            del current[key]
    current[path[-1]] = value


def _element(items: list[Any], step: str, path: list[str]) -> Any:
    if not step.isdigit() or int(step) >= len(items):
        raise UserError(f"--set {'.'.join(path)}: '{step}' is not one of the elements 0 to {len(items) - 1}")
    return items[int(step)]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
