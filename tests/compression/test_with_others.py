"""Compression together with everything else that has a hand in a reply."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from fedplat import experiment
from fedplat.arrays import FlatArrays
from fedplat.clients.app import make_client_app
from fedplat.clients.collusion_grid import CollusionGrid
from fedplat.clients.mods.compression import CompressionMod
from fedplat.clients.mods.privacy import LocalPrivacyMod
from fedplat.clients.mods.signing import SigningMod
from fedplat.clients.stacked.execution import Execution
from fedplat.compression import QSGD, CompressionGrid, Compressor, HalfPrecision, TopK
from fedplat.config import load
from fedplat.protection import colluders_signature, protected
from fedplat.rounds import rounds
from fedplat.runtime.local import LocalGrid
from fedplat.strategies import Mean

from .apps import PARTS, app_of, record

TINY: dict[str, Any] = {
    "name": "tiny",
    "rounds": 3,
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 5},
    "model": {"name": "softmax"},
    "training": {"batch_size": 50, "lr": 0.1},
}
# 64 inputs, ten classes.
DENSE = 650 * 4


def outcome(
    compressor: Compressor, changes: dict[str, Any], group: int = 1, workers: int = 0, inner: Any = ()
) -> tuple[np.ndarray, list[str], dict[int, int]]:
    """Run three rounds; return the model, the clients' status in the last one, and bytes by client."""
    config = load(TINY | changes, "t")
    situation = experiment.build_situation(config, "cpu")
    signing = [SigningMod.for_simulation(config.seed)] if config.security.signed_updates else []
    app = make_client_app(
        situation.task,
        Execution(True, group, True, "given", {}),
        inner,
        [CompressionMod(compressor, 1, within=signing)],
    )
    strategy = protected(Mean(fraction_evaluate=0.0), config, 5, simulation=True)
    with LocalGrid(app, 5, workers=workers) as engine:
        numbers = {node: number for number, node in enumerate(engine.get_node_ids())}
        attacks = {n: situation.task.attacks[c] for n, c in numbers.items() if c in situation.task.attacks}
        inside = CompressionGrid(engine, compressor)
        grid = CollusionGrid(inside, attacks, numbers, colluders_signature(config, simulation=True))
        *_, last = rounds(strategy, grid, situation.initial, 3)
        sent = {numbers[node]: size for node, size in inside.sent_bytes.items()}
    return FlatArrays.of_record(last.arrays).vector.copy(), [r.status for r in strategy.reports], sent


@pytest.mark.parametrize("compressor", [TopK(fraction=0.1), QSGD()], ids=["top-k", "qsgd"])
def test_clients_trained_together_send_what_they_send_when_trained_alone(compressor: Compressor) -> None:
    alone, _, sent = outcome(compressor, {})
    together, _, again = outcome(compressor, {}, group=5, workers=1)
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert sent == again
    assert set(sent.values()) == {compressor.encoded_bytes(FlatArrays.copy_of({"w": alone}).layout)}


@pytest.mark.parametrize("attack", ["sign-flip", "alie"])
def test_attackers_and_colluders_send_compressed_and_signed_replies_too(attack: str) -> None:
    changes = {
        "attacks": [{"name": attack, "clients": [1, 3]}],
        "security": {"signed_updates": True},
    }
    model, status, sent = outcome(TopK(fraction=0.1), changes)
    assert status == ["accepted"] * 5
    assert len(set(sent.values())) == 1
    assert max(sent.values()) < DENSE / 5
    assert np.isfinite(model).all()


def test_noise_for_privacy_is_added_before_anything_is_left_out() -> None:
    noise = LocalPrivacyMod(clip=1.0, noise_multiplier=1.0, seed=1)
    model, status, sent = outcome(HalfPrecision(), {}, inner=[noise])
    assert status == ["accepted"] * 5
    assert set(sent.values()) == {DENSE // 2}
    assert np.abs(model).max() > 0.5  # three rounds of noise of deviation 1 over five clients


def test_what_error_feedback_adds_makes_a_small_fraction_learn_nearly_as_well() -> None:
    changes = {"training": {"batch_size": 50, "lr": 0.1}}
    dense, _, _ = outcome(TopK(fraction=1.0), changes)
    with_memory, _, _ = outcome(TopK(fraction=0.1), changes)
    without, _, _ = outcome(TopK(fraction=0.1, error_feedback=False), changes)
    assert np.linalg.norm(with_memory - dense) < np.linalg.norm(without - dense)


@pytest.mark.slow
def test_a_flower_simulation_compresses_and_remembers_as_the_local_engine_does() -> None:
    compressor, found = TopK(fraction=0.1), {}

    def app() -> Any:
        return app_of(CompressionMod(compressor, 1))

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < 3:  # or the first round is of those who are there
            time.sleep(0.1)
        around = CompressionGrid(grid, compressor)
        result = FedAvg(fraction_evaluate=0.0).start(around, record(**PARTS), num_rounds=3)
        found.update({n: a.numpy() for n, a in result.arrays.items()})
        found["bytes"] = sorted(around.sent_bytes.values())

    run_simulation(
        server, app(), num_supernodes=3, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    )
    with LocalGrid(app(), 3, workers=0) as engine:
        grid = CompressionGrid(engine, compressor)
        *_, last = rounds(FedAvg(fraction_evaluate=0.0), grid, record(**PARTS), 3)
        assert found.pop("bytes") == sorted(grid.sent_bytes.values())
    for name, value in found.items():
        np.testing.assert_allclose(value, last.arrays[name].numpy(), atol=1e-6)
