"""Shamir's secret sharing: n shares of a secret, of which any t give it back and t − 1 tell nothing.

Shares are points of a random polynomial over the integers modulo the Mersenne prime 2^521 − 1, which holds a
32-byte key in one piece. Flower's own sharing cuts a secret into padded 16-byte pieces and draws a polynomial
for each; it also rests on a package that fedplat does not otherwise need.

Shamir, How to share a secret, Communications of the ACM, 1979.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = (1 << 521) - 1

SHARE_BYTES = 66

SECRET_BYTES = 32


def split(secret: bytes, threshold: int, shares: int) -> list[bytes]:
    """Return shares 1 to ``shares`` of a 32-byte secret, 66 bytes each, any ``threshold`` of which suffice.

    The polynomial is drawn from the operating system's source of secrets. Raises ValueError if the secret
    does not have 32 bytes, or unless 1 ≤ threshold ≤ shares.

    >>> points = split(bytes(31) + b"k", threshold=2, shares=3)
    >>> combine({1: points[0], 3: points[2]}) == bytes(31) + b"k"
    True
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, this one has {len(secret)}")
    if not 1 <= threshold <= shares:
        raise ValueError(f"threshold must be between 1 and the number of shares, {shares}; got {threshold}")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return [_value(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in range(1, shares + 1)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of some shares, given by number from 1 on; at least the threshold is needed.

    Too few shares, or shares that do not belong together, give another secret or, nearly always, ValueError,
    because what they give does not have 32 bytes.
    """
    if not shares:
        raise ValueError("there are no shares")
    points = {x: int.from_bytes(share, "big") for x, share in shares.items()}
    if any(not 1 <= x < PRIME for x in points) or any(not 0 <= y < PRIME for y in points.values()):
        raise ValueError("a share is not a point of the field")
    total = 0
    for x, y in points.items():
        above, below = 1, 1
        for other in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        total += y * above * pow(below, -1, PRIME)
    secret = total % PRIME
    if secret >> (8 * SECRET_BYTES):
        raise ValueError("the shares do not belong together, or are too few")
    return secret.to_bytes(SECRET_BYTES, "big")


def _value(coefficients: list[int], x: int) -> int:
    """Return the polynomial's value, by Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value
