"""How MUD-HoG turns a round's suspicions into convictions, and how it lifts them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from .hog_detection import Mask

SIGN_FLIP, ADDITIVE_NOISE, TARGETED = range(3)
KINDS = ("sign_flip", "additive_noise", "targeted")


class Delays(NamedTuple):
    """How many suspicious rounds confirm a client as untargeted, targeted, unreliable."""

    untargeted: int = 2
    targeted: int = 4
    unreliable: int = 3

    @property
    def of_kinds(self) -> tuple[int, int, int]:
        """The delays of the three kinds of attack."""
        return self.untargeted, self.untargeted, self.targeted


@dataclass(frozen=True)
class Standing:
    """What is held against n clients: arrays with a row for each, changed in place.

    ``suspicion`` (n, 3) counts suspicious rounds by kind, ``confirmed`` (n, 3) says who is convicted of what,
    ``malicious`` (n,) who is left out for it; ``hits`` (n,) counts rounds of poor quality and ``unreliable``
    (n,) says who is so called. The reference's single counter is column 0 of ``suspicion``.
    """

    suspicion: NDArray[np.int64]
    confirmed: Mask
    malicious: Mask
    hits: NDArray[np.int64]
    unreliable: Mask

    @classmethod
    def clean(cls, clients: int) -> Self:
        """Return the standing of so many newcomers."""
        return cls(
            np.zeros((clients, 3), np.int64),
            np.zeros((clients, 3), bool),
            np.zeros(clients, bool),
            np.zeros(clients, np.int64),
            np.zeros(clients, bool),
        )

    def __len__(self) -> int:
        return len(self.hits)

    def rows(self, which: NDArray[np.int64]) -> Self:
        """Return the standing of some clients; a copy."""
        return type(self)(*(getattr(self, field.name)[which] for field in fields(self)))

    def put(self, which: NDArray[np.int64], new: Standing) -> None:
        """Set the standing of some clients."""
        for field in fields(self):
            getattr(self, field.name)[which] = getattr(new, field.name)

    def enlarged(self, clients: int) -> Self:
        """Return the standing of these and of newcomers, ``clients`` in all."""
        new = self.clean(clients)
        new.put(np.arange(len(self)), self)
        return new

    def state_dict(self) -> dict[str, Any]:
        """Return the arrays as tensors."""
        return {field.name: torch.from_numpy(getattr(self, field.name).copy()) for field in fields(self)}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the standing that :meth:`state_dict` described."""
        return cls(*(state[field.name].numpy().copy() for field in fields(cls)))


def convict(standing: Standing, suspects: Mask, judged: Mask, delays: Delays) -> None:
    """Count a round, every kind of attack by itself: ``suspects`` and ``judged`` are (n, 3), by kind.

    As many suspicious rounds as the delay, with no clean one between, convict; two clean rounds in a row
    lift it. A client that a detector could not judge in this round keeps what it had.
    """
    s, confirmed = standing.suspicion, standing.confirmed
    clean = judged & ~suspects
    confirmed[clean & (s == 0)] = False
    s[clean] = 0
    s[suspects] += 1
    confirmed[suspects & (s >= np.array(delays.of_kinds))] = True
    standing.malicious[:] = confirmed.any(axis=1)


def note_quality(standing: Standing, poor: Mask, judged: Mask, delay: int) -> None:
    """Count a round: ``delay`` poor ones (n,) make a client unreliable, as many good ones undo it.

    The count stops at the delay, so that a long bad time is not held against a client for ever.
    """
    hits, good = standing.hits, judged & ~poor
    hits[poor] = np.minimum(hits[poor] + 1, delay)
    hits[good] = np.maximum(hits[good] - 1, 0)
    standing.unreliable[poor & (hits >= delay)] = True
    standing.unreliable[good & (hits == 0)] = False


def convict_as_released(standing: Standing, suspects: Mask, delays: Delays) -> None:
    """Count a round with one counter for all kinds (n, 3), as the released code does.

    So a client that was suspected of one kind is confirmed at once as another. The first clean round of a
    convict of noise also counts as a hit for being unreliable, and ``delays.untargeted`` hits turn it into
    that, whatever else it is convicted of.
    """
    s, confirmed = standing.suspicion[:, 0], standing.confirmed
    any_kind = suspects.any(axis=1)
    second_clean = ~any_kind & (s == 0)
    first_clean = ~any_kind & (s > 0)
    s[any_kind] += 1
    found = suspects & (s[:, None] >= np.array(delays.of_kinds))
    confirmed |= found
    standing.malicious[found.any(axis=1)] = True
    s[first_clean] = 0
    noisy = first_clean & confirmed[:, ADDITIVE_NOISE]
    standing.hits[noisy] += 1
    reprieved = noisy & (standing.hits >= delays.untargeted)
    confirmed[reprieved, ADDITIVE_NOISE] = False
    standing.malicious[reprieved] = False
    standing.unreliable[reprieved] = True
    confirmed[second_clean] = False
    standing.malicious[second_clean] = False


def note_quality_as_released(standing: Standing, poor: Mask, delay: int) -> None:
    """Count a round of poor quality (n,) as the released code does: without an upper limit, in this order."""
    hits, unreliable = standing.hits, standing.unreliable
    hits[poor] += 1
    unreliable[poor & (hits >= delay)] = True
    unreliable[hits == 0] = False
    hits[~poor & (hits > 0)] -= 1
