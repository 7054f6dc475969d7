"""What DP-FedP3's clients spend, by client and round."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fedplat.errors import UserError
from fedplat.security.example_privacy import noise_for, sampled_epsilon, sampling_of
from fedplat.training_config import LocalTraining


class ExampleAccount:
    """Counts, for each client, the rounds in which it was asked to train with noise.

    With ``epsilon`` and ``rounds`` instead of ``noise``, the noise is the least that lets the client for whom
    that costs most take part in so many rounds; it then is the ``budget`` too. Raises UserError for noise
    that gives no finite epsilon for a single round, and a delta that is not below 1/m for every client.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        training: LocalTraining,
        *,
        delta: float,
        noise: float | None = None,
        epsilon: float | None = None,
        rounds: int | None = None,
        budget: float | None = None,
    ) -> None:
        if (noise is None) == (epsilon is None) or (epsilon is None) != (rounds is None):
            raise UserError("DP-FedP3 needs dp_noise, or dp_epsilon with dp_rounds, and not both")
        largest = max(sizes.values(), default=1)
        if not 0 < delta < 1 / max(largest, 1):
            raise UserError(
                f"dp_delta = {delta:g}: expected above 0 and below 1/{largest}, one sample of the "
                f"largest client"
            )
        self._uses = {client: sampling_of(size, training) for client, size in sizes.items()}
        self.delta = delta
        self.budget = epsilon if budget is None else budget
        if noise is not None:
            self.noise = noise
        else:
            assert epsilon is not None
            assert rounds is not None
            self.noise = noise_for(epsilon, delta, [(q, n * rounds) for q, n in self._uses.values()])
        self.spent: Counter[int] = Counter()
        if not all(math.isfinite(self._epsilon(client, 1)) for client in sizes):
            raise UserError(
                f"dp_noise = {self.noise:g} gives no finite epsilon for a single round; take more"
            )

    def can_afford(self, client: int) -> bool:
        """Whether one more round keeps within the budget."""
        return self.budget is None or self._epsilon(client, self.spent[client] + 1) <= self.budget * (
            1 + 1e-9
        )

    def spend(self, client: int) -> None:
        """Note that a client is asked once more."""
        self.spent[client] += 1

    def epsilon_of(self, client: int) -> float:
        """Return what a client has spent."""
        return self._epsilon(client, self.spent[client])

    def epsilon(self) -> float:
        """Return the most that any client has spent."""
        return max((self.epsilon_of(client) for client in self.spent), default=0.0)

    def _epsilon(self, client: int, rounds: int) -> float:
        rate, steps = self._uses[client] if client in self._uses else max(self._uses.values())
        return sampled_epsilon(rate, self.noise, steps * rounds, self.delta)

    def state_dict(self) -> dict[str, Any]:
        """Return the rounds by client, as plain values."""
        return {str(client): count for client, count in sorted(self.spent.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self.spent = Counter({int(client): int(count) for client, count in state.items()})
