from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from scipy import optimize, stats

from fedplat.arrays import Layout
from fedplat.clients.mods.privacy import LocalPrivacyMod
from fedplat.errors import UserError
from fedplat.security.privacy import (
    PrivacyAccount,
    SecretNormals,
    gaussian_epsilon,
    noise_source,
    released,
)

from ..flower_apps import record

# The account -------------------------------------------------------------------------------------------


def by_hand(noise_multiplier: float, rounds: int, delta: float) -> float:
    """Rényi divergence of the Gaussian mechanism, turned into epsilon as Canonne, Kamath and Steinke do."""

    def epsilon(order: float) -> float:
        rdp = rounds * order / (2 * noise_multiplier**2)
        return rdp + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)

    return float(optimize.minimize_scalar(lambda x: epsilon(1 + math.exp(x)), bounds=(-5, 7)).fun)


def exact(noise_multiplier: float, rounds: int, delta: float) -> float:
    """The least epsilon there is: composed, the releases are one Gaussian (Balle and Wang, ICML 2018)."""
    mu = math.sqrt(rounds) / noise_multiplier

    def excess(epsilon: float) -> float:
        far = stats.norm.logcdf(-mu / 2 - epsilon / mu)
        return float(stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon + far)) - delta

    return float(optimize.brentq(excess, 0, 1000))


@pytest.mark.parametrize("noise", [0.5, 1.0, 2.0, 10.0])
@pytest.mark.parametrize("rounds", [1, 10, 200])
@pytest.mark.parametrize("delta", [1e-5, 1e-3])
def test_epsilon_is_that_of_an_independent_computation(noise: float, rounds: int, delta: float) -> None:
    found = gaussian_epsilon({noise: rounds}, delta)
    # Orders are a grid there: never below the best, and hardly above it.
    assert by_hand(noise, rounds, delta) - 1e-9 <= found <= 1.02 * by_hand(noise, rounds, delta) + 0.01
    assert exact(noise, rounds, delta) <= found <= 1.25 * exact(noise, rounds, delta) + 0.1


def test_the_independent_computations_agree_with_what_is_published() -> None:
    # Dong, Roth and Su: one release at noise 1 is (1, 0.127)-private.
    assert exact(1.0, 1, 0.126936737) == pytest.approx(1.0, abs=1e-6)


def test_four_releases_at_double_noise_cost_what_one_does() -> None:
    assert gaussian_epsilon({2.0: 4}, 1e-5) == pytest.approx(gaussian_epsilon({1.0: 1}, 1e-5))
    assert gaussian_epsilon({2.0: 2, 4.0: 8}, 1e-5) == pytest.approx(gaussian_epsilon({1.0: 1}, 1e-5))


def test_an_account_adds_up_looks_ahead_and_survives_saving() -> None:
    account = PrivacyAccount(1e-5)
    assert account.epsilon() == 0
    for noise in (1.0, 2.0, 1.0):
        ahead = account.epsilon(after=noise)
        account.spend(noise)
        assert account.epsilon() == ahead
    assert account.releases == 3
    again = PrivacyAccount(1e-5)
    again.load_state_dict(account.state_dict())
    again.spend(3.0)
    account.spend(3.0)
    assert again.epsilon() == account.epsilon() == gaussian_epsilon({1.0: 2, 2.0: 1, 3.0: 1}, 1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -0.1, float("nan")])
def test_a_delta_that_is_none_is_refused(delta: float) -> None:
    with pytest.raises(UserError, match="delta must be between 0 and 1"):
        PrivacyAccount(delta)


def test_without_the_package_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match=r"pip install 'fedplat\[dp\]'"):
        PrivacyAccount(1e-5)


# The noise ---------------------------------------------------------------------------------------------


def test_secret_noise_is_normal_and_follows_its_key() -> None:
    numbers = SecretNormals(bytes(range(32))).standard_normal(200_001)
    assert numbers.shape == (200_001,)
    assert np.isfinite(numbers).all()
    assert stats.kstest(numbers, "norm").pvalue > 0.01
    halves = numbers[:100_000], numbers[100_001:]
    assert abs(np.corrcoef(*halves)[0, 1]) < 0.01
    assert np.array_equal(numbers, SecretNormals(bytes(range(32))).standard_normal(200_001))
    assert SecretNormals().standard_normal(0).shape == (0,)


def test_noise_without_a_seed_never_repeats_and_with_one_it_does() -> None:
    def draw(seed: int | None, *keys: int) -> list[float]:
        return noise_source(seed, "privacy", *keys).standard_normal(4).tolist()

    assert draw(None, 1) != draw(None, 1)
    assert draw(5, 1) == draw(5, 1)
    assert draw(5, 1) != draw(5, 2)


def test_what_is_released_fits_the_types_of_the_model() -> None:
    named = {"w": ((3,), "float32"), "h": ((2,), "float16"), "bn.running_var": ((4,), "float32")}
    layout = Layout.of(named, promote=True)
    vector = np.zeros(layout.dim, np.float32)
    out = released(vector, 1e6, np.random.default_rng(1), layout)
    assert not vector.any()
    assert (np.abs(out[3:5]) == 65504).all()
    assert (out[5:] >= 0).all()
    assert (out[5:] == 0).any()
    assert (np.abs(out[:3]) > 1).all()
    assert np.array_equal(released(vector, 0.0, np.random.default_rng(1), layout), vector)
    with pytest.raises(ValueError, match="std must be finite"):
        released(vector, math.inf, np.random.default_rng(1), layout)


# On the client -----------------------------------------------------------------------------------------

SENT = {
    "w": np.zeros(3, np.float32),
    "t": np.array(0.0, np.float32),
    "d": np.zeros(2, np.float64),
    "h": np.zeros(1, np.float16),
    "bn.running_var": np.ones(1, np.float32),
    "bn.num_batches_tracked": np.array(7, np.int64),
}
QUIET = 1e-9


def answer(
    mod: LocalPrivacyMod,
    arrays: dict[str, np.ndarray],
    metrics: dict[str, float] | None = None,
    *,
    kind: str = "train",
    server_round: int = 1,
    partition: int = 3,
    sent: dict[str, np.ndarray] = SENT,
    **others: ConfigRecord | MetricRecord | ArrayRecord,
) -> Message:
    config = ConfigRecord({"server-round": server_round})
    message = Message(RecordDict({"arrays": record(**sent), "config": config}), 5, kind)
    node = {"partition-id": partition}
    context = Context(run_id=1, node_id=5, node_config=node, state=RecordDict(), run_config={})

    def train(message: Message, context: Context) -> Message:
        told = MetricRecord(metrics or {"num-examples": 600, "train-loss": 0.5})
        content = RecordDict({"model": record(**arrays), "told": told, **others})
        return Message(content, reply_to=message)

    return mod(message, context, train)


def floats(reply: Message) -> np.ndarray:
    values = [array.numpy().astype(np.float64).ravel() for array in reply.content["model"].values()]
    return np.concatenate(values)


def changed(**arrays: np.ndarray) -> dict[str, np.ndarray]:
    return {**SENT, **arrays}


def test_a_scalar_moved_by_100_leaves_the_client_as_1() -> None:
    # Trap: Flower's mods upload exactly 100.
    reply = answer(LocalPrivacyMod(clip=1.0, noise_multiplier=QUIET), changed(t=np.array(100.0, np.float32)))
    assert reply.content["model"]["t"].numpy() == pytest.approx(1.0)
    assert reply.content["model"]["t"].numpy().shape == ()


def test_all_floating_arrays_are_one_vector_and_integers_are_what_was_sent() -> None:
    update = changed(
        **{
            "w": np.array([3, 0, 0], np.float32),
            "t": np.array(4.0, np.float32),
            "d": np.array([0, 12.0]),
            "h": np.array([84.0], np.float16),
            "bn.num_batches_tracked": np.array(100, np.int64),
        }
    )
    reply = answer(LocalPrivacyMod(clip=8.5, noise_multiplier=QUIET), update)
    out = {name: array.numpy() for name, array in reply.content["model"].items()}
    assert out["w"].tolist() == pytest.approx([0.3, 0, 0], abs=1e-6)  # ‖(3, 4, 12, 84)‖ = 85
    assert out["t"] == pytest.approx(0.4)
    assert out["d"].tolist() == pytest.approx([0, 1.2], abs=1e-6)
    assert out["h"].tolist() == pytest.approx([8.4], rel=1e-3)
    assert out["bn.running_var"].tolist() == [1]
    assert out["bn.num_batches_tracked"] == 7
    assert {name: a.dtype for name, a in out.items()} == {name: a.dtype for name, a in SENT.items()}


def test_every_floating_element_gets_noise_of_the_stated_deviation() -> None:
    sent = {"w": np.zeros(4000, np.float32), "t": np.array(0.0, np.float32), "b.running_mean": np.zeros(4000)}
    mod = LocalPrivacyMod(clip=2.0, noise_multiplier=1.5, seed=1)
    replies = [floats(answer(mod, sent, sent=sent, server_round=n)) for n in range(50)]
    noise = np.stack(replies)
    assert noise.std() == pytest.approx(3.0, rel=0.01)
    assert abs(noise.mean()) < 0.02
    scalar = noise[:, 4000]
    assert len(set(scalar.tolist())) == 50
    assert 2.2 < scalar.std() < 4
    assert stats.kstest(noise.ravel() / 3.0, "norm").pvalue > 0.01


def test_a_zero_update_is_noise_alone_and_so_is_one_that_is_not_finite() -> None:
    # Trap: a zero update divides by zero in Flower's mods; NaN would tell that the training diverged.
    mod = LocalPrivacyMod(clip=1.0, noise_multiplier=1.0, seed=4)
    nothing = floats(answer(mod, SENT))
    broken = floats(answer(mod, changed(w=np.array([np.nan, 5, 5], np.float32))))
    assert np.isfinite(nothing).all()
    assert np.array_equal(nothing, broken)


def test_counts_and_metrics_do_not_leave_the_client_unless_released() -> None:
    mod = LocalPrivacyMod(clip=1.0, noise_multiplier=1.0)
    reply = answer(mod, SENT, extra=ConfigRecord({"note": "secret"}), more=MetricRecord({"a": 1.0}))
    assert {name: dict(r) for name, r in reply.content.items() if name != "model"} == {
        "told": {"num-examples": 1}
    }
    mod = LocalPrivacyMod(clip=1.0, noise_multiplier=1.0, release_metrics=True)
    reply = answer(mod, SENT, extra=ConfigRecord({"note": "told"}), more=MetricRecord({"num-examples": 9}))
    assert {name: dict(r) for name, r in reply.content.items() if name != "model"} == {
        "told": {"num-examples": 1, "train-loss": 0.5},
        "extra": {"note": "told"},
        "more": {},
    }


def test_a_reply_in_another_order_is_matched_by_name() -> None:
    mod = LocalPrivacyMod(clip=10.0, noise_multiplier=QUIET)
    turned = dict(reversed(list(changed(w=np.array([1, 2, 3], np.float32)).items())))
    reply = answer(mod, turned)
    assert list(reply.content["model"]) == list(SENT)
    assert reply.content["model"]["w"].numpy().tolist() == pytest.approx([1, 2, 3])


def test_noise_is_secret_by_default_and_a_seed_repeats_it_per_client_and_round() -> None:
    secret, known = (LocalPrivacyMod(clip=1.0, noise_multiplier=1.0, seed=seed) for seed in (None, 8))
    assert not np.array_equal(floats(answer(secret, SENT)), floats(answer(secret, SENT)))
    assert np.array_equal(floats(answer(known, SENT)), floats(answer(known, SENT)))
    assert not np.array_equal(floats(answer(known, SENT)), floats(answer(known, SENT, server_round=2)))
    assert not np.array_equal(floats(answer(known, SENT)), floats(answer(known, SENT, partition=4)))


def test_errors_and_other_messages_pass_untouched() -> None:
    mod = LocalPrivacyMod(clip=1.0, noise_multiplier=1.0)
    reply = answer(mod, changed(t=np.array(100.0, np.float32)), kind="evaluate")
    assert reply.content["model"]["t"].numpy() == 100
    assert reply.content["told"]["num-examples"] == 600
    message = Message(RecordDict({"arrays": record(**SENT)}), 5, "train")
    context = Context(run_id=1, node_id=5, node_config={}, state=RecordDict(), run_config={})
    failed = mod(message, context, lambda m, c: Message(Error(2, "boom"), reply_to=m))
    assert failed.error.reason == "boom"


def test_a_node_without_a_partition_draws_by_its_id() -> None:
    mod = LocalPrivacyMod(clip=1.0, noise_multiplier=1.0, seed=1)

    def reply(node: int) -> np.ndarray:
        message = Message(RecordDict({"arrays": record(w=np.zeros(2, np.float32))}), node, "train")
        context = Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
        content = RecordDict({"model": record(w=np.zeros(2, np.float32))})
        answer = mod(message, context, lambda m, c: Message(content, reply_to=m))
        assert dict(answer.content["metrics"]) == {"num-examples": 1}
        return floats(answer)

    assert not np.array_equal(reply(2**64 - 1), reply(7))
    assert np.array_equal(reply(7), reply(7))


def test_arrays_that_do_not_fit_never_leave_the_client() -> None:
    mod = LocalPrivacyMod(clip=1.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="shape"):
        answer(mod, changed(w=np.zeros(4, np.float32)))
    with pytest.raises(ValueError, match="missing"):
        answer(mod, {"w": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="one record of arrays in the reply, found 2"):
        answer(mod, SENT, second=ArrayRecord({"x": Array(np.zeros(1))}))


def test_the_message_and_what_the_client_trained_are_not_changed() -> None:
    mod = LocalPrivacyMod(clip=1.0, noise_multiplier=1.0)
    message = Message(RecordDict({"arrays": record(**SENT)}), 5, "train")
    context = Context(run_id=1, node_id=5, node_config={}, state=RecordDict(), run_config={})
    content = RecordDict({"model": record(**changed(w=np.full(3, 9, np.float32)))})
    before = [a.data for a in (*message.content["arrays"].values(), *content["model"].values())]
    mod(message, context, lambda m, c: Message(content, reply_to=m))
    assert [a.data for a in (*message.content["arrays"].values(), *content["model"].values())] == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip": 0.0, "noise_multiplier": 1.0}, "clip must be above 0"),
        ({"clip": 1.0, "noise_multiplier": 0.0}, "noise_multiplier must be above 0"),
        ({"clip": float("nan"), "noise_multiplier": 1.0}, "clip must be above 0"),
        ({"clip": 1.0, "noise_multiplier": float("inf")}, "noise_multiplier must be above 0"),
    ],
)
def test_settings_that_protect_nothing_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        LocalPrivacyMod(**settings)
