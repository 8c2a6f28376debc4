"""Texts and records of a controller's decisions, with the figures that they are based on.

Each text is one line, for status and report.json. :func:`short` is the form for a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide import replan
from pipemorph.control.decide.forecast import Option
from pipemorph.control.decide.replan import Proposal, Replan
from pipemorph.control.decide.situation import Cause, Situation
from pipemorph.control.observed.stages import Excess
from pipemorph.planning import Policy
from pipemorph.planning.ir import dashed
from pipemorph.planning.offload import left
from pipemorph.wire import AdaptationRecord, Directive, Health, LinkState

COLUMNS = 110
"""Most columns of :func:`short`."""
NAMED = 3
"""Most delegated links that :func:`short` names."""
SURE = 0.5
"""Confidence from which a link in doubt is said to be slow."""
FULL_WARMUP = 8
"""Most stages whose warm-up :func:`short` shows in full."""


# --- before a decision --------------------------------------------------------------------


def why_not(spec: JobSpec, crowding: float) -> str | None:
    """Why a job's plan must not change; None if it may. ``crowding``: of its worst host."""
    if not spec.adaptation.enabled:
        return "adaptation is disabled in the spec"
    if spec.schedule.policy_kind is not Policy.PIPEMORPH:
        return f"policy {spec.schedule.policy} keeps its schedule and routes"
    if crowding > 1 and not spec.faults:
        return f"{crowding:.3g} ranks per processor compute on a host"
    return None


def crowded(crowding: float, adapts: bool) -> str:
    """More ranks compute on a host than it has processors."""
    what = f"{crowding:.3g} ranks per processor compute on a host, so it is slow when links are not"
    if adapts:
        return f"{what}; the job has spec.faults: the plan may change"
    return f"{what}: the plan stays; give each rank a processor"


def not_measured(stages: Sequence[int]) -> str:
    """``activationMemory`` cannot be applied on these stages, in ascending order."""
    return (
        f"activationMemory cannot limit {shown_stages(stages)}, where the size of a microbatch was"
        " not measured; set inFlightLimit"
    )


def no_room(situation: Situation, memory: int | None) -> str:
    """``activationMemory``, in bytes, is too small for any plan: a room is 0."""
    stage = next(i for i, room in enumerate(situation.rooms) if room.device == 0)
    if situation.rooms[stage].memory is not None:
        return (
            f"a microbatch holds more than activationMemory, {memory} bytes, on all stages of the"
            f" rank of stage {stage}: no plan fits; kept the plan"
        )
    return (
        f"a microbatch holds {situation.stages[stage].activation_bytes} bytes on stage {stage},"
        f" more than activationMemory, {memory} bytes: no plan fits; kept the plan"
    )


def doubted(cause: Cause, links: Sequence[LinkState], lacking: int) -> str:
    """A change for this cause needs more iterations, since an earlier one did not pay."""
    return (
        f"{_why(cause, links)}; kept the plan: an earlier change for this did not bring what it"
        f" promised, so {lacking} more iterations must confirm it"
    )


def describe(slow: Sequence[LinkState]) -> str:
    """Slow links, with their delays. Decisions go on with the delay that a link in doubt had."""
    return ", ".join(map(_slow, slow))


def _slow(link: LinkState) -> str:
    if link.in_doubt and link.confidence < SURE:
        return f"{link.name} was slow and may be well again ({link.direction})"
    return (
        f"{link.name} is slow by {shown_time(link.delay)} one way"
        f"{f', narrow: {shown_time(link.transfer)} per message' if link.transfer else ''}"
        f" ({link.direction}, {_sure(link)}{'' if link.in_doubt else ' sure'})"
    )


def _sure(link: LinkState) -> str:
    """The confidence, rounded down: 99.6 % is not all of it. None while the newest windows speak
    against it."""
    return "in doubt" if link.in_doubt else f"{int(100 * link.confidence + 1e-9)}%"


# --- of a decision ------------------------------------------------------------------------


def reason(cause: Cause, links: Sequence[LinkState], proposal: Proposal) -> str:
    """The full reason of a decision: its cause and its findings."""
    parts = [_why(cause, links)]
    if proposal.chosen is not None:
        parts.append(_predicted(proposal, proposal.chosen))
    return "; ".join([*parts, *map(_sentence, proposal.found)])


def handed_in(directive: Directive | None) -> str:
    """The agent has handed in its snapshot, with the newest directive; None: it has none."""
    going_on = "going on from the snapshot of the job's agent"
    if directive is None:
        return f"{going_on}: the ranks run the plan of the start"
    return f"{going_on}: the ranks run plan v{directive.plan_version}: {directive.reason}"


def _why(cause: Cause, links: Sequence[LinkState]) -> str:
    slow = [link for link in links if link.health is Health.SLOW]
    match cause:
        case "profile":
            return "op times or wire times differ from the planned ones"
        case "barrier":
            return "the plan was made for another kind of barrier between iterations"
        case "steady":
            return f"{describe(slow)}, for a while now"
        case "varies":
            return f"{describe(slow)}, and it varies"
        case "restart":
            return "the controller does not know the plan in effect"
        case "memory":
            return "the plan in effect exceeds a memory limit"
        case "undelivered":
            return "the last change did not bring half of its promise"
        case "recovered":
            return "a link recovered" + (f", {describe(slow)}" if slow else ", none is slow")
        case _:
            return describe(slow)


def _predicted(proposal: Proposal, chosen: Option) -> str:
    before, after = proposal.predicted
    old = "unknown before" if before is None else f"{shown_time(before)} with the current plan"
    moved = list(map(str, chosen.plan.delegated))
    links = f"link{'s' * (len(moved) > 1)} {', '.join(moved)} delegated"
    return (
        f"predicted per iteration {old}, {shown_time(after)} with"
        f" warm-up {dashed(chosen.plan.warmup, 12)} and"
        f" {links if moved else 'all links direct'}{_new_dispatch(proposal.current, chosen)}"
    )


def _new_dispatch(current: Option | None, chosen: Option) -> str:
    """The dispatch of a plan, if it is not that of the plan before."""
    if current is None or chosen.plan.dispatch is current.plan.dispatch:
        return ""
    return f", {chosen.plan.dispatch} dispatch"


def _sentence(finding: replan.Finding) -> str:
    match finding:
        case replan.NoPlan(why):
            return f"no plan was found: {why}"
        case replan.MustNotRun(why):
            return (
                f"the new plan fails its check: {too_much(why) if isinstance(why, Excess) else why}"
            )
        case replan.MustNotStay(excess):
            return f"the current plan must be replaced: {too_much(excess)}"
        case replan.AtBaseline():
            return "kept the plan: it is the one for healthy links"
        case replan.TooLittle(seconds, gain, least):
            return (
                f"kept the plan, predicted {shown_time(seconds)} per iteration: the best other one"
                f" saves {max(0.0, gain):.1%}, less than minGain {least:.1%}"
            )
        case replan.Saves(seconds, iterations, cost, cost_seen):
            over = (
                "per iteration"
                if iterations is None
                else f"over the {max(0, iterations)} iterations left"
            )
            return (
                f"{'it' if finding.pays else 'kept the plan: the best other one'} saves"
                f" {shown_time(max(0.0, seconds))} {over},"
                f" a change {'has cost' if cost_seen else 'is assumed to cost'} {shown_time(cost)}"
            )
        case replan.NotConfirmed(expected, gain, iterations, None):
            return (
                f"kept the plan: {_iterations(iterations)} in this state cannot confirm"
                f" {shown_time(expected)} per iteration and {shown_time(gain)} that a change would"
                " save"
            )
        case replan.NotConfirmed(expected, gain, iterations, measured):
            assert measured is not None
            return (
                f"kept the plan: {_iterations(iterations)} in this state took"
                f" {shown_time(measured)}, not {shown_time(expected)} as predicted; the"
                f" {shown_time(gain)} that a change would save are within this error"
            )
        case replan.Missing(gain, missed):
            return (
                f"kept the plan: predictions of iterations in this state miss {shown_time(missed)},"
                f" which is more than the {shown_time(gain)} that the best other plan would save"
            )
        case replan.Eases():
            return "it is no slower, and delegates fewer links"
        case replan.GoesBack(slower):
            if slower:
                return "kept the plan: the one before it would be slower"
            return "the plan before it returns"
        case replan.OffloadWeighed(stages, copies, saves):
            return (
                f"offload on {shown_stages(stages)} costs {shown_time(copies)} per copied"
                " microbatch and"
                f" {'is needed to have a plan' if saves is None else _saves(saves)}"
            )
        case replan.RecomputeWeighed(stages, forwards, saves):
            return (
                f"recomputation on {shown_stages(stages)} runs {forwards} forwards again and"
                f" {'is needed to have a plan' if saves is None else _saves(saves)}"
            )
        case replan.FusedWeighed(stages, saves):
            return f"a fused backward on {shown_stages(stages)} {_saves(saves)}"
        case replan.MemoryBinds(stages, least, most):
            counts = str(least) if least == most else f"{least} to {most}"
            return f"activationMemory has room for {counts} microbatches on {shown_stages(stages)}"


def _iterations(count: int) -> str:
    return f"{count} iteration{'s' * (count != 1)}"


def too_much(excess: Excess) -> str:
    """Where a plan exceeds its limits."""
    stage, held, room, field = excess
    if field == "hostMemory":
        return (
            f"stage {stage} has {held} microbatches in host memory, hostMemory has room for {room}"
        )
    if field == "rank":
        return (
            f"the rank of stage {stage} holds {held} bytes of all its stages, activationMemory is"
            f" {room}"
        )
    return f"stage {stage} holds {held} microbatches, {field} has room for {room}"


def _saves(seconds: float) -> str:
    return f"saves {shown_time(seconds)}" if seconds > 0 else "saves nothing"


def outcome(record: AdaptationRecord, iterations: int) -> str:
    """The promise of a change and what it brought, by the figures of its record. ``iterations``:
    that were measured after it."""
    text = f"plan v{record.plan_version}: promised {record.promised or 0.0:.1%}"
    if record.measured is not None:
        text += f", measured {record.measured:.1%}"
    elif record.iteration_seconds_after is not None:
        # Nothing that was measured before can be compared.
        text += (
            f", so {shown_time(record.predicted_seconds_after)} per iteration; measured"
            f" {shown_time(record.iteration_seconds_after)}"
        )
    return f"{text}, after {_iterations(iterations)}"


# --- of a change, on a terminal -----------------------------------------------------------


def short(version: int, cause: Cause, links: Sequence[LinkState], proposal: Proposal) -> str:
    """A change in one line of at most :data:`COLUMNS`: cause, predicted time per iteration, plan,
    and the net saving over the iterations left, if it is known how many there are.

    ``plan v1: link 0 +6.5 ms | predicted 1.198 -> 1.069 s/it (-11%) | warm-up 16-9-4-1, direct``
    """
    current, chosen = proposal.current, proposal.chosen
    assert chosen is not None, "no change"
    before, after = proposal.predicted
    time, change = f"{after:.3f} s/it", ""
    if before is not None:
        time = f"{before:.3f} -> {time}"
        change = f" ({after / before - 1:+.0%})" if before > 0 else ""
    times = [f"predicted {time}{change}", f"{time}{change}", time]
    # Each part in the longest form that fits; the later ones matter more.
    forms = [_short_why(cause, links), times, _short_plan(current, chosen)]
    shorten = [0, 1, 1, 2]
    saves = next((each for each in proposal.found if isinstance(each, replan.Saves)), None)
    # Without an end there is no sum; what an iteration saves is in its times.
    if saves is not None and saves.iterations is not None:
        gain = f"gain {saves.net:.1f} s"
        forms.append(
            [f"net {gain} / {saves.iterations} it", f"{gain} / {saves.iterations} it", gain]
        )
        shorten = [0, 3, 1, 3, 1, 2, 2]
    line = _line(version, forms)
    for part in shorten:
        if len(line) > COLUMNS:
            forms[part] = forms[part][1:] or forms[part]
            line = _line(version, forms)
    return line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…"


def _line(version: int, forms: Sequence[Sequence[str]]) -> str:
    return f"plan v{version}: {' | '.join(form[0] for form in forms)}"


def _short_why(cause: Cause, links: Sequence[LinkState]) -> list[str]:
    slow = sorted((x for x in links if x.health is Health.SLOW), key=lambda x: -x.delay)
    match cause:
        case "profile":
            return ["other op or wire times"]
        case "barrier":
            return ["other barrier"]
        case "restart":
            return ["unknown plan in effect"]
        case "memory":
            return ["too little memory"]
        case "undelivered":
            return ["promise not kept"]
    if not slow:
        return ["links recovered"]
    worst, more = slow[0], f" and {len(slow) - 1} more" if len(slow) > 1 else ""
    late = f"{1e3 * worst.delay:+.1f} ms"
    return [
        f"link {worst.link} {worst.direction} {late} ({_sure(worst)}){more}",
        f"link {worst.link} {late}{more}",
    ]


def _short_plan(current: Option | None, chosen: Option) -> list[str]:
    plan = chosen.plan
    counts, moved = list(map(str, plan.warmup)), plan.delegated
    if len(counts) > FULL_WARMUP:
        counts = [*counts[:2], "…", counts[-1]]
    warmup = f"warm-up {'-'.join(counts)}"
    more = _new_dispatch(current, chosen)
    if not moved:
        return [f"{warmup}, direct{more}"]
    plural = "s" * (len(moved) > 1)
    named = f"{warmup}, link{plural} {', '.join(map(str, moved))} delegated{more}"
    few = f"{warmup}, {len(moved)} link{plural} delegated{more}"
    forms = [named, few] if len(moved) <= NAMED else [few]
    return [*forms, few.removesuffix(more)] if more else forms


def record_of(
    asked: Replan,
    proposal: Proposal,
    chosen: Option,
    links: Sequence[LinkState],
    *,
    version: int,
    at: float,
    iteration: int,
    detectable_at: int,
    peak_memory: list[int | None],
) -> AdaptationRecord:
    """Record of the change to ``chosen``, as far as known when it is issued. ``links``: as they
    were when it was asked for; ``at``: wall clock, seconds; ``iteration``: the newest that ranks
    had begun; ``detectable_at``: the one that first showed the reason; ``peak_memory``: bytes per
    stage until then."""
    plan, (before, after) = chosen.plan, proposal.predicted
    kind: Literal["adapt", "return", "revert"] = "adapt"
    if asked.cause == "undelivered":
        kind = "revert"
    elif asked.cause not in ("slow", "worse", "memory") and plan.runs_as(asked.baseline):
        kind = "return"
    away = left(plan.schedule, plan.device_limits, plan.recompute)
    return AdaptationRecord(
        plan_version=version,
        kind=kind,
        detected_at=at,
        detected_at_iteration=iteration,
        detectable_at=detectable_at,
        reason=reason(asked.cause, links, proposal),
        links=[link.without_windows() for link in links if link.health is not Health.HEALTHY],
        warmup_before=list(asked.current.warmup),
        warmup_after=list(plan.warmup),
        routes=list(plan.routes),
        predicted_seconds_before=before,
        predicted_seconds_after=after,
        promised=1 - after / before if before else None,
        peak_memory_before=peak_memory,
        device_limits_before=list(asked.current.device_limits),
        device_limits_after=list(plan.device_limits),
        offloaded=away.offloaded,
        recomputed=away.recomputed,
        fused_stages=list(plan.schedule.fused),
        saving=None if proposal.saving is None else proposal.saving.seconds,
        fault_cost=0.0 if proposal.saving is None else proposal.saving.fault_cost,
    )


# --- words --------------------------------------------------------------------------------


def shown_stages(stages: Sequence[int]) -> str:
    """Stages for a text: ``stages 0-5, 8``. ``stages`` in ascending order."""
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


def shown_time(seconds: float) -> str:
    """A time for a text: ``1.234 s`` or ``5.6 ms``."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
