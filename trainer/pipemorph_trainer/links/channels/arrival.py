"""What the receiving ends of both routes share: clocks, and when a sample can be trusted."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pipemorph_trainer.links.message import NOTHING, Note
from pipemorph_trainer.links.recorder import LinkRecorder

JUST_AFTER = 0.001
"""Seconds after an op in which a thread that waited for the interpreter still wakes up."""


@dataclass
class OpClock:
    """When the main thread last computed. Written by the executor, read by receivers."""

    busy: bool = False
    ended_at: float = 0.0

    def observed(self, stamp: float) -> bool:
        """Whether a thread that stamped a message ``stamp`` can have been on time."""
        return not self.busy and stamp - self.ended_at > JUST_AFTER


@dataclass
class PeerClock:
    """Seconds to add to the neighbour's wall clock to get ours; 0 on one machine."""

    offset: float = 0.0


def record_arrival(
    recorder: LinkRecorder,
    note: Note,
    clock: PeerClock,
    arrived_at: float,
    nbytes: int,
    *,
    exact: bool,
    started_at: float = 0.0,
) -> None:
    """Add a message's wire time: whole and allowed at the receiver, less start on its queue.

    ``started_at``: when the first byte was seen to leave, if that is after the note's time.
    A message that a fault holds back was on its way for exactly as long as it was held.
    """
    start, usable = max(note.started_at, started_at), arrived_at - clock.offset
    if note.present == NOTHING:
        return  # It travelled without its bytes.
    if note.not_before >= usable:
        start, usable, exact = note.started_at, note.not_before, True
    recorder.add(usable - start, start - note.posted_at, nbytes, exact)


def now() -> float:
    """Wall clock, seconds: what notes carry."""
    return time.time()
