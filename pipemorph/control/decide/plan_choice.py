"""Decides on a plan: a pure function from measurements and the current plan to a proposal.

A decision takes from milliseconds to a second, a thousand times as long as a report. So a host with
many jobs runs it in another process: input and output are plain values that can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, sqrt
from statistics import median
from typing import NamedTuple

from pipemorph.control.decide import prediction_check
from pipemorph.control.decide.forecast import EQUAL_WITHIN, Forecast, PlanOption, find_plan_error
from pipemorph.control.decide.prediction_check import PromisedTimes, SituationEvidence
from pipemorph.control.decide.replica_shares import compute_slowness
from pipemorph.control.decide.situation import Cause, Situation
from pipemorph.control.history.job_history import Saving
from pipemorph.control.job_state.stages import MemoryExcess
from pipemorph.errors import InputError
from pipemorph.planning import Plan, Route
from pipemorph.planning.offload import count_away_microbatches
from pipemorph.spec.job_spec import JobSpec

CONFIRMABLE_CAUSES: frozenset[Cause] = frozenset(
    {"slow", "worse", "eased", "varies", "steady", "profile", "barrier", "pace"}
)
"""Causes of changes for a gain, which measured iterations can confirm. When a link has recovered,
the plan for healthy links returns even if it is no faster."""

UNHURRIED_CAUSES: frozenset[Cause] = frozenset({"eased", "varies", "steady", "profile", "barrier"})
"""Causes without a new disturbance: a change must gain more than the error of predictions."""

EASING_CAUSES: frozenset[Cause] = frozenset({"steady", "recovered"})
"""Causes for which a plan that delegates fewer links may win even if it is no faster."""

APART = 0.05
"""Least part of an iteration by which a slow link must show in it, for its measured time to say
whether the link is slow: times without a fault differ by less."""
ASSUMED_CHANGE_COST = 0.25
"""Assumed cost of a change of plan before one was measured, in iterations of the current plan."""


# --- findings: `reasons` turns them into text. Times in seconds, stages in ascending order ---


@dataclass(frozen=True)
class NoPlanFound:
    """Finding: the planner found no plan, for the reason ``why``."""

    why: str


@dataclass(frozen=True)
class PlanCheckFailed:
    """Finding: the chosen plan fails the final check."""

    why: str | MemoryExcess


@dataclass(frozen=True)
class PlanExceedsMemory:
    """Finding: the current plan exceeds a memory limit; another one replaces it at any cost."""

    excess: MemoryExcess


@dataclass(frozen=True)
class AtBaselinePlan:
    """Finding: the current plan is already the one for healthy links."""


@dataclass(frozen=True)
class GainTooSmall:
    """Finding: the best other plan saves a fraction ``gain`` of an iteration of ``seconds``, less
    than the required ``least_gain``."""

    seconds: float
    gain: float
    least_gain: float


@dataclass(frozen=True)
class NetSaving:
    """Finding: ``seconds`` that the best other plan saves over the remaining ``iterations``, and
    the ``change_cost``: measured at earlier changes if ``cost_measured``, else
    assumed. ``iterations`` is None if the job's end is unknown: then ``seconds`` are those of one
    iteration, and any saving pays in the long run."""

    seconds: float
    iterations: int | None
    change_cost: float
    cost_measured: bool

    @property
    def net_seconds(self) -> float:
        """Seconds saved beyond the cost of the change."""
        return self.seconds - self.change_cost

    @property
    def pays_off(self) -> bool:
        return self.seconds > (0.0 if self.iterations is None else self.change_cost)


@dataclass(frozen=True)
class GainNotConfirmed:
    """Finding: measured iterations do not confirm the evidence for a change. ``expected_seconds``:
    predicted seconds of an iteration of the current plan, overhead included; ``gain_seconds``:
    seconds that the change would save; ``measured_seconds``: median of the ``iterations`` in this
    state, None if there are too few, by ``lacking``."""

    expected_seconds: float
    gain_seconds: float
    iterations: int
    measured_seconds: float | None
    lacking: int = 0


@dataclass(frozen=True)
class GainWithinError:
    """Finding: a change would save ``gain_seconds``, less than ``error_seconds``, the error
    of predictions in this state."""

    gain_seconds: float
    error_seconds: float


@dataclass(frozen=True)
class ChangeReverted:
    """Finding: the last change missed its promise; the plan before returns unless ``is_slower``."""

    is_slower: bool


@dataclass(frozen=True)
class FewerDelegatedLinks:
    """Finding: the best other plan is no slower, and delegates fewer links."""


@dataclass(frozen=True)
class OffloadGain:
    """Finding: offload on some stages. ``copy_seconds``: seconds per microbatch, both ways;
    ``saved_seconds``: seconds per iteration, None if there is no plan without offload."""

    stages: tuple[int, ...]
    copy_seconds: float
    saved_seconds: float | None


@dataclass(frozen=True)
class RecomputeGain:
    """Finding: recomputation on some stages. ``forwards``: number of forwards that run again in an
    iteration; ``saved_seconds``: seconds per iteration, None if there is no plan without it."""

    stages: tuple[int, ...]
    forwards: int
    saved_seconds: float | None


@dataclass(frozen=True)
class FusedBackwardGain:
    """Finding: fused backwards on some stages. ``saved_seconds``: seconds per iteration."""

    stages: tuple[int, ...]
    saved_seconds: float


@dataclass(frozen=True)
class MemoryLimitBinds:
    """Finding: ``activationMemory`` limits the plans on some stages, to between ``least`` and
    ``most`` microbatches."""

    stages: tuple[int, ...]
    least: int
    most: int


@dataclass(frozen=True)
class SharesChosen:
    """Finding: numbers of microbatches by replica, ``shares``. ``slowness``: time of each replica's
    slowest stage over that of the fastest replica."""

    shares: tuple[int, ...]
    slowness: tuple[float, ...]


Finding = (
    NoPlanFound
    | PlanCheckFailed
    | PlanExceedsMemory
    | AtBaselinePlan
    | GainTooSmall
    | NetSaving
    | GainNotConfirmed
    | GainWithinError
    | ChangeReverted
    | FewerDelegatedLinks
    | OffloadGain
    | RecomputeGain
    | FusedBackwardGain
    | MemoryLimitBinds
    | SharesChosen
)


# --- a decision ---


class Past(NamedTuple):
    """Plan of iterations before the decision, and the links that were slow in these."""

    plan: Plan
    slow: frozenset[int]


@dataclass(frozen=True)
class DecisionRequest:
    """Input of one decision.

    ``current_plan``: newest plan; ``running_plan``: plan in effect, another one until the ranks
    change to the newest; ``baseline_plan``: plan for healthy links; ``plan_unknown``: the plan of
    the ranks is unknown to the controller; ``initial_plan``: that of a job that never adapts;
    ``iterations_remaining``: those that a new plan would run, None if no end is known;
    ``change_seconds``: measured cost of a change, None before the first one; ``previous_plan``:
    plan before the current one, for cause ``undelivered``; ``measured_seconds``: of an iteration
    under ``previous_plan`` and under the current plan, if ``previous_plan`` was faster; ``past``:
    plans since the last change of links, each with the links that were slow under it.
    """

    spec: JobSpec
    cause: Cause
    situation: Situation
    current_plan: Plan
    running_plan: Plan
    baseline_plan: Plan
    plan_unknown: bool
    iterations_remaining: int | None
    change_seconds: float | None
    evidence: SituationEvidence
    initial_plan: Plan | None = None
    past: tuple[Past, ...] = ()
    previous_plan: Plan | None = None
    measured_seconds: tuple[float, float] | None = None
    wire_times_moved: bool = False
    """True if wire times of healthy links differ from those of the last decision."""


@dataclass(frozen=True)
class PlanProposal:
    """Result of a decision. ``chosen``: option to change to; None: the plan stays.

    ``current``: plan in effect with its predicted time, None if unknown. ``findings``: those
    behind the choice, the decisive one first. ``promise``: predicted gain of a chosen option.
    ``needs_confirmation``: the cause must come up again, with more measured iterations.
    ``returns_at_once``: once links are healthy, an iteration more under the chosen plan costs more
    than an early return would if they were not. ``saving``: of the plan to change to, else of the
    current one; None if it does not matter. ``past``: saving of each past plan.
    ``overhead_seconds``: seconds of an iteration beyond all predictions.

    An option that exceeds the memory limits is never chosen. If the plan in effect exceeds them,
    the best option within them replaces it at any cost.
    """

    chosen: PlanOption | None
    current: PlanOption | None
    findings: tuple[Finding, ...]
    promise: PromisedTimes | None = None
    needs_confirmation: bool = False
    returns_at_once: bool = False
    saving: Saving | None = None
    past: tuple[Saving, ...] = ()
    overhead_seconds: float = 0.0

    @property
    def predicted_seconds(self) -> tuple[float | None, float]:
        """Predicted seconds of an iteration, overhead included: with the plan in effect, None if
        unknown, and with the chosen one. Measured iterations are compared with them."""
        if self.promise is not None:
            return self.promise.seconds_before, self.promise.seconds_after
        assert self.chosen is not None, "no change"
        before = None if self.current is None else self.current.seconds + self.overhead_seconds
        return before, self.chosen.seconds + self.overhead_seconds


def decide(request: DecisionRequest) -> PlanProposal:
    """Predict the current plan and the alternatives on the same measurements, and choose.

    Does not raise if there is no plan for the situation: the findings report it.
    """
    forecast = Forecast(request.spec, request.situation, request.baseline_plan.dispatch)
    proposal = _choose_proposal(request, forecast)
    if proposal.chosen is not None:
        proposal = replace(
            proposal, overhead_seconds=prediction_check.compute_overhead(forecast, request.evidence)
        )
    option = proposal.chosen or proposal.current
    if request.initial_plan is None or proposal.needs_confirmation or option is None:
        return proposal
    if forecast.find_excess(request.initial_plan) is not None:
        return proposal  # The job could not run it any more, so nothing is to be compared with.
    now = frozenset(link for link, slow in enumerate(request.situation.slow) if slow)
    return replace(
        proposal,
        saving=_saving(forecast, request, Past(option.plan, now)),
        past=tuple(_saving(forecast, request, each) for each in request.past),
    )


def _saving(forecast: Forecast, request: DecisionRequest, past: Past) -> Saving:
    """Saving of an iteration under a plan while some of the slow links are slow."""
    assert request.initial_plan is not None
    then = _with_slow(forecast, request.situation, past.slow)
    well = _with_slow(forecast, request.situation, frozenset())
    slow, healthy = (
        (each.predict_option(request.initial_plan).seconds, each.predict_option(past.plan).seconds)
        for each in (then, well)
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
    return forecast.for_situation(now.without_delays(slow)) if ended else forecast


def _choose_proposal(request: DecisionRequest, forecast: Forecast) -> PlanProposal:
    """Choose an option and check it: it must be valid, within memory, and confirmed."""
    try:
        current = None if request.plan_unknown else forecast.predict_option(request.current_plan)
        if request.cause == "weigh":
            return PlanProposal(None, current, ())
        if request.previous_plan is not None and current is not None:
            return _propose_previous_plan(request, request.previous_plan, forecast, current)
        options = _list_options(request, forecast, current)
        chosen, why = _choose_option(request, forecast, options, current)
    except InputError as error:
        return PlanProposal(None, None, (NoPlanFound(str(error)),))
    found = (*([why] if why else []), *_weigh_memory_findings(request.situation, options))
    if chosen is None:
        return PlanProposal(None, current, found)
    if chosen.plan.shares and request.situation.paces:
        slowness = tuple(compute_slowness(request.situation.paces))
        found = (*found, SharesChosen(chosen.plan.shares, slowness))
    hurries = _should_return_at_once(request, forecast, chosen)
    broken = find_plan_error(chosen.plan) or forecast.find_excess(chosen.plan)
    if broken is not None:
        return PlanProposal(None, current, (PlanCheckFailed(broken),))
    if isinstance(why, FewerDelegatedLinks) and current is not None:
        promised = prediction_check.promise_times(forecast, current, chosen, request.evidence)
        promised = replace(
            promised, seconds_before=promised.seconds_after
        )  # The change must not be slower.
        return PlanProposal(chosen, current, found, promised, returns_at_once=hurries)
    if (
        current is None
        or request.cause not in CONFIRMABLE_CAUSES
        or not current.seconds > chosen.seconds
    ):
        return PlanProposal(chosen, current, found, returns_at_once=hurries)
    running = (
        current
        if request.running_plan == request.current_plan
        else forecast.predict_option(request.running_plan)
    )
    promised = prediction_check.promise_times(forecast, running, chosen, request.evidence)
    if promised.gain_seconds <= 0:
        return PlanProposal(chosen, current, found, returns_at_once=hurries)
    if request.cause in UNHURRIED_CAUSES and promised.gain_seconds <= promised.error_seconds:
        return PlanProposal(
            None, current, (GainWithinError(promised.gain_seconds, promised.error_seconds),)
        )
    objection = _find_objection(promised, request.evidence)
    if objection is not None:
        return PlanProposal(None, current, (objection,), needs_confirmation=True)
    return PlanProposal(chosen, current, found, promised, returns_at_once=hurries)


def _find_objection(
    promised: PromisedTimes, evidence: SituationEvidence
) -> GainNotConfirmed | None:
    """Finding that defers the change until more iterations are measured; None to change now."""
    newest = evidence.measured_seconds[-prediction_check.MOST_ITERATIONS :]
    count = len(newest)
    if evidence.waited_too_long:
        return None
    if count:
        measured = median(newest)
        allowed = promised.gain_seconds + prediction_check.NOISE_SIGMAS * promised.spread / sqrt(
            count
        )
        # Shorter than predicted: the disturbance is not there. Longer iterations are no reason to
        # wait: there is more disturbance than was found.
        if promised.seconds_before - measured > allowed:
            return GainNotConfirmed(promised.seconds_before, promised.gain_seconds, count, measured)
    if (lacking := _count_needed_iterations(promised) - count) > 0:
        return GainNotConfirmed(
            promised.seconds_before, promised.gain_seconds, count, None, lacking
        )
    return None


def _count_needed_iterations(promised: PromisedTimes) -> int:
    """Number of iterations that show the gain above the noise of iteration times."""
    noise = prediction_check.NOISE_SIGMAS * promised.spread
    if noise <= promised.gain_seconds:
        return 0
    return min(prediction_check.MOST_ITERATIONS, ceil((noise / promised.gain_seconds) ** 2))


def _should_return_at_once(
    request: DecisionRequest, forecast: Forecast, chosen: PlanOption
) -> bool:
    """Decide ``returns_at_once`` of :class:`PlanProposal`. False if delays vary: then a link that
    seems healthy is soon slow again."""
    situation, baseline = request.situation, request.baseline_plan
    if not any(situation.slow) or any(situation.recent):
        return False
    well = forecast.for_situation(situation.without_delays())
    waits = well.predict_option(chosen.plan).seconds - well.predict_option(baseline).seconds
    return waits > forecast.predict_option(baseline).seconds - chosen.seconds


def _propose_previous_plan(
    request: DecisionRequest, previous: Plan, forecast: Forecast, current: PlanOption
) -> PlanProposal:
    """Propose the plan before the last change, if it is valid, and measured or predicted to be no
    slower. Measured times, where known, are the promise."""
    broken = find_plan_error(previous) or forecast.find_excess(previous)
    if broken is not None:
        return PlanProposal(None, current, (PlanCheckFailed(broken),))
    option = forecast.predict_option(previous)
    if request.measured_seconds is not None:
        faster, now = request.measured_seconds
        return PlanProposal(option, current, (ChangeReverted(False),), PromisedTimes(now, faster))
    slower = option.seconds > current.seconds * (1 + EQUAL_WITHIN)
    return PlanProposal(None if slower else option, current, (ChangeReverted(slower),))


def _list_options(
    request: DecisionRequest, forecast: Forecast, current: PlanOption | None
) -> list[PlanOption]:
    """List all plans that may be chosen. Raises :class:`InputError` if there is no plan."""
    options: list[PlanOption] = []
    choices = forecast.list_route_choices(request.current_plan.routes, request.baseline_plan.routes)
    # Mostly the fastest first: no search where no plan can come near it.
    for routes in sorted(choices, key=lambda each: -each.count(Route.DELEGATED)):
        if forecast.find_excess(request.baseline_plan) is None:
            options.append(forecast.predict_option(replace(request.baseline_plan, routes=routes)))
        within = min((option.seconds for option in options), default=inf) * (1 + EQUAL_WITHIN)
        if current is not None and request.cause in EASING_CAUSES:
            within = max(within, current.seconds)
        options += forecast.make_options(routes, within)
    # They go first: of equal options the first is chosen.
    options = [*forecast.search_longer(forecast.choose_best(options)), *options]
    return [*options, *forecast.make_unequal_shares(forecast.choose_best(options))]


def _choose_option(
    request: DecisionRequest,
    forecast: Forecast,
    options: Sequence[PlanOption],
    current: PlanOption | None,
) -> tuple[PlanOption | None, Finding | None]:
    """Choose the option to change to, or None. Returns the decisive finding, too."""
    situation = request.situation
    if current is not None:
        too_much = forecast.find_excess(current.plan)
        if too_much is not None:
            return forecast.choose_best(options), PlanExceedsMemory(too_much)
    if not any(situation.slow) and not any(situation.unknown):
        return _choose_for_healthy_links(request, forecast, options, current)
    quickest = forecast.choose_best(options)
    if current is None:
        return quickest, None
    gain = 1 - quickest.seconds / current.seconds if current.seconds > 0 else 0.0
    least = request.spec.adaptation.min_gain
    if request.cause == "varies":
        # The current plan was made for a constant delay.
        least = min(least, EQUAL_WITHIN)
    if gain >= least and gain > 0:
        return _choose_if_it_pays(request, current, quickest)
    # No faster plan, but a recovered link can return to its direct route.
    may_ease = request.cause in EASING_CAUSES
    lighter = [
        option
        for option in options
        if may_ease
        and len(option.plan.delegated_links) < len(current.plan.delegated_links)
        and forecast.is_as_fast(option, current)
        and (request.cause == "steady" or _delegates_slow_links(option, situation))
    ]
    if lighter:
        return forecast.choose_best(lighter), FewerDelegatedLinks()
    return None, GainTooSmall(current.seconds, gain, least)


def _choose_for_healthy_links(
    request: DecisionRequest,
    forecast: Forecast,
    options: Sequence[PlanOption],
    current: PlanOption | None,
) -> tuple[PlanOption | None, Finding | None]:
    """Choose for healthy links: the baseline plan, unless another one is much faster."""
    min_gain = request.spec.adaptation.min_gain
    if request.cause == "barrier" or request.wire_times_moved:
        # The plan for healthy links was made for another barrier or other wire times.
        min_gain = min(min_gain, EQUAL_WITHIN)
    least = 1 - min_gain
    target, baseline = forecast.choose_best(options), None
    if forecast.find_excess(request.baseline_plan) is None:
        baseline = forecast.predict_option(request.baseline_plan)
        target = forecast.choose_best([baseline, *options])
        target = target if target.seconds < baseline.seconds * least else baseline
    if current is None:
        return target, None
    if target.plan.runs_same_as(current.plan):
        return None, AtBaselinePlan()
    if target is baseline:
        return target, None
    if target.seconds < current.seconds * least:
        return _choose_if_it_pays(request, current, target)
    gain = 1 - target.seconds / current.seconds
    return None, GainTooSmall(current.seconds, gain, min_gain)


def _choose_if_it_pays(
    request: DecisionRequest, current: PlanOption, other: PlanOption
) -> tuple[PlanOption | None, Finding | None]:
    """Choose ``other`` if it saves more until the end of the job than the change costs."""
    seen, gain = request.change_seconds, current.seconds - other.seconds
    found = NetSaving(
        seconds=gain
        if request.iterations_remaining is None
        else gain * request.iterations_remaining,
        iterations=request.iterations_remaining,
        change_cost=current.seconds * ASSUMED_CHANGE_COST if seen is None else seen,
        cost_measured=seen is not None,
    )
    return other if found.pays_off else None, found


def _weigh_memory_findings(
    situation: Situation, options: Sequence[PlanOption]
) -> Iterator[Finding]:
    """Findings about offload, recomputation, fused backwards and device memory."""
    away = [option for option in options if option.plan.offloading_stages]
    again = [option for option in options if option.plan.recomputing_stages]
    here = [
        each
        for each in options
        if not each.plan.offloading_stages and not each.plan.recomputing_stages
    ]
    others = min((option.seconds for option in here), default=None)
    if away:
        quickest = min(away, key=lambda option: option.seconds)
        stages = quickest.plan.offloading_stages
        # The copies go both ways.
        copies = 2 * max(situation.stages[i].offload_copy or 0.0 for i in stages)
        yield OffloadGain(stages, copies, None if others is None else others - quickest.seconds)
    if again:
        quickest = min(again, key=lambda option: option.seconds)
        drawn = quickest.plan
        runs = sum(
            count_away_microbatches(drawn.schedule, drawn.device_limits, drawn.recompute).recomputed
        )
        saves = None if others is None else others - quickest.seconds
        yield RecomputeGain(drawn.recomputing_stages, runs, saves)
    fused = [option for option in here if option.plan.schedule.fused_stages]
    split = [option.seconds for option in here if not option.plan.schedule.fused_stages]
    if fused and split:
        quickest = min(fused, key=lambda option: option.seconds)
        yield FusedBackwardGain(quickest.plan.schedule.fused_stages, min(split) - quickest.seconds)
    binds = tuple(
        i
        for i, room in enumerate(situation.rooms)
        if room.limited_by_memory
        and any(
            option.plan.device_limits[i] is not None
            or option.plan.schedule.count_in_flight_peaks()[i] == room.device_microbatches
            for option in options
        )
    )
    if binds:
        counts = [situation.rooms[i].device_microbatches or 0 for i in binds]
        yield MemoryLimitBinds(binds, min(counts), max(counts))


def _delegates_slow_links(option: PlanOption, situation: Situation) -> bool:
    """True if every slow link is delegated."""
    return all(
        route is Route.DELEGATED
        for route, slow in zip(
            situation.resolve_routes(option.plan.routes), situation.slow, strict=True
        )
        if slow
    )
