"""The strategies of an experiment, built from their names and what the run is."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from flwr.serverapp.strategy import Strategy

from . import registry
from .config import ExperimentConfig
from .config_parts import EdgeConfig, StrategyConfig
from .emulation.schedule import DeviceSchedule
from .engines import Engine
from .errors import UserError
from .personal_setup import personal_scheme
from .protection import protected
from .root_training import root_training
from .security.validation import ReplyRules
from .strategies.composed import FederatedStrategy
from .strategies.fedconv import LearnedWeights, ServerAlone
from .strategies.selectors import Selector
from .strategies.similarity import FLTrust
from .strategies.submodels import FullModel, SubModelScheme
from .submodel_setup import context_of, schedule_for, scheme_for

if TYPE_CHECKING:
    from .experiment import Situation


def build_strategy(config: ExperimentConfig, name: str, situation: Situation, engine: Engine) -> Strategy:
    """Build a strategy with what protects its clients around it; with edge servers, that of the cloud.

    Raises InfeasibleError if its rule cannot work on so many clients, or groups of them, and UserError if it
    cannot be protected as the scenario says.
    """
    part, clients = config.strategy_part(name), situation.num_clients
    if (edges := edges_of(config, name)) is not None:
        cloud = strategy_of(part, config, name, situation, seed=config.seed, min_nodes=edges)
        if isinstance(cloud, FederatedStrategy):
            cloud.aggregator.check(edges)
        return cloud
    scheme = personal_scheme(config, name, situation.task) or scheme_for(
        config, name, _for_server(situation) if config.submodels_of(name).public_samples else situation
    )
    slower = config.topology_of(name).settings().get("cloud_slower", 1.0)
    schedule = situation.devices.straight_to_cloud(slower) if situation.devices else None
    strategy = strategy_of(
        part,
        config,
        name,
        situation,
        seed=config.seed,
        selector=config.selection.build(),
        scheme=scheme,
        devices=schedule_for(config, scheme, schedule),
        **{"min_nodes": clients, **engine.waits},
    )
    if isinstance(strategy, FederatedStrategy):
        strategy.aggregator.check(config.aggregation.secure_groups or strategy.selector.count(clients))
    return protected(strategy, config, clients, simulation=engine.simulated)


def edges_of(config: ExperimentConfig, name: str) -> int | None:
    """Return how many edge servers a strategy has; None for one without."""
    topology = config.topology_of(name)
    if topology.name != "edges":
        return None
    edges = topology.settings()["edges"] or (config.world.settings().get("edges", 0) if config.world else 0)
    return int(edges)


def strategy_of(
    part: StrategyConfig | EdgeConfig,
    config: ExperimentConfig,
    name: str,
    situation: Situation,
    *,
    seed: int,
    selector: Selector | None = None,
    scheme: SubModelScheme | None = None,
    devices: DeviceSchedule | None = None,
    **waits: Any,
) -> Strategy:
    """Return the strategy of a part, for one server of the run of strategy ``name``; nothing protects it.

    Raises UserError for one of Flower's that is to send sub-models.
    """
    target, settings = registry.find("strategies", part.name).load(), part.settings()
    if not (inspect.isclass(target) and issubclass(target, FederatedStrategy)):
        if not isinstance(scheme or FullModel(), FullModel):
            raise UserError(
                f"strategy '{part.name}' is Flower's own, which sends the whole model to everyone"
            )
        return cast(Strategy, target(**settings))
    # Data of the server's own are no setting: they are handed to the strategies that ask for them.
    if issubclass(target, FLTrust):
        settings["root"] = root_training(situation.task.for_server(), settings["root_samples"])
    strategy: FederatedStrategy = cast(Any, target)(
        **settings,
        selector=selector,
        before=[step.build() for step in part.before],
        seed=seed,
        rules=ReplyRules(max_examples=len(situation.task.dataset.train)),
        fraction_evaluate=0.0,
        submodels=scheme,
        devices=devices,
        **waits,
    )
    if isinstance(strategy, LearnedWeights | ServerAlone):
        strategy.bind(context_of(config, config.submodels_of(name), _for_server(situation)))
    return strategy


def _for_server(situation: Situation) -> Situation:
    """Return a situation whose training set lacks what clients hold out: what a server draws its own from."""
    return replace(situation, task=situation.task.for_server())
