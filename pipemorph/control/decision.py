"""Decision loop over one job's state: finds causes, requests proposals, and issues chosen plans.

Each report leads to :func:`consider_decision`. If the situation has a cause for another plan, and
measured iterations confirm it, a request waits in ``state.pending``. The host computes the proposal
and calls :func:`apply_proposal`, which issues the chosen plan. :func:`compare_iterations` then
judges the change by its first iterations, and requests the plan before if it failed
(:mod:`.decide.prediction_check`, :mod:`.decide.decision_state`). A change costs iterations, so how
often a plan may change is limited in iterations. ``now`` is the wall clock, seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

from pipemorph.control.decide import reasons
from pipemorph.control.decide.decision_state import (
    DOUBTED_ITERATIONS,
    MOST_DOUBT,
    DecisionState,
    PendingDecision,
    PlanTrial,
    count_lacking_iterations,
    find_first_detectable,
    find_held_sources,
    gather_evidence,
    get_doubt_level,
    has_barrier,
    hold_sources,
    list_past_plans,
    measure_believed_situation,
    measure_replica_paces,
    measure_situation,
    revise_saved_time,
)
from pipemorph.control.decide.forecast import PlanOption
from pipemorph.control.decide.plan_choice import (
    CONFIRMABLE_CAUSES,
    DecisionRequest,
    GainNotConfirmed,
    PlanProposal,
)
from pipemorph.control.decide.prediction_check import (
    FEWEST_ITERATIONS,
    JUDGED_AFTER,
    MOST_ITERATIONS,
    UNDECIDED_AFTER,
    MeasuredReference,
    SituationEvidence,
    estimate_spread,
    has_failed,
    is_slower,
)
from pipemorph.control.decide.replica_shares import Paces, paces_differ
from pipemorph.control.decide.situation import (
    Cause,
    EvidenceSources,
    Situation,
    find_evidence_sources,
    find_link_change,
    limits_differ,
    op_times_are_shorter,
    op_times_differ,
    without_longer_stages,
    without_sources,
)
from pipemorph.control.history.job_history import DecisionRecord
from pipemorph.control.job_state.stages import StageRoom, find_excess
from pipemorph.planning import Plan, Policy, StageTimes
from pipemorph.protocol import Directive, Health, LinkState, PlanMessage, PlannedTimes

COMMIT_AHEAD = 1
"""Iterations between the current one and the first with the plan of a directive issued now."""

WARM_UP_ITERATIONS = 3
"""Iterations before measured op times are compared with the planned ones."""
PROFILE_EVERY = 50
"""Least iterations between two decisions for changed op times."""
COMPARE_FIRST, COMPARE_EVERY = 2, 5
"""Iterations between two comparisons of op times, before and after the first decision for them."""
DIFFERING_READINGS = 5
"""Comparisons in a row that must differ. On a busy machine op times change for a short time, and a
plan for them is wrong by the time it is in force."""

LEAST_PLAN_ITERATIONS = 3
"""Iterations under a plan before a change that is not urgent: enough to measure the plan."""
FIRST_HOLD_ITERATIONS, HOLD_ITERATIONS, HOLD_BACKOFF, MOST_FLAPS = 1, 2, 4, 4
"""Iterations for which a link must be healthy before its old plan returns: FIRST_HOLD_ITERATIONS,
or HOLD_ITERATIONS multiplied by HOLD_BACKOFF each time it became slow again soon, at most
MOST_FLAPS times. A return that fails costs a few iterations of several times their length; waiting
costs a few per cent of each iteration: hence the factor. It also stops changes for a fault of the
direct route only, which ends whenever the link avoids that route."""
FLAP_HOLDS = 10
"""Holds, each of HOLD_ITERATIONS at least, within which a link that becomes slow again has flapped.
Another link that becomes slow has not."""
STEADY_HOLDS = 4
"""Holds, each of HOLD_ITERATIONS at least, after which a constant delay is considered again: on
a route that was first used while the link was slow, it may be the normal wire time."""


# --- the situation ----------------------------------------------------------------------------


def awaits_iterations(state: DecisionState) -> bool:
    """True if a decision waits for the next iterations or op times."""
    waits = state.trial is not None or bool(find_held_sources(state))
    compares = 0 < state.last_decision.differing_readings < DIFFERING_READINGS
    return waits or compares or has_barrier(state) != state.last_decision.barrier


def measure_route_cost(state: DecisionState, now: float) -> None:
    """Compare op times on delegated links with those on direct ones."""
    observed, plans = state.job_state.stages, state.plans
    if (
        not observed.all_measured
        or plans.plan_unknown
        or not state.route_costs.is_update_due(state.last_iteration)
    ):
        return
    if (stages := observed.get_stage_times()) is not None:
        links = state.job_state.links.get_states(now)
        state.route_costs.observe_op_times(
            stages,
            plans.wanted_plan,
            iterations=len(state.history.list_iterations_under(plans.wanted_plan.version)),
            last=state.last_iteration,
            failed_over=any(link.failed_over for link in links),
        )


# --- finished iterations against predictions --------------------------------------------------


def compare_iterations(state: DecisionState, now: float) -> None:
    """Compare newly finished iterations with predictions, record the gain of a change, and request
    to undo it if that is too small."""
    if state.job_state.state != "training" or state.is_deciding:
        return
    if state.trial is not None:
        _judge_trial(state, state.trial, now)
    elif not state.reference_complete:
        _measure_reference(state, now)


def _measure_reference(state: DecisionState, now: float) -> None:
    """Measure the reference in undisturbed iterations of the plan in effect."""
    stages, plan = state.job_state.stages.get_stage_times(), state.plans.wanted_plan
    if stages is None or state.plans.plan_unknown:
        return
    situation = measure_believed_situation(
        state, stages, state.job_state.links.get_states(now), now
    )
    if situation.slow != state.last_decision.situation.slow:
        return
    iterations = state.history.list_iterations_under(plan.version)[1:]
    counted = [f for f in iterations if f.index >= state.reference_from]
    seconds = [f.comparable_seconds for f in counted][:MOST_ITERATIONS]
    if len(seconds) < FEWEST_ITERATIONS:
        return
    state.reference = MeasuredReference(plan, situation, median(seconds), estimate_spread(seconds))
    state.reference_complete = len(seconds) == MOST_ITERATIONS


def _judge_trial(state: DecisionState, trial: PlanTrial, now: float) -> None:
    """Record the gain of a change, once it is known. If it failed, request the plan before."""
    after = [f.comparable_seconds for f in state.history.list_iterations_under(trial.version)]
    ran = state.history.list_iterations_under(trial.previous_plan.version)
    old = ran[1:]
    before = [f.comparable_seconds for f in old if f.index > trial.shown_since][-MOST_ITERATIONS:]
    slower = is_slower(trial.promise.spread, before, after)
    after = after[1:]
    if not slower and len(after) < JUDGED_AFTER:
        return
    part = [f.comparable_seconds for f in old if f.index == trial.shown_since]
    if not (before or part) and ran and ran[0].index >= trial.shown_since:
        # The old plan ran only once; this includes the change to it.
        part = [ran[0].comparable_seconds]
    failed = slower or has_failed(trial.promise, before, part, after)
    if failed is None and len(after) < UNDECIDED_AFTER:
        return
    state.trial = None
    if failed is not None:
        for source in trial.sources:
            level = get_doubt_level(state, source) + (1 if failed else -1)
            state.source_doubts[source] = (
                min(MOST_DOUBT, max(0, level)),
                state.last_iteration,
            )
    if (record := state.history.close_record(trial.version)) is not None:
        line = reasons.describe_outcome(record, len(after))
        _append_decision(state, now, "outcome", line, line)
    stages = state.job_state.stages.get_stage_times()
    if not failed or stages is None:
        return
    links = state.job_state.links.get_states(now)
    present = measure_situation(state, stages, links, now)
    state.prediction_error = abs(median(after) - trial.promise.seconds_after), present
    slower = slower or (bool(before) and median(after) > median(before))
    if not (slower or trial.promise.may_revert):
        return
    # The wrong evidence is dropped, and held for some iterations.
    hold_sources(state, trial.sources, state.last_iteration + 1, DOUBTED_ITERATIONS)
    state.plans.baseline_plan = trial.baseline_plan
    situation = without_sources(present, trial.sources, trial.situation_before)
    _request_decision(
        state,
        "undelivered",
        situation,
        links,
        since=ran[-1].index if slower else None,
        previous=trial.previous_plan,
        faster=(median(before), median(after)) if slower else None,
    )


# --- limits of the number of changes ----------------------------------------------------------


def compute_hold_iterations(state: DecisionState) -> int:
    """Number of iterations for which a link must be healthy before its old plan returns."""
    return (
        HOLD_ITERATIONS * int(HOLD_BACKOFF**state.flap_count)
        if state.flap_count
        else FIRST_HOLD_ITERATIONS
    )


def count_flaps(state: DecisionState, links: Iterable[int]) -> None:
    """Count flaps at a directive for slow ``links``: those that were slow shortly before."""
    finished = state.last_iteration
    hold = max(HOLD_ITERATIONS, compute_hold_iterations(state))
    again = state.returned_links.keys() & set(links)
    lately = {i: at for i, at in state.returned_links.items() if finished - at <= FLAP_HOLDS * hold}
    if again & lately.keys():
        state.flap_count = min(MOST_FLAPS, state.flap_count + 1)
    elif state.returned_links and not lately:
        state.flap_count = 0
    state.returned_links = {i: at for i, at in lately.items() if i not in again}


def may_restore_plan(state: DecisionState, links: Sequence[LinkState]) -> bool:
    """True if the old plan may return: recovered links have been healthy for long enough."""
    last = state.last_decision.situation
    all_well = all(link.health is Health.HEALTHY for link in links)
    if state.returns_at_once and all_well and not state.flap_count:
        return True
    well = [
        link.since_iteration
        for link, was_slow in zip(links, last.slow, strict=True)
        if was_slow and link.health is Health.HEALTHY and link.since_iteration is not None
    ]
    hold = compute_hold_iterations(state)
    if any(last.recent):
        hold = max(hold, HOLD_ITERATIONS * HOLD_BACKOFF)  # Delays varied: this may be only a pause.
    return state.last_iteration - max(well, default=0) >= hold


def _is_decision_allowed(state: DecisionState, cause: Cause, links: Sequence[LinkState]) -> bool:
    """True if a decision may be made for this cause now. If not, the next report checks again."""
    last = state.last_decision
    if cause in ("memory", "slow", "restart"):
        return True
    if state.last_iteration == last.iteration_finished and not (
        cause == "worse" and last.cause == "steady"
    ):
        return False  # For a varying delay, at most one decision per iteration.
    if cause == "worse":
        return True
    newest, wanted = state.history.get_newest(), state.plans.wanted_plan.version
    if wanted and (newest is None or newest.plan_version < wanted):
        return False  # The wanted plan has not run yet.
    if (
        state.issued_at is not None
        and state.last_iteration - state.issued_at < LEAST_PLAN_ITERATIONS
    ):
        return False
    return cause != "recovered" or may_restore_plan(state, links)


# --- causes -----------------------------------------------------------------------------------


def find_cause(state: DecisionState, now: Situation) -> Cause | None:
    """Find why the situation requires another decision; None if it does not."""
    last, plan = state.last_decision, state.plans.known_plan
    if plan is None:
        return "restart"
    if now.rooms != last.situation.rooms and _exceeds_memory(state, plan, now.rooms):
        return "memory"
    least = state.spec.adaptation.min_delay_ms / 1e3
    if (change := find_link_change(now, last.situation, least)) is not None:
        return change
    if last.iteration_finished is not None and not last.steady_delay_considered and any(now.slow):
        waited = state.last_iteration - last.iteration_finished >= STEADY_HOLDS * max(
            HOLD_ITERATIONS, compute_hold_iterations(state)
        )
        if waited and plan.routes != state.plans.baseline_plan.routes:
            return "steady"
    if _paces_require_decision(state, now.paces, plan):
        return "pace"
    if now.barrier != last.barrier and not any(now.slow):
        return "barrier"
    if _stages_are_faster(state, now.stages) or (
        _is_profile_due(state) and _profile_differs(state, now)
    ):
        return "profile"
    return None


def _paces_require_decision(state: DecisionState, now: Paces, plan: Plan) -> bool:
    """True if replicas compute at other speeds than at the last decision, or if the plan is for
    slow ones and none was slow at the last decision either."""
    last = state.last_decision
    if (now or last.situation.paces) and paces_differ(now, last.situation.paces):
        return True
    since = state.last_iteration - (last.iteration_finished or 0)
    return bool(plan.shares) and not now and since >= HOLD_ITERATIONS * HOLD_BACKOFF


def _stages_are_faster(state: DecisionState, stages: tuple[StageTimes, ...] | None) -> bool:
    """True if stages are faster than at the last decision on op times."""
    last, planned = state.last_decision, state.last_decision.situation.stages
    if stages is None or last.profiled_iteration is None or not state.job_state.stages.all_measured:
        return False
    if (
        state.compared_op_times is None
        or state.compared_op_times[0] is not stages
        or state.compared_op_times[1] is not planned
    ):
        state.compared_op_times = stages, planned, op_times_are_shorter(stages, planned)
    return state.compared_op_times[2]


def _exceeds_memory(state: DecisionState, plan: Plan, rooms: tuple[StageRoom, ...]) -> bool:
    """True if a plan exceeds memory limits. The last pair that fitted is not checked again."""
    if (
        state.fitting_plan is not None
        and state.fitting_plan[0] is plan
        and state.fitting_plan[1] is rooms
    ):
        return False
    if find_excess(plan, rooms) is not None:
        return True
    state.fitting_plan = plan, rooms
    return False


def _is_profile_due(state: DecisionState) -> bool:
    """True if op times should be compared with the planned ones now: every few iterations, since
    this is the most expensive part of a report while links are healthy."""
    last = state.last_decision
    if not state.job_state.stages.all_measured or state.last_iteration < last.compare_from:
        return False
    if last.profiled_iteration is None:
        return state.history.finished_count >= WARM_UP_ITERATIONS
    return (
        any(last.situation.far) or state.last_iteration - last.profiled_iteration >= PROFILE_EVERY
    )


def _profile_differs(state: DecisionState, now: Situation) -> bool:
    """True if op times, reductions or normal wire times have differed from the planned ones for
    some time, or limits differ now."""
    last = state.last_decision
    if state.last_iteration >= last.compare_from:
        first = last.profiled_iteration is None
        last.compare_from = state.last_iteration + (COMPARE_FIRST if first else COMPARE_EVERY)
        assumed = first and last.situation.op_times_assumed
        differs = assumed or op_times_differ(now, last.situation)
        if (
            (first or any(last.situation.far))
            and not any(now.unknown)
            and now.far_links_moved(last.situation)
        ):
            # A network that is slow everywhere is slow from the start, and stays so.
            return True
        last.differing_readings = last.differing_readings + 1 if differs else 0
    return last.differing_readings >= DIFFERING_READINGS or limits_differ(now, last.situation)


def consider_decision(state: DecisionState, now: float) -> None:
    """Request a decision if there is a cause and the limits allow it now."""
    observed, plans, last = state.job_state, state.plans, state.last_decision
    if observed.state != "training" or state.is_deciding or plans.awaits_snapshot(now):
        return
    # A cause that this pass does not find again counts from a later iteration next time.
    turned, state.cause_iterations = state.cause_iterations, {}
    rooms = observed.stages.rooms
    slow_lately = any(last.situation.slow) or observed.links.any_slow
    quiet = not (plans.plan_unknown or slow_lately) and rooms == state.checked_memory_limits
    quiet = quiet and has_barrier(state) == last.barrier
    stages = observed.stages.get_stage_times()
    eased = _stages_are_faster(state, stages)
    quiet = quiet and not _paces_require_decision(
        state, measure_replica_paces(state), plans.wanted_plan
    )
    if quiet and not eased and not _is_profile_due(state):
        return  # Common case: every other cause needs a link that is or was slow.
    links = observed.links.get_states(now)
    if _adaptation_blocked(state, links, now):
        state.checked_memory_limits = rooms
        return
    if stages is None:
        if any(link.health is Health.SLOW for link in links):
            _record_once(
                state, now, "times", "a link is slow, but no stage has reported op times yet"
            )
        return
    situation = measure_believed_situation(state, stages, links, now)
    if eased:
        # Longer op times count after some time only; shorter ones count at once.
        situation = without_longer_stages(situation, last.situation)
    if not _knows_activation_sizes(state, now):
        return
    state.checked_memory_limits = rooms
    if any(room.device_microbatches == 0 for room in rooms):
        memory = state.spec.schedule.activation_memory
        _record_once(state, now, "memory", reasons.describe_insufficient_memory(situation, memory))
        return
    cause, held = find_cause(state, situation), find_held_sources(state)
    if held:
        state.cause_iterations = turned  # Held sources may still become the cause.
    if cause is None:
        return
    sources = find_evidence_sources(
        cause, situation, last.situation, state.spec.adaptation.min_delay_ms / 1e3
    )
    state.decision_cause_iteration = turned.get((cause, sources), observed.iteration)
    state.cause_iterations[cause, sources] = state.decision_cause_iteration
    if not _is_decision_allowed(state, cause, links):
        return
    if cause not in CONFIRMABLE_CAUSES:
        _request_decision(state, cause, situation, links)
        return
    if sources <= held:
        return
    evidence, since = gather_evidence(state, cause, sources, situation, links)
    if lacking := count_lacking_iterations(state, sources, evidence):
        if hold_sources(state, sources, since, lacking):
            record_kept_plan(state, now, reasons.describe_doubted_change(cause, links, lacking))
        return
    _request_decision(
        state, cause, situation, links, since=since, evidence=evidence, sources=sources
    )


def _adaptation_blocked(state: DecisionState, links: Sequence[LinkState], now: float) -> bool:
    """True if the plan must not change. Records the reason once if there would be a cause."""
    stages = state.job_state.stages
    refusal = reasons.explain_blocked_adaptation(state.spec, stages.crowding)
    if refusal is None:
        return False
    slow = [link for link in links if link.health is Health.SLOW]
    if slow and state.spec.is_observed:
        topic = f"links {[link.link for link in slow]}"
        _record_once(state, now, topic, reasons.describe_slow_links(slow))
    elif slow:
        _record_once(state, now, "policy", f"{reasons.describe_slow_links(slow)}; {refusal}")
    too_much = find_excess(state.plans.wanted_plan, stages.rooms)
    if too_much is not None:
        _record_once(state, now, "memory", f"{reasons.describe_excess(too_much)}; {refusal}")
    return True


def explain_held_change(state: DecisionState, links: Sequence[LinkState]) -> str | None:
    """Reason that holds back a change of plan while a link is slow. None if no change is held back,
    or if the spec allows none."""
    slow = [link for link in links if link.health is Health.SLOW]
    if not slow or reasons.explain_blocked_adaptation(state.spec, 0.0) is not None:
        return None
    refusal = reasons.explain_blocked_adaptation(state.spec, state.job_state.stages.crowding)
    if refusal is not None:
        return f"{reasons.describe_slow_links(slow)}; {refusal}"
    if not find_held_sources(state) & {link.link for link in slow}:
        return None
    latest = reversed(state.history.decisions)
    return next((each.reason for each in latest if each.kind in ("keep", "revert")), None)


def record_cpu_contention(state: DecisionState, now: float) -> None:
    """Record once that a host has more ranks than processors, so that measurements say little."""
    crowding, spec = state.job_state.stages.crowding, state.spec
    adapts = spec.adaptation.enabled and spec.schedule.policy_kind is Policy.PIPEMORPH
    if crowding > 1 and (adapts or spec.is_observed):
        _record_once(state, now, "crowded", reasons.describe_cpu_contention(crowding, spec))


def _knows_activation_sizes(state: DecisionState, now: float) -> bool:
    """True if limits in bytes can be converted to microbatches. A rank reports the size of a
    microbatch with its first profile or never; without it the limit cannot be applied."""
    stages = state.job_state.stages
    unknown = [i for i, f in enumerate(stages.footprints) if not f.activation_bytes]
    if state.spec.schedule.activation_memory is None or not unknown:
        return True
    if stages.all_measured:
        _record_once(state, now, "bytes", reasons.describe_unmeasured_stages(unknown))
    return stages.all_measured


# --- decisions --------------------------------------------------------------------------------


def _request_decision(
    state: DecisionState,
    cause: Cause,
    situation: Situation,
    links: Sequence[LinkState],
    *,
    since: int | None = None,
    evidence: SituationEvidence | None = None,
    sources: EvidenceSources = frozenset(),
    previous: Plan | None = None,
    faster: tuple[float, float] | None = None,
) -> None:
    """Request a decision, which the host computes. ``faster``: see
    :attr:`DecisionRequest.measured_seconds`."""
    last, plans = state.last_decision, state.plans
    shown = find_first_detectable(state, situation, links)
    changed, past = list_past_plans(state, cause, situation, links, shown)
    # Iterations for which the plan of a directive issued now would be in effect.
    remaining = state.spec.trainer.iterations - (state.last_iteration + 1) - COMMIT_AHEAD
    state.pending = PendingDecision(
        DecisionRequest(
            spec=state.planning_spec,
            cause=cause,
            situation=situation,
            current_plan=plans.wanted_plan,
            baseline_plan=plans.baseline_plan,
            # The plan of the ranks is unknown to a controller without its state.
            plan_unknown=plans.plan_unknown,
            iterations_remaining=None if state.has_no_end else remaining,
            change_seconds=state.history.change_seconds,
            evidence=evidence or SituationEvidence(state.reference),
            running_plan=plans.running_plan,
            initial_plan=plans.initial_plan,
            past=past,
            previous_plan=previous,
            measured_seconds=faster,
            wire_times_moved=cause == "profile" and situation.far_links_moved(last.situation),
        ),
        links=tuple(links),
        detectable_at=shown,
        previous_decision=copy.copy(last),
        comparable_since=shown if since is None else since,
        changed=changed,
        sources=sources,
    )
    last.situation, last.iteration_finished, last.cause = (
        situation,
        state.last_iteration,
        cause,
    )
    if cause not in ("profile", "memory", "barrier", "undelivered"):
        last.steady_delay_considered = cause == "steady"
    if cause in ("profile", "memory"):
        last.profiled_iteration, last.differing_readings = state.last_iteration, 0
    if not any(situation.slow):
        last.barrier = situation.barrier


def apply_proposal(
    state: DecisionState, request: DecisionRequest, proposal: PlanProposal, now: float
) -> None:
    """Apply the proposal for ``request``. Ignored unless that is the pending request."""
    pending, finished = state.pending, state.last_iteration
    if pending is None or pending.request is not request:
        return
    state.pending = None
    if request.cause == "weigh":
        revise_saved_time(state, pending, proposal)
        state.weighed_situation = request.situation
        return
    if proposal.needs_confirmation:
        state.last_decision = pending.previous_decision  # The cause comes up again.
        objections = [f for f in proposal.findings if isinstance(f, GainNotConfirmed)]
        lacking = max((f.lacking for f in objections), default=0)
        hold_sources(state, pending.sources, pending.detectable_at, lacking or None)
        if any(f.measured_seconds for f in objections):
            # Measured iterations contradict the sources: no doubt about them fades.
            for source in pending.sources:
                state.source_doubts[source] = (get_doubt_level(state, source), finished)
    else:
        # A new reference, which excludes the iteration that is running.
        state.reference_from, state.reference_complete = finished + 2, False
        state.trial = None  # Its situation has ended.
    revise_saved_time(state, pending, proposal)
    state.weighed_situation = None
    if not proposal.needs_confirmation:
        state.cause_iterations, state.decision_cause_iteration = {}, None
    if proposal.chosen is None:
        record_kept_plan(
            state, now, reasons.explain_decision(request.cause, pending.links, proposal)
        )
        return
    _issue_plan(state, pending, proposal, proposal.chosen, now)
    if proposal.promise is not None:
        # Sources that were held are believed now; they showed when they were first held.
        ended = [
            state.held_sources.pop(source)
            for source in pending.sources
            if source in state.held_sources
        ]
        state.trial = PlanTrial(
            version=state.plans.wanted_plan.version,
            previous_plan=request.running_plan,
            baseline_plan=request.baseline_plan,
            sources=pending.sources,
            promise=proposal.promise,
            situation_before=pending.previous_decision.situation,
            shown_since=min([pending.comparable_since, *(hold.shown_since for hold in ended)]),
        )
    if request.cause in ("profile", "memory", "barrier") and not any(request.situation.slow):
        state.plans.set_baseline()


def _issue_plan(
    state: DecisionState,
    pending: PendingDecision,
    proposal: PlanProposal,
    chosen: PlanOption,
    now: float,
) -> None:
    """Make the chosen option the wanted plan, under a new plan version."""
    request, version = pending.request, state.versions.issue_version()
    record = reasons.build_record(
        request,
        proposal,
        chosen,
        pending.links,
        version=version,
        at=now,
        iteration=state.job_state.iteration,
        detectable_at=pending.detectable_at,
        peak_memory=state.job_state.stages.list_peak_memory(),
    )
    plan = replace(chosen.plan, version=version)
    directive = Directive(
        plan_version=version,
        issued_at=now,
        reason=record.reason,
        plan=PlanMessage.from_plan(plan).model_copy(
            update={"times": _list_planned_times(state, request.situation)}
        ),
        record=record.model_copy(),
    )
    state.plans.issue_plan(plan, directive)
    if request.cause in ("slow", "worse", "restart"):
        count_flaps(state, pending.sources)
    returning: set[int] = set()
    if record.kind != "revert":
        returning |= set(request.current_plan.delegated_links) - set(chosen.plan.delegated_links)
    if record.kind == "return":
        was, now_slow = pending.previous_decision.situation.slow, request.situation.slow
        returning |= {i for i, slow in enumerate(was) if slow and not now_slow[i]}
    state.issued_at, state.returns_at_once = state.last_iteration, proposal.returns_at_once
    state.returned_links |= dict.fromkeys(returning, state.last_iteration)
    state.history.append_record(record)
    if proposal.saving is not None:
        state.history.revise_saving(version, proposal.saving, state.last_iteration + 1, None)
    line = reasons.summarize_change(version, request.cause, pending.links, proposal)
    _append_decision(state, now, record.kind, record.reason, line, plan_version=version)


def _list_planned_times(state: DecisionState, situation: Situation) -> PlannedTimes | None:
    """Times for ranks that order microbatches by their costs; None if they do not."""
    if state.spec.adaptation.reorder == "bits":
        return None
    return PlannedTimes.from_stages(situation.stages, situation.wire_times)


# --- what was decided, and why ----------------------------------------------------------------


def record_kept_plan(state: DecisionState, now: float, reason: str) -> None:
    """Record that the plan stays. The plan of an observed job always does."""
    line = reason if state.spec.is_observed else f"no change: {reason}"
    _append_decision(state, now, "keep", reason, line)


def _record_once(state: DecisionState, now: float, topic: str, reason: str) -> None:
    """Record once by ``topic`` why the plan stays: it would repeat with every report."""
    if topic not in state.noted_topics:
        state.noted_topics.add(topic)
        record_kept_plan(state, now, reason)


def _append_decision(
    state: DecisionState,
    now: float,
    kind: Literal["adapt", "return", "revert", "keep", "outcome"],
    reason: str,
    line: str,
    *,
    plan_version: int | None = None,
) -> None:
    """Record a decision. ``line``: its text for a terminal."""
    state.history.decisions.append(
        DecisionRecord(
            at=now,
            iteration=state.job_state.iteration,
            kind=kind,
            reason=reason,
            line=line,
            plan_version=plan_version,
        )
    )
