"""What the page of a strategy or an attack shows of its use; a test runs every one of these."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import Any

import tomli_w

from fedplat.clients.attacks import Attack
from fedplat.clients.attacks.base import ReplyAttack
from fedplat.clients.attacks.collusion import Collusion
from fedplat.registry import Entry

from .docstrings import usage_of

# Settings without which a part shows little of itself, and what has to be beside it in a scenario.
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "trimmed-mean": {"beta": 0.3},
    "krum": {"f": 6},
    "multi-krum": {"f": 6},
    "norm-clipping": {"bound": 1.0},
    "centered-clipping": {"tau": 1.0},
    "sign-vote": {"lr": 0.01},
    "sign-flip": {"factor": -4.0},
    "gaussian-noise": {"sigma": 1.0},
    "backdoor": {"size": 2, "target": 0},
    "fedp3": {"submodels": {"name": "fedp3"}},
}
_BESIDE: Mapping[str, Mapping[str, Any]] = {
    "fedconv-weights": {"submodels": {"public_samples": 100}},
    "server-alone": {"submodels": {"public_samples": 100}},
}
_OTHER_COMMANDS = {
    "fedins": "fedplat run fedins-shapes --strategy fedins",
    "fedbn": "fedplat run fedins-shapes --strategy fedbn --set model.name=resnet18 --set model.norm=batch",
}
_FLOWER = {
    "fltrust": (
        "from fedplat.strategies import FLTrust\n\n\n"
        "def root(arrays, server_round):\n"
        '    """Return the model trained on clean samples of the server\'s own."""\n'
        "    return train_on_clean_samples(arrays)\n\n\n"
        "strategy = FLTrust(root)\n"
        "result = strategy.start(grid, initial_arrays, num_rounds=10)"
    ),
    "fedp3": (
        "from fedplat.strategies.fedp3 import FedP3, FedP3Scheme\n"
        "from fedplat.strategies.submodels import SubModelContext\n\n"
        'scheme = FedP3Scheme(layers="opu2")\n'
        "scheme.bind(SubModelContext.of(build_model, sample_shape, num_classes))\n"
        "strategy = FedP3(submodels=scheme)"
    ),
    "fedconv-weights": "",  # needs data of the server's own, which an experiment hands to it
    "server-alone": "",
}


def scenario_for(entry: Entry) -> dict[str, Any]:
    """Return the lines of a scenario that use a strategy or an attack."""
    own = dict(_SETTINGS.get(entry.name, {}))
    if entry.kind == "attacks":
        return {"attacks": [{"name": entry.name, "fraction": 0.3, **own}]}
    lines: dict[str, Any] = {"strategies": ["mean", entry.name] if entry.name != "mean" else ["mean"]}
    if own:
        lines["strategy"] = {entry.name: own}
    return lines | dict(_BESIDE.get(entry.name, {}))


def command_for(entry: Entry) -> str:
    """Return a command line that shows a strategy or an attack at work, on data that needs no files."""
    if entry.name in _OTHER_COMMANDS:
        return _OTHER_COMMANDS[entry.name]
    lines = scenario_for(entry)
    if entry.kind == "attacks":
        return shlex.join(["fedplat", "run", "quickstart", "--set", f"attacks={_inline(lines['attacks'])}"])
    words = ["fedplat", "run", "quickstart", "--strategy", ",".join(lines["strategies"])]
    for key, value in lines.get("strategy", {}).get(entry.name, {}).items():
        words += ["--set", f"strategy.{entry.name}.{key}={_inline(value)}"]
    for table, values in _BESIDE.get(entry.name, {}).items():
        words += [word for key, value in values.items() for word in ("--set", f"{table}.{key}={value}")]
    return shlex.join(words)


def flower_for(entry: Entry, target: Any, public_name: Callable[[Any], tuple[str, str]]) -> str:
    """Return how a Flower app uses a strategy or an attack; empty if none can."""
    if entry.name in _FLOWER:
        return _FLOWER[entry.name]
    module, name = public_name(target)
    if entry.kind == "strategies":
        call = usage_of(target).split(".start(")[0] or f"{name}()"
        return (
            f"from {module} import {name}\n\nstrategy = {call}\n"
            "result = strategy.start(grid, initial_arrays, num_rounds=10)"
        )
    if issubclass(target, Collusion):
        return (
            "from fedplat.clients.collusion_grid import CollusionGrid\n"
            f"from {module} import {name}\n\n"
            f"colluders = dict.fromkeys(attackers, {name}())  # who shares one acts together\n"
            "result = strategy.start(CollusionGrid(grid, colluders), initial_arrays, num_rounds=10)"
        )
    if issubclass(target, ReplyAttack):
        return (
            f"from flwr.clientapp import ClientApp\n\nfrom {module} import {name}\n\n"
            f"app = ClientApp(mods=[{name}()])  # on the clients that attack"
        )
    assert issubclass(target, Attack)
    return ""


def _inline(value: Any) -> str:
    """Return a value as TOML has it in one line.

    >>> _inline([{"name": "alie", "fraction": 0.3}])
    '[{name = "alie", fraction = 0.3}]'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
