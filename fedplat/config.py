"""The experiment schema: what a scenario file may say, checked before anything is built.

A part (a model, an attack, a partition ...) is a table with a ``name``; its other keys are the settings of
the thing behind that name, so the schema of a file depends on the names in it. ``load`` builds that schema,
validates the file against it and fills in every default.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model

from .config_errors import explain
from .config_parts import (
    AttackConfig,
    AvailabilityConfig,
    CompressionConfig,
    DataConfig,
    DevicesConfig,
    HardwareConfig,
    ModelConfig,
    Part,
    PartitionConfig,
    PersonalConfig,
    PreAggregatorConfig,
    SelectionConfig,
    StrategyConfig,
    Strict,
    SubModelsConfig,
    TopologyConfig,
    WorldConfig,
)
from .config_schemas import (
    check_personal,
    check_submodels,
    check_topology,
    list_schema,
    part_schema,
    topology_schema,
    with_topologies,
)
from .errors import UserError
from .training_config import LocalTraining

PositiveInt = Annotated[int, Field(ge=1)]


class EvaluationConfig(Strict):
    """Evaluation of the global model on the test set: every so many rounds, and after the last."""

    every: PositiveInt = 1
    batch_size: PositiveInt = 1000


class FlowerConfig(Strict):
    """What Flower's simulation gives each client; no result depends on it."""

    num_cpus: Annotated[float, Field(gt=0, description="cores of a client")] = 1.0
    num_gpus: Annotated[float, Field(ge=0, description="share of a GPU of a client")] = 0.0
    address: Annotated[str, Field(description="a Ray cluster that runs already; auto: this machine's")] = ""


class SecurityConfig(Strict):
    """Whether clients sign what they send, and where the server has their public keys.

    Without ``signing_keys``, a folder of ``NAME.pub`` files, keys are made from the run's seed; these are for
    simulations and protect nothing.
    """

    signed_updates: bool = False
    signing_keys: Path | None = None


class AggregationConfig(Strict):
    """Secure aggregation: the server sees the sums of ``secure_groups`` groups only; 0: every update.

    The settings are those of :class:`fedplat.strategies.secure_aggregation.SecureAggregation`.
    """

    secure_groups: Annotated[int, Field(ge=0)] = 0
    threshold: Annotated[float, Field(gt=0.5, le=1, description="part of a group that has to stay")] = 2 / 3
    clip: Annotated[float, Field(gt=0, description="largest size of a value in an update")] = 8.0
    bits: Literal[32, 64] = 32
    max_weight: Annotated[int, Field(ge=1, description="above 1: clients weigh by samples up to it")] = 1


class PrivacyConfig(Strict):
    """Differential privacy of clients: noise from the server (``central``), from each client, or ``none``."""

    mode: Literal["none", "central", "local"] = "none"
    clip: Annotated[float, Field(gt=0, description="largest L2 norm of an update")] = 1.0
    noise_multiplier: Annotated[float, Field(gt=0, description="noise over what a client can change")] = 1.0
    delta: Annotated[float, Field(gt=0, lt=1, description="that epsilon is stated at")] = 1e-5
    budget: Annotated[float | None, Field(gt=0, description="epsilon not to be exceeded")] = None


class EmulationConfig(Strict):
    """What happens to clients on emulated devices.

    A round's deadline is in simulated seconds; late replies are dropped, or waited for. A device drops out
    between training and upload with a probability. The server asks those that are available, or all. Memory
    is that of the task's tensors and ``overhead_mb`` for what runs it; ``enforce`` runs clients under a real
    limit, in place of the estimate.
    """

    deadline_s: Annotated[float | None, Field(gt=0, description="no deadline without it")] = None
    late: Literal["drop", "wait"] = "drop"
    drop_probability: Annotated[float, Field(ge=0, le=1, description="gone before the upload")] = 0.0
    ask: Literal["available", "all"] = "available"
    overhead_mb: Annotated[float, Field(ge=0, description="what training takes besides tensors")] = 0.0
    enforce: bool = False


class ExperimentConfig(Strict):
    """A situation, and the strategies that are run on it.

    Fields typed as plain parts here hold the settings of the named part too; see :func:`load`.
    """

    name: str
    description: str = ""
    seed: Annotated[int, Field(ge=0)] = 1
    rounds: PositiveInt
    timeout: Annotated[float, Field(gt=0, description="longest wait for a round's replies, in seconds")] = (
        3600.0
    )
    strategies: Annotated[tuple[str, ...], Field(min_length=1)] = ("mean",)
    data: DataConfig
    partition: PartitionConfig
    model: ModelConfig
    training: LocalTraining = LocalTraining()
    selection: SelectionConfig = SelectionConfig()
    attacks: tuple[AttackConfig, ...] = ()
    evaluation: EvaluationConfig = EvaluationConfig()
    security: SecurityConfig = SecurityConfig()
    aggregation: AggregationConfig = AggregationConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    devices: DevicesConfig = DevicesConfig()
    hardware: HardwareConfig = HardwareConfig()
    availability: AvailabilityConfig = AvailabilityConfig()
    emulation: EmulationConfig = EmulationConfig()
    compression: CompressionConfig = CompressionConfig()
    submodels: SubModelsConfig = SubModelsConfig()
    personal: PersonalConfig = PersonalConfig()
    topology: TopologyConfig = TopologyConfig()
    world: WorldConfig | None = None
    flower: FlowerConfig = FlowerConfig()
    strategy: Any = None

    @property
    def emulates_devices(self) -> bool:
        """Whether devices are emulated: one of the tables about them is there, or a world they are in."""
        return bool(self.model_fields_set & set(_ABOUT_DEVICES)) or self.world is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the fully resolved configuration as plain values, in the shape of a scenario file."""
        values = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        if not self.emulates_devices:
            for key in _ABOUT_DEVICES:
                del values[key]
        if self.compression.name == "none":
            del values["compression"]
        if self.submodels.name == "full" and not self.submodels.public_samples:
            del values["submodels"]
        if self.topology == type(self.topology)() and self.topology.name == "flat":
            del values["topology"]
        if self.personal.name == "none":
            del values["personal"]
        for key in ("own_test", "pool"):
            if not values["partition"][key]:
                del values["partition"][key]
        for table in (values.get("strategy") or {}).values():
            if not table["before"]:
                del table["before"]
        return values

    def digest(self) -> str:
        """Return eight hexadecimal digits that change with anything that can change a result."""
        content = self.to_dict()
        for key in ("description", "flower"):
            content.pop(key, None)
        content["security"].pop("signing_keys", None)
        for key in ("root", "download"):
            content["data"].pop(key, None)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]

    def submodels_of(self, name: str) -> SubModelsConfig:
        """Return the sub-models of one of ``strategies``: its own, or those of all."""
        return self.strategy_part(name).submodels or self.submodels

    def personal_of(self, name: str) -> PersonalConfig:
        """Return how clients of one of ``strategies`` make the model their own."""
        return self.strategy_part(name).personal or self.personal

    def topology_of(self, name: str) -> TopologyConfig:
        """Return the topology of one of ``strategies``: its own, or that of all."""
        return self.strategy_part(name).topology or self.topology

    def strategy_part(self, name: str) -> StrategyConfig:
        """Return one of ``strategies`` with its settings."""
        part: StrategyConfig = getattr(self.strategy, _field_name(self.strategies.index(name)))
        return part


_ABOUT_DEVICES = ("devices", "hardware", "availability", "emulation")


_PARTS: dict[str, type[Part]] = {
    "data": DataConfig,
    "partition": PartitionConfig,
    "model": ModelConfig,
    "selection": SelectionConfig,
    "devices": DevicesConfig,
    "hardware": HardwareConfig,
    "availability": AvailabilityConfig,
    "compression": CompressionConfig,
    "submodels": SubModelsConfig,
    "personal": PersonalConfig,
    "world": WorldConfig,
}


def load(raw: Mapping[str, Any], where: str) -> ExperimentConfig:
    """Check a scenario given as plain values and fill in its defaults.

    ``where`` names the file in error messages. Raises UserError that lists every mistake with its key, the
    value found, what is allowed, and the nearest right name.
    """
    raw = with_topologies(raw)
    schema = _schema_for(raw, where)
    try:
        config = schema.model_validate(dict(raw))
    except ValidationError as error:
        raise UserError(explain(error, schema, raw, where)) from None
    for index, attack in enumerate(config.attacks):
        keys = ("fraction", "count", "clients", "edges")
        given = [key for key in keys if getattr(attack, key) is not None]
        if len(given) != 1:
            raise UserError(
                f"{where}: attacks.{index}: give one of 'fraction', 'count' and 'clients', or 'edges'"
            )
        if attack.richest_in is not None and given not in (["fraction"], ["count"]):
            raise UserError(f"{where}: attacks.{index}: 'richest_in' goes with 'fraction' or 'count'")
    if config.aggregation.secure_groups and config.privacy.mode == "central":
        raise UserError(
            f"{where}: privacy.mode: 'central' has to see each client's update to clip it, which "
            f"aggregation.secure_groups hides; use 'local', or leave one of them out"
        )
    if config.aggregation.secure_groups and config.compression.name != "none":
        raise UserError(
            f"{where}: compression.name: sums of '{config.compression.name}' updates are none of updates, so "
            f"it does not go with aggregation.secure_groups; leave one of them out"
        )
    if config.partition.pool and not config.partition.own_test:
        raise UserError(
            f"{where}: partition.pool: clients would train on the test set; give own_test, the share of its "
            f"samples that each client keeps for tests"
        )
    for name in config.strategies:
        check_topology(config, name, where)
        check_submodels(config, name, where)
        check_personal(config, name, where)
    return config


def _schema_for(raw: Mapping[str, Any], where: str) -> type[ExperimentConfig]:
    """Return the schema for a file that has these names in it."""
    fields: dict[str, Any] = {}
    for key, base in _PARTS.items():
        optional = not base.model_fields["name"].is_required()
        table = raw.get(key, {} if optional and key != "world" else None)
        if isinstance(table, Mapping) and (
            name := table.get("name", base.model_fields["name"].get_default())
        ):
            part = part_schema(base, name, f"{where}: {key}.name")
            fields[key] = (part, Field(default_factory=part) if optional else ...)
    if isinstance(topology := raw.get("topology", {}), Mapping):
        part = topology_schema(topology, f"{where}: topology")
        fields["topology"] = (part, Field(default_factory=part))
    if attacks := list_schema(AttackConfig, raw.get("attacks"), f"{where}: attacks"):
        fields["attacks"] = (attacks, ...)
    strategies = raw.get("strategies", ("mean",))
    if isinstance(strategies, list | tuple) and all(isinstance(name, str) for name in strategies):
        if len(set(strategies)) < len(strategies):
            raise UserError(f"{where}: strategies: {list(strategies)} names one twice")
        named = {
            _field_name(i): (schema, Field(default=schema(), alias=name))
            for i, name in enumerate(strategies)
            for schema in [_strategy_schema(name, raw.get("strategy"), where)]
        }
        table_schema = create_model("StrategyTable", __base__=Strict, **named)  # type: ignore[call-overload]
        fields["strategy"] = (table_schema, table_schema())
    return create_model("Experiment", __base__=ExperimentConfig, **fields)


def _strategy_schema(name: str, tables: Any, where: str) -> type[Any]:
    """Return the schema for one of ``strategies``, whose table may say which strategy it is by ``name``."""
    table = tables.get(name) if isinstance(tables, Mapping) else None
    table = table if isinstance(table, Mapping) else {}
    if "name" in table:
        if not re.fullmatch(r"[\w.+-]+", name):
            raise UserError(f"{where}: strategies: '{name}' may have letters, digits and . + - _ only")
        schema = part_schema(StrategyConfig, table["name"], f"{where}: strategy.{name}.name")
    else:
        schema = part_schema(StrategyConfig, name, f"{where}: strategies", show_name=False)
    own: dict[str, Any] = {}
    if before := list_schema(PreAggregatorConfig, table.get("before"), f"{where}: strategy.{name}.before"):
        own["before"] = (before, ())
    submodels = table.get("submodels")
    if isinstance(submodels, Mapping):
        scheme = submodels.get("name", SubModelsConfig.model_fields["name"].get_default())
        part = part_schema(SubModelsConfig, scheme, f"{where}: strategy.{name}.submodels.name")
        own["submodels"] = (part | None, None)
    if isinstance(personal := table.get("personal"), Mapping):
        kind = personal.get("name", PersonalConfig.model_fields["name"].get_default())
        part = part_schema(PersonalConfig, kind, f"{where}: strategy.{name}.personal.name")
        own["personal"] = (part | None, None)
    if isinstance(topology := table.get("topology"), Mapping):
        own["topology"] = (topology_schema(topology, f"{where}: strategy.{name}.topology") | None, None)
    return create_model(schema.__name__, __base__=schema, **own) if own else schema


def _field_name(index: int) -> str:
    return f"strategy_{index}"


def strategy_names(text: Iterable[str]) -> list[str]:
    """Split ``--strategy`` values at commas.

    >>> strategy_names(["mean,median", "trimmed-mean"])
    ['mean', 'median', 'trimmed-mean']
    """
    return [name.strip() for value in text for name in value.split(",") if name.strip()]
