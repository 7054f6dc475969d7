"""The named parts of a scenario: tables with a ``name``, whose other keys are settings of what it names."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from . import registry


class Strict(BaseModel):
    """A table without keys that nobody knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, protected_namespaces=())


class Part(Strict):
    """A named part with its settings; ``kind`` is the registry kind its name is looked up in."""

    kind: ClassVar[str] = ""
    name: str

    def settings(self) -> dict[str, Any]:
        """Return the settings of the thing behind the name, without the keys every such part has."""
        common = _base_of(type(self)).model_fields
        return {key: getattr(self, key) for key in type(self).model_fields if key not in common}

    def build(self, *arguments: Any, **more: Any) -> Any:
        """Call the thing behind the name with its settings."""
        return registry.find(self.kind, self.name).load()(*arguments, **self.settings(), **more)


class DataConfig(Part):
    """The data set. ``root`` is a local copy, ``download`` allows fetching one."""

    kind: ClassVar[str] = "datasets"
    root: Path | None = None
    download: bool = True


class PartitionConfig(Part):
    """How training samples are spread over ``clients`` clients; 0: as many as a natural partition has.

    Of each client's samples, ``own_test`` are kept for tests of its own. With ``pool``, the test set's
    samples are spread, too, and what clients keep is the test set.
    """

    kind: ClassVar[str] = "partitions"
    clients: Annotated[int, Field(ge=0)]
    own_test: Annotated[float, Field(ge=0, lt=1, description="share of its samples a client tests on")] = 0.0
    pool: Annotated[bool, Field(description="spread training and test samples together")] = False


class ModelConfig(Part):
    """The model."""

    kind: ClassVar[str] = "models"


class SelectionConfig(Part):
    """Who takes part in a round."""

    kind: ClassVar[str] = "selectors"
    name: str = "all"


class AttackConfig(Part):
    """An attack: by whom, and in which rounds.

    Attackers are ``clients`` by id, or a ``fraction`` of all clients or a ``count``, drawn with the run's
    seed or, with ``richest_in``, those that hold most samples of a class; or they are ``edges``, which send
    the cloud something else than what their clients trained. They attack from round ``start``, ``on`` rounds
    of every ``on + off``.
    """

    kind: ClassVar[str] = "attacks"
    fraction: Annotated[float, Field(ge=0, le=1, description="share of all clients")] | None = None
    count: Annotated[int, Field(ge=0, description="number of clients")] | None = None
    edges: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(description="edge servers")] | None = None
    clients: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(description="ids")] | None = None
    richest_in: Annotated[int, Field(ge=0, description="take those with most samples of it")] | None = None
    start: Annotated[int, Field(ge=1, description="first round of the attack")] = 1
    on: Annotated[int, Field(ge=1, description="attack so many rounds, then ...")] = 1
    off: Annotated[int, Field(ge=0, description="... behave for so many, and again")] = 0


class PreAggregatorConfig(Part):
    """A step taken before a strategy's rule."""

    kind: ClassVar[str] = "pre-aggregators"


class SubModelsConfig(Part):
    """Which part of the model each client gets; a strategy may have a table of its own.

    Some schemes need labelled samples that the server holds itself: ``public_samples`` of the training set,
    drawn with the run's seed. Clients may hold them too.
    """

    kind: ClassVar[str] = "submodels"
    name: str = "full"
    public_samples: Annotated[int, Field(ge=0, description="of the training set, held by the server")] = 0


class PersonalConfig(Part):
    """How clients make the model their own; a strategy may have a table of its own."""

    kind: ClassVar[str] = "personal"
    name: str = "none"


class AssociationConfig(Part):
    """Which client reports to which edge."""

    kind: ClassVar[str] = "associations"
    name: str = "fixed"


class EdgeConfig(Part):
    """The strategy of the edge servers."""

    kind: ClassVar[str] = "strategies"
    name: str = "mean"
    before: Annotated[
        tuple[PreAggregatorConfig, ...], Field(description="pre-aggregators, in this order")
    ] = ()


class TopologyConfig(Part):
    """Whether there are edge servers between the clients and the cloud; a strategy may have its own table."""

    kind: ClassVar[str] = "topologies"
    name: str = "flat"


class WorldConfig(Part):
    """Where clients and edge servers are, and what the radio between them is like."""

    kind: ClassVar[str] = "worlds"
    name: str = "wireless"


class StrategyConfig(Part):
    """The settings of one strategy; ``name`` is the strategy's where the table has a name of its own."""

    kind: ClassVar[str] = "strategies"
    name: str = ""
    before: Annotated[
        tuple[PreAggregatorConfig, ...], Field(description="pre-aggregators, in this order")
    ] = ()
    submodels: Annotated[SubModelsConfig | None, Field(description="sub-models, in place of [submodels]")] = (
        None
    )
    topology: Annotated[TopologyConfig | None, Field(description="what differs from [topology]")] = None
    personal: Annotated[PersonalConfig | None, Field(description="in place of [personal]")] = None


class DevicesConfig(Part):
    """What memory and links each client's device has in each round."""

    kind: ClassVar[str] = "devices"
    name: str = "unlimited"


class HardwareConfig(Part):
    """How fast the devices compute, and what energy that and their radios take."""

    kind: ClassVar[str] = "hardware"
    name: str = "drawn"


class AvailabilityConfig(Part):
    """In which rounds a device is there, besides what its log says."""

    kind: ClassVar[str] = "availability"
    name: str = "always"


class CompressionConfig(Part):
    """How clients compress what they send."""

    kind: ClassVar[str] = "compressors"
    name: str = "none"


def _base_of(part: type[Part]) -> type[Part]:
    return next(c for c in part.__mro__ if "[" not in c.__name__ and issubclass(c, Part))
