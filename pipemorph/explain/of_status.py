"""Explains a job of a cluster from its object, as ``kubectl get -o json`` prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from pipemorph.api.status import AdaptationSummary, Condition, JobStatus, TrainingStatus, condition
from pipemorph.errors import InputError
from pipemorph.explain.advice import advice, undelivered
from pipemorph.explain.cluster_job import ClusterJob, read_job
from pipemorph.explain.story import Story, brought, duration, few, plural, warmups, worth_line
from pipemorph.planning.ir import dashed

SEEN = (
    "LinksHealthy",
    "ReductionsHealthy",
    "RailsHealthy",
    "StagesEven",
    "ReplicasComplete",
)
"""Conditions that are False if something is wrong."""
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


def explain_job(content: Mapping[str, Any]) -> Story:
    """The explanation of a PipeMorphJob of a cluster. Raises :class:`InputError`, one line, if the
    object is none."""
    return story_of(read_job(content))


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
    for found in wrong(status):
        slow = training.slow_links if training is not None else []
        when = f"since {_moment(found.last_transition_time)}"
        if found.reason == "SlowLinks":
            dated = [(each.link, _moment(each.since)) for each in slow if each.since]
            told = [f"link {link} since {at}" for link, at in dated[:NAMED]]
            when = ", ".join(told) if len(dated) > 1 else f"since {dated[0][1]}" if dated else when
        story.seen.append(f"{found.message} ({when})")
    story.decided = list(_decided(status))
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
    try:
        return f"{datetime.fromisoformat(timestamp).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"
    except ValueError:
        return timestamp


def _outcome(job: ClusterJob, status: JobStatus) -> str:
    training, spec = status.training, job.spec
    text = f"{job.metadata.namespace}/{job.metadata.name} is {status.state}"
    found = why_not_running(status)
    if found is not None:
        text += f" ({found.reason}: {found.message})"
    text += f"; {spec.parallelism.mesh}"
    if status.ready:
        text += f", {status.ready} pods ready"
    if training is not None:
        text += f"; iteration {training.iteration:,}"
        text += f" of {spec.trainer.iterations:,}" if spec.trainer.iterations else ""
        if training.iteration_seconds:
            text += f", {training.iteration_seconds:.3g} s each"
            left = job.left_seconds
            text += "" if left is None else f", {duration(left)} left"
    recovered = status.recoveries is not None and status.recoveries.count > 0
    if status.goodput is not None and (recovered or status.attempts):
        text += f"; goodput {status.goodput:.0%}"
    return text + (" (EMULATED)" if spec.emulation is not None else "")


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


def _decided(status: JobStatus) -> Iterator[str]:
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
        yield (
            f"layers moved ({dashed(move.layers)} per stage) in generation {move.generation}:"
            f" {move.promised:.0%} shorter iterations promised, {got}"
        )
    if training is not None and training.last_adaptation is not None:
        yield _change(training)


def _change(training: TrainingStatus) -> str:
    newest = training.last_adaptation
    assert newest is not None
    count = f"{plural(training.adaptations, 'plan change')}; the last, "
    when = f"plan {newest.plan_version}"
    if newest.applied_at_iteration is None:
        coming = newest.plan_version == training.wanted_plan_version
        told = "is not in force yet" if coming else "was never in force"
        return f"{count}{when}, {told}: {newest.reason}"
    when += f" from iteration {newest.applied_at_iteration}"
    effect = ""
    if newest.kind == "adapt":
        before, after = newest.iteration_seconds_before, newest.iteration_seconds_after
        effect = brought(before, after, newest.promised, newest.measured)
    effect = f"; {effect}" if effect else ""
    return f"{count}{when}: {what_was_done(newest, training)}{effect}; why: {newest.reason}"


def what_was_done(change: AdaptationSummary, training: TrainingStatus) -> str:
    """By the newest change of plan: ``warm-up 7-5-3-1 became 12-11-9-1, link 2 left to the
    engine``."""
    if change.kind == "return":
        return "back to the plan for healthy links"
    parts = ["back to the plan before"] if change.kind == "revert" else []
    if found := warmups(change.warmup_before, change.warmup_after):
        parts.append(found)
    moved = [i for i, route in enumerate(training.routes) if route == "delegated"]
    if moved:
        links = "link" if len(moved) == 1 else "links"
        parts.append(f"{links} {few(map(str, moved), NAMED)} left to the engine")
    return ", ".join(parts) or "another order of the same ops"


def causes(job: ClusterJob, status: JobStatus) -> Iterator[str]:
    """What to give advice on."""
    if status.state == "Failed":
        yield "failed"
    if status.state in ("Pending", "Starting"):
        yield "pending"
    for found in wrong(status):
        if found.reason in CAUSES:
            yield CAUSES[found.reason]
            if found.reason == "SlowLinks" and not job.spec.adaptation.enabled:
                yield "disabled"
    newest = status.training.last_adaptation if status.training is not None else None
    if newest is not None and undelivered(newest.kind, newest.promised, newest.measured):
        yield "undelivered"
