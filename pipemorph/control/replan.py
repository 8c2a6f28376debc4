"""A decision as a pure function: what is known and runs now in, what should run out.

It takes from milliseconds to a second, a thousand times what a report takes, so a host with
many jobs has it made in another process: both ends are plain values that can be pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipemorph.control.forecast import Forecast, Option, Situation, best, runnable
from pipemorph.errors import InputError
from pipemorph.planning import Path, Schedule
from pipemorph.spec import JobSpec

Cause = Literal["slow", "worse", "eased", "recovered", "steady", "profile", "restart"]
"""Why the situation deserves another judgement than the last one."""

UNSEEN_CHANGE = 0.25
"""What a change of plan is taken to cost before one was seen, in iterations of the present one."""


@dataclass(frozen=True)
class Replan:
    """All that goes into one decision.

    ``schedule`` and ``paths`` are in effect now, ``home`` and ``first_paths`` are those for
    links that are well. ``lost``: the ranks run a plan that is not known here.
    ``remaining`` iterations are left that a new plan would run, and changing has cost
    ``change_seconds`` so far (None: it was not done yet).
    """

    spec: JobSpec
    cause: Cause
    situation: Situation
    schedule: Schedule
    paths: tuple[Path, ...]
    home: Schedule
    first_paths: tuple[Path, ...]
    in_flight_limits: tuple[int | None, ...]
    lost: bool
    remaining: int
    change_seconds: float | None


@dataclass(frozen=True)
class Proposal:
    """What came of it: the option to change to, or None and why the plan is kept.

    ``present`` is the plan in effect as it is predicted now; None if it is not known. With a
    choice, ``reason`` is what it is worth, where that was weighed.
    """

    chosen: Option | None
    present: Option | None
    reason: str = ""


def propose(asked: Replan) -> Proposal:
    """Predict the present plan and the alternatives on the same measurements, and choose.

    Never raises on account of the situation: where there is no plan, the reason says so.
    """
    forecast = Forecast(asked.spec, asked.situation)
    try:
        present = None if asked.lost else forecast.of(asked.schedule, asked.paths)
        chosen, why = _choose(asked, forecast, present)
    except InputError as error:
        return Proposal(None, None, f"no plan was found: {error}")
    if chosen is None:
        return Proposal(None, present, why)
    dispatch = asked.spec.schedule.dispatch_kind
    broken = runnable(chosen.schedule, asked.in_flight_limits, dispatch)
    if broken is not None:
        return Proposal(None, present, f"the plan for it must not run: {broken}")
    return Proposal(chosen, present, why)


def _choose(asked: Replan, forecast: Forecast, present: Option | None) -> tuple[Option | None, str]:
    """The option to change to and what it is worth, or None and why not."""
    situation = asked.situation
    options = []
    for paths in forecast.path_choices(asked.paths, asked.first_paths):
        options += [forecast.of(asked.home, paths), forecast.fresh(paths)]
    if not any(situation.slow) and not any(situation.unknown):
        return _choose_home(asked, forecast, options, present)
    quickest = best(options)
    if present is None:
        return quickest, ""
    gain = 1 - quickest.seconds / present.seconds if present.seconds > 0 else 0.0
    if gain >= asked.spec.adaptation.min_gain and gain > 0:
        return _if_it_pays(asked, present, quickest)
    # Not quicker; but a link that is well again need not stay off its direct path.
    may_ease = asked.cause in ("steady", "recovered")
    lighter = [
        option
        for option in options
        if may_ease
        and option.delegated < present.delegated
        and option.seconds <= present.seconds
        and (asked.cause == "steady" or _keeps_slow(option, situation))
    ]
    if lighter:
        return best(lighter), ""
    return None, _not_worth(asked, present, gain)


def _choose_home(
    asked: Replan, forecast: Forecast, options: Sequence[Option], present: Option | None
) -> tuple[Option | None, str]:
    """All links are well: the plan of the start, unless measured times ask for another."""
    home = forecast.of(asked.home, asked.first_paths)
    least = 1 - asked.spec.adaptation.min_gain
    quickest = best([home, *options])
    target = quickest if quickest.seconds < home.seconds * least else home
    if present is None:
        return target, ""
    if (target.schedule, target.paths) == (present.schedule, present.paths):
        return None, "kept the plan: it is the one for links that are well"
    returns = target is home and (home.schedule, home.paths) != (asked.schedule, asked.paths)
    if returns:
        return target, ""
    if target.seconds < present.seconds * least:
        return _if_it_pays(asked, present, target)
    return None, _not_worth(asked, present, 1 - target.seconds / present.seconds)


def _if_it_pays(asked: Replan, present: Option, other: Option) -> tuple[Option | None, str]:
    """``other``, if what it saves until the job is done is more than what changing costs."""
    cost = asked.change_seconds
    known = cost is not None
    cost = present.seconds * UNSEEN_CHANGE if cost is None else cost
    saved = (present.seconds - other.seconds) * asked.remaining
    sum_ = (
        f"{shown_time(max(0.0, saved))} over the {max(0, asked.remaining)} iterations left,"
        f" the change {'has cost' if known else 'is taken to cost'} {shown_time(cost)}"
    )
    if saved > cost:
        return other, f"it saves {sum_}"
    return None, f"kept the plan: the best other one saves {sum_}"


def _not_worth(asked: Replan, present: Option, gain: float) -> str:
    return (
        f"kept the plan, predicted {shown_time(present.seconds)} per iteration: the best other"
        f" one saves {max(0.0, gain):.1%}, less than minGain"
        f" {asked.spec.adaptation.min_gain:.1%}"
    )


def _keeps_slow(option: Option, situation: Situation) -> bool:
    """Whether every slow link is delegated."""
    return all(
        path is Path.DELEGATED
        for path, slow in zip(option.paths, situation.slow, strict=True)
        if slow
    )


def shown_time(seconds: float) -> str:
    """For a sentence."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def shown_paths(paths: Sequence[Path]) -> str:
    """For a sentence."""
    moved = [str(i) for i, path in enumerate(paths) if path is Path.DELEGATED]
    if not moved:
        return "all links direct"
    return f"link{'s' * (len(moved) > 1)} {', '.join(moved)} delegated"
