"""Tracks the jobs that may report, and writes the ingest's part of their status.

Filled by a watch of PipeMorphJobs: a job is tracked while it has an attempt and has not finished.
The ingest owns ``training``, ``control`` and four conditions (field owner ``pipemorph-ingest``), so
its writes and the operator's never overwrite each other. Every write contains all owned fields.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pipemorph.api.spec import JobSpec
from pipemorph.api.status import Condition, ControlState, JobStatus, TrainingStatus, condition
from pipemorph.control import JobController, JobView
from pipemorph.control.first_plan import initial_problem, is_quick, is_shared, share
from pipemorph.errors import InputError
from pipemorph.ingest import ControlledJob, PlannerLost
from pipemorph.planning import Schedule
from pipemorph.wire import LinkHealthReport
from pipemorph_operator import names
from pipemorph_operator.children.attempt import audience
from pipemorph_operator.cluster.client import ApiRefused, Cluster
from pipemorph_operator.cluster.job import read_job
from pipemorph_operator.ingest import snapshot_codec, write_budget
from pipemorph_operator.ingest.auth import Expected
from pipemorph_operator.ingest.condition_events import EventSender, News
from pipemorph_operator.ingest.fence import Fence, Overtaken
from pipemorph_operator.ingest.summary import Source, judge, summarize
from pipemorph_operator.metrics import (
    DIRECTIVES,
    JOBS_HELD,
    PERSIST_SECONDS,
    STATUS_WRITES,
    forget_job,
    set_job,
)
from pipemorph_operator.policy.lifetime import is_ours

log = logging.getLogger("pipemorph.ingest")

MOST_WRITES = 16
"""Limit of concurrent status writes. More would only wait in the API server while their time limits
run. Periodic writes use at most half, so that directives need not wait for them."""

LAST_WORD_PAUSES = (1.0, 5.0, 20.0, 60.0, 0.0)
"""Seconds to wait after each failed write of a job's final status."""
GONE = frozenset({404, 409})
"""HTTP status if the job no longer exists, or was replaced by one of the same name."""

PLAN_AGAIN_SECONDS = 5.0
"""Delay before a retry after the planner process of first plans died."""

Key = tuple[str, str]

FirstPlanner = Callable[[JobSpec], Awaitable[Schedule | None]]
"""The interface of :meth:`pipemorph.ingest.ProcessPlanner.first_plan`."""


@dataclass
class Ear:
    """Records when a job's reports arrive."""

    clock: Callable[[], float]
    reported_at: float | None = None
    news: bool = True
    """Whether status may have changed since the last look."""

    def hear(self, _: LinkHealthReport) -> None:
        self.reported_at = self.clock()
        self.news = True


@dataclass
class Held:
    """A tracked job, which may report."""

    namespace: str
    name: str
    uid: str
    generation: int
    controller: JobController
    control: ControlState | None
    conditions: list[Condition]
    ear: Ear
    news: News
    fence: Fence
    job_uid: str | None
    """UID of the attempt's batch Job."""
    written: TrainingStatus | None = None
    turn: write_budget.Turn | None = None
    written_at: float = float("-inf")
    looked_at: float = float("-inf")
    ended: bool = False
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def source(self) -> Source:
        return Source(self.controller, self.ear.reported_at, self.generation, self.ended)


class ClusterStore:
    """A :class:`~pipemorph.ingest.JobStore` that keeps jobs in the Kubernetes API."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespaces: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        first_plan: FirstPlanner | None = None,
    ) -> None:
        """``first_plan`` computes the first plans of large jobs; None: compute all in-process."""
        self._cluster = cluster
        self._first_plan = first_plan
        self._planning: dict[Key, tuple[Mapping[str, Any], asyncio.Task[None]]] = {}
        """Jobs to track once they have their first plan: the latest object, and the task."""
        self._clock = clock
        self._monotonic = monotonic
        self._held: dict[Key, Held] = {}
        self._budget = write_budget.Budget(monotonic())
        self._writes = asyncio.Semaphore(MOST_WRITES)
        self._writing = 0
        self._sender = EventSender(cluster)
        self._listed: set[Key] = set()
        self._last_words: dict[Key, asyncio.Task[None]] = {}
        self._unlisted: set[str | None] = set(namespaces) or {None}

    # --- the JobStore interface -----------------------------------------------------------

    def lookup(self, namespace: str, job: str) -> ControlledJob | None:
        held = self._held.get((namespace, job))
        return held.controller if held is not None else None

    def expected(self, namespace: str, job: str) -> Expected | None:
        held = self._held.get((namespace, job))
        if held is None:
            return None
        attempt = held.controller.attempt
        return Expected(held.uid, audience(namespace, job, held.uid), attempt, held.job_uid)

    async def persist(self, namespace: str, job: str, snapshot: Mapping[str, Any]) -> None:
        """Write the directive and the summary to status. Raises if the write failed."""
        held = self._held.get((namespace, job))
        if held is None:
            raise LookupError(f"job {namespace}/{job} is no longer tracked")
        started = self._monotonic()
        self._budget.charge(started)
        async with held.writing:
            held.control = snapshot_codec.pack(snapshot)
            await self._write(held)
        DIRECTIVES.inc()
        PERSIST_SECONDS.observe(self._monotonic() - started)

    @property
    def keys(self) -> list[Key]:
        return list(self._held)

    # --- changes from the watch -----------------------------------------------------------

    @property
    def synced(self) -> bool:
        """Whether every watch has listed its jobs once."""
        return not self._unlisted

    def changed(self, kind: str, body: Mapping[str, Any], watched: str | None = None) -> None:
        """Process one event of the watch of a namespace, or of all (None)."""
        if kind == "SYNCED":
            listed = {key for key in self._listed if watched in (None, key[0])}
            for key in [*self.keys, *self._planning]:
                if watched in (None, key[0]) and key not in listed:
                    self._drop(key)
            self._listed -= listed
            self._unlisted.discard(watched)
            return
        metadata = body["metadata"]
        key = (metadata["namespace"], metadata["name"])
        if kind == "DELETED":
            self._drop(key)
            return
        if kind == "LISTED":
            self._listed.add(key)
        self._take(key, body)

    def _take(self, key: Key, body: Mapping[str, Any]) -> None:
        metadata, raw = body["metadata"], body.get("status") or {}
        held = self._held.get(key)
        if held is not None and held.uid != metadata["uid"]:
            self._drop(key)
            held = None
        ended = any(
            c.get("type") in (names.COMPLETE, names.FAILED) and c.get("status") == "True"
            for c in raw.get("conditions") or ()
        )
        attempt = raw.get("attempt")
        ours = is_ours((body.get("spec") or {}).get("managedBy"))
        if ended or attempt is None or not ours or "deletionTimestamp" in metadata:
            last_word = ended and ours and "deletionTimestamp" not in metadata
            if held is None and last_word and self._is_unfinished(key, raw) and attempt is not None:
                self._hold(key, body, attempt)  # The job finished while no ingest was running.
                if key in self._planning:
                    return
            self._drop(key, last_word=last_word)
            return
        if held is None:
            self._hold(key, body, attempt)
            return
        if held.generation != metadata["generation"]:
            held.generation = metadata["generation"]
            self._respec(held, body)
        held.job_uid = raw.get("jobUid")
        if attempt > held.controller.attempt:
            held.controller.begin_attempt(attempt)
            held.ear.reported_at = None
            held.ear.news = True

    def _is_unfinished(self, key: Key, status: Mapping[str, Any]) -> bool:
        """Whether the status of a finished job lacks its final write by the ingest."""
        return key not in self._last_words and any(
            c.get("type") == names.LINKS_HEALTHY and c.get("reason") != names.R_FINISHED
            for c in status.get("conditions") or ()
        )

    def _hold(self, key: Key, body: Mapping[str, Any], attempt: int) -> None:
        spec = self._spec(key, body)
        if spec is None:
            return
        if self._first_plan is not None and not (is_quick(spec) or is_shared(spec)):
            self._plan_first(key, body, spec)
            return
        status = JobStatus.model_validate(body.get("status") or {})
        ear = Ear(self._clock)
        try:
            controller, problem = snapshot_codec.restore(spec, status.control, attempt, ear.hear)
        except InputError as error:
            log.error("%s/%s cannot accept reports: %s", *key, error)
            return
        if problem:
            log.error("%s/%s: %s", *key, problem)
        metadata = body["metadata"]
        own = [c for k in names.INGEST_CONDITIONS if (c := condition(status, k)) is not None]
        held = Held(
            namespace=key[0],
            name=key[1],
            uid=metadata["uid"],
            generation=metadata["generation"],
            controller=controller,
            control=status.control,
            conditions=own,
            ear=ear,
            news=News(own),
            fence=Fence(metadata.get("resourceVersion"), status.control),
            job_uid=status.job_uid,
            written=status.training,
        )
        self._held[key] = held
        JOBS_HELD.set(len(self._held))

    def _plan_first(self, key: Key, body: Mapping[str, Any], spec: JobSpec) -> None:
        """Start computing the job's first plan; then track the job, with its latest object."""
        before = self._planning.get(key)
        if before is not None and before[0]["metadata"]["uid"] == body["metadata"]["uid"]:
            self._planning[key] = body, before[1]
            return
        self._forget_plan(key)
        self._planning[key] = body, asyncio.create_task(self._hold_planned(key, spec))

    def _forget_plan(self, key: Key) -> None:
        planning = self._planning.pop(key, None)
        if planning is not None:
            planning[1].cancel()

    async def _hold_planned(self, key: Key, spec: JobSpec) -> None:
        assert self._first_plan is not None
        while True:
            try:
                schedule = await self._first_plan(spec)
                break
            except InputError as error:
                log.error("%s/%s cannot accept reports: %s", *key, error)
                del self._planning[key]
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

    def _respec(self, held: Held, body: Mapping[str, Any]) -> None:
        """Apply an edit of the spec: of the mutable fields the controller uses ``adaptation``."""
        spec = self._spec((held.namespace, held.name), body)
        if spec is None or spec.adaptation == held.controller.spec.adaptation:
            return
        before = held.controller
        held.controller = JobController.restore(spec, before.snapshot(), on_report=held.ear.hear)
        held.controller.adopt_rails(before)
        log.info("%s/%s: spec.adaptation changed; measuring links anew", held.namespace, held.name)

    @staticmethod
    def _spec(key: Key, body: Mapping[str, Any]) -> JobSpec | None:
        try:
            return read_job(body).spec
        except InputError as error:
            log.warning("%s/%s cannot accept reports: %s", *key, error)
            return None

    def _drop(self, key: Key, *, last_word: bool = False) -> None:
        self._forget_plan(key)
        held = self._held.pop(key, None)
        JOBS_HELD.set(len(self._held))
        forget_job(*key)
        if held is not None and last_word:
            held.ended = True
            self._last_words[key] = task = asyncio.create_task(self._say_last(held))
            task.add_done_callback(lambda _: self._last_words.pop(key, None))

    async def _say_last(self, held: Held) -> None:
        """Write the final status of a finished job: its last figures, and links not slow."""
        for pause in LAST_WORD_PAUSES:
            try:
                async with held.writing:
                    await self._write(held)
                return
            except Overtaken:
                return  # Another ingest writes the final status.
            except (ApiRefused, aiohttp.ClientError, TimeoutError, OSError) as error:
                why = str(error) or type(error).__name__
                log.warning("%s/%s: writing the final status failed: %s", *held.key, why)
                if isinstance(error, ApiRefused) and error.status in GONE:
                    return
            # Retry here: finished jobs are no longer visited.
            await asyncio.sleep(pause)

    # --- status ---------------------------------------------------------------------------

    async def look(self, key: Key) -> None:
        """Write the job's status if it is due. Failures are logged and retried."""
        held = self._held.get(key)
        now = self._monotonic()
        if held is None or held.writing.locked():
            return
        # Visit a silent job too, less often: its links become unknown with time.
        if not held.ear.news and now - held.looked_at < write_budget.PROGRESS_SECONDS:
            return
        held.looked_at = now
        wall = self._clock()
        view = held.controller.view(wall)
        turn = write_budget.Turn.of(held.source, view, wall)
        turned = turn != held.turn
        if not write_budget.is_due(turned, now - held.written_at, len(self._held)):
            return
        training, conditions = self._summary(held, view, wall)
        self._gauge(held, training, conditions)
        if training == held.written and conditions == held.conditions:
            held.ear.news = False
            return
        if self._writing >= MOST_WRITES // 2 or not self._budget.allows(now, turned=turned):
            return  # Retried in the next round.
        held.ear.news = False
        async with held.writing:
            try:
                if turned and training.adaptations and held.control is not None:
                    held.control = snapshot_codec.pack(held.controller.snapshot())
                await self._write(held)
            except (
                ApiRefused,
                aiohttp.ClientError,
                TimeoutError,
                OSError,
                Overtaken,
                snapshot_codec.TooLarge,
            ) as error:
                held.ear.news = True
                held.written_at = self._monotonic()
                log.warning("%s/%s: writing status failed: %s", *key, error)

    @staticmethod
    def _summary(held: Held, view: JobView, now: float) -> tuple[TrainingStatus, list[Condition]]:
        source = held.source
        training = summarize(source, now, view, held.written)
        return training, judge(source, held.conditions, now, view)

    async def _write(self, held: Held) -> None:
        """Write the ingest's part of a job's status, as of when the write starts."""
        self._writing += 1
        try:
            async with self._writes:
                await self._apply(held)
        finally:
            self._writing -= 1

    async def _apply(self, held: Held) -> None:
        wall = self._clock()
        view = held.controller.view(wall)
        turn = write_budget.Turn.of(held.source, view, wall)
        training, conditions = self._summary(held, view, wall)
        status = JobStatus(conditions=conditions, training=training, control=held.control)
        about = {"name": held.name, "namespace": held.namespace, "uid": held.uid}
        try:
            await held.fence.apply(self._cluster, about, status)
        except BaseException as error:
            STATUS_WRITES.labels(result="error").inc()
            if isinstance(error, Overtaken) and self._held.get(held.key) is held:
                log.error("%s/%s: %s; continuing from it", *held.key, error)
                self._drop(held.key)
                self._take(held.key, error.body)
            raise
        STATUS_WRITES.labels(result="ok").inc()
        held.written, held.conditions = training, conditions
        self._sender.send(about, held.news.of(conditions))
        held.turn = turn
        held.written_at = self._monotonic()

    @staticmethod
    def _gauge(held: Held, training: TrainingStatus, conditions: Sequence[Condition]) -> None:
        rails = training.rails
        healthy = {c.type: c.status for c in conditions}.get(names.RAILS_HEALTHY)
        worst = max((link.delay_ms for link in training.slow_links), default=0.0)
        set_job(
            held.namespace,
            held.name,
            (
                ("iteration", training.iteration),
                ("iteration_seconds", training.iteration_seconds),
                ("bubble_fraction", training.bubble_fraction),
                ("slow_links", training.slow_link_count),
                ("unknown_links", training.unknown_link_count),
                ("worst_link_delay_seconds", worst / 1e3),
                ("wanted_plan_version", training.wanted_plan_version),
                ("applied_plan_version", training.applied_plan_version),
                ("adaptations", training.adaptations),
                ("peak_memory_bytes", max(training.peak_memory, default=0) or None),
                ("last_report_timestamp_seconds", held.ear.reported_at),
                ("rails_healthy", {"True": 1.0, "False": 0.0}.get(healthy or "Unknown")),
                ("rdma_ports", rails.ports if rails is not None else None),
                ("sick_rdma_ports", rails.sick_count if rails is not None else None),
                ("congested_rdma_ports", rails.congested_count if rails is not None else None),
                ("fallen_links", training.fallen_link_count),
                ("link_fallbacks", training.link_fallbacks),
                ("link_failbacks", training.link_failbacks),
            ),
        )
