"""Whether a decision is one that can be carried out."""

from __future__ import annotations

import numpy as np

from .base import NOWHERE, Decision, EdgeWorld, Limits, RoundState


class DecisionError(RuntimeError):
    """A policy decided something that cannot be: it says what, and names the clients or edges."""


def check_decision(
    world: EdgeWorld, state: RoundState, limits: Limits, decision: Decision, *, beyond_most: bool = False
) -> None:
    """Look a decision over.

    Raises DecisionError if it has not one whole number per client, names an edge that does not exist, sends
    a client that is absent or to an edge out of its reach, or an edge gets more than ``limits.most`` clients.
    The last is let through with ``beyond_most``, for policies that are meant to overload edges.
    """
    edge_of, where = decision.edge_of, f"round {state.number}: "
    if edge_of.shape != (world.clients,) or edge_of.dtype.kind != "i":
        raise DecisionError(
            f"{where}expected {world.clients} whole numbers, got shape {edge_of.shape} of {edge_of.dtype}"
        )
    if (wrong := (edge_of < NOWHERE) | (edge_of >= world.edges)).any():
        raise DecisionError(f"{where}edges are {NOWHERE} to {world.edges - 1}; {_those(wrong)} out of range")
    used = edge_of != NOWHERE
    if (wrong := used & ~state.present).any():
        raise DecisionError(f"{where}{_those(wrong)} absent")
    if (wrong := used & ~world.covered[np.arange(world.clients), edge_of]).any():
        raise DecisionError(f"{where}{_those(wrong)} uncovered by the edge chosen")
    size = np.bincount(edge_of[used], minlength=world.edges)
    if not beyond_most and (wrong := size > limits.most).any():
        raise DecisionError(f"{where}{_those(wrong, 'edges')} above the most clients allowed")
    if not (0 <= decision.probed <= world.clients and 0 <= decision.changed <= world.clients):
        raise DecisionError(
            f"{where}{decision.probed} probed and {decision.changed} changed of {world.clients} clients"
        )


def _those(wrong: np.ndarray, what: str = "clients") -> str:
    found = np.flatnonzero(wrong)
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"{what} {', '.join(map(str, found[:5]))}{more}"
