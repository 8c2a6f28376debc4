"""A decision as a pure function: what is known and runs now in, what should run out.

It takes from milliseconds to a second, a thousand times what a report takes, so a host with
many jobs has it made in another process: both ends are plain values that can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.forecast import Forecast, Option, Situation, best, runnable
from pipemorph.errors import InputError
from pipemorph.planning import Path, Plan

Cause = Literal["slow", "worse", "eased", "recovered", "steady", "profile", "memory", "restart"]
"""Why the situation deserves another judgement than the last one."""

UNSEEN_CHANGE = 0.25
"""What a change of plan is taken to cost before one was seen, in iterations of the present one."""


@dataclass(frozen=True)
class Replan:
    """All that goes into one decision.

    ``current`` is the plan in effect, ``baseline`` the one for links that are well. ``lost``: the
    ranks run a plan that is not known here.
    ``remaining`` iterations are left that a new plan would run, and changing has cost
    ``change_seconds`` so far (None: it was not done yet).
    """

    spec: JobSpec
    cause: Cause
    situation: Situation
    current: Plan
    baseline: Plan
    lost: bool
    remaining: int
    change_seconds: float | None


@dataclass(frozen=True)
class Proposal:
    """What came of it: the option to change to, or None and why the plan is kept.

    ``current`` is the plan in effect as it is predicted now; None if it is not known. With a
    choice, ``reason`` is what it is worth, where that was weighed.

    No option that holds more than there is room for is ever chosen; and where the plan in effect
    does, the best that does not is, whatever it costs.
    """

    chosen: Option | None
    current: Option | None
    reason: str = ""


def propose(asked: Replan) -> Proposal:
    """Predict the current plan and the alternatives on the same measurements, and choose.

    Never raises on account of the situation: where there is no plan, the reason says so.
    """
    forecast = Forecast(asked.spec, asked.situation)
    try:
        current = None if asked.lost else forecast.of(asked.current)
        options = _options(asked, forecast)
        chosen, why = _choose(asked, forecast, options, current)
    except InputError as error:
        return Proposal(None, None, f"no plan was found: {error}")
    why = "; ".join(part for part in (why, *_weighed(asked.situation, options)) if part)
    if chosen is None:
        return Proposal(None, current, why)
    broken = runnable(chosen.plan) or forecast.excess(chosen.plan)
    if broken is not None:
        return Proposal(None, current, f"the plan for it must not run: {broken}")
    return Proposal(chosen, current, why)


def _options(asked: Replan, forecast: Forecast) -> list[Option]:
    """All that could run. Raises :class:`InputError` where nothing can."""
    options = []
    for paths in forecast.path_choices(asked.current.paths, asked.baseline.paths):
        if forecast.excess(asked.baseline) is None:
            options.append(forecast.of(replace(asked.baseline, paths=paths)))
        options += forecast.fresh(paths)
    return options


def _choose(
    asked: Replan, forecast: Forecast, options: Sequence[Option], current: Option | None
) -> tuple[Option | None, str]:
    """The option to change to and what it is worth, or None and why not."""
    situation = asked.situation
    if current is not None:
        too_much = forecast.excess(current.plan)
        if too_much is not None:
            return best(options), f"the present plan must not stay: {too_much}"
    if not any(situation.slow) and not any(situation.unknown):
        return _choose_baseline(asked, forecast, options, current)
    quickest = best(options)
    if current is None:
        return quickest, ""
    gain = 1 - quickest.seconds / current.seconds if current.seconds > 0 else 0.0
    if gain >= asked.spec.adaptation.min_gain and gain > 0:
        return _if_it_pays(asked, current, quickest)
    # Not quicker; but a link that is well again need not stay off its direct path.
    may_ease = asked.cause in ("steady", "recovered")
    lighter = [
        option
        for option in options
        if may_ease
        and len(option.plan.delegated) < len(current.plan.delegated)
        and option.seconds <= current.seconds
        and (asked.cause == "steady" or _keeps_slow(option, situation))
    ]
    if lighter:
        return best(lighter), ""
    return None, _not_worth(asked, current, gain)


def _choose_baseline(
    asked: Replan, forecast: Forecast, options: Sequence[Option], current: Option | None
) -> tuple[Option | None, str]:
    """All links are well: the plan of the start, unless measured times ask for another."""
    least = 1 - asked.spec.adaptation.min_gain
    target, baseline = best(options), None
    if forecast.excess(asked.baseline) is None:
        baseline = forecast.of(asked.baseline)
        target = best([baseline, *options])
        target = target if target.seconds < baseline.seconds * least else baseline
    if current is None:
        return target, ""
    if target.plan.runs_as(current.plan):
        return None, "kept the plan: it is the one for links that are well"
    if target is baseline:
        return target, ""
    if target.seconds < current.seconds * least:
        return _if_it_pays(asked, current, target)
    return None, _not_worth(asked, current, 1 - target.seconds / current.seconds)


def _weighed(situation: Situation, options: Sequence[Option]) -> Iterator[str]:
    """What offload, fused backwards and the memory of the device do here, for the reason."""
    away = [option for option in options if option.plan.offloading]
    here = [option for option in options if not option.plan.offloading]
    if away:
        quickest = min(away, key=lambda option: option.seconds)
        stages = quickest.plan.offloading
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
    fused = [option for option in here if option.plan.fused]
    split = [option.seconds for option in here if not option.plan.fused]
    if fused and split:
        quickest = min(fused, key=lambda option: option.seconds)
        yield (
            f"a fused backward on {shown_stages(quickest.plan.fused)}"
            f" {_saves(min(split) - quickest.seconds)}"
        )
    bound = [i for i, room in enumerate(situation.rooms) if room.by_memory]
    binds = [
        i
        for i in bound
        if any(
            option.plan.device_limits[i] is not None
            or option.plan.schedule.in_flight_peak()[i] == situation.rooms[i].device
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


def _if_it_pays(asked: Replan, current: Option, other: Option) -> tuple[Option | None, str]:
    """``other``, if what it saves until the job is done is more than what changing costs."""
    cost = asked.change_seconds
    known = cost is not None
    cost = current.seconds * UNSEEN_CHANGE if cost is None else cost
    saved = (current.seconds - other.seconds) * asked.remaining
    sum_ = (
        f"{shown_time(max(0.0, saved))} over the {max(0, asked.remaining)} iterations left,"
        f" the change {'has cost' if known else 'is taken to cost'} {shown_time(cost)}"
    )
    if saved > cost:
        return other, f"it saves {sum_}"
    return None, f"kept the plan: the best other one saves {sum_}"


def _not_worth(asked: Replan, current: Option, gain: float) -> str:
    return (
        f"kept the plan, predicted {shown_time(current.seconds)} per iteration: the best other"
        f" one saves {max(0.0, gain):.1%}, less than minGain"
        f" {asked.spec.adaptation.min_gain:.1%}"
    )


def _keeps_slow(option: Option, situation: Situation) -> bool:
    """Whether every slow link is delegated."""
    return all(
        path is Path.DELEGATED
        for path, slow in zip(option.plan.paths, situation.slow, strict=True)
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
