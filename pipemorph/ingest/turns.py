"""Lets sources take turns at what is costly, at a limited rate: TLS handshakes.

A handshake takes the event loop a millisecond or two, in which it answers nobody. So there are only
so many a second, and a source that begins many waits behind its own: the next turn is another's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pipemorph.ingest.token_bucket import TokenBucket

Start = Callable[[], bool]
"""Begins the work; returns whether there was any to begin: if not, the turn is the next one's."""


class Turns:
    """At most ``rate`` turns a second, ``burst`` at once. For use in one event loop."""

    def __init__(self, rate: float, burst: int) -> None:
        self._bucket = TokenBucket(rate, burst, asyncio.get_running_loop().time())
        self._waiting: dict[str, deque[Start]] = {}
        """By source; that whose turn is next comes first."""
        self._timer: asyncio.TimerHandle | None = None

    def put(self, source: str, start: Start) -> None:
        """Let ``start`` be called when it is the turn of this source: now if nobody waits."""
        self._waiting.setdefault(source, deque()).append(start)
        if self._timer is None:
            self._go()

    def close(self) -> None:
        """Forget all that wait."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._waiting:
            if wait := self._bucket.wait(loop.time()):
                self._timer = loop.call_later(wait, self._go)
                return
            source = next(iter(self._waiting))
            own = self._waiting.pop(source)
            start = own.popleft()
            if own:
                self._waiting[source] = own  # Behind all others.
            if start():
                self._bucket.take(loop.time())
