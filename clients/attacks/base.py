"""The places where an attack can live, and who attacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import Context, Message
from flwr.clientapp.typing import ClientAppCallable

from fedplat.errors import UserError
from fedplat.rng import generator


class Attack:
    """An attacker's behaviour: on its own data, on its own reply, or on both. This one does nothing.

    An attack is itself a Flower client mod, so a Flower user writes ``ClientApp(mods=[SignFlip()])``.
    """

    def on_data(
        self, x: torch.Tensor, y: torch.Tensor, rng: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples and labels that the attacker trains on."""
        return x, y

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Return the reply that the attacker sends; ``call_next`` gives the honest one."""
        return call_next(message, context)


def choose_attackers(
    clients: int, requests: Sequence[tuple[float | None, Sequence[int] | None]], seed: int
) -> list[list[int]]:
    """Return the attacking clients of each request, given as a fraction of all clients or as ids.

    Ids given are taken first; fractions, rounded to whole clients, are drawn from those left. No client gets
    two attacks. Raises UserError if an id is asked for twice or too few clients are left.
    """
    taken: set[int] = set()
    for _, ids in requests:
        for client in ids or ():
            if client in taken:
                raise UserError(f"attacks: client {client} is named by two attacks")
            if client >= clients:
                raise UserError(f"attacks: client {client} is not among the clients 0 to {clients - 1}")
            taken.add(client)
    chosen: list[list[int]] = []
    for index, (fraction, ids) in enumerate(requests):
        if ids is not None:
            chosen.append(sorted(ids))
            continue
        count = int((fraction or 0.0) * clients + 0.5)
        left = [client for client in range(clients) if client not in taken]
        if count > len(left):
            raise UserError(f"attacks.{index}: {count} attackers wanted, {len(left)} clients are left")
        drawn = generator(seed, "attackers", index).permutation(left)[:count]
        chosen.append(sorted(int(client) for client in drawn))
        taken.update(chosen[-1])
    return chosen


def dispatch(attacks: Mapping[int, Attack]) -> Attack:
    """Return one mod that lets each client of ``attacks``, by partition, behave as its attack says."""
    return _Dispatch(attacks)


class _Dispatch(Attack):
    def __init__(self, attacks: Mapping[int, Attack]) -> None:
        self._attacks = attacks

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        attack = self._attacks.get(int(context.node_config["partition-id"]))
        return attack(message, context, call_next) if attack else call_next(message, context)
