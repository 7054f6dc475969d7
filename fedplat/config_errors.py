"""Tells a user what is wrong with a configuration: the file, the key, what was found, what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from .errors import nearest


def explain(error: ValidationError, schema: type[BaseModel], raw: Mapping[str, Any], where: str) -> str:
    """Return one line per mistake.

    Unknown keys come with the nearest known one and all that are allowed at that place.
    """
    lines = []
    for problem in error.errors():
        location = [str(step) for step in problem["loc"] if not str(step).startswith(("tuple[", "function-"))]
        key = ".".join(location)
        kind = problem["type"]
        if kind == "extra_forbidden":
            allowed = _keys_at(schema, location[:-1])
            close = nearest(location[-1], allowed)
            hint = f"did you mean '{close}'? " if close else ""
            lines.append(f"{where}: {key}: unknown key; {hint}Allowed: {', '.join(allowed)}")
        elif kind == "missing":
            lines.append(f"{where}: {key}: missing")
        else:
            found = _value_at(raw, location)
            message = str(problem["msg"]).removeprefix("Value error, ")
            lines.append(f"{where}: {key}: found {found!r}; {message[:1].lower()}{message[1:]}")
    return "\n".join(dict.fromkeys(lines))


def _keys_at(schema: type[BaseModel], location: Sequence[str]) -> list[str]:
    current: Any = schema
    for step in location:
        if isinstance(current, type) and issubclass(current, BaseModel):
            names = {field.alias or name: field.annotation for name, field in current.model_fields.items()}
            current = _without_none(names.get(step))
        else:
            options = get_args(current)
            if len(options) == 2 and options[1] is Ellipsis:
                options = (options[0],) * (int(step) + 1 if step.isdigit() else 0)
            current = options[int(step)] if step.isdigit() and int(step) < len(options) else None
    if isinstance(current, type) and issubclass(current, BaseModel):
        return sorted(
            field.alias or name for name, field in current.model_fields.items() if not field.exclude
        )
    return []


def _without_none(annotation: Any) -> Any:
    """Return what else a value may be that may be None."""
    options = [option for option in get_args(annotation) if option is not type(None)]
    return options[0] if len(options) == 1 and type(None) in get_args(annotation) else annotation


def _value_at(raw: Any, location: Sequence[str]) -> Any:
    for step in location:
        if isinstance(raw, Mapping) and step in raw:
            raw = raw[step]
        elif isinstance(raw, list | tuple) and step.isdigit() and int(step) < len(raw):
            raw = raw[int(step)]
        else:
            break
    return raw
