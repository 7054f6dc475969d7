"""The names a user can type, and where the thing behind each name lives.

Nothing is imported until a name is used, so listing all names costs no torch import. Two rules make a
new part one file and one line of the catalogue:

* a target's **keyword-only parameters are its settings**; a configuration may set exactly these, and
  their annotations (``Annotated[float, Field(gt=0)]``) are what a value is checked against;
* ``module:attribute`` is accepted wherever a name is, for parts that live in the user's own code: in an
  installed package, or in a file of the folder that the command was started in.

Other packages add names through the entry-point group ``fedplat.<kind>``, e.g. ``fedplat.strategies``.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, get_type_hints

from .catalogue import BUILT_IN, PACKAGES, PREFIXED
from .errors import UserError, unknown_name


@dataclass(frozen=True)
class Entry:
    """One name: its kind, the ``module:attribute`` behind it, a summary and the publication it follows.

    With an ``argument``, the thing behind the name is what the target returns for it.
    """

    kind: str
    name: str
    target: str
    summary: str
    source: str = ""
    argument: str | None = None

    def load(self) -> Callable[..., Any]:
        """Import the target; raises UserError if it is not there."""
        module, _, attribute = self.target.partition(":")
        try:
            found: Callable[..., Any] = getattr(_imported(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"{SINGULAR[self.kind]} '{self.name}': cannot import {self.target}: {error}"
            ) from error
        return found if self.argument is None else found(self.argument)


def _imported(module: str) -> ModuleType:
    """Import a module, if need be from the working directory, where the ``fedplat`` command does not look.

    The directory comes last in the search, so that no file in it can stand for an installed package.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        here = os.getcwd()
        if error.name != module.partition(".")[0] or here in sys.path or "" in sys.path:
            raise
        sys.path.append(here)
        importlib.invalidate_caches()
        return importlib.import_module(module)


SINGULAR = {
    "strategies": "strategy",
    "pre-aggregators": "pre-aggregator",
    "selectors": "selector",
    "attacks": "attack",
    "models": "model",
    "datasets": "dataset",
    "partitions": "partition",
    "devices": "kind of devices",
    "hardware": "hardware",
    "availability": "availability",
    "compressors": "compressor",
    "submodels": "sub-model scheme",
    "personal": "kind of personal models",
    "topologies": "topology",
    "worlds": "world",
    "associations": "association",
}
KINDS = tuple(SINGULAR)


@cache
def entries(kind: str) -> dict[str, Entry]:
    """Return all names of a kind, ours first, then those that installed packages add."""
    found = {}
    for name, place, summary, source in BUILT_IN[kind]:
        target = PACKAGES[kind] + ("" if place.startswith(":") else ".") + place
        found[name] = Entry(kind, name, target, summary, source)
    for point in entry_points(group=f"fedplat.{kind}"):
        found.setdefault(point.name, Entry(kind, point.name, point.value, f"from {point.module}"))
    return found


def find(kind: str, name: str) -> Entry:
    """Return the entry for a name or ``module:attribute``; raises UserError with the nearest name."""
    if name in entries(kind):
        return entries(kind)[name]
    prefix, _, rest = name.partition(":")
    if ":" in name and prefix in (prefixed := PREFIXED.get(kind, {})):
        target, _, summary = prefixed[prefix]
        return Entry(kind, name, target, summary, argument=rest)
    if ":" in name:
        return Entry(kind, name, name, "given by import path")
    raise unknown_name(SINGULAR[kind], name, entries(kind))


@dataclass(frozen=True)
class Setting:
    """One setting of a part: a keyword-only parameter of its target."""

    name: str
    annotation: Any
    default: Any

    @property
    def required(self) -> bool:
        """Whether a configuration has to give it."""
        return self.default is inspect.Parameter.empty


def settings(target: Callable[..., Any]) -> list[Setting]:
    """Return the settings of a target, in the order of its signature."""
    function = target.__init__ if inspect.isclass(target) else target
    hints = get_type_hints(function, include_extras=True)
    return [
        Setting(parameter.name, hints.get(parameter.name, Any), parameter.default)
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
