"""One decision over one state: finds causes, asks for a proposal, and issues the plan it chose.

:mod:`pipemorph.control.decide.truth` says how measured iterations check the evidence for a change,
and its result. How often a plan may change is limited in iterations, since a change costs some.
``now`` is the wall clock, seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Literal

from pipemorph.control.decide import reasons
from pipemorph.control.decide.forecast import Option
from pipemorph.control.decide.replan import CHECKED, NotConfirmed, Proposal, Replan
from pipemorph.control.decide.situation import (
    BARRIER,
    Cause,
    Situation,
    Sources,
    change_of_links,
    limits_differ,
    seen,
    shorter,
    sources_of,
    times_differ,
    turned_at,
    without,
    without_longer,
)
from pipemorph.control.decide.state import (
    DecisionState,
    Hold,
    Pending,
    Trial,
    changed_since,
    revise_saved,
)
from pipemorph.control.decide.truth import (
    FEWEST,
    GIVEN_UP_AFTER,
    JUDGED_AFTER,
    MOST,
    Evidence,
    Reference,
    has_failed,
    is_slower,
    spread_of,
)
from pipemorph.control.observed.stages import Room, excess
from pipemorph.control.record.history import Decision
from pipemorph.planning import Plan, Policy, StageTimes
from pipemorph.wire import Directive, Health, LinkState, PlanMessage

COMMIT_AHEAD = 1
"""Iterations between the current one and the first with the plan of a directive issued now."""

WARM_UP = 3
"""Iterations before measured op times are compared with the planned ones."""
PROFILE_EVERY = 50
"""Least iterations between two decisions for changed op times."""
COMPARE_FIRST, COMPARE_EVERY = 2, 5
"""Iterations between two comparisons of op times, before the first decision for them and after."""
READINGS = 5
"""Comparisons in a row that must differ. On a busy machine op times differ for a while, and a plan
for them is wrong by the time it is in force."""
COMPARED = 4
"""Newest iterations that are compared with a prediction for changed op times."""

SETTLE = 3
"""Iterations under a plan before a change that is not urgent: enough to measure the plan."""
FIRST_HOLD, HOLD, BACKOFF, MOST_FLAPS = 1, 2, 4, 4
"""Iterations for which a link must be healthy before its old plan returns: FIRST_HOLD, or HOLD
multiplied by BACKOFF each time it became slow again soon, at most MOST_FLAPS times. A return that
fails costs a few iterations of several times their length, waiting mostly costs a few per cent of
each: hence the factor. It also stops the changes for a fault of the direct route only, which ends
whenever it is avoided."""
SOON = 10
"""A link that becomes slow again within this many holds, each of HOLD iterations at least, has
flapped. Another link that becomes slow has not."""
STEADY = 4
"""Holds, of HOLD iterations at least, after which a constant delay is considered once more: on a
route that was first used while the link was slow, it may be the route's normal wire time."""

DOUBTED_NEEDS, MOST_DOUBT = 4, 3
"""Confirming iterations that a change needs after the first failure; twice as many after each
further one, at most MOST_DOUBT times."""
PATIENCE = 16
"""Iterations after which evidence that measured iterations do not confirm is tried nevertheless,
since the link may be slow in a way that is not modelled, as one that is shaped, and what was
measured to be slower is undone; 4 times as many for each doubt."""
WEIGHED = 0.05
"""Relative change of a delay from which what the plan saves is predicted anew."""
LONGEST_WAIT = 32
"""Most iterations between two looks at evidence that is not believed."""
FORGET = 200
"""Iterations until a doubt counts one less."""


def _finished(state: DecisionState) -> int:
    """Index of the newest finished iteration, -1 before the first."""
    return state.ledger.last_iteration


# --- the situation ----------------------------------------------------------------------------


def measured(
    state: DecisionState, stages: tuple[StageTimes, ...], links: Sequence[LinkState], now: float
) -> Situation:
    """The situation as measured."""
    expected = replace(
        state.last.situation,
        stages=stages,
        rooms=state.observed.stages.rooms,
        barrier=barrier(state),
        route_cost=state.route_costs.now,
    )
    return seen(expected, links)


def _believed(
    state: DecisionState, stages: tuple[StageTimes, ...], links: Sequence[LinkState], now: float
) -> Situation:
    """The situation without evidence that measured iterations do not confirm."""
    situation = measured(state, stages, links, now)
    for link in [s for s in state.holds if s >= 0 and not situation.slow[s]]:
        del state.holds[link]
    held = _held(state)
    return without(situation, held, state.last.situation) if held else situation


def barrier(state: DecisionState) -> bool:
    """Whether stages wait for each other between iterations. Also if the trainer sees nothing that
    makes them wait, but a plan for that did not bring what it promised."""
    objective = state.spec.schedule.objective
    if objective != "auto":
        return objective == "makespan"
    there = state.ledger.barrier
    return (state.last.barrier if there is None else there) or _doubt(state, BARRIER) > 0


def attentive(state: DecisionState) -> bool:
    """Whether a decision waits for the next iteration, or op times."""
    waits = state.trial is not None or bool(_held(state))
    compares = 0 < state.last.readings < READINGS
    return waits or compares or barrier(state) != state.last.barrier


def weigh_routes(state: DecisionState, now: float) -> None:
    """Compare op times on delegated links with those on direct ones."""
    observed, plans = state.observed.stages, state.plans
    if not observed.measured or plans.unknown or not state.route_costs.due(_finished(state)):
        return
    if (stages := observed.times()) is not None:
        links = state.observed.links.states(now)
        state.route_costs.observe(
            stages,
            plans.wanted,
            iterations=len(state.ledger.under(plans.wanted.version)),
            last=_finished(state),
            failed_over=any(link.failed_over for link in links),
        )


# --- finished iterations against predictions --------------------------------------------------


def compare(state: DecisionState, now: float) -> None:
    """Compare newly finished iterations with predictions, record what a change brought, and request
    to take it back if that is too little."""
    if state.observed.state != "training" or state.deciding:
        return
    if state.trial is not None:
        _judge(state, state.trial, now)
    elif not state.reference_complete:
        _take_reference(state, now)


def _take_reference(state: DecisionState, now: float) -> None:
    """Take the reference from undisturbed iterations of the plan in effect."""
    stages, plan = state.observed.stages.times(), state.plans.wanted
    if stages is None or state.plans.unknown:
        return
    situation = _believed(state, stages, state.observed.links.states(now), now)
    if situation.slow != state.last.situation.slow:
        return
    iterations = state.ledger.under(plan.version)[1:]
    seconds = [f.seconds for f in iterations if f.index >= state.reference_from][:MOST]
    if len(seconds) < FEWEST:
        return
    state.reference = Reference(plan, situation, median(seconds), spread_of(seconds))
    state.reference_complete = len(seconds) == MOST


def _judge(state: DecisionState, trial: Trial, now: float) -> None:
    """Record what a change brought, once that is known. If it failed, request the plan before."""
    after = [f.seconds for f in state.ledger.under(trial.version)]
    ran = state.ledger.under(trial.previous.version)
    old = ran[1:]
    before = [f.seconds for f in old if f.index > trial.since][-MOST:]
    slower = is_slower(trial.promise.spread, before, after)
    after = after[1:]
    if not slower and len(after) < JUDGED_AFTER:
        return
    part = [f.seconds for f in old if f.index == trial.since]
    if not (before or part) and ran and ran[0].index >= trial.since:
        part = [ran[0].seconds]  # The old plan ran only once. It includes the change to it.
    failed = slower or has_failed(trial.promise, before, part, after)
    if failed is None and len(after) < GIVEN_UP_AFTER:
        return
    state.trial = None
    if failed is not None:
        for source in trial.sources:
            level = _doubt(state, source) + (1 if failed else -1)
            state.doubts[source] = (min(MOST_DOUBT, max(0, level)), _finished(state))
    if (record := state.ledger.close(trial.version)) is not None:
        line = reasons.outcome(record, len(after))
        _log(state, now, "outcome", line, line)
    stages = state.observed.stages.times()
    if not failed or stages is None:
        return
    links = state.observed.links.states(now)
    present = measured(state, stages, links, now)
    state.missed = abs(median(after) - trial.promise.after), present
    slower = slower or (bool(before) and median(after) > median(before))
    if not (slower or trial.promise.may_go_back):
        return
    # Without the evidence that was wrong, which is not believed again for now.
    _hold(state, trial.sources, _finished(state) + 1, DOUBTED_NEEDS)
    state.plans.baseline = trial.baseline
    situation = without(present, trial.sources, trial.before)
    _ask(
        state,
        "undelivered",
        situation,
        links,
        since=ran[-1].index if slower else None,
        previous=trial.previous,
        faster=(median(before), median(after)) if slower else None,
    )


# --- evidence that is not believed ------------------------------------------------------------


def _doubt(state: DecisionState, source: int) -> int:
    """How often a source has been wrong lately."""
    level, at = state.doubts.get(source, (0, _finished(state)))
    if at is None:
        state.doubts[source] = (level, at := _finished(state))
    return max(0, level - max(0, _finished(state) - at) // FORGET)


def doubt_levels(state: DecisionState) -> dict[int, int]:
    """Levels of doubt by source, for a snapshot."""
    return {source: level for source, (level, _) in state.doubts.items() if level}


def _held(state: DecisionState) -> Sources:
    """Sources that are not believed now."""
    return frozenset(s for s, hold in state.holds.items() if _finished(state) < hold.retry_at)


def _hold(state: DecisionState, sources: Sources, since: int, wait: int | None = None) -> bool:
    """Do not believe ``sources`` for ``wait`` iterations, by default twice as many as the last
    time. Returns whether any was believed before."""
    new = False
    for source in sources:
        hold = state.holds.get(source)
        if hold is None:
            hold, new = Hold(since, _finished(state), _finished(state)), True
            state.holds[source] = hold
        hold.retry_at = _finished(state) + (wait or hold.wait)
        hold.wait = min(LONGEST_WAIT, 2 * hold.wait)
    return new


def _evidence(
    state: DecisionState,
    cause: Cause,
    sources: Sources,
    situation: Situation,
    links: Sequence[LinkState],
) -> tuple[Evidence, int]:
    """What finished iterations say of the ``sources`` of a decision, and the iteration in which
    these began to show."""
    since = _detectable_at(state, situation, links)
    if cause in ("profile", "barrier", "steady"):
        # No link has just turned slow or well.
        since = _finished(state) - COMPARED
    holds = [state.holds[source] for source in sources if source in state.holds]
    first = min([since, *(hold.since for hold in holds)])
    doubt = max((_doubt(state, source) for source in sources), default=0)
    waited = _finished(state) - min((hold.began for hold in holds), default=_finished(state))
    iterations = state.ledger.under(state.plans.wanted.version)[1:]
    found = Evidence(
        state.reference,
        without(situation, sources, state.last.situation),
        tuple(f.seconds for f in iterations if f.index > first),
        missed=_missed(state, situation),
        overdue=waited >= PATIENCE * 4**doubt,
    )
    return found, since


def _missed(state: DecisionState, now: Situation) -> float:
    """Seconds by which predictions are known to be wrong in this situation."""
    if state.missed is None:
        return 0.0
    seconds, then = state.missed
    return 0.0 if times_differ(now, then) or now.slow != then.slow else seconds


def _detectable_at(state: DecisionState, now: Situation, links: Sequence[LinkState]) -> int:
    """Iteration of the first window that showed the present state of links: before it, another
    link was slow, or this one was not."""
    # Other causes have no first window: the current iteration.
    return max(turned_at(now, state.last.situation, links), default=state.observed.iteration)


def _lacking(state: DecisionState, sources: Sources, evidence: Evidence) -> int:
    """Iterations that doubted sources lack until they may be the reason for a change."""
    doubt = max((_doubt(state, source) for source in sources), default=0)
    if not doubt or evidence.overdue:
        return 0
    return max(0, int(DOUBTED_NEEDS * 2 ** (doubt - 1)) - len(evidence.measured))


# --- limits of the number of changes ----------------------------------------------------------


def hold_iterations(state: DecisionState) -> int:
    """Iterations for which a link must be healthy before its old plan returns."""
    return HOLD * int(BACKOFF**state.flaps) if state.flaps else FIRST_HOLD


def count_flaps(state: DecisionState, links: Iterable[int]) -> None:
    """Note a directive for slow ``links``, some of which may have been slow shortly before."""
    finished = _finished(state)
    hold = max(HOLD, hold_iterations(state))
    again = state.returned.keys() & set(links)
    lately = {i: at for i, at in state.returned.items() if finished - at <= SOON * hold}
    if again & lately.keys():
        state.flaps = min(MOST_FLAPS, state.flaps + 1)
    elif state.returned and not lately:
        state.flaps = 0
    state.returned = {i: at for i, at in lately.items() if i not in again}


def may_return(state: DecisionState, links: Sequence[LinkState]) -> bool:
    """Whether the plan of a link that is healthy again may return."""
    last = state.last.situation
    all_well = all(link.health is Health.HEALTHY for link in links)
    if state.returns_at_once and all_well and not state.flaps:
        return True
    well = [
        link.since_iteration
        for link, was_slow in zip(links, last.slow, strict=True)
        if was_slow and link.health is Health.HEALTHY and link.since_iteration is not None
    ]
    hold = hold_iterations(state)
    if any(last.recent):
        hold = max(hold, HOLD * BACKOFF)  # Delays varied: this may be only a pause.
    return _finished(state) - max(well, default=0) >= hold


def _is_time(state: DecisionState, cause: Cause, links: Sequence[LinkState]) -> bool:
    """Whether a decision may be made for this cause now. If not, the next report asks again."""
    last = state.last
    if cause in ("memory", "slow", "restart"):
        return True
    if _finished(state) == last.after and not (cause == "worse" and last.cause == "steady"):
        return False  # For a varying delay, at most one decision per iteration.
    if cause == "worse":
        return True
    newest, wanted = state.ledger.newest(), state.plans.wanted.version
    if wanted and (newest is None or newest.plan_version < wanted):
        return False  # The wanted plan has not run yet.
    if state.issued_at is not None and _finished(state) - state.issued_at < SETTLE:
        return False
    return cause != "recovered" or may_return(state, links)


# --- causes -----------------------------------------------------------------------------------


def find_cause(state: DecisionState, now: Situation) -> Cause | None:
    """Why the situation requires another decision; None if it does not."""
    last, plan = state.last, state.plans.known
    if plan is None:
        return "restart"
    if now.rooms != last.situation.rooms and _exceeds(state, plan, now.rooms):
        return "memory"
    least = state.spec.adaptation.min_delay_ms / 1e3
    if (change := change_of_links(now, last.situation, least)) is not None:
        return change
    if last.after is not None and not last.steadied and any(now.slow):
        waited = _finished(state) - last.after >= STEADY * max(HOLD, hold_iterations(state))
        if waited and plan.routes != state.plans.baseline.routes:
            return "steady"
    if now.barrier != last.barrier and not any(now.slow):
        return "barrier"
    if _eased(state, now.stages) or (_profile_is_due(state) and _profile_differs(state, now)):
        return "profile"
    return None


def _eased(state: DecisionState, stages: tuple[StageTimes, ...] | None) -> bool:
    """Whether stages are faster than a decision has found them to be."""
    last, planned = state.last, state.last.situation.stages
    if stages is None or last.profiled_at is None or not state.observed.stages.measured:
        return False
    if state.eased is None or state.eased[0] is not stages or state.eased[1] is not planned:
        state.eased = stages, planned, shorter(stages, planned)
    return state.eased[2]


def _exceeds(state: DecisionState, plan: Plan, rooms: tuple[Room, ...]) -> bool:
    if state.fits is not None and state.fits[0] is plan and state.fits[1] is rooms:
        return False
    if excess(plan, rooms) is not None:
        return True
    state.fits = plan, rooms
    return False


def _profile_is_due(state: DecisionState) -> bool:
    """Whether to compare op times with the planned ones. Done every few iterations only, since it
    is the most expensive part of a report while links are healthy."""
    last = state.last
    if not state.observed.stages.measured or _finished(state) < last.compare_from:
        return False
    if last.profiled_at is None:
        return state.ledger.finished >= WARM_UP
    return any(last.situation.far) or _finished(state) - last.profiled_at >= PROFILE_EVERY


def _profile_differs(state: DecisionState, now: Situation) -> bool:
    """Whether op times, reductions or normal wire times have differed from the planned ones for
    some time, or limits do now."""
    last = state.last
    if _finished(state) >= last.compare_from:
        first = last.profiled_at is None
        last.compare_from = _finished(state) + (COMPARE_FIRST if first else COMPARE_EVERY)
        assumed = first and last.situation.assumed
        differs = assumed or times_differ(now, last.situation)
        if (
            (first or any(last.situation.far))
            and not any(now.unknown)
            and now.moved(last.situation)
        ):
            # A network that is slow everywhere is so from the start, and does not come and go.
            return True
        last.readings = last.readings + 1 if differs else 0
    return last.readings >= READINGS or limits_differ(now, last.situation)


def consider(state: DecisionState, now: float) -> None:
    """Request a decision if there is a cause, and if the limits allow it now."""
    observed, plans, last = state.observed, state.plans, state.last
    if observed.state != "training" or state.deciding or plans.awaits(now):
        return
    # Unless this pass finds the same cause again, the next one is of another moment.
    turned, state.turned = state.turned, {}
    rooms = observed.stages.rooms
    slow_lately = any(last.situation.slow) or observed.links.any_slow
    quiet = not (plans.unknown or slow_lately) and rooms == state.checked_rooms
    quiet = quiet and barrier(state) == last.barrier
    stages = observed.stages.times()
    eased = _eased(state, stages)
    if quiet and not eased and not _profile_is_due(state):
        return  # The common case: every other cause needs a link that is or was slow.
    links = observed.links.states(now)
    if _must_not(state, links, now):
        state.checked_rooms = rooms
        return
    if stages is None:
        if any(link.health is Health.SLOW for link in links):
            _note(state, now, "times", "a link is slow, but no stage has reported op times yet")
        return
    situation = _believed(state, stages, links, now)
    if eased:
        # What takes longer has to for some time; this comes at once.
        situation = without_longer(situation, last.situation)
    if not _knows_memory(state, now):
        return
    state.checked_rooms = rooms
    if any(room.device == 0 for room in rooms):
        memory = state.spec.schedule.activation_memory
        _note(state, now, "memory", reasons.no_room(situation, memory))
        return
    cause, held = find_cause(state, situation), _held(state)
    if held:
        state.turned = turned  # What is held may still become the cause.
    if cause is None:
        return
    sources = sources_of(cause, situation, last.situation, state.spec.adaptation.min_delay_ms / 1e3)
    state.turned_at = turned.get((cause, sources), observed.iteration)
    state.turned[cause, sources] = state.turned_at
    if not _is_time(state, cause, links):
        return
    if cause not in CHECKED:
        _ask(state, cause, situation, links)
        return
    if sources <= held:
        return
    evidence, since = _evidence(state, cause, sources, situation, links)
    if lacking := _lacking(state, sources, evidence):
        if _hold(state, sources, since, lacking):
            keep(state, now, reasons.doubted(cause, links, lacking))
        return
    _ask(state, cause, situation, links, since=since, evidence=evidence, sources=sources)


def _must_not(state: DecisionState, links: Sequence[LinkState], now: float) -> bool:
    """Whether the plan must not change. Says so if there would be a cause."""
    stages = state.observed.stages
    refusal = reasons.why_not(state.spec, stages.crowding)
    if refusal is None:
        return False
    slow = [link for link in links if link.health is Health.SLOW]
    if slow:
        _note(state, now, "policy", f"{reasons.describe(slow)}; {refusal}")
    too_much = excess(state.plans.wanted, stages.rooms)
    if too_much is not None:
        _note(state, now, "memory", f"{reasons.too_much(too_much)}; {refusal}")
    return True


def say_crowded(state: DecisionState, now: float) -> None:
    """Say once that the job does not adapt, or why its measurements tell little."""
    crowding, spec = state.observed.stages.crowding, state.spec
    adapts = spec.adaptation.enabled and spec.schedule.policy_kind is Policy.PIPEMORPH
    if crowding > 1 and adapts:
        _note(state, now, "crowded", reasons.crowded(crowding, bool(spec.faults)))


def _knows_memory(state: DecisionState, now: float) -> bool:
    """Whether limits in bytes can be converted to microbatches. A rank reports the size of a
    microbatch with its first profile or never; in that case the limit cannot be applied."""
    stages = state.observed.stages
    unknown = [i for i, f in enumerate(stages.footprints) if not f.activation_bytes]
    if state.spec.schedule.activation_memory is None or not unknown:
        return True
    if stages.measured:
        _note(state, now, "bytes", reasons.not_measured(unknown))
    return stages.measured


# --- decisions --------------------------------------------------------------------------------


def _ask(
    state: DecisionState,
    cause: Cause,
    situation: Situation,
    links: Sequence[LinkState],
    *,
    since: int | None = None,
    evidence: Evidence | None = None,
    sources: Sources = frozenset(),
    previous: Plan | None = None,
    faster: tuple[float, float] | None = None,
) -> None:
    """Leave the decision to the host. ``faster``: see :attr:`Replan.measured`."""
    last, plans = state.last, state.plans
    shown = _detectable_at(state, situation, links)
    changed, past = changed_since(state, cause, situation, links, shown)
    # Iterations for which the plan of a directive issued now would be in effect.
    remaining = state.spec.trainer.iterations - (_finished(state) + 1) - COMMIT_AHEAD
    state.pending = Pending(
        Replan(
            spec=state.rules,
            cause=cause,
            situation=situation,
            current=plans.wanted,
            baseline=plans.baseline,
            # Without its state, the controller does not know the plan of the ranks.
            lost=plans.unknown,
            remaining=None if state.endless else remaining,
            change_seconds=state.ledger.change_seconds,
            evidence=evidence or Evidence(state.reference),
            running=plans.running,
            start=plans.first,
            past=past,
            previous=previous,
            measured=faster,
            moved=cause == "profile" and situation.moved(last.situation),
        ),
        links=tuple(links),
        detectable_at=shown,
        before=copy.copy(last),
        since=shown if since is None else since,
        changed=changed,
        sources=sources,
    )
    last.situation, last.after, last.cause = situation, _finished(state), cause
    if cause not in ("profile", "memory", "barrier", "undelivered"):
        last.steadied = cause == "steady"
    if cause in ("profile", "memory"):
        last.profiled_at, last.readings = _finished(state), 0
    if not any(situation.slow):
        last.barrier = situation.barrier


def settle(state: DecisionState, asked: Replan, proposal: Proposal, now: float) -> None:
    """Act on the proposal for ``asked``. Ignored if that does not wait any more."""
    pending, finished = state.pending, _finished(state)
    if pending is None or pending.replan is not asked:
        return
    state.pending = None
    if asked.cause == "weigh":
        revise_saved(state, pending, proposal)
        state.weighed = asked.situation
        return
    if proposal.waits:
        state.last = pending.before  # So that the cause comes up again.
        _hold(state, pending.sources, pending.detectable_at)
        if any(f.measured for f in proposal.found if isinstance(f, NotConfirmed)):
            # Measured iterations contradict the sources: no doubt about them fades.
            for source in pending.sources:
                state.doubts[source] = (_doubt(state, source), finished)
    else:
        # Another reference, and not of the iteration that is running.
        state.reference_from, state.reference_complete = finished + 2, False
        state.trial = None  # It is of the situation before, and says nothing any more.
    revise_saved(state, pending, proposal)
    state.weighed = None
    if not proposal.waits:
        state.turned, state.turned_at = {}, None
    if proposal.chosen is None:
        keep(state, now, reasons.reason(asked.cause, pending.links, proposal))
        return
    _issue(state, pending, proposal, proposal.chosen, now)
    if proposal.promise is not None:
        # What was held back until now began to show when it was first held, and is believed.
        ended = [state.holds.pop(source) for source in pending.sources if source in state.holds]
        state.trial = Trial(
            version=state.plans.wanted.version,
            previous=asked.running,
            baseline=asked.baseline,
            sources=pending.sources,
            promise=proposal.promise,
            before=pending.before.situation,
            since=min([pending.since, *(hold.since for hold in ended)]),
        )
    if asked.cause in ("profile", "memory", "barrier") and not any(asked.situation.slow):
        state.plans.keep_as_baseline()


def weigh(state: DecisionState, now: float) -> None:
    """Request what the plan in effect saves if links have changed since that was last predicted,
    and the plan stays: it is held, or a job that ends has no use for another one."""
    plans, observed = state.plans, state.observed
    if state.pending is not None or plans.unknown or plans.running is not plans.wanted:
        return
    before = state.weighed or state.last.situation
    stages = observed.stages.times()
    if not plans.wanted.version or stages is None:
        return
    if not (any(before.slow) or observed.links.any_slow):
        return
    links = observed.links.states(now)
    situation = _believed(state, stages, links, now)
    moved = change_of_links(situation, before, 0.0, WEIGHED)
    if moved is None and not times_differ(situation, before):
        return
    changed, past = changed_since(state, "weigh", situation, links, observed.iteration)
    state.pending = Pending(
        Replan(
            spec=state.rules,
            cause="weigh",
            situation=situation,
            current=plans.wanted,
            baseline=plans.baseline,
            lost=False,
            remaining=None,
            change_seconds=None,
            evidence=Evidence(),
            running=plans.running,
            start=plans.first,
            past=past,
        ),
        links=tuple(links),
        detectable_at=observed.iteration,
        before=copy.copy(state.last),
        since=observed.iteration,
        changed=changed,
    )


def _issue(
    state: DecisionState, pending: Pending, proposal: Proposal, chosen: Option, now: float
) -> None:
    """Make the chosen option the wanted plan, under a new plan version."""
    asked, version = pending.replan, state.versions.take()
    record = reasons.record_of(
        asked,
        proposal,
        chosen,
        pending.links,
        version=version,
        at=now,
        iteration=state.observed.iteration,
        detectable_at=pending.detectable_at,
        peak_memory=state.observed.stages.peak_memory(),
    )
    plan = replace(chosen.plan, version=version)
    directive = Directive(
        plan_version=version,
        issued_at=now,
        reason=record.reason,
        plan=PlanMessage.of(plan),
        record=record.model_copy(),
    )
    state.plans.issue(plan, directive)
    if asked.cause in ("slow", "worse", "restart"):
        count_flaps(state, pending.sources)
    returning: set[int] = set()
    if record.kind != "revert":
        returning |= set(asked.current.delegated) - set(chosen.plan.delegated)
    if record.kind == "return":
        was, now_slow = pending.before.situation.slow, asked.situation.slow
        returning |= {i for i, slow in enumerate(was) if slow and not now_slow[i]}
    state.issued_at, state.returns_at_once = _finished(state), proposal.returns_at_once
    state.returned |= dict.fromkeys(returning, _finished(state))
    state.ledger.append(record)
    if proposal.saving is not None:
        state.ledger.revise(version, proposal.saving, _finished(state) + 1, None)
    line = reasons.short(version, asked.cause, pending.links, proposal)
    _log(state, now, record.kind, record.reason, line, plan_version=version)


# --- what was decided, and why ----------------------------------------------------------------


def keep(state: DecisionState, now: float, reason: str) -> None:
    """Record that the plan stays."""
    _log(state, now, "keep", reason, f"no change: {reason}")


def _note(state: DecisionState, now: float, topic: str, reason: str) -> None:
    """Record once per ``topic`` that the plan stays: it would repeat with every report."""
    if topic not in state.noted:
        state.noted.add(topic)
        keep(state, now, reason)


def _log(
    state: DecisionState,
    now: float,
    kind: Literal["adapt", "return", "revert", "keep", "outcome"],
    reason: str,
    line: str,
    *,
    plan_version: int | None = None,
) -> None:
    """Record a decision. ``line``: its text for a terminal."""
    state.ledger.decisions.append(
        Decision(
            at=now,
            iteration=state.observed.iteration,
            kind=kind,
            reason=reason,
            line=line,
            plan_version=plan_version,
        )
    )
