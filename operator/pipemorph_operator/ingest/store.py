"""Tracks the jobs that may report.

Kept up to date by an informer of PipeMorphJobs: a job is tracked while it has an attempt and has
not finished.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from pipemorph.api.running import Running
from pipemorph.api.spec import JobSpec
from pipemorph.api.status import UsefulTime, condition
from pipemorph.api.status_recoveries import PodReplacement
from pipemorph.control import JobController
from pipemorph.control.decide.layouts.moves import Moves
from pipemorph.control.generations import Generations
from pipemorph.control.record.goodput import Useful
from pipemorph.control.record.history import Worth
from pipemorph.errors import InputError
from pipemorph_operator import names
from pipemorph_operator.children.attempt import audience
from pipemorph_operator.cluster.client import Cluster, Object
from pipemorph_operator.cluster.job import read_job, read_status
from pipemorph_operator.ingest.auth import Expected
from pipemorph_operator.ingest.coming import ComingJobs, FirstPlanner
from pipemorph_operator.ingest.moving import follow
from pipemorph_operator.ingest.status import write_schedule
from pipemorph_operator.ingest.status.condition_events import ConditionEvents
from pipemorph_operator.ingest.status.fence import Fence, Overtaken
from pipemorph_operator.ingest.status.recovery_events import RecoveryEvents
from pipemorph_operator.ingest.status.tracked import Key, Placed, TrackedJob
from pipemorph_operator.ingest.status.writer import StatusWriter
from pipemorph_operator.metrics import (
    JOBS_TRACKED,
    forget_job,
)
from pipemorph_operator.policy.lifetime import is_ours

log = logging.getLogger("pipemorph.ingest")


def _running(spec: JobSpec, generations: Generations) -> JobSpec:
    """The job without replicas of which pods are missing."""
    return Running(spec.parallelism, generations.left_out).spec(spec)


def _has_ended(status: Mapping[str, Any]) -> bool:
    return any(
        c.get("type") in (names.COMPLETE, names.FAILED) and c.get("status") == "True"
        for c in status.get("conditions") or ()
    )


class ClusterStore:
    """A :class:`~pipemorph.ingest.JobStore` of the jobs in the Kubernetes API."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        first_plan: FirstPlanner | None = None,
        term: Callable[[], int] = lambda: 0,
    ) -> None:
        """``first_plan`` computes the first plans of large jobs; None: compute all in-process.
        ``term``: of the ingest's Lease."""
        self.is_listed: Callable[[str], bool] = lambda _: True
        """Whether all jobs of a namespace are known."""
        self.on_dropped: Callable[[JobController, Generations], None] = lambda *_: None
        """Told of jobs that are not tracked any more."""
        self.on_lost: Callable[[Generations], None] = lambda _: None
        """Told when pods may have been lost: what is due may be so earlier."""
        self._coming = ComingJobs(first_plan, self._take)
        self._clock, self._monotonic, self._term = clock, monotonic, term
        self._tracked: dict[Key, TrackedJob] = {}
        self._writer = StatusWriter(
            cluster,
            clock=clock,
            monotonic=monotonic,
            is_tracked=lambda tracked: self._tracked.get(tracked.key) is tracked,
            overtaken=self._overtaken,
        )
        self._final_writes: dict[Key, asyncio.Task[None]] = {}

    # --- the JobStore interface -----------------------------------------------------------

    def lookup(self, namespace: str, job: str) -> JobController | None:
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

    def listed(self) -> None:
        """All jobs that there are have been passed to :meth:`changed`."""
        self._coming.listed()

    async def arrival(self, namespace: str, job: str) -> None:
        """Wait a little for a job that may be tracked soon."""
        if (namespace, job) not in self._tracked:
            await self._coming.arrival((namespace, job))

    def may_come(self, namespace: str, job: str) -> bool:
        """Whether a job that is not tracked may still be."""
        return self._coming.may_come((namespace, job)) or not self.is_listed(namespace)

    async def persist(self, namespace: str, job: str) -> None:
        """Write the plan version and the summary to status. Raises if the write failed."""
        await self._writer.persist(self._required(namespace, job))

    def generations(self, namespace: str, job: str) -> Generations | None:
        tracked = self._tracked.get((namespace, job))
        return tracked.generations if tracked is not None else None

    def moving(self, namespace: str, job: str) -> TrackedJob | None:
        return self._tracked.get((namespace, job))

    async def persist_generations(self, namespace: str, job: str) -> None:
        """Write the job's status, and in it the generation. Raises if the write failed."""
        tracked = self._required(namespace, job)
        self._follow(tracked)
        await self._writer.persist_generations(tracked)

    @staticmethod
    def _follow(tracked: TrackedJob) -> None:
        """Have a controller for the replicas that run, and for their layout."""
        spec = _running(tracked.spec, tracked.generations)
        left_out = tracked.generations.left_out
        # As many others would be numbered as those before.
        if left_out != tracked.left_out:
            tracked.left_out = left_out
            tracked.controller = tracked.controller.resized(spec)
            tracked.reports.again()
        if tracked.moves is not None:
            follow(tracked.moves, tracked.controller, tracked.generations)

    def _required(self, namespace: str, job: str) -> TrackedJob:
        tracked = self._tracked.get((namespace, job))
        if tracked is None:
            raise LookupError(f"job {namespace}/{job} is no longer tracked")
        return tracked

    async def look(self, key: Key) -> None:
        """Write the job's status if it is due. Failures are logged and retried."""
        tracked = self._tracked.get(key)
        if tracked is not None:
            await self._writer.look(tracked)

    @property
    def keys(self) -> list[Key]:
        return list(self._tracked)

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
                # The job finished while no ingest was running.
                self._track(key, body, attempt)
                if key in self._coming:
                    return
            if tracked is not None:
                tracked.placed = Placed.of(raw)
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
        tracked.placed = Placed.of(raw)
        tracked.generations.following.restarts = raw.get("restarts") or 0
        lost = [PodReplacement.model_validate(each) for each in raw.get("replacements") or ()]
        tracked.generations.expect(lost, self._clock())
        self.on_lost(tracked.generations)
        tracked.fence.seen(metadata.get("resourceVersion"), raw)
        if attempt > tracked.controller.attempt:
            tracked.generations.begin_attempt(attempt)
            self._follow(tracked)
            tracked.controller.begin_attempt(attempt)
            tracked.reports.reported_at = tracked.taken_over_at = None
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
        status = read_status(body)
        if self._coming.needs_first_plan(spec):
            self._coming.expect(key, body, spec)
            return
        seen = status.training
        reported = (
            seen is not None and seen.attempt == attempt and seen.last_report_time is not None
        )
        generations = Generations(
            spec.parallelism.pods,
            spec.failure_policy.max_restarts,
            attempt,
            status.recoveries,
            restarts=status.restarts,
            # Agents report what is new: a loss may be the next that this ingest hears of.
            done=seen.iteration if seen is not None and seen.attempt == attempt else 0,
            cut=spec.parallelism,
            patience=spec.failure_policy.replacement_seconds,
            relayout=spec.adaptation.relayout,
        )
        generations.expect(status.replacements, self._clock())
        useful = status.useful_time or UsefulTime()
        reports = write_schedule.ReportLog(
            self._clock, generations, Useful(useful.seconds, useful.iterations)
        )
        try:
            controller = JobController(
                _running(spec, generations),
                attempt=attempt,
                term=self._term(),
                on_report=reports.record,
            )
        except InputError as error:
            log.error("%s/%s cannot accept reports: %s", *key, error)
            return
        controller.skip_to(status.control.plan_version if status.control is not None else 0)
        if seen is not None:
            worth = Worth(seen.saved_seconds, seen.saved_error_seconds)
            controller.count_earlier(seen.adaptations, worth)
        moves = None
        if generations.layouts.possible and spec.failure_policy.max_restarts:
            named = "/".join(key)

            def note(text: str) -> None:
                log.info("%s: %s", named, text)

            moves = Moves(spec, generations, note, self._monotonic)
            follow(moves, controller, generations)
        metadata = body["metadata"]
        own = [c for k in names.INGEST_CONDITIONS if (c := condition(status, k)) is not None]
        tracked = TrackedJob(
            namespace=key[0],
            name=key[1],
            uid=metadata["uid"],
            generation=metadata["generation"],
            spec=spec,
            controller=controller,
            conditions=own,
            reports=reports,
            generations=generations,
            recoveries=status.recoveries,
            recovery_events=RecoveryEvents(status.recoveries),
            events=ConditionEvents(own),
            fence=Fence(metadata.get("resourceVersion"), status),
            moves=moves,
            job_uid=status.job_uid,
            taken_over_at=self._clock() if reported else None,
            placed=Placed.of(body.get("status") or {}),
            left_out=generations.left_out,
            written=status.training,
        )
        self._coming.drop(key)
        self._tracked[key] = tracked
        self._coming.arrived(key)
        JOBS_TRACKED.set(len(self._tracked))

    def _spec_edited(self, tracked: TrackedJob, body: Mapping[str, Any]) -> None:
        """Apply an edit of the spec: of the mutable fields the controller uses ``adaptation``."""
        spec = self._spec((tracked.namespace, tracked.name), body)
        if spec is None:
            return
        tracked.spec = spec
        tracked.generations.following.most = spec.failure_policy.max_restarts
        tracked.generations.following.patience = spec.failure_policy.replacement_seconds
        tracked.generations.relayout = spec.adaptation.relayout
        if spec.adaptation == tracked.controller.spec.adaptation:
            return
        if tracked.moves is not None:
            tracked.moves.edit(spec)
        before = tracked.controller
        tracked.controller = JobController.restore(
            _running(spec, tracked.generations), before.snapshot(), on_report=tracked.reports.record
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
        self._coming.drop(key)
        self._coming.arrived(key)
        tracked = self._tracked.pop(key, None)
        JOBS_TRACKED.set(len(self._tracked))
        forget_job(*key)
        if tracked is not None:
            self.on_dropped(tracked.controller, tracked.generations)
        if tracked is not None and final:
            tracked.ended = True
            self._final_writes[key] = task = asyncio.create_task(self._writer.finish(tracked))
            task.add_done_callback(lambda _: self._final_writes.pop(key, None))

    def _overtaken(self, tracked: TrackedJob, error: Overtaken) -> None:
        """Go on from what another ingest has written."""
        self._drop(tracked.key)
        self._take(tracked.key, error.body)
        again = self._tracked.get(tracked.key)
        if again is not None:
            # With its term: the other one may be a later ingest.
            again.controller.adopt(tracked.controller)


class JobCache:
    """Jobs as last read, for the process that leads next: holds those that ``store`` wants until
    this process leads, and passes changes on to it from then on.

    A standby follows all jobs and tracks none: the leader writes their status. When it leads, the
    store gets the jobs from here, without another list. A body may be older than the last write of
    the leader before: the first write is refused then, and the job is read again
    (:mod:`.status.fence`).
    """

    def __init__(self, store: ClusterStore) -> None:
        self._store = store
        self._leads = False
        self._jobs: dict[Key, Object] = {}

    def changed(self, key: Key, body: Object | None) -> None:
        """Process a change of a job; None: it was deleted."""
        self._jobs.pop(key, None)
        if self._leads:
            self._store.changed(key, body)
        elif body is not None and self._store.wants(key, body):
            # Half of a small job's size, and read by nobody.
            body["metadata"].pop("managedFields", None)
            self._jobs[key] = body

    async def lead(self) -> None:
        """Pass all jobs on to the store, which is then complete."""
        self._leads = True
        while self._jobs:
            key, body = self._jobs.popitem()
            try:
                self._store.changed(key, body)
            except Exception:
                # An unexpected error in one job must not stop the others.
                log.exception("%s/%s could not be taken over", *key)
            await asyncio.sleep(0)  # A job takes milliseconds; requests wait for one at most.
        self._store.listed()
