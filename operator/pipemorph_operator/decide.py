"""What to do about a job now: one pure function from what is observed to what to change.

Level-triggered: nothing is remembered but what status holds, so the same observation gives the
same decision, also in an operator that has just started. A step that must be on record before
the next one may happen (another attempt's number) ends the decision; the next one goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from pydantic import ValidationError

from pipemorph.errors import InputError
from pipemorph.manifest import describe
from pipemorph.spec import PipeMorphJob
from pipemorph.spec_cluster import NodeExclusion
from pipemorph.status import (
    MAX_ATTEMPTS_KEPT,
    AttemptRecord,
    ConditionStatus,
    JobStatus,
    PodCounts,
)
from pipemorph_operator import names
from pipemorph_operator.children import Attempt, Unbuildable, objects
from pipemorph_operator.children.naming import attempt_name
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.facts import JobFacts, PodFacts, format_time, parse_time
from pipemorph_operator.policy import conditions, deadline, exclusion, managed, restart, state, ttl

DRAIN_SECONDS = 60.0
"""Longest wait for an old attempt's ranks, which may sit on a node that is gone. Those that come
back late hold another secret, another name and another attempt number: they harm nobody."""
STUCK_SECONDS = 15.0
"""Ranks that are not ready after this are looked at for a reason."""
LOOK_AGAIN_SECONDS = 30.0
_NOT_A_CRASH = (names.R_SUSPENDED, names.R_EVICTED)
"""Somebody stopped these attempts, and says when another one may run."""

Kind = Literal["Normal", "Warning"]


@dataclass(frozen=True)
class Event:
    """One Kubernetes event about the job."""

    kind: Kind
    reason: str
    message: str


@dataclass(frozen=True)
class Observed:
    """All a decision is made from. ``current``: Job of the attempt in status, if it exists;
    ``others``: Jobs of other attempts; ``pods``: of the current attempt, None if not looked."""

    body: Mapping[str, Any]
    now: datetime
    current: JobFacts | None = None
    others: Sequence[JobFacts] = ()
    pods: Sequence[PodFacts] | None = None


@dataclass
class Decision:
    """What to change. ``status`` None: leave it. ``needs_pods``: decide again with the pods."""

    status: JobStatus | None = None
    create: Attempt | None = None
    apply: list[dict[str, Any]] = field(default_factory=list)
    delete_jobs: list[str] = field(default_factory=list)
    delete_attempts: list[str] = field(default_factory=list)
    """Names of Secrets, ConfigMaps and PodGroups of attempts that are over."""
    delete_self: bool = False
    needs_pods: bool = False
    events: list[Event] = field(default_factory=list)
    again_in: float | None = None
    counts: list[str] = field(default_factory=list)
    """Of ``created``, ``successful``, ``failed``, ``restarted``: for the metrics."""


def decide(seen: Observed, config: OperatorConfig) -> Decision:
    """Decide. Never raises on account of the job."""
    metadata, spec = seen.body["metadata"], seen.body.get("spec") or {}
    if not managed.is_ours(spec.get("managedBy")) or "deletionTimestamp" in metadata:
        return Decision()
    step = _Step(seen, config)
    status = step.status
    if conditions.is_true(status.conditions, names.COMPLETE) or conditions.is_true(
        status.conditions, names.FAILED
    ):
        return step.finished()
    try:
        job = read_job(seen.body)
    except InputError as error:
        return step.fail(names.R_INVALID_SPEC, str(error))
    return step.unfinished(job)


def read_job(body: Mapping[str, Any]) -> PipeMorphJob:
    """The job in an API object. Raises :class:`InputError`, one line that names the field."""
    metadata = body["metadata"]
    document = {
        "apiVersion": body.get("apiVersion", names.API_VERSION),
        "kind": names.KIND,
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": dict(metadata.get("labels") or {}),
        },
        "spec": body.get("spec") or {},
    }
    try:
        job = PipeMorphJob.model_validate(document)
    except ValidationError as error:
        raise InputError(describe(error)) from None
    # Late: the planner is not needed for anything else here.
    from pipemorph.control.initial import check_plan

    try:
        check_plan(job.spec)
    except (InputError, ValidationError) as error:
        raise InputError(f"spec.schedule: {error}") from None
    return job


class _Step:
    """One decision in the making: the status as it will be, and what goes with it."""

    def __init__(self, seen: Observed, config: OperatorConfig) -> None:
        self.seen = seen
        self.config = config
        self.now = seen.now
        self.metadata = seen.body["metadata"]
        self.generation: int | None = self.metadata.get("generation")
        self.status = operator_part(seen.body)
        self.out = Decision()

    # --- the way through, top to bottom ---------------------------------------------------

    def finished(self) -> Decision:
        """A terminal state wins: nothing starts again; what still runs is stopped."""
        spec = self.seen.body.get("spec") or {}
        succeeded = conditions.is_true(self.status.conditions, names.COMPLETE)
        for job in self._jobs():
            if not succeeded and not job.drained and not job.deleting:
                self.out.delete_jobs.append(job.name)
        left = ttl.seconds_left(
            spec.get("ttlSecondsAfterFinished"), parse_time(self.status.completion_time), self.now
        )
        if left is not None and left <= 0:
            self.out.delete_self = True
            self._say("Normal", names.R_TTL, "ttlSecondsAfterFinished is over; deleting the job")
        else:
            self.out.again_in = left
        return self.out

    def unfinished(self, job: PipeMorphJob) -> Decision:
        left = deadline.seconds_left(
            job.spec.active_deadline_seconds, parse_time(self.status.start_time), self.now
        )
        if left is not None and left <= 0:
            limit = job.spec.active_deadline_seconds
            return self.fail(names.R_DEADLINE, f"activeDeadlineSeconds, {limit}, have passed")
        self._soon(left)
        if job.spec.suspend:
            return self._suspend(job)
        self._set(names.SUSPENDED, "False", names.R_NOT_SUSPENDED, "spec.suspend is false")
        current = self.seen.current
        if current is None and self.status.job_uid is not None:
            name = self.status.job_name
            return self._ended(
                job, restart.Cause(names.R_JOB_LOST, f"Job {name} was deleted by somebody else")
            )
        if current is None:
            return self._start(job)
        return self._follow(job, current)

    def fail(self, reason: str, message: str) -> Decision:
        """The job is Failed, for good. Ranks that still run are stopped."""
        self._set(names.FAILED, "True", reason, message)
        self._not_running(names.R_FINISHED, "the job has failed")
        self.status.completion_time = format_time(self.now)
        self._say("Warning", reason, message)
        self.out.counts.append("failed")
        self.out.delete_jobs += [j.name for j in self._jobs() if not j.drained and not j.deleting]
        self.out.again_in = None
        return self._done(soon=True)

    # --- suspend --------------------------------------------------------------------------

    def _suspend(self, job: PipeMorphJob) -> Decision:
        """No Job is the only Job that certainly runs nothing. Resuming starts a new attempt, so
        that reports and secrets of the ranks before are not those of the ranks after."""
        running = [j for j in self._jobs() if not j.drained]
        current = self.seen.current
        if current is not None or self.status.job_uid is not None:
            self._record(names.R_SUSPENDED, "spec.suspend is true", counted=False)
        self.out.delete_jobs += [j.name for j in self._jobs() if not j.deleting]
        self.out.delete_attempts += [j.name for j in self._jobs()]
        self.status.start_time = None
        self.status.pods = PodCounts(wanted=job.spec.parallelism.world_size)
        if running:
            self._not_running(names.R_SUSPENDING, f"{running[0].active} ranks are being stopped")
            self._set(names.SUSPENDED, "False", names.R_SUSPENDING, "ranks are being stopped")
            self._soon(DRAIN_SECONDS)
        else:
            if not conditions.is_true(self.status.conditions, names.SUSPENDED):
                self._say("Normal", names.SUSPENDED, "no rank runs; spec.suspend is true")
            self._not_running(names.R_SUSPENDED, "the job is suspended")
            self._set(names.SUSPENDED, "True", names.R_SUSPENDED, "spec.suspend is true")
        return self._done()

    # --- an attempt's life ----------------------------------------------------------------

    def _start(self, job: PipeMorphJob) -> Decision:
        """Make the objects of the attempt in status, or of the first."""
        first = self.status.attempt is None
        number = self.status.attempt or 0
        old = [j for j in self.seen.others if j.attempt < number]
        # One failed attempt stays, for its pods' logs; older ones go.
        newest = max((j.attempt for j in old), default=-1)
        self.out.delete_jobs += [
            j.name for j in old if not j.deleting and (j.attempt < newest or not j.drained)
        ]
        self.out.delete_attempts += [j.name for j in old]
        wait = self._wait_before(old)
        if wait > 0:
            self._soon(wait)
            return self._done()
        attempt = Attempt(
            job,
            self.metadata["uid"],
            number,
            tuple(node.name for node in self.status.nodes if node.excluded),
        )
        try:
            self.out.apply = objects(attempt, self.config)
        except Unbuildable as error:
            return self.fail(error.reason, error.message)
        self.out.create = attempt
        self.status.attempt, self.status.job_name = number, attempt.name
        self.status.attempt_start_time = format_time(self.now)
        if self.status.start_time is None:
            self.status.start_time = format_time(self.now)
        self.status.pods = PodCounts(wanted=attempt.ranks)
        if first:
            self.out.counts.append("created")
        self._waiting(f"Job {attempt.name} was created")
        self._set(names.PREFLIGHT_PASSED, "Unknown", names.R_PREFLIGHT_UNKNOWN, "no rank has run")
        self._say("Normal", names.R_CREATED, f"attempt {number}: Job {attempt.name} was created")
        self._soon(STUCK_SECONDS)
        return self._done()

    def _wait_before(self, old: Sequence[JobFacts]) -> float:
        """Seconds to wait before the attempt in status may start; 0 for now."""
        ended = self.status.attempts[-1] if self.status.attempts else None
        if ended is None:
            return 0.0
        since = (self.now - (parse_time(ended.ended_at) or self.now)).total_seconds()
        draining = [j for j in old if not j.drained]
        if draining and since < DRAIN_SECONDS:
            job = draining[0]
            self._not_running(
                names.R_DRAINING,
                f"attempt {ended.attempt + 1} starts when {job.name} has no rank left:"
                f" {job.active} active, {job.terminating} stopping",
            )
            return min(5.0, DRAIN_SECONDS - since)
        delay = restart.delay_seconds(self._short_attempts())
        if ended.reason in _NOT_A_CRASH:
            delay = 0.0
        if since < delay:
            self._not_running(
                names.R_RESTARTING, f"attempt {ended.attempt + 1} starts {delay:g} s after the last"
            )
            return max(0.1, delay - since)
        return 0.0

    def _short_attempts(self) -> int:
        """How many of the last attempts ended soon after they began."""
        count = 0
        for record in reversed(self.status.attempts):
            began, ended = parse_time(record.started_at), parse_time(record.ended_at)
            if began and ended and (ended - began).total_seconds() > restart.STEADY_SECONDS:
                break
            if record.reason in _NOT_A_CRASH:
                break
            count += 1
        return count

    def _follow(self, job: PipeMorphJob, current: JobFacts) -> Decision:
        """The attempt's Job exists: what has become of it."""
        stages = job.spec.parallelism.stages
        ranks = job.spec.parallelism.world_size
        status = self.status
        adopted = status.job_uid is None
        if adopted and status.attempt is None:
            # It was created, and the operator died before it could say so.
            status.attempt = current.attempt
            status.start_time = format_time(self.now)
            self.out.counts.append("created")
        if adopted:
            status.job_name, status.job_uid = current.name, current.uid
            status.attempt_start_time = status.attempt_start_time or format_time(self.now)
        if current.uid != status.job_uid or current.deleting:
            return self._ended(
                job, restart.Cause(names.R_JOB_LOST, f"Job {current.name} was deleted")
            )
        # Ranks that were there may have reported: those to come need another attempt's number.
        evicted = current.suspended and status.pods is not None and status.pods.active > 0
        ready = min(ranks, current.ready + current.succeeded)
        status.pods = PodCounts(
            wanted=ranks,
            active=current.active,
            ready=current.ready,
            succeeded=current.succeeded,
            failed=current.failed_pods,
        )
        status.ready = f"{ready}/{ranks}"
        if current.complete:
            return self._complete(ranks)
        ended = current.failed or current.failing
        if ended is not None:
            if self.seen.pods is None:
                self.out.needs_pods = True
                return self.out
            return self._ended(job, restart.classify(ended, self.seen.pods, stages))
        if evicted:
            return self._ended(
                job,
                restart.Cause(names.R_EVICTED, f"Job {current.name} was suspended", counted=False),
            )
        self._accuse(job)
        if self.out.needs_pods:
            return self.out
        if current.suspended:
            self._queued(current)
            return self._done()
        # The wait in a queue is no part of the deadline, nor of the time an attempt took.
        status.start_time = status.start_time or format_time(self.now)
        status.attempt_start_time = status.attempt_start_time or format_time(self.now)
        if ready >= ranks:
            self._running(ranks)
        else:
            lost = self._stuck(ready, ranks, stages)
            if self.out.needs_pods:
                return self.out
            if lost is not None:
                return self._ended(job, lost)
        return self._done()

    def _complete(self, ranks: int) -> Decision:
        self._set(names.COMPLETE, "True", names.R_COMPLETED, f"all {ranks} ranks finished")
        self._not_running(names.R_FINISHED, "the job is complete")
        self.status.ready = f"{ranks}/{ranks}"
        self.status.completion_time = format_time(self.now)
        self._say("Normal", names.COMPLETE, f"all {ranks} ranks finished")
        self.out.counts.append("successful")
        return self._done(soon=True)

    def _ended(self, job: PipeMorphJob, cause: restart.Cause) -> Decision:
        """The attempt in status has ended otherwise than well."""
        self._accuse(job)
        if self.out.needs_pods:
            return self.out
        number = self.status.attempt or 0
        if cause.reason == names.R_PREFLIGHT_FAILED:
            self._set(names.PREFLIGHT_PASSED, "False", names.R_PREFLIGHT_FAILED, cause.message)
        most = job.spec.failure_policy.max_restarts
        used = self.status.restarts
        self._record(cause.reason, cause.message, counted=cause.counted)
        if not cause.retry:
            return self.fail(cause.reason, cause.message)
        if cause.counted and used >= most:
            said = f"attempt {number} ended: {cause.message}"
            if most == 0:
                return self.fail(cause.reason, cause.message)
            return self.fail(
                names.R_MAX_RESTARTS, f"all {most} restarts of maxRestarts are used; {said}"
            )
        if cause.counted:
            self.status.restarts = used + 1
        else:
            self.status.disruptions += 1
        if (
            self.seen.current is not None
            and not self.seen.current.deleting
            and (self.seen.current.failed is None)
        ):
            self.out.delete_jobs.append(self.seen.current.name)
        self._not_running(
            names.R_RESTARTING, f"attempt {number} ended ({cause.reason}): {cause.message}"
        )
        self._say("Warning", cause.reason, f"attempt {number} ended: {cause.message}")
        self.out.counts.append("restarted")
        return self._done(soon=True)

    def _accuse(self, job: PipeMorphJob) -> None:
        """Keep the nodes at the ends of slow links on record."""
        training = JobStatus.model_validate(self.seen.body.get("status") or {}).training
        if training is None or not training.slow_links or training.attempt != self.status.attempt:
            return
        if self.seen.pods is None:
            # Nodes of an attempt are looked up when a slow link is first reported.
            known = {n for r in self.status.nodes for n in r.attempts}
            if training.attempt not in known and self.seen.current is not None:
                self.out.needs_pods = True
            return
        placement = job.spec.placement
        rule = placement.node_exclusion if placement else NodeExclusion()
        ranks = {
            rank
            for link in training.slow_links
            for rank in exclusion.ends(link, job.spec.parallelism.stages)
        }
        accused = exclusion.nodes_of(ranks, {pod.index: pod.node for pod in self.seen.pods})
        before = {node.name for node in self.status.nodes if node.excluded}
        self.status.nodes = exclusion.accuse(self.status.nodes, accused, training.attempt, rule)
        for node in self.status.nodes:
            if node.excluded and node.name not in before:
                self._say(
                    "Warning",
                    names.R_NODE_EXCLUDED,
                    f"node {node.name} had slow links in attempts"
                    f" {', '.join(map(str, node.attempts))}; the next attempt avoids it",
                )

    # --- conditions -----------------------------------------------------------------------

    def _running(self, ranks: int) -> None:
        if not conditions.is_true(self.status.conditions, names.RUNNING):
            self._say("Normal", names.RUNNING, f"all {ranks} ranks are ready")
        self._set(names.PODS_READY, "True", names.R_ALL_READY, f"{ranks} of {ranks} ranks")
        self._set(names.RUNNING, "True", names.R_ALL_READY, f"all {ranks} ranks are ready")
        training = (self.seen.body.get("status") or {}).get("training") or {}
        if training.get("state") == "training" and training.get("attempt") == self.status.attempt:
            self._set(
                names.PREFLIGHT_PASSED, "True", names.R_PREFLIGHT_PASSED, "the ranks are training"
            )

    def _stuck(self, ready: int, ranks: int, stages: int) -> restart.Cause | None:
        """Not all ranks are ready: say which is not and why, once they had time.

        Returns why the attempt is over if one of them will never be.
        """
        began = parse_time(self.status.attempt_start_time) or self.now
        age = (self.now - began).total_seconds()
        message = f"{ready} of {ranks} ranks are ready"
        if age >= STUCK_SECONDS:
            if self.seen.pods is None:
                self.out.needs_pods = True
                return None
            lost = restart.lost(self.seen.pods, self.now, stages)
            if lost is not None:
                return lost
            stuck = [p for p in self.seen.pods if p.stuck]
            if stuck:
                first = min(stuck, key=lambda p: p.index)
                message += f"; {restart.rank(first.index, stages)}: {first.stuck}"
            leaving = any(p.gone_by is not None for p in self.seen.pods)
            self._soon(restart.LOST_SECONDS if leaving else LOOK_AGAIN_SECONDS)
        else:
            self._soon(STUCK_SECONDS - age + 0.1)
        self._waiting(message)
        return None

    def _queued(self, current: JobFacts) -> None:
        self.status.start_time = self.status.attempt_start_time = None
        message = f"Job {current.name} is suspended by its queue"
        self._set(names.PODS_READY, "False", names.R_QUEUED, message)
        self._set(names.RUNNING, "False", names.R_QUEUED, message)

    def _waiting(self, message: str) -> None:
        self._set(names.PODS_READY, "False", names.R_WAITING_FOR_PODS, message)
        self._set(names.RUNNING, "False", names.R_WAITING_FOR_PODS, message)

    def _not_running(self, reason: str, message: str) -> None:
        self._set(names.PODS_READY, "False", reason, message)
        self._set(names.RUNNING, "False", reason, message)

    # --- small steps ----------------------------------------------------------------------

    def _jobs(self) -> list[JobFacts]:
        current = self.seen.current
        return [*([current] if current is not None else []), *self.seen.others]

    def _record(self, reason: str, message: str, *, counted: bool) -> None:
        """Close the attempt in status and put the next one's number there."""
        number = self.status.attempt or 0
        record = AttemptRecord(
            attempt=number,
            started_at=self.status.attempt_start_time,
            ended_at=format_time(self.now),
            reason=reason,
            message=message[: conditions.MESSAGE_LENGTH],
            counted=counted,
        )
        self.status.attempts = [*self.status.attempts, record][-MAX_ATTEMPTS_KEPT:]
        self.status.attempt = number + 1
        self.status.job_name = self.status.job_uid = self.status.attempt_start_time = None

    def _set(self, kind: str, status: ConditionStatus, reason: str, message: str) -> None:
        self.status.conditions = conditions.updated(
            self.status.conditions,
            kind,
            status,
            reason,
            message,
            generation=self.generation,
            now=self.now,
        )

    def _say(self, kind: Kind, reason: str, message: str) -> None:
        self.out.events.append(Event(kind, reason, message))

    def _soon(self, seconds: float | None) -> None:
        if seconds is not None:
            now = self.out.again_in
            self.out.again_in = seconds if now is None else min(now, seconds)

    def _done(self, *, soon: bool = False) -> Decision:
        """``soon``: what follows from the new status can be done at once."""
        status = self.status
        status.observed_generation = self.generation
        status.state = state.scalar(status.conditions)
        if status.pods is not None:
            done = min(status.pods.wanted, status.pods.ready + status.pods.succeeded)
            status.ready = f"{done}/{status.pods.wanted}"
        if soon:
            self._soon(0.0)
        self.out.status = status
        return self.out


def operator_part(body: Mapping[str, Any]) -> JobStatus:
    """The operator's own part of a job's status; the ingest's is its own to write."""
    status = JobStatus.model_validate(body.get("status") or {})
    own = [c for c in status.conditions if c.type in names.OPERATOR_CONDITIONS]
    return status.model_copy(
        update={"conditions": own, "training": None, "control": None}, deep=True
    )


def dump(status: JobStatus) -> dict[str, Any]:
    """A status for the API."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def current_name(body: Mapping[str, Any]) -> str | None:
    """Name of the Job to look for: of the attempt in status, or of the first."""
    spec = body.get("spec") or {}
    cut = spec.get("parallelism") or {}
    ranks = int(cut.get("stages") or 1) * int(cut.get("replicas") or 1)
    number = (body.get("status") or {}).get("attempt") or 0
    metadata = body["metadata"]
    return attempt_name(metadata["name"], metadata["uid"], number, ranks)


def refuse(seen: Observed, config: OperatorConfig, reason: str, message: str) -> Decision:
    """The decision after the API server has refused an attempt's objects for good."""
    return _Step(seen, config).fail(reason, message)


def hold(seen: Observed, config: OperatorConfig, reason: str, message: str) -> Decision:
    """The decision after the API server has refused an attempt's objects for now, as under a
    quota: say so, and try again."""
    step = _Step(seen, config)
    known = any(c.reason == reason and c.message == message for c in step.status.conditions)
    step._not_running(reason, message)
    if not known:
        step._say("Warning", reason, message)
    step._soon(LOOK_AGAIN_SECONDS)
    return step._done()
