"""Answers users who watch a job: the page, and the documents that it asks for every second.

While nobody watches a job, nothing is kept or made for it, and its ranks send no ops. When
somebody begins, what the controller remembers is shown; from then on the states of links and the
times of iterations are kept, until nobody has asked for some minutes. The answers to the job's
reports ask for the ops of one iteration a second, of the column that somebody looks at, as long as
somebody does.

All of that is kept and made in a process of its own (:mod:`pipemorph.ingest.watch.process`), so
that reports and directives do not wait for it: it is told of reports and given ops as they came,
asks how a job is when it makes a document, and its answers are passed on.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pipemorph.api.mesh import MeshShape
from pipemorph.api.spec import PipeMorphJob
from pipemorph.control.controller import JobController
from pipemorph.control.observed.links import Health, LinkHealth
from pipemorph.errors import one_line
from pipemorph.ingest.handler import Reply
from pipemorph.ingest.token_bucket import TokenBucket
from pipemorph.ingest.watch.messages import (
    Begin,
    ChangeKey,
    Forget,
    Links,
    Look,
    Marks,
    News,
    Ops,
    Sample,
    Sight,
    Taken,
    Tell,
    Told,
)
from pipemorph.ingest.watch.process import WatchProcess, WatchProcessLost
from pipemorph.watch.document import Recovered
from pipemorph.watch.documents import number
from pipemorph.watch.door import HEADERS
from pipemorph.wire import AdaptationRecord, LinkHealthReport, OpsWanted
from pipemorph.wire.ops import most_ops_bytes

log = logging.getLogger("pipemorph.ingest")

KEPT_SECONDS = 300.0
"""After so long without a viewer, what was kept for them is dropped."""
MOST_WATCHED = 256
"""Jobs that may be watched at once, since what is kept of one may take a megabyte."""
MOST_WAITING = 64
"""Requests that wait for documents."""
REQUESTS_PER_SECOND, REQUEST_BURST = 40.0, 80.0
"""Of one job: its viewers ask once a second."""

WATCHED_SECONDS = 8.0
"""Who has asked within so many seconds watches. Browsers ask once a second, or take their time."""
LEASE_SECONDS = 10.0
"""For how long the answer to a report asks for ops: longer than it is to the next report."""
OPS_SECONDS = WATCHED_SECONDS + LEASE_SECONDS
"""After so long without a viewer no more ops come, and those that are kept are dropped."""
OPS_PER_SECOND, OPS_BURST = 2.0, 4.0
"""Of one job: its agent sends those of about one iteration a second."""
MOST_READING = 8
"""Jobs whose ops are read at once. Up to 4 MB each."""
LINKS_SECONDS = 0.5
"""Least time from telling of the links of a job to telling of them again."""

STATES = {"finished": "completed"}
"""What the page calls a state that an agent reports; the others have the same name."""
GONE = "the job was deleted, or its ranks have ended"

ReadOps = Callable[[int], Awaitable[bytes | Reply]]
"""Reads the body of a request, of at most so many bytes. A reply: why it could not be read."""


@dataclass(frozen=True)
class Followed:
    """A job as its host has it. ``uid``: another one for another job of the same name.
    ``recovering``: why its ranks start again; empty if they do not. ``left_out``: the replicas
    without which it runs; the controller's spec is that of those that run."""

    job: PipeMorphJob
    controller: JobController
    uid: str
    recovering: str = ""
    recoveries: Sequence[Recovered] = ()
    left_out: Sequence[int] = ()

    @property
    def mesh(self) -> MeshShape:
        """Of the replicas that run."""
        return self.controller.spec.parallelism.mesh

    @property
    def runs(self) -> tuple[object, ...]:
        """What runs: ops of one are no ops of another."""
        return self.uid, self.controller.attempt, self.mesh, tuple(self.left_out)


class WatchStore(Protocol):
    """Has the jobs of a host."""

    def followed(self, namespace: str, job: str) -> Followed | None:
        """The job; None if the host has no such job."""


class _Numbered:
    """Numbers what seldom changes: anew whenever it is another object."""

    def __init__(self) -> None:
        self._value: tuple[object, ...] = ()
        self._number = 0

    def of(self, *value: object) -> int:
        same = len(value) == len(self._value) and all(map(_is, value, self._value))
        if not same:
            self._value, self._number = value, self._number + 1
        return self._number


def _is(one: object, other: object) -> bool:
    return one is other


class _Changes:
    """Changes of plan, and at which number each came to be as it is: figures after a change are
    added as they arrive."""

    def __init__(self) -> None:
        self.newest = 0
        self._known: dict[ChangeKey, tuple[int, AdaptationRecord]] = {}

    def take(self, records: Sequence[AdaptationRecord]) -> None:
        before, self._known = self._known, {}
        for each in records:
            key = each.plan_version, each.detected_at
            known = before.get(key)
            if known is None or known[1] != each:
                self.newest += 1
                known = self.newest, each.model_copy()
            self._known[key] = known

    @property
    def order(self) -> list[ChangeKey]:
        return list(self._known)

    def since(self, number: int) -> dict[ChangeKey, AdaptationRecord]:
        return {key: record for key, (at, record) in self._known.items() if at > number}


class _Watching:
    """A job that is watched. ``number``: by which the process knows it."""

    def __init__(self, followed: Followed, number: int, newest: int) -> None:
        self.followed, self.number = followed, number
        self.newest = newest
        """Number of the newest document: pages ask for one after the number that they have."""
        self.asked_at = now = time.monotonic()
        self.allowed = TokenBucket(REQUESTS_PER_SECOND, REQUEST_BURST, now)
        self.ops_allowed = TokenBucket(OPS_PER_SECOND, OPS_BURST, now)
        self.gone = False
        self.column: int | None = None
        """The one that was looked at last; None: that with the slowest link."""
        self.reading = False
        self.life = 0
        """The process that was told of it: another one knows nothing."""
        self.ops_kept = False
        self._links_at = float("-inf")
        self._job, self._rules, self._start, self._running = (_Numbered() for _ in range(4))
        self._changes = _Changes()

    def wanted(self, now: float, slowest: int | None = None) -> OpsWanted | None:
        """Whether somebody watches, and whose ops. ``slowest``: the column with the slowest
        link."""
        if self.gone or now - self.asked_at > WATCHED_SECONDS:
            return None
        column = slowest or 0 if self.column is None else self.column
        return OpsWanted(column=column, seconds=LEASE_SECONDS)

    def begin(self) -> Begin:
        """What the controller remembers from before."""
        controller, now = self.followed.controller, time.time()
        samples = [_sample(each) for each in controller.finished]
        iteration = controller.view(now).iteration
        self._links_at = time.monotonic()
        links = _links(controller, iteration, now, controller.links(now))
        return Begin(self.number, self.newest, samples, links)

    def news(self, report: LinkHealthReport, links: Sequence[LinkHealth]) -> News:
        now, told = time.monotonic(), None
        # Ranks that start do not know yet with which iteration they go on.
        if report.state != "starting" and now - self._links_at >= LINKS_SECONDS:
            self._links_at = now
            told = _links(self.followed.controller, report.iteration, time.time(), links)
        samples = [_sample(each) for each in report.iterations]
        return News(self.number, self.followed.runs, samples, told)

    def sight(self, asked: Look) -> Sight:
        """The job as it is now, for a process that has what ``asked`` says."""
        now, found, controller = time.time(), self.followed, self.followed.controller
        view = controller.view(now)
        state, reason = STATES.get(view.state, view.state), ""
        if state == "failed":
            reason = view.message or ""
        elif found.recovering:
            state, reason = "recovering", found.recovering
        elif self.gone and state != "completed":
            state, reason = "interrupted", GONE
        decisions = (each for each in reversed(controller.decisions) if each.kind != "outcome")
        newest = next(decisions, None)
        outlook = controller.outlook(now) if asked.outlook else None
        self._changes.take(controller.records)
        has, job = asked.has, self._job.of(found.job, controller.spec)
        if outlook is None:
            marks = Marks(job, has.rules, has.start, has.running, self._changes.newest)
        else:
            marks = Marks(
                job,
                self._rules.of(outlook.rules),
                self._start.of(outlook.start),
                self._running.of(outlook.running),
                self._changes.newest,
            )
        return Sight(
            marks=marks,
            runs=found.runs,
            at=now,
            state=state,
            reason=reason,
            links=_links(controller, view.iteration, now, view.links),
            worth=view.worth,
            plan_version=controller.running.version,
            wanted_version=controller.wanted.version,
            recoveries=found.recoveries,
            peak_memory=controller.peak_memory,
            kept=newest.reason if newest is not None and newest.kind == "keep" else "",
            order=self._changes.order,
            changes=self._changes.since(has.changes),
            situation=None if outlook is None else outlook.situation,
            job=_unless(has.job == job, found.job.model_copy(update={"spec": controller.spec})),
            rules=None if outlook is None else _unless(has.rules == marks.rules, outlook.rules),
            start=None if outlook is None else _unless(has.start == marks.start, outlook.start),
            running=None
            if outlook is None
            else _unless(has.running == marks.running, outlook.running),
        )


Value = TypeVar("Value")


def _unless(known: bool, value: Value) -> Value | None:
    return None if known else value


def _sample(each: Any) -> Sample:
    return Sample(each.index, each.seconds, each.loss, each.plan_version, each.bubble_fraction)


def _links(
    controller: JobController, iteration: int, now: float, links: Sequence[LinkHealth]
) -> Links:
    fallen = {each.link: each.transport for each in controller.transports().fallen}
    return Links(iteration, now, tuple(links), controller.running.all_routes, fallen)


def _slowest_column(links: Sequence[LinkHealth]) -> int | None:
    slow = [each for each in links if each.health is Health.SLOW]
    return max(slow, key=lambda each: each.delay).replica if slow else None


class WatchDesk:
    """Answers who watches jobs of a host. For use in one event loop. ``process``: makes the pages;
    whoever made it closes it."""

    def __init__(self, store: WatchStore, process: WatchProcess) -> None:
        self._store, self._process = store, process
        process.on_look = self._sight
        self._watching: dict[tuple[str, str], _Watching] = {}
        self._numbers = itertools.count(1)
        self._waiting = self._reading = 0
        self._closed = False

    def reported(
        self, namespace: str, name: str, report: LinkHealthReport, controller: object
    ) -> OpsWanted | None:
        """A job's controller has taken a report. Returns whether somebody watches."""
        watching = self._current(namespace, name)
        if watching is None or not isinstance(controller, JobController):
            return None
        links = controller.links(time.time())
        if watching.life == self._process.life:
            self._process.tell(watching.news(report, links))
        return watching.wanted(time.monotonic(), _slowest_column(links))

    async def take(self, namespace: str, name: str, read: ReadOps, *, packed: bool) -> Reply:
        """Answer ``POST …/ops``. They are read only while somebody watches, once at a time, and no
        more often and no more than the job has reason to send. ``packed``: whether they are
        compressed as they are read."""
        watching = self._current(namespace, name)
        now = time.monotonic()
        if watching is None or watching.wanted(now) is None or watching.reading:
            return Reply.error(409, "nobody watches")
        if not watching.ops_allowed.take(now):
            return Reply.error(429, f"more than ops of {OPS_PER_SECOND:g} iterations per second")
        if self._reading >= MOST_READING:
            return Reply.error(429, "ops of other jobs are being read; send some later")
        watching.reading, self._reading = True, self._reading + 1
        try:
            return await self._taken(watching, read, packed)
        except WatchProcessLost as lost:
            return Reply.error(503, str(lost))
        finally:
            watching.reading, self._reading = False, self._reading - 1

    async def _taken(self, watching: _Watching, read: ReadOps, packed: bool) -> Reply:
        spec = watching.followed.controller.spec
        most = most_ops_bytes(watching.followed.mesh.stages, spec.schedule.microbatches)
        body = await read(most)
        if isinstance(body, Reply):
            return body
        await self._introduce(watching)
        found, controller = watching.followed, watching.followed.controller
        watching.ops_kept = True
        taken: Taken = await self._process.ask(
            Ops(
                number=watching.number,
                runs=found.runs,
                job=found.job.model_copy(update={"spec": controller.spec}),
                attempt=controller.attempt,
                iteration=controller.view(time.time()).iteration,
                body=body,
                packed=packed,
                most=most,
            )
        )
        return Reply.error(taken.status, taken.error) if taken.error else Reply(200, b"{}")

    async def tell(
        self,
        namespace: str,
        name: str,
        query: Mapping[str, str],
        *,
        page: bool,
        packed: bool = False,
    ) -> Reply:
        """Answer ``GET …/watch/`` with the page, or ``GET …/watch/view`` with a document.
        ``packed``: whether who asks takes gzip."""
        if self._closed:
            return Reply.error(503, "the ingest stops; ask again")
        watching = self._find(namespace, name)
        if isinstance(watching, Reply):
            return watching
        now = time.monotonic()
        if self._waiting >= MOST_WAITING or not watching.allowed.take(now):
            return Reply.error(429, "too many requests for pages of jobs; ask again later")
        watching.asked_at = now
        column, iteration = number(query.get("column")), number(query.get("iteration"))
        columns = watching.followed.mesh.columns
        watching.column = column if column is not None and column < columns else None
        after = number(query.get("after"))
        self._waiting += 1
        try:
            await self._introduce(watching)
            told: Told = await self._process.ask(
                Tell(watching.number, column, iteration, after, page, packed, watching.gone)
            )
        except WatchProcessLost as lost:
            return Reply.error(503, str(lost))
        finally:
            self._waiting -= 1
            watching.asked_at = time.monotonic()  # Who has waited has watched meanwhile.
        watching.newest = max(watching.newest, told.newest)
        if told.status != 200:
            return Reply.error(told.status, told.body.decode())
        kind = "text/html" if page else "application/json"
        headers = {**HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Vary": "Accept-Encoding"}
        if told.packed:
            headers["Content-Encoding"] = "gzip"
        return Reply(200, told.body, tuple(headers.items()))

    async def _introduce(self, watching: _Watching) -> None:
        """Tell the process of a job that it does not know. Raises :class:`WatchProcessLost`."""
        await self._process.start()
        if watching.life != self._process.life:
            if not self._process.tell(watching.begin()):
                raise WatchProcessLost("the process that makes pages is too busy; ask again")
            watching.life = self._process.life

    def _sight(self, asked: Look) -> Sight | None:
        for (namespace, name), each in self._watching.items():
            if each.number == asked.number:
                self._current(namespace, name)  # As its host has it now.
                return each.sight(asked)
        return None

    def _current(self, namespace: str, name: str) -> _Watching | None:
        """The job if it is watched, as its host has it now; not one of before with its name."""
        watching = self._watching.get((namespace, name))
        found = self._store.followed(namespace, name) if watching is not None else None
        if watching is None or found is None:
            return watching
        if found.uid != watching.followed.uid:
            return None
        watching.followed = found
        return watching

    def _find(self, namespace: str, name: str) -> _Watching | Reply:
        """The job as it is watched. One that has ended is shown as it was, to who has watched."""
        self._forget_some()
        key, found = (namespace, name), self._store.followed(namespace, name)
        watching = self._watching.get(key)
        if found is None:
            if watching is None:
                return Reply.error(404, f"there is no job {namespace}/{name} here that runs")
            watching.gone = True
            return watching
        before = watching
        if watching is None or watching.gone or watching.followed.uid != found.uid:
            if watching is None and len(self._watching) >= MOST_WATCHED:
                return Reply.error(429, f"{MOST_WATCHED} jobs are watched here already")
            newest = 0 if before is None else before.newest
            watching = self._watching[key] = _Watching(found, next(self._numbers), newest)
            if before is not None:
                self._forget(before)
            log.info("%s/%s is watched", namespace, one_line(name))
        watching.followed = found
        return watching

    def sweep(self) -> None:
        """Drop what was kept for viewers who do not come any more: ops soon, all else later, and
        the process when there are none. The host calls this now and then."""
        self._forget_some()
        if not self._watching:
            self._process.end_idle(KEPT_SECONDS)

    def _forget_some(self) -> None:
        now = time.monotonic()
        for key, each in list(self._watching.items()):
            if each.asked_at < now - KEPT_SECONDS:
                del self._watching[key]
                self._forget(each)
            elif each.ops_kept and each.asked_at < now - OPS_SECONDS:
                each.ops_kept = False
                self._forget(each, ops=True)

    def _forget(self, watching: _Watching, *, ops: bool = False) -> None:
        if watching.life == self._process.life:
            self._process.tell(Forget(watching.number, ops), always=True)

    def close(self) -> None:
        """Make no more documents, and drop what was kept for them. Who waits is answered."""
        self._closed = True
        self._process.stop()
        self._watching.clear()
