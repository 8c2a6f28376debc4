"""Fault traces, applied around the transports and counted.

A delay ``d`` holds every message for ``d`` on its queue: the queue is busy for that long,
and the receiver does not hand the message over before. That is bookkeeping at the sender
(one number per queue) and a time in the message's note; nothing sleeps and nothing in the
transports knows of it. Both directions of the link are held.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipemorph.api.spec import Fault
from pipemorph_trainer.links.channels.shared_queue import SharedQueue
from pipemorph_trainer.links.message import Direction

log = logging.getLogger("pipemorph.trainer")

DIRECT_QUEUE = -1
"""The direct route's only queue; the delegated route's are numbered from 0."""


@dataclass
class _Count:
    """What one fault did in one direction of its link."""

    messages: int = 0
    hold_seconds: float = 0.0
    first_iteration: int | None = None
    last_iteration: int | None = None


class Shaper:
    """Holds the messages of one direction of one link, as the fault trace says.

    One :class:`Shaper` serves both routes of its direction: a bandwidth limit is shared by
    all queues, a delay occupies one. ``shared`` is the direct route's queue where both
    directions have one together.
    """

    def __init__(
        self, faults: Sequence[Fault], direction: Direction, shared: SharedQueue | None = None
    ) -> None:
        self._faults = shaping(faults)
        self._shared = shared if self._faults else None
        self._counts = [_Count() for _ in self._faults]
        self._direction = direction
        self._active: list[int] = []
        self._timed = [i for i, f in enumerate(self._faults) if _by_seconds(f)]
        self._queues: dict[int, float] = {}
        self._wire_free = 0.0
        self._iteration = 0
        self._began = 0.0

    def begin(self, iteration: int, training_began: float) -> None:
        """Note which faults hold in this iteration; times bound by seconds are looked up
        per message. Route changes leave no trace on the queues' bookkeeping."""
        self._iteration = iteration
        self._began = training_began
        self._active = [
            i
            for i, f in enumerate(self._faults)
            if not _by_seconds(f) and _within(iteration, f.from_iteration, f.to_iteration)
        ]

    def hold(self, queue: int, nbytes: int, now: float) -> tuple[float, float]:
        """``(started_at, not_before)`` of a message handed to ``queue`` at ``now``.

        ``not_before`` is 0 where no fault holds and the queue is free.
        """
        if self._shared is None or queue != DIRECT_QUEUE:
            return self._hold(queue, nbytes, now)
        with self._shared.locked():
            self._queues[queue] = self._shared.free_at
            held = self._hold(queue, nbytes, now)
            self._shared.free_at = self._queues[queue]
        return held

    def _hold(self, queue: int, nbytes: int, now: float) -> tuple[float, float]:
        active = self._active
        if self._timed:
            since = now - self._began
            active = active + [
                i
                for i in self._timed
                if _within(since, self._faults[i].from_seconds, self._faults[i].to_seconds)
            ]
        free = self._queues.get(queue, 0.0)
        start = now if now > free else free
        if not active:
            return start, (start if start > now else 0.0)
        delay, rate = 0.0, 0.0
        for i in active:
            fault = self._faults[i]
            delay += (fault.delay_ms or 0.0) / 1e3
            if fault.bandwidth_mbps is not None:
                limit = fault.bandwidth_mbps * 1e6 / 8
                rate = limit if not rate else min(rate, limit)
        left = start
        if rate:
            start = max(start, self._wire_free)
            left = self._wire_free = start + nbytes / rate
        done = left + delay
        self._queues[queue] = done
        for i in active:
            count = self._counts[i]
            count.messages += 1
            count.hold_seconds += done - start
            count.last_iteration = self._iteration
            if count.first_iteration is None:
                count.first_iteration = self._iteration
        return start, done

    def close(self) -> None:
        """Give the shared queue back. Idempotent."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def record(self) -> list[dict[str, Any]]:
        """One entry per fault: what it was and what it did in this direction."""
        return [
            {
                **fault.model_dump(exclude_none=True),
                "direction": self._direction.word,
                "messages_held": count.messages,
                "hold_seconds": count.hold_seconds,
                "first_iteration": count.first_iteration,
                "last_iteration": count.last_iteration,
            }
            for fault, count in zip(self._faults, self._counts, strict=True)
        ]


def shaping(faults: Sequence[Fault]) -> list[Fault]:
    """The faults that hold messages, as against those that cut connections."""
    return [f for f in faults if f.delay_ms or f.bandwidth_mbps]


class Severer:
    """Cuts engine connections of one link once, when a fault's time has come."""

    def __init__(self, faults: Sequence[Fault], cut: Callable[[str], None] | None) -> None:
        self._pending = [f for f in faults if f.sever is not None]
        self._cut = cut
        self._record: list[dict[str, Any]] = []

    def at(self, iteration: int, since_began: float) -> None:
        """Cut what is due. Called between ops, so that cuts fall into a running iteration."""
        if not self._pending:
            return
        for fault in list(self._pending):
            due = (
                since_began >= (fault.from_seconds or 0.0)
                if _by_seconds(fault)
                else iteration >= (fault.from_iteration or 0)
            )
            if not due:
                continue
            self._pending.remove(fault)
            if self._cut is None:
                log.warning("fault trace: link %d has no engine connection to cut", fault.link)
            else:
                self._cut(str(fault.sever))
            self._record.append(
                {
                    **fault.model_dump(exclude_none=True),
                    "applied": self._cut is not None,
                    "iteration": iteration,
                }
            )

    def record(self) -> list[dict[str, Any]]:
        return self._record


def _by_seconds(fault: Fault) -> bool:
    return fault.from_seconds is not None or fault.to_seconds is not None


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value < high)
