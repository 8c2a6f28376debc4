"""A rate limit with bursts, for what clients ask of the ingest."""

from __future__ import annotations


class TokenBucket:
    """Allows ``burst`` at once and ``rate`` a second. Times are monotonic seconds."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, float(burst)
        self._left, self._at = self._burst, now

    def take(self, now: float) -> bool:
        """Whether another one is allowed now; if so, it is counted."""
        self._refill(now)
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def wait(self, now: float) -> float:
        """Seconds until the next one is allowed; 0 if it is."""
        self._refill(now)
        return max(0.0, (1 - self._left) / self._rate)

    def full(self, now: float) -> bool:
        """Whether it is as if nothing had been asked yet."""
        self._refill(now)
        return self._left >= self._burst

    def _refill(self, now: float) -> None:
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._rate)
        self._at = now
