"""Who attacks: by id, by number, at random or the clients richest in a class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedplat.errors import UserError
from fedplat.rng import generator


@dataclass(frozen=True)
class Wanted:
    """The attackers that one attack asks for: ``clients`` by id, or a ``fraction`` of all, or a ``count``.

    With ``richest_in`` the fraction or count are those that hold most samples of that class, as in MUD-HoG's
    released scripts; without it they are drawn.
    """

    fraction: float | None = None
    count: int | None = None
    clients: tuple[int, ...] | None = None
    richest_in: int | None = None

    def number(self, clients: int) -> int:
        """Return how many attackers are wanted; a fraction is rounded to whole clients."""
        return self.count if self.count is not None else int((self.fraction or 0.0) * clients + 0.5)


def choose_attackers(
    clients: int, requests: Sequence[Wanted], seed: int, class_counts: NDArray[np.int64] | None = None
) -> list[list[int]]:
    """Return the attacking clients of each request, sorted.

    Ids given are taken first, then the richest in a class, then the others are drawn from those left. No
    client gets two attacks. ``class_counts`` (clients, classes) tells who holds what. Raises UserError if an
    id is asked for twice or is not there, if a class is not there, or if too few clients are left.
    """
    taken: set[int] = set()
    for request in requests:
        for client in request.clients or ():
            if client in taken:
                raise UserError(f"attacks: client {client} is named by two attacks")
            if client >= clients:
                raise UserError(f"attacks: client {client} is not among the clients 0 to {clients - 1}")
            taken.add(client)
    chosen = [sorted(request.clients or ()) for request in requests]
    # The richest before those drawn at random, who may be anybody.
    for index, request in sorted(enumerate(requests), key=lambda pair: pair[1].richest_in is None):
        if request.clients is not None:
            continue
        count, left = request.number(clients), [client for client in range(clients) if client not in taken]
        if count > len(left):
            raise UserError(f"attacks.{index}: {count} attackers wanted, {len(left)} clients are left")
        if request.richest_in is None:
            drawn = generator(seed, "attackers", index).permutation(left)[:count].tolist()
        else:
            drawn = _richest(left, request.richest_in, class_counts, f"attacks.{index}")[:count]
        chosen[index] = sorted(drawn)
        taken.update(drawn)
    return chosen


def _richest(left: list[int], label: int, counts: NDArray[np.int64] | None, where: str) -> list[int]:
    """Return clients by the number of their samples of a class, most first, the lower id on a tie."""
    if counts is None or label >= counts.shape[1]:
        known = "unknown" if counts is None else f"0 to {counts.shape[1] - 1}"
        raise UserError(f"{where}.richest_in: class {label} is not there; the classes are {known}")
    return sorted(left, key=lambda client: (-int(counts[client, label]), client))
