"""Seeds: every random draw comes from a child of the run's seed, keyed by what it is for.

A draw for (purpose, node, round) is the same whichever worker makes it and whatever was drawn before,
which is what makes a run independent of the number of workers and resumable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import numpy as np


def seed_sequence(seed: int, purpose: str, *keys: int) -> np.random.SeedSequence:
    """Return the seed sequence for one purpose; ``keys`` are usually (node,) or (node, round)."""
    return np.random.SeedSequence(entropy=seed, spawn_key=(crc32(purpose.encode()), *keys))


def generator(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """Return a fresh generator for one purpose.

    >>> int(generator(1, "batches", 3, 0).integers(100)) == int(generator(1, "batches", 3, 0).integers(100))
    True
    """
    return np.random.default_rng(seed_sequence(seed, purpose, *keys))


def torch_seed(seed: int, purpose: str, *keys: int) -> int:
    """Return the seed that :func:`seeded_torch` gives torch's generators for one purpose."""
    return int(seed_sequence(seed, purpose, *keys).generate_state(1, np.uint64)[0])


@contextmanager
def seeded_torch(seed: int, purpose: str, *keys: int) -> Iterator[None]:
    """Seed torch's CPU and current CUDA generators inside the block and put their states back after it.

    Layer initialisers and dropout take no generator argument, so this is the one place that reaches
    for torch's own; the caller's stream is left as it was.
    """
    import torch

    value = torch_seed(seed, purpose, *keys)
    with torch.random.fork_rng(
        devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    ):
        torch.default_generator.manual_seed(value)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(value)
        yield
