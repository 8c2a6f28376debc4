"""What status says for people beside its figures: percent, and times with units."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipemorph.control import AdaptationRecord, JobView
from pipemorph.explain.story import brought, duration, percent_done, seconds_left, short_duration

LEFT = "; {} left"
_LEFT = re.compile(LEFT.format("[^;]*") + "$")


def progress(view: JobView, iterations: int) -> str | None:
    """``118 of 1,000 iterations (11%); 0.53 s each, 20% idle; 7 min 47 s left``. None before the
    first report of an iteration."""
    if view.iteration_seconds is None:
        return None
    text = f"{view.iteration:,} of {iterations:,} iterations ({done(view, iterations)})"
    text += f"; {view.iteration_seconds:.3g} s each"
    if view.bubble_fraction is not None:
        text += f", {view.bubble_fraction:.0%} idle"
    left = _left(view, iterations)
    return text if left is None else f"{text}{LEFT.format(duration(left))}"


def done(view: JobView, iterations: int) -> str:
    """``11%``; ``100%`` once the ranks have finished."""
    return "100%" if view.state == "finished" else percent_done(view.iteration / iterations)


def without_left(progress: str | None) -> str | None:
    """What :func:`progress` said, without the time left."""
    return None if progress is None else _LEFT.sub("", progress)


def left(view: JobView, iterations: int) -> str | None:
    """``7m47s``; None unless the ranks train."""
    seconds = _left(view, iterations)
    return None if seconds is None else short_duration(seconds)


def _left(view: JobView, iterations: int) -> float | None:
    if view.state != "training":
        return None
    return seconds_left(iterations, view.iteration, view.iteration_seconds)


def goodput(fraction: float | None) -> str | None:
    """``91%``"""
    return None if fraction is None else f"{fraction:.0%}"


def gain(records: Sequence[AdaptationRecord]) -> str | None:
    """``55%/61%``: promised and measured, of the newest change for a gain that was measured."""
    for each in reversed(records):
        if each.kind == "adapt" and each.promised is not None and each.measured is not None:
            return "/".join(f"{round(x, 2) + 0.0:.0%}" for x in (each.promised, each.measured))
    return None


def effect(record: AdaptationRecord) -> str | None:
    """``1.37 s became 0.531 s per iteration (55% promised, 61% measured); 62% idle became 12%``"""
    text = brought(
        record.iteration_seconds_before,
        record.iteration_seconds_after,
        record.promised,
        record.measured,
    )
    if text and record.bubble_before is not None and record.bubble_after is not None:
        text += f"; {record.bubble_before:.0%} idle became {record.bubble_after:.0%}"
    return text or None
