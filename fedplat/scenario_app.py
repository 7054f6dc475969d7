"""The ``ClientApp`` of any scenario, for clients in other processes and on other machines.

It holds nothing of a scenario: each training message brings the scenario's settings, from which a process
builds what it needs once. So one installed app serves Flower's simulation, a Ray cluster and real devices.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from . import config as configuration
from .clients.app import STRATEGY_KEY, ExperimentApp
from .clients.mods.always_reply import always_reply
from .clients.mods.secure_aggregation import SecureAggregationMod
from .clients.stacked.execution import Execution
from .deployment.edge_client import BRIDGE_KEY, answer_by_edge
from .errors import UserError, unknown_name
from .protection import client_mods
from .runtime.flower import STATE_QUERY, answer_state_query
from .security.secure_messages import KEYS, SHARES, UNMASK
from .threads import torch_threads

_SCENARIO_KEY = "fedplat.scenario"
_EXECUTION_KEY = "fedplat.execution"
_DEVICE_KEY = "fedplat.device"
_PATHS = ("hf:/", "hf:.", "hf:~")
_SECURE_QUESTIONS = (KEYS, SHARES, UNMASK)
_SERVERS_BUSINESS = (
    *("description", "strategies", "strategy", "selection", "evaluation", "timeout", "flower", "submodels"),
    *("topology", "world"),
)


def told_to_clients(
    config: configuration.ExperimentConfig,
    strategy: str,
    execution: Execution,
    device: str,
    *,
    same_machine: bool,
) -> ConfigRecord:
    """Return what a training message has to say for a :class:`ScenarioApp` to answer it.

    It leaves out what is the server's business, and where the server's own data lies.
    """
    scenario = {key: value for key, value in config.to_dict().items() if key not in _SERVERS_BUSINESS}
    if not same_machine:
        scenario["data"].pop("root", None)
        scenario["security"].pop("signing_keys", None)
    return ConfigRecord(
        {
            _SCENARIO_KEY: json.dumps(scenario),
            _EXECUTION_KEY: json.dumps({"stacked": execution.stacked, "exact": execution.exact}),
            _DEVICE_KEY: device,
            STRATEGY_KEY: strategy,
        }
    )


class ScenarioApp(ClientApp):
    """Train and evaluate as the scenario in the message says, on the partition that this node holds.

    What a node knows better than the server comes from its node config: ``partition-id``, ``data-root``
    (where its data lies), ``device``, ``threads`` (1, which gives the bits of the other engines; 0: all) and
    ``signing-key`` (the PEM file it signs with). Only parts with a name in fedplat's or an installed
    package's catalogue are used: a scenario that names code by ``module:attribute`` is refused, so that a
    client runs nothing that was not installed on it, and reads no folder that a server names. ``requires``
    says without which protection the client does not train: any of the words ``secure-aggregation``,
    ``local-privacy`` and ``signed-updates``; ``least-members`` (2) how many updates a sum must have that its
    own goes into.

    A node whose config has ``edge-bridge`` is an edge: the edge's own server answers in place of this app,
    see :mod:`fedplat.deployment.edge_client`.

    In a ``simulation`` of one's own, where clients have nothing to hide, code may be named by its path, keys
    and privacy noise come from the run's seed, and prepared samples are kept from round to round.
    """

    def __init__(self, *, simulation: bool = False) -> None:
        super().__init__()
        self._simulation = simulation

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply of the client that the context describes."""
        kind, node = message.metadata.message_type, context.node_config
        if kind == "query":
            answer = ConfigRecord({"partition-id": int(node["partition-id"])})
            return Message(RecordDict({"node": answer}), reply_to=message)
        if kind == STATE_QUERY and self._simulation:
            return answer_state_query(message, context.state)
        if BRIDGE_KEY in node:
            return always_reply(message, context, answer_by_edge)
        if kind in _SECURE_QUESTIONS:
            return SecureAggregationMod(least_members=_least_members(node)).answer(message, context)
        told = message.content.get("config")
        if not isinstance(told, ConfigRecord) or _SCENARIO_KEY not in told:
            raise UserError(
                f"the message brings no scenario ('{_SCENARIO_KEY}' in its config): this app answers "
                f"servers that were started by fedplat"
            )
        app = _app_of(
            str(told[_SCENARIO_KEY]),
            str(told[_EXECUTION_KEY]),
            str(node.get("device", told[_DEVICE_KEY])),
            str(node.get("data-root", "")),
            str(node.get("requires", "")),
            _least_members(node),
            self._simulation,
        )
        with torch_threads(int(node.get("threads", 1))):
            return always_reply(message, context, app)


@lru_cache(maxsize=1)
def _app_of(
    scenario: str,
    execution: str,
    device: str,
    data_root: str,
    requires: str,
    least_members: int,
    simulation: bool,
) -> ExperimentApp:
    from . import experiment  # what a process that only answers queries does not need

    raw = json.loads(scenario)
    if not simulation:
        refuse_code(raw)
    if data_root:
        raw["data"]["root"] = str(Path(data_root).expanduser())
    config = configuration.load(raw, "scenario from the server")
    _check_requirements(config, requires)
    task = experiment.build_task(config, experiment.resolve_device(device), keep_samples=simulation)
    how = Execution(**json.loads(execution), group=1, source="given", microseconds={})
    return ExperimentApp(task, how, *client_mods(config, simulation=simulation, least_members=least_members))


def _least_members(node: Mapping[str, Any]) -> int:
    return int(node.get("least-members", 2))


def _check_requirements(config: configuration.ExperimentConfig, requires: str) -> None:
    """Raise UserError for a scenario without a protection that this client requires, by name."""
    there = {
        "secure-aggregation": bool(config.aggregation.secure_groups),
        "local-privacy": config.privacy.mode == "local",
        "signed-updates": config.security.signed_updates,
    }
    for word in requires.replace(",", " ").split():
        if word not in there:
            raise unknown_name("requirement in this client's node config", word, there)
        if not there[word]:
            raise UserError(f"this client requires {word}, which the scenario does without")


def refuse_code(value: Any, where: str = "") -> None:
    """Raise UserError if a part of a scenario is named by ``module:attribute``, or is a folder here."""
    if isinstance(value, Mapping):
        name = value.get("name")
        if where and isinstance(name, str) and name.startswith(_PATHS):
            raise UserError(
                f"{where}: '{name}' is a folder, which a client does not read on a server's word: give its "
                f"own copy in its node config as data-root"
            )
        if where and isinstance(name, str) and ":" in name and not name.startswith("hf:"):
            raise UserError(
                f"{where}: '{name}' names code by its import path, which a client does not run on a server's "
                f"word: install it as a package with an entry point 'fedplat.<kind>' on the clients"
            )
        for key, inner in value.items():
            refuse_code(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            refuse_code(inner, f"{where}.{index}")
