"""Gaussian noise for released models, and the account of what it gives away.

Everything here speaks of one adjacency: two runs are neighbours if they differ in one client, which in one of
them sends its update and in the other the zero update, the model as it came. Who takes part, and who replies,
is taken to be known (``NeighboringRelation.REPLACE_SPECIAL`` of dp-accounting, "zero-out").
"""

from __future__ import annotations

import importlib
import math
import secrets
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray

from ..arrays import Layout
from ..errors import UserError
from ..rng import generator

_CHUNK = 1 << 16
_FLOAT16_MAX = 65504.0


class NormalSource(Protocol):
    """Something that draws standard normal numbers."""

    def standard_normal(self, size: int) -> NDArray[np.float64]:
        """Return ``size`` numbers."""
        ...


class SecretNormals:
    """Standard normal numbers that nobody can foretell: Box and Muller's on the keystream of ChaCha20.

    NumPy's generators are none for secrets: who learns some of their numbers may compute the others. ``key``
    has 32 bytes, by default from the operating system.
    """

    def __init__(self, key: bytes | None = None) -> None:
        algorithm = ChaCha20(secrets.token_bytes(32) if key is None else key, bytes(16))
        self._stream = Cipher(algorithm, mode=None).encryptor()

    def standard_normal(self, size: int) -> NDArray[np.float64]:
        """Return the next ``size`` numbers, in float64.

        >>> len(SecretNormals().standard_normal(3))
        3
        """
        pairs = (size + 1) // 2
        words = np.frombuffer(self._stream.update(bytes(16 * pairs)), np.uint64)
        # 53 bits, moved by half a step, so that no logarithm is of zero.
        uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        radius = np.sqrt(-2 * np.log(uniform[:pairs]))
        angle = (2 * math.pi) * uniform[pairs:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


def noise_source(seed: int | None, purpose: str, *keys: int) -> NormalSource:
    """Return secret noise, or for a ``seed`` noise that repeats, which protects from nobody who knows it."""
    return SecretNormals() if seed is None else generator(seed, purpose, *keys)


def released(
    vector: NDArray[np.float32], std: float, source: NormalSource, layout: Layout
) -> NDArray[np.float32]:
    """Return ``vector`` (d,) with N(0, ``std``²) added to every element; a new vector fit for ``layout``.

    Added in float64. Afterwards, which costs no privacy, negative variances become 0 and numbers too large
    for a float16 array its largest. Raises ValueError unless std is finite and not negative.
    """
    if not 0 <= std < math.inf:
        raise ValueError(f"std must be finite and not negative, got {std}")
    out = np.empty(len(vector), np.float32)
    for start in range(0, len(vector), _CHUNK):
        part = vector[start : start + _CHUNK]
        out[start : start + _CHUNK] = part + std * source.standard_normal(len(part))
    for entry in layout.entries:
        if entry.in_vector and entry.name.endswith("running_var"):
            np.maximum(out[entry.start : entry.stop], 0, out=out[entry.start : entry.stop])
        if entry.in_vector and entry.dtype == "float16":
            np.clip(
                out[entry.start : entry.stop],
                -_FLOAT16_MAX,
                _FLOAT16_MAX,
                out=out[entry.start : entry.stop],
            )
    return out


class BudgetSpent(UserError):
    """The next round would cost more privacy than there is left; what was reached before it stands."""


class PrivacyAccount:
    """The privacy that releases by the Gaussian mechanism have cost together, at one ``delta``.

    Rényi differential privacy adds up over releases, each of which may depend on the ones before;
    dp-accounting turns the sum into epsilon. Raises UserError for a delta that is none, or without that
    package.
    """

    def __init__(self, delta: float) -> None:
        if not 0 < delta < 1:
            raise UserError(f"delta must be between 0 and 1, such as 1e-5, got {delta}")
        _accounting()
        self.delta = delta
        self._releases: dict[float, int] = {}

    @property
    def releases(self) -> int:
        """How many releases there have been."""
        return sum(self._releases.values())

    def spend(self, noise_multiplier: float) -> None:
        """Note a release whose noise has a standard deviation of so many times what one client can change."""
        self._releases[noise_multiplier] = self._releases.get(noise_multiplier, 0) + 1

    def join(self, other: PrivacyAccount) -> None:
        """Add what was spent on another account, which turns out to be the same client's."""
        for noise_multiplier, count in other._releases.items():
            self._releases[noise_multiplier] = self._releases.get(noise_multiplier, 0) + count

    def epsilon(self, after: float | None = None) -> float:
        """Return what has been spent, or would be ``after`` one more release at that noise multiplier."""
        releases = dict(self._releases)
        if after is not None:
            releases[after] = releases.get(after, 0) + 1
        return gaussian_epsilon(releases, self.delta)

    def state_dict(self) -> dict[str, Any]:
        """Return the releases, as plain values."""
        return {"releases": [[noise, float(count)] for noise, count in sorted(self._releases.items())]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._releases = {float(noise): int(count) for noise, count in state["releases"]}


def gaussian_epsilon(releases: Mapping[float, int], delta: float) -> float:
    """Return the epsilon, at ``delta``, of so many releases (values) by noise multiplier (keys).

    A noise multiplier is the standard deviation of the noise over the most that one client can change.
    Nothing is claimed for clients being chosen at random. Raises UserError without the package
    dp-accounting. Mironov, CSF 2017.

    >>> round(gaussian_epsilon({1.0: 10}, 1e-5), 2)
    19.05
    """
    return _epsilon(tuple(sorted(releases.items())), delta)


@lru_cache(maxsize=4096)
def _epsilon(releases: tuple[tuple[float, int], ...], delta: float) -> float:
    if not releases:
        return 0.0
    events, relations, rdp = _accounting()
    accountant = rdp.RdpAccountant(neighboring_relation=relations.REPLACE_SPECIAL)
    for noise_multiplier, count in releases:
        accountant.compose(events.GaussianDpEvent(noise_multiplier), count)
    return float(accountant.get_epsilon(delta))


def _accounting() -> tuple[Any, Any, Any]:
    """Import dp-accounting, which takes a second or more and which few ask for."""
    try:
        events, relations, rdp = (
            importlib.import_module(f"dp_accounting.{name}")
            for name in ("dp_event", "privacy_accountant", "rdp")
        )
    except ImportError as error:
        raise UserError(
            f"privacy accounting needs the package dp-accounting ({error}): pip install 'fedplat[dp]'"
        ) from error
    return events, relations.NeighboringRelation, rdp


def checked_noise(clip: float, noise_multiplier: float) -> None:
    """Raise UserError unless clip and noise multiplier are numbers above 0."""
    for name, value in (("clip", clip), ("noise_multiplier", noise_multiplier)):
        if not 0 < value < math.inf:
            raise UserError(f"{name} must be above 0 and finite, got {value}")
