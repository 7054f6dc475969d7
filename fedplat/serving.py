"""The ``ServerApp`` that ``flwr run`` starts: a scenario from the run config, on a federation's nodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from . import experiment
from .cli.common import console, load_config
from .compat import is_simulated
from .config import ExperimentConfig
from .engines import FederationEngine
from .results.folder import RunFolder, default_path
from .results.progress import display
from .results.report import write_report

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the scenario that the run config names, or go on with it if its run folder holds a part of it.

    Raises UserError for a mistake in the run config, and if nodes are missing when ``node-wait`` is over.
    """
    told = context.run_config
    config = config_from(told)
    path = Path(str(told.get("out", ""))) if told.get("out") else default_path(config)
    folder = RunFolder.open(path, config, resume=True)
    print(f"run folder: {path.absolute()}", flush=True)
    engine = FederationEngine(
        grid,
        device=str(told.get("device", "auto")),
        min_nodes=int(told.get("min-nodes", 1)),
        node_wait=float(told.get("node-wait", 300.0)),
        simulated=is_simulated(grid),
    )
    if not folder.finished:
        known = {name: folder.rounds(name) for name in config.strategies}
        with display(config.rounds, known, console()) as observer:
            experiment.run(config, folder, engine=engine, device="cpu", observer=observer)
    write_report(folder)
    print((path / "report.md").read_text(), flush=True)


def config_from(told: Mapping[str, Any]) -> ExperimentConfig:
    """Return the configuration that a run config describes.

    >>> config_from({"scenario": "quickstart", "overrides": "attacks=[] rounds=2", "seed": 3}).rounds
    2
    """
    overrides = _words(str(told.get("overrides", "")))
    if rounds := int(told.get("rounds", 0)):
        overrides.append(f"rounds={rounds}")
    seed = int(told.get("seed", -1))
    strategies = [str(told["strategy"])] if told.get("strategy") else []
    scenario = str(told.get("scenario", "quickstart"))
    return load_config(scenario, overrides, None if seed < 0 else seed, strategies)


def _words(text: str) -> list[str]:
    """Split overrides at the spaces that stand outside of brackets and quotes.

    >>> _words('rounds=5 model.hidden=[8, 8]  name="a b"')
    ['rounds=5', 'model.hidden=[8, 8]', 'name="a b"']
    """
    words, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        depth += (sign in "[{") - (sign in "]}") if not quote else 0
        if sign.isspace() and not depth and not quote:
            words.append("")
        else:
            words[-1] += sign
    return [word for word in words if word]
