from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedplat.arrays import FlatArrays, payload_bytes
from fedplat.clients.mods.compression import CompressionMod
from fedplat.clients.mods.signing import SigningMod
from fedplat.compat import make_message, records_to_bytes
from fedplat.compression import (
    QSGD,
    CompressionGrid,
    Compressor,
    HalfPrecision,
    Sparse,
    TopK,
    Uncompressed,
    wire_bytes,
)
from fedplat.compression.envelope import ENCODED, reference_of
from fedplat.rounds import rounds
from fedplat.runtime.local import LocalGrid
from fedplat.runtime.waves import engine_for
from fedplat.security.signatures import simulation_keys
from fedplat.security.validation import refusal
from fedplat.strategies.baselines import Mean
from fedplat.strategies.signed_updates import SignedUpdates

from ..flower_apps import record
from .apps import (
    COMPRESSORS,
    FLOATS,
    OTHER_FLOATS,
    PARTS,
    Tampering,
    app_of,
    ask,
    asked,
    memories,
    named,
    sent_updates,
    trained,
    update,
)

# There and back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_reply_comes_back_as_a_plain_one_and_its_bytes_are_told(name: str, workers: int) -> None:
    compressor = COMPRESSORS[name]
    with LocalGrid(app_of(CompressionMod(compressor)), 3, workers=workers) as engine:
        grid = CompressionGrid(engine, compressor)
        replies = ask(grid)
        layout = reference_of(record(**PARTS), compressor).layout
    assert [reply.metadata.src_node_id for reply in replies] == engine.get_node_ids()
    for partition, reply in enumerate(replies):
        assert set(reply.content) == {"arrays", "metrics"}
        assert reply.content["metrics"]["num-examples"] == 10 + partition
        found = named(reply)
        assert {n: (a.dtype, a.shape) for n, a in found.items()} == {
            n: (np.asarray(a).dtype, np.shape(a)) for n, a in PARTS.items()
        }
        # Buffers and integers travel as they are.
        for key in ("bn.running_mean", "bn.num_batches_tracked"):
            np.testing.assert_array_equal(
                found[key], trained(np.asarray(PARTS[key]), partition, 1, key), strict=True
            )
        told = compressor.encoded_bytes(layout)
        # 68 parameters, 5 numbers of a buffer and a whole number of 8 bytes.
        assert told is None or wire_bytes(reply) == told
        assert name != "top-k" or told == 7 * 4 + 9 + 5 * 4 + 8
        assert grid.sent_bytes[reply.metadata.src_node_id] == wire_bytes(reply)
        assert payload_bytes(reply.content["arrays"]) == 4 * FLOATS + 5 * 4 + 8
    blocks = {id(FlatArrays.behind(reply.content["arrays"]).block) for reply in replies}
    assert len(blocks) == 1


@pytest.mark.parametrize("name", COMPRESSORS)
def test_models_with_floats_of_other_widths_travel_too(name: str) -> None:
    compressor, start = COMPRESSORS[name], {**PARTS, **OTHER_FLOATS}
    with LocalGrid(app_of(CompressionMod(compressor)), 1, workers=0) as engine:
        (reply,) = ask(CompressionGrid(engine, compressor), arrays=start)
    found = named(reply)
    for key, value in start.items():
        assert (found[key].dtype, found[key].shape) == (np.asarray(value).dtype, np.shape(value))
        expected = trained(np.asarray(value), 0, 1, key)
        if compressor.of_model:
            np.testing.assert_array_equal(found[key], expected)
        elif name in ("fp16", "bf16"):
            np.testing.assert_allclose(found[key], expected, atol=2e-3)


def test_what_arrives_is_what_a_plain_loop_over_numpy_arrays_gives() -> None:
    memory, corrected = np.zeros(FLOATS, np.float32), np.zeros(0)
    with LocalGrid(app_of(CompressionMod(TopK(fraction=0.1))), 1, workers=0) as engine:
        grid = CompressionGrid(engine, TopK(fraction=0.1))
        start = np.concatenate([PARTS[n].ravel() for n in ("layer.weight", "layer.bias", "scale")])
        for number in (1, 2, 3):
            (reply,) = ask(grid, number)
            corrected = update(number, 0) + memory
            order = np.lexsort((np.arange(FLOATS), -np.abs(corrected)))[:7]
            sent = np.zeros(FLOATS, np.float32)
            sent[order] = corrected[order]
            memory = corrected - sent
            found = named(reply)
            np.testing.assert_array_equal(
                np.concatenate([found[n].ravel() for n in ("layer.weight", "layer.bias", "scale")]),
                start + sent,
            )


@pytest.mark.parametrize("name", ["top-k", "qsgd", "fp16"])
def test_neither_workers_nor_the_order_of_clients_matter(name: str) -> None:
    compressor, results = COMPRESSORS[name], []
    for workers, turned in ((0, False), (2, False), (0, True)):
        with LocalGrid(app_of(CompressionMod(compressor, 3)), 4, workers=workers) as engine:
            grid = CompressionGrid(engine, compressor)
            for number in (1, 2):
                messages = asked(grid, number)
                replies = list(grid.send_and_receive(messages[::-1] if turned else messages))
            results.append(
                {r.metadata.src_node_id: FlatArrays.behind(r.content["arrays"]).vector for r in replies}
            )
    for other in results[1:]:
        assert all(np.array_equal(results[0][node], other[node]) for node in results[0])


def test_with_everything_sent_the_model_is_that_of_a_run_without_but_for_a_rounding() -> None:
    models = []
    for compressor in (Uncompressed(), TopK(fraction=1.0), Sparse()):
        with LocalGrid(app_of(CompressionMod(compressor)), 3, workers=0) as engine:
            grid = CompressionGrid(engine, compressor)
            *_, last = rounds(Mean(fraction_evaluate=0.0), grid, record(**PARTS), 3)
        models.append(FlatArrays.of_record(last.arrays).vector)
    plain, top_k, sparse = models
    np.testing.assert_array_equal(sparse, plain)
    np.testing.assert_allclose(top_k, plain, rtol=0, atol=8 * np.finfo(np.float32).eps)


def test_pushed_messages_are_answered_uncompressed_too() -> None:
    compressor = COMPRESSORS["qsgd"]
    with LocalGrid(app_of(CompressionMod(compressor)), 3, workers=1) as engine:
        grid = CompressionGrid(engine, compressor)
        together = {r.metadata.src_node_id: named(r) for r in ask(grid)}
        ids, pulled = list(grid.push_messages(asked(grid))), []
        while len(pulled) < 3:
            pulled += grid.pull_messages(ids)
        assert not grid._pushed
        assert grid.sent_bytes == {r.metadata.src_node_id: wire_bytes(r) for r in pulled}
    for reply in pulled:
        for key, value in named(reply).items():
            np.testing.assert_array_equal(value, together[reply.metadata.src_node_id][key])


# Around strategies, under signatures -----------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPRESSORS)
def test_flowers_own_fedavg_runs_around_it(name: str) -> None:
    compressor = COMPRESSORS[name]
    with LocalGrid(app_of(CompressionMod(compressor)), 3, workers=1) as engine:
        result = FedAvg(fraction_evaluate=1.0).start(
            CompressionGrid(engine, compressor), record(**PARTS), num_rounds=2
        )
    assert result.train_metrics_clientapp[2]["loss"] == pytest.approx(0.5)
    moved = result.arrays["layer.weight"].numpy() - PARTS["layer.weight"]
    assert 0.01 < np.abs(moved).max() < 1


@pytest.mark.parametrize(
    ("name", "start"),
    [(name, PARTS) for name in COMPRESSORS] + [(name, {**PARTS, **OTHER_FLOATS}) for name in COMPRESSORS],
)
def test_signatures_made_within_hold_for_the_model_that_is_aggregated(name: str, start: dict) -> None:
    compressor = COMPRESSORS[name]
    mod = CompressionMod(compressor, within=[SigningMod.for_simulation(1)])
    with LocalGrid(app_of(mod), 4, workers=2) as engine:
        strategy = SignedUpdates(Mean(fraction_evaluate=0.0), simulation_keys(1, 4))
        grid = CompressionGrid(engine, compressor)
        for current in rounds(strategy, grid, record(**start), 2):
            assert not current.failures
            assert [r.status for r in strategy.reports] == ["accepted"] * 4


def test_a_compressed_model_changed_on_its_way_breaks_the_signature() -> None:
    compressor = HalfPrecision()
    mod = CompressionMod(compressor, within=[SigningMod.for_simulation(1)])
    with LocalGrid(app_of(mod), 3, workers=0) as engine:
        strategy = SignedUpdates(Mean(fraction_evaluate=0.0), simulation_keys(1, 3))

        def louder(content: RecordDict) -> None:
            values = content[ENCODED]["values"].numpy()
            content[ENCODED] = record(
                **{**{n: a.numpy() for n, a in content[ENCODED].items()}, "values": values * np.float16(2)}
            )

        grid = CompressionGrid(Tampering(engine, {1001: louder}), compressor)
        for _ in rounds(strategy, grid, record(**PARTS), 1):
            pass
    assert {r.node_id: r.reason for r in strategy.reports if r.status == "refused"} == {
        1001: "the arrays are not those that were signed"
    }


def test_a_mod_within_that_changes_the_model_has_it_sent_as_it_left_it() -> None:
    def doubling(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        if "arrays" in reply.content:
            doubled = {n: np.asarray(2 * a.numpy()) for n, a in reply.content["arrays"].items()}
            reply.content["arrays"] = record(**doubled)
        return reply

    with LocalGrid(app_of(CompressionMod(Sparse(), within=[doubling])), 1, workers=0) as engine:
        (reply,) = ask(CompressionGrid(engine, Sparse()))
    np.testing.assert_array_equal(
        named(reply)["layer.bias"], 2 * trained(PARTS["layer.bias"], 0, 1, "layer.bias")
    )


# Error feedback --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compressor",
    [
        TopK(fraction=0.05),
        TopK(fraction=0.3, values="float16", per_layer=True),
        QSGD(levels=1, bucket=20, error_feedback=True),
    ],
    ids=lambda c: c.describe(),
)
def test_all_that_is_sent_and_what_is_remembered_add_up_to_all_updates(compressor: Compressor) -> None:
    zero = {name: np.zeros_like(value) for name, value in PARTS.items()}
    total, sent = np.zeros(FLOATS), np.zeros(FLOATS)
    with LocalGrid(app_of(CompressionMod(compressor)), 1, workers=0) as engine:
        grid = CompressionGrid(engine, compressor)
        for number in range(1, 8):
            (reply,) = ask(grid, number, zero)
            sent += sent_updates(reply, zero)
            total += update(number, 0, zero)
        (memory,) = memories(engine)[1000].values()
    np.testing.assert_allclose(sent + memory, total, atol=1e-6)
    assert np.abs(memory).max() > 0.01


def test_what_is_remembered_goes_on_after_a_resume() -> None:
    compressor, runs = TopK(fraction=0.05), []
    for stop in (None, 2):
        with LocalGrid(app_of(CompressionMod(compressor)), 2, workers=1) as engine:
            for number in (1, 2) if stop else (1, 2, 3):
                last = ask(CompressionGrid(engine, compressor), number)
            states = engine.node_states()
        if stop:
            with LocalGrid(app_of(CompressionMod(compressor)), 2, workers=1) as engine:
                engine.load_node_states(states)
                last = ask(CompressionGrid(engine, compressor), 3)
        runs.append([FlatArrays.behind(reply.content["arrays"]).vector for reply in last])
    for whole, resumed in zip(*runs, strict=True):
        np.testing.assert_array_equal(whole, resumed)


def test_what_is_remembered_outlasts_integers_that_a_strategy_turns_into_floats() -> None:
    """Flower's own strategies do so, after which they are parameters."""
    as_float = {**PARTS, "bn.num_batches_tracked": np.float64(3)}
    vectors = []
    for second in (PARTS, as_float):
        with LocalGrid(app_of(CompressionMod(TopK(fraction=0.05))), 1, workers=0) as engine:
            grid = CompressionGrid(engine, TopK(fraction=0.05))
            ask(grid, 1)
            ask(grid, 2, second)
            (memory,) = memories(engine)[1000].values()
        vectors.append(memory[:FLOATS])
    assert (vectors[0] != vectors[1]).mean() < 0.1  # no other than those that were sent in one case only
    assert np.linalg.norm(vectors[0]) > 0


def test_every_strategy_and_arrays_of_another_size_begin_with_nothing_remembered() -> None:
    compressor, tail = TopK(fraction=0.05), {"layer.weight": PARTS["layer.weight"][:3]}
    with LocalGrid(app_of(CompressionMod(compressor)), 1, workers=0) as engine:
        grid = CompressionGrid(engine, compressor)
        (first,) = ask(grid, 1, strategy="mean")
        ask(grid, 2, strategy="mean")
        (other,) = ask(grid, 1, strategy="krum")
        assert list(memories(engine)[1000]) == ["fedplat.compressionkrum"]
        (small,) = ask(grid, 1, tail, strategy="krum")
        (again,) = ask(grid, 1, strategy="krum")
    assert len(named(small)) == 1
    for reply in (other, again):
        np.testing.assert_array_equal(named(reply)["layer.weight"], named(first)["layer.weight"])


# Bytes -----------------------------------------------------------------------------------------------------


def test_bytes_stay_known_when_a_message_is_made_anew_and_are_forgotten_with_it() -> None:
    from fedplat.compression import wire as module

    compressor = COMPRESSORS["top-k"]
    with LocalGrid(app_of(CompressionMod(compressor)), 1, workers=0) as engine:
        (question,) = asked(engine)
        assert wire_bytes(question) == 4 * FLOATS + 5 * 4 + 8
        (reply,) = CompressionGrid(engine, compressor).send_and_receive([question])
    size = wire_bytes(reply)
    assert size == 7 * 4 + 9 + 5 * 4 + 8
    assert wire_bytes(make_message(reply.metadata, reply.content)) == size
    assert wire_bytes(refusal(reply, "not liked")) == size
    metadata = copy.copy(reply.metadata)
    assert wire_bytes(make_message(metadata, reply.content)) == payload_bytes(reply.content["arrays"])
    key = id(reply.metadata)
    assert key in module._noted
    del reply
    assert key not in module._noted


def test_bytes_told_are_within_a_few_names_of_those_in_flowers_wire_format() -> None:
    """Flower adds names and headers: below 200 bytes per array."""
    seen: list[int] = []

    def note(content: RecordDict) -> None:
        seen.append(len(records_to_bytes(RecordDict({ENCODED: content[ENCODED]}))))

    big = {"w": np.zeros(50_000, np.float32)}
    for name in ("fp16", "top-k", "qsgd"):
        compressor = COMPRESSORS[name]
        with LocalGrid(app_of(CompressionMod(compressor)), 1, workers=0) as engine:
            (reply,) = ask(CompressionGrid(Tampering(engine, {1000: note}), compressor), arrays=big)
        assert 0 < seen[-1] - wire_bytes(reply) < 2 * 200 + 100


def test_rounds_never_stream_through_it() -> None:
    with LocalGrid(app_of(), 1, workers=0) as engine:
        messages = asked(engine)
        assert engine_for(engine, messages) is engine
        assert engine_for(CompressionGrid(engine, TopK()), messages) is None
