from __future__ import annotations

import itertools
import secrets

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.security import shamir
from fedplat.security.shamir import PRIME, SHARE_BYTES, combine, split


def test_the_modulus_is_prime() -> None:
    # Lucas and Lehmer: 2^p − 1 is prime if s(p − 2) = 0, where s(0) = 4 and s(k + 1) = s(k)² − 2.
    value = 4
    for _ in range(521 - 2):
        value = (value * value - 2) % PRIME
    assert value == 0
    assert PRIME.bit_length() <= 8 * SHARE_BYTES


def test_shares_are_the_values_of_the_polynomial(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([7, PRIME - 1])
    monkeypatch.setattr(shamir.secrets, "randbelow", lambda bound: next(drawn))
    shares = split((5).to_bytes(32, "big"), threshold=3, shares=4)  # 5 + 7x − x²
    assert [int.from_bytes(share, "big") for share in shares] == [11, 15, 17, 17]


@settings(max_examples=25, deadline=None)
@given(secret=st.binary(min_size=32, max_size=32), n=st.integers(1, 7), data=st.data())
def test_any_threshold_of_shares_in_any_order_gives_the_secret(secret: bytes, n: int, data) -> None:
    t = data.draw(st.integers(1, n))
    shares = dict(enumerate(split(secret, t, n), start=1))
    for chosen in itertools.combinations(shares, t):
        assert combine({x: shares[x] for x in reversed(chosen)}) == secret
    assert combine(shares) == secret


def test_fewer_shares_than_the_threshold_fit_every_secret() -> None:
    shares = split(secrets.token_bytes(32), threshold=3, shares=5)
    with pytest.raises(ValueError, match="do not belong together, or are too few"):
        combine({1: shares[0], 4: shares[3]})  # fails to fail once in 2^265
    # Two shares of three: with any third point they lie on one polynomial, so they exclude no secret.
    for secret in (0, 1, 2**256 - 1):
        third = _through({0: secret, 1: _number(shares[0]), 4: _number(shares[3])}, x=2)
        points = {1: shares[0], 4: shares[3], 2: third.to_bytes(SHARE_BYTES, "big")}
        assert combine(points) == secret.to_bytes(32, "big")


def test_a_changed_share_is_noticed_or_gives_another_secret() -> None:
    secret = secrets.token_bytes(32)
    shares = split(secret, threshold=2, shares=3)
    with pytest.raises(ValueError, match="do not belong together"):
        combine({1: shares[0], 2: shares[2]})  # the share of number 3 under number 2


@pytest.mark.parametrize(("t", "n"), [(0, 3), (4, 3), (-1, 3), (1, 0)])
def test_impossible_thresholds_are_refused(t: int, n: int) -> None:
    with pytest.raises(ValueError, match="threshold must be between 1 and the number of shares"):
        split(bytes(32), t, n)


def test_other_input_is_refused() -> None:
    with pytest.raises(ValueError, match="a secret has 32 bytes, this one has 31"):
        split(bytes(31), 1, 1)
    with pytest.raises(ValueError, match="there are no shares"):
        combine({})
    with pytest.raises(ValueError, match="not a point of the field"):
        combine({0: bytes(66)})
    with pytest.raises(ValueError, match="not a point of the field"):
        combine({1: b"\xff" * 66})


def _number(share: bytes) -> int:
    return int.from_bytes(share, "big")


def _through(points: dict[int, int], x: int) -> int:
    """Return the value at x of the polynomial through some points, by Neville's scheme."""
    xs, values = list(points), list(points.values())
    for step in range(1, len(xs)):
        for i in range(len(xs) - step):
            a, b = xs[i], xs[i + step]
            rise = (x - b) * values[i] - (x - a) * values[i + 1]
            values[i] = rise * pow(a - b, -1, PRIME) % PRIME
    return values[0]
