"""Memory is limited in the same way where Flower runs the clients: in its simulation and by SuperNodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedplat.clients.mods.memory_cap import MemoryCapMod
from fedplat.deployment.plan import create
from fedplat.deployment.processes import Machines
from fedplat.runtime.simulation import simulation

from ..deployment.test_loopback import free_ports, text_of
from .test_enforce import MB, message, trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits need Linux"),
]


def test_in_flowers_simulation_who_has_too_little_fails_and_the_others_deliver() -> None:
    app = ClientApp(mods=[MemoryCapMod()])
    app.train()(trained)
    with simulation(app, 3, num_cpus=0.5) as grid:
        nodes = list(grid.get_node_ids())
        for call in (1, 2):
            content = message(cap=60 * MB).content
            replies = list(grid.send_and_receive([Message(content, node, "train") for node in nodes]))
            failed = [reply.error.reason for reply in replies if reply.has_error()]
            assert len(failed) == 1
            assert failed[0].startswith("out of memory:")
            for reply in replies:
                if reply.has_content():
                    assert reply.content["arrays"]["w"].numpy().tolist() == [1, 1, 1]
                    assert reply.content["metrics"]["calls"] == call


PROJECT = """
[project]
name = "capped"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "tests"

[tool.flwr.app.components]
serverapp = "capped.apps:server"
clientapp = "capped.apps:client"

[tool.flwr.app.config]
told = ""
"""

APPS = """
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedplat.clients.mods.memory_cap import MEMORY_KEY, MemoryCapMod

client = ClientApp(mods=[MemoryCapMod()])
server = ServerApp()


@client.train()
def train(message, context):
    calls = int(context.state["c"]["n"]) + 1 if "c" in context.state else 1
    context.state["c"] = ConfigRecord({"n": calls})
    torch.zeros(40 << 20, dtype=torch.uint8)
    content = RecordDict({"metrics": MetricRecord({"calls": calls})})
    return Message(content, reply_to=message)


@server.main()
def main(grid, context):
    nodes = sorted(grid.get_node_ids())
    lines = []
    for turn in (1, 2):
        messages = []
        for node, megabytes in zip(nodes, (60, 20)):
            config = ConfigRecord({MEMORY_KEY: megabytes << 20})
            messages.append(Message(RecordDict({"config": config}), node, "train"))
        replies = {r.metadata.src_node_id: r for r in grid.send_and_receive(messages)}
        for node in nodes:
            reply = replies[node]
            lines.append(reply.error.reason if reply.has_error() else str(reply.content["metrics"]["calls"]))
    Path(context.run_config["told"]).write_text("\\n".join(lines))
"""


def test_under_a_supernode_who_has_too_little_fails_and_the_other_delivers(tmp_path: Path) -> None:
    app, told = tmp_path / "app", tmp_path / "told.txt"
    (app / "capped").mkdir(parents=True)
    (app / "pyproject.toml").write_text(PROJECT)
    (app / "capped" / "__init__.py").write_text("")
    (app / "capped" / "apps.py").write_text(APPS)
    port = free_ports(4)
    made = create(tmp_path / "federation", supernodes=2, port=port, first_node_port=port + 1)
    with Machines(made.folder, timeout=400) as machines:
        machines.start_all()
        run = machines.submit(app, f'told="{told}"')
        status = machines.wait_for_run(run, 400)
        assert status == "finished:completed", text_of(machines.log("superlink"))[-3000:]
    lines = told.read_text().splitlines()
    assert [lines[0], lines[2]] == ["1", "2"]
    assert all(line.startswith("out of memory:") for line in (lines[1], lines[3]))
