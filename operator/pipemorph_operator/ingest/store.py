"""Tracks the jobs that may report, and writes the ingest's part of their status.

Kept up to date by an informer of PipeMorphJobs: a job of this replica is tracked while it has an
attempt and has not finished. The ingest owns ``training``, ``control``, ``recoveries`` and six
conditions (field owner ``pipemorph-ingest``), so its writes and the operator's never overwrite each
other. Every write contains all owned fields.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pipemorph.api.spec import JobSpec
from pipemorph.api.status import (
    Condition,
    ControlState,
    JobStatus,
    PodReplacement,
    Recoveries,
    TrainingStatus,
    condition,
)
from pipemorph.control import JobController, JobView
from pipemorph.control.first_plan import (
    FirstSchedule,
    initial_problem,
    is_quick,
    is_shared,
    share,
)
from pipemorph.control.generations import Generations
from pipemorph.errors import InputError
from pipemorph.ingest import ControlledJob, PlannerLost, Versions
from pipemorph.planning import Policy
from pipemorph_operator import names
from pipemorph_operator.children.attempt import audience
from pipemorph_operator.cluster.client import REQUEST_ERRORS, ApiRefused, Cluster, reason_of
from pipemorph_operator.cluster.job import read_job
from pipemorph_operator.ingest import figures, snapshot_codec, write_budget
from pipemorph_operator.ingest.auth import Expected
from pipemorph_operator.ingest.condition_events import ConditionEvents, EventSender
from pipemorph_operator.ingest.fence import Fence, Overtaken
from pipemorph_operator.ingest.recovery_events import RecoveryEvents
from pipemorph_operator.ingest.summary import Source, judge, summarize
from pipemorph_operator.metrics import (
    DIRECTIVES,
    JOBS_TRACKED,
    PERSIST_SECONDS,
    STATUS_WRITES,
    forget_job,
)
from pipemorph_operator.policy.lifetime import is_ours

log = logging.getLogger("pipemorph.ingest")

MOST_WRITES = 16
"""Limit of concurrent status writes. More would only wait in the API server while their time limits
run. Changes of state use at most half, so that directives need not wait for them; what may wait, a
quarter."""

FINAL_WRITE_PAUSES = (1.0, 5.0, 20.0, 60.0, 0.0)
"""Seconds to wait after each failed write of a job's final status."""
GONE = frozenset({404, 409})
"""HTTP status if the job no longer exists, or was replaced by one of the same name."""

PLAN_AGAIN_SECONDS = 5.0
"""Delay before a retry after the planner process of first plans died."""

ARRIVAL_SECONDS = 4.0
"""How long a request waits for its job to be known: an agent waits for five seconds."""

Key = tuple[str, str]

FirstPlanner = Callable[[JobSpec], Awaitable[FirstSchedule | None]]
"""The interface of :class:`pipemorph.ingest.FirstPlanner`."""


@dataclass
class TrackedJob:
    """A tracked job, which may report."""

    namespace: str
    name: str
    uid: str
    generation: int
    controller: JobController
    control: ControlState | None
    conditions: list[Condition]
    reports: write_budget.ReportLog
    generations: Generations
    recoveries: Recoveries | None
    """As last written."""
    recovery_events: RecoveryEvents
    events: ConditionEvents
    fence: Fence
    versions: Versions
    job_uid: str | None
    """UID of the attempt's batch Job."""
    written: TrainingStatus | None = None
    key_state: write_budget.KeyState | None = None
    written_at: float = float("-inf")
    changed_at: float = float("-inf")
    """When a change of state was written last."""
    began_at: float | None = None
    """The first look at which it had begun to report."""
    deciding_since: float | None = None
    """The first look at which the decision under way was seen."""
    profiled_at: int | None = None
    """Of the control state in status: see :attr:`JobController.profiled_at`."""
    looked_at: float = float("-inf")
    looked_version: int = -1
    """The newest plan version at the last look."""
    ended: bool = False
    overtaken: bool = False
    """Whether another ingest has written a plan meanwhile."""
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def reserves_early(self) -> bool:
        """Whether to reserve plan versions before a directive needs them: if the job reports here
        and adapts. Not beside another ingest: each would drive out the other."""
        spec = self.controller.spec
        return (
            self.reports.reported_at is not None
            and not (self.ended or self.overtaken)
            and spec.adaptation.enabled
            and spec.schedule.policy_kind is Policy.PIPEMORPH
            and self.versions.run_out(self.controller.plan_version)
        )

    @property
    def recovers(self) -> bool:
        """Whether status does not have what there is to tell of generations."""
        return bool(self.generations.saved.count) and self.generations.saved != self.recoveries

    @property
    def has_profile(self) -> bool:
        """Whether to save op times that a decision has looked at, with whatever write comes next:
        lest the next ingest asks for it again."""
        reported = self.reports.reported_at is not None and not (self.ended or self.overtaken)
        return reported and self.controller.profiled_at != self.profiled_at

    def awaits_directive(self, now: float) -> bool:
        """Whether a decision has been under way for a moment only: its directive is written with
        all that has changed."""
        if self.controller.replan is None:
            self.deciding_since = None
            return False
        if self.deciding_since is None:
            self.deciding_since = now
        return now - self.deciding_since < write_budget.DECIDING_SECONDS

    @property
    def has_news(self) -> bool:
        """Whether more than the job's progress may have changed since the last look."""
        newest = self.controller.newest_record
        return (
            self.reports.news
            or self.recovers
            or self.reserves_early
            or self.looked_version != self.controller.plan_version
            or (newest is not None and newest.iteration_seconds_after is None)
        )

    @property
    def source(self) -> Source:
        return Source(self.controller, self.reports.reported_at, self.generation, self.ended)


def _has_ended(status: Mapping[str, Any]) -> bool:
    return any(
        c.get("type") in (names.COMPLETE, names.FAILED) and c.get("status") == "True"
        for c in status.get("conditions") or ()
    )


class ClusterStore:
    """A :class:`~pipemorph.ingest.JobStore` that keeps jobs in the Kubernetes API."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        first_plan: FirstPlanner | None = None,
    ) -> None:
        """``first_plan`` computes the first plans of large jobs; None: compute all in-process."""
        self.on_dropped: Callable[[JobController, Generations], None] = lambda *_: None
        """Told of jobs that are not tracked any more."""
        self.replicas = 1
        """How many there are: each may write its part of what all may."""
        self._cluster = cluster
        self._first_plan = first_plan
        self._planning: dict[Key, tuple[Mapping[str, Any], asyncio.Task[None]]] = {}
        """Jobs to track once they have their first plan: the latest object, and the task."""
        self._clock = clock
        self._monotonic = monotonic
        self._tracked: dict[Key, TrackedJob] = {}
        self._budget = write_budget.Budget(monotonic())
        self._rush = write_budget.Rush()
        self._writes = asyncio.Semaphore(MOST_WRITES)
        self._writing = 0
        self._listed = False
        self._awaited: dict[Key, list[asyncio.Future[None]]] = {}
        """Requests for jobs that may be tracked soon."""
        self._sender = EventSender(cluster)
        self._final_writes: dict[Key, asyncio.Task[None]] = {}

    # --- the JobStore interface -----------------------------------------------------------

    def lookup(self, namespace: str, job: str) -> ControlledJob | None:
        tracked = self._tracked.get((namespace, job))
        return tracked.controller if tracked is not None else None

    def expected(self, namespace: str, job: str) -> Expected | None:
        tracked = self._tracked.get((namespace, job))
        if tracked is None:
            return None
        attempt = tracked.controller.attempt
        pods = tracked.generations.pods
        return Expected(
            tracked.uid, audience(namespace, job, tracked.uid), attempt, tracked.job_uid, pods
        )

    async def listed(self, kinds: Iterable[Awaitable[object]]) -> None:
        """All jobs are known once these have been waited for."""
        for each in kinds:
            await each
        self._listed = True
        for key in self._awaited.keys() - self._planning.keys():
            self._arrived(key)

    async def arrival(self, namespace: str, job: str) -> None:
        """Wait until the job is tracked, or it is known that it is not, or a little: after a
        restart all agents come at once, before jobs have been read, and large ones planned."""
        key = namespace, job
        if key in self._tracked or (self._listed and key not in self._planning):
            return
        waiting = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(key, []).append(waiting)
        await asyncio.wait((waiting,), timeout=ARRIVAL_SECONDS)
        if not waiting.done():
            self._awaited[key].remove(waiting)

    def may_come(self, namespace: str, job: str) -> bool:
        """Whether a job that is not tracked may still be: jobs are being read, or it is planned."""
        return not self._listed or (namespace, job) in self._planning

    def _arrived(self, key: Key) -> None:
        for waiting in self._awaited.pop(key, ()):
            waiting.cancel()

    def reserved(self, namespace: str, job: str) -> int:
        tracked = self._tracked.get((namespace, job))
        return tracked.versions.granted if tracked is not None else 0

    def may_have(self, namespace: str, job: str, version: int) -> bool:
        tracked = self._tracked.get((namespace, job))
        return tracked is not None and tracked.versions.may_have(version)

    def for_agent(self, namespace: str, job: str) -> range:
        tracked = self._tracked.get((namespace, job))
        return tracked.versions.for_agent() if tracked is not None else range(0)

    def another_agent(self, namespace: str, job: str) -> None:
        tracked = self._tracked.get((namespace, job))
        if tracked is not None:
            tracked.versions.another_agent()

    async def persist(self, namespace: str, job: str, snapshot: Mapping[str, Any]) -> None:
        """Write the directive and the summary to status. Raises if the write failed."""
        tracked = self._tracked.get((namespace, job))
        if tracked is None:
            raise LookupError(f"job {namespace}/{job} is no longer tracked")
        started = self._monotonic()
        self._budget.charge(started, replicas=self.replicas)
        async with tracked.writing:
            await self._pack(tracked, snapshot)
            tracked.versions.reserve(tracked.controller.plan_version)
            await self._write(tracked)
        DIRECTIVES.inc()
        PERSIST_SECONDS.observe(self._monotonic() - started)

    def generations(self, namespace: str, job: str) -> Generations | None:
        tracked = self._tracked.get((namespace, job))
        return tracked.generations if tracked is not None else None

    async def persist_generations(self, namespace: str, job: str) -> None:
        """Write the job's status, and in it the generation. Raises if the write failed."""
        tracked = self._tracked.get((namespace, job))
        if tracked is None:
            raise LookupError(f"job {namespace}/{job} is no longer tracked")
        self._budget.charge(self._monotonic(), replicas=self.replicas)
        tracked.reports.again()  # Whatever becomes of this write.
        async with tracked.writing:
            await self._write(tracked)

    @property
    def keys(self) -> list[Key]:
        return list(self._tracked)

    def jobs(self) -> list[TrackedJob]:
        """All tracked jobs."""
        return list(self._tracked.values())

    # --- changes from the informer --------------------------------------------------------

    def changed(self, key: Key, body: Mapping[str, Any] | None) -> None:
        """Process a change of a job; None: it is gone."""
        if body is None:
            self._drop(key)
        else:
            self._take(key, body)

    def wants(self, key: Key, body: Mapping[str, Any]) -> bool:
        """Whether there is anything to do for the job: it may report, or lacks its final write."""
        raw = body.get("status") or {}
        began = raw.get("attempt") is not None
        return began and (not _has_ended(raw) or self._is_unfinished(key, raw))

    def _take(self, key: Key, body: Mapping[str, Any]) -> None:
        metadata, raw = body["metadata"], body.get("status") or {}
        tracked = self._tracked.get(key)
        ended = _has_ended(raw)
        attempt = raw.get("attempt")
        ours = is_ours((body.get("spec") or {}).get("managedBy"))
        if ended or attempt is None or not ours or "deletionTimestamp" in metadata:
            final = ended and ours and "deletionTimestamp" not in metadata
            if tracked is None and final and self._is_unfinished(key, raw) and attempt is not None:
                self._track(key, body, attempt)  # The job finished while no ingest was running.
                if key in self._planning:
                    return
            self._drop(key, final=final)
            return
        if tracked is None:
            self._track(key, body, attempt)
            return
        if tracked.generation != metadata["generation"]:
            tracked.generation = metadata["generation"]
            self._spec_edited(tracked, body)
            tracked.reports.again()
        tracked.job_uid = raw.get("jobUid")
        tracked.generations.restarts = raw.get("restarts") or 0
        lost = [PodReplacement.model_validate(each) for each in raw.get("replacements") or ()]
        tracked.generations.expect(lost, self._clock())
        tracked.fence.seen(metadata.get("resourceVersion"), raw)
        if attempt > tracked.controller.attempt:
            tracked.controller.begin_attempt(attempt)
            tracked.generations.begin_attempt(attempt)
            tracked.reports.reported_at = None
            tracked.reports.again()

    def _is_unfinished(self, key: Key, status: Mapping[str, Any]) -> bool:
        """Whether the status of a finished job lacks its final write by the ingest."""
        return key not in self._final_writes and any(
            c.get("type") == names.LINKS_HEALTHY and c.get("reason") != names.R_FINISHED
            for c in status.get("conditions") or ()
        )

    def _track(self, key: Key, body: Mapping[str, Any], attempt: int) -> None:
        spec = self._spec(key, body)
        if spec is None:
            return
        if self._first_plan is not None and not (is_quick(spec) or is_shared(spec)):
            self._plan_first(key, body, spec)
            return
        status = JobStatus.model_validate(body.get("status") or {})
        seen = status.training
        generations = Generations(
            spec.parallelism.pods,
            spec.failure_policy.max_restarts,
            attempt,
            status.recoveries,
            restarts=status.restarts,
            # Agents report what is new: a loss may be the next that this ingest hears of.
            done=seen.iteration if seen is not None and seen.attempt == attempt else 0,
        )
        generations.expect(status.replacements, self._clock())
        reports = write_budget.ReportLog(self._clock, generations)
        try:
            controller, problem = snapshot_codec.restore(
                spec, status.control, attempt, reports.record
            )
        except InputError as error:
            log.error("%s/%s cannot accept reports: %s", *key, error)
            return
        if problem:
            log.error("%s/%s: %s", *key, problem)
        metadata = body["metadata"]
        own = [c for k in names.INGEST_CONDITIONS if (c := condition(status, k)) is not None]
        tracked = TrackedJob(
            namespace=key[0],
            name=key[1],
            uid=metadata["uid"],
            generation=metadata["generation"],
            controller=controller,
            control=status.control,
            conditions=own,
            reports=reports,
            generations=generations,
            recoveries=status.recoveries,
            recovery_events=RecoveryEvents(status.recoveries),
            events=ConditionEvents(own),
            fence=Fence(metadata.get("resourceVersion"), status),
            versions=Versions(snapshot_codec.in_use(status.control)),
            job_uid=status.job_uid,
            written=status.training,
            profiled_at=controller.profiled_at,
        )
        self._tracked[key] = tracked
        self._arrived(key)
        JOBS_TRACKED.set(len(self._tracked))

    def _plan_first(self, key: Key, body: Mapping[str, Any], spec: JobSpec) -> None:
        """Start computing the job's first plan; then track the job, with its latest object."""
        before = self._planning.get(key)
        task = before[1] if before else asyncio.create_task(self._track_planned(key, spec))
        self._planning[key] = body, task

    def _forget_plan(self, key: Key) -> None:
        planning = self._planning.pop(key, None)
        if planning is not None:
            planning[1].cancel()

    async def _track_planned(self, key: Key, spec: JobSpec) -> None:
        assert self._first_plan is not None
        while True:
            try:
                schedule = await self._first_plan(spec)
                break
            except InputError as error:
                log.error("%s/%s cannot accept reports: %s", *key, error)
                del self._planning[key]
                self._arrived(key)
                return
            except (PlannerLost, OSError) as error:
                log.error("%s/%s: computing the first plan failed; retrying: %s", *key, error)
                await asyncio.sleep(PLAN_AGAIN_SECONDS)
        assert schedule is not None
        # The cache of shared plans is weak: keep the plan alive until the controller has it.
        kept = share(initial_problem(spec), schedule)
        body, _ = self._planning.pop(key)
        self._take(key, body)
        del kept

    def _spec_edited(self, tracked: TrackedJob, body: Mapping[str, Any]) -> None:
        """Apply an edit of the spec: of the mutable fields the controller uses ``adaptation``."""
        spec = self._spec((tracked.namespace, tracked.name), body)
        if spec is not None:
            tracked.generations.most = spec.failure_policy.max_restarts
        if spec is None or spec.adaptation == tracked.controller.spec.adaptation:
            return
        before = tracked.controller
        tracked.controller = JobController.restore(
            spec, before.snapshot(), on_report=tracked.reports.record
        )
        tracked.controller.adopt(before)
        log.info(
            "%s/%s: spec.adaptation changed; measuring links anew", tracked.namespace, tracked.name
        )

    @staticmethod
    def _spec(key: Key, body: Mapping[str, Any]) -> JobSpec | None:
        try:
            return read_job(body).spec
        except InputError as error:
            log.warning("%s/%s cannot accept reports: %s", *key, error)
            return None

    def _drop(self, key: Key, *, final: bool = False) -> None:
        self._forget_plan(key)
        self._arrived(key)
        tracked = self._tracked.pop(key, None)
        JOBS_TRACKED.set(len(self._tracked))
        forget_job(*key)
        if tracked is not None:
            self.on_dropped(tracked.controller, tracked.generations)
        if tracked is not None and final:
            tracked.ended = True
            self._final_writes[key] = task = asyncio.create_task(self._write_final(tracked))
            task.add_done_callback(lambda _: self._final_writes.pop(key, None))

    async def _write_final(self, tracked: TrackedJob) -> None:
        """Write the final status of a finished job: its last figures, and links not slow."""
        for pause in FINAL_WRITE_PAUSES:
            try:
                async with tracked.writing:
                    await self._write(tracked)
                return
            except Overtaken:
                return  # Another ingest writes the final status.
            except REQUEST_ERRORS as error:
                why = reason_of(error)
                log.warning("%s/%s: writing the final status failed: %s", *tracked.key, why)
                if isinstance(error, ApiRefused) and error.status in GONE:
                    return
            # Retry here: finished jobs are no longer visited.
            await asyncio.sleep(pause)

    # --- status ---------------------------------------------------------------------------

    @property
    def _in_all(self) -> int:
        """Jobs of all replicas, about."""
        return len(self._tracked) * self.replicas

    async def look(self, key: Key) -> None:
        """Write the job's status if it is due. Failures are logged and retried."""
        tracked = self._tracked.get(key)
        now = self._monotonic()
        if tracked is None or tracked.writing.locked():
            return
        if tracked.awaits_directive(now):
            return
        lasted = tracked.written_at - tracked.changed_at
        # A job that has begun to report is written soon: its directives would wait for that.
        begins = tracked.reserves_early and not tracked.versions.granted
        if begins:
            if tracked.began_at is None:
                tracked.began_at = now
                self._rush.begins(now)
            if self._rush.holds(tracked.began_at, now):
                return
        since = float("inf") if begins else now - tracked.written_at
        due = partial(write_budget.is_due, since_write=since, jobs=self._in_all, lasted=lasted)
        unseen = now - tracked.looked_at
        if not tracked.reports.pending:
            visits = unseen >= write_budget.FIGURES_SECONDS
        else:
            figures_due = write_budget.figures_interval(len(self._tracked))
            visits = due(tracked.has_news) or unseen >= figures_due
        if not visits:
            return
        tracked.looked_at, tracked.looked_version = now, tracked.controller.plan_version
        wall = self._clock()
        view = tracked.controller.view(wall)
        key_state = write_budget.KeyState.of(tracked.source, view, wall)
        recovers, reserves = tracked.recovers, tracked.reserves_early
        state_changed = key_state != tracked.key_state or recovers
        tracked.reports.news = state_changed
        training, conditions = self._summary(tracked, view, wall)
        figures.show(key, training, conditions, tracked.reports.reported_at)
        known = training == tracked.written and conditions == tracked.conditions
        if known and not (reserves or recovers):
            tracked.reports.looked()
            return
        # Nobody waits for the first write of this process: it may have a thousand to make.
        urgent = state_changed and tracked.key_state is not None
        # One that was never written must not wait until all others are.
        first = state_changed and tracked.written is None
        if (
            not due(state_changed or reserves)
            or self._writing >= MOST_WRITES // (2 if urgent else 4)
            or not self._budget.allows(now, state_changed=urgent or first, replicas=self.replicas)
        ):
            return  # Retried in the next round.
        tracked.reports.looked()
        async with tracked.writing:
            try:
                if (
                    reserves
                    or tracked.has_profile
                    or (state_changed and training.adaptations and tracked.control is not None)
                ):
                    await self._pack(tracked, tracked.controller.snapshot())
                if reserves:
                    tracked.versions.reserve(tracked.controller.plan_version)
                await self._write(tracked)
            except (*REQUEST_ERRORS, Overtaken, LookupError) as error:
                tracked.reports.again()
                tracked.written_at = self._monotonic()
                log.warning("%s/%s: writing status failed: %s", *key, error)

    @staticmethod
    async def _pack(tracked: TrackedJob, snapshot: Mapping[str, Any]) -> None:
        """Keep the snapshot for the next write; only its versions if it is too large for status."""
        tracked.profiled_at = snapshot.get("profiled_at")
        try:
            tracked.control = await snapshot_codec.pack_beside(snapshot)
        except snapshot_codec.TooLarge as error:
            log.warning(
                "%s/%s: %s; saved only its version: after a restart, another plan is made",
                *tracked.key, error,
            )  # fmt: skip
            tracked.control = ControlState(
                attempt=snapshot["attempt"], plan_version=snapshot["plan_version"], snapshot=""
            )

    @staticmethod
    def _summary(
        tracked: TrackedJob, view: JobView, now: float
    ) -> tuple[TrainingStatus, list[Condition]]:
        source = tracked.source
        training = summarize(source, now, view, tracked.written)
        return training, judge(source, tracked.conditions, now, view)

    async def _write(self, tracked: TrackedJob) -> None:
        """Write the ingest's part of a job's status, as of when the write starts."""
        self._writing += 1
        try:
            async with self._writes:
                await self._apply(tracked)
        finally:
            self._writing -= 1

    async def _apply(self, tracked: TrackedJob) -> None:
        if not tracked.ended and self._tracked.get(tracked.key) is not tracked:
            raise LookupError("the job is no longer tracked here")
        wall = self._clock()
        view = tracked.controller.view(wall)
        key_state = write_budget.KeyState.of(tracked.source, view, wall)
        training, conditions = self._summary(tracked, view, wall)
        control = tracked.control
        if control is not None:
            control = control.model_copy(update={"reserved": tracked.versions.reserved})
        # Not of jobs whose ranks have always been well.
        saved = tracked.generations.saved
        status = JobStatus(
            conditions=conditions,
            training=training,
            control=control,
            recoveries=saved if saved.count else None,
        )
        about = {"name": tracked.name, "namespace": tracked.namespace, "uid": tracked.uid}
        try:
            await tracked.fence.apply(self._cluster, about, status)
        except BaseException as error:
            STATUS_WRITES.labels(result="error").inc()
            if isinstance(error, Overtaken) and self._tracked.get(tracked.key) is tracked:
                log.error("%s/%s: %s; continuing from it", *tracked.key, error)
                self._drop(tracked.key)
                self._take(tracked.key, error.body)
                if (again := self._tracked.get(tracked.key)) is not None:
                    again.overtaken = True
            raise
        STATUS_WRITES.labels(result="ok").inc()
        if control is not None and control.reserved is not None:
            tracked.versions.written(control.reserved)
        tracked.written, tracked.conditions = training, conditions
        tracked.recoveries = status.recoveries
        events = tracked.recovery_events.changed(status.recoveries)
        self._sender.send(about, [*tracked.events.changed(conditions, wall), *events])
        tracked.written_at = self._monotonic()
        if key_state != tracked.key_state:
            tracked.key_state, tracked.changed_at = key_state, tracked.written_at
