"""Clocks of the receiving ends of both routes, and which samples are exact."""

from __future__ import annotations

from dataclasses import dataclass

from pipemorph_trainer.links.message import NOTHING, Note
from pipemorph_trainer.links.recorder import LinkRecorder

JUST_AFTER = 0.001
"""Seconds after an op in which a thread that waited for the interpreter may wake up late."""


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
