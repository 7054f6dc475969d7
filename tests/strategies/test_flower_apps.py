"""A Flower user's own app, with its strategy swapped for one of ours."""

from __future__ import annotations

import inspect
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, Result
from flwr.simulation import run_simulation

from fedplat import strategies
from fedplat.clients.mods.always_reply import always_reply
from fedplat.errors import UserError
from fedplat.runtime.local import LocalGrid
from fedplat.security.validation import ReplyRules
from fedplat.strategies import FedCredit, FederatedStrategy, Mean, RandomFraction

from ..flower_apps import plain_app, record

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flower-pytorch"
CONFIG: dict[str, Any] = {
    **tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"],
    "num-server-rounds": 2,
}
NAMES = sorted(
    name
    for name in strategies.__all__
    if inspect.isclass(kind := getattr(strategies, name))
    and issubclass(kind, FederatedStrategy)
    and kind is not FederatedStrategy
)


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path.remove(str(EXAMPLE))


@pytest.fixture
def server() -> ModuleType:
    from flowerapp import server_app

    return server_app


@pytest.fixture
def client() -> ClientApp:
    from flowerapp import client_app

    return client_app.app


def trained_on_clean_digits(arrays: ArrayRecord, server_round: int) -> ArrayRecord:
    from flowerapp import task

    net = task.Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    batches, _ = task.load_data(0, 10, CONFIG["batch-size"])
    task.train(net, batches, CONFIG["local-epochs"], CONFIG["learning-rate"])
    return ArrayRecord(net.state_dict())


def swapped(name: str) -> Callable[..., FederatedStrategy]:
    """Return what stands in the place of FedAvg; FLTrust also needs training on clean data."""
    kind = getattr(strategies, name)
    return (lambda **given: kind(trained_on_clean_digits, **given)) if name == "FLTrust" else kind


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_takes_the_place_of_fedavg_in_a_tutorial_app(
    name: str, server: ModuleType, client: ClientApp, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    made: list[FederatedStrategy] = []

    def strategy(**given: Any) -> FederatedStrategy:
        made.append(swapped(name)(**given))
        return made[0]

    monkeypatch.setattr(server, "Strategy", strategy)
    with LocalGrid(client, 8, workers=0, run_config=CONFIG) as grid:
        context = Context(1, 1, {}, RecordDict(), CONFIG)
        server.app(grid, context)
    assert capsys.readouterr().out.count("accuracy") == 3
    reports = made[0].reports
    # The app answers no query, so clients go by their node id.
    assert [report.client for report in reports] == grid.get_node_ids()
    assert {report.status for report in reports} == {"accepted"}
    assert {report.num_examples for report in reports} <= {143, 144, 145}


def test_flowers_fedavg_and_our_mean_bring_the_app_to_the_same_model(
    server: ModuleType, client: ClientApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Result] = []
    for kind in (FedAvg, Mean):
        monkeypatch.setattr(server, "Strategy", kind)
        with LocalGrid(client, 4, workers=0, run_config=CONFIG) as grid:
            results.append(server.run(grid, CONFIG | {"num-server-rounds": 4}))
    theirs, ours = results
    for name, array in theirs.arrays.items():
        np.testing.assert_allclose(ours.arrays[name].numpy(), array.numpy(), rtol=1e-3, atol=1e-4)
    assert ours.evaluate_metrics_serverapp is not None
    assert ours.evaluate_metrics_serverapp[4]["accuracy"] > 0.8
    for kind in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        for number in range(1, 5):
            expected = dict(getattr(theirs, kind)[number])
            assert dict(getattr(ours, kind)[number]) == pytest.approx(expected, abs=1e-3)


def test_the_example_swaps_its_strategy_in_one_line(server: ModuleType) -> None:
    lines = (EXAMPLE / "flowerapp" / "server_app.py").read_text().splitlines()
    code = [line for line in lines if "fedplat" in line and not line.startswith("#")]
    assert code == ["from fedplat.strategies import FedCredit as Strategy"]
    assert server.Strategy is FedCredit
    assert "fedplat" not in (EXAMPLE / "flowerapp" / "client_app.py").read_text()


def test_the_keywords_that_the_guide_calls_equal_choose_as_fedavg_does() -> None:
    def app() -> ClientApp:
        made = ClientApp()

        @made.train()
        def train(message: Message, context: Context) -> Message:
            arrays = ArrayRecord([a + 1 for a in message.content["model"].to_numpy_ndarrays()])
            assert message.content["settings"]["lr"] == 0.1
            count = 1 + int(context.node_config["partition-id"])
            content = RecordDict({"model": arrays, "metrics": MetricRecord({"samples": count, "loss": 1.0})})
            return Message(content, reply_to=message)

        return made

    keys = {"arrayrecord_key": "model", "configrecord_key": "settings", "fraction_evaluate": 0.0}
    start, config = record(**{"0": np.zeros(3, np.float32)}), ConfigRecord({"lr": 0.1})
    results = []
    for strategy in (
        FedAvg(fraction_train=0.5, min_available_nodes=6, weighted_by_key="samples", **keys),
        Mean(
            selector=RandomFraction(fraction=0.5),
            min_nodes=6,
            rules=ReplyRules(weighted_by_key="samples"),
            **keys,
        ),
        Mean(fraction_train=0.5, min_available_nodes=6, weighted_by_key="samples", **keys),
    ):
        with LocalGrid(app(), 6, workers=0) as grid:
            results.append(strategy.start(grid, start, num_rounds=2, train_config=config))
    for result in results:  # Flower's sum depends on whom it drew
        assert result.arrays["0"].numpy() == pytest.approx([2, 2, 2], rel=1e-6)
        assert dict(result.train_metrics_clientapp[2]) == pytest.approx({"loss": 1.0})
    assert len(strategy.reports) == 3


def test_keywords_that_say_the_same_thing_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="a selector or fraction_train"):
        Mean(selector=RandomFraction(fraction=0.5), fraction_train=0.5)
    with pytest.raises(ValueError, match="weighted_by_key is part of rules"):
        Mean(rules=ReplyRules(), weighted_by_key="samples")


def test_the_most_that_flowers_minimum_keywords_ask_for_has_to_connect() -> None:
    with (
        LocalGrid(plain_app(), 3, workers=0) as grid,
        pytest.raises(UserError, match="3 of at least 5 clients are connected"),
    ):
        Mean(min_train_nodes=5, min_evaluate_nodes=2, node_wait=0).start(
            grid, record(**{"0": np.zeros(1, np.float32)}), num_rounds=1
        )


@pytest.mark.slow
def test_the_app_runs_in_flowers_own_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    from flowerapp import client_app, server_app

    monkeypatch.setenv("PYTHONPATH", str(EXAMPLE))
    results: list[Result] = []
    server, client = ServerApp(), ClientApp()

    @server.main()
    def main(grid: Any, context: Context) -> None:
        results.append(server_app.run(grid, CONFIG))

    # run_simulation gives no run configuration: it is put in here, where ``flwr run`` would.
    def configured(context: Context) -> Context:
        return Context(context.run_id, context.node_id, context.node_config, context.state, dict(config))

    @client.train()
    def train(message: Message, context: Context) -> Message:
        return client_app.train(message, configured(context))

    @client.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return client_app.evaluate(message, configured(context))

    config = dict(CONFIG)
    run_simulation(server, client, 4, backend_config={"client_resources": {"num_cpus": 1}})
    with LocalGrid(client_app.app, 4, workers=0, run_config=CONFIG) as grid:
        expected = server_app.run(grid, CONFIG)
    ours, theirs = results[0].evaluate_metrics_serverapp, expected.evaluate_metrics_serverapp
    assert ours is not None
    assert theirs is not None
    assert ours[2]["accuracy"] == pytest.approx(theirs[2]["accuracy"], abs=0.01)


# Clients that always answer --------------------------------------------------------------------------------


def answer_of(handler: Callable[[Message, Context], Any], kind: str = "train") -> Message:
    app = ClientApp(mods=[always_reply])
    app.train()(handler)
    app.evaluate()(handler)
    message = Message(RecordDict({"config": ConfigRecord()}), 7, kind)
    message.metadata.__dict__["_message_id"] = "id"
    return app(message, Context(1, 7, {}, RecordDict(), {}))


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (None, "the ClientApp returned NoneType instead of a Message"),
        ({"arrays": 1}, "the ClientApp returned dict instead of a Message"),
        (ValueError("boom"), "ValueError: boom"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
    ],
)
def test_whatever_a_handler_does_the_server_gets_an_answer(outcome: Any, reason: str, kind: str) -> None:
    # Trap: without a Message, Flower's simulation loses a worker and a SuperNode answers no run any more.
    def handler(message: Message, context: Context) -> Any:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    reply = answer_of(handler, kind)
    assert reply.has_error()
    assert reply.error.code == 2
    assert reply.error.reason == reason
    assert reply.metadata.reply_to_message_id == "id"


def test_answers_pass_through_and_ctrl_c_does_too() -> None:
    def fine(message: Message, context: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"a": 1})}), reply_to=message)

    assert answer_of(fine).content["metrics"]["a"] == 1

    def stopped(message: Message, context: Context) -> Message:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_of(stopped)


def test_an_app_with_it_runs_on_our_engine_as_without() -> None:
    with LocalGrid(plain_app(), 3, workers=0) as grid:
        without = Mean().start(grid, record(**{"0": np.zeros(2, np.float32)}), num_rounds=1)
    app = ClientApp(mods=[always_reply])
    inner = plain_app()
    app.train()(lambda message, context: inner(message, context))
    app.evaluate()(lambda message, context: inner(message, context))
    with LocalGrid(app, 3, workers=0) as grid:
        with_it = Mean().start(grid, record(**{"0": np.zeros(2, np.float32)}), num_rounds=1)
    assert with_it.arrays["0"].numpy().tolist() == without.arrays["0"].numpy().tolist()
