"""Answers users who watch a job: the page, and the documents that it asks for every second.

While nobody watches a job, nothing is kept or made for it, and its ranks send no ops. When
somebody begins, what the controller remembers is shown; from then on the states of links and the
times of iterations are kept, until nobody has asked for some minutes. The answers to the job's
reports ask for the ops of one iteration a second, of the column that somebody looks at, as long as
somebody does.

Documents are made in a thread of their own, one after the other, so that reports and directives do
not wait for them; ops are checked in another one. What they cost and what is kept is bounded for
each job and for all together.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from pydantic import ValidationError

from pipemorph.api.mesh import MeshShape
from pipemorph.api.spec import JobSpec, PipeMorphJob
from pipemorph.control.controller import JobController
from pipemorph.errors import one_line
from pipemorph.ingest.handler import Reply
from pipemorph.ingest.token_bucket import TokenBucket
from pipemorph.watch.build import (
    MOST_AVAILABLE,
    MOST_STEPS,
    NEWEST,
    Watched,
    watch_view,
    worst_column,
)
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
from pipemorph.wire.ops import OPS_OF_MICROBATCH, most_ops_bytes

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
MOST_KEPT_BYTES, MOST_KEPT_IN_ALL = 16 << 20, 128 << 20
"""Of the ops of one job, and of all together, compressed: the newest iterations."""
MOST_KEPT_OPS = MOST_AVAILABLE
"""Iterations of one job, in all columns."""
ENTRY_BYTES = 256
"""That the ops of one iteration take beside themselves."""
OPS_SECONDS = WATCHED_SECONDS + LEASE_SECONDS
"""After so long without a viewer no more ops come, and those that are kept are dropped."""
OPS_PER_SECOND, OPS_BURST = 2.0, 4.0
"""Of one job: its agent sends those of about one iteration a second."""
MOST_READING = 8
"""Jobs whose ops are read at once. Up to 4 MB each."""
OPS_SHARE, OPS_CPU_BURST = 0.1, 1.0
"""Part of a core, and seconds of it at once, that checking the ops of all jobs may take."""
APART_SECONDS, APART = 30.0, 16
"""How far ops may be from the iteration in progress, by its report: by so much time, and by so many
iterations more."""

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


@dataclass
class _Kept:
    """What is kept of a job that is watched."""

    samples: deque[IterationSample] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    lanes: LaneLog = field(default_factory=LaneLog)
    ops: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """By column and iteration: an :class:`~pipemorph.wire.OpsReport`, compressed; oldest first."""
    ops_bytes: int = 0
    """With :data:`ENTRY_BYTES` for each."""

    def take_ops(self, ops: OpsReport, packed: bytes) -> None:
        # Iterations are told in order: what is after this one is of ranks that have ended.
        self.drop_ops_from(ops.iteration + 1)
        self._drop((ops.column, ops.iteration))
        self.ops[ops.column, ops.iteration] = packed
        self.ops_bytes += len(packed) + ENTRY_BYTES
        while len(self.ops) > 1 and (
            self.ops_bytes > MOST_KEPT_BYTES or len(self.ops) > MOST_KEPT_OPS
        ):
            self.drop_oldest_ops()

    def drop_oldest_ops(self) -> None:
        self._drop(next(iter(self.ops)))

    def drop_ops_from(self, iteration: int) -> None:
        """Drop the ops of this iteration and all after it; from 0 on: all."""
        for key in [key for key in self.ops if key[1] >= iteration]:
            self._drop(key)

    def _drop(self, key: tuple[int, int]) -> None:
        packed = self.ops.pop(key, None)
        if packed is not None:
            self.ops_bytes -= len(packed) + ENTRY_BYTES

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
        first: int | None = None
        for sample in report.iterations:
            # Ranks that started again may repeat iterations.
            while self.samples and self.samples[-1].index >= sample.index:
                again = self.samples.pop().index
                first = again if first is None else min(first, again)
            self.samples.append(sample)
        if first is not None:
            self.drop_ops_from(first)

    def is_far(self, iteration: int, controller: JobController, now: float) -> bool:
        """Whether the ranks cannot be at this iteration, as far as reports tell."""
        newest = [each.seconds for each in list(self.samples)[-NEWEST:]]
        seconds = max(1e-3, median(newest)) if newest else 1.0
        apart = abs(iteration - controller.view(now).iteration)
        return apart > APART + APART_SECONDS / seconds

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
        self.asked_at = self.began_at = now = time.monotonic()
        self.allowed = TokenBucket(REQUESTS_PER_SECOND, REQUEST_BURST, now)
        self.ops_allowed = TokenBucket(OPS_PER_SECOND, OPS_BURST, now)
        self.gone = False
        self.column: int | None = None
        """The one that was looked at last; None: that with the slowest link."""
        self.ops_at: float | None = None
        """When ops came last."""
        self.reading = False
        self._runs = followed.runs

    def follow(self, found: Followed) -> None:
        """The host has the job so now."""
        self.followed = found
        if found.runs != self._runs:
            self._runs = found.runs
            self.kept.drop_ops_from(0)

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
            job=found.job.model_copy(update={"spec": controller.spec}),
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
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="watch-ops")
        self._ops_budget = Budget(OPS_SHARE, OPS_CPU_BURST)
        """For use in that thread alone."""
        self._reading = 0

    def reported(
        self, namespace: str, name: str, report: LinkHealthReport, controller: object
    ) -> OpsWanted | None:
        """A job's controller has taken a report. Returns whether somebody watches."""
        watching = self._current(namespace, name)
        if watching is None or not isinstance(controller, JobController):
            return None
        watching.kept.take(report, controller, time.time())
        return watching.wanted(time.monotonic())

    async def take(self, namespace: str, name: str, read: ReadOps) -> Reply:
        """Answer ``POST …/ops``. They are read only while somebody watches, once at a time, and no
        more often and no more than the job has reason to send."""
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
            checked = await self._checked(watching.followed, read)
        finally:
            watching.reading, self._reading = False, self._reading - 1
        if isinstance(checked, Reply):
            return checked
        ops, packed = checked
        if self._current(namespace, name) is not watching:
            return Reply.error(409, "nobody watches")
        followed = watching.followed
        if (ops.namespace, ops.job, ops.attempt) != (namespace, name, followed.controller.attempt):
            return Reply.error(403, "these ops are of another job or attempt")
        why = _misfit(ops, followed.controller.spec)
        if not why and watching.kept.is_far(ops.iteration, followed.controller, time.time()):
            why = f"iteration {ops.iteration} is far from the one that the ranks are in"
        if why:
            return Reply.error(422, why)
        watching.kept.take_ops(ops, packed)
        self._make_room()
        watching.ops_at = now
        return Reply(200, b"{}")

    async def _checked(self, followed: Followed, read: ReadOps) -> tuple[OpsReport, bytes] | Reply:
        """Ops, and as they are kept; or the error to answer."""
        spec, loop = followed.controller.spec, asyncio.get_running_loop()
        budget, now = self._ops_budget, time.monotonic()
        if await loop.run_in_executor(self._checker, budget.is_spent, now):
            return Reply.error(429, "to check more ops would cost too much now; send some later")
        body = await read(most_ops_bytes(followed.mesh.stages, spec.schedule.microbatches))
        if isinstance(body, Reply):
            return body
        try:
            # In a thread: a large job's take some ten milliseconds.
            return await loop.run_in_executor(self._checker, _parsed, body, budget)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return Reply.error(422, f"no ops of an iteration: {first['msg']}")

    def _make_room(self) -> None:
        """Keep what all jobs may together, at the cost of those that have most."""
        whole = sum(each.kept.ops_bytes for each in self._watching.values())
        while whole > MOST_KEPT_IN_ALL:
            largest = max((each.kept for each in self._watching.values()), key=_ops_bytes)
            whole -= largest.ops_bytes
            largest.drop_oldest_ops()
            whole += largest.ops_bytes

    def _current(self, namespace: str, name: str) -> _Watching | None:
        """The job if it is watched, as its host has it now; not one of before with its name."""
        watching = self._watching.get((namespace, name))
        found = self._store.followed(namespace, name) if watching is not None else None
        if watching is None or found is None:
            return watching
        if found.uid != watching.followed.uid:
            return None
        watching.follow(found)
        return watching

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
        columns = watching.followed.mesh.columns
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
        before = watching
        if watching is None or watching.gone or watching.followed.uid != found.uid:
            if watching is None and len(self._watching) >= MOST_WATCHED:
                return Reply.error(429, f"{MOST_WATCHED} jobs are watched here already")
            loop = asyncio.get_running_loop()
            watching = self._watching[key] = _Watching(found, self._budget, loop)
            if before is not None:
                # Pages ask for a document after the number that they have.
                watching.documents.number = before.documents.number
            log.info("%s/%s is watched", namespace, one_line(name))
        watching.follow(found)
        return watching

    def sweep(self) -> None:
        """Drop what was kept for viewers who do not come any more: ops soon, all else later. The
        host calls this now and then."""
        now = time.monotonic()
        for key, each in list(self._watching.items()):
            if each.asked_at < now - OPS_SECONDS:
                each.kept.drop_ops_from(0)
            if each.asked_at < now - KEPT_SECONDS:
                del self._watching[key]

    def close(self) -> None:
        """Make no more documents, and drop what was kept for them."""
        self._closed = True
        self._watching.clear()
        self._maker.shutdown(wait=False, cancel_futures=True)
        self._checker.shutdown(wait=False, cancel_futures=True)


def _ops_bytes(kept: _Kept) -> int:
    return kept.ops_bytes


def _parsed(body: bytes, budget: Budget) -> tuple[OpsReport, bytes]:
    """Ops, and as they are kept. Raises ValidationError."""
    with budget.counted():
        return OpsReport.model_validate_json(body), zlib.compress(body, 1)


def _misfit(ops: OpsReport, spec: JobSpec) -> str:
    """What of it does not fit the job that runs; empty if all does."""
    mesh, most = spec.parallelism.mesh, OPS_OF_MICROBATCH * spec.schedule.microbatches
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
        if len(each.kinds) > most:
            return f"stage {each.stage} has {len(each.kinds)} ops; expected at most {most}"
    return ""
