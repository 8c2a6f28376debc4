"""Rate limit with bursts, for requests to the ingest."""

from __future__ import annotations


class TokenBucket:
    """Allows ``burst`` at once and ``rate`` a second. Times are monotonic seconds."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, float(burst)
        self._tokens, self._at = self._burst, now

    def take_token(self, now: float) -> bool:
        """Take a token. Returns False if there is none now."""
        self._refill_tokens(now)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def seconds_until_token(self, now: float) -> float:
        """Seconds until the next one is allowed; 0 if it is."""
        self._refill_tokens(now)
        return max(0.0, (1 - self._tokens) / self._rate)

    def is_full(self, now: float) -> bool:
        """True if all tokens are there."""
        self._refill_tokens(now)
        return self._tokens >= self._burst

    def _refill_tokens(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + max(0.0, now - self._at) * self._rate)
        self._at = now
