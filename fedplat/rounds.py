"""The round loop, over any Flower strategy and any grid.

The calls are those of Flower's ``Strategy.start`` and come in the same order; what is added is that the
caller gets each round as it ends, with its timings and what was sent, and may begin at any round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from .compression.wire import sent_bytes, wire_bytes
from .runtime.waves import engine_for, in_waves
from .strategies.composed import FederatedStrategy
from .strategies.nodes import sender

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass
class Round:
    """What happened in one round; number 0 is the evaluation of the initial model.

    ``seconds`` is wall time by phase; where replies are combined as they come, ``train`` is what was waited
    for them, and ``aggregate`` the rest, during which clients train too. ``bytes_down`` and ``bytes_up`` are
    the arrays of all messages to and from the clients, in bytes. ``arrays`` is the model after the round.
    """

    number: int
    arrays: ArrayRecord
    train_metrics: MetricRecord | None = None
    client_metrics: MetricRecord | None = None
    server_metrics: MetricRecord | None = None
    failures: dict[int, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_down: int = 0
    bytes_up: int = 0


def rounds(
    strategy: Strategy,
    grid: Grid,
    initial_arrays: ArrayRecord,
    num_rounds: int,
    *,
    timeout: float = 3600.0,
    train_config: ConfigRecord | None = None,
    evaluate_config: ConfigRecord | None = None,
    evaluate_fn: EvaluateFn | None = None,
    after: int = -1,
) -> Iterator[Round]:
    """Yield round after round, up to ``num_rounds``.

    ``after`` is the last round already done, whose model is ``initial_arrays``; −1 starts afresh with the
    evaluation of the initial model. ``timeout`` bounds each wait for replies, in seconds.
    """
    strategy.summary()
    train_config = ConfigRecord() if train_config is None else train_config
    evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
    arrays = initial_arrays
    if after < 0 and evaluate_fn:
        start = Round(0, arrays)
        with _timed(start, "evaluate"):
            start.server_metrics = evaluate_fn(0, arrays)
        yield start
    for number in range(max(after, 0) + 1, num_rounds + 1):
        current = Round(number, arrays)
        with _timed(current, "configure"):
            messages = list(strategy.configure_train(number, arrays, train_config, grid))
        new_arrays = _train(current, strategy, grid, messages, timeout)
        if new_arrays is not None:
            current.arrays = arrays = new_arrays
        del messages  # their memory is the next round's
        with _timed(current, "evaluate-clients"):
            questions = list(strategy.configure_evaluate(number, arrays, evaluate_config, grid))
            answers = list(grid.send_and_receive(messages=questions, timeout=timeout))
            current.client_metrics = strategy.aggregate_evaluate(number, answers)
        current.bytes_down += sent_bytes(questions)
        with _timed(current, "evaluate"):
            current.server_metrics = evaluate_fn(number, arrays) if evaluate_fn else None
        yield current


def _train(
    current: Round, strategy: Strategy, grid: Grid, messages: list[Message], timeout: float
) -> ArrayRecord | None:
    """Let the clients train and the strategy combine what they send; return the new model, if there is one.

    Where both strategy and grid can do it, the replies pass through in waves and are never all in memory.
    """
    at_a_time = strategy.replies_at_a_time() if isinstance(strategy, FederatedStrategy) else None
    if at_a_time and (engine := engine_for(grid, messages)) is not None:
        with (
            _timed(current, "aggregate"),
            closing(in_waves(engine, messages, at_a_time=at_a_time, timeout=timeout)) as waves,
        ):
            passing = _passing(current, messages, waves)
            new_arrays, current.train_metrics = strategy.aggregate_train(current.number, passing)
        current.seconds["aggregate"] -= current.seconds.get("train", 0.0)
        current.bytes_down = sent_bytes(messages)
        return new_arrays
    with _timed(current, "train"):
        replies = list(grid.send_and_receive(messages=messages, timeout=timeout))
    current.bytes_down, current.bytes_up = sent_bytes(messages), sum(map(wire_bytes, replies))
    current.failures = _failures(messages, replies)
    with _timed(current, "aggregate"):
        new_arrays, current.train_metrics = strategy.aggregate_train(current.number, replies)
    return new_arrays


def _passing(current: Round, messages: list[Message], replies: Iterator[Message]) -> Iterator[Message]:
    """Pass replies through, noting what they carry, who failed, and how long they were waited for."""
    current.seconds["train"] = 0.0
    current.failures = _failures(messages, [])
    while True:
        start = time.perf_counter()
        reply = next(replies, None)
        current.seconds["train"] += time.perf_counter() - start
        if reply is None:
            return
        current.bytes_up += wire_bytes(reply)
        current.failures.pop(reply.metadata.src_node_id, None)
        current.failures |= _failures([], [reply])
        yield reply
        del reply  # the next one may need its memory


@contextmanager
def _timed(current: Round, phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    current.seconds[phase] = time.perf_counter() - start


def _failures(messages: list[Message], replies: list[Message]) -> dict[int, str]:
    """Return why nodes gave no usable reply, by node id: an error, or silence until the timeout."""
    asked = {m.metadata.message_id: m.metadata.dst_node_id for m in messages if m.metadata.message_id}
    failures = {m.metadata.dst_node_id: "no reply before the timeout" for m in messages}
    for reply in replies:
        node = sender(reply, asked)
        failures.pop(node, None)
        if reply.has_error():
            failures[node] = reply.error.reason or f"error code {reply.error.code}"
    return failures
