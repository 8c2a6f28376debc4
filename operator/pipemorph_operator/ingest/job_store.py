"""Tracks the jobs that may report.

An informer of PipeMorphJobs reports changes: a job is tracked while it has an attempt and has not
finished.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from pipemorph.control import JobController
from pipemorph.control.decide.layouts.layout_changes import LayoutChanges
from pipemorph.control.history.goodput import GoodputMeter
from pipemorph.control.history.job_history import SavedTime
from pipemorph.control.job_generations import JobGenerations
from pipemorph.errors import InputError
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.job_status import UsefulTime, find_condition
from pipemorph.spec.running_subset import RunningSubset
from pipemorph.spec.status_recoveries import PodReplacement
from pipemorph.views.status.job_metrics import remove_job_series
from pipemorph_operator import names
from pipemorph_operator.ingest.auth import TokenRequirements
from pipemorph_operator.ingest.layout_changer import update_layout
from pipemorph_operator.ingest.pending_jobs import FirstPlanner, PendingJobs
from pipemorph_operator.ingest.status import write_schedule
from pipemorph_operator.ingest.status.condition_events import ConditionEventFilter
from pipemorph_operator.ingest.status.recovery_events import RecoveryEventFilter
from pipemorph_operator.ingest.status.status_fence import StatusFence, StatusOvertakenError
from pipemorph_operator.ingest.status.status_writer import StatusWriter
from pipemorph_operator.ingest.status.tracked_job import Key, PlacedTime, TrackedJob
from pipemorph_operator.kube.client import KubeClient, Object
from pipemorph_operator.kube.job_object import read_job, read_status
from pipemorph_operator.metrics import JOBS_TRACKED
from pipemorph_operator.policy.lifetime import is_managed_here
from pipemorph_operator.resources.attempt import build_token_audience

log = logging.getLogger("pipemorph.ingest")


def _build_running_spec(spec: JobSpec, generations: JobGenerations) -> JobSpec:
    """Spec without the replicas whose pods are missing."""
    return RunningSubset(spec.parallelism, generations.excluded_replicas).build_reduced_spec(spec)


def _has_ended(status: Mapping[str, Any]) -> bool:
    return any(
        c.get("type") in (names.COMPLETE, names.FAILED) and c.get("status") == "True"
        for c in status.get("conditions") or ()
    )


class ClusterJobStore:
    """A :class:`~pipemorph.ingest.JobStore` of the jobs in the Kubernetes API."""

    def __init__(
        self,
        cluster: KubeClient,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        first_plan: FirstPlanner | None = None,
        term: Callable[[], int] = lambda: 0,
    ) -> None:
        """``first_plan`` computes the first plans of large jobs; None: compute all in-process.
        ``term`` returns the term of the ingest's Lease."""
        self.is_listed: Callable[[str], bool] = lambda _: True
        """Returns True if all jobs of a namespace are known."""
        self.on_dropped: Callable[[JobController, JobGenerations], None] = lambda *_: None
        """Called for a job that is not tracked any more."""
        self.on_pods_lost: Callable[[JobGenerations], None] = lambda _: None
        """Called if pods may have been lost, which may bring deadlines forward."""
        self._pending = PendingJobs(first_plan, self._process_job)
        self._clock, self._monotonic, self._term = clock, monotonic, term
        self._tracked: dict[Key, TrackedJob] = {}
        self._writer = StatusWriter(
            cluster,
            clock=clock,
            monotonic=monotonic,
            is_tracked=lambda tracked: self._tracked.get(tracked.key) is tracked,
            overtaken=self._continue_from_other,
        )
        self._final_writes: dict[Key, asyncio.Task[None]] = {}

    # --- the JobStore interface -----------------------------------------------------------

    def find_job(self, namespace: str, job: str) -> JobController | None:
        tracked = self._tracked.get((namespace, job))
        return tracked.controller if tracked is not None else None

    def find_token_requirements(self, namespace: str, job: str) -> TokenRequirements | None:
        tracked = self._tracked.get((namespace, job))
        if tracked is None:
            return None
        attempt = tracked.controller.attempt
        pods = tracked.generations.pod_count
        return TokenRequirements(
            tracked.uid,
            build_token_audience(namespace, job, tracked.uid),
            attempt,
            tracked.job_uid,
            pods,
        )

    def mark_all_listed(self) -> None:
        """Record that all existing jobs have been passed to :meth:`process_change`."""
        self._pending.mark_all_listed()

    async def wait_for_job(self, namespace: str, job: str) -> None:
        """Wait a little for a job that may be tracked soon."""
        if (namespace, job) not in self._tracked:
            await self._pending.wait_for_job((namespace, job))

    def may_appear(self, namespace: str, job: str) -> bool:
        """True if an untracked job may be tracked soon."""
        return self._pending.may_appear((namespace, job)) or not self.is_listed(namespace)

    async def persist_status(self, namespace: str, job: str) -> None:
        """Write the plan version and the summary to status. Raises if the write fails."""
        await self._writer.write_directive(self._require_tracked(namespace, job))

    def find_generations(self, namespace: str, job: str) -> JobGenerations | None:
        tracked = self._tracked.get((namespace, job))
        return tracked.generations if tracked is not None else None

    def find_tracked_job(self, namespace: str, job: str) -> TrackedJob | None:
        return self._tracked.get((namespace, job))

    async def persist_generations(self, namespace: str, job: str) -> None:
        """Write the job's status, including the generation. Raises if the write fails."""
        tracked = self._require_tracked(namespace, job)
        self._update_controller(tracked)
        await self._writer.write_generation(tracked)

    @staticmethod
    def _update_controller(tracked: TrackedJob) -> None:
        """Fit the controller to the running replicas and their layout."""
        spec = _build_running_spec(tracked.spec, tracked.generations)
        excluded_replicas = tracked.generations.excluded_replicas
        # Compare the replicas, not their number: ranks are numbered by the running replicas.
        if excluded_replicas != tracked.excluded_replicas:
            tracked.excluded_replicas = excluded_replicas
            tracked.controller = tracked.controller.with_replicas_of(spec)
            tracked.reports.mark_outdated()
        if tracked.moves is not None:
            update_layout(tracked.moves, tracked.controller, tracked.generations)

    def _require_tracked(self, namespace: str, job: str) -> TrackedJob:
        tracked = self._tracked.get((namespace, job))
        if tracked is None:
            raise LookupError(f"job {namespace}/{job} is no longer tracked")
        return tracked

    async def write_status_if_due(self, key: Key) -> None:
        """Write the job's status if it is due. Logs failures; the next visit retries."""
        tracked = self._tracked.get(key)
        if tracked is not None:
            await self._writer.write_if_due(tracked)

    @property
    def keys(self) -> list[Key]:
        return list(self._tracked)

    # --- changes from the informer --------------------------------------------------------

    def process_change(self, key: Key, body: Mapping[str, Any] | None) -> None:
        """Process a change of a job; None: it is gone."""
        if body is None:
            self._drop_job(key)
        else:
            self._process_job(key, body)

    def needs_job(self, key: Key, body: Mapping[str, Any]) -> bool:
        """True if the job needs this store: it may report, or lacks its final write."""
        raw = body.get("status") or {}
        began = raw.get("attempt") is not None
        return began and (not _has_ended(raw) or self._lacks_final_write(key, raw))

    def _process_job(self, key: Key, body: Mapping[str, Any]) -> None:
        metadata, raw = body["metadata"], body.get("status") or {}
        tracked = self._tracked.get(key)
        ended = _has_ended(raw)
        attempt = raw.get("attempt")
        ours = is_managed_here((body.get("spec") or {}).get("managedBy"))
        if ended or attempt is None or not ours or "deletionTimestamp" in metadata:
            final = ended and ours and "deletionTimestamp" not in metadata
            if (
                tracked is None
                and final
                and self._lacks_final_write(key, raw)
                and attempt is not None
            ):
                # The job finished while no ingest was running.
                self._track_job(key, body, attempt)
                if key in self._pending:
                    return
            if tracked is not None:
                tracked.placed_time = PlacedTime.from_status(raw)
            self._drop_job(key, final=final)
            return
        if tracked is None:
            self._track_job(key, body, attempt)
            return
        if tracked.generation != metadata["generation"]:
            tracked.generation = metadata["generation"]
            self._apply_spec_edit(tracked, body)
            tracked.reports.mark_outdated()
        tracked.job_uid = raw.get("jobUid")
        tracked.placed_time = PlacedTime.from_status(raw)
        tracked.generations.restart_policy.restarts = raw.get("restarts") or 0
        lost = [PodReplacement.model_validate(each) for each in raw.get("replacements") or ()]
        tracked.generations.expect_replacements(lost, self._clock())
        self.on_pods_lost(tracked.generations)
        tracked.status_fence.accept_version(metadata.get("resourceVersion"), raw)
        if attempt > tracked.controller.attempt:
            tracked.generations.begin_attempt(attempt)
            self._update_controller(tracked)
            tracked.controller.begin_attempt(attempt)
            tracked.reports.reported_at = tracked.taken_over_at = None
            tracked.reports.mark_outdated()

    def _lacks_final_write(self, key: Key, status: Mapping[str, Any]) -> bool:
        """True if the status of a finished job lacks its final write by the ingest."""
        return key not in self._final_writes and any(
            c.get("type") == names.LINKS_HEALTHY and c.get("reason") != names.R_FINISHED
            for c in status.get("conditions") or ()
        )

    def _track_job(self, key: Key, body: Mapping[str, Any], attempt: int) -> None:
        spec = self._read_spec(key, body)
        if spec is None:
            return
        status = read_status(body)
        if self._pending.needs_first_plan(spec):
            self._pending.add_job(key, body, spec)
            return
        seen = status.training
        reported = (
            seen is not None and seen.attempt == attempt and seen.last_report_time is not None
        )
        generations = JobGenerations(
            spec.parallelism.pods,
            spec.failure_policy.max_restarts,
            attempt,
            status.recoveries,
            restarts=status.restarts,
            # Agents report changes only: this ingest's first report may be that of a loss.
            done=seen.iteration if seen is not None and seen.attempt == attempt else 0,
            cut=spec.parallelism,
            patience=spec.failure_policy.replacement_seconds,
            relayout=spec.adaptation.relayout,
        )
        generations.expect_replacements(status.replacements, self._clock())
        useful = status.useful_time or UsefulTime()
        reports = write_schedule.ReportLog(
            self._clock, generations, GoodputMeter(useful.seconds, useful.iterations)
        )
        try:
            controller = JobController(
                _build_running_spec(spec, generations),
                attempt=attempt,
                term=self._term(),
                on_report=reports.record_report,
            )
        except InputError as error:
            log.error("%s/%s cannot accept reports: %s", *key, error)
            return
        controller.skip_plan_versions(
            status.control.plan_version if status.control is not None else 0
        )
        if seen is not None:
            worth = SavedTime(seen.saved_seconds, seen.saved_error_seconds)
            controller.count_earlier_changes(seen.adaptations, worth)
        moves = None
        if generations.layout_transition.is_possible and spec.failure_policy.max_restarts:
            named = "/".join(key)

            def log_note(text: str) -> None:
                log.info("%s: %s", named, text)

            moves = LayoutChanges(spec, generations, log_note, self._monotonic)
            update_layout(moves, controller, generations)
        metadata = body["metadata"]
        own = [c for k in names.INGEST_CONDITIONS if (c := find_condition(status, k)) is not None]
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
            recovery_events=RecoveryEventFilter(status.recoveries),
            condition_events=ConditionEventFilter(own),
            status_fence=StatusFence(metadata.get("resourceVersion"), status),
            moves=moves,
            job_uid=status.job_uid,
            taken_over_at=self._clock() if reported else None,
            placed_time=PlacedTime.from_status(body.get("status") or {}),
            excluded_replicas=generations.excluded_replicas,
            written_training=status.training,
        )
        self._pending.remove_job(key)
        self._tracked[key] = tracked
        self._pending.release_waiters(key)
        JOBS_TRACKED.set(len(self._tracked))

    def _apply_spec_edit(self, tracked: TrackedJob, body: Mapping[str, Any]) -> None:
        """Apply an edit of the spec. The controller's only mutable field is ``adaptation``."""
        spec = self._read_spec((tracked.namespace, tracked.name), body)
        if spec is None:
            return
        tracked.spec = spec
        tracked.generations.restart_policy.most = spec.failure_policy.max_restarts
        tracked.generations.restart_policy.patience = spec.failure_policy.replacement_seconds
        tracked.generations.relayout = spec.adaptation.relayout
        if spec.adaptation == tracked.controller.spec.adaptation:
            return
        if tracked.moves is not None:
            tracked.moves.change_spec(spec)
        before = tracked.controller
        tracked.controller = JobController.from_snapshot(
            _build_running_spec(spec, tracked.generations),
            before.take_snapshot(),
            on_report=tracked.reports.record_report,
        )
        tracked.controller.take_over_from(before)
        log.info(
            "%s/%s: spec.adaptation changed; measuring links anew", tracked.namespace, tracked.name
        )

    @staticmethod
    def _read_spec(key: Key, body: Mapping[str, Any]) -> JobSpec | None:
        try:
            return read_job(body).spec
        except InputError as error:
            log.warning("%s/%s cannot accept reports: %s", *key, error)
            return None

    def _drop_job(self, key: Key, *, final: bool = False) -> None:
        self._pending.remove_job(key)
        self._pending.release_waiters(key)
        tracked = self._tracked.pop(key, None)
        JOBS_TRACKED.set(len(self._tracked))
        remove_job_series(*key)
        if tracked is not None:
            self.on_dropped(tracked.controller, tracked.generations)
        if tracked is not None and final:
            tracked.has_ended = True
            self._final_writes[key] = task = asyncio.create_task(
                self._writer.write_final_status(tracked)
            )
            task.add_done_callback(lambda _: self._final_writes.pop(key, None))

    def _continue_from_other(self, tracked: TrackedJob, error: StatusOvertakenError) -> None:
        """Continue from the status that another ingest has written."""
        self._drop_job(tracked.key)
        self._process_job(tracked.key, error.body)
        again = self._tracked.get(tracked.key)
        if again is not None:
            # Preserve this host's term: the other process may be a later ingest.
            again.controller.take_over_from(tracked.controller)


class StandbyJobCache:
    """Jobs as last read by a standby: holds those that ``store`` needs until this process leads,
    and passes changes on to the store from then on.

    A standby follows all jobs and tracks none: the leader writes their status. When it leads, it
    passes the jobs on without another list. A body may be older than the last write of the previous
    leader: then the first write is refused, and the job is read again
    (:mod:`.status.status_fence`).
    """

    def __init__(self, store: ClusterJobStore) -> None:
        self._store = store
        self._leads = False
        self._jobs: dict[Key, Object] = {}

    def process_change(self, key: Key, body: Object | None) -> None:
        """Process a change of a job; None: it was deleted."""
        self._jobs.pop(key, None)
        if self._leads:
            self._store.process_change(key, body)
        elif body is not None and self._store.needs_job(key, body):
            # Takes half of a small job's size, and is never read.
            body["metadata"].pop("managedFields", None)
            self._jobs[key] = body

    async def pass_jobs_on(self) -> None:
        """Pass all jobs to the store, which is then complete."""
        self._leads = True
        while self._jobs:
            key, body = self._jobs.popitem()
            try:
                self._store.process_change(key, body)
            except Exception:
                # An unexpected error in one job must not stop the others.
                log.exception("%s/%s could not be taken over", *key)
            await asyncio.sleep(0)  # A job takes milliseconds; requests wait for one at most.
        self._store.mark_all_listed()
