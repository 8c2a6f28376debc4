"""Explains a job of a cluster, or a run, from its status; of a run also from its history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any

from pipemorph.api.status import AdaptationSummary, Condition, JobStatus, condition
from pipemorph.errors import InputError, one_line
from pipemorph.explain.cluster_job import ClusterJob, SlowTime, read_job
from pipemorph.explain.story import (
    DECIDED,
    Story,
    brought,
    duration,
    few,
    link_name,
    plural,
    warmups,
    worth_line,
)
from pipemorph.planning.ir import Route, dashed
from pipemorph.wire import AdaptationRecord

SEEN = (
    "LinksHealthy",
    "ReductionsHealthy",
    "RailsHealthy",
    "StagesEven",
    "ReplicasComplete",
)
"""Conditions that are False if something is wrong."""
UNREADABLE = (ArithmeticError, LookupError, TypeError, ValueError)
"""Errors that unexpected values cause."""
NEWEST = 8
"""Iterations in the median of what an iteration takes at the end of a run."""
NAMED = 4
"""Most links that are named in one line."""
CAUSES = {
    "SlowLinks": "link",
    "SlowReductions": "reduction",
    "SickPorts": "port",
    "LinksFellBack": "fell-back",
    "SlowStages": "stage",
    "ReportsStale": "silent",
}
"""What to look at, by the reason of a condition."""


ADVICE = {
    "loss": "find what made the loss NaN or infinite at first (the batch, the learning rate, an"
    " overflow), and start the job again from a checkpoint before it",
    "failed": "read the last lines of the rank that failed first, fix their cause and start the"
    " job again; with spec.checkpoint it goes on with the newest checkpoint",
    "pending": "kubectl describe the job's pods: an event says what they wait for",
    "silent": "look at the log of rank 0, whose agent reports for all ranks, and at the operator's",
    "port": "check cable, optics and switch port of each port named, or take its node out of use",
    "fell-back": "run pipemorph doctor in a pod at one end of the link: it says what keeps the"
    " agreed transport from being used",
    "reduction": "check the network between the replicas of that stage with pipemorph fabric check",
    "link": "check the network between the hosts of the slow link: pipemorph fabric check, or"
    " pipemorph bench link between two of them",
    "stage": "look at the clock and the other users of the slow stage's host; pipemorph advise"
    " says what another split of the layers would give",
    "undelivered": "a plan brought less than half of what was promised: see whether other work"
    " competes for the ranks' processors",
    "disabled": "set adaptation.enabled and schedule.policy pipemorph, so that slow links are"
    " planned for",
}
"""By cause, in the order of urgency."""


KEPT_PROMISE, NOISE = 0.5, 0.05
"""A plan change brought too little if it brought less than this share of its promised gain, and the
difference is more than this fraction of an iteration."""


def undelivered(kind: str, promised: float | None, measured: float | None) -> bool:
    """Whether a plan change of this kind and these gains brought too little."""
    if kind != "adapt" or not promised or measured is None:
        return False
    return measured < KEPT_PROMISE * promised and promised - measured > NOISE


def advice(causes: Iterable[str]) -> list[str]:
    """The advice for each cause, the most urgent first."""
    found = set(causes)
    return [text for cause, text in ADVICE.items() if cause in found]


def explain_job(content: Mapping[str, Any]) -> Story:
    """The explanation of a PipeMorphJob of a cluster or of a run's report. Raises
    :class:`InputError`, one line, if the object is neither, or damaged."""
    try:
        return story_of(read_job(content))
    except UNREADABLE as error:
        raise InputError(
            one_line(
                f"is damaged ({type(error).__name__}: {error}); expected a PipeMorphJob, or a"
                " run's report"
            )
        ) from None


def story_of(job: ClusterJob) -> Story:
    """The explanation of such a job. Raises :class:`InputError` if it has no status yet."""
    status = job.status
    if status is None or status.state is None:
        raise InputError(
            "status: is empty, so no operator has looked at the job yet; apply it where one runs,"
            " then name [NAMESPACE/]NAME"
        )
    training = status.training
    story = Story(_outcome(job, status))
    # First those that are slow now.
    spans = sorted(job.links.slow, key=lambda each: (each.end is not None, -each.delay))
    story.seen = [*_diverged(job), *(_slow_time(each, job) for each in spans)]
    for found in wrong(status):
        if found.reason == "SlowLinks" and spans:
            continue
        if job.is_over:
            story.seen.append(f"{found.message} (at the end)")
            continue
        slow = training.slow_links if training is not None else []
        when = f"since {_moment(found.last_transition_time)}"
        if found.reason == "SlowLinks":
            dated = [(each.link, _moment(each.since)) for each in slow if each.since]
            told = [f"link {link} since {at}" for link, at in dated[:NAMED]]
            when = ", ".join(told) if len(dated) > 1 else f"since {dated[0][1]}" if dated else when
        story.seen.append(f"{found.message} ({when})")
    story.decided = list(_decided(job, status))
    if training is not None:
        story.worth = worth_line(
            training.saved_seconds,
            training.saved_error_seconds,
            job.spec.parallelism.mesh.world_size,
            training.adaptations,
            job.gpus,
        )
    story.advice = advice(causes(job, status))
    return story


def _moment(timestamp: str) -> str:
    """``2026-01-02 03:04:05 UTC``; what is no RFC 3339 time, as it is."""
    at = _instant(timestamp)
    return timestamp if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"


def _instant(timestamp: str | None) -> datetime | None:
    """An RFC 3339 time, in UTC; None for what is none."""
    try:
        return datetime.fromisoformat(timestamp or "").astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _outcome(job: ClusterJob, status: JobStatus) -> str:
    training, spec, ran = status.training, job.spec, job.iterations
    text = f"{job.metadata.namespace}/{job.metadata.name} is {status.state}"
    found = why_not_running(status)
    if found is not None:
        text += f" ({found.reason}{': ' if found.message else ''}{found.message})"
    text += f"; {spec.parallelism.mesh}"
    if status.ready:
        text += f", {status.ready} pods ready"
    seconds = training.iteration_seconds if training is not None else None
    if ran is not None:
        text += f"; {ran[-1].index + 1 if ran else 0:,} of {spec.trainer.iterations:,} iterations"
        text += _took(status)
        seconds = median(each.seconds for each in ran[-NEWEST:]) if ran else None
    elif training is not None:
        text += f"; iteration {training.iteration:,}"
        text += f" of {spec.trainer.iterations:,}" if spec.trainer.iterations else ""
    if seconds:
        text += f", {seconds:.3g} s each"
        left = job.left_seconds
        text += "" if left is None else f", {duration(left)} left"
    recovered = status.recoveries is not None and status.recoveries.count > 0
    if status.goodput is not None and (recovered or status.attempts):
        text += f"; goodput {status.goodput:.0%}"
    return text + (" (EMULATED)" if spec.emulation is not None else "")


def _took(status: JobStatus) -> str:
    begin, end = _instant(status.start_time), _instant(status.completion_time)
    if begin is None or end is None or end < begin:
        return ""
    return f" in {duration((end - begin).total_seconds())}"


def why_not_running(status: JobStatus) -> Condition | None:
    """The condition that says why a job does not run; None if it runs, or nothing says so."""
    if status.state in ("Pending", "Queued", "Starting", "Restarting", "Suspended", "Failed"):
        for kind in ("Failed", "Running", "PodsReady", "Suspended"):
            found = condition(status, kind)
            if found is not None and (found.status == "True") == (kind in ("Failed", "Suspended")):
                return found
    return None


def wrong(status: JobStatus) -> Iterator[Condition]:
    """The conditions that say that something is wrong."""
    for kind in SEEN:
        found = condition(status, kind)
        if found is not None and (found.status == "False" or found.reason == "ReportsStale"):
            yield found


def _diverged(job: ClusterJob) -> Iterator[str]:
    """The iterations of a run whose loss was no finite number."""
    found = [each for each in job.iterations or () if each.diverged]
    if found:
        count, first, last = len(found), found[0], found[-1]
        when = (
            f"iteration {first.index}"
            if count == 1
            else (f"{count:,} iterations from {first.index} to {last.index}")
        )
        yield f"the loss was {first.loss} in {when}"


def _slow_time(slow: SlowTime, job: ClusterJob) -> str:
    name = link_name(slow.link, job.spec.parallelism.mesh.column_name(slow.column))
    late = f"late by up to {slow.delay * 1e3:.0f} ms"
    if slow.end is None and not job.is_over:
        return f"{name} is {late} since iteration {slow.begin}"
    end = "the end" if slow.end is None else slow.end
    return f"{name} was {late}, from iteration {slow.begin} to {end}"


def _decided(job: ClusterJob, status: JobStatus) -> Iterator[str]:
    training, recoveries = status.training, status.recoveries
    if status.restarts or status.disruptions:
        last = status.attempts[-1].message if status.attempts else ""
        yield (
            f"the job was started again {plural(status.restarts + status.disruptions, 'time')},"
            f" {status.disruptions} of them for evictions or lost nodes; last cause: {last}"
        )
    if recoveries is not None and recoveries.last:
        newest = recoveries.last[-1]
        took = "" if newest.seconds is None else f" in {duration(newest.seconds)}"
        state = f", with the state of: {newest.state}" if newest.state else ""
        yield (
            f"ranks were started again {plural(recoveries.count, 'time')} within their pods; last"
            f"{took}{state}; cause: {newest.cause}"
        )
    moves = [each for each in (recoveries.last if recoveries else ()) if each.promised is not None]
    for move in moves[-1:]:
        got = "not measured yet" if move.measured is None else f"{move.measured:.0%} measured"
        what = f"layers moved ({dashed(move.layers)} per stage)"
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
                before, after = dashed(each.layers_before), dashed(each.layers)
                what = f"layers moved ({before} became {after} per stage)"
            yield f"{what} at iteration {each.iteration}: {each.measured:.0%} shorter iterations"
    if job.kept and any(each.end is None for each in job.links.slow):
        yield f"the plan was kept the last time: {job.kept}"
    coming = training.wanted_plan_version if training is not None and not job.is_over else 0
    if job.adaptations:
        by_gain = sorted(job.adaptations, key=lambda each: (-each.saved, each.plan_version))
        # Those that are shown, in their order.
        shown = sorted(by_gain[:DECIDED], key=lambda each: each.plan_version)
        for record in [*shown, *by_gain[DECIDED:]]:
            yield change_text(record, record.routes, coming)
    elif training is not None and training.last_adaptation is not None:
        change = training.last_adaptation
        yield (
            f"{plural(training.adaptations, 'plan change')}; the last,"
            f" {change_text(change, training.routes, coming)}; why: {change.reason}"
        )


def change_text(
    change: AdaptationRecord | AdaptationSummary, routes: Sequence[str], coming: int
) -> str:
    """One change of plan, what it did and what it brought: ``plan 3 from iteration 11: warm-up
    7-5-3-1 became 12-11-9-1, link 2 left to the engine; 1 s became 0.5 s per iteration``.

    ``routes``: of the links under this plan; ``coming``: version of the plan that the ranks should
    run, 0 if that is not known."""
    plan = f"plan {change.plan_version}"
    if change.applied_at_iteration is None:
        pending = change.plan_version == coming
        return f"{plan} {'is not in force yet' if pending else 'was never in force'}"
    return f"{plan} from iteration {change.applied_at_iteration}: {_done(change, routes)}"


def _done(change: AdaptationRecord | AdaptationSummary, routes: Sequence[str]) -> str:
    if change.kind == "return":
        return "back to the plan for healthy links"
    if change.kind == "revert":
        return "the plan before returned, since the last one did not bring its promise"
    moved = [str(i) for i, route in enumerate(routes) if route == Route.DELEGATED]
    parts = [warmups(change.warmup_before, change.warmup_after) or "another order of the same ops"]
    if moved:
        parts.append(f"link{'s' * (len(moved) > 1)} {few(moved, NAMED)} left to the engine")
    effect = brought(
        change.iteration_seconds_before,
        change.iteration_seconds_after,
        change.promised,
        change.measured,
    )
    return ", ".join(parts) + (f"; {effect}" if effect else "")


def _asked_for(job: ClusterJob) -> set[str]:
    """The causes that the job itself asks for, in ``spec.faults``."""
    found = set()
    for fault in job.spec.faults:
        if fault.get("device") is not None:
            found.add("stage")
        if fault.get("reduction") is not None or fault.get("between") is not None:
            found.add("reduction")
        if fault.get("link") is not None or fault.get("between") is not None:
            found.add("link")
    return found


def causes(job: ClusterJob, status: JobStatus) -> Iterator[str]:
    """What to give advice on."""
    if any(each.diverged for each in job.iterations or ()):
        yield "loss"
    if status.state == "Failed":
        yield "failed"
    if status.state in ("Pending", "Starting"):
        yield "pending"
    asked_for = _asked_for(job)
    for found in wrong(status):
        if found.reason in CAUSES:
            if CAUSES[found.reason] not in asked_for:
                yield CAUSES[found.reason]
            if found.reason == "SlowLinks" and not job.spec.adaptation.enabled:
                yield "disabled"
    newest = status.training.last_adaptation if status.training is not None else None
    changes: Sequence[AdaptationRecord | AdaptationSummary] = job.adaptations
    if not changes and newest is not None:
        changes = [newest]
    if any(undelivered(each.kind, each.promised, each.measured) for each in changes):
        yield "undelivered"
