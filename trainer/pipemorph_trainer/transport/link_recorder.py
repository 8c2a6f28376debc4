"""Recorder of the wire times of a direction of a link, until they are reported, and the clocks of
the receiving ends, which decide which times are exact."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

from pipemorph.planning.ir import Route
from pipemorph.protocol import LinkSample, WireTime
from pipemorph_trainer.transport.message import NONE_PRESENT, Direction, Note

Transport = Literal["gloo", "nccl", "tcp", "shm", "rdma"]
ENOUGH_EXACT = 3
"""Exact samples that are enough to represent a window. Fewer are enough if they are half of the
window, since a slow link has one message per window. Otherwise all samples count, as upper
bounds."""
MAX_WINDOW = 4096
QUEUED_SECONDS = 0.001
"""Seconds in the queue from which a message counts as delayed by the previous one."""
WAKE_UP_SECONDS = 0.001
"""Seconds after an op in which a thread that waited for the interpreter may wake up late."""


_Message = tuple[float, float, int, bool, float | None]
"""Arguments of :meth:`LinkRecorder.add_message`."""


class LinkRecorder:
    """Recorder of the messages received in one direction of a link, until they are published."""

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
        """True while messages are not recorded, such as those of an evaluation."""

    @property
    def route(self) -> Route:
        """Route of the recorded messages."""
        return self._route

    def begin_iteration(
        self, route: Route, transport: Transport, iteration: int, *, failed_over: bool = False
    ) -> LinkSample | None:
        """Begin an iteration, or continue it on another route. All samples of a window have one
        route: returns the old window if the route has changed. ``failed_over``: true if the direct
        route broke."""
        window = None
        if route is not self._route or transport != self._transport:
            window = self.drain_window()
            self._route, self._transport = route, transport
            self._arrived_at = None
        self._iteration, self._failed_over = iteration, failed_over
        return window

    def record_arrival_time(self, at: float, queue: float) -> None:
        """Record the arrival time of a message, by any single clock, for the spacing of arrivals.
        Call it before :meth:`add_message`."""
        if self._arrived_at is not None and queue > QUEUED_SECONDS:
            gap = max(0.0, at - self._arrived_at)
            self._spacing = gap if self._spacing is None else min(gap, self._spacing)
        self._arrived_at = at

    def record_sender_load(self, waited: float, *, inflated: bool) -> None:
        """Record the load of a message's sender: seconds for which its threads waited for a
        processor lately, and true if its ops took longer than they should. Call it before
        :meth:`add_message`."""
        self._sender_waited = max(self._sender_waited, waited)
        self._sender_inflated |= inflated

    def add_message(
        self, wire: float, queue: float, nbytes: int, exact: bool, latency: float | None = None
    ) -> None:
        """Add a message. ``latency``: seconds that its note took. Negative times, from clock
        errors, count as 0."""
        if len(self._messages) < MAX_WINDOW and not self.paused:
            self._messages.append((wire, queue, nbytes, exact, latency))

    def __bool__(self) -> bool:
        return bool(self._messages)

    def drain_window(self, waited: float | None = None) -> LinkSample | None:
        """Return the window and start a new one. None if it is empty. ``waited``: seconds for which
        this rank's threads have waited for a processor meanwhile."""
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
    """Clock of the main thread's ops, written by the executor and read by receivers."""

    busy: bool = False
    ended_at: float = 0.0

    def was_undisturbed(self, stamp: float) -> bool:
        """True if no op delayed a receiver thread that took the time ``stamp``."""
        return not self.busy and stamp - self.ended_at > WAKE_UP_SECONDS


@dataclass
class PeerClock:
    """Clock of the neighbour. ``offset``: seconds to add to its wall clock to get ours; 0 on the
    same machine. ``known``: true once it is known; between machines the engine measures it."""

    offset: float = 0.0
    known: bool = True


def record_wire_time(
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
    """Record a message's wire time, from the start of its transfer until it is complete and usable.

    ``started_at``: departure of the first byte, if that is after the note's time. The wire time of
    a message that a fault holds back is exactly the time for which it was held, or longer if it
    arrived later. ``noted_at``: arrival of its note, if the note took the same network path.
    """
    _, _, _, present, posted_at, start, not_before, held_back, waited, inflated = note
    if present == NONE_PRESENT:
        return  # The message was sent without its bytes.
    offset = clock.offset
    usable = arrived_at - offset
    if started_at > start and not not_before:
        start = started_at
    if not_before >= usable:
        usable, exact = not_before, True
    queue = start - posted_at
    recorder.record_arrival_time(usable, queue)
    latency = None
    if noted_at is not None:
        latency = max(noted_at - offset - start, held_back)
    recorder.record_sender_load(waited, inflated=inflated)
    recorder.add_message(usable - start, queue, nbytes, exact, latency)
