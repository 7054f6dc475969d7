"""Federated averaging as one writes it by hand: a loop over the clients, in one process or one per core.

They are meant to be hard to beat: samples are prepared beforehand, one model is reused, and where there are
several processes each adds up its own clients' models, so that one vector per process crosses over.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from .common import cores
from .workload import Turn, Workload, vector_of

_Sum = NDArray[np.float64]


class PlainTrainer:
    """Trains clients one after another, with the model and the optimiser of a tutorial."""

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.model = work.task.build_model().to(work.device)
        self.model.train()

    def train(self, partition: int, server_round: int, start: dict[str, torch.Tensor]) -> None:
        """Train the model on one client's samples, from ``start``."""
        training = self.work.task.training
        self.model.load_state_dict(start)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=training.lr, momentum=training.momentum)
        x, y = self.work.prepared(partition)
        order = self.work.order(partition, server_round).to(x.device)
        for batch in order.split(training.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x[batch]), y[batch]).backward()
            optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """Return a copy of the model's state."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def loop(work: Workload, rounds: int, threads: int) -> Turn:
    """Train all clients in this process, with so many threads."""
    torch.set_num_threads(threads)
    trainer, turn = PlainTrainer(work), Turn()
    state, clients = trainer.state(), len(work.task.parts)
    total = sum(len(part) for part in work.task.parts)
    for partition in range(clients):
        work.prepared(partition)
    for number in range(1, rounds + 1):
        begin, trained = time.perf_counter(), 0.0
        mean = {name: torch.zeros_like(value) for name, value in state.items()}
        for partition in range(clients):
            start = time.perf_counter()
            trainer.train(partition, number, state)
            if work.device != "cpu":
                torch.cuda.synchronize()
            trained += time.perf_counter() - start
            share = len(work.task.parts[partition]) / total
            for name, value in trainer.model.state_dict().items():
                mean[name].add_(value, alpha=share)
        state = mean
        if work.device != "cpu":
            torch.cuda.synchronize()
        turn.seconds.append(time.perf_counter() - begin)
        turn.arithmetic.append(trained)
        if number == 1:
            turn.model = vector_of({name: value.cpu().numpy() for name, value in state.items()})
    return turn


def process_per_core(work: Workload, rounds: int) -> Turn:
    """Train the clients in one process per core, every core's-th client in each."""
    torch.set_num_threads(1)
    template, turn = work.task.build_model().state_dict(), Turn()
    for partition in range(len(work.task.parts)):
        work.prepared(partition)  # before the fork, so that all processes share the samples
    workers = min(cores(), len(work.task.parts))
    size = sum(value.numel() for value in template.values())
    # The first row goes to the workers, and each of the others comes back from one.
    shared = np.frombuffer(mmap.mmap(-1, 8 * size * (workers + 1)), np.float64).reshape(workers + 1, size)
    shared[0] = np.concatenate([value.numpy().ravel() for value in template.values()])
    context, pipes, processes = multiprocessing.get_context("fork"), [], []
    for index in range(workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(theirs, work, index, workers, shared), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for number in range(1, rounds + 1):
            begin = time.perf_counter()
            for pipe in pipes:
                pipe.send(number)
            trained = sum(pipe.recv() for pipe in pipes)
            shared[0] = shared[1:].sum(axis=0)
            turn.seconds.append(time.perf_counter() - begin)
            turn.arithmetic.append(trained / workers)
            if number == 1:
                turn.model = vector_of(_named(shared[0].astype(np.float32), template))
    finally:
        for process in processes:
            process.kill()
            process.join(5)
    return turn


def _worker(connection: Connection, work: Workload, index: int, workers: int, shared: _Sum) -> None:
    torch.set_num_threads(1)
    trainer = PlainTrainer(work)
    template = trainer.state()
    parts = work.task.parts
    total = sum(len(part) for part in parts)
    while True:
        try:
            number = connection.recv()
        except EOFError:
            os._exit(0)
        named = _named(shared[0].astype(np.float32), template)
        state = {name: torch.from_numpy(value) for name, value in named.items()}
        mean = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in state.items()}
        trained = 0.0
        for partition in range(index, len(parts), workers):
            start = time.perf_counter()
            trainer.train(partition, number, state)
            trained += time.perf_counter() - start
            for name, value in trainer.model.state_dict().items():
                mean[name].add_(value, alpha=len(parts[partition]) / total)
        shared[1 + index] = np.concatenate([value.numpy().ravel() for value in mean.values()])
        connection.send(trained)


def _named(vector: NDArray[np.float32], template: dict[str, torch.Tensor]) -> dict[str, Any]:
    named, start = {}, 0
    for name, value in template.items():
        named[name] = vector[start : start + value.numel()].reshape(tuple(value.shape))
        start += value.numel()
    return named
