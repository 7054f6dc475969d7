from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedplat.arrays import FlatArrays
from fedplat.clients.mods.memory_cap import MEMORY_KEY, MemoryCapMod, memory_cap
from fedplat.clients.training import train_one
from fedplat.emulation import enforce
from fedplat.emulation.enforce import (
    OVERHEAD_BYTES,
    OutOfMemory,
    least_cap,
    process_overhead_bytes,
    run_capped,
)
from fedplat.emulation.enforce_heap import data_bytes
from fedplat.emulation.memory import training_memory
from fedplat.errors import UserError
from fedplat.models.cnn import fedavg_cnn
from fedplat.models.dense import mlp
from fedplat.models.flat import FlatModel
from fedplat.models.lstm import char_lstm
from fedplat.rng import generator
from fedplat.runtime.local import LocalGrid
from fedplat.training_config import LocalTraining

from ..flower_apps import plain_app, record

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits need Linux")

MB = 1 << 20


def held(size: int) -> Callable[[], object]:
    return lambda: torch.zeros(size, dtype=torch.uint8)


def fits(work: Callable[[], object], cap: int, overhead: int = OVERHEAD_BYTES) -> bool:
    try:
        run_capped(work, lambda result: b"", cap, overhead=overhead)
    except OutOfMemory:
        return False
    return True


# The process ------------------------------------------------------------------------------------------------


def test_what_fits_is_done_and_what_does_not_is_out_of_memory() -> None:
    assert fits(held(40 * MB), 50 * MB, 0)
    assert not fits(held(60 * MB), 50 * MB, 0)
    assert fits(held(55 * MB), 50 * MB, 10 * MB)


def test_only_the_peak_counts_and_not_the_sum() -> None:
    def work() -> None:
        for _ in range(10):
            torch.zeros(20 * MB, dtype=torch.uint8)

    assert fits(work, 25 * MB, 0)


@pytest.mark.parametrize("size", [1 * MB, 6 * MB])
def test_memory_freed_before_cannot_be_had_for_free(size: int) -> None:
    # In blocks with used ones in between: trimming alone leaves such holes to be filled again. They are of
    # the heap where freed memory is kept, as the workers do it.
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, 1 << 30)
    try:
        blocks = [torch.ones(size, dtype=torch.uint8) for _ in range(20)]
    finally:
        libc.mallopt(-3, 128 << 10)
    kept = blocks[::2]
    del blocks
    assert not fits(lambda: [torch.ones(size, dtype=torch.uint8) for _ in range(10)], 5 * size, 0)
    assert len(kept) == 10


def test_what_prepare_frees_is_not_there_for_free() -> None:
    models = [torch.ones(30 * MB, dtype=torch.uint8)]
    run_capped(held(25 * MB), lambda result: b"", 30 * MB, overhead=0, prepare=models.clear)
    with pytest.raises(OutOfMemory):
        run_capped(held(25 * MB), lambda result: b"", 20 * MB, overhead=0, prepare=models.clear)
    assert len(models) == 1  # it was cleared in the fork only


def test_packing_is_not_limited() -> None:
    data = run_capped(lambda: 7, lambda number: bytes([number]) * (40 * MB), 10 * MB, overhead=0)
    assert data == b"\7" * (40 * MB)


def test_this_process_stays_as_it_was() -> None:
    before = data_bytes()
    threads = torch.get_num_threads()
    environment = dict(os.environ)
    assert not fits(held(60 * MB), 40 * MB)
    assert data_bytes() - before < 30 * MB
    assert (torch.get_num_threads(), dict(os.environ)) == (threads, environment)
    held(60 * MB)()  # without a limit


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no luck"),
        KeyError("x", 3),
        UserError("wrong"),
        SystemExit(3),
        KeyboardInterrupt(),
        OSError(2, "missing"),
    ],
)
def test_what_is_raised_there_is_raised_here(error: BaseException) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        run_capped(work, lambda result: b"", 10 * MB)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    assert "test_enforce.py" in caught.value.__notes__[0]


class OwnError(Exception):
    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}")


def test_an_exception_that_cannot_be_made_again_keeps_its_name_and_text() -> None:
    def work() -> None:
        raise OwnError(3)

    with pytest.raises(RuntimeError) as caught:
        run_capped(work, lambda result: b"", 10 * MB)
    assert str(caught.value) == "number 3"
    assert type(caught.value).__name__ == "OwnError"


@pytest.mark.parametrize("refused", [MemoryError(), MemoryError("Unable to allocate")])
def test_a_memory_error_is_out_of_memory(refused: Exception) -> None:
    def work() -> None:
        raise refused

    with pytest.raises(OutOfMemory, match="MemoryError"):
        run_capped(work, lambda result: b"", 10 * MB)


def test_numpy_and_python_are_limited_as_torch_is() -> None:
    assert not fits(lambda: np.ones(60 * MB, np.uint8), 40 * MB)
    assert not fits(lambda: b"a" * (60 * MB), 40 * MB)
    assert not fits(lambda: [object() for _ in range(4 * MB)], 40 * MB)


def test_a_process_that_is_killed_has_run_out_of_memory() -> None:
    # So the kernel does when the machine, or a container, has no more.
    with pytest.raises(OutOfMemory, match="killed"):
        run_capped(lambda: os.kill(os.getpid(), signal.SIGKILL), lambda result: b"", 10 * MB)


def test_an_abort_for_want_of_memory_is_out_of_memory_and_another_is_not() -> None:
    def abort(text: bytes) -> None:
        faulthandler.disable()
        os.write(2, text)
        os.abort()

    with pytest.raises(OutOfMemory, match="bad_alloc"):
        run_capped(lambda: abort(b"terminate called: 'std::bad_alloc'\n"), lambda result: b"", 10 * MB)
    with pytest.raises(RuntimeError, match="SIGABRT: assertion failed"):
        run_capped(lambda: abort(b"assertion failed\n"), lambda result: b"", 10 * MB)


def test_a_process_that_ends_itself_is_told() -> None:
    with pytest.raises(RuntimeError, match="status 3"):
        run_capped(lambda: os._exit(3), lambda result: b"", 10 * MB)


def children() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # After the name, which may have spaces, come the state and the parent.
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(path.parent.name)
    return found


def test_no_child_and_no_file_is_left() -> None:
    files, before = len(os.listdir("/proc/self/fd")), children()
    for work in (lambda: 1, held(60 * MB), lambda: os._exit(3), lambda: os.kill(os.getpid(), 9)):
        with contextlib.suppress(OutOfMemory, RuntimeError):
            run_capped(work, lambda result: b"", 20 * MB)
    assert len(os.listdir("/proc/self/fd")) == files
    assert children() <= before


def test_an_interrupted_call_leaves_no_child() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, interrupt)
    others = children()
    try:
        enforce.warm_up()
        # Again after a while: what a handler raises is lost if it comes while an object is finalised.
        signal.setitimer(signal.ITIMER_REAL, 0.3, 10)
        with pytest.raises(TimeoutError):
            run_capped(lambda: time.sleep(60), lambda result: b"", 10 * MB)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert children() <= others


def test_where_nothing_can_be_limited_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enforce, "why_no_workers", lambda: "this system cannot fork")
    with pytest.raises(UserError, match="cannot be enforced here: this system cannot fork"):
        run_capped(lambda: 1, lambda result: b"", 10 * MB)
    with pytest.raises(UserError, match="0 or more"):
        run_capped(lambda: 1, lambda result: b"", -1)


@pytest.mark.slow
def test_bisection_finds_what_was_allocated() -> None:
    # In a process of its own: what another one has free in small pieces would come on top of the cap.
    script = (
        "import torch\nfrom fedplat.emulation.enforce import least_cap\n"
        "print(least_cap(lambda: torch.zeros(20 << 20, dtype=torch.uint8), 0, 64 << 20, 1 << 18))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert 20 * MB <= int(done.stdout) <= 21 * MB
    with pytest.raises(OutOfMemory):
        least_cap(held(20 * MB), 0, 10 * MB)


@pytest.mark.slow
def test_the_overhead_given_is_more_than_the_overhead_measured() -> None:
    assert 0 < process_overhead_bytes() < OVERHEAD_BYTES


# The models -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape", "batch"),
    [
        (lambda: mlp((1, 28, 28), 10, hidden=(4000, 1000)), (1, 28, 28), 32),
        (lambda: fedavg_cnn((1, 28, 28), 10), (1, 28, 28), 128),
        (lambda: char_lstm((80,), 80), (80,), 32),
    ],
    ids=["mlp", "cnn-fedavg", "char-lstm"],
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_models_train_in_what_the_estimate_says_and_not_in_half_of_it(
    make: Callable[[], torch.nn.Module], shape: tuple[int, ...], batch: int, optimizer: str
) -> None:
    training = LocalTraining(optimizer="adam" if optimizer == "adam" else "sgd", batch_size=batch, steps=3)
    estimate = training_memory(make, shape, batch, training).total
    assert estimate / 2 > 1.2 * OVERHEAD_BYTES  # which therefore does not make up for half of it
    text = len(shape) == 1
    x = torch.zeros(batch, *shape, dtype=torch.int64 if text else torch.float32)
    y = torch.zeros(x.shape if text else batch, dtype=torch.int64)

    def client() -> object:
        return train_one(FlatModel(make()), training, x, y, generator(0, "test"))

    assert fits(client, int(1.35 * estimate))
    assert not fits(client, int(0.5 * estimate))


# The mod ----------------------------------------------------------------------------------------------------


def message(cap: object = None, kind: str = "train", size: int = 3) -> Message:
    config = ConfigRecord({"server-round": 1})
    if cap is not None:
        config[MEMORY_KEY] = cap  # type: ignore[assignment]
    arrays = record(w=np.zeros(size, np.float32))
    return Message(RecordDict({"arrays": arrays, "config": config}), 1, kind)


def trained(message: Message, context: Context) -> Message:
    """Add 1, hold as many bytes as the client's number says, count the calls."""
    calls = int(context.state["c"]["n"]) + 1 if "c" in context.state else 1
    context.state["c"] = ConfigRecord({"n": calls})
    partition = int(context.node_config["partition-id"])
    torch.zeros(partition * 40 * MB, dtype=torch.uint8)
    arrays = FlatArrays.of_record(message.content["arrays"])
    new = record(w=np.asarray(arrays.vector + 1))
    metrics = MetricRecord({"num-examples": 10 + partition, "calls": calls, "pid": os.getpid()})
    return Message(RecordDict({"arrays": new, "metrics": metrics}), reply_to=message)


@pytest.mark.parametrize("workers", [0, 2])
def test_who_has_too_little_fails_as_out_of_memory_and_the_others_deliver(workers: int) -> None:
    app = ClientApp(mods=[MemoryCapMod()])
    app.train()(trained)
    with LocalGrid(app, 4, workers=workers) as grid:
        nodes = grid.get_node_ids()
        for call in (1, 2):
            content = message(cap=60 * MB).content
            replies = grid.send_and_receive([Message(content, node, "train") for node in nodes])
            for partition, reply in enumerate(replies):
                if partition < 2:
                    assert reply.content["arrays"]["w"].numpy().tolist() == [1, 1, 1]
                    assert reply.content["metrics"]["calls"] == call
                else:
                    assert reply.error.reason.startswith("out of memory:")
                    assert "62.9 MB" in reply.error.reason


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reply_is_to_the_bit_what_it_is_without_a_cap(workers: int) -> None:
    app = ClientApp(mods=[MemoryCapMod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = {"a": np.arange(5, dtype=np.float64) / 3, "b": np.array(7, np.int64)}
        content = RecordDict({"arrays": record(**arrays), "metrics": MetricRecord({"x": 0.1, "n": 3})})
        content["more"] = ConfigRecord({"bytes": b"\0\1", "text": "ä", "many": [1.5, 2.5]})
        return Message(content, reply_to=message)

    with LocalGrid(app, 1, workers=workers) as grid:
        (node,) = grid.get_node_ids()
        (free,), (capped,) = (
            grid.send_and_receive([Message(message(cap).content, node, "train")]) for cap in (None, 30 * MB)
        )
    assert list(free.content) == list(capped.content)
    assert free.content["metrics"] == capped.content["metrics"]
    assert free.content["more"] == capped.content["more"]
    assert list(free.content["arrays"]) == list(capped.content["arrays"])
    for name, array in free.content["arrays"].items():
        other = capped.content["arrays"][name].numpy()
        assert other.dtype == array.numpy().dtype
        np.testing.assert_array_equal(other, array.numpy())
    assert isinstance(capped.content["arrays"], ArrayRecord)


def called(mod: MemoryCapMod, asked: Message, run: Callable[[], Message]) -> Message:
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    return mod(asked, context, lambda message, context: run())


@pytest.mark.parametrize(("cap", "kind"), [(None, "train"), (0, "evaluate"), (0, "query")])
def test_without_a_cap_and_for_other_messages_the_client_runs_in_this_process(
    monkeypatch: pytest.MonkeyPatch, cap: int | None, kind: str
) -> None:
    with LocalGrid(plain_app(), 1, workers=0):
        asked = message(cap, kind)
        reply = Message(RecordDict(), reply_to=asked)
        assert called(MemoryCapMod(), asked, lambda: reply) is reply


def test_an_error_that_the_client_answers_is_passed_on() -> None:
    with LocalGrid(plain_app(), 1, workers=0):
        asked = message(30 * MB)
        reply = called(MemoryCapMod(), asked, lambda: Message(Error(7, "tired"), reply_to=asked))
    assert (reply.error.code, reply.error.reason) == (7, "tired")


def test_what_the_client_raises_is_raised_and_its_state_is_dropped() -> None:
    with LocalGrid(plain_app(), 1, workers=0):
        asked = message(30 * MB)
        context = Context(1, 1, {"partition-id": 0}, RecordDict({"a": ConfigRecord({"n": 1})}), {})

        def fail(message: Message, context: Context) -> Message:
            context.state["a"] = ConfigRecord({"n": 2})
            raise ValueError("no luck")

        with pytest.raises(ValueError, match="no luck"):
            MemoryCapMod()(asked, context, fail)
        with pytest.raises(TypeError, match="NoneType instead of a Message"):
            MemoryCapMod()(asked, context, lambda message, context: None)  # type: ignore[arg-type, return-value]
    assert context.state["a"]["n"] == 1


def test_a_state_that_the_client_empties_is_empty() -> None:
    with LocalGrid(plain_app(), 1, workers=0):
        asked = message(30 * MB)
        context = Context(1, 1, {"partition-id": 0}, RecordDict({"a": ConfigRecord({"n": 1})}), {})
        state = context.state

        def clear(message: Message, context: Context) -> Message:
            context.state.clear()
            return Message(RecordDict(), reply_to=message)

        MemoryCapMod()(asked, context, clear)
    assert context.state is state
    assert not state


@pytest.mark.parametrize("cap", [-1, 1.5, "12"])
def test_a_cap_that_is_none_is_refused(cap: object) -> None:
    with LocalGrid(plain_app(), 1, workers=0), pytest.raises(ValueError, match="whole number of bytes"):
        memory_cap(message(cap))
