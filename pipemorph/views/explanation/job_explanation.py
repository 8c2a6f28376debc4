"""Explains a job of a cluster, or a run, from its status, and a run from its history as well.

An explanation has the job's outcome, the observed faults, the decisions and their effect, the time
saved, and advice by cause. Conditions of status provide faults and causes; a run adds the
iterations of each fault and every plan change. ``pipemorph explain``, ``top`` and the live page
show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean, median
from typing import Any

from pipemorph.errors import InputError, one_line
from pipemorph.planning.ir import Route, join_dashed
from pipemorph.protocol import AdaptationRecord, IterationSample
from pipemorph.protocol.samples import average_idle_time
from pipemorph.spec.job_status import AdaptationSummary, Condition, JobStatus, find_condition
from pipemorph.views.explanation.explained_job import ExplainedJob, SlowPeriod, parse_job_object
from pipemorph.views.explanation.explanation_text import (
    MOST_DECISIONS,
    Explanation,
    describe_savings,
    format_count,
    format_duration,
    format_idle_time,
    format_link,
    format_plan_effect,
    format_warmup_change,
    join_few,
)

FAULT_CONDITIONS = (
    "LinksHealthy",
    "ReductionsHealthy",
    "RailsHealthy",
    "StagesEven",
    "ReplicasComplete",
)
"""Conditions that are False if something is wrong."""
EARLY_END = "EndedWithoutReport"
"""Reason of the condition Failed of a run whose host was killed."""
UNREADABLE = (ArithmeticError, LookupError, TypeError, ValueError)
"""Errors caused by unexpected values."""
NEWEST_ITERATIONS = 8
"""Iterations in the median of the iteration time at the end of a run."""
NAMED = 4
"""Most links named in a line."""
CAUSE_OF_REASON = {
    "SlowLinks": "link",
    "SlowReductions": "reduction",
    "SickPorts": "port",
    "LinksFellBack": "fell-back",
    "SlowStages": "stage",
    "ReportsStale": "silent",
}
"""Cause, a key of :data:`ADVICE`, by the reason of a condition."""


ADVICE = {
    "loss": "find what made the loss NaN or infinite at first (the batch, the learning rate, an"
    " overflow), and start the job again from a checkpoint before it",
    "failed": "read the last lines of the rank that failed first, fix their cause and start the"
    " job again; with spec.checkpoint it goes on with the newest checkpoint",
    "pending": "kubectl describe the job's pods: an event says what they wait for",
    "silent": "look at the log of rank 0, whose agent reports for all ranks, and on a cluster at"
    " the operator's",
    "port": "check cable, optics and switch port of each port named, or take its node out of use",
    "fell-back": "run pipemorph doctor at one end of the link, on a cluster in its pod: it says why"
    " the agreed transport is not in use",
    "reduction": "check the network between the replicas of that stage with pipemorph bench link",
    "link": "check the network between the hosts of the slow link with pipemorph bench link",
    "stage": "look at the clock and the other users of the slow stage's host; pipemorph advise"
    " says what another split of the layers would give",
    "unequal": "give the longest stage fewer layers: adaptation.relayout moves them, pipemorph"
    " advise compares splits; tensor parallelism divides an embedding or a loss head",
    "undelivered": "a plan brought less than half of its promised gain: check whether other work"
    " competes for the ranks' processors",
    "pauses": "collect Python's garbage between iterations: leave the collector of the script as it"
    " is, with Options(gc='auto'), or make fewer objects in each iteration",
    "work": "give step() the lengths of each microbatch's samples as costs=, so that op times are"
    " compared at equal work, and microbatches can be ordered by it",
    "order": "order microbatches by their costs with adaptation.reorder: sums (Options(reorder="
    "'sums')), if gradients may be summed in that order",
    "data": "load data ahead of the step, in other processes: DataLoader(num_workers=…,"
    " prefetch_factor=…)",
    "checkpoint": "save less often: spec.checkpoint.every",
    "observed": "let PipeMorph adapt the schedule to the link: where torch's stages run, with"
    " AdaptiveSchedule in place of the schedule, which is one line",
    "disabled": "set adaptation.enabled and schedule.policy pipemorph, so that plans adapt to slow"
    " links",
}
"""Advice by cause, in the order of urgency."""
ADVICE_WHEN_OBSERVED = {
    "failed": "read the last lines of the rank that failed first, fix their cause and start the job"
    " again",
    "silent": "look at the logs of the ranks: the job has ended, or they cannot reach pipemorph"
    " serve, or are not observed any more",
    "stage": "look at the clock and the other users of the slow stage's host",
    "unequal": "give the longest stage fewer layers where the script splits the model; tensor"
    " parallelism divides an embedding or a loss head",
    "pauses": "collect Python's garbage between steps, on all ranks at once: gc.disable(), and"
    " gc.collect() after every so many steps; or make fewer objects in each step",
    "checkpoint": "save checkpoints less often",
}
"""Advice in place of :data:`ADVICE` for a job that PipeMorph observes: it has no fields."""


MOST_IDLE_SHARE = 0.05
"""Share of the time in idle time of one cause above which there is advice on it."""
MOST_PAUSED_SHARE = 0.005
"""Share of the time in pauses of Python's garbage collector above which they are named."""
LEAST_SPREAD = 0.1
"""Standard deviation of the microbatches' work, over its mean, from which it is named."""
LEAST_REORDERING_GAIN = 0.02
"""Predicted gain from which an order of the microbatches is advised."""
LEAST_DELIVERED_SHARE, NOISE = 0.5, 0.05
"""A plan change falls short if it brings less than this share of its promised gain, and the
difference is more than this fraction of an iteration."""


def fell_short_of_promise(kind: str, promised: float | None, measured: float | None) -> bool:
    """True if a plan change of this kind and these gains fell short of its promise."""
    if kind != "adapt" or not promised or measured is None:
        return False
    return measured < LEAST_DELIVERED_SHARE * promised and promised - measured > NOISE


def list_advice(causes: Iterable[str], *, observed: bool = False) -> list[str]:
    """Advice for the causes, the most urgent first."""
    found, texts = set(causes), ADVICE | (ADVICE_WHEN_OBSERVED if observed else {})
    return [text for cause, text in texts.items() if cause in found]


def explain_job(content: Mapping[str, Any]) -> Explanation:
    """Explain a PipeMorphJob of a cluster or a run's report. Raises :class:`InputError`, one line,
    if the object is neither, or damaged."""
    try:
        return build_explanation(parse_job_object(content))
    except UNREADABLE as error:
        raise InputError(
            one_line(
                f"is damaged ({type(error).__name__}: {error}); expected a PipeMorphJob, or a"
                " run's report"
            )
        ) from None


def build_explanation(job: ExplainedJob) -> Explanation:
    """Explain a parsed job. Raises :class:`InputError` if it has no status yet."""
    status = job.status
    if status is None or status.state is None:
        raise InputError(
            "status: is empty, so no operator has processed the job yet; apply it where one runs,"
            " then name [NAMESPACE/]NAME"
        )
    training = status.training
    story = Explanation(_describe_outcome(job, status))
    idle, seconds = find_idle_time(job)
    story.idle = format_idle_time(idle, seconds) if idle and seconds else ""
    # Links that are slow now come first.
    spans = sorted(job.links.slow, key=lambda each: (each.end is not None, -each.delay))
    story.observations = [
        *_describe_divergence(job),
        *_describe_pauses(job),
        *_describe_work(job),
        *(_describe_slow_period(each, job) for each in spans),
    ]
    if (unequal := _find_unequal_work(status)) is not None:
        story.observations.append(unequal.message)
    for found in list_failing_conditions(status):
        if found.reason == "SlowLinks" and spans:
            continue
        if job.is_over:
            story.observations.append(f"{found.message} (at the end)")
            continue
        slow = training.slow_links if training is not None else []
        when = f"since {_format_timestamp(found.last_transition_time)}"
        if found.reason == "SlowLinks":
            dated = [(each.link, _format_timestamp(each.since)) for each in slow if each.since]
            links = [f"link {link} since {at}" for link, at in dated[:NAMED]]
            when = ", ".join(links) if len(dated) > 1 else f"since {dated[0][1]}" if dated else when
        story.observations.append(f"{found.message} ({when})")
    story.decisions = list(_describe_decisions(job, status))
    if training is not None:
        story.savings = describe_savings(
            training.saved_seconds,
            training.saved_error_seconds,
            job.spec.parallelism.mesh.world_size,
            training.adaptations,
            job.gpus,
        )
    story.advice = list_advice(list_causes(job, status), observed=job.is_observed)
    if job.adapting is not None:
        story.adapting = [text for text in (job.adapting.change, job.adapting.promise) if text]
    return story


def _format_timestamp(timestamp: str) -> str:
    """Format as ``2026-01-02 03:04:05 UTC``; text that is no RFC 3339 time is unchanged."""
    at = _parse_timestamp(timestamp)
    return timestamp if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _parse_timestamp(timestamp: str | None) -> datetime | None:
    """Parse an RFC 3339 time, in UTC; None for other text."""
    try:
        return datetime.fromisoformat(timestamp or "").astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _describe_outcome(job: ExplainedJob, status: JobStatus) -> str:
    training, spec, ran = status.training, job.spec, job.iterations
    text = f"{job.name} is {status.state}"
    found = find_blocking_condition(status)
    if found is not None:
        text += f" ({found.reason}{': ' if found.message else ''}{found.message})"
    text += f"; {spec.parallelism.mesh}"
    if status.ready:
        text += f", {status.ready} pods ready"
    seconds = training.iteration_seconds if training is not None else None
    if ran is not None:
        done = ran[-1].index + 1 if ran else 0
        total = f"of {spec.trainer.iterations:,} iterations"
        text += f"; {done:,} {'steps' if job.is_observed else total}"
        text += _format_run_time(status)
        seconds = median(each.seconds for each in ran[-NEWEST_ITERATIONS:]) if ran else None
    elif training is not None:
        text += f"; iteration {training.iteration:,}"
        text += f" of {spec.trainer.iterations:,}" if spec.trainer.iterations else ""
    if seconds:
        text += f", {'' if ran is None else 'the newest '}{seconds:.3g} s each"
        remaining = job.seconds_remaining
        text += "" if remaining is None else f", {format_duration(remaining)} left"
    recovered = status.recoveries is not None and status.recoveries.count > 0
    if status.goodput is not None and (recovered or status.attempts):
        text += f"; goodput {status.goodput:.0%}"
    text += f"; {job.static_reason}" if job.static_reason else ""
    return text + (" (EMULATED)" if spec.emulation is not None else "")


def _format_run_time(status: JobStatus) -> str:
    begin, end = _parse_timestamp(status.start_time), _parse_timestamp(status.completion_time)
    if begin is None or end is None or end < begin:
        return ""
    return f" in {format_duration((end - begin).total_seconds())}"


def find_blocking_condition(status: JobStatus) -> Condition | None:
    """Condition that explains why a job does not run; None if it runs, or no condition does."""
    if status.state in ("Pending", "Queued", "Starting", "Restarting", "Suspended", "Failed"):
        for kind in ("Failed", "Running", "PodsReady", "Suspended"):
            found = find_condition(status, kind)
            if found is not None and (found.status == "True") == (kind in ("Failed", "Suspended")):
                return found
    return None


def list_failing_conditions(status: JobStatus) -> Iterator[Condition]:
    """Conditions that report a fault; of those that only say that reports are missing, the first
    one. A job that is Complete may have ended long after its last report."""
    silent = status.state == "Complete"
    for kind in FAULT_CONDITIONS:
        found = find_condition(status, kind)
        if found is None:
            continue
        if found.reason == "ReportsStale":
            if not silent:
                yield found
            silent = True
        elif found.status == "False":
            yield found


def _find_unequal_work(status: JobStatus) -> Condition | None:
    """Condition that names a stage with more work than the others."""
    found = find_condition(status, "StagesEven")
    return found if found is not None and found.reason == "UnequalWork" else None


def _describe_divergence(job: ExplainedJob) -> Iterator[str]:
    """Sentence about the iterations of a run whose loss was not finite, if there are any."""
    found = [each for each in job.iterations or () if each.diverged]
    if found:
        count, first, last = len(found), found[0], found[-1]
        when = (
            f"iteration {first.index}"
            if count == 1
            else (f"{count:,} iterations from {first.index} to {last.index}")
        )
        yield f"the loss was {first.loss} in {when}"


def compute_pause_shares(job: ExplainedJob) -> tuple[float, float, int | None]:
    """Share of the time of a run in which Python's garbage collector paused the ranks: before it
    was moved between iterations, and since then. With the first iteration of the latter, None if it
    was not moved."""
    known = [each for each in job.iterations or () if each.gc_inside is not None]
    moved = next((each.index for each in known if each.gc_between), None)
    shares = []
    for since in (False, True):
        some = [each for each in known if (moved is not None and each.index >= moved) is since]
        whole = sum(each.seconds for each in some)
        paused = sum((each.gc_inside or 0.0) + (each.gc_between or 0.0) for each in some)
        shares.append(paused / whole if whole else 0.0)
    return shares[0], shares[1], moved


def _describe_pauses(job: ExplainedJob) -> Iterator[str]:
    """Sentence about the pauses of Python's garbage collector, if they were long."""
    before, since, moved = compute_pause_shares(job)
    if moved is not None:
        yield (
            f"Python's garbage collector took {before:.1%} of the time inside iterations; from"
            f" iteration {moved} on, {since:.1%} between them, on all ranks at once"
        )
    elif before > MOST_PAUSED_SHARE:
        yield f"Python's garbage collector took {before:.1%} of the time, inside iterations"


def summarize_spreads(
    iterations: Sequence[IterationSample] | None,
) -> tuple[float | None, float | None]:
    """Medians over the iterations of the spread of the microbatches' work, and of what costs do not
    explain of it; None if unknown. Costs may come later than the first iterations, so the second
    median is that of the newest."""
    known = [each for each in iterations or () if each.work_spread is not None]
    newest = [each.unexplained_spread or 0.0 for each in known[-NEWEST_ITERATIONS:]]
    spreads = [each.work_spread or 0.0 for each in known]
    return (median(spreads), median(newest)) if known else (None, None)


def find_idle_time(job: ExplainedJob) -> tuple[Mapping[str, float], float]:
    """Find the mean idle seconds of an iteration by cause, and the seconds of an iteration. Of a
    run that has ended, all but its first iteration count; otherwise the newest ones."""
    training = job.status.training if job.status is not None else None
    if job.iterations is None:
        idle = training.idle_seconds if training is not None else {}
        return idle, (training.iteration_seconds or 0.0) if training is not None else 0.0
    sampled = [each for each in job.iterations[1:] if each.idle is not None]
    if not job.is_over:
        sampled = sampled[-NEWEST_ITERATIONS:]
    found = average_idle_time(sampled)
    seconds = fmean(each.seconds for each in sampled) if sampled else 0.0
    # An iteration's time is without its checkpoint.
    return found, seconds + found.get("checkpoint", 0.0)


def _describe_work(job: ExplainedJob) -> Iterator[str]:
    """Sentences about the work of microbatches in a run, if it differs."""
    spread, unexplained = summarize_spreads(job.iterations)
    if spread is not None and unexplained is not None and spread >= LEAST_SPREAD:
        text = f"microbatches differ in work by {spread:.0%} (standard deviation)"
        has_costs = bool(job.iterations and job.iterations[-1].cost)
        text += f", by {unexplained:.0%} beyond their costs" if has_costs else ", without costs"
        gain = job.work.reordering_gain if job.work is not None else None
        if gain is not None and job.spec.adaptation.reorder == "bits":
            text += f"; ordered by costs, iterations would be {gain:.0%} shorter (simulated)"
        yield text
    for each in job.iterations or ():
        if each.fitted_costs is not None:
            yield f"from iteration {each.index + 1} on, {each.fitted_costs.format_text()}"


def _describe_slow_period(slow: SlowPeriod, job: ExplainedJob) -> str:
    name = format_link(slow.link, job.spec.parallelism.mesh.format_column_name(slow.column))
    late = f"late by up to {slow.delay * 1e3:.0f} ms"
    if slow.end is None and not job.is_over:
        return f"{name} is {late} since iteration {slow.begin}"
    end = "the end" if slow.end is None else slow.end
    return f"{name} was {late}, from iteration {slow.begin} until {end}"


def _describe_decisions(job: ExplainedJob, status: JobStatus) -> Iterator[str]:
    training, recoveries = status.training, status.recoveries
    if job.is_observed:
        yield "PipeMorph observed the job, and changed nothing"
        return
    if status.restarts or status.disruptions:
        last = status.attempts[-1].message if status.attempts else ""
        count = status.restarts + status.disruptions
        yield (
            f"the job was started again {format_count(count, 'time')}, "
            f"{status.disruptions} of them for evictions or lost nodes; last cause: {last}"
        )
    if recoveries is not None and recoveries.last:
        newest = recoveries.last[-1]
        took = "" if newest.seconds is None else f" in {format_duration(newest.seconds)}"
        state = f", with the state of: {newest.state}" if newest.state else ""
        yield (
            f"ranks were started again {format_count(recoveries.count, 'time')} within their pods; "
            f"last{took}{state}; cause: {newest.cause}"
        )
    moves = [each for each in (recoveries.last if recoveries else ()) if each.promised is not None]
    for move in moves[-1:]:
        got = "not measured yet" if move.measured is None else f"{move.measured:.0%} measured"
        what = f"layers moved ({join_dashed(move.layers)} per stage)"
        if not move.layers:
            what = "ranks changed places"
        yield (
            f"{what} in generation {move.generation}:"
            f" {move.promised:.0%} shorter iterations promised, {got}"
        )
    for each in job.relayouts:
        if each.measured is not None:
            what = "ranks changed places"
            if each.layers and each.layers_before and each.layers != each.layers_before:
                before, after = join_dashed(each.layers_before), join_dashed(each.layers)
                what = f"layers moved ({before} became {after} per stage)"
            yield f"{what} at iteration {each.iteration}: {each.measured:.0%} shorter iterations"
    if job.keep_reason and any(each.end is None for each in job.links.slow):
        yield f"the last decision changed nothing: {job.keep_reason}"
    elif job.keep_reason and job.links.slow and not job.adaptations:
        yield f"nothing was changed while it was slow: {job.keep_reason}"
    coming = training.wanted_plan_version if training is not None and not job.is_over else 0
    if job.adaptations:
        by_gain = sorted(job.adaptations, key=lambda each: (-each.saved, each.plan_version))
        # The changes that fit, in their order.
        shown = sorted(by_gain[:MOST_DECISIONS], key=lambda each: each.plan_version)
        for record in [*shown, *by_gain[MOST_DECISIONS:]]:
            yield describe_plan_change(record, record.routes, coming)
    elif training is not None and training.last_adaptation is not None:
        change = training.last_adaptation
        yield (
            f"{format_count(training.adaptations, 'plan change')}; the last,"
            f" {describe_plan_change(change, training.routes, coming)}; why: {change.reason}"
        )


def describe_plan_change(
    change: AdaptationRecord | AdaptationSummary, routes: Sequence[str], coming: int
) -> str:
    """Describe a plan change and its effect: ``plan 3 from iteration 11: warm-up 7-5-3-1 became
    12-11-9-1, link 2 delegated to the engine; 1 s became 0.5 s per iteration``.

    ``routes``: of the links under this plan; ``coming``: version of the plan that the ranks should
    run, 0 if unknown."""
    plan = f"plan {change.plan_version}"
    if change.applied_at_iteration is None:
        pending = change.plan_version == coming
        return f"{plan} {'is not in force yet' if pending else 'was never in force'}"
    return (
        f"{plan} from iteration {change.applied_at_iteration}: {_describe_effect(change, routes)}"
    )


def _describe_effect(change: AdaptationRecord | AdaptationSummary, routes: Sequence[str]) -> str:
    if change.kind == "return":
        return "back to the plan for healthy links"
    if change.kind == "revert":
        return "back to the previous plan, since the last one fell short of its promised gain"
    moved = [str(i) for i, route in enumerate(routes) if route == Route.DELEGATED]
    parts = [
        format_warmup_change(change.warmup_before, change.warmup_after)
        or "another order of the same ops"
    ]
    if change.shares:
        parts.append(f"microbatches by replica {join_dashed(change.shares, 12)}")
    if moved:
        parts.append(
            f"link{'s' * (len(moved) > 1)} {join_few(moved, NAMED)} delegated to the engine"
        )
    effect = format_plan_effect(
        change.iteration_seconds_before,
        change.iteration_seconds_after,
        change.promised,
        change.measured,
    )
    return ", ".join(parts) + (f"; {effect}" if effect else "")


def _list_injected_causes(job: ExplainedJob) -> set[str]:
    """Causes that the job injects itself by ``spec.faults``."""
    found = set()
    for fault in job.spec.faults:
        if fault.get("device") is not None:
            found.add("stage")
        if fault.get("reduction") is not None or fault.get("between") is not None:
            found.add("reduction")
        if fault.get("link") is not None or fault.get("between") is not None:
            found.add("link")
    return found


def list_causes(job: ExplainedJob, status: JobStatus) -> Iterator[str]:
    """Causes to give advice on."""
    if any(each.diverged for each in job.iterations or ()):
        yield "loss"
    paused, _, moved = compute_pause_shares(job)
    if paused > MOST_PAUSED_SHARE and moved is None:
        yield "pauses"
    spread, unexplained = summarize_spreads(job.iterations)
    if spread is not None and spread >= LEAST_SPREAD:
        if (unexplained or 0.0) >= spread / 2:
            yield "work"
        gain = (job.work.reordering_gain or 0.0) if job.work is not None else 0.0
        if job.spec.adaptation.reorder == "bits" and gain >= LEAST_REORDERING_GAIN:
            yield "order"
    idle, seconds = find_idle_time(job)
    for cause in ("data", "checkpoint"):
        if idle.get(cause, 0.0) > MOST_IDLE_SHARE * seconds:
            yield cause
    if status.state == "Failed":
        found = find_condition(status, "Failed")
        if found is None or found.reason != EARLY_END:
            yield "failed"
    if status.state in ("Pending", "Starting") and job.iterations is None:
        yield "pending"
    injected = _list_injected_causes(job)
    for found in list_failing_conditions(status):
        if found.reason in CAUSE_OF_REASON:
            if CAUSE_OF_REASON[found.reason] not in injected:
                yield CAUSE_OF_REASON[found.reason]
            if found.reason == "SlowLinks" and not job.spec.adaptation.enabled:
                yield "observed" if job.is_observed else "disabled"
    if _find_unequal_work(status) is not None:
        yield "unequal"
    newest = status.training.last_adaptation if status.training is not None else None
    changes: Sequence[AdaptationRecord | AdaptationSummary] = job.adaptations
    if not changes and newest is not None:
        changes = [newest]
    if any(fell_short_of_promise(each.kind, each.promised, each.measured) for each in changes):
        yield "undelivered"
