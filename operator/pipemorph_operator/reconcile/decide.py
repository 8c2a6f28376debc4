"""Decides what to change for a job: a pure function from observed state to a decision.

Level-triggered: the only memory is the job's status, so the same observation gives the same
decision, also after a restart of the operator. A step that must be recorded in status before the
next one (a new attempt number) ends the decision; the next reconcile continues from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.errors import InputError, one_line
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.job_status import PodCounts, find_condition
from pipemorph.spec.sections.placement import PlacementSpec
from pipemorph.views.status.conditions import format_time
from pipemorph_operator import names
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.kube.job_object import read_job
from pipemorph_operator.kube.object_facts import MESSAGE_LENGTH, JobFacts, parse_time
from pipemorph_operator.policy import attempt_end, conditions, lifetime, node_exclusion
from pipemorph_operator.reconcile import completion, pending_pods, plan_checks, pod_replacement
from pipemorph_operator.reconcile.decision import DecisionDraft, ObservedJob, ReconcileDecision
from pipemorph_operator.reconcile.node_suspects import note_slow_link_nodes, record_suspects
from pipemorph_operator.resources import (
    Attempt,
    ResourceBuildError,
    build_lasting_objects,
    build_objects,
    count_idle_gpus,
    shares_default_shm,
)

DRAIN_SECONDS = 60.0
"""Longest wait for the end of an old attempt's ranks, which may be on a lost node. Ranks that
reappear later are harmless: their secret, names and attempt number differ."""


def decide(seen: ObservedJob, config: OperatorConfig) -> ReconcileDecision:
    """Decide what to change now. An invalid job gives a decision, not an exception."""
    metadata, spec = seen.body["metadata"], seen.body.get("spec") or {}
    if not lifetime.is_managed_here(spec.get("managedBy")) or "deletionTimestamp" in metadata:
        return ReconcileDecision()
    draft = DecisionDraft(seen)
    status = draft.status
    if conditions.is_condition_true(
        status.conditions, names.COMPLETE
    ) or conditions.is_condition_true(status.conditions, names.FAILED):
        return _handle_finished(draft)
    try:
        job = read_job(seen.body)
    except InputError as error:
        return _handle_unreadable(draft, str(error), suspend=bool(spec.get("suspend")))
    return _handle_unfinished(draft, job, config)


def report_rejected_objects(
    seen: ObservedJob, reason: str, message: str, *, passing: bool = False
) -> ReconcileDecision:
    """Decision if an attempt's objects cannot be created: report the reason and retry. An edit of
    the template or placement, a larger quota or a changed policy may resolve it. ``passing``: a
    retry is expected to resolve it."""
    draft = DecisionDraft(seen)
    draft.is_transient = passing
    known = any(c.reason == reason and c.message == message for c in draft.status.conditions)
    draft.set_condition(names.SUSPENDED, "False", names.R_NOT_SUSPENDED, "spec.suspend is false")
    draft.mark_not_running(reason, message)
    if not known:
        draft.emit_event("Warning", reason, message)
    draft.requeue_within(pending_pods.CHECK_AGAIN_SECONDS)
    return draft.finish_decision()


def report_internal_error(seen: ObservedJob, error: Exception) -> ReconcileDecision:
    """Decision after an internal error: report it. Running ranks continue."""
    draft = DecisionDraft(seen)
    message = one_line(
        f"internal error of the operator; retrying: {type(error).__name__}: {error}", MESSAGE_LENGTH
    )
    if not any(c.message == message for c in draft.status.conditions):
        draft.emit_event("Warning", names.R_INTERNAL, message)
    running = conditions.is_condition_true(draft.status.conditions, names.RUNNING)
    draft.set_condition(names.RUNNING, "True" if running else "False", names.R_INTERNAL, message)
    return draft.finish_decision()


# --- steps, in order ----------------------------------------------------------------------


def _handle_finished(draft: DecisionDraft) -> ReconcileDecision:
    """Decision in a terminal state: nothing starts again, and running ranks are stopped."""
    spec = draft.observed.body.get("spec") or {}
    succeeded = conditions.is_condition_true(draft.status.conditions, names.COMPLETE)
    complete = find_condition(draft.status, names.COMPLETE)
    waits = complete is not None and complete.reason == names.R_WITHOUT_PODS
    for job in draft.list_jobs():
        runs = not (succeeded or job.is_drained) or (waits and not job.complete)
        if runs and not job.deleting:
            draft.decision.delete_jobs.append(job.name)
    remaining = lifetime.seconds_until_deletion(
        spec.get("ttlSecondsAfterFinished"), parse_time(draft.status.completion_time), draft.now
    )
    if remaining is not None and remaining <= 0:
        draft.decision.delete_job = True
        draft.emit_event(
            "Normal", names.R_TTL, "ttlSecondsAfterFinished has expired; deleting the job"
        )
    else:
        draft.decision.requeue_seconds = remaining
    # An edit has no effect any more, but counts as observed.
    for kind in (names.COMPLETE, names.FAILED):
        if (found := find_condition(draft.status, kind)) is not None:
            draft.set_condition(kind, found.status, found.reason, found.message)
    return draft.finish_decision()


def _handle_unfinished(
    draft: DecisionDraft, job: PipeMorphJob, config: OperatorConfig
) -> ReconcileDecision:
    limit, started = job.spec.active_deadline_seconds, parse_time(draft.status.start_time)
    remaining = lifetime.seconds_until_deadline(limit, draft.status.ran_seconds, started, draft.now)
    if remaining is not None and remaining <= 0:
        return _fail_job(draft, names.R_DEADLINE, f"activeDeadlineSeconds ({limit}) exceeded")
    draft.requeue_within(remaining)
    if job.spec.suspend:
        return _suspend_job(draft, job.spec.parallelism.pods)
    draft.set_condition(names.SUSPENDED, "False", names.R_NOT_SUSPENDED, "spec.suspend is false")
    current = draft.observed.current_job
    if current is None and draft.status.job_uid is not None:
        name = draft.status.job_name
        return _end_attempt(
            draft,
            job,
            attempt_end.AttemptEndCause(
                names.R_JOB_LOST, f"Job {name} was deleted by another client", counted=False
            ),
        )
    if current is None:
        return _handle_unplanned(draft, job) or _start_attempt(draft, job, config)
    draft.decision.restore_objects = build_lasting_objects(
        Attempt(job, draft.metadata["uid"], current.attempt), config
    )
    # Such ranks can never report, as after a reinstallation of the chart with another CA.
    ours, theirs = config.ca_fingerprints, current.ca_fingerprints
    draft.distrusts_ingest = bool(ours and theirs and not ours & theirs)
    return _follow_attempt(draft, job, current)


def _handle_unreadable(draft: DecisionDraft, problem: str, *, suspend: bool) -> ReconcileDecision:
    """Fail a job that was never accepted. A job that another release has accepted stalls: its ranks
    continue, and so does the job after an edit or with the release that can read it."""
    if not draft.status.observed_generation and not draft.list_jobs():  # 0: the CRD's default.
        return _fail_job(draft, names.R_INVALID_SPEC, problem)
    if suspend:
        return _suspend_job(draft, draft.status.pods.wanted if draft.status.pods else 0)
    message = f"this release cannot read the spec, which was accepted before: {problem}"
    draft.emit_new_event("Warning", names.R_INVALID_SPEC, message)
    running = conditions.is_condition_true(draft.status.conditions, names.RUNNING)
    draft.set_condition(
        names.RUNNING, "True" if running else "False", names.R_INVALID_SPEC, message
    )
    return draft.finish_decision()


def _handle_unplanned(draft: DecisionDraft, job: PipeMorphJob) -> ReconcileDecision | None:
    """Wait for the job's first plan, or fail if its spec allows none; None if there is one."""
    found = draft.observed.plan_check or plan_checks.check_small_spec(job.spec)
    if found is None:
        draft.decision.needs_plan = job.spec
        return draft.decision
    if not found.is_known:
        draft.mark_not_running(names.R_PLANNING, "the first plan is being computed")
        return draft.finish_decision()
    return _fail_job(draft, names.R_INVALID_SPEC, found.problem) if found.problem else None


def _fail_job(draft: DecisionDraft, reason: str, message: str) -> ReconcileDecision:
    """Mark the job Failed, permanently, and stop running ranks."""
    draft.set_condition(names.FAILED, "True", reason, message)
    draft.mark_not_running(names.R_FINISHED, "the job has failed")
    draft.status.completion_time = format_time(draft.now)
    if draft.status.pods is not None:
        ended = {"active": 0, "ready": 0}
        draft.status.pods = draft.status.pods.model_copy(update=ended)
    draft.emit_event("Warning", reason, message)
    draft.decision.job_counters.append("failed")
    draft.decision.delete_jobs += [
        j.name for j in draft.list_jobs() if not j.is_drained and not j.deleting
    ]
    draft.delete_all_attempts()
    draft.decision.requeue_seconds = None
    return draft.finish_decision(again=True)


# --- suspend ------------------------------------------------------------------------------


def _suspend_job(draft: DecisionDraft, pods: int) -> ReconcileDecision:
    """Suspend by deleting the Job, which ensures that no rank runs. A resumed job starts a new
    attempt, so that earlier ranks cannot report or connect to its ranks."""
    running = [j for j in draft.list_jobs() if not j.is_drained]
    current = draft.observed.current_job
    if current is not None or draft.status.job_uid is not None:
        draft.record_attempt(names.R_SUSPENDED, "spec.suspend is true", counted=False)
    draft.decision.delete_jobs += [j.name for j in draft.list_jobs() if not j.deleting]
    draft.delete_all_attempts()
    draft.stop_clock()
    draft.status.pods = PodCounts(wanted=pods)
    if running:
        draft.mark_not_running(names.R_SUSPENDING, f"stopping {running[0].active} ranks")
        draft.set_condition(names.SUSPENDED, "False", names.R_SUSPENDING, "stopping the ranks")
        draft.requeue_within(DRAIN_SECONDS)
    else:
        if not conditions.is_condition_true(draft.status.conditions, names.SUSPENDED):
            draft.emit_event(
                "Normal", names.SUSPENDED, "spec.suspend is true; all ranks have stopped"
            )
        draft.mark_not_running(names.R_SUSPENDED, "the job is suspended")
        draft.set_condition(names.SUSPENDED, "True", names.R_SUSPENDED, "spec.suspend is true")
    return draft.finish_decision()


# --- lifecycle of an attempt --------------------------------------------------------------


def _start_attempt(
    draft: DecisionDraft, job: PipeMorphJob, config: OperatorConfig
) -> ReconcileDecision:
    """Create the objects of the attempt in status, or of attempt 0."""
    first = draft.status.attempt is None
    number = draft.status.attempt or 0
    old = [j for j in draft.observed.other_jobs if j.attempt < number]
    # The last failed attempt stays, for its pods' logs; older ones are deleted.
    newest = max((j.attempt for j in old), default=-1)
    draft.decision.delete_jobs += [
        j.name for j in old if not j.deleting and (j.attempt < newest or not j.is_drained)
    ]
    last = Attempt(job, draft.metadata["uid"], max(0, number - 1)).name
    # The last attempt's Job may be gone while its other objects still exist.
    draft.decision.delete_attempts += sorted({*(j.name for j in old), *([last] if number else [])})
    wait = _compute_start_delay(draft, old)
    if wait > 0:
        draft.requeue_within(wait)
        return draft.finish_decision()
    rule = (job.spec.placement or PlacementSpec()).node_exclusion
    excluded, unwanted = node_exclusion.select_avoided_nodes(draft.status.nodes, rule)
    attempt = Attempt(job, draft.metadata["uid"], number, excluded, unwanted)
    try:
        draft.decision.apply_objects = build_objects(attempt, config)
    except ResourceBuildError as error:
        return report_rejected_objects(draft.observed, error.reason, error.message)
    draft.decision.create_attempt = attempt
    draft.status.attempt, draft.status.job_name = number, attempt.name
    draft.status.attempt_start_time = format_time(draft.now)
    if draft.status.start_time is None:
        draft.status.start_time = format_time(draft.now)
    draft.status.pods = PodCounts(wanted=attempt.pods)
    if first:
        draft.decision.job_counters.append("created")
        _warn_about_misfits(draft, attempt)
    draft.mark_waiting(f"Job {attempt.name} was created")
    draft.set_condition(
        names.PREFLIGHT_PASSED, "Unknown", names.R_PREFLIGHT_UNKNOWN, "no rank has run"
    )
    draft.emit_created(number, attempt.name)
    draft.requeue_within(pending_pods.MISSING_SECONDS)
    return draft.finish_decision()


def _warn_about_misfits(draft: DecisionDraft, attempt: Attempt) -> None:
    """Warn once per job about pods that do not fit their ranks."""
    idle, ranks = count_idle_gpus(attempt), attempt.job.spec.parallelism.ranks_per_pod
    if idle:
        draft.emit_event(
            "Warning",
            names.R_IDLE_GPUS,
            f"spec.template requests {idle + ranks} GPUs for a pod, but a pod runs {ranks}"
            f" {'rank' if ranks == 1 else 'ranks'}, each on one GPU: {idle} stay idle; set"
            f" spec.parallelism.ranksPerPod to {idle + ranks}",
        )
    if shares_default_shm(attempt):
        draft.emit_event(
            "Warning",
            names.R_SMALL_SHM,
            f"the {ranks} ranks of a pod share the container runtime's /dev/shm, by default 64 MiB;"
            " NCCL and data loaders need more: set spec.placement.sharedMemory, such as 16Gi, which"
            " counts as memory of the container",
        )


def _compute_start_delay(draft: DecisionDraft, old: Sequence[JobFacts]) -> float:
    """Seconds to wait before the attempt in status may start; 0 to start now."""
    ended = draft.status.attempts[-1] if draft.status.attempts else None
    if ended is None:
        return 0.0
    since = (draft.now - (parse_time(ended.ended_at) or draft.now)).total_seconds()
    draining = [j for j in old if not j.is_drained]
    if draining and since < DRAIN_SECONDS:
        job = draining[0]
        draft.mark_not_running(
            names.R_DRAINING,
            f"attempt {ended.attempt + 1} waits for the ranks of {job.name} to stop:"
            f" {job.active} active, {job.terminating} stopping",
        )
        return min(5.0, DRAIN_SECONDS - since)
    delay = attempt_end.compute_restart_delay(
        attempt_end.count_short_attempts(draft.status.attempts)
    )
    if ended.reason in attempt_end.NOT_A_CRASH:
        delay = 0.0
    if since < delay:
        draft.mark_not_running(
            names.R_RESTARTING,
            f"attempt {ended.attempt + 1} starts {delay:g} s after the end of the last attempt",
        )
        return max(0.1, delay - since)
    return 0.0


def _follow_attempt(
    draft: DecisionDraft, job: PipeMorphJob, current: JobFacts
) -> ReconcileDecision:
    """Follow the current attempt's Job: update status, or end the attempt."""
    ranks, per_pod = job.spec.parallelism.world_size, job.spec.parallelism.ranks_per_pod
    status = draft.status
    adopted = status.job_uid is None
    if adopted and status.attempt is None:
        # The operator was killed between creating the Job and writing status.
        status.attempt = current.attempt
        status.start_time = format_time(draft.now)
        draft.decision.job_counters.append("created")
    if adopted:
        status.job_name, status.job_uid = current.name, current.uid
        status.attempt_start_time = status.attempt_start_time or format_time(draft.now)
        draft.emit_created(current.attempt, current.name)
    if current.uid != status.job_uid or current.deleting:
        return _end_attempt(
            draft,
            job,
            attempt_end.AttemptEndCause(
                names.R_JOB_LOST, f"Job {current.name} was deleted", counted=False
            ),
        )
    # A pod whose trainer has ended while another container runs is neither ready nor succeeded.
    running_on = len(completion.find_finished_pods(draft, current) - current.completed_pods)
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
        return _complete_job(draft, ranks)
    ended = current.failed or current.failing
    if ended is not None and draft.observed.pods is None:
        draft.decision.needs_pods = True
        return draft.decision
    late = completion.describe_late_pods(draft, job, current)
    if draft.decision.needs_pods:
        return draft.decision
    if late is not None:
        return _complete_job(draft, ranks, late)
    if ended is not None and draft.observed.pods is not None:
        saves = job.spec.checkpoint is not None and job.spec.checkpoint.resume
        cause = attempt_end.classify_failure(
            ended, draft.observed.pods, job.spec.parallelism, layout=draft.layout, saves=saves
        )
        return _end_attempt(draft, job, cause)
    was_started = parse_time(status.job_start_time)
    if was_started is not None and (current.suspended or current.started_at != was_started):
        # Its ranks may have reported, so the ranks of the resumed Job need a new attempt number.
        return _end_attempt(
            draft,
            job,
            attempt_end.AttemptEndCause(
                names.R_EVICTED, f"Job {current.name} was suspended", counted=False
            ),
        )
    if current.suspended:
        draft.mark_queued(current)
        return draft.finish_decision()
    status.job_start_time = format_time(current.started_at) if current.started_at else None
    # Time in a queue counts neither for the deadline nor as run time of the attempt.
    status.start_time = status.start_time or format_time(draft.now)
    status.attempt_start_time = status.attempt_start_time or format_time(draft.now)
    if current.succeeded >= job.spec.parallelism.pods:
        return draft.finish_decision()  # All ranks have succeeded; the Job is about to be Complete.
    note_slow_link_nodes(draft, job)
    pod_replacement.replace_lost_pods(draft, job, current)
    if draft.decision.needs_pods:
        return draft.decision
    if len(completion.find_finished_pods(draft, current)) == job.spec.parallelism.pods:
        return draft.finish_decision()  # Other containers have some time to end: see completion.
    if ready >= ranks:
        _mark_running(draft, ranks)
    else:
        lost = pending_pods.report_pending_pods(draft, job, current, ready)
        if draft.decision.needs_pods:
            return draft.decision
        if lost is not None:
            return _end_attempt(draft, job, lost)
    return draft.finish_decision()


def _complete_job(
    draft: DecisionDraft, ranks: int, without: Sequence[str] = ()
) -> ReconcileDecision:
    """Mark the job Complete. ``without``: pods that have not ended."""
    missing = f"; not waited for: {'; '.join(without)}" if without else ""
    message = one_line(f"all {ranks} ranks finished{missing}", MESSAGE_LENGTH)
    reason = names.R_WITHOUT_PODS if without else names.R_COMPLETED
    draft.set_condition(names.COMPLETE, "True", reason, message)
    draft.mark_not_running(names.R_FINISHED, "the job is complete")
    draft.status.completion_time = format_time(draft.now)
    draft.emit_event("Normal", names.COMPLETE, message)
    draft.decision.job_counters.append("successful")
    draft.delete_all_attempts()
    return draft.finish_decision(again=True)


def _end_attempt(
    draft: DecisionDraft, job: PipeMorphJob, cause: attempt_end.AttemptEndCause
) -> ReconcileDecision:
    """End the attempt in status, which did not succeed: restart or fail the job."""
    cause = attempt_end.limit_rejections(cause, draft.status.attempts)
    if cause.reason not in attempt_end.NOT_A_CRASH:
        if draft.observed.current_job is not None:
            note_slow_link_nodes(draft, job)
        if draft.decision.needs_pods:
            return draft.decision
        record_suspects(draft, job)
    number = draft.status.attempt or 0
    if cause.reason == names.R_PREFLIGHT_FAILED:
        draft.set_condition(
            names.PREFLIGHT_PASSED, "False", names.R_PREFLIGHT_FAILED, cause.message
        )
    most = job.spec.failure_policy.max_restarts
    # Generations without progress count as restarts, too. The ingest counts them.
    recoveries = (draft.observed.body.get("status") or {}).get("recoveries") or {}
    used = draft.status.restarts + (recoveries.get("counted") or 0)
    draft.record_attempt(cause.reason, cause.message, counted=cause.counted)
    if not cause.retry:
        return _fail_job(draft, cause.reason, cause.message)
    if cause.counted and used >= most:
        ended = f"attempt {number} ended: {cause.message}"
        if most == 0:
            return _fail_job(draft, cause.reason, cause.message)
        return _fail_job(
            draft, names.R_MAX_RESTARTS, f"all restarts are used up (maxRestarts: {most}); {ended}"
        )
    if cause.counted:
        draft.status.restarts += 1
    else:
        draft.status.disruptions += 1
    if (
        draft.observed.current_job is not None
        and not draft.observed.current_job.deleting
        and (draft.observed.current_job.failed is None)
    ):
        draft.decision.delete_jobs.append(draft.observed.current_job.name)
    draft.mark_not_running(
        names.R_RESTARTING, f"attempt {number} ended ({cause.reason}): {cause.message}"
    )
    draft.emit_event("Warning", cause.reason, f"attempt {number} ended: {cause.message}")
    draft.decision.job_counters.append("restarted")
    return draft.finish_decision(again=True)


# --- conditions ---------------------------------------------------------------------------


def _mark_running(draft: DecisionDraft, ranks: int) -> None:
    """Mark that all pods run, and whether all ranks train according to the ingest's summary."""
    if not conditions.is_condition_true(draft.status.conditions, names.RUNNING):
        draft.emit_event("Normal", names.RUNNING, f"all {ranks} ranks are ready")
    draft.set_condition(names.PODS_READY, "True", names.R_ALL_READY, f"{ranks} of {ranks} ranks")
    if draft.distrusts_ingest:
        message = "the ranks do not trust the ingest's certificate; suspend and resume the job"
        draft.mark_without_reports(names.R_OTHER_AUTHORITY, message)
        return
    training = draft.observed_status.training
    if training is None or training.attempt != (draft.status.attempt or 0):
        draft.mark_without_reports(names.R_NO_REPORTS, "no rank has reported yet")
        return
    links = find_condition(draft.observed_status, names.LINKS_HEALTHY)
    if training.state == "starting":
        draft.mark_without_reports(
            names.R_NO_REPORTS, one_line(training.message or "the ranks are starting")
        )
    elif links is not None and links.reason == names.R_STALE:
        since = f"since {training.last_report_time}" if training.last_report_time else "lately"
        draft.mark_without_reports(names.R_STALE, f"the ranks have not reported {since}")
    else:
        draft.set_condition(
            names.RUNNING, "True", names.R_ALL_READY, f"all {ranks} ranks are ready"
        )
    if training.state == "training":
        draft.set_condition(
            names.PREFLIGHT_PASSED, "True", names.R_PREFLIGHT_PASSED, "the ranks are training"
        )
