"""The settings of a part as a table: type, allowed values, default."""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from ..registry import Setting, settings

if TYPE_CHECKING:
    from rich.table import Table

_NAMES = {int: "integer", float: "number", bool: "true/false", str: "text", Path: "path", Any: "any"}
_BOUNDS = {"gt": "> {}", "ge": ">= {}", "lt": "< {}", "le": "<= {}"}
_OTHERS = {"min_length": "at least {} long", "max_length": "at most {} long", "multiple_of": "multiple of {}"}


@dataclass(frozen=True)
class Description:
    """What an annotation says: the type in words, what is allowed, and what the setting means."""

    type: str
    allowed: str = ""
    meaning: str = ""


def describe(annotation: Any) -> Description:
    """Say in words what values an annotation allows.

    >>> from pydantic import Field
    >>> describe(Annotated[float, Field(gt=0, le=1)])
    Description(type='number', allowed='> 0, <= 1', meaning='')
    >>> describe(Literal["delta", "weights"]).allowed
    '"delta", "weights"'
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = describe(arguments[0])
        meanings = [m for item in arguments[1:] if (m := getattr(item, "description", None))]
        limits = [inner.allowed, *_limits(arguments[1:])]
        return Description(inner.type, ", ".join(filter(None, limits)), " ".join(meanings) or inner.meaning)
    if origin in (Union, types.UnionType):
        options = [describe(option) for option in arguments if option is not type(None)]
        kinds = " or ".join(dict.fromkeys(option.type for option in options))
        optional = " or nothing" if type(None) in arguments else ""
        allowed = " or ".join(filter(None, (option.allowed for option in options)))
        return Description(
            f"{kinds}{optional}", allowed, " ".join(filter(None, (o.meaning for o in options)))
        )
    if origin is Literal:
        return Description("choice", ", ".join(value_text(value) for value in arguments))
    if isinstance(origin, type) and issubclass(origin, Sequence) and arguments:
        item = describe(arguments[0])
        return Description(
            f"list of {item.type}", f"each {item.allowed}" if item.allowed else "", item.meaning
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Description("table")
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return Description("table")
    return Description(_NAMES.get(annotation) or str(getattr(annotation, "__name__", annotation)))


def value_text(value: Any) -> str:
    """Return a value in the form a scenario file has it.

    >>> value_text((200, 200)), value_text(True), value_text("delta"), value_text(None)
    ('[200, 200]', 'true', '"delta"', 'nothing')
    """
    return "nothing" if value is None else json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def all_settings(kind: str, target: Callable[..., Any]) -> list[Setting]:
    """Return the settings of a target, after those that all parts of its kind have."""
    return [*_common(kind), *settings(target)]


def setting_table(rows: Sequence[Setting]) -> Table:
    """Return the settings as a table for the terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    described = [(row, describe(row.annotation)) for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("setting", "type", "allowed", "default"):
        table.add_column(heading, overflow="fold")
    if any(description.meaning for _, description in described):
        table.add_column("meaning")
    for row, description in described:
        default = "must be given" if row.required else value_text(row.default)
        cells = [row.name, description.type, description.allowed, default, description.meaning]
        table.add_row(*map(Text, cells[: len(table.columns)]))
    return table


def _limits(metadata: Iterable[Any]) -> list[str]:
    found = []
    for item in metadata:
        # pydantic's Field carries its constraints as a list of single ones.
        for limit in getattr(item, "metadata", [item]):
            for attribute, text in {**_BOUNDS, **_OTHERS}.items():
                if (bound := getattr(limit, attribute, None)) is not None:
                    found.append(text.format(bound))
    return found


def _common(kind: str) -> list[Setting]:
    from ..config_parts import Part

    fields = next(part.model_fields for part in Part.__subclasses__() if part.kind == kind)
    empty = inspect.Parameter.empty
    return [
        Setting(name, Annotated[field.annotation, field], empty if field.is_required() else field.default)
        for name, field in fields.items()
        if name != "name"
    ]
