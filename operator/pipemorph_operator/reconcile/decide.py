"""Decides what to change for a job: a pure function from observed state to a decision.

Level-triggered: the only memory is the job's status, so the same observation gives the same
decision, also after a restart of the operator. A step that must be recorded in status before the
next one (a new attempt number) ends the decision; the next reconcile continues from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.api.sections.placement import Placement
from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status import PodCounts, condition
from pipemorph.errors import InputError, one_line
from pipemorph.status.conditions import format_time
from pipemorph_operator import names
from pipemorph_operator.children import (
    Attempt,
    Unbuildable,
    idle_gpus,
    lasting_objects,
    objects,
    shares_small_memory,
)
from pipemorph_operator.cluster.facts import MESSAGE_LENGTH, JobFacts, parse_time
from pipemorph_operator.cluster.job import read_job
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.policy import conditions, lifetime, node_exclusion, restart
from pipemorph_operator.reconcile import finishing, plans, replacements, waits
from pipemorph_operator.reconcile.decision import Decision, Draft, Observed
from pipemorph_operator.reconcile.node_suspects import note_nodes, record_suspects

DRAIN_SECONDS = 60.0
"""Longest wait for an old attempt's ranks, which may be on a lost node. Ranks that reappear later
are harmless: their secret, names and attempt number differ."""


def decide(seen: Observed, config: OperatorConfig) -> Decision:
    """Decide what to change now. An invalid job gives a decision, not an exception."""
    metadata, spec = seen.body["metadata"], seen.body.get("spec") or {}
    if not lifetime.is_ours(spec.get("managedBy")) or "deletionTimestamp" in metadata:
        return Decision()
    draft = Draft(seen)
    status = draft.status
    if conditions.is_true(status.conditions, names.COMPLETE) or conditions.is_true(
        status.conditions, names.FAILED
    ):
        return _finished(draft)
    try:
        job = read_job(seen.body)
    except InputError as error:
        return _unreadable(draft, str(error), suspend=bool(spec.get("suspend")))
    return _unfinished(draft, job, config)


def objects_rejected(
    seen: Observed, reason: str, message: str, *, passing: bool = False
) -> Decision:
    """The decision if an attempt's objects cannot be created: report why and retry. An edit of the
    template or placement, a larger quota or a changed policy may resolve it; ``passing``: a retry
    is expected to."""
    draft = Draft(seen)
    draft.passing = passing
    known = any(c.reason == reason and c.message == message for c in draft.status.conditions)
    draft.mark(names.SUSPENDED, "False", names.R_NOT_SUSPENDED, "spec.suspend is false")
    draft.not_running(reason, message)
    if not known:
        draft.emit("Warning", reason, message)
    draft.requeue_within(waits.LOOK_AGAIN_SECONDS)
    return draft.done()


def internal_error(seen: Observed, error: Exception) -> Decision:
    """The decision after an internal error: report it. Running ranks keep running."""
    draft = Draft(seen)
    message = one_line(
        f"internal error of the operator; retrying: {type(error).__name__}: {error}", MESSAGE_LENGTH
    )
    if not any(c.message == message for c in draft.status.conditions):
        draft.emit("Warning", names.R_INTERNAL, message)
    running = conditions.is_true(draft.status.conditions, names.RUNNING)
    draft.mark(names.RUNNING, "True" if running else "False", names.R_INTERNAL, message)
    return draft.done()


# --- steps, in order ----------------------------------------------------------------------


def _finished(draft: Draft) -> Decision:
    """A terminal state is final: nothing starts again, and running ranks are stopped."""
    spec = draft.seen.body.get("spec") or {}
    succeeded = conditions.is_true(draft.status.conditions, names.COMPLETE)
    complete = condition(draft.status, names.COMPLETE)
    waits = complete is not None and complete.reason == names.R_WITHOUT_PODS
    for job in draft.jobs():
        runs = not (succeeded or job.drained) or (waits and not job.complete)
        if runs and not job.deleting:
            draft.out.delete_jobs.append(job.name)
    left = lifetime.until_deletion(
        spec.get("ttlSecondsAfterFinished"), parse_time(draft.status.completion_time), draft.now
    )
    if left is not None and left <= 0:
        draft.out.delete_self = True
        draft.emit("Normal", names.R_TTL, "ttlSecondsAfterFinished has expired; deleting the job")
    else:
        draft.out.again_in = left
    # An edit changes nothing any more, and has been observed.
    for kind in (names.COMPLETE, names.FAILED):
        if (found := condition(draft.status, kind)) is not None:
            draft.mark(kind, found.status, found.reason, found.message)
    return draft.done()


def _unfinished(draft: Draft, job: PipeMorphJob, config: OperatorConfig) -> Decision:
    limit, started = job.spec.active_deadline_seconds, parse_time(draft.status.start_time)
    left = lifetime.until_deadline(limit, draft.status.ran_seconds, started, draft.now)
    if left is not None and left <= 0:
        return _fail(draft, names.R_DEADLINE, f"activeDeadlineSeconds ({limit}) exceeded")
    draft.requeue_within(left)
    if job.spec.suspend:
        return _suspend(draft, job.spec.parallelism.pods)
    draft.mark(names.SUSPENDED, "False", names.R_NOT_SUSPENDED, "spec.suspend is false")
    current = draft.seen.current
    if current is None and draft.status.job_uid is not None:
        name = draft.status.job_name
        return _ended(
            draft,
            job,
            restart.Cause(
                names.R_JOB_LOST, f"Job {name} was deleted by another client", counted=False
            ),
        )
    if current is None:
        return _unplanned(draft, job) or _start(draft, job, config)
    draft.out.restore = lasting_objects(
        Attempt(job, draft.metadata["uid"], current.attempt), config
    )
    # As after the chart was installed again elsewhere: they can never report.
    ours, theirs = config.authorities, current.authorities
    draft.strangers = bool(ours and theirs and not ours & theirs)
    return _follow(draft, job, current)


def _unreadable(draft: Draft, problem: str, *, suspend: bool) -> Decision:
    """Fail a job that nobody has accepted. One that a release has accepted before stalls: its ranks
    go on, and it goes on with an edit or with the release that could read it."""
    if not draft.status.observed_generation and not draft.jobs():  # 0: the CRD's default.
        return _fail(draft, names.R_INVALID_SPEC, problem)
    if suspend:
        return _suspend(draft, draft.status.pods.wanted if draft.status.pods else 0)
    message = f"this release cannot read the spec, which was accepted before: {problem}"
    draft.emit_new("Warning", names.R_INVALID_SPEC, message)
    running = conditions.is_true(draft.status.conditions, names.RUNNING)
    draft.mark(names.RUNNING, "True" if running else "False", names.R_INVALID_SPEC, message)
    return draft.done()


def _unplanned(draft: Draft, job: PipeMorphJob) -> Decision | None:
    """Wait for the job's first plan, or fail the job if its spec allows none; None if planned."""
    found = draft.seen.plan or plans.at_once(job.spec)
    if found is None:
        draft.out.needs_plan = job.spec
        return draft.out
    if not found.known:
        draft.not_running(names.R_PLANNING, "the first plan is being computed")
        return draft.done()
    return _fail(draft, names.R_INVALID_SPEC, found.problem) if found.problem else None


def _fail(draft: Draft, reason: str, message: str) -> Decision:
    """Mark the job Failed, permanently, and stop running ranks."""
    draft.mark(names.FAILED, "True", reason, message)
    draft.not_running(names.R_FINISHED, "the job has failed")
    draft.status.completion_time = format_time(draft.now)
    if draft.status.pods is not None:
        ended = {"active": 0, "ready": 0}
        draft.status.pods = draft.status.pods.model_copy(update=ended)
    draft.emit("Warning", reason, message)
    draft.out.counts.append("failed")
    draft.out.delete_jobs += [j.name for j in draft.jobs() if not j.drained and not j.deleting]
    draft.end_attempts()
    draft.out.again_in = None
    return draft.done(again=True)


# --- suspend ------------------------------------------------------------------------------


def _suspend(draft: Draft, pods: int) -> Decision:
    """Suspend by deleting the Job, which ensures that no rank runs. Resuming starts a new attempt,
    so that earlier ranks cannot report or connect to its ranks."""
    running = [j for j in draft.jobs() if not j.drained]
    current = draft.seen.current
    if current is not None or draft.status.job_uid is not None:
        draft.record(names.R_SUSPENDED, "spec.suspend is true", counted=False)
    draft.out.delete_jobs += [j.name for j in draft.jobs() if not j.deleting]
    draft.end_attempts()
    draft.stop_clock()
    draft.status.pods = PodCounts(wanted=pods)
    if running:
        draft.not_running(names.R_SUSPENDING, f"stopping {running[0].active} ranks")
        draft.mark(names.SUSPENDED, "False", names.R_SUSPENDING, "stopping the ranks")
        draft.requeue_within(DRAIN_SECONDS)
    else:
        if not conditions.is_true(draft.status.conditions, names.SUSPENDED):
            draft.emit("Normal", names.SUSPENDED, "spec.suspend is true; all ranks have stopped")
        draft.not_running(names.R_SUSPENDED, "the job is suspended")
        draft.mark(names.SUSPENDED, "True", names.R_SUSPENDED, "spec.suspend is true")
    return draft.done()


# --- lifecycle of an attempt --------------------------------------------------------------


def _start(draft: Draft, job: PipeMorphJob, config: OperatorConfig) -> Decision:
    """Create the objects of the attempt in status, or of attempt 0."""
    first = draft.status.attempt is None
    number = draft.status.attempt or 0
    old = [j for j in draft.seen.others if j.attempt < number]
    # Keep the last failed attempt, for its pods' logs; delete older ones.
    newest = max((j.attempt for j in old), default=-1)
    draft.out.delete_jobs += [
        j.name for j in old if not j.deleting and (j.attempt < newest or not j.drained)
    ]
    last = Attempt(job, draft.metadata["uid"], max(0, number - 1)).name
    # The last attempt's Job may be gone while its other objects still exist.
    draft.out.delete_attempts += sorted({*(j.name for j in old), *([last] if number else [])})
    wait = _wait_before(draft, old)
    if wait > 0:
        draft.requeue_within(wait)
        return draft.done()
    rule = (job.spec.placement or Placement()).node_exclusion
    excluded, unwanted = node_exclusion.avoided(draft.status.nodes, rule)
    attempt = Attempt(job, draft.metadata["uid"], number, excluded, unwanted)
    try:
        draft.out.apply = objects(attempt, config)
    except Unbuildable as error:
        return objects_rejected(draft.seen, error.reason, error.message)
    draft.out.create = attempt
    draft.status.attempt, draft.status.job_name = number, attempt.name
    draft.status.attempt_start_time = format_time(draft.now)
    if draft.status.start_time is None:
        draft.status.start_time = format_time(draft.now)
    draft.status.pods = PodCounts(wanted=attempt.pods)
    if first:
        draft.out.counts.append("created")
        _tell_misfits(draft, attempt)
    draft.waiting(f"Job {attempt.name} was created")
    draft.mark(names.PREFLIGHT_PASSED, "Unknown", names.R_PREFLIGHT_UNKNOWN, "no rank has run")
    draft.created(number, attempt.name)
    draft.requeue_within(waits.MISSING_SECONDS)
    return draft.done()


def _tell_misfits(draft: Draft, attempt: Attempt) -> None:
    """Tell once per job where its pods do not fit the ranks in them."""
    idle, ranks = idle_gpus(attempt), attempt.job.spec.parallelism.ranks_per_pod
    if idle:
        draft.emit(
            "Warning",
            names.R_IDLE_GPUS,
            f"spec.template requests {idle + ranks} GPUs for a pod, and a pod runs {ranks}"
            f" {'rank' if ranks == 1 else 'ranks'}, each on one GPU: {idle} stay idle; set"
            f" spec.parallelism.ranksPerPod to {idle + ranks}",
        )
    if shares_small_memory(attempt):
        draft.emit(
            "Warning",
            names.R_SMALL_SHM,
            f"the {ranks} ranks of a pod share the container runtime's /dev/shm, of 64 MiB unless"
            " it is configured otherwise; NCCL and data loaders need more: set"
            " spec.placement.sharedMemory, such as 16Gi, which counts as memory of the container",
        )


def _wait_before(draft: Draft, old: Sequence[JobFacts]) -> float:
    """Seconds to wait before the attempt in status may start; 0 to start now."""
    ended = draft.status.attempts[-1] if draft.status.attempts else None
    if ended is None:
        return 0.0
    since = (draft.now - (parse_time(ended.ended_at) or draft.now)).total_seconds()
    draining = [j for j in old if not j.drained]
    if draining and since < DRAIN_SECONDS:
        job = draining[0]
        draft.not_running(
            names.R_DRAINING,
            f"attempt {ended.attempt + 1} waits for the ranks of {job.name} to stop:"
            f" {job.active} active, {job.terminating} stopping",
        )
        return min(5.0, DRAIN_SECONDS - since)
    delay = restart.delay_seconds(restart.short_attempts(draft.status.attempts))
    if ended.reason in restart.NOT_A_CRASH:
        delay = 0.0
    if since < delay:
        draft.not_running(
            names.R_RESTARTING,
            f"attempt {ended.attempt + 1} starts {delay:g} s after the end of the last attempt",
        )
        return max(0.1, delay - since)
    return 0.0


def _follow(draft: Draft, job: PipeMorphJob, current: JobFacts) -> Decision:
    """Follow the current attempt's Job: update status, or end the attempt."""
    ranks, per_pod = job.spec.parallelism.world_size, job.spec.parallelism.ranks_per_pod
    status = draft.status
    adopted = status.job_uid is None
    if adopted and status.attempt is None:
        # The operator was killed after it created the Job, before it wrote status.
        status.attempt = current.attempt
        status.start_time = format_time(draft.now)
        draft.out.counts.append("created")
    if adopted:
        status.job_name, status.job_uid = current.name, current.uid
        status.attempt_start_time = status.attempt_start_time or format_time(draft.now)
        draft.created(current.attempt, current.name)
    if current.uid != status.job_uid or current.deleting:
        return _ended(
            draft,
            job,
            restart.Cause(names.R_JOB_LOST, f"Job {current.name} was deleted", counted=False),
        )
    # A pod with a container that runs on beside its trainer is neither ready nor has it succeeded.
    running_on = len(finishing.finished(draft, current) - current.completed)
    pods = current.ready + current.succeeded + running_on
    ready = min(ranks, pods * per_pod)
    status.pods = PodCounts(
        wanted=job.spec.parallelism.pods,
        active=current.active,
        ready=current.ready,
        succeeded=current.succeeded,
        failed=current.failed_pods,
    )
    if current.complete:
        return _complete(draft, ranks)
    ended = current.failed or current.failing
    if ended is not None and draft.seen.pods is None:
        draft.out.needs_pods = True
        return draft.out
    late = finishing.look(draft, job, current)
    if draft.out.needs_pods:
        return draft.out
    if late is not None:
        return _complete(draft, ranks, late)
    if ended is not None and draft.seen.pods is not None:
        saves = job.spec.checkpoint is not None and job.spec.checkpoint.resume
        cause = restart.classify(
            ended, draft.seen.pods, job.spec.parallelism, layout=draft.layout, saves=saves
        )
        return _ended(draft, job, cause)
    was_started = parse_time(status.job_start_time)
    if was_started is not None and (current.suspended or current.started_at != was_started):
        # Its ranks may have reported: the ranks of the resumed Job need a new attempt number.
        return _ended(
            draft,
            job,
            restart.Cause(names.R_EVICTED, f"Job {current.name} was suspended", counted=False),
        )
    if current.suspended:
        draft.queued(current)
        return draft.done()
    status.job_start_time = format_time(current.started_at) if current.started_at else None
    # Time in a queue counts neither for the deadline nor as run time of the attempt.
    status.start_time = status.start_time or format_time(draft.now)
    status.attempt_start_time = status.attempt_start_time or format_time(draft.now)
    if current.succeeded >= job.spec.parallelism.pods:
        return draft.done()  # All ranks have succeeded; the Job is about to be Complete.
    note_nodes(draft, job)
    replacements.look(draft, job, current)
    if draft.out.needs_pods:
        return draft.out
    if len(finishing.finished(draft, current)) == job.spec.parallelism.pods:
        return draft.done()  # See finishing: other containers have some time to end.
    if ready >= ranks:
        _running(draft, ranks)
    else:
        lost = waits.look(draft, job, current, ready)
        if draft.out.needs_pods:
            return draft.out
        if lost is not None:
            return _ended(draft, job, lost)
    return draft.done()


def _complete(draft: Draft, ranks: int, without: Sequence[str] = ()) -> Decision:
    """``without``: which pods were not waited for."""
    missing = f"; not waited for: {'; '.join(without)}" if without else ""
    message = one_line(f"all {ranks} ranks finished{missing}", MESSAGE_LENGTH)
    reason = names.R_WITHOUT_PODS if without else names.R_COMPLETED
    draft.mark(names.COMPLETE, "True", reason, message)
    draft.not_running(names.R_FINISHED, "the job is complete")
    draft.status.completion_time = format_time(draft.now)
    draft.emit("Normal", names.COMPLETE, message)
    draft.out.counts.append("successful")
    draft.end_attempts()
    return draft.done(again=True)


def _ended(draft: Draft, job: PipeMorphJob, cause: restart.Cause) -> Decision:
    """End the attempt in status, which did not succeed: restart or fail the job."""
    cause = restart.bounded(cause, draft.status.attempts)
    if cause.reason not in restart.NOT_A_CRASH:
        if draft.seen.current is not None:
            note_nodes(draft, job)
        if draft.out.needs_pods:
            return draft.out
        record_suspects(draft, job)
    number = draft.status.attempt or 0
    if cause.reason == names.R_PREFLIGHT_FAILED:
        draft.mark(names.PREFLIGHT_PASSED, "False", names.R_PREFLIGHT_FAILED, cause.message)
    most = job.spec.failure_policy.max_restarts
    # Generations that brought nothing are restarts, too. The ingest counts them.
    recoveries = (draft.seen.body.get("status") or {}).get("recoveries") or {}
    used = draft.status.restarts + (recoveries.get("counted") or 0)
    draft.record(cause.reason, cause.message, counted=cause.counted)
    if not cause.retry:
        return _fail(draft, cause.reason, cause.message)
    if cause.counted and used >= most:
        ended = f"attempt {number} ended: {cause.message}"
        if most == 0:
            return _fail(draft, cause.reason, cause.message)
        return _fail(
            draft, names.R_MAX_RESTARTS, f"all restarts are used (maxRestarts: {most}); {ended}"
        )
    if cause.counted:
        draft.status.restarts += 1
    else:
        draft.status.disruptions += 1
    if (
        draft.seen.current is not None
        and not draft.seen.current.deleting
        and (draft.seen.current.failed is None)
    ):
        draft.out.delete_jobs.append(draft.seen.current.name)
    draft.not_running(
        names.R_RESTARTING, f"attempt {number} ended ({cause.reason}): {cause.message}"
    )
    draft.emit("Warning", cause.reason, f"attempt {number} ended: {cause.message}")
    draft.out.counts.append("restarted")
    return draft.done(again=True)


# --- conditions ---------------------------------------------------------------------------


def _running(draft: Draft, ranks: int) -> None:
    """Mark that all pods run; by the ingest's summary, whether all ranks train."""
    if not conditions.is_true(draft.status.conditions, names.RUNNING):
        draft.emit("Normal", names.RUNNING, f"all {ranks} ranks are ready")
    draft.mark(names.PODS_READY, "True", names.R_ALL_READY, f"{ranks} of {ranks} ranks")
    if draft.strangers:
        message = "its ranks trust another authority than the ingest has; suspend and resume it"
        draft.unheard(names.R_OTHER_AUTHORITY, message)
        return
    training = draft.seen_status.training
    if training is None or training.attempt != (draft.status.attempt or 0):
        draft.unheard(names.R_NO_REPORTS, "no rank has reported yet")
        return
    links = condition(draft.seen_status, names.LINKS_HEALTHY)
    if training.state == "starting":
        draft.unheard(names.R_NO_REPORTS, one_line(training.message or "the ranks are starting"))
    elif links is not None and links.reason == names.R_STALE:
        since = f"since {training.last_report_time}" if training.last_report_time else "lately"
        draft.unheard(names.R_STALE, f"the ranks have not reported {since}")
    else:
        draft.mark(names.RUNNING, "True", names.R_ALL_READY, f"all {ranks} ranks are ready")
    if training.state == "training":
        draft.mark(
            names.PREFLIGHT_PASSED, "True", names.R_PREFLIGHT_PASSED, "the ranks are training"
        )
