"""``python -m pipemorph.ingest.watch.worker``: makes the pages of jobs that somebody watches.

A child of an ingest, which asks and tells it over pipes (:mod:`pipemorph.ingest.watch.messages`),
and ends it when nobody watches. From what it is told of reports it keeps the states of links and
the times of iterations, and the ops of iterations that agents send. Documents are made one after
the other in a thread, ops are checked in another one; what they cost and what is kept is bounded
for each job and for all together, and so is the memory of the process.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import os
import pickle
import resource
import signal
import sys
import time
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from pydantic import ValidationError

from pipemorph.api.sections.template import gpus
from pipemorph.api.spec import JobSpec, PipeMorphJob
from pipemorph.control.decide.forecast import Outlook, Rules
from pipemorph.ingest.watch.messages import (
    Begin,
    ChangeKey,
    Check,
    Failed,
    Forget,
    Links,
    Look,
    Marks,
    News,
    Ops,
    Runs,
    Sight,
    Taken,
    Tell,
    Told,
    Verdict,
)
from pipemorph.ingest.watch.pipes import HEADER_BYTES, frame
from pipemorph.log_level import log_level
from pipemorph.planning import Plan
from pipemorph.watch.build import (
    MOST_AVAILABLE,
    MOST_STEPS,
    NEWEST,
    Watched,
    watch_view,
    worst_column,
)
from pipemorph.watch.document import WatchView
from pipemorph.watch.documents import BURST, NOTHING_NEW, SHARE, Budget, Documents
from pipemorph.watch.lanes import LaneLog
from pipemorph.wire import AdaptationRecord, IterationSample, OpsReport, OpsTrace
from pipemorph.wire.ops import OPS_OF_MICROBATCH

log = logging.getLogger("pipemorph.ingest")

JOBS_AT_ONCE = 5
"""So many jobs may take their whole share of a core at once; more take less each."""
LOOK_SECONDS = 10.0
"""How long the thread waits for the ingest."""
UNHEARD_SECONDS = 30.0
"""After so long without ops, it is said that the trainer sends none."""
MOST_KEPT_BYTES, MOST_KEPT_IN_ALL = 16 << 20, 96 << 20
"""Of the ops of one job, and of all together, compressed: the newest iterations."""
MOST_DOCUMENT_BYTES = 64 << 20
"""Of the documents and pages of all jobs, compressed."""
MOST_KEPT_OPS = MOST_AVAILABLE
"""Iterations of one job, in all columns."""
ENTRY_BYTES = 256
"""That the ops of one iteration take beside themselves."""
MEMORY_BYTES = 512 << 20
"""Most of the process. What is kept, and what making a document of the largest job takes, are well
below; above, it ends, and starts again without what was kept."""
OPS_SHARE, OPS_CPU_BURST = 0.1, 1.0
"""Part of a core, and seconds of it at once, that checking the ops of all jobs may take."""
APART_SECONDS, APART = 30.0, 16
"""How far ops may be from the iteration in progress, by its report: by so much time, and by so many
iterations more."""

Checker = Callable[[Check], Awaitable[Verdict]]
"""Says who may watch."""
LookAt = Callable[[Look], Awaitable[Sight | None]]
"""Asks the ingest how a job is; None if nobody watches it any more."""


class Unknown(Exception):
    """The ingest does not know the job any more."""


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

    def take_samples(self, samples: list[IterationSample]) -> None:
        first: int | None = None
        for sample in samples:
            # Ranks that started again may repeat iterations.
            while self.samples and self.samples[-1].index >= sample.index:
                again = self.samples.pop().index
                first = again if first is None else min(first, again)
            self.samples.append(sample)
        if first is not None:
            self.drop_ops_from(first)

    def take_links(self, now: Links) -> None:
        self.lanes.take(now.iteration, now.at, now.links, now.routes, now.fallen)

    def is_far(self, iteration: int, present: int) -> bool:
        """Whether the ranks cannot be at this iteration, as far as reports tell. ``present``: that
        in progress by the newest one."""
        newest = [each.seconds for each in list(self.samples)[-NEWEST:]]
        seconds = max(1e-3, median(newest)) if newest else 1.0
        return abs(iteration - present) > APART + APART_SECONDS / seconds


@dataclass
class _Known:
    """What seldom changes, as the ingest told it last."""

    marks: Marks = field(default_factory=Marks)
    job: PipeMorphJob | None = None
    rules: Rules | None = None
    start: Plan | None = None
    running: Plan | None = None
    changes: dict[ChangeKey, AdaptationRecord] = field(default_factory=dict)

    def take(self, sight: Sight) -> None:
        self.marks = sight.marks
        for name in ("job", "rules", "start", "running"):
            if (told := getattr(sight, name)) is not None:
                setattr(self, name, told)
        self.changes = {key: sight.changes.get(key) or self.changes[key] for key in sight.order}

    def outlook(self, sight: Sight) -> Outlook | None:
        if sight.situation is None:
            return None
        assert self.rules is not None and self.start is not None and self.running is not None
        return Outlook(self.rules, sight.situation, self.start, self.running)


class _Watching:
    """A job that is watched: a :class:`~pipemorph.watch.documents.Source`."""

    def __init__(
        self, begun: Begin, budget: Budget, look: LookAt, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._number, self._ask, self._loop = begun.number, look, loop
        self.kept = _Kept()
        self.kept.take_samples([each.restored() for each in begun.samples])
        self.kept.take_links(begun.links)
        self.documents = Documents(self, Budget(within=budget), packs=True)
        self.documents.number = begun.above
        self.began_at = time.monotonic()
        self.ops_at: float | None = None
        """When ops came last."""
        self._known = _Known()
        self._runs: Runs | None = None

    def follow(self, runs: Runs) -> None:
        """The ingest has the job so now."""
        if self._runs not in (None, runs):
            self.kept.drop_ops_from(0)
        self._runs = runs

    def document(
        self, column: int | None, iteration: int | None, *, number: int, live: bool
    ) -> WatchView:
        # What is kept is the event loop's.
        look = asyncio.run_coroutine_threadsafe(self._look(column), self._loop)
        known, column = look.result(LOOK_SECONDS)
        if iteration not in known.available:
            iteration = known.available[-1] if known.available else None
        traces = [] if iteration is None else self.kept.traces(column, iteration)
        return watch_view(known, traces, column=column, number=number, live=live)

    def _no_ops(self, state: str) -> str:
        """Why there are none."""
        if state == "training" and time.monotonic() - self.began_at > UNHEARD_SECONDS:
            return "this trainer sends no ops of its iterations"
        return "the ops of an iteration have been asked for, and have not come yet"

    async def _look(self, column: int | None) -> tuple[Watched, int]:
        """What is known, and the column to show. Raises :class:`Unknown`."""
        # What it would be under another plan takes a while to prepare, and needs a picture.
        wanted = bool(self.kept.ops)
        sight = await self._ask(Look(self._number, self._known.marks, wanted))
        if sight is None:
            raise Unknown
        self._known.take(sight)
        self.follow(sight.runs)
        self.kept.take_links(sight.links)
        job = self._known.job
        assert job is not None
        meta = job.metadata
        known = Watched(
            job=job,
            now=sight.at,
            state=sight.state,
            reason=sight.reason,
            samples=list(self.kept.samples),
            changes=[*self._known.changes.values()],
            lanes=self.kept.lanes.copy(),
            worth=sight.worth,
            plan_version=sight.plan_version,
            wanted_version=sight.wanted_version,
            recoveries=sight.recoveries,
            result=f"its status: kubectl describe pmj {meta.name} -n {meta.namespace}",
            peak_memory=sight.peak_memory,
            kept=sight.kept,
            gpus=gpus(job.spec.template) * job.spec.parallelism.pods,
            no_ops="" if self.ops_at is not None else self._no_ops(sight.state),
        )
        if column is None or not 0 <= column < job.spec.parallelism.mesh.columns:
            column = worst_column(known)
        available = sorted(i for whose, i in self.kept.ops if whose == column)
        outlook = self._known.outlook(sight) if available else None
        return replace(known, available=available, outlook=outlook), column


class Viewing:
    """Answers the ingest. For use in one event loop."""

    def __init__(self, look: LookAt, check: Checker | None = None) -> None:
        self._look, self._check = look, check
        self._jobs: dict[int, _Watching] = {}
        self._budget = Budget(JOBS_AT_ONCE * SHARE, JOBS_AT_ONCE * BURST)
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="watch-documents")
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="watch-ops")
        self._ops_budget = Budget(OPS_SHARE, OPS_CPU_BURST)
        """For use in that thread alone."""

    def told(self, message: object) -> None:
        """Take what is told."""
        if isinstance(message, Begin):
            self._jobs[message.number] = _Watching(
                message, self._budget, self._look, asyncio.get_running_loop()
            )
        elif isinstance(message, News):
            watching = self._jobs.get(message.number)
            if watching is not None:
                watching.follow(message.runs)
                if message.links is not None:
                    watching.kept.take_links(message.links)
                watching.kept.take_samples([each.restored() for each in message.samples])
        elif isinstance(message, Forget):
            if message.ops:
                if message.number in self._jobs:
                    self._jobs[message.number].kept.drop_ops_from(0)
            else:
                self._jobs.pop(message.number, None)
        else:
            raise TypeError(f"a message of type {type(message).__name__} is not understood")

    async def asked(self, question: object) -> object:
        """The answer."""
        if isinstance(question, Tell):
            return await self._tell(question)
        if isinstance(question, Ops):
            return await self._take(question)
        if isinstance(question, Check):
            if self._check is None:
                raise TypeError("this process checks nobody: its host does")
            return await self._check(question)
        raise TypeError(f"a question of type {type(question).__name__} is not understood")

    async def _tell(self, asked: Tell) -> Told:
        watching = self._jobs.get(asked.number)
        if watching is None:
            return _error(503, "this job is not watched here yet; ask again")
        documents = watching.documents
        if asked.gone:
            documents.finish()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._maker, self._made, documents, asked
            )
        except TimeoutError:
            return _error(503, "the ingest is too busy to make a document; ask again")
        except Unknown:
            return _error(503, "the ingest does not watch this job any more; ask again")

    async def _take(self, asked: Ops) -> Taken:
        watching = self._jobs.get(asked.number)
        if watching is None:
            return Taken(409, "nobody watches")
        watching.follow(asked.runs)
        loop, budget = asyncio.get_running_loop(), self._ops_budget
        if await loop.run_in_executor(self._checker, budget.is_spent, time.monotonic()):
            return Taken(429, "to check more ops would cost too much now; send some later")
        found = await loop.run_in_executor(self._checker, _parsed, asked, budget)
        if isinstance(found, Taken):
            return found
        ops, packed = found
        if self._jobs.get(asked.number) is not watching:
            return Taken(409, "nobody watches")
        meta = asked.job.metadata
        if (ops.namespace, ops.job, ops.attempt) != (meta.namespace, meta.name, asked.attempt):
            return Taken(403, "these ops are of another job or attempt")
        why = _misfit(ops, asked.job.spec)
        if not why and watching.kept.is_far(ops.iteration, asked.iteration):
            why = f"iteration {ops.iteration} is far from the one that the ranks are in"
        if why:
            return Taken(422, why)
        watching.kept.take_ops(ops, packed)
        self._make_room()
        watching.ops_at = time.monotonic()
        return Taken(200)

    def _make_room(self) -> None:
        """Keep what all jobs may together, at the cost of those that have most."""
        jobs = list(self._jobs.values())
        whole = sum(each.kept.ops_bytes for each in jobs)
        while whole > MOST_KEPT_IN_ALL:
            largest = max((each.kept for each in jobs), key=lambda kept: kept.ops_bytes)
            whole -= largest.ops_bytes
            largest.drop_oldest_ops()
            whole += largest.ops_bytes

    def _made(self, documents: Documents, asked: Tell) -> Told:
        made = documents.get((asked.column, asked.iteration), asked.page)
        newest = documents.number
        if made is None:
            said = "another document would cost too much now; ask again later"
            return Told(429, said.encode(), newest=newest)
        body, packed = made.body(page=asked.page, after=asked.after), False
        if body is not NOTHING_NEW:
            packed = asked.packed
            if not packed:
                with documents.budget.counted():
                    body = gzip.decompress(body)
        self._drop_documents()
        return Told(200, body, packed, newest)

    def _drop_documents(self) -> None:
        """Keep what all jobs may together, and the newest of each."""
        kept = [each.documents for each in list(self._jobs.values())]
        whole = sum(each.size for each in kept)
        for each in sorted(kept, key=lambda documents: -documents.size):
            if whole <= MOST_DOCUMENT_BYTES:
                break
            whole -= each.size
            each.drop_all_but_newest()
            whole += each.size


def _error(status: int, said: str) -> Told:
    return Told(status, said.encode())


def _parsed(asked: Ops, budget: Budget) -> tuple[OpsReport, bytes] | Taken:
    """Ops, and as they are kept; or why they are none."""
    with budget.counted():
        body = asked.body
        if asked.packed:
            unpacking = zlib.decompressobj()
            try:
                body = unpacking.decompress(asked.body, asked.most + 1)
            except zlib.error as error:
                return Taken(400, f"the ops are not compressed as they say: {error}")
        if len(body) > asked.most:
            return Taken(413, f"the ops are larger than {asked.most} bytes")
        try:
            ops = OpsReport.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return Taken(422, f"no ops of an iteration: {first['msg']}")
        return ops, asked.body if asked.packed and unpacking.eof else zlib.compress(body, 1)


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


async def serve(check: Checker | None) -> None:
    """Answer the ingest at standard input and output until it ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What anything prints is no frame.
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, answers)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    waiting: dict[int, asyncio.Future[Sight | None]] = {}
    numbers = iter(range(-1, -(1 << 62), -1))
    tasks: set[asyncio.Task[None]] = set()

    async def look(question: Look) -> Sight | None:
        number = next(numbers)
        waiting[number] = answer = loop.create_future()
        try:
            writer.write(frame((number, question)))
            sight: Sight | None = await answer
            return sight
        finally:
            del waiting[number]

    viewing = Viewing(look, check)

    async def answer(number: int, question: object) -> None:
        try:
            found = await viewing.asked(question)
        except MemoryError:
            raise  # The process ends, and what it keeps with it.
        except Exception:  # Told to who asked: other jobs are none the worse for it.
            log.exception("a %s could not be answered", type(question).__name__)
            found = Failed()
        writer.write(frame((number, found)))
        await writer.drain()

    failed: asyncio.Future[None] = loop.create_future()

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not failed.done():
            # Whatever it is, another process knows nothing of it.
            failed.set_exception(error)

    async def read() -> None:
        while True:
            try:
                length = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
                number, message = pickle.loads(await reader.readexactly(length))
            except asyncio.IncompleteReadError:
                return
            if number < 0:
                if number in waiting and not waiting[number].done():
                    waiting[number].set_result(message)
            elif number == 0:
                viewing.told(message)
            else:
                task = asyncio.create_task(answer(number, message))
                tasks.add(task)
                task.add_done_callback(ended)

    reading = asyncio.create_task(read())
    await asyncio.wait([reading, failed], return_when=asyncio.FIRST_COMPLETED)
    for done in (reading, failed):
        if done.done():
            done.result()


def run(serving: Callable[[], Awaitable[Any]]) -> None:
    """Run such a process: set up its log, and bound its memory. It ends at once when ``serving``
    has: threads that make documents for nobody are not waited for."""
    logging.basicConfig(
        level=log_level(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # The host stops it by closing the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))

    async def main() -> None:
        await serving()

    code = 0
    try:
        asyncio.run(main())
    except BaseException:  # Told below: the process ends with it.
        log.exception("the process that makes pages of jobs failed")
        code = 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run(lambda: serve(None))
