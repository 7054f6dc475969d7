"""The schemas of a scenario's named parts, which depend on the names in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, create_model

from . import registry
from .config_parts import Part, PreAggregatorConfig, TopologyConfig
from .errors import UserError

if TYPE_CHECKING:
    from .config import ExperimentConfig

_NAMED = ("edge", "association")
"""The settings of a topology that may be given by their name alone."""


def list_schema(base: type[Part], tables: Any, where: str) -> Any:
    """Return the type of a list of named parts, None where pydantic will find fault with it anyway."""
    if not isinstance(tables, list | tuple):
        return None
    schemas = [
        part_schema(base, table["name"], f"{where}.{index}.name")
        for index, table in enumerate(tables)
        if isinstance(table, Mapping) and "name" in table
    ]
    return tuple[*schemas] if schemas and len(schemas) == len(tables) else None  # type: ignore[valid-type]


def part_schema(base: type[Part], name: Any, where: str, show_name: bool = True) -> type[Any]:
    """Return ``base`` extended by the settings of the part called ``name``."""
    if not isinstance(name, str):
        raise UserError(f"{where}: found {name!r}, expected a name")
    try:
        target = registry.find(base.kind, name).load()
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return _extended(base, name, target, show_name)


@lru_cache(maxsize=512)
def _extended(base: type[Part], name: str, target: Callable[..., Any], show_name: bool) -> type[Any]:
    """Return ``base`` with the settings of ``target``; kept, for pydantic takes milliseconds to make it."""
    settings = {s.name: (s.annotation, ... if s.required else s.default) for s in registry.settings(target)}
    exclude = None if show_name else True
    own_name = (Literal[name], Field(default=name, exclude=exclude))
    return create_model(f"{base.__name__}[{name}]", __base__=base, name=own_name, **settings)  # type: ignore[call-overload]


def topology_schema(table: Mapping[str, Any], where: str) -> type[Any]:
    """Return the schema of a topology, whose settings may be named parts themselves."""
    schema = part_schema(TopologyConfig, table.get("name", "flat"), f"{where}.name")
    own: dict[str, Any] = {}
    for key, field in schema.model_fields.items():
        kind, inner = field.annotation, table.get(key, {})
        if not (isinstance(kind, type) and issubclass(kind, Part) and isinstance(inner, Mapping)):
            continue
        name = inner.get("name", kind.model_fields["name"].get_default())
        part = part_schema(kind, name, f"{where}.{key}.name")
        if before := list_schema(PreAggregatorConfig, inner.get("before"), f"{where}.{key}.before"):
            part = create_model(part.__name__, __base__=part, before=(before, ()))
        own[key] = (part, Field(default_factory=part))
    return create_model(schema.__name__, __base__=schema, **own) if own else schema


def with_topologies(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a scenario in which each strategy's topology is complete: its own settings over those of all.

    A strategy whose topology has another name takes nothing over. Parts given by name become tables.
    """
    common = _with_tables(raw.get("topology"))
    found = {**raw, "topology": common} if "topology" in raw else dict(raw)
    if isinstance(tables := raw.get("strategy"), Mapping):
        found["strategy"] = {name: _completed(table, common) for name, table in tables.items()}
    return found


def _completed(table: Any, common: Any) -> Any:
    own = _with_tables(table.get("topology")) if isinstance(table, Mapping) else None
    if not isinstance(own, Mapping):
        return table
    common = common if isinstance(common, Mapping) else {}
    if "name" not in own or own["name"] == common.get("name", "flat"):
        own = {**common, **own}
    return {**table, "topology": own}


def _with_tables(topology: Any) -> Any:
    if not isinstance(topology, Mapping):
        return topology
    return {
        key: {"name": value} if key in _NAMED and isinstance(value, str) else value
        for key, value in topology.items()
    }


def check_topology(config: ExperimentConfig, name: str, where: str) -> None:
    """Raise UserError for a topology of a strategy that the rest of the scenario does not allow."""
    topology = config.topology_of(name)
    if topology.name != "edges":
        return
    settings = topology.settings()
    edges = settings["edges"] or (config.world.settings().get("edges", 0) if config.world else 0)
    if not edges:
        raise UserError(
            f"{where}: topology.edges: give the number of edge servers, or a [world] that has them"
        )
    there = config.world.settings().get("edges") if config.world else None
    if settings["edges"] not in (0, 1, there) and there is not None:
        raise UserError(
            f"{where}: topology.edges is {edges}, and [world] has {there} edges: leave it out, or make it 1 "
            f"for a run without edges"
        )
    if settings["most"] and settings["most"] < settings["least"]:
        raise UserError(f"{where}: topology.most is {settings['most']}, below least = {settings['least']}")
    if config.privacy.mode == "central":
        raise UserError(
            f"{where}: privacy.mode: 'central' noise is that of one server; with topology 'edges' use 'local'"
        )


def check_submodels(config: ExperimentConfig, name: str, where: str) -> None:
    """Raise UserError for sub-models of a strategy that the rest of the scenario does not allow."""
    part = config.submodels_of(name)
    edges = config.topology_of(name).name == "edges"
    if edges and part.public_samples and config.partition.own_test:
        raise UserError(
            f"{where}: submodels.public_samples: with topology 'edges' they may be samples that clients hold "
            f"out by partition.own_test; leave one of them out"
        )
    if part.name != "fedp3":
        return
    for there, key, why in (
        (edges, "topology", "edge servers combine whole models, and FedP3's replies are parts of them"),
        (config.privacy.mode == "central", "privacy.mode", "'central' noise is for updates of whole models"),
        (config.aggregation.secure_groups, "aggregation.secure_groups", "sums are of updates of one model"),
    ):
        if there:
            raise UserError(
                f"{where}: {key} does not go with submodels 'fedp3' (strategy '{name}'): {why}; leave one of "
                f"them out"
            )


def check_personal(config: ExperimentConfig, name: str, where: str) -> None:
    """Raise UserError for personal models of a strategy that the rest of the scenario does not allow."""
    part = config.personal_of(name)
    if part.name == "none":
        return
    if ":" in part.name:
        raise UserError(
            f"{where}: personal.name: '{part.name}' names code by its import path, which clients do not run "
            f"on a server's word: install it as a package with an entry point 'fedplat.personal'"
        )
    if not config.partition.own_test:
        raise UserError(
            f"{where}: personal.name: models of the clients' own are measured on samples that clients hold "
            f"out; give partition.own_test, such as 0.3"
        )
    submodels = config.submodels_of(name).name
    if part.build().whole_models and submodels != "full":
        raise UserError(
            f"{where}: personal '{part.name}' (strategy '{name}') is for whole models, and submodels "
            f"'{submodels}' sends parts; use submodels 'full', or personal 'fine-tuning'"
        )
    if part.name != "fedper":
        return
    for there, key in (
        (config.topology_of(name).name == "edges", "topology 'edges'"),
        (config.privacy.mode == "central", "privacy.mode = 'central'"),
        (config.aggregation.secure_groups, "aggregation.secure_groups"),
    ):
        if there:
            raise UserError(
                f"{where}: personal 'fedper' (strategy '{name}') sends the shared layers alone, which {key} "
                f"cannot do; use 'ditto' or 'fine-tuning', or leave one of them out"
            )
