"""Texts that status has for people in addition to figures: percents, and times with units."""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import itemgetter

from pipemorph.control import AdaptationRecord, JobView
from pipemorph.views.explanation.explanation_text import (
    estimate_seconds_remaining,
    format_duration,
    format_percent_done,
    format_plan_effect,
    format_short_duration,
)

TIME_REMAINING = "; {} left"
_REMAINING = re.compile(TIME_REMAINING.format("[^;]*") + "$")


def format_progress(view: JobView, iterations: int) -> str | None:
    """Format as ``118 of 1,000 iterations (11%); 0.53 s each, 20% idle, mostly link; 7 min 47 s
    left``. None before the first report of an iteration."""
    if view.iteration_seconds is None:
        return None
    text = f"{view.iteration:,} steps"
    if iterations:
        text = f"{view.iteration:,} of {iterations:,} iterations ({format_done(view, iterations)})"
    text += f"; {view.iteration_seconds:.3g} s each"
    if view.bubble_fraction is not None:
        text += f", {view.bubble_fraction:.0%} idle"
        if view.idle_seconds:
            text += f", mostly {max(view.idle_seconds.items(), key=itemgetter(1))[0]}"
    remaining = _compute_seconds_remaining(view, iterations)
    return (
        text if remaining is None else f"{text}{TIME_REMAINING.format(format_duration(remaining))}"
    )


def format_done(view: JobView, iterations: int) -> str:
    """Format as ``11%``; ``100%`` once the ranks have finished; ``-`` if ``iterations`` is 0, for
    unknown."""
    if not iterations:
        return "-"
    return "100%" if view.state == "finished" else format_percent_done(view.iteration / iterations)


def drop_time_remaining(progress: str | None) -> str | None:
    """Text of :func:`format_progress` without the remaining time."""
    return None if progress is None else _REMAINING.sub("", progress)


def format_time_remaining(view: JobView, iterations: int) -> str | None:
    """Remaining time as ``7m47s``; None unless the ranks train."""
    seconds = _compute_seconds_remaining(view, iterations)
    return None if seconds is None else format_short_duration(seconds)


def _compute_seconds_remaining(view: JobView, iterations: int) -> float | None:
    if view.state != "training":
        return None
    return estimate_seconds_remaining(iterations, view.iteration, view.iteration_seconds)


def format_goodput(fraction: float | None) -> str | None:
    """Format as ``91%``."""
    return None if fraction is None else f"{fraction:.0%}"


def format_gain(records: Sequence[AdaptationRecord]) -> str | None:
    """Promised and measured gain of the newest measured adaptation: ``55%/61%``."""
    for each in reversed(records):
        if each.kind == "adapt" and each.promised is not None and each.measured is not None:
            return "/".join(f"{round(x, 2) + 0.0:.0%}" for x in (each.promised, each.measured))
    return None


def format_effect(record: AdaptationRecord) -> str | None:
    """Effect of a plan change: ``1.37 s became 0.531 s per iteration (55% promised, 61% measured);
    62% idle became 12%``."""
    text = format_plan_effect(
        record.iteration_seconds_before,
        record.iteration_seconds_after,
        record.promised,
        record.measured,
    )
    if text and record.bubble_before is not None and record.bubble_after is not None:
        text += f"; {record.bubble_before:.0%} idle became {record.bubble_after:.0%}"
    return text or None
