"""Queue of jobs to reconcile: deduplicated, and with at most one run of a job at a time.

A failed job is retried after a growing delay, without blocking the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from pipemorph_operator.metrics import QUEUED

FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 60.0
RECONCILE_SECONDS = 900.0
"""Time limit of one reconcile: about ten requests of at most half a minute each."""

Key = TypeVar("Key", bound=Hashable)


class WorkQueue(Generic[Key]):
    """Work queue for one event loop. ``gap``: minimum seconds between two runs of a key."""

    def __init__(self, *, gap: float = 0.0) -> None:
        self._gap = gap
        self._open = True
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: set[Key] = set()
        self._working: dict[Key, float] = {}
        """Start time of each running key."""
        self._again: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._ended: dict[Key, float] = {}

    def open(self, keys: Iterable[Key]) -> None:
        """Accept keys from now on, and queue ``keys`` first."""
        self._open = True
        for key in keys:
            self.add(key)

    def close(self) -> None:
        """Drop all queued keys and accept none: no worker runs."""
        self._open = False
        for key in [*self._timers]:
            self._cancel_timer(key)
        while not self._ready.empty():
            self._ready.get_nowait()
        self._waiting.clear()
        self._failures.clear()
        QUEUED.set(0)

    def add(self, key: Key) -> None:
        """Queue ``key`` now."""
        if not self._open:
            return
        if key in self._working:
            self._again.add(key)
            return
        if key in self._waiting:
            return
        rested = self._ended.get(key)
        wait = rested + self._gap - self._read_clock() if rested is not None else 0.0
        if wait > 0.001:
            self.add_after(key, wait)
            return
        self._cancel_timer(key)
        self._waiting.add(key)
        self._ready.put_nowait(key)
        QUEUED.set(self._ready.qsize())

    def add_after(self, key: Key, seconds: float) -> None:
        """Queue ``key`` in ``seconds``, unless it is queued earlier."""
        if not self._open:
            return
        when = self._read_clock() + max(0.0, seconds)
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= when:
            return
        self._cancel_timer(key)
        self._timers[key] = asyncio.get_running_loop().call_at(when, self._queue_due_key, key)

    async def get(self) -> Key:
        """Wait for the next key. Call :meth:`done` when finished with it."""
        key = await self._ready.get()
        QUEUED.set(self._ready.qsize())
        self._waiting.discard(key)
        self._working[key] = self._read_clock()
        return key

    def done(self, key: Key, *, failed: bool = False) -> None:
        """Finish the run of a key; after a failure it is queued again with a delay."""
        self._working.pop(key, None)
        if self._gap > 0:
            self._ended[key] = self._read_clock()
            asyncio.get_running_loop().call_later(self._gap, self._forget_rested, key)
        again = key in self._again
        self._again.discard(key)
        if failed:
            count = self._failures[key] = self._failures.get(key, 0) + 1
            delay = min(LAST_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2.0 ** min(count - 1, 16))
            self.add_after(key, delay)
            return
        self._failures.pop(key, None)
        if again:
            self.add(key)

    def describe_overdue(self) -> str:
        """Problem for ``/healthz``: a reconcile that does not end; empty if there is none."""
        began, key = min(((at, key) for key, at in self._working.items()), default=(None, None))
        if began is None or self._read_clock() - began <= RECONCILE_SECONDS:
            return ""
        return f"the reconcile of {key} has run for {self._read_clock() - began:.0f} s"

    def _queue_due_key(self, key: Key) -> None:
        self._timers.pop(key, None)
        self.add(key)

    def _forget_rested(self, key: Key) -> None:
        ended = self._ended.get(key)
        if ended is not None and ended + self._gap <= self._read_clock() + 0.001:
            self._ended.pop(key, None)

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def _read_clock(self) -> float:
        return asyncio.get_running_loop().time()
