"""Makes a decision, as a pure function from measurements and the current plan to a proposal.

It takes from milliseconds to a second, a thousand times as long as a report. So a host with many
jobs runs it in another process: input and output are plain values that can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, sqrt
from statistics import median
from typing import NamedTuple

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide import truth
from pipemorph.control.decide.forecast import SAME, Forecast, Option, runnable
from pipemorph.control.decide.situation import Cause, Situation
from pipemorph.control.decide.truth import Evidence, Promise
from pipemorph.control.observed.stages import Excess
from pipemorph.control.record.history import Saving
from pipemorph.errors import InputError
from pipemorph.planning import Plan, Route
from pipemorph.planning.offload import left

CHECKED: frozenset[Cause] = frozenset(
    {"slow", "worse", "eased", "varies", "steady", "profile", "barrier"}
)
"""Causes of changes for a gain, which measured iterations can confirm. When a link has recovered,
the plan for healthy links returns even if it is no faster."""

UNHURRIED: frozenset[Cause] = frozenset({"eased", "varies", "steady", "profile", "barrier"})
"""Causes for which nothing new was measured: a change must gain more than what predictions miss."""

MAY_EASE: frozenset[Cause] = frozenset({"steady", "recovered"})
"""Causes for which a plan that is no faster may replace the current one: with fewer links
delegated."""

APART = 0.05
"""Least part of an iteration by which a slow link must show in it, for its measured time to say
whether the link is slow: times without a fault differ by less."""
UNSEEN_CHANGE = 0.25
"""Assumed cost of a change of plan before one was measured, in iterations of the current plan."""


# --- findings: `reasons` turns them into text. Times in seconds, stages in ascending order ---


@dataclass(frozen=True)
class NoPlan:
    """The planner found no plan, for the reason ``why``."""

    why: str


@dataclass(frozen=True)
class MustNotRun:
    """The chosen plan fails the final check."""

    why: str | Excess


@dataclass(frozen=True)
class MustNotStay:
    """The current plan exceeds a memory limit: the best other plan replaces it, at any cost."""

    excess: Excess


@dataclass(frozen=True)
class AtBaseline:
    """The current plan is already the one for healthy links."""


@dataclass(frozen=True)
class TooLittle:
    """The best other plan saves too little: a fraction ``gain`` of an iteration of ``seconds``,
    which is less than the required ``least``."""

    seconds: float
    gain: float
    least: float


@dataclass(frozen=True)
class Saves:
    """Seconds that the best other plan saves over the remaining ``iterations``, and the ``cost`` of
    the change: measured at earlier changes if ``cost_seen``, else assumed. ``iterations`` is None
    where no end is known: then ``seconds`` are of one iteration, and any pay in the long run."""

    seconds: float
    iterations: int | None
    cost: float
    cost_seen: bool

    @property
    def net(self) -> float:
        return self.seconds - self.cost

    @property
    def pays(self) -> bool:
        return self.seconds > (0.0 if self.iterations is None else self.cost)


@dataclass(frozen=True)
class NotConfirmed:
    """Measured iterations do not confirm what a change is based on. ``expected``: predicted time of
    an iteration of the current plan, overhead included; ``gain``: seconds that the change would
    save; ``measured``: median of the ``iterations`` in this state, None if there are too few."""

    expected: float
    gain: float
    iterations: int
    measured: float | None


@dataclass(frozen=True)
class Missing:
    """A change would save ``gain`` seconds, which is less than the prediction ``missed`` of
    iterations in this state."""

    gain: float
    missed: float


@dataclass(frozen=True)
class GoesBack:
    """The last change did not bring its promise: the plan before it returns, unless it would be
    slower (``slower``)."""

    slower: bool


@dataclass(frozen=True)
class Eases:
    """The best other plan is no slower, and delegates fewer links."""


@dataclass(frozen=True)
class OffloadWeighed:
    """Offload on some stages. ``copies``: time per microbatch, both ways; ``saves``: time saved per
    iteration, None if there is no plan without offload."""

    stages: tuple[int, ...]
    copies: float
    saves: float | None


@dataclass(frozen=True)
class RecomputeWeighed:
    """Recomputation on some stages. ``forwards``: number of forwards that run again in an
    iteration; ``saves``: time saved per iteration, None if there is no plan without."""

    stages: tuple[int, ...]
    forwards: int
    saves: float | None


@dataclass(frozen=True)
class FusedWeighed:
    """Fused backwards on some stages. ``saves``: time saved per iteration."""

    stages: tuple[int, ...]
    saves: float


@dataclass(frozen=True)
class MemoryBinds:
    """``activationMemory`` limits the plans on some stages, to between ``least`` and ``most``
    microbatches."""

    stages: tuple[int, ...]
    least: int
    most: int


Finding = (
    NoPlan
    | MustNotRun
    | MustNotStay
    | AtBaseline
    | TooLittle
    | Saves
    | NotConfirmed
    | Missing
    | GoesBack
    | Eases
    | OffloadWeighed
    | RecomputeWeighed
    | FusedWeighed
    | MemoryBinds
)


# --- a decision ---


class Past(NamedTuple):
    """A plan that iterations ran before the decision, and the links that were slow in these."""

    plan: Plan
    slow: frozenset[int]


@dataclass(frozen=True)
class Replan:
    """The input of one decision.

    ``current``: the newest plan; ``running``: the plan in effect, which is another one as long as
    ranks have not changed to the newest; ``baseline``: the plan for healthy links; ``lost``: the
    ranks run a plan that the controller does not know; ``start``: the plan of the start, which the
    job would still have if nothing had ever been changed; ``remaining``: iterations that a new plan
    would run, None if no end is known; ``change_seconds``: measured cost of a change, None before
    the first one; ``previous``: the plan before the current one, for cause ``undelivered``, and
    ``measured``: seconds of an iteration under it and under the current one, if it was faster.
    ``past``: plans and slow links since these last changed.
    """

    spec: JobSpec
    cause: Cause
    situation: Situation
    current: Plan
    running: Plan
    baseline: Plan
    lost: bool
    remaining: int | None
    change_seconds: float | None
    evidence: Evidence
    start: Plan | None = None
    past: tuple[Past, ...] = ()
    previous: Plan | None = None
    measured: tuple[float, float] | None = None
    moved: bool = False
    """Whether the wire times of links that are well are others than those of the last decision."""


@dataclass(frozen=True)
class Proposal:
    """The result of a decision. ``chosen``: the option to change to; None keeps the plan.

    ``current``: the plan in effect with its predicted time, None if unknown. ``found``: the
    findings that the choice is based on, the decisive one first. ``promise``: of a chosen option
    that is for a gain. ``waits``: the cause must come up again, with more measured iterations.
    ``returns_at_once``: once links are well, another iteration under the chosen plan costs more
    than one without it if they are not. ``saving``: of the plan to change to, else of the current
    one; None if it does not matter; ``past``: of each past plan. ``overhead``: seconds that an
    iteration takes beyond all of these.

    An option that exceeds the memory limits is never chosen. If the plan in effect exceeds them,
    the best option that does not replaces it, whatever it costs.
    """

    chosen: Option | None
    current: Option | None
    found: tuple[Finding, ...]
    promise: Promise | None = None
    waits: bool = False
    returns_at_once: bool = False
    saving: Saving | None = None
    past: tuple[Saving, ...] = ()
    overhead: float = 0.0

    @property
    def predicted(self) -> tuple[float | None, float]:
        """Seconds of an iteration, overhead included, with the plan in effect, None if unknown, and
        with the chosen one: what is promised, and what measured iterations are compared with."""
        if self.promise is not None:
            return self.promise.before, self.promise.after
        assert self.chosen is not None, "no change"
        before = None if self.current is None else self.current.seconds + self.overhead
        return before, self.chosen.seconds + self.overhead


def propose(asked: Replan) -> Proposal:
    """Predict the current plan and the alternatives on the same measurements, and choose.

    Does not raise if there is no plan for the situation: then the findings say so.
    """
    forecast = Forecast(asked.spec, asked.situation, asked.baseline.dispatch)
    proposal = _propose(asked, forecast)
    if proposal.chosen is not None:
        proposal = replace(proposal, overhead=truth.overhead_of(forecast, asked.evidence))
    option = proposal.chosen or proposal.current
    if asked.start is None or proposal.waits or option is None:
        return proposal
    if forecast.excess(asked.start) is not None:
        return proposal  # The job could not run it any more, so nothing is to be compared with.
    now = frozenset(link for link, slow in enumerate(asked.situation.slow) if slow)
    return replace(
        proposal,
        saving=_saving(forecast, asked, Past(option.plan, now)),
        past=tuple(_saving(forecast, asked, each) for each in asked.past),
    )


def _saving(forecast: Forecast, asked: Replan, past: Past) -> Saving:
    """Saving of an iteration under a plan while some of the slow links are slow."""
    assert asked.start is not None
    then = _with_slow(forecast, asked.situation, past.slow)
    well = _with_slow(forecast, asked.situation, frozenset())
    slow, healthy = (
        (each.of(asked.start).seconds, each.of(past.plan).seconds) for each in (then, well)
    )
    apart = slow[1] - healthy[1]
    return Saving(
        seconds=slow[0] - slow[1],
        fault_cost=slow[0] - healthy[0],
        if_well=healthy[0] - healthy[1],
        well_below=healthy[1] + apart / 3 if apart >= APART * slow[1] else 0.0,
    )


def _with_slow(forecast: Forecast, now: Situation, slow: frozenset[int]) -> Forecast:
    """Predictions for the situation if only these of its slow links are slow."""
    ended = any(is_slow and link not in slow for link, is_slow in enumerate(now.slow))
    return forecast.under(now.well(slow)) if ended else forecast


def _propose(asked: Replan, forecast: Forecast) -> Proposal:
    try:
        current = None if asked.lost else forecast.of(asked.current)
        if asked.cause == "weigh":
            return Proposal(None, current, ())
        if asked.previous is not None and current is not None:
            return _go_back(asked, asked.previous, forecast, current)
        options = _options(asked, forecast, current)
        chosen, why = _choose(asked, forecast, options, current)
    except InputError as error:
        return Proposal(None, None, (NoPlan(str(error)),))
    found = (*([why] if why else []), *_weighed(asked.situation, options))
    if chosen is None:
        return Proposal(None, current, found)
    hurries = _returns_at_once(asked, forecast, chosen)
    broken = runnable(chosen.plan) or forecast.excess(chosen.plan)
    if broken is not None:
        return Proposal(None, current, (MustNotRun(broken),))
    if isinstance(why, Eases) and current is not None:
        promised = truth.promise(forecast, current, chosen, asked.evidence)
        promised = replace(promised, before=promised.after)  # It must only not be slower.
        return Proposal(chosen, current, found, promised, returns_at_once=hurries)
    if current is None or asked.cause not in CHECKED or not current.seconds > chosen.seconds:
        return Proposal(chosen, current, found, returns_at_once=hurries)
    running = current if asked.running == asked.current else forecast.of(asked.running)
    promised = truth.promise(forecast, running, chosen, asked.evidence)
    if promised.seconds <= 0:
        return Proposal(chosen, current, found, returns_at_once=hurries)
    if asked.cause in UNHURRIED and promised.seconds <= promised.missed:
        return Proposal(None, current, (Missing(promised.seconds, promised.missed),))
    objection = _objection(promised, asked.evidence)
    if objection is not None:
        return Proposal(None, current, (objection,), waits=True)
    return Proposal(chosen, current, found, promised, returns_at_once=hurries)


def _objection(promised: Promise, evidence: Evidence) -> NotConfirmed | None:
    """Why the change must wait for more measured iterations; None if it need not."""
    newest = evidence.measured[-truth.MOST :]
    count = len(newest)
    if evidence.overdue:
        return None
    if count:
        measured = median(newest)
        allowed = promised.seconds + truth.SIGMAS * promised.spread / sqrt(count)
        # Shorter than predicted: the disturbance is not there. Longer: there is more than what was
        # found, which is no reason to wait.
        if promised.before - measured > allowed:
            return NotConfirmed(promised.before, promised.seconds, count, measured)
    if count < _needed(promised):
        return NotConfirmed(promised.before, promised.seconds, count, None)
    return None


def _needed(promised: Promise) -> int:
    """Iterations needed to see the gain in the noise of iteration times."""
    noise = truth.SIGMAS * promised.spread
    if noise <= promised.seconds:
        return 0
    return min(truth.MOST, ceil((noise / promised.seconds) ** 2))


def _returns_at_once(asked: Replan, forecast: Forecast, chosen: Option) -> bool:
    """See :class:`Proposal`. Not if delays vary: then a link that seems well is slow again soon."""
    situation, baseline = asked.situation, asked.baseline
    if not any(situation.slow) or any(situation.recent):
        return False
    well = forecast.under(situation.well())
    waits = well.of(chosen.plan).seconds - well.of(baseline).seconds
    return waits > forecast.of(baseline).seconds - chosen.seconds


def _go_back(asked: Replan, previous: Plan, forecast: Forecast, current: Option) -> Proposal:
    """The plan before the last change, if it is valid, and measured or predicted to be no
    slower. Where it was measured, that is what is promised."""
    broken = runnable(previous) or forecast.excess(previous)
    if broken is not None:
        return Proposal(None, current, (MustNotRun(broken),))
    option = forecast.of(previous)
    if asked.measured is not None:
        faster, now = asked.measured
        return Proposal(option, current, (GoesBack(False),), Promise(now, faster))
    slower = option.seconds > current.seconds * (1 + SAME)
    return Proposal(None if slower else option, current, (GoesBack(slower),))


def _options(asked: Replan, forecast: Forecast, current: Option | None) -> list[Option]:
    """All plans that could run and be chosen. Raises :class:`InputError` if there is no plan."""
    options: list[Option] = []
    choices = forecast.route_choices(asked.current.routes, asked.baseline.routes)
    # Mostly the fastest first: where no plan comes near it, none is looked for.
    for routes in sorted(choices, key=lambda each: -each.count(Route.DELEGATED)):
        if forecast.excess(asked.baseline) is None:
            options.append(forecast.of(replace(asked.baseline, routes=routes)))
        within = min((option.seconds for option in options), default=inf) * (1 + SAME)
        if current is not None and asked.cause in MAY_EASE:
            within = max(within, current.seconds)
        options += forecast.fresh(routes, within)
    # First, since the first of equals is chosen.
    return [*forecast.longer_searched(forecast.best(options)), *options]


def _choose(
    asked: Replan, forecast: Forecast, options: Sequence[Option], current: Option | None
) -> tuple[Option | None, Finding | None]:
    """The option to change to, or None, and the decisive finding."""
    situation = asked.situation
    if current is not None:
        too_much = forecast.excess(current.plan)
        if too_much is not None:
            return forecast.best(options), MustNotStay(too_much)
    if not any(situation.slow) and not any(situation.unknown):
        return _choose_baseline(asked, forecast, options, current)
    quickest = forecast.best(options)
    if current is None:
        return quickest, None
    gain = 1 - quickest.seconds / current.seconds if current.seconds > 0 else 0.0
    least = asked.spec.adaptation.min_gain
    if asked.cause == "varies":
        # The current plan was made for a delay that does not.
        least = min(least, SAME)
    if gain >= least and gain > 0:
        return _if_it_pays(asked, current, quickest)
    # Not faster, but a recovered link can return to its direct route.
    may_ease = asked.cause in MAY_EASE
    lighter = [
        option
        for option in options
        if may_ease
        and len(option.plan.delegated) < len(current.plan.delegated)
        and forecast.stays_as_fast(option, current)
        and (asked.cause == "steady" or _keeps_slow(option, situation))
    ]
    if lighter:
        return forecast.best(lighter), Eases()
    return None, TooLittle(current.seconds, gain, least)


def _choose_baseline(
    asked: Replan, forecast: Forecast, options: Sequence[Option], current: Option | None
) -> tuple[Option | None, Finding | None]:
    """Choose for healthy links: the baseline plan, unless another one is fast enough to replace
    it."""
    min_gain = asked.spec.adaptation.min_gain
    if asked.cause == "barrier" or asked.moved:
        # The plan for healthy links was made short for something else.
        min_gain = min(min_gain, SAME)
    least = 1 - min_gain
    target, baseline = forecast.best(options), None
    if forecast.excess(asked.baseline) is None:
        baseline = forecast.of(asked.baseline)
        target = forecast.best([baseline, *options])
        target = target if target.seconds < baseline.seconds * least else baseline
    if current is None:
        return target, None
    if target.plan.runs_as(current.plan):
        return None, AtBaseline()
    if target is baseline:
        return target, None
    if target.seconds < current.seconds * least:
        return _if_it_pays(asked, current, target)
    gain = 1 - target.seconds / current.seconds
    return None, TooLittle(current.seconds, gain, min_gain)


def _if_it_pays(
    asked: Replan, current: Option, other: Option
) -> tuple[Option | None, Finding | None]:
    """``other``, if it saves more until the end of the job than the change costs."""
    seen, gain = asked.change_seconds, current.seconds - other.seconds
    found = Saves(
        seconds=gain if asked.remaining is None else gain * asked.remaining,
        iterations=asked.remaining,
        cost=current.seconds * UNSEEN_CHANGE if seen is None else seen,
        cost_seen=seen is not None,
    )
    return other if found.pays else None, found


def _weighed(situation: Situation, options: Sequence[Option]) -> Iterator[Finding]:
    """Findings about offload, recomputation, fused backwards and device memory."""
    away = [option for option in options if option.plan.offloading]
    again = [option for option in options if option.plan.recomputing]
    here = [each for each in options if not each.plan.offloading and not each.plan.recomputing]
    others = min((option.seconds for option in here), default=None)
    if away:
        quickest = min(away, key=lambda option: option.seconds)
        stages = quickest.plan.offloading
        # Both ways.
        copies = 2 * max(situation.stages[i].offload_copy or 0.0 for i in stages)
        yield OffloadWeighed(stages, copies, None if others is None else others - quickest.seconds)
    if again:
        quickest = min(again, key=lambda option: option.seconds)
        drawn = quickest.plan
        runs = sum(left(drawn.schedule, drawn.device_limits, drawn.recompute).recomputed)
        saves = None if others is None else others - quickest.seconds
        yield RecomputeWeighed(drawn.recomputing, runs, saves)
    fused = [option for option in here if option.plan.schedule.fused]
    split = [option.seconds for option in here if not option.plan.schedule.fused]
    if fused and split:
        quickest = min(fused, key=lambda option: option.seconds)
        yield FusedWeighed(quickest.plan.schedule.fused, min(split) - quickest.seconds)
    binds = tuple(
        i
        for i, room in enumerate(situation.rooms)
        if room.by_memory
        and any(
            option.plan.device_limits[i] is not None
            or option.plan.schedule.in_flight_peak()[i] == room.device
            for option in options
        )
    )
    if binds:
        counts = [situation.rooms[i].device or 0 for i in binds]
        yield MemoryBinds(binds, min(counts), max(counts))


def _keeps_slow(option: Option, situation: Situation) -> bool:
    """Whether every slow link is delegated."""
    return all(
        route is Route.DELEGATED
        for route, slow in zip(situation.carried(option.plan.routes), situation.slow, strict=True)
        if slow
    )
