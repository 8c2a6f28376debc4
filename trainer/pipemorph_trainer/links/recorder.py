"""Wire times of one direction of one link, collected until they are reported, and the clocks of the
receiving ends of both routes, by which it is known which of them are exact."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

from pipemorph.planning.ir import Route
from pipemorph.wire import LinkSample, WireTime
from pipemorph_trainer.links.message import NOTHING, Direction, Note

Transport = Literal["gloo", "nccl", "tcp", "shm", "rdma"]
ENOUGH_EXACT = 3
"""Exact samples that are enough to represent a window. Fewer are enough if they are half of it,
since a slow link has one message per window. Otherwise all samples are used, as upper bounds."""
MAX_WINDOW = 4096
WAITED = 0.001
"""Seconds in the queue from which a message counts as held up by the one before it."""
JUST_AFTER = 0.001
"""Seconds after an op in which a thread that waited for the interpreter may wake up late."""


_Message = tuple[float, float, int, bool, float | None]
"""Arguments of :meth:`LinkRecorder.add`."""


class LinkRecorder:
    """Collects the messages received in one direction of one link until they are published."""

    def __init__(self, link: int, replica: int, direction: Direction) -> None:
        self._link, self._replica = link, replica
        self._direction: Literal["forward", "backward"] = (
            "forward" if direction is Direction.FORWARD else "backward"
        )
        self._messages: list[_Message] = []
        self._route: Route = Route.DIRECT
        self._transport: Transport = "gloo"
        self._iteration = 0
        self._failed_over = False
        self._arrived_at: float | None = None
        self._spacing: float | None = None
        self._sender_waited, self._sender_inflated = 0.0, False
        self.rtt_min: float | None = None
        self.paused = False
        """Whether messages are left out, such as those of an evaluation."""

    @property
    def route(self) -> Route:
        """Of the messages that are collected."""
        return self._route

    def begin(
        self, route: Route, transport: Transport, iteration: int, *, failed_over: bool = False
    ) -> LinkSample | None:
        """Begin an iteration, or go on in it on another route. All samples of a window have one
        route: returns the old window if the route has changed. ``failed_over``: whether the direct
        route broke."""
        left = None
        if route is not self._route or transport != self._transport:
            left = self.drain()
            self._route, self._transport = route, transport
            self._arrived_at = None
        self._iteration, self._failed_over = iteration, failed_over
        return left

    def arrived(self, at: float, queue: float) -> None:
        """Note the time at which a message arrived, by any one clock, for the spacing of arrivals.
        Call before :meth:`add`."""
        if self._arrived_at is not None and queue > WAITED:
            gap = max(0.0, at - self._arrived_at)
            self._spacing = gap if self._spacing is None else min(gap, self._spacing)
        self._arrived_at = at

    def sent_by(self, waited: float, *, inflated: bool) -> None:
        """Note the load of the sender of a message: seconds for which its threads waited for a
        processor lately, and whether its ops took longer than they can. Call before
        :meth:`add`."""
        self._sender_waited = max(self._sender_waited, waited)
        self._sender_inflated |= inflated

    def add(
        self, wire: float, queue: float, nbytes: int, exact: bool, latency: float | None = None
    ) -> None:
        """Add a message. ``latency``: how long its note took. Negative times, from clock errors,
        count as 0."""
        if len(self._messages) < MAX_WINDOW and not self.paused:
            self._messages.append((wire, queue, nbytes, exact, latency))

    def __bool__(self) -> bool:
        return bool(self._messages)

    def drain(self, waited: float | None = None) -> LinkSample | None:
        """Return the window so far and start a new one. None if it is empty. ``waited``: seconds
        for which this rank's threads have waited for a processor meanwhile."""
        messages, self._messages = self._messages, []
        spacing, self._spacing = self._spacing, None
        sender_waited, self._sender_waited = self._sender_waited, 0.0
        sender_inflated, self._sender_inflated = self._sender_inflated, False
        if not messages:
            return None
        measured, queues, sizes, exactly, latencies = zip(*messages, strict=True)
        wire_times = [max(0.0, each) for each in measured]
        exact = [wire for wire, is_exact in zip(wire_times, exactly, strict=True) if is_exact]
        if len(exact) < ENOUGH_EXACT and 2 * len(exact) < len(messages):
            exact = []
        wires = sorted(exact or wire_times)
        known = [max(0.0, each) for each in latencies if each is not None]
        return LinkSample(
            link=self._link,
            replica=self._replica,
            direction=self._direction,
            route=self._route,
            transport=self._transport,
            iteration=self._iteration,
            bytes=sum(sizes),
            wire=WireTime(
                count=len(messages),
                exact=len(exact),
                min=wires[0],
                p50=wires[len(wires) // 2],
                p99=wires[min(len(wires) - 1, int(0.99 * len(wires)))],
                mean=statistics.fmean(wires),
            ),
            queue_p50=statistics.median([max(0.0, each) for each in queues]),
            spacing=spacing,
            latency=min(known, default=None),
            waited=waited,
            sender_waited=sender_waited,
            sender_inflated=sender_inflated,
            failed_over=self._failed_over,
            rtt_min=self.rtt_min,
        )


@dataclass
class OpClock:
    """When the main thread ran ops. Written by the executor, read by receivers."""

    busy: bool = False
    ended_at: float = 0.0

    def observed(self, stamp: float) -> bool:
        """Whether a receiver thread that took the time ``stamp`` was not delayed by an op."""
        return not self.busy and stamp - self.ended_at > JUST_AFTER


@dataclass
class PeerClock:
    """``offset``: seconds to add to the neighbour's wall clock to get ours; 0 on the same machine.
    ``known``: whether it is; between machines the engine finds it."""

    offset: float = 0.0
    known: bool = True


def record_arrival(
    recorder: LinkRecorder,
    note: Note,
    clock: PeerClock,
    arrived_at: float,
    nbytes: int,
    *,
    exact: bool,
    started_at: float = 0.0,
    noted_at: float | None = None,
) -> None:
    """Record a message's wire time: from the start of its transfer until it was complete and
    usable.

    ``started_at``: when the first byte left, if that is after the note's time. The wire time of a
    message that a fault holds back is exactly the time for which it was held, or longer if it
    arrived later. ``noted_at``: when its note arrived, if that went the same way.
    """
    _, _, _, present, posted_at, start, not_before, held_back, waited, inflated = note
    if present == NOTHING:
        return  # It was sent without its bytes.
    offset = clock.offset
    usable = arrived_at - offset
    if started_at > start and not not_before:
        start = started_at
    if not_before >= usable:
        usable, exact = not_before, True
    queue = start - posted_at
    recorder.arrived(usable, queue)
    latency = None
    if noted_at is not None:
        latency = max(noted_at - offset - start, held_back)
    recorder.sent_by(waited, inflated=inflated)
    recorder.add(usable - start, queue, nbytes, exact, latency)
