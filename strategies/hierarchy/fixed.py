"""Associations that are given: each client has one edge for ever, whatever it costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from scipy.optimize import linear_sum_assignment

from fedplat.errors import UserError

from ..association.announcing import Announcing
from ..association.base import NOWHERE, Decision, EdgeWorld, Ints, Limits, Prices, RoundState

Place = Literal["round-robin", "blocks", "edge-iid", "edge-non-iid"]


class Fixed(Announcing):
    """Every client has its seat at one edge, and takes part from there whenever it is present.

    ``round-robin`` deals clients out one by one, ``blocks`` gives each edge clients that follow one another.
    The two others go by the label that most of a client's samples have: with ``edge-iid`` every edge gets
    clients of all classes, with ``edge-non-iid`` of ``classes_per_edge`` only, as far as there are enough.
    These are the two cases of HierFAVG's study, with clients of one class each: ten classes at each edge, or
    five. A client that does not reach its edge gets the next one that it does reach. Liu et al., ICC 2020.

        Edges(edges=5, association=Fixed(place="edge-iid"))
    """

    def __init__(
        self,
        *,
        place: Place = "round-robin",
        classes_per_edge: Annotated[int, Field(ge=1, description="with place = edge-non-iid")] = 5,
    ) -> None:
        self.place: Place = place
        self.classes_per_edge = classes_per_edge

    def prepare(self, world: EdgeWorld, limits: Limits, prices: Prices, seed: int) -> None:
        """Seat the clients; raises UserError if they are to be seated by labels and have none."""
        super().prepare(world, limits, prices, seed)
        if self.place in ("edge-iid", "edge-non-iid") and not world.counts.shape[1]:
            raise UserError(
                f"association place = '{self.place}' goes by the labels of samples, which these have not"
            )
        wanted = _PLACES[self.place](self, world)
        self.seats = np.array([_nearest(edge, world.covered[n]) for n, edge in enumerate(wanted.tolist())])

    def decide(self, state: RoundState) -> Decision:
        """Return everybody present, each at its edge."""
        return self.decided(np.where(state.present, self.seats, NOWHERE))


def round_robin(world: EdgeWorld) -> Ints:
    """Return edges (N,) dealt out one by one."""
    return np.arange(world.clients) % world.edges


def blocks(world: EdgeWorld) -> Ints:
    """Return edges (N,) in blocks that differ in size by one at most.

    >>> [len(block) for block in np.array_split(np.arange(7), 3)]
    [3, 2, 2]
    """
    sizes = [len(block) for block in np.array_split(np.arange(world.clients), world.edges)]
    return np.repeat(np.arange(world.edges), sizes)


def mixed(world: EdgeWorld) -> Ints:
    """Return edges (N,) among which the clients of every main label are spread evenly."""
    edge_of = np.empty(world.clients, np.int64)
    edge_of[_by_label(world)] = np.arange(world.clients) % world.edges
    return edge_of


def few_classes(world: EdgeWorld, classes: int) -> Ints:
    """Return edges (N,) of equal size, each with clients of so many labels, if there are enough of them.

    The labels of edges overlap as little as they have to. An edge's places are shared out evenly between its
    labels, and clients are matched with places: a place would have its own label best, another of its edge's
    next. O(N^3).
    """
    clients, edges, labels = world.clients, world.edges, world.counts.shape[1]
    main, each = world.counts.argmax(axis=1), -(-clients // edges)
    first = (np.arange(edges) * labels) // edges
    own = (first[:, None] + np.arange(min(classes, labels))) % labels
    edge_of_place = np.repeat(np.arange(edges), each)
    label_of_place = own[:, np.arange(each) % own.shape[1]].ravel()
    there = (own[edge_of_place][None] == main[:, None, None]).any(axis=2)
    price = np.where(label_of_place == main[:, None], 0, np.where(there, 1, 2))
    _, places = linear_sum_assignment(price)
    return edge_of_place[places]


def _by_label(world: EdgeWorld) -> Ints:
    return np.argsort(world.counts.argmax(axis=1), kind="stable")


def _nearest(edge: int, covered: np.ndarray) -> int:
    """Return the edge, or the next in reach if it is out of it; nowhere for a client that reaches none."""
    reached = np.flatnonzero(covered)
    return int(reached[((reached - edge) % len(covered)).argmin()]) if len(reached) else NOWHERE


_PLACES: Mapping[str, Callable[[Fixed, EdgeWorld], Ints]] = {
    "round-robin": lambda policy, world: round_robin(world),
    "blocks": lambda policy, world: blocks(world),
    "edge-iid": lambda policy, world: mixed(world),
    "edge-non-iid": lambda policy, world: few_classes(world, policy.classes_per_edge),
}
