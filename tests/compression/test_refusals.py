from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedplat.arrays import FlatArrays
from fedplat.clients.mods.compression import CompressionMod
from fedplat.compression import (
    QSGD,
    CompressionGrid,
    TopK,
    Uncompressed,
    wire_bytes,
)
from fedplat.compression.envelope import ENCODED, ENCODING
from fedplat.rounds import rounds
from fedplat.runtime.local import LocalGrid
from fedplat.security.validation import is_refusal
from fedplat.strategies.baselines import Mean

from ..flower_apps import record
from .apps import (
    COMPRESSORS,
    FLOATS,
    PARTS,
    Tampering,
    app_of,
    ask,
    asked,
    memories,
    named,
)

# What cannot be compressed, and what was never asked for ---------------------------------------------------


def overflowing(named: dict, partition: int, server_round: int) -> dict:
    bad = {0: np.nan, 1: np.inf}.get(partition, 0.0)
    return {**named, "layer.bias": np.full(7, bad, np.float32)} if partition < 2 else named


@pytest.mark.parametrize("name", ["fp16", "top-k", "qsgd"])
def test_models_that_are_not_finite_are_sent_as_they_are_and_refused_as_ever(name: str) -> None:
    compressor = COMPRESSORS[name]
    with LocalGrid(app_of(CompressionMod(compressor), change=overflowing), 4, workers=1) as engine:
        strategy = Mean(fraction_evaluate=0.0)
        grid = CompressionGrid(engine, compressor)
        for _ in rounds(strategy, grid, record(**PARTS), 1):
            pass
        assert grid.sent_bytes[1000] == 4 * FLOATS + 5 * 4 + 8 > grid.sent_bytes[1002]
        assert name != "top-k" or sorted(n for n, m in memories(engine).items() if m) == [1002, 1003]
    assert [r.status for r in strategy.reports] == ["refused", "refused", "accepted", "accepted"]


def test_updates_too_large_for_the_compressor_are_sent_as_they_are() -> None:
    def huge(named: dict, partition: int, server_round: int) -> dict:
        return {**named, "layer.bias": np.full(7, 3e38, np.float32)}

    compressor = QSGD(norm="l2")
    with LocalGrid(app_of(CompressionMod(compressor), change=huge), 1, workers=0) as engine:
        (reply,) = ask(CompressionGrid(engine, compressor))
    np.testing.assert_array_equal(named(reply)["layer.bias"], np.full(7, 3e38, np.float32))
    assert wire_bytes(reply) == 4 * FLOATS + 5 * 4 + 8


def test_replies_with_other_arrays_and_errors_pass_untouched() -> None:
    def otherwise(named: dict, partition: int, server_round: int) -> dict:
        if partition == 0:
            raise ValueError("no luck")
        return {"other": np.ones(3, np.float32)} if partition == 1 else named

    compressor = TopK()
    with LocalGrid(app_of(CompressionMod(compressor), change=otherwise), 3, workers=0) as engine:
        replies = ask(CompressionGrid(engine, compressor))
    assert replies[0].has_error()
    assert "no luck" in replies[0].error.reason
    assert wire_bytes(replies[0]) == 0
    assert list(named(replies[1])) == ["other"]
    assert wire_bytes(replies[1]) == 12
    assert wire_bytes(replies[2]) == 4 + 2 + 5 * 4 + 8


def lying(array: Array, **fields: Any) -> Array:
    found = Array(array.numpy())
    found.__dict__.update(fields)
    return found


def arrays_changed(**changes: Callable[[Array], Any]) -> Callable[[RecordDict], None]:
    def change(content: RecordDict) -> None:
        arrays = {name: Array(array.numpy()) for name, array in content[ENCODED].items()}
        arrays |= {name: f(arrays.get(name, Array(np.zeros(1)))) for name, f in changes.items()}
        content[ENCODED] = ArrayRecord(arrays)

    return change


HUGE = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999,), }".ljust(
    128
)
HOSTILE: dict[str, Callable[[RecordDict], Any]] = {
    "fewer values": arrays_changed(values=lambda a: Array(a.numpy()[:-1])),
    "no number": arrays_changed(values=lambda a: Array(np.full(7, np.nan, np.float32))),
    "another type": arrays_changed(values=lambda a: Array(a.numpy().astype(np.float64))),
    "a matrix": arrays_changed(values=lambda a: Array(a.numpy()[None])),
    "one more array": arrays_changed(more=lambda a: a),
    "arrays without end": arrays_changed(**{f"a{i}": lambda a: a for i in range(50)}),
    "a mask of ones": arrays_changed(mask=lambda a: Array(np.full(9, 255, np.uint8))),
    "no array at all": arrays_changed(values=lambda a: lying(a, data=b"")),
    "a pickle": arrays_changed(values=lambda a: lying(a, data=b"\x80\x04.", stype="pickle")),
    "an array of objects": arrays_changed(values=lambda a: lying(a, data=a.data.replace(b"<f4", b"|O "))),
    "a size that is a lie": arrays_changed(values=lambda a: lying(a, data=HUGE, shape=(999999999999,))),
    "a type that is none": arrays_changed(values=lambda a: lying(a, dtype="no such type", data=b"x")),
    "buffers of another length": arrays_changed(buffers=lambda a: Array(np.zeros(4, np.float32))),
    "bytes of another length": arrays_changed(side=lambda a: Array(np.zeros(800, np.uint8))),
    "no arrays": lambda content: content.pop(ENCODED) and None,
    "no word on how": lambda content: content.pop(ENCODING) and None,
    "settings for arrays": lambda content: content.update({ENCODED: ConfigRecord({"a": 1})}),
    "another compressor": lambda content: content.update(
        {ENCODING: ConfigRecord({"kind": "top-k fraction=1.0", "record": "arrays"})}
    ),
    "a name that is taken": lambda content: content.update(
        {ENCODING: ConfigRecord({"kind": COMPRESSORS["top-k"].describe(), "record": "metrics"})}
    ),
    "a name that is none": lambda content: content.update(
        {ENCODING: ConfigRecord({"kind": COMPRESSORS["top-k"].describe(), "record": 3})}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_arrays_that_no_compressor_made_are_refused_and_the_others_go_on(name: str) -> None:
    compressor = COMPRESSORS["top-k"]
    with LocalGrid(app_of(CompressionMod(compressor)), 3, workers=0) as engine:
        strategy = Mean(fraction_evaluate=0.0)
        grid = CompressionGrid(Tampering(engine, {1001: HOSTILE[name]}), compressor)
        (current,) = rounds(strategy, grid, record(**PARTS), 1)
    refused = {r.node_id: r.reason for r in strategy.reports if r.status != "accepted"}
    assert list(refused) == [1001]
    assert refused[1001].startswith("the compressed model is refused: ")
    assert [r.status for r in strategy.reports].count("refused") == 1
    assert np.isfinite(FlatArrays.of_record(current.arrays).vector).all()


def test_a_compressed_reply_nobody_asked_for_is_refused() -> None:
    compressor = COMPRESSORS["top-k"]
    with LocalGrid(app_of(CompressionMod(compressor)), 2, workers=0) as engine:
        replies = ask(CompressionGrid(engine, Uncompressed()))
        assert all(map(is_refusal, replies))
        grid = CompressionGrid(engine, compressor)
        # Sent past the grid, whose references it is therefore not among.
        ids = engine.push_messages(asked(engine))
        pulled: list[Message] = []
        while len(pulled) < 2:
            pulled += grid.pull_messages(ids)
        assert all(map(is_refusal, pulled))
