"""Answers users who watch a job: the page, and the documents that it asks for every second.

While nobody watches a job, nothing is kept or made for it. When somebody begins, what the
controller remembers is shown; from then on the states of links and the times of iterations are
kept, until nobody has asked for some minutes.

Documents are made in a thread of their own, one after the other, so that reports and directives do
not wait for them. What they cost is bounded for each job and for all together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from pipemorph.api.spec import PipeMorphJob
from pipemorph.control.controller import JobController
from pipemorph.errors import one_line
from pipemorph.ingest.handler import Reply
from pipemorph.ingest.token_bucket import TokenBucket
from pipemorph.watch.build import MOST_STEPS, Watched, watch_view, worst_column
from pipemorph.watch.document import Recovered, WatchView
from pipemorph.watch.documents import BURST, SHARE, Budget, Documents, number
from pipemorph.watch.door import HEADERS
from pipemorph.watch.lanes import LaneLog
from pipemorph.wire import IterationSample, LinkHealthReport

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
                self.samples.pop()
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
        self.asked_at = time.monotonic()
        self.gone = False

    def document(
        self, column: int | None, iteration: int | None, *, number: int, live: bool
    ) -> WatchView:
        # The controller is the event loop's.
        known = asyncio.run_coroutine_threadsafe(self._look(), self._loop).result(LOOK_SECONDS)
        if column is None or not 0 <= column < known.job.spec.parallelism.mesh.columns:
            column = worst_column(known)
        return watch_view(known, [], column=column, number=number, live=live)

    async def _look(self) -> Watched:
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
        return Watched(
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
        )


class WatchDesk:
    """Answers who watches jobs of a host. For use in one event loop."""

    def __init__(self, store: WatchStore) -> None:
        self._store = store
        self._watching: dict[tuple[str, str], _Watching] = {}
        self._budget = Budget(JOBS_AT_ONCE * SHARE, JOBS_AT_ONCE * BURST)
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="watch-documents")
        self._waiting = 0

    def reported(
        self, namespace: str, name: str, report: LinkHealthReport, controller: object
    ) -> None:
        """A job's controller has taken a report."""
        watching = self._watching.get((namespace, name))
        if watching is not None and isinstance(controller, JobController):
            watching.kept.take(report, controller, time.time())

    async def tell(
        self, namespace: str, name: str, query: Mapping[str, str], *, page: bool
    ) -> Reply:
        """Answer ``GET …/watch/`` with the page, or ``GET …/watch/view`` with a document."""
        watching = self._find(namespace, name)
        if isinstance(watching, Reply):
            return watching
        now = time.monotonic()
        if self._waiting >= MOST_WAITING or not watching.allowed.take(now):
            return Reply.error(429, "too many requests for pages of jobs; ask again later")
        watching.asked_at = now
        asked = number(query.get("column")), number(query.get("iteration"))
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
        """Drop what was kept for viewers who do not come any more."""
        before = time.monotonic() - KEPT_SECONDS
        for key in [k for k, each in self._watching.items() if each.asked_at < before]:
            del self._watching[key]

    def close(self) -> None:
        """Make no more documents."""
        self._maker.shutdown(wait=False, cancel_futures=True)
