"""Selectors: who takes part in a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Protocol

import numpy as np
from pydantic import Field

from .nodes import Node


class Selector(Protocol):
    """Chooses a round's participants; ``nodes`` are ordered by partition, ``rng`` is the round's own."""

    def select(self, nodes: Sequence[Node], rng: np.random.Generator, server_round: int) -> list[Node]:
        """Return the participants, in the order of ``nodes``."""
        ...

    def count(self, available: int) -> int:
        """Return how many of so many available nodes take part."""
        ...


class AllClients:
    """Everyone takes part in every round."""

    def select(self, nodes: Sequence[Node], rng: np.random.Generator, server_round: int) -> list[Node]:
        """Return all nodes."""
        return list(nodes)

    def count(self, available: int) -> int:
        """Return ``available``."""
        return available


class RandomFraction:
    """A random ⌈fraction·n⌉ of the nodes, at least one, without replacement. McMahan et al., AISTATS 2017."""

    def __init__(self, *, fraction: Annotated[float, Field(gt=0, le=1)] = 0.1) -> None:
        self.fraction = fraction

    def count(self, available: int) -> int:
        """Return ⌈fraction·available⌉, at least one."""
        return max(1, math.ceil(round(self.fraction * available, 9)))

    def select(self, nodes: Sequence[Node], rng: np.random.Generator, server_round: int) -> list[Node]:
        """Return a random subset, in the order of ``nodes``."""
        chosen = rng.choice(len(nodes), size=self.count(len(nodes)), replace=False)
        return [nodes[i] for i in sorted(chosen.tolist())]
