"""A cloud, two edges and their clients on this machine: the simulation's model, and an edge that is lost.

It all happens once; the tests look at what was seen.
"""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import fedplat
from fedplat import experiment
from fedplat.cli.common import load_config
from fedplat.deployment.plan_edges import create_with_edges
from fedplat.deployment.processes import SUPERLINK, Machines
from fedplat.deployment.scripts import CONNECTION
from fedplat.engines import LocalEngine
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display

from .test_loopback import free_ports, lines_of, text_of, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

APP = Path(fedplat.__file__).parent / "flower_app"
SCENARIO = """
name = "tiers"
rounds = 3
strategies = ["mean"]
timeout = 900.0

[data]
name = "digits"

[partition]
name = "shards"
clients = 4

[model]
name = "softmax"

[training]
batch_size = 32
lr = 0.1
momentum = 0.5
keep_optimizer = true

[topology]
name = "edges"
edges = 2
edge_rounds = 2
edge = "median"

[security]
signed_updates = true
"""


LOST_IN = 3


@dataclass
class Story:
    """What was seen; ``models`` are those after the last round with all edges."""

    status: str = ""
    simulated: Path = Path()
    deployed: Path = Path()
    models: list[dict[str, bytes]] = field(default_factory=list)
    log: str = ""

    def edges_of(self, number: int) -> dict[int, dict[str, Any]]:
        """Return what the cloud wrote of a round by edge."""
        rows = lines_of(self.deployed / "mean" / "clients.jsonl")
        return {row["client"]: row for row in rows if row["round"] == number}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    home, seen = tmp_path_factory.mktemp("tiers"), Story()
    scenario = home / "tiers.toml"
    scenario.write_text(SCENARIO)
    seen.simulated = home / "simulated"
    simulated = load_config(str(scenario), [f"rounds={LOST_IN - 1}"], None, [])
    folder = RunFolder.open(seen.simulated, simulated, False)
    experiment.run(
        folder.config, folder, engine=LocalEngine(1), device="cpu", observer=Display(), group_size=1
    )
    seen.models.append(model_of(folder))

    port = free_ports(9)
    made = create_with_edges(home / "fed", edges=2, supernodes=4, port=port, first_node_port=port + 3)
    seen.deployed = made[0].superlink / "work" / "result"
    with ExitStack() as stack:
        cloud, *edges = [stack.enter_context(Machines(one.folder, timeout=400)) for one in made]
        cloud.start_all()
        served = []
        for edge in edges:
            edge.start_all()
            own = 'tier="edge" bridge="../../bridge" signing-keys="../signing-keys" min-nodes=2'
            served.append(edge.submit(APP, own))
        for one in made[1:]:
            until((one.folder / "bridge" / "address").exists, cloud, 300)
        run = cloud.submit(APP, f'tier="cloud" scenario="{scenario}" out="result" device="cpu"')
        # A client of the second edge is at work, so that its server is, too.
        until(lambda: f"ROUND {LOST_IN}]" in text_of(edges[1].log("supernode-1")), edges[1], 1500)
        config = load_config(str(scenario), [], None, [])
        seen.models.append(model_of(RunFolder.open(seen.deployed, config, True)))
        edges[1].kill(SUPERLINK)
        seen.status = cloud.wait_for_run(run, 900)
        program = [str(made[1].operator / "flwr.sh"), "log", str(served[0]), CONNECTION, "--show"]
        done = subprocess.run(program, env=cloud._environment, capture_output=True, text=True, check=False)
        seen.log = done.stdout
    return seen


def model_of(folder: RunFolder) -> dict[str, bytes]:
    """Return the model after the last full round."""
    checkpoint = folder.log("mean").load_checkpoint()
    assert checkpoint["round"] == LOST_IN - 1
    return {name: tensor.numpy().tobytes() for name, tensor in checkpoint["arrays"].items()}


def test_a_federation_of_two_tiers_has_the_bits_of_a_simulation(story: Story) -> None:
    assert story.models[0] == story.models[1]
    simulated, deployed = (lines_of(f / "mean" / "rounds.jsonl") for f in (story.simulated, story.deployed))
    assert len(simulated) == LOST_IN
    for name in ("round", "accuracy", "loss", "per_class_accuracy"):
        assert [line[name] for line in deployed[:LOST_IN]] == [line[name] for line in simulated]


def test_the_cloud_knows_of_edges_what_a_simulation_does(story: Story) -> None:
    for row in lines_of(story.simulated / "mean" / "edges.jsonl"):
        edge = story.edges_of(row["round"])[row["edge"]]
        assert (edge["status"], edge["samples"]) == ("accepted", row["samples"])
        assert edge["weight"] == pytest.approx(row["weight"])


def test_an_edge_that_is_killed_is_named_and_the_run_goes_on_without_it(story: Story) -> None:
    assert story.status == "finished:completed"
    lost = story.edges_of(LOST_IN)
    assert (lost[0]["status"], lost[0]["weight"]) == ("accepted", 1)
    assert lost[1]["status"] == "failed"
    assert "the edge's server went away before it answered" in lost[1]["reason"]


def test_an_edge_says_what_became_of_its_rounds(story: Story) -> None:
    assert "edge: at work" in story.log
    for number in (1, 2, 3):
        assert re.search(rf"round {number}: 2 accepted; \d+ samples", story.log)


def test_the_run_folder_is_that_of_the_scenario(story: Story) -> None:
    assert 'name = "edges"' in (story.deployed / "config.toml").read_text()
    assert json.loads((story.deployed / "environment.json").read_text())["engine"] == "flower-edges"
    assert (story.deployed / "report.md").exists()
