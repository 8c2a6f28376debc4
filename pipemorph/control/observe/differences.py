"""Which differences between what was told and what is new are worth telling, and how soon."""

from __future__ import annotations

from pipemorph.control.observe.news import Change
from pipemorph.wire import DirectionState, LinkState, ReductionHealth, StageState, StragglersView
from pipemorph.wire.parts import Pace

PACE_MOVED = 0.025
"""Relative change of a rank's pace that is worth telling."""
MATERIAL = 1 / 16
"""Relative change of a delay that the host has to know at once: one of a quarter may ask for
another plan, and it need not be since the last report."""
NOTICEABLE, PLANNED = 0.05, 0.01
"""Relative changes of a time, and of one that plans are made of, that are worth telling at all."""


def direction_differs(told: DirectionState, new: DirectionState, min_delay: float) -> Change:
    """``min_delay``: seconds below which a change of a delay is noise."""
    if new.health != told.health or bool(new.recent) != bool(told.recent):
        return Change.NOW
    if new.failed_over != told.failed_over:
        return Change.NOW
    least = max(min_delay / 4, MATERIAL * told.delay)
    moved = max(abs(new.delay - told.delay), abs(new.transfer - told.transfer))
    if moved > least or (told.in_doubt and not new.in_doubt):
        return Change.NOW
    return Change.NONE if new == told else Change.LATER


def link_differs(told: LinkState, new: LinkState) -> Change:
    if new.health != told.health:
        return Change.NOW
    same = new.since_iteration == told.since_iteration
    same = same and new.failed_over == told.failed_over
    same = same and abs(new.confidence - told.confidence) <= NOTICEABLE
    moved = abs(new.wire_time - told.wire_time) > PLANNED * told.wire_time
    return Change.LATER if moved or not same else Change.NONE


def stage_differs(told: StageState, new: StageState) -> Change:
    scale = max(told.forward, told.backward_input + told.backward_weight)
    for name in ("forward", "backward_input", "backward_weight", "fused_backward"):
        before, now = getattr(told, name), getattr(new, name)
        if (before is None) != (now is None):
            return Change.LATER
        if before is not None and abs(now - before) > PLANNED * scale:
            return Change.LATER
    exact = ("activation_bytes", "input_bytes", "peak_memory", "crowding")
    if any(getattr(told, name) != getattr(new, name) for name in exact):
        return Change.LATER
    copy = _near(told.offload_copy or 0.0, new.offload_copy or 0.0)
    return Change.NONE if copy else Change.LATER


def reduction_differs(told: ReductionHealth, new: ReductionHealth) -> Change:
    if new.slow != told.slow or new.slowest != told.slowest:
        return Change.NOW
    same = (new.bytes, new.normal is None) == (told.bytes, told.normal is None)
    pairs = (
        (told.seconds, new.seconds),
        (told.exposed, new.exposed),
        (told.normal or 0.0, new.normal or 0.0),
    )
    return Change.NONE if same and all(_near(*pair) for pair in pairs) else Change.LATER


def stragglers_differ(told: StragglersView, new: StragglersView) -> Change:
    if (told.known, told.count) != (new.known, new.count):
        return Change.LATER
    named = [[(s.stage, s.column, s.clock) for s in view.slowest] for view in (told, new)]
    if named[0] != named[1]:
        return Change.LATER
    times = [
        [time for s in view.slowest for time in (s.seconds, s.usual)] + list(view.paces)
        for view in (told, new)
    ]
    same = all(map(_near, *times)) if len(times[0]) == len(times[1]) else False
    return Change.NONE if same else Change.LATER


def pace_differs(told: Pace, new: Pace) -> Change:
    same = (told.settled, told.clock) == (new.settled, new.clock)
    moved = abs(new.seconds - told.seconds) > PACE_MOVED * told.seconds
    return Change.LATER if moved or not same else Change.NONE


def unlike(told: object, new: object) -> Change:
    return Change.NONE if told == new else Change.LATER


def _near(told: float, new: float) -> bool:
    return abs(new - told) <= NOTICEABLE * told
