"""Makes the live page of a job in its pod: a child of the launcher.

The launcher passes it viewers' connections through a socket and the page's token through standard
input. It follows what the job's agent reports, as an ingest does, and decides nothing. It ends when
nobody has watched for a while, or the launcher ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status import JobState
from pipemorph.control import JobController, handed_in
from pipemorph.control.observed.reports import ReportRefused
from pipemorph.document import read_text
from pipemorph.errors import InputError, one_line
from pipemorph.local.results.history import Journal
from pipemorph.local.service import ControlState
from pipemorph.local.watch import Observer, Told, WatchServer
from pipemorph.log_level import log_level
from pipemorph.manifest import MAX_BYTES
from pipemorph.watch.build import MOST_AVAILABLE, StageTrace
from pipemorph.watch.document import Recovered
from pipemorph.wire import HandIn, LinkHealthReport, OpsTrace
from pipemorph.wire.page import MOST_MESSAGE_BYTES, OpsWanted, PageFeed, PageHello
from pipemorph_trainer.agent import frames
from pipemorph_trainer.agent.page_feed import SOCKET_VARIABLE

log = logging.getLogger("pipemorph.page")

IDLE_SECONDS = 60.0
"""Without a request for so long, nobody watches."""
WATCHED_SECONDS, LEASE_SECONDS = 8.0, 10.0
"""Ops are requested while somebody has asked within the first, and come for the second."""
TICK_SECONDS = 0.5
CONNECT_SECONDS = 0.5
"""Between two tries to reach an agent: ranks may be starting."""
CALL_SECONDS = 10.0
MOST_OPS_BYTES = 16 << 20
"""Of all iterations, compressed."""
MOST_CONTROL_BYTES = 1 << 16
POD_GPUS = int(os.environ.get("PIPEMORPH_POD_GPUS", "0"))
"""GPUs of each pod, as the operator says: the job's file has no template."""
STATES: dict[str, JobState] = {
    "starting": "Starting", "training": "Running", "finished": "Complete",
    "completed": "Complete", "interrupted": "Suspended",
}  # fmt: skip
"""Of the job, by those of reports and of the launcher; Failed otherwise."""
ENDED = "the ranks of this pod have ended"

_stages: TypeAdapter[list[OpsTrace]] = TypeAdapter(list[OpsTrace])


class RecentOps:
    """Ops of the newest iterations, compressed. For any thread."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], bytes] = {}
        """By column and iteration, oldest first."""
        self._lock = threading.Lock()

    def take(self, stages: Sequence[OpsTrace]) -> None:
        """Add one iteration of a column. Later ones are of ranks that have ended, and go."""
        column, iteration = stages[0].column, stages[0].iteration
        packed = zlib.compress(_stages.dump_json(list(stages)), 1)
        with self._lock:
            kept = {key: each for key, each in self._found.items() if key[1] <= iteration}
            kept.pop((column, iteration), None)
            kept[column, iteration] = packed
            while len(kept) > 1 and (
                len(kept) > MOST_AVAILABLE or sum(map(len, kept.values())) > MOST_OPS_BYTES
            ):
                del kept[next(iter(kept))]
            self._found = kept

    def clear(self) -> None:
        """Drop all: other ranks run."""
        with self._lock:
            self._found = {}

    def available(self, column: int) -> list[int]:
        """See :class:`~pipemorph.local.watch.Traces`."""
        with self._lock:
            return sorted(i for whose, i in self._found if whose == column)

    def read(self, column: int, iteration: int) -> Sequence[StageTrace]:
        """See :class:`~pipemorph.local.watch.Traces`."""
        with self._lock:
            packed = self._found.get((column, iteration))
        found = [] if packed is None else _stages.validate_json(zlib.decompress(packed))
        return [
            StageTrace(each.rank, each.stage, column, iteration, each.plan_version, each.ops)
            for each in found
        ]


class FollowedJob:
    """A job as its agent reports it. For one event loop, but :meth:`tell`.

    ``state``, ``reason``: as the launcher says them, of ranks that start again or have ended.
    """

    def __init__(self, job: PipeMorphJob, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.state: JobState = "Starting"
        self.reason = ""
        self.journal, self.ops = Journal(), RecentOps()
        self._controller = JobController(job.spec)
        self._plan: HandIn | None = None
        self._connected = False
        self._recoveries: list[Recovered] = []
        self._reported_at: float | None = None
        self.observer = Observer(
            job,
            self.journal,
            self.ops,
            self.tell,
            no_ops="the ops of an iteration have been requested, and have not come yet",
        )
        self._take_job(job)

    def _take_job(self, job: PipeMorphJob) -> None:
        meta, before = job.metadata, self.observer.job.spec.parallelism
        self.observer.job = job
        self.observer.gpus = POD_GPUS * job.spec.parallelism.pods
        self.observer.result = f"its status: kubectl describe pmj {meta.name} -n {meta.namespace}"
        if before.mesh != job.spec.parallelism.mesh:
            self.ops.clear()

    def begin(self, hello: PageHello, job: PipeMorphJob) -> None:
        """An agent has begun to report."""
        self._take_job(job)
        self._controller = JobController(job.spec, attempt=hello.attempt, on_report=self._on_report)
        self._plan, self._connected = None, True
        self.state, self.reason, self._reported_at = "Running", "", None
        self.journal.add_earlier(hello.iterations)

    def lost(self) -> None:
        """The agent has ended, and with it rank 0."""
        if not self._connected:
            return
        self._connected = False
        if self.journal.view.state == "finished":
            return
        self.state, self.reason = "Restarting", ENDED
        self.journal.forget_view()
        self._recoveries.append(Recovered(lost_at=time.time(), cause=ENDED))

    def explain(self, cause: str) -> None:
        """Why the ranks have ended that start again."""
        if self.state == "Restarting" and cause:
            self.reason = cause
            newest = self._recoveries[-1]
            self._recoveries[-1] = newest.model_copy(update={"cause": cause})

    def plan(self, message: HandIn) -> None:
        """The plan that the ranks run."""
        self._plan = message
        self._adopt()

    def report(self, report: LinkHealthReport) -> None:
        """A report of the agent."""
        try:
            # It controls nothing, and goes on when another ingest leads.
            self._controller.report(report.model_copy(update={"term": None}), time.time())
        except ReportRefused as refused:
            log.warning("a report of the agent cannot be shown: %s", one_line(str(refused)))
            return
        self._adopt()

    def _adopt(self) -> None:
        controller, message = self._controller, self._plan
        if message is None or not controller.wants_snapshot:
            return
        try:
            _, saved = handed_in.read(message.body(), controller.spec)
            controller.hand_in(message.attempt, saved, time.time())
        except (InputError, ReportRefused):
            return  # A report of the ranks that have it comes soon.
        self._plan = None

    def _on_report(self, report: LinkHealthReport) -> None:
        self._reported_at = time.time()
        first = self.journal.first()
        done = self.journal.done()
        self.journal.take(report, self._controller, time.time())
        began = self.journal.first()
        if first is None and began is not None and self._recoveries:
            newest = self._recoveries[-1]
            if newest.went_on_with is None:
                self._recoveries[-1] = newest.model_copy(
                    update={
                        "went_on_with": began[0],
                        "seconds": max(0.0, began[1] - newest.lost_at),
                        "repeated": max(0, done - began[0]),
                    }
                )

    def tell(self) -> Told:
        """How the ranks are."""

        async def read() -> ControlState:
            return ControlState.of(self._controller, self._reported_at, time.time())

        found = asyncio.run_coroutine_threadsafe(read(), self._loop).result(CALL_SECONDS)
        state, reason = self.state, self.reason
        if state == "Running":
            state = STATES.get(self.journal.view.state, "Failed")
            reason = (self.journal.view.message or "") if state == "Failed" else ""
        return Told(found.status(state, reason), found.outlook, list(self._recoveries))


def read_job(file: str) -> PipeMorphJob:
    """The job of a file that the operator or the launcher has written."""
    return PipeMorphJob.model_validate_json(read_text(file, MAX_BYTES))


async def follow(job: FollowedJob, path: str, page: WatchServer) -> None:
    """Read what agents send, one after the other. An agent ends with its ranks."""
    while True:
        try:
            reader, agent = await asyncio.open_unix_connection(path)
        except OSError:
            await asyncio.sleep(CONNECT_SECONDS)
            continue
        asking = asyncio.create_task(_request_ops(job, agent, page))
        try:
            while True:
                body = await frames.read(reader, MOST_MESSAGE_BYTES)
                _take(job, frames.decode(PageFeed, body))
        except (OSError, EOFError):
            pass  # It has ended.
        except (frames.FrameError, InputError, ValidationError) as error:
            log.warning("the agent cannot be followed: %s", one_line(str(error)))
        finally:
            job.lost()
            asking.cancel()
            agent.transport.abort()
        await asyncio.sleep(CONNECT_SECONDS)


def _take(job: FollowedJob, message: PageFeed) -> None:
    if message.hello is not None:
        job.begin(message.hello, read_job(message.hello.job_file))
    elif message.plan is not None:
        job.plan(message.plan)
    elif message.report is not None:
        job.report(message.report)
    elif message.ops:
        job.ops.take(message.ops)


async def _request_ops(job: FollowedJob, agent: asyncio.StreamWriter, page: WatchServer) -> None:
    while True:
        if time.monotonic() - page.asked_at < WATCHED_SECONDS:
            column = job.observer.column or 0
            agent.write(frames.encode(OpsWanted(column=column, seconds=LEASE_SECONDS)))
        await asyncio.sleep(TICK_SECONDS)


async def serve(control: socket.socket, token: str) -> None:
    """Serve viewers until nobody watches, or the launcher ends."""
    loop, over, began = asyncio.get_running_loop(), asyncio.Event(), time.monotonic()
    job = FollowedJob(read_job(os.environ["PIPEMORPH_JOB_FILE"]), loop)
    with WatchServer(job.observer.document, token=token) as page:

        def read() -> None:
            body, fds, _, _ = socket.recv_fds(control, MOST_CONTROL_BYTES, 1)
            message = json.loads(body) if body else {}
            if fds:
                page.take(socket.socket(fileno=fds[0]), message["head"].encode("latin-1"))
            job.explain(message.get("reason", ""))
            if not body or "state" in message:
                job.state = STATES.get(message.get("state", "interrupted"), "Failed")
                job.reason = message.get("reason", "the launcher of the pod has ended")
                over.set()
            if not body:
                loop.remove_reader(control.fileno())  # It would be called again and again.

        loop.add_reader(control.fileno(), read)
        following = asyncio.create_task(follow(job, os.environ[SOCKET_VARIABLE], page))
        while time.monotonic() - max(began, page.asked_at) < IDLE_SECONDS:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), TICK_SECONDS)
                # The documents are made by another thread, which asks this one.
                await asyncio.to_thread(page.finish)
                break
        loop.remove_reader(control.fileno())
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


def main() -> None:
    """Run the process with the number of the socket as its argument."""
    token = sys.stdin.read()
    logging.basicConfig(
        level=log_level(), format="%(asctime)s page: %(message)s", stream=sys.stderr
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # The launcher ends it.
    with socket.socket(fileno=int(sys.argv[1])) as control:
        asyncio.run(serve(control, token))
