"""Answers users who watch a job: the page, and the documents that it asks for every second.

While nobody watches a job, nothing is kept or made for it, and its ranks send no ops. When
somebody begins, what the controller remembers is shown; from then on the states of links and the
times of iterations are kept, until nobody has asked for some minutes. The answers to the job's
reports ask for the ops of one iteration a second, of the column that somebody looks at, as long as
somebody does.

Documents are made in a thread of their own, one after the other, so that reports and directives do
not wait for them. What they cost is bounded for each job and for all together.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from pydantic import ValidationError

from pipemorph.api.mesh import MeshShape
from pipemorph.api.spec import PipeMorphJob
from pipemorph.control.controller import JobController
from pipemorph.errors import one_line
from pipemorph.ingest.handler import ReadBody, Reply
from pipemorph.ingest.token_bucket import TokenBucket
from pipemorph.watch.build import MOST_STEPS, Watched, watch_view, worst_column
from pipemorph.watch.document import Recovered, WatchView
from pipemorph.watch.documents import BURST, SHARE, Budget, Documents, number
from pipemorph.watch.door import HEADERS
from pipemorph.watch.lanes import LaneLog
from pipemorph.wire import (
    IterationSample,
    LinkHealthReport,
    OpsReport,
    OpsTrace,
    OpsWanted,
)

log = logging.getLogger("pipemorph.ingest")

JOBS_AT_ONCE = 5
"""So many jobs may take their whole share of a core at once; more take less each."""
KEPT_SECONDS = 300.0
"""After so long without a viewer, what was kept for them is dropped."""
MOST_WATCHED = 256
"""Jobs that may be watched at once, since what is kept of one may take a megabyte."""
MOST_WAITING = 64
"""Requests that wait for the thread that makes documents."""
REQUESTS_PER_SECOND, REQUEST_BURST = 40.0, 80.0
"""Of one job: its viewers ask once a second, and again where another replica serves the job."""
LOOK_SECONDS = 10.0
"""How long the thread waits for the event loop."""

WATCHED_SECONDS = 8.0
"""Who has asked within so many seconds watches. Browsers ask once a second, or take their time."""
LEASE_SECONDS = 10.0
"""For how long the answer to a report asks for ops: longer than it is to the next report."""
UNHEARD_SECONDS = 30.0
"""After so long without ops, it is said that the trainer sends none."""
MOST_KEPT_BYTES = 16 << 20
"""Of the ops of one job, compressed: the newest iterations."""

STATES = {"finished": "completed"}
"""What the page calls a state that an agent reports; the others have the same name."""
GONE = "the job was deleted, or its ranks have ended"


@dataclass(frozen=True)
class Followed:
    """A job as its host has it. ``recovering``: why its ranks start again; empty if they do not."""

    job: PipeMorphJob
    controller: JobController
    recovering: str = ""
    recoveries: Sequence[Recovered] = ()


class WatchStore(Protocol):
    """Has the jobs of a host."""

    def followed(self, namespace: str, job: str) -> Followed | None:
        """The job; None if the host has no such job."""


@dataclass
class _Kept:
    """What is kept of a job that is watched."""

    samples: deque[IterationSample] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    lanes: LaneLog = field(default_factory=LaneLog)
    ops: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """By column and iteration: an :class:`~pipemorph.wire.OpsReport`, compressed; oldest first."""
    ops_bytes: int = 0

    def take_ops(self, ops: OpsReport, packed: bytes) -> None:
        self._drop((ops.column, ops.iteration))
        self.ops[ops.column, ops.iteration] = packed
        self.ops_bytes += len(packed)
        while self.ops_bytes > MOST_KEPT_BYTES and len(self.ops) > 1:
            self._drop(next(iter(self.ops)))

    def _drop(self, key: tuple[int, int]) -> None:
        self.ops_bytes -= len(self.ops.pop(key, b""))

    def traces(self, column: int, iteration: int) -> list[OpsTrace]:
        packed = self.ops.get((column, iteration))
        if packed is None:
            return []
        return OpsReport.model_validate_json(zlib.decompress(packed)).stages

    @staticmethod
    def of(controller: JobController, now: float) -> _Kept:
        """What the controller remembers from before."""
        kept = _Kept()
        kept.samples.extend(
            IterationSample(
                index=each.index, seconds=each.seconds, loss=each.loss,
                plan_version=each.plan_version, bubble_fraction=each.bubble_fraction,
            )
            for each in controller.finished
        )  # fmt: skip
        kept._take_links(controller, controller.view(now).iteration, now)
        return kept

    def take(self, report: LinkHealthReport, controller: JobController, now: float) -> None:
        if report.state != "starting":  # Which iteration they go on with is not known yet.
            self._take_links(controller, report.iteration, now)
        for sample in report.iterations:
            # Ranks that started again may repeat iterations.
            while self.samples and self.samples[-1].index >= sample.index:
                again = self.samples.pop().index
                for key in [key for key in self.ops if key[1] == again]:
                    self._drop(key)
            self.samples.append(sample)

    def _take_links(self, controller: JobController, iteration: int, now: float) -> None:
        fallen = {each.link: each.transport for each in controller.transports().fallen}
        routes = controller.running.all_routes
        self.lanes.take(iteration, now, controller.links(now), routes, fallen)


class _Watching:
    """A job that is watched: a :class:`~pipemorph.watch.documents.Source`."""

    def __init__(self, followed: Followed, budget: Budget, loop: asyncio.AbstractEventLoop) -> None:
        self.followed = followed
        self._loop = loop
        self.kept = _Kept.of(followed.controller, time.time())
        self.documents = Documents(self, Budget(within=budget))
        self.allowed = TokenBucket(REQUESTS_PER_SECOND, REQUEST_BURST, time.monotonic())
        self.asked_at = self.began_at = time.monotonic()
        self.gone = False
        self.column: int | None = None
        """The one that was looked at last; None: that with the slowest link."""
        self.ops_at: float | None = None
        """When ops came last."""
        self.reading = False

    def document(
        self, column: int | None, iteration: int | None, *, number: int, live: bool
    ) -> WatchView:
        # The controller is the event loop's.
        look = asyncio.run_coroutine_threadsafe(self._look(column), self._loop)
        known, column = look.result(LOOK_SECONDS)
        if iteration not in known.available:
            iteration = known.available[-1] if known.available else None
        traces = [] if iteration is None else self.kept.traces(column, iteration)
        return watch_view(known, traces, column=column, number=number, live=live)

    def wanted(self, now: float) -> OpsWanted | None:
        """Whether somebody watches, and whose ops."""
        if self.gone or now - self.asked_at > WATCHED_SECONDS:
            return None
        slow = self.kept.lanes.slow()
        worst = slow[0][0].link.replica if slow else 0
        return OpsWanted(
            column=worst if self.column is None else self.column, seconds=LEASE_SECONDS
        )

    def _no_ops(self, state: str) -> str:
        """Why there are none."""
        if state == "training" and time.monotonic() - self.began_at > UNHEARD_SECONDS:
            return "this trainer sends no ops of its iterations"
        return "the ops of an iteration have been asked for, and have not come yet"

    async def _look(self, column: int | None) -> tuple[Watched, int]:
        """What is known, and the column to show."""
        now, found, controller = time.time(), self.followed, self.followed.controller
        view, meta = controller.view(now), found.job.metadata
        state, reason = STATES.get(view.state, view.state), ""
        if state == "failed":
            reason = view.message or ""
        elif found.recovering:
            state, reason = "recovering", found.recovering
        elif self.gone and state != "completed":
            state, reason = "interrupted", GONE
        decisions = (each for each in reversed(controller.decisions) if each.kind != "outcome")
        newest = next(decisions, None)
        known = Watched(
            job=found.job,
            now=now,
            state=state,
            reason=reason,
            samples=list(self.kept.samples),
            changes=[each.model_copy() for each in controller.records],
            lanes=self.kept.lanes.copy(),
            worth=view.worth,
            plan_version=controller.running.version,
            wanted_version=controller.wanted.version,
            recoveries=found.recoveries,
            result=f"its status: kubectl describe pmj {meta.name} -n {meta.namespace}",
            peak_memory=controller.peak_memory,
            kept=newest.reason if newest is not None and newest.kind == "keep" else "",
            no_ops="" if self.ops_at is not None else self._no_ops(state),
        )
        if column is None or not 0 <= column < known.job.spec.parallelism.mesh.columns:
            column = worst_column(known)
        available = sorted(i for whose, i in self.kept.ops if whose == column)
        # What it would be under another plan takes a while to prepare, and needs a picture.
        outlook = controller.outlook(now) if available else None
        return replace(known, available=available, outlook=outlook), column


class WatchDesk:
    """Answers who watches jobs of a host. For use in one event loop."""

    def __init__(self, store: WatchStore) -> None:
        self._store = store
        self._watching: dict[tuple[str, str], _Watching] = {}
        self._budget = Budget(JOBS_AT_ONCE * SHARE, JOBS_AT_ONCE * BURST)
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="watch-documents")
        self._waiting = 0
        self._closed = False

    def reported(
        self, namespace: str, name: str, report: LinkHealthReport, controller: object
    ) -> OpsWanted | None:
        """A job's controller has taken a report. Returns whether somebody watches."""
        watching = self._watching.get((namespace, name))
        if watching is None or not isinstance(controller, JobController):
            return None
        watching.kept.take(report, controller, time.time())
        return watching.wanted(time.monotonic())

    async def take(self, namespace: str, name: str, read: ReadBody) -> Reply:
        """Answer ``POST …/ops``. They are read only while somebody watches, once at a time."""
        watching = self._watching.get((namespace, name))
        now = time.monotonic()
        if watching is None or watching.wanted(now) is None or watching.reading:
            return Reply.error(409, "nobody watches")
        watching.reading = True
        try:
            body = await read()
            if isinstance(body, Reply):
                return body
            # In a thread: a large job's take some ten milliseconds.
            ops, packed = await asyncio.to_thread(_parsed, body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return Reply.error(422, f"no ops of an iteration: {first['msg']}")
        finally:
            watching.reading = False
        spec, attempt = watching.followed.job.spec, watching.followed.controller.attempt
        why = _misfit(ops, spec.parallelism.mesh)
        if (ops.namespace, ops.job, ops.attempt) != (namespace, name, attempt):
            return Reply.error(403, "these ops are of another job or attempt")
        if why:
            return Reply.error(422, why)
        watching.kept.take_ops(ops, packed)
        watching.ops_at = now
        return Reply(200, b"{}")

    async def tell(
        self, namespace: str, name: str, query: Mapping[str, str], *, page: bool
    ) -> Reply:
        """Answer ``GET …/watch/`` with the page, or ``GET …/watch/view`` with a document."""
        if self._closed:
            return Reply.error(503, "the ingest stops; ask again")
        watching = self._find(namespace, name)
        if isinstance(watching, Reply):
            return watching
        now = time.monotonic()
        if self._waiting >= MOST_WAITING or not watching.allowed.take(now):
            return Reply.error(429, "too many requests for pages of jobs; ask again later")
        watching.asked_at = now
        asked = number(query.get("column")), number(query.get("iteration"))
        columns = watching.followed.job.spec.parallelism.mesh.columns
        watching.column = asked[0] if asked[0] is not None and asked[0] < columns else None
        self._waiting += 1
        try:
            made = await asyncio.get_running_loop().run_in_executor(
                self._maker, watching.documents.get, asked, page
            )
        except TimeoutError:
            return Reply.error(503, "the ingest is too busy to make a document; ask again")
        finally:
            self._waiting -= 1
        if made is None:
            return Reply.error(429, "another document would cost too much now; ask again later")
        kind = "text/html" if page else "application/json"
        headers = {**HEADERS, "Content-Type": f"{kind}; charset=utf-8"}
        body = made.body(page=page, after=number(query.get("after")))
        return Reply(200, body, tuple(headers.items()))

    def _find(self, namespace: str, name: str) -> _Watching | Reply:
        """The job as it is watched. One that has ended is shown as it was, to who has watched."""
        self.sweep()
        key, found = (namespace, name), self._store.followed(namespace, name)
        watching = self._watching.get(key)
        if found is None:
            if watching is None:
                return Reply.error(404, f"there is no job {namespace}/{name} here that runs")
            watching.gone = True
            watching.documents.finish()
            return watching
        if watching is None or watching.gone:
            if len(self._watching) >= MOST_WATCHED:
                return Reply.error(429, f"{MOST_WATCHED} jobs are watched here already")
            loop = asyncio.get_running_loop()
            watching = self._watching[key] = _Watching(found, self._budget, loop)
            log.info("%s/%s is watched", namespace, one_line(name))
        watching.followed = found
        return watching

    def sweep(self) -> None:
        """Drop what was kept for viewers who do not come any more. The host calls this now and
        then."""
        before = time.monotonic() - KEPT_SECONDS
        for key in [k for k, each in self._watching.items() if each.asked_at < before]:
            del self._watching[key]

    def close(self) -> None:
        """Make no more documents, and drop what was kept for them."""
        self._closed = True
        self._watching.clear()
        self._maker.shutdown(wait=False, cancel_futures=True)


def _parsed(body: bytes) -> tuple[OpsReport, bytes]:
    """Ops, and as they are kept. Raises ValidationError."""
    return OpsReport.model_validate_json(body), zlib.compress(body, 1)


def _misfit(ops: OpsReport, mesh: MeshShape) -> str:
    """What of it does not fit the job; empty if all does."""
    if ops.column >= mesh.columns:
        return f"ops of column {ops.column}; the job has {mesh.columns}"
    found = [each.stage for each in ops.stages]
    if found != list(range(mesh.stages)):
        return "these are not the ops of each stage once, in order"
    for each in ops.stages:
        if (each.column, each.iteration) != (ops.column, ops.iteration):
            return f"ops of stage {each.stage} are of another column or iteration"
        if each.rank != mesh.rank(each.stage, ops.column):
            return f"stage {each.stage} is not of rank {each.rank}"
        if not len(each.kinds) == len(each.microbatches) == len(each.gaps) == len(each.durations):
            return f"ops of stage {each.stage} are not whole"
    return ""
