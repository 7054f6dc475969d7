"""The app that gets its scenario with every message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, MessageType, RecordDict

from fedplat import experiment
from fedplat.clients.stacked.execution import Execution
from fedplat.compat import make_message
from fedplat.config import ExperimentConfig, load
from fedplat.engines import Clients, Engine, FederationEngine, LocalEngine, ready_clients
from fedplat.errors import UserError
from fedplat.results.folder import RunFolder
from fedplat.results.progress import Display
from fedplat.runtime.around import GridWrapper
from fedplat.runtime.flower import STATE_QUERY, FlowerGrid
from fedplat.runtime.local import LocalGrid
from fedplat.scenario_app import ScenarioApp, told_to_clients
from fedplat.strategies import FedCredit

BASE: dict[str, Any] = {
    "name": "told",
    "rounds": 3,
    "strategies": ["fed-credit", "mean"],
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 6, "alpha": 0.5},
    "model": {"name": "mlp", "hidden": [16]},
    "training": {"lr": 0.05, "momentum": 0.5, "keep_optimizer": True},
    "attacks": [
        {"name": "sign-flip", "clients": [2], "factor": -4.0},
        {"name": "label-flip", "clients": [3], "source": [1], "target": 7},
        {"name": "mimic", "clients": [5]},
    ],
}


def config_of(**changes: Any) -> ExperimentConfig:
    return load({**BASE, **changes}, "told")


class Told(Engine):
    """The local engine with clients that know nothing but what messages say, as on Flower's engines."""

    name = "told"

    def __init__(self, app: ScenarioApp, **node: Any) -> None:
        self._app, self._node = app, node

    @contextmanager
    def clients(self, situation: experiment.Situation, strategy: str) -> Iterator[Clients]:
        with LocalGrid(self._app, situation.num_clients, workers=0, node_config=lambda i: self._node) as grid:
            flower = FlowerGrid(grid, poll_seconds=0, saves_states=True)
            yield ready_clients(flower, situation, strategy, "cpu", same_machine=True, wait=1.0)


def run(path: Path, config: ExperimentConfig, engine: Engine, observer: Display | None = None) -> Path:
    folder = RunFolder.open(path, config, resume=True)
    experiment.run(config, folder, engine=engine, device="cpu", observer=observer or Display(), group_size=1)
    return path


def same_results(a: Path, b: Path, strategies: tuple[str, ...]) -> bool:
    files = [f"{name}/{file}" for name in strategies for file in ("clients.jsonl", "model.pt")]
    return all((a / file).read_bytes() == (b / file).read_bytes() for file in files)


def test_clients_that_are_told_everything_give_the_bits_of_those_that_know_it(tmp_path: Path) -> None:
    config = config_of()
    known = run(tmp_path / "known", config, LocalEngine(1))
    told = run(tmp_path / "told", config, Told(ScenarioApp(simulation=True)))
    assert same_results(known, told, config.strategies)


def test_a_run_that_was_stopped_goes_on_with_the_clients_momentum_on_any_engine(tmp_path: Path) -> None:
    class Impatient(Display):
        def round(self, strategy: str, record: Mapping[str, Any]) -> None:
            if strategy == "mean" and record["round"] == 2:
                raise KeyboardInterrupt

    config = config_of()
    once = run(tmp_path / "once", config, LocalEngine(1))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "twice", config, Told(ScenarioApp(simulation=True)), Impatient())
    run(tmp_path / "twice", config, LocalEngine(1))
    assert same_results(once, tmp_path / "twice", config.strategies)


def ask(
    app: ScenarioApp, config: ExperimentConfig | None, kind: str = MessageType.TRAIN, **node: Any
) -> Message:
    content = RecordDict()
    if config is not None:
        execution = Execution(True, 1, True, "known", {})
        content["config"] = told_to_clients(config, "mean", execution, "cpu", same_machine=False)
    message = make_message(Message(content, 5, kind).metadata, content)
    return app(message, Context(1, 5, {"partition-id": 3, **node}, RecordDict(), {}))


def test_a_question_needs_no_scenario_and_gets_the_partition() -> None:
    reply = ask(ScenarioApp(), None, MessageType.QUERY)
    assert reply.content["node"]["partition-id"] == 3


def test_a_message_without_a_scenario_is_told_so() -> None:
    with pytest.raises(UserError, match=r"no scenario \('fedplat.scenario' in its config\)"):
        ask(ScenarioApp(), None)


def test_a_client_runs_no_code_that_a_server_names_by_its_path() -> None:
    config = config_of(model={"name": "fedplat.models.dense:softmax_regression"})
    with pytest.raises(
        UserError, match=r"model: 'fedplat.models.dense:softmax_regression' names code by its import path"
    ):
        ask(ScenarioApp(), config)
    reply = ask(ScenarioApp(simulation=True), config)
    assert "'server-round'" in reply.error.reason  # it gets as far as training
    with pytest.raises(UserError, match="'hf:/etc' is a folder"):
        ask(ScenarioApp(), config_of(data={"name": "hf:/etc"}))


def test_a_real_client_does_not_tell_what_it_remembers() -> None:
    with pytest.raises(UserError, match="brings no scenario"):
        ask(ScenarioApp(), None, STATE_QUERY)


def test_a_client_does_not_train_without_the_protection_it_requires() -> None:
    with pytest.raises(
        UserError, match="this client requires local-privacy, which the scenario does without"
    ):
        ask(ScenarioApp(), config_of(), requires="local-privacy")
    private = config_of(privacy={"mode": "local"})
    reply = ask(ScenarioApp(), private, requires="local-privacy")
    assert "needs one record of arrays in the message" in reply.error.reason  # it gets as far as its noise
    with pytest.raises(UserError, match="did you mean 'local-privacy'"):
        ask(ScenarioApp(), private, requires="local-privcy")


def test_what_is_the_servers_business_is_not_told() -> None:
    execution = Execution(True, 1, True, "known", {})
    config = config_of(data={"name": "mnist", "root": "/server/only"}, description="secret")
    far = str(told_to_clients(config, "mean", execution, "cpu", same_machine=False)["fedplat.scenario"])
    near = str(told_to_clients(config, "mean", execution, "cpu", same_machine=True)["fedplat.scenario"])
    assert "/server/only" in near
    assert not any(word in far for word in ("/server/only", "secret", "fed-credit", "strategies"))


def test_a_node_says_where_its_data_lies(tmp_path: Path) -> None:
    config = config_of(data={"name": "mnist", "download": False})
    with pytest.raises(UserError, match=str(tmp_path)):
        ask(ScenarioApp(), config, **{"data-root": str(tmp_path)})


class Lonely(GridWrapper):
    """A federation whose second and last node did not come."""

    def get_node_ids(self) -> list[int]:
        return [1000, *range(1002, 1005)]


def test_the_wait_for_clients_ends_and_names_the_partitions_without_one(tmp_path: Path) -> None:
    situation = experiment.build_situation(config_of(), "cpu")
    with LocalGrid(ScenarioApp(), 6, workers=0) as grid:
        engine = FederationEngine(Lonely(grid), device="cpu", min_nodes=1, node_wait=0.0, simulated=False)
        words = r"4 nodes are connected after 0 s, and of the 6 partitions nobody holds 1, 5 alone"
        with pytest.raises(UserError, match=words), engine.clients(situation, "mean"):
            pass


def test_real_nodes_are_remembered_by_node_id_and_simulated_ones_by_partition() -> None:
    situation = experiment.build_situation(config_of(), "cpu")
    situation = replace(situation, execution=Execution(True, 1, True, "known", {}))
    with LocalGrid(ScenarioApp(), 6, workers=0) as grid:
        for simulated, names in ((True, {1000 + i: 1000 + i for i in range(6)}), (False, {})):
            engine = FederationEngine(grid, device="cpu", min_nodes=1, node_wait=0.0, simulated=simulated)
            with engine.clients(situation, "mean") as clients:
                assert clients.identities == names
                assert clients.numbers == {1000 + i: i for i in range(6)}


def test_rules_remember_identities_instead_of_node_ids_where_there_are_any() -> None:
    strategy = FedCredit()
    strategy.identities[17] = 99
    assert strategy._identity(17) == 99
    assert strategy._identity(18) == 18
