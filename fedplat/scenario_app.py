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
from .clients.mods.secure_aggregation import SecureAggregationMod
from .clients.stacked.execution import Execution
from .errors import UserError
from .protection import client_mods
from .runtime.flower import STATE_QUERY, answer_state_query
from .security.secure_messages import KEYS, SHARES, UNMASK
from .threads import torch_threads

_SCENARIO_KEY = "fedplat.scenario"
_EXECUTION_KEY = "fedplat.execution"
_DEVICE_KEY = "fedplat.device"
_SECURE_QUESTIONS = (KEYS, SHARES, UNMASK)
_SERVERS_BUSINESS = ("description", "strategies", "strategy", "selection", "evaluation", "timeout", "flower")


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
    client runs nothing that was not installed on it.

    In a ``simulation`` of one's own, where clients have nothing to hide, code may be named by its path, keys
    and privacy noise come from the run's seed, and prepared samples are kept from round to round.
    """

    def __init__(self, *, simulation: bool = False) -> None:
        super().__init__()
        self._simulation = simulation

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply of the client that the context describes."""
        kind = message.metadata.message_type
        if kind == "query":
            answer = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
            return Message(RecordDict({"node": answer}), reply_to=message)
        if kind == STATE_QUERY:
            return answer_state_query(message, context.state)
        if kind in _SECURE_QUESTIONS:
            return SecureAggregationMod().answer(message, context)
        told = message.content.get("config")
        if not isinstance(told, ConfigRecord) or _SCENARIO_KEY not in told:
            raise UserError(
                f"the message brings no scenario ('{_SCENARIO_KEY}' in its config): this app answers "
                f"servers that were started by fedplat"
            )
        node = context.node_config
        app = _app_of(
            str(told[_SCENARIO_KEY]),
            str(told[_EXECUTION_KEY]),
            str(node.get("device", told[_DEVICE_KEY])),
            str(node.get("data-root", "")),
            self._simulation,
        )
        with torch_threads(int(node.get("threads", 1))):
            return app(message, context)


@lru_cache(maxsize=1)
def _app_of(scenario: str, execution: str, device: str, data_root: str, simulation: bool) -> ExperimentApp:
    from . import experiment  # what a process that only answers queries does not need

    raw = json.loads(scenario)
    if not simulation:
        _refuse_code(raw)
    if data_root:
        raw["data"]["root"] = str(Path(data_root).expanduser())
    config = configuration.load(raw, "scenario from the server")
    task = experiment.build_task(config, experiment.resolve_device(device), keep_samples=simulation)
    how = Execution(**json.loads(execution), group=1, source="given", microseconds={})
    return ExperimentApp(task, how, *client_mods(config, simulation=simulation))


def _refuse_code(value: Any, where: str = "") -> None:
    """Raise UserError if a part anywhere in a scenario is named by ``module:attribute``."""
    if isinstance(value, Mapping):
        name = value.get("name")
        if where and isinstance(name, str) and ":" in name and not name.startswith("hf:"):
            raise UserError(
                f"{where}: '{name}' names code by its import path, which a client does not run on a server's "
                f"word: install it as a package with an entry point 'fedplat.<kind>' on the clients"
            )
        for key, inner in value.items():
            _refuse_code(inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _refuse_code(inner, f"{where}.{index}")
