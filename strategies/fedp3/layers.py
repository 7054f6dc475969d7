"""Which layers each client trains: L_i."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from fedplat.errors import UserError
from fedplat.rng import generator

from .settings import COUNTS, Draw, Layers

Set = tuple[int, ...]


class LayerSets:
    """The layers of every client by number, 0 to ``layers`` − 1; every layer is some client's.

    ``rotation`` gives clients of the g-th of as many equal groups as there are layers the layers g, g + 1,
    ... around the end, in all rounds. ``random`` draws each client's layers once, ``each-round`` in every
    round. Kinds of several counts draw a client's count evenly and then so many layers, also under
    ``rotation``. With ``clients`` 0, their number is not known: then the g-th layers go to client g modulo
    the layers, and nothing is promised of draws. Raises UserError if the clients cannot cover all layers.
    """

    def __init__(self, kind: Layers, draw: Draw, clients: int, layers: int, seed: int = 0) -> None:
        self.counts = tuple(min(count, layers) for count in COUNTS[kind]) or (layers,)
        self.draw: Draw = draw
        self.clients = clients
        self.layers = layers
        self.seed = seed
        self._table: tuple[int, list[Set]] | None = None
        if clients and clients * max(self.counts) < layers:
            raise UserError(
                f"layers = '{kind}': {clients} clients with at most {max(self.counts)} layers each cannot "
                f"train all {layers} of the model; take more clients or larger sets"
            )

    def __call__(self, client: int, server_round: int) -> Set:
        """Return a client's layers in a round, ascending."""
        key = server_round if self.draw == "each-round" else 0
        if not self.clients:
            return self._of_unknown(client, key)
        if self._table is None or self._table[0] != key:
            self._table = key, self._drawn(key)
        return self._table[1][client % self.clients]

    def start(self, client: int) -> int:
        """Return the first layer of a client's group."""
        if not self.clients:
            return client % self.layers
        return (client % self.clients) * self.layers // self.clients

    def from_start(self, client: int, count: int) -> Set:
        """Return so many layers from the client's first on, around the end."""
        return tuple(sorted((self.start(client) + step) % self.layers for step in range(count)))

    def _drawn(self, key: int) -> list[Set]:
        if self.draw == "rotation" and len(self.counts) == 1:
            return [self.from_start(client, self.counts[0]) for client in range(self.clients)]
        rng = generator(self.seed, "fedp3-layers", key)
        sets = [_subset(self.counts, self.layers, rng) for _ in range(self.clients)]
        return covering(sets, self.layers, rng)

    def _of_unknown(self, client: int, key: int) -> Set:
        if self.draw == "rotation" and len(self.counts) == 1:
            return self.from_start(client, self.counts[0])
        return _subset(self.counts, self.layers, generator(self.seed, "fedp3-layers", key, client))


def _subset(counts: Sequence[int], layers: int, rng: np.random.Generator) -> Set:
    count = counts[int(rng.integers(len(counts)))]
    return tuple(sorted(rng.choice(layers, size=count, replace=False).tolist()))


def covering(sets: Sequence[Set], layers: int, rng: np.random.Generator) -> list[Set]:
    """Return the sets with as few layers exchanged as make every layer part of one; sizes stay.

    Raises UserError if there are too few.
    """
    found = list(sets)
    count = Counter(layer for one in found for layer in one)
    for missing in [layer for layer in range(layers) if not count[layer]]:
        for client in rng.permutation(len(found)).tolist():
            spare = max(found[client], key=lambda layer: (count[layer], -layer))
            if count[spare] > 1:
                found[client] = tuple(sorted({*found[client], missing} - {spare}))
                count[spare] -= 1
                count[missing] += 1
                break
        else:
            raise UserError(
                f"layers: the clients' {sum(map(len, found))} layers cannot cover all {layers}; take more "
                f"clients or larger sets"
            )
    return found
