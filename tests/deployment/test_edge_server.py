"""An edge's server and the cloud, in one process: the messages of a cloud answered as in a simulation."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedplat import experiment
from fedplat.clients.app import STRATEGY_KEY
from fedplat.clients.stacked.execution import Execution
from fedplat.compat import records_from_bytes, records_to_bytes
from fedplat.compression import CompressionGrid
from fedplat.config import ExperimentConfig, load
from fedplat.deployment.cloud import check, told_to_edges
from fedplat.deployment.edge_bridge import Bridge, make_bridge
from fedplat.deployment.edge_client import BRIDGE_KEY, EDGE_SCENARIO, EDGE_TIMEOUT, answer_by_edge
from fedplat.deployment.edge_server import EdgeServer, Own
from fedplat.deployment.edge_server import run as serve
from fedplat.deployment.tiers import main as tier
from fedplat.engines import Clients, LocalEngine
from fedplat.errors import UserError
from fedplat.hierarchy_setup import build_hierarchy
from fedplat.runtime.local import LocalGrid
from fedplat.scenario_app import ScenarioApp, told_to_clients
from fedplat.strategies.wrapper import state_of

BASE: dict[str, Any] = {
    "name": "tiers",
    "rounds": 3,
    "strategies": ["mean"],
    "data": {"name": "digits"},
    "partition": {"name": "shards", "clients": 4},
    "model": {"name": "softmax"},
    "training": {"batch_size": 32, "lr": 0.1, "steps": 2},
    "topology": {"name": "edges", "edges": 2, "edge_rounds": 2},
}
EXECUTION = Execution(False, 1, True, "known", {})


def config_of(**changes: Any) -> ExperimentConfig:
    return load({**BASE, **changes}, "tiers")


@contextmanager
def clients_of(*partitions: int) -> Iterator[LocalGrid]:
    """Clients with these partitions, as the real ones are: they know what messages say."""
    app = ScenarioApp()
    with LocalGrid(
        app, len(partitions), workers=0, node_config=lambda i: {"partition-id": partitions[i]}
    ) as g:
        yield g


def content_of(config: ExperimentConfig, arrays: ArrayRecord, number: int) -> RecordDict:
    told = told_to_clients(config, config.strategies[0], EXECUTION, "cpu", same_machine=False)
    more = {
        EDGE_SCENARIO: json.dumps(told_to_edges(config)),
        EDGE_TIMEOUT: 240.0,
        "server-round": number,
    }
    return RecordDict({"arrays": arrays, "config": ConfigRecord({**told, **more})})


def by_simulation(config: ExperimentConfig, rounds: int) -> list[list[Message]]:
    """Return what the edges of a simulation answer in each round to the model that the run begins with."""
    situation = experiment.build_situation(config, "cpu")
    engine = LocalEngine(1)
    hierarchy = build_hierarchy(config, config.strategies[0], situation, engine)
    assert hierarchy is not None
    answers = []
    with clients_of(*range(situation.num_clients)) as grid:
        numbers = {node: client for client, node in enumerate(grid.get_node_ids())}
        plain = CompressionGrid(grid, config.compression.build())
        _, cloud = hierarchy.around(plain, Clients(grid, numbers))
        for number in range(1, rounds + 1):
            content = content_of(config, situation.initial, number)
            asked = [Message(content, node, "train") for node in cloud.get_node_ids()]
            answers.append(list(cloud.send_and_receive(asked)))
    return answers


def assert_same(one: RecordDict, other: RecordDict) -> None:
    arrays, expected = one["arrays"], other["arrays"]
    assert isinstance(arrays, ArrayRecord)
    assert isinstance(expected, ArrayRecord)
    assert {k: a.numpy().tobytes() for k, a in arrays.items()} == {
        k: a.numpy().tobytes() for k, a in expected.items()
    }
    assert dict(one["metrics"]) == dict(other["metrics"])


def asked_of(
    server: EdgeServer, config: ExperimentConfig, number: int = 1, edge: int = 0, kind: str = "train"
) -> tuple[dict[str, Any], RecordDict]:
    initial = experiment.build_situation(config, "cpu").initial
    content = records_to_bytes(content_of(config, initial, number))
    header, answer = server.reply_to({"type": kind, "edge": edge}, content)
    return dict(header), records_from_bytes(answer)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategies": ["median"], "topology": {**BASE["topology"], "edge": "fed-credit"}},
        {"compression": {"name": "top-k", "fraction": 0.2}},
        {"attacks": [{"name": "sign-flip", "edges": [0]}, {"name": "label-reverse", "clients": [2]}]},
    ],
    ids=["mean", "memory", "compression", "attacks"],
)
def test_an_edge_answers_with_the_bits_of_a_simulation_round_after_round(changes: dict[str, Any]) -> None:
    config = config_of(**changes)
    expected = by_simulation(config, 2)
    for edge in (0, 1):
        with clients_of(edge, edge + 2) as grid:
            server = EdgeServer(grid)
            for number in (1, 2):
                header, answer = asked_of(server, config, number, edge)
                assert header == {}
                assert_same(answer, expected[number - 1][edge].content)


def test_a_round_that_comes_again_is_the_same_and_round_one_begins_anew() -> None:
    config = config_of(topology={**BASE["topology"], "edge": "fed-credit"})
    with clients_of(0, 2) as grid:
        server = EdgeServer(grid)
        states = []
        for number in (1, 2, 2, 1):
            answer = asked_of(server, config, number)[1]
            assert server._built is not None
            states.append((str(state_of(server._built.edge.strategy)), answer))
    assert states[1][0] == states[2][0]
    assert states[0][0] == states[3][0] != states[1][0]
    assert_same(states[1][1], states[2][1])


def test_over_the_bridge_the_cloud_gets_answer_and_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_bridge(tmp_path / "bridge")
    config = config_of()
    context = Context(1, 5, {BRIDGE_KEY: str(tmp_path / "bridge"), "partition-id": 1}, RecordDict(), {})
    initial = experiment.build_situation(config, "cpu").initial
    with clients_of(1, 3) as grid:
        message = Message(content_of(config, initial, 1), 5, "train")
        with Bridge(tmp_path / "bridge") as bridge:
            thread = threading.Thread(target=EdgeServer(grid).serve, args=[bridge])
            thread.start()
            reply = ScenarioApp()(message, context)
            assert_same(reply.content, by_simulation(config, 1)[0][1].content)
            other = Message(content_of(config_of(topology={"name": "flat"}), initial, 1), 5, "train")
            assert ScenarioApp()(other, context).error.reason.startswith("strategy 'mean' has no edges")
        thread.join()
        assert ScenarioApp()(Message(RecordDict(), 5, "query"), context).content["node"]["partition-id"] == 1
        lost = ScenarioApp()(message, context)
        assert lost.error.reason.startswith("NobodyError: the edge's server does not run")
        with pytest.raises(UserError, match="does not run"):
            answer_by_edge(message, context)
    assert "round 1: 2 accepted; 719 samples" in capsys.readouterr().out


def test_evaluation_is_weighted_by_the_samples_of_the_clients() -> None:
    config = config_of()
    initial = experiment.build_situation(config, "cpu").initial
    with clients_of(0, 3) as grid:
        content = content_of(config, initial, 1)
        asked = [Message(content, node, "evaluate") for node in grid.get_node_ids()]
        own: list[Any] = [reply.content["metrics"] for reply in grid.send_and_receive(asked)]
        _, answer = asked_of(EdgeServer(grid), config, kind="evaluate")
    counts = [one["num-examples"] for one in own]
    told: Any = answer["metrics"]
    assert counts[0] != counts[1]
    assert told["num-examples"] == sum(counts)
    for name in ("eval-acc", "eval-loss"):
        mean = sum(n * one[name] for n, one in zip(counts, own, strict=True)) / sum(counts)
        assert told[name] == pytest.approx(mean)


def test_a_lost_client_is_told_and_the_edge_goes_on_with_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with clients_of(0, 9) as grid:  # nobody has partition 9
        header, answer = asked_of(EdgeServer(grid), config_of())
    assert header == {}
    assert answer["metrics"]["num-examples"] == 360
    assert "1 accepted, 1 failed" in capsys.readouterr().out


def test_mistakes_are_answered_and_do_not_end_the_server() -> None:
    with clients_of(0, 2) as grid:
        server = EdgeServer(grid, Own(min_nodes=3, node_wait=0.0))
        reasons = [
            asked_of(server, config_of())[0]["error"]["reason"],
            asked_of(EdgeServer(grid), config_of(), edge=2)[0]["error"]["reason"],
            server.reply_to({"type": "train", "edge": 0}, b"")[0]["error"]["reason"],
            server.reply_to({"type": "train", "edge": 0}, b"\xff\xff")[0]["error"]["reason"],
            server.reply_to({}, b"")[0]["error"]["reason"],
            asked_of(server, config_of(), kind="query")[0]["error"]["reason"],
        ]
        code = config_of(model={"name": "fedplat.models.dense:softmax_regression"})
        reasons.append(asked_of(server, code)[0]["error"]["reason"])
        for reason, expected in zip(
            reasons,
            (
                "2 of at least 3 clients of this edge are connected",
                "this is edge 2, and the scenario has 2 edges",
                "the message brings no scenario for edges",
                "DecodeError",
                "KeyError",
                "an edge has no answer to a message of type 'query'",
                "names code by its import path",
            ),
            strict=True,
        ):
            assert expected in reason
        assert asked_of(EdgeServer(grid), config_of())[0] == {}


def test_no_folder_is_read_on_a_clouds_word_and_an_edges_own_are_used(tmp_path: Path) -> None:
    theirs = {"data": {"name": "digits", "root": "/cloud"}}
    signed = {"security": {"signed_updates": True, "signing_keys": "/cloud/keys"}}
    told = json.dumps(config_of(**theirs, **signed).to_dict())
    with clients_of(0) as grid:
        config = EdgeServer(grid, Own(tmp_path / "data", tmp_path / "keys"))._config(told)
        assert (config.data.root, config.security.signing_keys) == (tmp_path / "data", tmp_path / "keys")
        config = EdgeServer(grid)._config(told)
        assert (config.data.root, config.security.signing_keys) == (None, None)
    assert "/cloud" not in json.dumps(told_to_edges(config_of(**theirs, **signed)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"topology": {"name": "flat"}}, "has no edges"),
        ({"topology": {**BASE["topology"], "association": "random-least"}}, "'random-least' sends clients"),
        ({"availability": {"name": "bernoulli"}}, "are emulated by the clients' server"),
    ],
)
def test_a_cloud_refuses_what_machines_cannot_do(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        check(config_of(**changes))


def test_a_run_config_is_checked(tmp_path: Path) -> None:
    context = Context(1, 1, {}, RecordDict(), {"tier": "egde"})
    with clients_of(0) as grid:
        with pytest.raises(UserError, match="did you mean 'edge'"):
            tier(grid, context)
        with pytest.raises(UserError, match='needs bridge="FOLDER"'):
            serve(grid, {})
        with pytest.raises(UserError, match="secret: cannot be read"):
            serve(grid, {"bridge": str(tmp_path)})


def test_the_strategy_is_part_of_what_an_edge_is_told() -> None:
    told = content_of(config_of(), experiment.build_situation(config_of(), "cpu").initial, 1)["config"]
    assert isinstance(told, ConfigRecord)
    assert told[STRATEGY_KEY] == "mean"
