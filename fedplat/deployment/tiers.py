"""The ``ServerApp`` that ``flwr run`` starts, by its place: the only server, the cloud, or an edge."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from .. import serving
from ..cli.common import console
from ..errors import unknown_name
from ..results.folder import RunFolder, default_path
from ..results.progress import display
from ..results.report import write_report
from . import cloud, edge_server

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Be what ``tier`` in the run config says: ``""``, ``"cloud"`` or ``"edge"``; raises UserError."""
    tiers = {"": serving.main, "cloud": _cloud, "edge": _edge}
    tier = str(context.run_config.get("tier", ""))
    if tier not in tiers:
        raise unknown_name("tier in the run config", tier, tiers)
    tiers[tier](grid, context)


def _cloud(grid: Grid, context: Context) -> None:
    told = context.run_config
    config = serving.config_from(told)
    path = Path(str(told.get("out", ""))) if told.get("out") else default_path(config)
    cloud.check(config)
    folder = RunFolder.open(path, config, resume=True)
    print(f"run folder: {path.absolute()}", flush=True)
    if not folder.finished:
        known = {name: folder.rounds(name) for name in config.strategies}
        with display(config.rounds, known, console()) as observer:
            cloud.run(
                config,
                folder,
                grid,
                device=str(told.get("device", "auto")),
                min_nodes=int(told.get("min-nodes", 1)),
                node_wait=float(told.get("node-wait", 300.0)),
                observer=observer,
            )
    write_report(folder)
    print((path / "report.md").read_text(), flush=True)


def _edge(grid: Grid, context: Context) -> None:
    edge_server.run(grid, context.run_config)
