"""Process that serves the live page of a job in its pod: a child of the launcher.

The launcher passes viewers' connections through a socket and the page's token through standard
input. The process reads the agent's reports, as an ingest does, and decides nothing. It ends when
it has had no viewer for a while, or with the launcher.
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

from pipemorph.control import JobController, adopted_plan
from pipemorph.control.job_state.reports import ReportRefused
from pipemorph.errors import InputError, one_line
from pipemorph.local.live_page import LivePageServer
from pipemorph.local.results.journal import RunJournal
from pipemorph.local.results.page_source import LivePageSource, RunState
from pipemorph.local.service import ControlSnapshot
from pipemorph.log_level import read_log_level
from pipemorph.manifest import MAX_BYTES
from pipemorph.protocol import LinkHealthReport, OpsTrace, SnapshotMessage
from pipemorph.protocol.page_messages import MOST_MESSAGE_BYTES, OpsWanted, PageFeed, PageHello
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.job_status import JobState
from pipemorph.views.live_page.page_builder import MOST_AVAILABLE, StageTrace
from pipemorph.views.live_page.page_document import RecoveryEntry
from pipemorph.yaml_json import read_text
from pipemorph_trainer.agent import frames
from pipemorph_trainer.agent.page_feed import SOCKET_VARIABLE

log = logging.getLogger("pipemorph.page")

IDLE_SECONDS = 60.0
"""Time without a request after which the page has no viewers."""
WATCHED_SECONDS, LEASE_SECONDS = 8.0, 10.0
"""Age of the last request up to which ops are requested, and seconds that each request covers."""
TICK_SECONDS = 0.5
CONNECT_SECONDS = 0.5
"""Pause between two tries to reach an agent: ranks may be starting."""
CALL_SECONDS = 10.0
MOST_OPS_BYTES = 16 << 20
"""Largest size of the ops of all iterations, compressed."""
MOST_CONTROL_BYTES = 1 << 16
POD_GPUS = int(os.environ.get("PIPEMORPH_POD_GPUS", "0"))
"""GPUs of each pod, set by the operator: the job's file has no template."""
STATES: dict[str, JobState] = {
    "starting": "Starting", "training": "Running", "finished": "Complete",
    "completed": "Complete", "interrupted": "Suspended",
}  # fmt: skip
"""State of the job, by the state in reports or from the launcher; Failed for any other."""
ENDED = "the ranks of this pod have ended"

_stages: TypeAdapter[list[OpsTrace]] = TypeAdapter(list[OpsTrace])


class RecentOps:
    """Ops of the newest iterations, compressed. Thread-safe."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], bytes] = {}
        """Compressed ops by column and iteration, oldest first."""
        self._lock = threading.Lock()

    def add_iteration(self, stages: Sequence[OpsTrace]) -> None:
        """Add an iteration of a column. Later iterations come from ended ranks and are dropped."""
        column, iteration = stages[0].column, stages[0].iteration
        packed = zlib.compress(_stages.dump_json(list(stages)), 1)
        with self._lock:
            recent = {key: each for key, each in self._found.items() if key[1] <= iteration}
            recent.pop((column, iteration), None)
            recent[column, iteration] = packed
            while len(recent) > 1 and (
                len(recent) > MOST_AVAILABLE or sum(map(len, recent.values())) > MOST_OPS_BYTES
            ):
                del recent[next(iter(recent))]
            self._found = recent

    def clear(self) -> None:
        """Drop all ops, since other ranks run."""
        with self._lock:
            self._found = {}

    def list_iterations(self, column: int) -> list[int]:
        """See :class:`~pipemorph.local.results.page_source.TraceSource`."""
        with self._lock:
            return sorted(i for each, i in self._found if each == column)

    def read_iteration(self, column: int, iteration: int) -> Sequence[StageTrace]:
        """See :class:`~pipemorph.local.results.page_source.TraceSource`."""
        with self._lock:
            packed = self._found.get((column, iteration))
        found = [] if packed is None else _stages.validate_json(zlib.decompress(packed))
        return [
            StageTrace(each.rank, each.stage, column, iteration, each.plan_version, each.ops)
            for each in found
        ]


class ReportedJob:
    """Job as its agent reports it. All but :meth:`read_run_state` run in one event loop.

    ``state``, ``reason``: set by the launcher for ranks that restart or have ended.
    """

    def __init__(self, job: PipeMorphJob, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.state: JobState = "Starting"
        self.reason = ""
        self.journal, self.ops = RunJournal(), RecentOps()
        self._controller = JobController(job.spec)
        self._plan: SnapshotMessage | None = None
        self._connected = False
        self._recoveries: list[RecoveryEntry] = []
        self._reported_at: float | None = None
        self.observer = LivePageSource(
            job,
            self.journal,
            self.ops,
            self.read_run_state,
            no_ops="the ops of an iteration have been requested and have not arrived yet",
        )
        self._set_job(job)

    def _set_job(self, job: PipeMorphJob) -> None:
        meta, before = job.metadata, self.observer.job.spec.parallelism
        self.observer.job = job
        self.observer.gpus = POD_GPUS * job.spec.parallelism.pods
        self.observer.result = f"its status: kubectl describe pmj {meta.name} -n {meta.namespace}"
        if before.mesh != job.spec.parallelism.mesh:
            self.ops.clear()

    def on_agent_connected(self, hello: PageHello, job: PipeMorphJob) -> None:
        """Start to follow an agent that has connected."""
        self._set_job(job)
        self._controller = JobController(job.spec, attempt=hello.attempt, on_report=self._on_report)
        self._plan, self._connected = None, True
        self.state, self.reason, self._reported_at = "Running", "", None
        self.journal.add_earlier_iterations(hello.iterations)

    def on_agent_lost(self) -> None:
        """Record the end of the agent, and with it of rank 0."""
        if not self._connected:
            return
        self._connected = False
        if self.journal.view.state == "finished":
            return
        self.state, self.reason = "Restarting", ENDED
        self.journal.reset_view()
        self._recoveries.append(RecoveryEntry(lost_at=time.time(), cause=ENDED))

    def set_restart_cause(self, cause: str) -> None:
        """Record the cause of the restart of the ranks."""
        if self.state == "Restarting" and cause:
            self.reason = cause
            newest = self._recoveries[-1]
            self._recoveries[-1] = newest.model_copy(update={"cause": cause})

    def set_plan(self, message: SnapshotMessage) -> None:
        """Adopt the plan that the ranks run."""
        self._plan = message
        self._adopt_plan()

    def apply_report(self, report: LinkHealthReport) -> None:
        """Apply a report of the agent."""
        try:
            # This controller decides nothing, so the term of the ingest does not matter.
            self._controller.process_report(report.model_copy(update={"term": None}), time.time())
        except ReportRefused as refused:
            log.warning("the page cannot show a report of the agent: %s", one_line(str(refused)))
            return
        self._adopt_plan()

    def _adopt_plan(self) -> None:
        controller, message = self._controller, self._plan
        if message is None or not controller.accepts_snapshot:
            return
        try:
            _, saved = adopted_plan.parse_message(message.to_json(), controller.spec)
            controller.adopt_plan(message.attempt, saved, time.time())
        except (InputError, ReportRefused):
            return  # The next reports show whether the ranks run it.
        self._plan = None

    def _on_report(self, report: LinkHealthReport) -> None:
        self._reported_at = time.time()
        first = self.journal.find_first_iteration()
        done = self.journal.count_done()
        self.journal.record_report(report, self._controller, time.time())
        began = self.journal.find_first_iteration()
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

    def read_run_state(self) -> RunState:
        """State of the run and its recoveries, for any thread."""

        async def read_control_state() -> ControlSnapshot:
            return ControlSnapshot.from_controller(self._controller, self._reported_at, time.time())

        found = asyncio.run_coroutine_threadsafe(read_control_state(), self._loop).result(
            CALL_SECONDS
        )
        state, reason = self.state, self.reason
        if state == "Running":
            state = STATES.get(self.journal.view.state, "Failed")
            reason = (self.journal.view.message or "") if state == "Failed" else ""
        return RunState(found.to_status(state, reason), found.outlook, list(self._recoveries))


def read_job(file: str) -> PipeMorphJob:
    """Read the job file that the operator or the launcher has written."""
    return PipeMorphJob.model_validate_json(read_text(file, MAX_BYTES))


async def follow_agents(job: ReportedJob, path: str, page: LivePageServer) -> None:
    """Read the feeds of agents, one after the other. An agent ends with its ranks."""
    while True:
        try:
            reader, agent = await asyncio.open_unix_connection(path)
        except OSError:
            await asyncio.sleep(CONNECT_SECONDS)
            continue
        requests = asyncio.create_task(_request_ops(job, agent, page))
        try:
            while True:
                body = await frames.read_frame(reader, MOST_MESSAGE_BYTES)
                _apply_message(job, frames.decode_message(PageFeed, body))
        except (OSError, EOFError):
            pass  # The agent has ended.
        except (frames.FrameError, InputError, ValidationError) as error:
            log.warning("the feed of the agent is unreadable: %s", one_line(str(error)))
        finally:
            job.on_agent_lost()
            requests.cancel()
            agent.transport.abort()
        await asyncio.sleep(CONNECT_SECONDS)


def _apply_message(job: ReportedJob, message: PageFeed) -> None:
    if message.hello is not None:
        job.on_agent_connected(message.hello, read_job(message.hello.job_file))
    elif message.plan is not None:
        job.set_plan(message.plan)
    elif message.report is not None:
        job.apply_report(message.report)
    elif message.ops:
        job.ops.add_iteration(message.ops)


async def _request_ops(job: ReportedJob, agent: asyncio.StreamWriter, page: LivePageServer) -> None:
    while True:
        if time.monotonic() - page.requested_at < WATCHED_SECONDS:
            column = job.observer.column or 0
            agent.write(frames.encode_frame(OpsWanted(column=column, seconds=LEASE_SECONDS)))
        await asyncio.sleep(TICK_SECONDS)


async def serve_viewers(control: socket.socket, token: str) -> None:
    """Serve viewers until there are none, or the launcher ends."""
    loop, over, began = asyncio.get_running_loop(), asyncio.Event(), time.monotonic()
    job = ReportedJob(read_job(os.environ["PIPEMORPH_JOB_FILE"]), loop)
    with LivePageServer(job.observer.make_document, token=token) as page:

        def read_control_message() -> None:
            body, fds, _, _ = socket.recv_fds(control, MOST_CONTROL_BYTES, 1)
            message = json.loads(body) if body else {}
            if fds:
                page.adopt_connection(
                    socket.socket(fileno=fds[0]), message["head"].encode("latin-1")
                )
            job.set_restart_cause(message.get("reason", ""))
            if not body or "state" in message:
                job.state = STATES.get(message.get("state", "interrupted"), "Failed")
                job.reason = message.get("reason", "the launcher of the pod has ended")
                over.set()
            if not body:
                loop.remove_reader(control.fileno())  # At the end it would be called in a loop.

        loop.add_reader(control.fileno(), read_control_message)
        following = asyncio.create_task(follow_agents(job, os.environ[SOCKET_VARIABLE], page))
        while time.monotonic() - max(began, page.requested_at) < IDLE_SECONDS:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), TICK_SECONDS)
                # Another thread makes the documents, and calls into this one.
                await asyncio.to_thread(page.announce_end)
                break
        loop.remove_reader(control.fileno())
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


def main() -> None:
    """Run the process; the argument is the descriptor of the launcher's socket."""
    token = sys.stdin.read()
    logging.basicConfig(
        level=read_log_level(), format="%(asctime)s page: %(message)s", stream=sys.stderr
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # The launcher ends this process.
    with socket.socket(fileno=int(sys.argv[1])) as control:
        asyncio.run(serve_viewers(control, token))
