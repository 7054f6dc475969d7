"""A token bucket: how many bytes may pass, for a speed, a burst and a time that the caller tells."""

from __future__ import annotations

import math

from ..errors import UserError

MBIT = 1e6
_LEAST = 1448  # bytes worth waking up for: what a packet of Ethernet carries


class TokenBucket:
    """Fills at ``rate_bps`` bits per second up to ``burst`` bytes, and is full at the time ``now``.

    Times are seconds of any one clock; one that goes back counts as standing still. In t seconds, at most
    ``burst + rate_bps·t/8`` bytes are taken. Raises UserError for a negative or NaN rate or a burst below 1.

    >>> bucket = TokenBucket(8_000, 500, now=0.0)
    >>> bucket.take(800, 0.0), bucket.take(800, 0.0), bucket.wait_s(300, 0.0), bucket.take(300, 0.3)
    (500, 0, 0.3, 300)
    """

    def __init__(self, rate_bps: float, burst: int, now: float) -> None:
        if burst < 1:
            raise UserError(f"a burst of {burst} bytes: expected 1 or more")
        self.burst = burst
        self.rate_bps = _checked(rate_bps)
        self._tokens = float(burst)
        self._time = now

    def set_rate(self, rate_bps: float, now: float) -> None:
        """Change the speed from now on; what has come in so far stays."""
        rate_bps = _checked(rate_bps)
        self._fill(now)
        self.rate_bps = rate_bps

    def take(self, wanted: int, now: float) -> int:
        """Take up to ``wanted`` bytes and return how many.

        That is 0 until an amount worth it is there: all that is wanted, the whole burst, or a packet's worth.
        """
        self._fill(now)
        if math.isinf(self.rate_bps):
            return wanted
        # A waiter woken at the very time may find a hair less, for rounding.
        if self._tokens + 1e-6 < self._worthwhile(wanted):
            return 0
        taken = min(wanted, math.floor(self._tokens + 1e-6))
        self._tokens = max(0.0, self._tokens - taken)
        return taken

    def wait_s(self, wanted: int, now: float) -> float:
        """Return the seconds until ``take`` gives something; infinite at a rate of 0."""
        self._fill(now)
        missing = self._worthwhile(wanted) - self._tokens
        if missing <= 0 or math.isinf(self.rate_bps):
            return 0.0
        return 8 * missing / self.rate_bps if self.rate_bps else math.inf

    def _worthwhile(self, wanted: int) -> int:
        return min(wanted, self.burst, _LEAST)

    def _fill(self, now: float) -> None:
        if now > self._time:
            if math.isinf(self.rate_bps):
                self._tokens = float(self.burst)
            else:
                self._tokens = min(self.burst, self._tokens + self.rate_bps / 8 * (now - self._time))
            self._time = now


def _checked(rate_bps: float) -> float:
    if not rate_bps >= 0:
        raise UserError(f"a rate of {rate_bps} bit/s: expected 0 or more")
    return float(rate_bps)
