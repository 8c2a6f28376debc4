"""A decision as a pure function: what is known and runs now in, what should run out.

It takes from milliseconds to a second, a thousand times what a report takes, so a host with
many jobs has it made in another process: both ends are plain values that can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.forecast import Forecast, Option, Situation, best, runnable
from pipemorph.control.memory_limits import Limits
from pipemorph.errors import InputError
from pipemorph.planning import Path, Schedule

Cause = Literal["slow", "worse", "eased", "recovered", "steady", "profile", "memory", "restart"]
"""Why the situation deserves another judgement than the last one."""

UNSEEN_CHANGE = 0.25
"""What a change of plan is taken to cost before one was seen, in iterations of the present one."""


@dataclass(frozen=True)
class Replan:
    """All that goes into one decision.

    ``schedule``, ``paths`` and ``limits`` are in effect now; ``home``, ``first_paths`` and
    ``home_limits`` are those for links that are well. ``lost``: the ranks run a plan that is not
    known here.
    ``remaining`` iterations are left that a new plan would run, and changing has cost
    ``change_seconds`` so far (None: it was not done yet).
    """

    spec: JobSpec
    cause: Cause
    situation: Situation
    schedule: Schedule
    paths: tuple[Path, ...]
    limits: Limits
    home: Schedule
    first_paths: tuple[Path, ...]
    home_limits: Limits
    lost: bool
    remaining: int
    change_seconds: float | None


@dataclass(frozen=True)
class Proposal:
    """What came of it: the option to change to, or None and why the plan is kept.

    ``present`` is the plan in effect as it is predicted now; None if it is not known. With a
    choice, ``reason`` is what it is worth, where that was weighed.

    No option that holds more than there is room for is ever chosen; and where the plan in effect
    does, the best that does not is, whatever it costs.
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
        present = None
        if not asked.lost:
            present = forecast.of(asked.schedule, asked.paths, asked.limits)
        options = _options(asked, forecast)
        chosen, why = _choose(asked, forecast, options, present)
    except InputError as error:
        return Proposal(None, None, f"no plan was found: {error}")
    why = "; ".join(part for part in (why, *_weighed(asked.situation, options)) if part)
    if chosen is None:
        return Proposal(None, present, why)
    dispatch = asked.spec.schedule.dispatch_kind
    broken = runnable(chosen.schedule, chosen.limits, dispatch)
    broken = broken or forecast.excess(chosen.schedule, chosen.limits)
    if broken is not None:
        return Proposal(None, present, f"the plan for it must not run: {broken}")
    return Proposal(chosen, present, why)


def _options(asked: Replan, forecast: Forecast) -> list[Option]:
    """All that could run. Raises :class:`InputError` where nothing can."""
    options = []
    for paths in forecast.path_choices(asked.paths, asked.first_paths):
        if forecast.excess(asked.home, asked.home_limits) is None:
            options.append(forecast.of(asked.home, paths, asked.home_limits))
        options += forecast.fresh(paths)
    return options


def _choose(
    asked: Replan, forecast: Forecast, options: Sequence[Option], present: Option | None
) -> tuple[Option | None, str]:
    """The option to change to and what it is worth, or None and why not."""
    situation = asked.situation
    if present is not None:
        too_much = forecast.excess(present.schedule, present.limits)
        if too_much is not None:
            return best(options), f"the present plan must not stay: {too_much}"
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
    least = 1 - asked.spec.adaptation.min_gain
    target, home = best(options), None
    if forecast.excess(asked.home, asked.home_limits) is None:
        home = forecast.of(asked.home, asked.first_paths, asked.home_limits)
        target = best([home, *options])
        target = target if target.seconds < home.seconds * least else home
    if present is None:
        return target, ""
    if _same(target, present):
        return None, "kept the plan: it is the one for links that are well"
    if target is home:
        return target, ""
    if target.seconds < present.seconds * least:
        return _if_it_pays(asked, present, target)
    return None, _not_worth(asked, present, 1 - target.seconds / present.seconds)


def _same(one: Option, other: Option) -> bool:
    return (one.schedule, one.paths, one.limits.device) == (
        other.schedule,
        other.paths,
        other.limits.device,
    )


def _weighed(situation: Situation, options: Sequence[Option]) -> Iterator[str]:
    """What offload, fused backwards and the memory of the device do here, for the reason."""
    away = [option for option in options if option.limits.offloading]
    here = [option for option in options if not option.limits.offloading]
    if away:
        quickest = min(away, key=lambda option: option.seconds)
        stages = quickest.limits.offloading
        # There and back.
        copies = 2 * max(situation.stages[i].offload_copy or 0.0 for i in stages)
        others = min((option.seconds for option in here), default=None)
        worth = "is what it takes to have a plan"
        if others is not None:
            worth = _saves(others - quickest.seconds)
        yield (
            f"offload on {shown_stages(stages)} costs {shown_time(copies)} per copied microbatch"
            f" and {worth}"
        )
    fused = [option for option in here if option.fused]
    split = [option.seconds for option in here if not option.fused]
    if fused and split:
        quickest = min(fused, key=lambda option: option.seconds)
        yield (
            f"a fused backward on {shown_stages(quickest.fused)}"
            f" {_saves(min(split) - quickest.seconds)}"
        )
    bound = [i for i, room in enumerate(situation.rooms) if room.by_memory]
    binds = [
        i
        for i in bound
        if any(
            option.limits.device[i] is not None
            or option.schedule.in_flight_peak()[i] == situation.rooms[i].device
            for option in options
        )
    ]
    if binds:
        counts = sorted({situation.rooms[i].device or 0 for i in binds})
        most = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        yield f"activationMemory has room for {most} microbatches on {shown_stages(binds)}"


def _saves(seconds: float) -> str:
    return f"saves {shown_time(seconds)}" if seconds > 0 else "saves nothing"


def shown_stages(stages: Sequence[int]) -> str:
    """For a sentence: ``stages 0-5, 8``. ``stages`` in rising order."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and stage == runs[-1][-1] + 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
    return f"stage{'s' * (len(stages) > 1)} {', '.join(parts)}"


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
