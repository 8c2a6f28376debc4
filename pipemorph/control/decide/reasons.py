"""Texts and records of a controller's decisions, with the figures behind them.

Each text is one line, for status and report.json. :func:`summarize_change` is the form for a
terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipemorph.control.decide import plan_choice
from pipemorph.control.decide.forecast import PlanOption
from pipemorph.control.decide.plan_choice import DecisionRequest, PlanProposal
from pipemorph.control.decide.replica_shares import MATERIAL_PACE_CHANGE
from pipemorph.control.decide.situation import Cause, Situation
from pipemorph.control.job_state.stages import MemoryExcess
from pipemorph.planning import Policy
from pipemorph.planning.ir import join_dashed
from pipemorph.planning.offload import count_away_microbatches
from pipemorph.protocol import AdaptationRecord, Directive, Health, LinkState
from pipemorph.spec.job_spec import JobSpec

SUMMARY_COLUMNS = 110
"""Most columns of :func:`summarize_change`."""
MOST_NAMED_LINKS = 3
"""Most delegated links that :func:`summarize_change` names."""
SLOW_CONFIDENCE = 0.5
"""Confidence from which texts call a link in doubt slow."""
MOST_WARMUP_STAGES = 8
"""Most stages whose warm-up :func:`summarize_change` shows in full."""


# --- before a decision --------------------------------------------------------------------


def explain_blocked_adaptation(spec: JobSpec, crowding: float) -> str | None:
    """Reason that blocks changes of a job's plan; None if it may change. ``crowding``: ranks per
    processor on its worst host."""
    if spec.is_observed:
        return "PipeMorph only observes this job"
    if not spec.adaptation.enabled:
        return "adaptation is disabled in the spec"
    if spec.schedule.policy_kind is not Policy.PIPEMORPH:
        return f"policy {spec.schedule.policy} keeps its schedule and routes"
    if crowding > 1 and not spec.faults:
        return f"{crowding:.3g} ranks per processor compute on a host"
    return None


def describe_cpu_contention(crowding: float, spec: JobSpec) -> str:
    """Text if a host has more ranks than processors."""
    what = f"{crowding:.3g} ranks per processor compute on a host, so it is slow when links are not"
    if spec.is_observed:
        return f"{what}; give each rank a processor"
    if spec.faults:
        return f"{what}; the job has spec.faults: the plan may change"
    return f"{what}: the plan stays; give each rank a processor"


def describe_unmeasured_stages(stages: Sequence[int]) -> str:
    """Text if ``activationMemory`` cannot limit ``stages``, in ascending order."""
    return (
        f"activationMemory cannot limit {format_stages(stages)}, where the size of a microbatch was"
        " not measured; set inFlightLimit"
    )


def describe_insufficient_memory(situation: Situation, memory: int | None) -> str:
    """Text if ``activationMemory``, in bytes, is too small for any plan: a room is 0."""
    stage = next(i for i, room in enumerate(situation.rooms) if room.device_microbatches == 0)
    if situation.rooms[stage].rank_memory is not None:
        return (
            f"a microbatch holds more than activationMemory, {memory} bytes, on all stages of the"
            f" rank of stage {stage}: no plan fits; the plan stays"
        )
    return (
        f"a microbatch holds {situation.stages[stage].activation_bytes} bytes on stage {stage},"
        f" more than activationMemory, {memory} bytes: no plan fits; the plan stays"
    )


def describe_doubted_change(cause: Cause, links: Sequence[LinkState], lacking: int) -> str:
    """Text if a change needs ``lacking`` more iterations, since an earlier one did not pay."""
    return (
        f"{_describe_cause(cause, links)}; the plan stays: an earlier change for this did not bring"
        f" what it promised, so {lacking} more iterations must confirm it"
    )


def describe_slow_links(slow: Sequence[LinkState]) -> str:
    """Text for slow links, with their delays. Decisions use the last delay of a link in doubt."""
    return ", ".join(map(_describe_slow_link, slow))


def _describe_slow_link(link: LinkState) -> str:
    if link.in_doubt and link.confidence < SLOW_CONFIDENCE:
        return f"{link.name} was slow and may be healthy again ({link.direction})"
    return (
        f"{link.name} is slow by {format_seconds(link.delay)} one way"
        f"{f', narrow: {format_seconds(link.transfer)} per message' if link.transfer else ''}"
        f" ({link.direction}, {_format_confidence(link)}{'' if link.in_doubt else ' sure'})"
    )


def _format_confidence(link: LinkState) -> str:
    """Text for the confidence, rounded down; over 99 % it is not called 100 %. No number while the
    newest windows contradict it."""
    if link.in_doubt:
        return "in doubt"
    percent = int(100 * link.confidence + 1e-9)
    return f"{percent}%" if percent <= 99 else "over 99%"


# --- of a decision ------------------------------------------------------------------------


def explain_decision(cause: Cause, links: Sequence[LinkState], proposal: PlanProposal) -> str:
    """Full reason of a decision: its cause and its findings."""
    parts = [_describe_cause(cause, links)]
    if proposal.chosen is not None:
        parts.append(_describe_prediction(proposal, proposal.chosen))
    return "; ".join([*parts, *map(_describe_finding, proposal.findings)])


def describe_adopted_plan(directive: Directive | None) -> str:
    """Text for an adopted snapshot of the agent. ``directive``: the newest in it, if any."""
    adopted = "continued from the snapshot of the job's agent"
    if directive is None:
        return f"{adopted}: the ranks run the initial plan"
    return f"{adopted}: the ranks run plan v{directive.plan_version}: {directive.reason}"


def _describe_cause(cause: Cause, links: Sequence[LinkState]) -> str:
    """Text for the cause of a decision."""
    slow = [link for link in links if link.health is Health.SLOW]
    match cause:
        case "profile":
            return "op times or wire times differ from the planned ones"
        case "barrier":
            return "the plan was made for another kind of barrier between iterations"
        case "steady":
            return f"{describe_slow_links(slow)}, for some time"
        case "varies":
            return f"{describe_slow_links(slow)}, and it varies"
        case "restart":
            return "the controller does not know the plan in effect"
        case "memory":
            return "the plan in effect exceeds a memory limit"
        case "undelivered":
            return "the last change did not bring half of its promise"
        case "pace":
            return "replicas compute at other speeds"
        case "recovered":
            return "a link recovered" + (
                f", {describe_slow_links(slow)}" if slow else ", none is slow"
            )
        case _:
            return describe_slow_links(slow)


def _describe_prediction(proposal: PlanProposal, chosen: PlanOption) -> str:
    """Text for the predicted times of a change and the new plan."""
    before, after = proposal.predicted_seconds
    old = "unknown before" if before is None else f"{format_seconds(before)} with the current plan"
    moved = list(map(str, chosen.plan.delegated_links))
    links = f"link{'s' * (len(moved) > 1)} {', '.join(moved)} delegated"
    return (
        f"predicted per iteration {old}, {format_seconds(after)} with"
        f" warm-up {join_dashed(chosen.plan.warmup, 12)} and"
        f" {links if moved else 'all links direct'}"
        f"{_describe_new_dispatch(proposal.current, chosen)}"
    )


def _describe_new_dispatch(current: PlanOption | None, chosen: PlanOption) -> str:
    """Text for the dispatch of a plan; empty if it is unchanged."""
    if current is None or chosen.plan.dispatch is current.plan.dispatch:
        return ""
    return f", {chosen.plan.dispatch} dispatch"


def _describe_finding(finding: plan_choice.Finding) -> str:
    """Text for a finding."""
    match finding:
        case plan_choice.NoPlanFound(why):
            return f"no plan was found: {why}"
        case plan_choice.PlanCheckFailed(why):
            problem = describe_excess(why) if isinstance(why, MemoryExcess) else why
            return f"the new plan fails its check: {problem}"
        case plan_choice.PlanExceedsMemory(excess):
            return f"the current plan must be replaced: {describe_excess(excess)}"
        case plan_choice.AtBaselinePlan():
            return "the plan stays: it is the one for healthy links"
        case plan_choice.GainTooSmall(seconds, gain, least):
            return (
                f"the plan stays, predicted {format_seconds(seconds)} per iteration: the best other"
                f" one saves {max(0.0, gain):.1%}, less than minGain {least:.1%}"
            )
        case plan_choice.NetSaving(seconds, iterations, cost, cost_seen):
            over = (
                "per iteration"
                if iterations is None
                else f"over the {max(0, iterations)} remaining iterations"
            )
            return (
                f"{'it' if finding.pays_off else 'the plan stays: the best other one'} would save"
                f" {format_seconds(max(0.0, seconds))} {over},"
                f" a change {'has cost' if cost_seen else 'is assumed to cost'}"
                f" {format_seconds(cost)}"
            )
        case plan_choice.GainNotConfirmed(expected, gain, iterations, None):
            return (
                f"the plan stays: {_format_iterations(iterations)} in this state cannot confirm"
                f" {format_seconds(expected)} per iteration and {format_seconds(gain)} that a"
                " change would save"
            )
        case plan_choice.GainNotConfirmed(expected, gain, iterations, measured):
            assert measured is not None
            return (
                f"the plan stays: {_format_iterations(iterations)} in this state took"
                f" {format_seconds(measured)}, not {format_seconds(expected)} as predicted; the"
                f" {format_seconds(gain)} that a change would save are within this error"
            )
        case plan_choice.GainWithinError(gain, missed):
            return (
                "the plan stays: predictions of iterations in this state miss"
                f" {format_seconds(missed)}, which is more than the {format_seconds(gain)} that the"
                " best other plan would save"
            )
        case plan_choice.FewerDelegatedLinks():
            return "it is no slower, and delegates fewer links"
        case plan_choice.ChangeReverted(slower):
            if slower:
                return "the plan stays: the one before it would be slower"
            return "the plan before it returns"
        case plan_choice.OffloadGain(stages, copies, saves):
            return (
                f"offload on {format_stages(stages)} costs {format_seconds(copies)} per copied"
                " microbatch and"
                f" {'is needed to have a plan' if saves is None else _format_saving(saves)}"
            )
        case plan_choice.RecomputeGain(stages, forwards, saves):
            return (
                f"recomputation on {format_stages(stages)} runs {forwards} forwards again and"
                f" {'is needed to have a plan' if saves is None else _format_saving(saves)}"
            )
        case plan_choice.FusedBackwardGain(stages, saves):
            return f"a fused backward on {format_stages(stages)} {_format_saving(saves)}"
        case plan_choice.SharesChosen(shares, slowness):
            slow = [
                f"replica {replica} {ratio:.1f} times"
                for replica, ratio in enumerate(slowness)
                if ratio >= 1 + MATERIAL_PACE_CHANGE
            ]
            return (
                f"microbatches by replica {join_dashed(shares, 12)}: a microbatch takes"
                f" on {', '.join(slow[:4])} as long as on the fastest replica"
            )
        case plan_choice.MemoryLimitBinds(stages, least, most):
            counts = str(least) if least == most else f"{least} to {most}"
            return f"activationMemory has room for {counts} microbatches on {format_stages(stages)}"


def _format_iterations(count: int) -> str:
    return f"{count} iteration{'s' * (count != 1)}"


def describe_excess(excess: MemoryExcess) -> str:
    """Text for the limit that a plan exceeds."""
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


def _format_saving(seconds: float) -> str:
    """Text for a gain over new plans without an offload, a recomputation or a fused backward."""
    if seconds <= 0:
        return "saves nothing"
    return f"makes the best new plan {format_seconds(seconds)} shorter"


def describe_outcome(record: AdaptationRecord, iterations: int) -> str:
    """Text for a change's promised and measured gain, after so many measured ``iterations``."""
    text = f"plan v{record.plan_version}: promised {record.promised or 0.0:.1%}"
    if record.measured is not None:
        text += f", measured {record.measured:.1%}"
    elif record.iteration_seconds_after is not None:
        # No comparable iteration was measured before the change.
        text += (
            f", so {format_seconds(record.predicted_seconds_after)} per iteration; measured"
            f" {format_seconds(record.iteration_seconds_after)}"
        )
    return f"{text}, after {_format_iterations(iterations)}"


# --- of a change, on a terminal -----------------------------------------------------------


def summarize_change(
    version: int, cause: Cause, links: Sequence[LinkState], proposal: PlanProposal
) -> str:
    """Summary of a change in one line of at most :data:`SUMMARY_COLUMNS`: cause, predicted time per
    iteration, plan, and the net saving over the remaining iterations, if their number is known.

    ``plan v1: link 0 +6.5 ms | predicted 1.198 -> 1.069 s/it (-11%) | warm-up 16-9-4-1, direct``
    """
    current, chosen = proposal.current, proposal.chosen
    assert chosen is not None, "no change"
    before, after = proposal.predicted_seconds
    time, change = f"{after:.3f} s/it", ""
    if before is not None:
        time = f"{before:.3f} -> {time}"
        change = f" ({after / before - 1:+.0%})" if before > 0 else ""
    times = [f"predicted {time}{change}", f"{time}{change}", time]
    # Each part in the longest form that fits; the later ones matter more.
    forms = [_list_short_causes(cause, links), times, _list_short_plans(current, chosen)]
    shorten = [0, 1, 1, 2]
    saves = next(
        (each for each in proposal.findings if isinstance(each, plan_choice.NetSaving)), None
    )
    # A job without a known end has no total saving; its times show the saving per iteration.
    if saves is not None and saves.iterations is not None:
        gain = f"gain {saves.net_seconds:.1f} s"
        forms.append(
            [f"net {gain} / {saves.iterations} it", f"{gain} / {saves.iterations} it", gain]
        )
        shorten = [0, 3, 1, 3, 1, 2, 2]
    line = _join_summary(version, forms)
    for part in shorten:
        if len(line) > SUMMARY_COLUMNS:
            forms[part] = forms[part][1:] or forms[part]
            line = _join_summary(version, forms)
    return line if len(line) <= SUMMARY_COLUMNS else f"{line[: SUMMARY_COLUMNS - 1]}…"


def _join_summary(version: int, forms: Sequence[Sequence[str]]) -> str:
    return f"plan v{version}: {' | '.join(form[0] for form in forms)}"


def _list_short_causes(cause: Cause, links: Sequence[LinkState]) -> list[str]:
    """Texts for the cause of a change, the longest first."""
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
            return ["promise missed"]
        case "pace":
            return ["other speeds of replicas", "other speeds"]
    if not slow:
        return ["links recovered"]
    worst, more = slow[0], f" and {len(slow) - 1} more" if len(slow) > 1 else ""
    late = f"{1e3 * worst.delay:+.1f} ms"
    return [
        f"link {worst.link} {worst.direction} {late} ({_format_confidence(worst)}){more}",
        f"link {worst.link} {late}{more}",
    ]


def _list_short_plans(current: PlanOption | None, chosen: PlanOption) -> list[str]:
    """Texts for the new plan, the longest first."""
    plan = chosen.plan
    if plan.shares and (current is None or current.plan.shares != plan.shares):
        shares = f"microbatches {join_dashed(plan.shares, 12)}"
        return [shares, "unequal microbatches"]
    counts, moved = list(map(str, plan.warmup)), plan.delegated_links
    if len(counts) > MOST_WARMUP_STAGES:
        counts = [*counts[:2], "…", counts[-1]]
    warmup = f"warm-up {'-'.join(counts)}"
    more = _describe_new_dispatch(current, chosen)
    if not moved:
        return [f"{warmup}, direct{more}"]
    plural = "s" * (len(moved) > 1)
    named = f"{warmup}, link{plural} {', '.join(map(str, moved))} delegated{more}"
    few = f"{warmup}, {len(moved)} link{plural} delegated{more}"
    forms = [named, few] if len(moved) <= MOST_NAMED_LINKS else [few]
    return [*forms, few.removesuffix(more)] if more else forms


def build_record(
    request: DecisionRequest,
    proposal: PlanProposal,
    chosen: PlanOption,
    links: Sequence[LinkState],
    *,
    version: int,
    at: float,
    iteration: int,
    detectable_at: int,
    peak_memory: list[int | None],
) -> AdaptationRecord:
    """Record of the change to ``chosen``, as far as known when it is issued. ``links``: states at
    the request; ``at``: wall clock, seconds; ``iteration``: newest one that ranks had begun;
    ``detectable_at``: first one that showed the reason; ``peak_memory``: bytes by stage so far."""
    plan, (before, after) = chosen.plan, proposal.predicted_seconds
    kind: Literal["adapt", "return", "revert"] = "adapt"
    if request.cause == "undelivered":
        kind = "revert"
    elif request.cause not in ("slow", "worse", "memory") and plan.runs_same_as(
        request.baseline_plan
    ):
        kind = "return"
    away = count_away_microbatches(plan.schedule, plan.device_limits, plan.recompute)
    return AdaptationRecord(
        plan_version=version,
        kind=kind,
        detected_at=at,
        detected_at_iteration=iteration,
        detectable_at=detectable_at,
        reason=explain_decision(request.cause, links, proposal),
        links=[link.without_windows() for link in links if link.health is not Health.HEALTHY],
        warmup_before=list(request.current_plan.warmup),
        warmup_after=list(plan.warmup),
        routes=list(plan.routes),
        predicted_seconds_before=before,
        predicted_seconds_after=after,
        promised=1 - after / before if before else None,
        peak_memory_before=peak_memory,
        device_limits_before=list(request.current_plan.device_limits),
        device_limits_after=list(plan.device_limits),
        offloaded=away.offloaded,
        recomputed=away.recomputed,
        fused_stages=list(plan.schedule.fused_stages),
        shares=list(plan.shares),
        saving=None if proposal.saving is None else proposal.saving.seconds,
        fault_cost=0.0 if proposal.saving is None else proposal.saving.fault_cost,
    )


# --- words --------------------------------------------------------------------------------


def format_stages(stages: Sequence[int]) -> str:
    """Text for stages in ascending order: ``stages 0-5, 8``."""
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


def format_seconds(seconds: float) -> str:
    """Text for a time: ``1.234 s`` or ``5.6 ms``."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
