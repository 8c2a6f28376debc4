"""Played agents and ranks for scale.py, in processes of their own.

:func:`run_load` starts ``python benchmarks/scale_load.py``, sends a JSON object to its standard
input and returns its figures. Two kinds of load exist:

agents  one agent per job: reports and a long poll over TLS (:class:`AgentsLoad`)
ranks   the ranks of one large job, connected to its real agent (:class:`RanksLoad`)

The product's own observer makes every report, from played telemetry in virtual time. A report is
recorded once per kind and sent with other numbers, so that the load leaves the processors to the
measured programs. HTTP is written by hand for the same reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import random
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pipemorph.detection.job_observer import REPORT_SECONDS, JobObserver
from pipemorph.detection.rank_monitor import RankMonitor
from pipemorph.planning import Route
from pipemorph.protocol import (
    DirectiveEnvelope,
    IterationSample,
    LinkHealthReport,
    LinkSample,
    StageProfile,
    WireTime,
)
from pipemorph.protocol.rank_messages import RANK_PROTOCOL, RankFrame, RankReport
from pipemorph.replay.replayed_ranks import JobTelemetry, ReplayedRanks
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer.agent import frames

ITERATION = REPORT_SECONDS
"""Seconds of an undisturbed iteration."""
Kind = Literal["first", "quiet", "alarm", "slow"]
"""first: all states; quiet: an iteration; alarm: a link turned slow; slow: an iteration since."""
NORMAL, SLOW, OP = 0.002, (0.04, 0.12), 0.01
"""Seconds of a normal wire time, of a slow one (range), and of an op."""
WINDOW, SETTLED, MOST, POOL = 0.05, 60, 80, 8
"""Seconds of a window; windows before the first report; limit of windows until the next kind;
different windows of a direction of a large job."""
DIRECTIONS = ("forward", "backward")
OPENED_AT_A_TIME = 32
FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.1, 1.0
"""Time between two tries of an agent whose ingest does not answer."""
BEGAN = "began"
"""Printed to standard error once everything is connected: the load's time begins."""
DEADLINE = 900.0

_NAME, _NAMESPACE = "the-name-of-the-job", "the-namespace-of-the-job"
_SEQUENCE, _INDEX, _ITERATION, _VERSION = 900_000_001, 900_000_002, 900_000_003, 900_000_004
_OBSERVED, _SECONDS, _NONE = 900_000_005, 1234.5, '"iterations":[]'
"""Placeholders in a recorded report for values that differ between reports."""


# --- telemetry and reports -----------------------------------------------------------------------


def record_reports(
    mesh: MeshShape, draw: random.Random, slow: Mapping[int, float]
) -> dict[Kind, str]:
    """Record a report of each kind by the observer of a job. ``slow``: wire times of slow links,
    seconds. Raises RuntimeError if the reports never settle."""
    observer = JobObserver(mesh, job=_NAME, namespace=_NAMESPACE, attempt=0)
    ranks = ReplayedRanks(mesh, observer)
    directions = [
        (link, column, direction)
        for link in range(mesh.stages - 1)
        for column in range(mesh.columns)
        for direction in DIRECTIONS
    ]
    now, texts = 1.7e9, {}

    def observe_window(links: Mapping[int, float], *, finished: bool = False) -> None:
        nonlocal now
        now += WINDOW
        done = IterationSample(
            index=_INDEX, seconds=_SECONDS, loss=draw.uniform(2, 3), plan_version=_VERSION,
            bubble_fraction=draw.uniform(0.1, 0.2),
        )  # fmt: skip
        telemetry = JobTelemetry(
            iteration=_ITERATION, applied_plan_version=_VERSION, ports=0,
            links=[make_window(draw, *at, links.get(at[0], NORMAL)) for at in directions],
            stages=[
                make_profile(draw, stage, column)
                for stage in range(mesh.stages)
                for column in range(mesh.columns)
            ]
            if finished
            else [],
            iterations=[done] if finished else [],
        )  # fmt: skip
        ranks.process_telemetry(telemetry, now, refresh=finished)

    def make_report() -> LinkHealthReport:
        made = observer.build_report(_SEQUENCE, now, _OBSERVED)
        observer.record_delivery(made, DirectiveEnvelope(memory="it"))
        return made

    for number in range(SETTLED):
        observe_window({}, finished=number % 4 == 3)
    texts["first"] = make_report()
    for _ in range(MOST):
        observe_window({}, finished=True)
        texts["quiet"] = make_report()
        if texts["quiet"].is_progress:
            break
    else:
        raise RuntimeError(f"{mesh}: the reports of healthy links never settle")
    for _ in range(MOST):
        observe_window(slow)
        if observer.is_report_due(now) and (alarm := make_report()).directions:
            texts["alarm"] = alarm
            break
    observe_window(slow, finished=True)
    texts["slow"] = make_report()
    return {kind: each.to_json().decode() for kind, each in texts.items()}


def make_window(
    draw: random.Random, link: int, column: int, direction: str, usual: float
) -> LinkSample:
    """Make a window in which messages take about ``usual`` seconds."""
    least, middle, most = (usual * (1 + draw.uniform(0, 0.02) + more) for more in (0, 0.02, 0.04))
    wire = WireTime(count=5, exact=5, min=least, p50=middle, p99=most, mean=middle)
    return LinkSample(
        link=link, replica=column, direction=direction, route=Route.DIRECT,  # type: ignore[arg-type]
        transport="gloo", iteration=_ITERATION, bytes=5 << 24, queue_p50=1e-5, wire=wire,
    )  # fmt: skip


def make_profile(draw: random.Random, stage: int, column: int) -> StageProfile:
    names = ("forward", "backward_input", "backward_weight")
    return StageProfile(
        stage=stage, replica=column, split="deferred", peak_memory=2**34,
        **{name: draw.gauss(OP, OP / 100) for name in names},
    )  # fmt: skip


class RecordedReports:
    """Bodies of the reports of a job of ``stages`` stages. ``seed``: determines its op times, its
    slow link and the delay."""

    def __init__(self, stages: int, seed: int = 0) -> None:
        draw = random.Random(f"{stages} {seed}")
        slow = {draw.randrange(stages - 1): draw.uniform(*SLOW)}
        texts = record_reports(MeshShape(stages), draw, slow)
        self._texts = {kind: _without_iteration(text) for kind, text in texts.items()}

    def make_body(
        self, namespace: str, job: str, sequence: int, observed: int, kind: Kind, *,
        applied: int | None = None, iteration: int | None = None, finished: int = 1,
        seconds: float = ITERATION,
    ) -> str:  # fmt: skip
        """Body of report number ``sequence``. ``observed``, ``applied``: plan versions;
        ``iteration``: the one in progress (default: one per report); ``finished``: number of
        iterations of ``seconds`` each that it reports, if its kind reports any."""
        text, sample = self._texts[kind]
        at = sequence % 2**31 + 1 if iteration is None else iteration
        if sample:
            took = str(round(seconds * random.gauss(1, 0.01), 6))
            one = sample.replace(str(_SECONDS), took)
            rows = [one.replace(str(_INDEX), str(at - i)) for i in range(finished, 0, -1)]
            text = text.replace(_NONE, f'"iterations":[{",".join(rows)}]')
        numbers = {
            _NAMESPACE: namespace, _NAME: job, _SEQUENCE: sequence, _ITERATION: at,
            _OBSERVED: observed, _VERSION: observed if applied is None else applied,
        }  # fmt: skip
        for placeholder, value in numbers.items():
            text = text.replace(str(placeholder), str(value))
        return text


def _without_iteration(text: str) -> tuple[str, str]:
    """Split a report into the rest and its iteration; the latter is empty if there is none."""
    report = json.loads(text)
    compact = json.JSONEncoder(separators=(",", ":")).encode
    if not (samples := report.get("iterations")):
        return text, ""
    return compact(report | {"iterations": []}), compact(samples[0])


reports_of = cache(RecordedReports)


# --- one agent per job ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportingJob:
    """Reporting job. ``slow_at``: seconds after which its link turns slow; ``slow_iteration``:
    seconds of an iteration from then until another plan is in effect."""

    namespace: str
    name: str
    token: str
    stages: int = 2
    seed: int = 0
    slow_at: float | None = None
    slow_iteration: float = ITERATION


@dataclass(frozen=True)
class AgentsLoad:
    """Load of agents: all jobs report once per ``period``, or as seldom as the ingest requests, for
    ``seconds``. ``gone_at``: seconds after which the ingest may be away; before, a refused agent
    ends the load. ``first``: sequence number of the first reports."""

    port: int
    server_name: str
    ca_file: str
    jobs: list[dict[str, Any]]
    period: float
    seconds: float
    gone_at: float = math.inf
    first: int = 1


@dataclass
class AgentFigures:
    """Seconds measured by the agents. ``directives``: stages, time at which the link turned slow,
    and time from the alarm to the directive. ``back``: time from ``gone_at`` until a report was
    answered again, per job. ``unasked``: due times of alarms that a directive preceded. ``twice``:
    versions with two different plans. ``wall``, ``own_cpu``: until ``gone_at``."""

    reports: int = 0
    wall: float = 0.0
    own_cpu: float = 0.0
    late: float = 0.0
    reconnects: int = 0
    answers: list[float] = field(default_factory=list)
    directives: list[tuple[int, float, float]] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    unasked: list[float] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)


class HttpError(Exception):
    """Raised if the ingest answers with an error."""


class HttpConnection(asyncio.Protocol):
    """HTTP connection with one request at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the ingest hung up"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found or self._answer is None:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(rest) >= length:
            self._buffer = b""
            self._answer.set_result((int(head[9:12]), rest[:length]))

    async def send_request(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; return status and body of the answer."""
        if self._transport is None:
            raise ConnectionError("the ingest hung up")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer


class PlayedAgent:
    """Agent of a job: a connection for reports, and one for the long poll."""

    def __init__(
        self,
        load: AgentsLoad,
        trust: ssl.SSLContext,
        job: ReportingJob,
        address: str,
        out: AgentFigures,
    ) -> None:
        self._load, self._trust, self.job, self._address, self._out = load, trust, job, address, out
        reports_of(job.stages, job.seed)  # Record before the timed part.
        self._base = f"/v1/jobs/{job.namespace}/{job.name}"
        self._end = f"Host: {load.server_name}\r\nAuthorization: Bearer {job.token}\r\n"
        self._sequence = load.first - 1
        self._iteration = self._sequence % 2**31
        self._memory = b""
        self._complete = False
        """True if the ingest has all states of the job."""
        self._plans: dict[int, bytes] = {}
        self.observed = self._before_alarm = 0
        self._slow_reported = False
        self.again = asyncio.Event()
        """Set when a poll fails: then the agent reports at once."""
        self.pause = load.period
        """Seconds until the next report, as the ingest requests."""
        self.alarm_sent: float | None = None

    async def connect(self) -> HttpConnection:
        _, connection = await asyncio.get_running_loop().create_connection(
            HttpConnection, "127.0.0.1", self._load.port, ssl=self._trust,
            server_hostname=self._load.server_name, ssl_handshake_timeout=120,
            local_addr=(self._address, 0),
        )  # fmt: skip
        return connection

    async def send_report(self, connection: HttpConnection, *, slow: bool = False) -> float:
        """Send the next report; return the seconds to the answer."""
        kind: Kind = "first" if not self._complete else "slow" if slow else "quiet"
        if slow and self.alarm_sent is None and self._complete:
            kind = "alarm"
        request = self._make_request(kind)
        started = time.monotonic()
        if kind == "alarm":
            self.alarm_sent, self._before_alarm = started, self.observed
        answer = self._handle_answer(*await connection.send_request(request))
        took = time.monotonic() - started
        # Each iteration is reported as it finishes while a link is slow.
        urgent = slow or b'"attentive":true' in answer
        self.pause = self._load.period if urgent else float(_read_field(answer, b'"seldom":', b","))
        # Another ingest has no states: the next report has all of them.
        memory = _read_field(answer, b'"memory":"', b'"')
        self._complete = kind == "first" or memory == self._memory
        self._memory = memory
        return took

    def _make_request(self, kind: Kind) -> bytes:
        self._sequence += 1
        # The iteration in which a link turns slow ends under the previous plan.
        first = kind == "slow" and not self._slow_reported
        self._slow_reported |= first
        applied = self._before_alarm if first else self.observed
        slow = kind == "slow" and applied == self._before_alarm
        finished = 0 if kind == "alarm" else round(self.pause / self._load.period)
        self._iteration += finished
        body = reports_of(self.job.stages, self.job.seed).make_body(
            self.job.namespace, self.job.name, self._sequence, self.observed, kind,
            applied=applied, iteration=self._iteration, finished=finished,
            seconds=self.job.slow_iteration if slow else ITERATION,
        )  # fmt: skip
        return (
            f"POST {self._base}/reports HTTP/1.1\r\n{self._end}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()

    async def poll_directive(self, connection: HttpConnection) -> None:
        """Wait for a directive, for the duration of a poll."""
        query = f"attempt=0&after={self.observed}&wait=25"
        request = f"GET {self._base}/directive?{query} HTTP/1.1\r\n{self._end}\r\n"
        self._handle_answer(*await connection.send_request(request.encode()))

    def _handle_answer(self, status: int, body: bytes) -> bytes:
        if status != 200:
            raise HttpError(f"{self.job.name} was answered {status}: {body!r}")
        if b'"plan_version"' in body:
            directive = json.loads(body)["directive"]
            version = directive["plan_version"]
            plan = hashlib.sha256(json.dumps(directive["plan"]).encode()).digest()
            if self._plans.setdefault(version, plan) != plan:
                self._out.twice.append(f"{self.job.name}: version {version}")
            self.observed = max(self.observed, version)
        return body


def _read_field(body: bytes, name: bytes, end: bytes) -> bytes:
    return body.partition(name)[2].partition(end)[0]


class PlayedAgents:
    """Agents of all jobs."""

    def __init__(self, load: AgentsLoad, reporters: list[PlayedAgent], out: AgentFigures) -> None:
        self._load, self._reporters, self._out = load, reporters, out
        self._all_connected = asyncio.Barrier(len(reporters))
        self._opening = asyncio.Semaphore(OPENED_AT_A_TIME)
        self._began = self._cpu = 0.0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, reporter in enumerate(self._reporters):
                tasks.create_task(self._report_periodically(number, reporter))

    def _read_clock(self) -> float:
        return time.monotonic() - self._began

    async def _report_periodically(self, number: int, reporter: PlayedAgent) -> None:
        load, out = self._load, self._out
        async with self._opening:
            connection = await reporter.connect()
            await reporter.send_report(connection)
            polling = asyncio.create_task(self._poll_forever(reporter))
        await self._all_connected.wait()
        if not self._began:
            self._began, self._cpu = time.monotonic(), time.process_time()
            print(BEGAN, file=sys.stderr, flush=True)
        due, backoff, away = load.period * number / len(self._reporters), 0.0, False
        while due < load.seconds:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reporter.again.wait(), max(0.0, due - self._read_clock()))
            reporter.again.clear()
            now = self._read_clock()
            due, slow_at = min(due, now), reporter.job.slow_at
            if now < load.gone_at:
                out.late = max(out.late, now - due)
                out.wall, out.own_cpu = now, time.process_time() - self._cpu
            try:
                took = await reporter.send_report(
                    connection, slow=slow_at is not None and now >= slow_at
                )
            except (OSError, HttpError) as error:
                away = self._read_clock() >= load.gone_at
                if isinstance(error, HttpError) and not away:
                    raise
                backoff = min(max(2 * backoff, FIRST_BACKOFF_SECONDS), LAST_BACKOFF_SECONDS)
                await asyncio.sleep(backoff * random.uniform(0.75, 1.25))
                with contextlib.suppress(OSError):
                    async with self._opening:
                        connection = await reporter.connect()
                    out.reconnects += not away
                due = self._read_clock()
                continue
            backoff = 0.0
            if now < load.gone_at:
                out.reports += 1
                out.answers.append(took)
            elif away:
                away = False
                out.back.append(self._read_clock() - load.gone_at)
            due += reporter.pause
            if slow_at is not None and reporter.alarm_sent is None:
                due = min(due, max(slow_at, self._read_clock()))  # The alarm is sent at once.
        polling.cancel()
        for error in await asyncio.gather(polling, return_exceptions=True):
            if isinstance(error, Exception):
                raise error

    async def _poll_forever(self, reporter: PlayedAgent) -> None:
        connection, backoff, seen = await reporter.connect(), FIRST_BACKOFF_SECONDS, False
        while True:
            try:
                await reporter.poll_directive(connection)
                backoff = FIRST_BACKOFF_SECONDS
            except (OSError, HttpError) as error:
                if isinstance(error, HttpError) and self._read_clock() < self._load.gone_at:
                    raise
                if backoff == FIRST_BACKOFF_SECONDS:
                    reporter.again.set()
                await asyncio.sleep(backoff * random.uniform(0.75, 1.25))
                backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)
                with contextlib.suppress(OSError):
                    async with self._opening:
                        connection = await reporter.connect()
            if not reporter.observed or seen:
                continue
            seen = True
            job, sent = reporter.job, reporter.alarm_sent
            if sent is None or job.slow_at is None:
                self._out.unasked.append(job.slow_at or 0.0)
            else:
                self._out.directives.append((job.stages, job.slow_at, time.monotonic() - sent))


def play_agents(load: AgentsLoad) -> dict[str, Any]:
    trust, out = ssl.create_default_context(cafile=load.ca_file), AgentFigures()
    reporters = [
        PlayedAgent(load, trust, ReportingJob(**job), f"127.1.{1 + i // 250}.{1 + i % 250}", out)
        for i, job in enumerate(load.jobs)
    ]
    asyncio.run(PlayedAgents(load, reporters, out).run())
    return asdict(out)


# --- the pods of one large job -------------------------------------------------------------------


@dataclass(frozen=True)
class RanksLoad:
    """Load of all ranks of a large job, connected to its agent, process ``agent``, at ``port``.
    Links are healthy for ``settle`` and ``healthy`` seconds; then link 0 is slow for ``fault``
    seconds, then half of all links, for ``fault`` seconds, too."""

    port: int
    agent: int
    secret: str
    stages: int
    replicas: int
    settle: float
    healthy: float
    fault: float


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class PlayedRank:
    """Played rank: its monitor, its windows, and its connection."""

    def __init__(self, mesh: MeshShape, rank: int) -> None:
        self.rank, self.monitor = rank, RankMonitor(mesh, rank)
        at, draw = mesh.find_coordinate(rank), random.Random(rank)
        received = [(at.stage - 1, "forward"), (at.stage, "backward")]
        self._links = [each for each in received if 0 <= each[0] < mesh.stages - 1]
        wires = {False: NORMAL, True: sum(SLOW) / 2}
        self._windows = {
            (link, slow): [make_window(draw, link, at.column, way, wire) for _ in range(POOL)]
            for link, way in self._links
            for slow, wire in wires.items()
        }
        self._profiles = [make_profile(draw, at.stage, at.column) for _ in range(POOL)]
        self.writer: asyncio.StreamWriter | None = None
        self.sent = 0

    def end_window(self, number: int, now: float, slow: int, iteration: int | None) -> None:
        """End a window. ``slow``: number of slow links; ``iteration``: finished one, if any."""
        windows = [
            found.model_copy(update={"iteration": number}) if link < slow else found
            for link, _ in self._links
            for found in [self._windows[link, link < slow][number % POOL]]
        ]
        profiles = [] if iteration is None else [self._profiles[number % POOL]]
        self.monitor.observe_windows(windows, now, profiles=profiles)
        finished = None
        if self.rank == 0 and iteration is not None:
            finished = IterationSample(
                index=iteration, seconds=ITERATION, loss=2.5, plan_version=0, bubble_fraction=0.1
            )
        if finished is not None or self.monitor.is_report_due(now):
            report = RankReport(
                rank=self.rank, state="training", iteration=iteration or 0, ports=0,
                applied_plan_version=0, finished_iteration=finished,
                **self.monitor.take_changes(now),
            )  # fmt: skip
            data = frames.add_length_prefix(report.to_json())
            assert self.writer is not None
            self.writer.write(data)
            self.sent += len(data)


async def play_ranks(load: RanksLoad) -> dict[str, Any]:
    mesh, gate = MeshShape(load.stages, load.replicas), asyncio.Semaphore(OPENED_AT_A_TIME)
    ranks = [PlayedRank(mesh, rank) for rank in range(mesh.world_size)]
    answered = 0

    async def connect(each: PlayedRank) -> asyncio.StreamReader:
        async with gate:
            reader, each.writer = await asyncio.open_connection("127.0.0.1", load.port)
            await send_handshake(reader, each.writer, bytes.fromhex(load.secret), each.rank)
        each.monitor.record_connection()
        return reader

    async def receive(each: PlayedRank, reader: asyncio.StreamReader) -> None:
        nonlocal answered
        while True:
            payload = await frames.read_frame(reader)
            answered += len(payload)
            if RankFrame.is_answer(payload):
                answer = RankFrame.model_validate_json(payload).answer
                each.monitor.process_answer(answer, time.monotonic())

    readers = await asyncio.gather(*(connect(each) for each in ranks))
    tasks = [
        asyncio.create_task(receive(each, reader))
        for each, reader in zip(ranks, readers, strict=True)
    ]
    print(BEGAN, file=sys.stderr, flush=True)
    began, number, late = time.monotonic(), 0, 0.0
    found: dict[str, Any] = {}
    for phase, seconds, slow in (
        ("settle", load.settle, 0),
        ("well", load.healthy, 0),
        ("one_slow", load.fault, 1),
        ("half_slow", load.fault, load.stages // 2),
    ):
        used = cpu_seconds(load.agent)
        for _ in range(round(seconds / WINDOW)):
            number += 1
            iteration, rest = divmod(number, round(ITERATION / WINDOW))
            for i, each in enumerate(ranks):
                if i % 64 == 0:
                    await asyncio.sleep(0)
                each.end_window(number, time.monotonic(), slow, iteration if rest == 0 else None)
            due = began + number * WINDOW
            late = max(late, time.monotonic() - due)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        # Relative to the played time: a busy machine takes longer.
        found[phase] = (cpu_seconds(load.agent) - used) / seconds
    for task in tasks:
        if task.done():
            task.result()  # Raises: a connection was lost.
        task.cancel()
    sent = sum(each.sent for each in ranks)
    return found | {"sent": sent, "answered": answered, "load_late": late}


async def send_handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, rank: int
) -> None:
    """Perform the rank's part of the handshake."""
    challenge = frames.decode_message(frames.Challenge, await frames.read_frame(reader)).nonce
    nonce = frames.new_nonce()
    mine = frames.compute_proof(secret, "rank", challenge, nonce, rank)
    hello = frames.Hello(rank=rank, nonce=nonce, proof=mine, protocol=RANK_PROTOCOL)
    writer.write(frames.encode_frame(hello))
    welcome = frames.decode_message(frames.Welcome, await frames.read_frame(reader))
    if welcome.proof is None:
        raise RuntimeError(f"the agent refused rank {rank}: {welcome.refused}")


# --- the process ---------------------------------------------------------------------------------


@contextlib.contextmanager
def run_load(kind: str, **load: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """Run a load in a separate process. Enters once everything is connected; yields a function that
    waits for the figures. Raises RuntimeError if the process fails."""
    process = subprocess.Popen(
        [sys.executable, __file__, kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stderr is not None
    try:
        process.stdin.write(json.dumps(load))
        process.stdin.close()
        process.stdin = None
        if (line := process.stderr.readline()).strip() != BEGAN:
            raise RuntimeError(f"scale_load.py: {line}{process.stderr.read()[-2000:]}")

        def read_figures() -> dict[str, Any]:
            out, errors = process.communicate(timeout=DEADLINE)
            if process.returncode != 0:
                raise RuntimeError(f"scale_load.py: {errors[-2000:]}")
            found: dict[str, Any] = json.loads(out)
            return found

        yield read_figures
    finally:
        process.kill()
        process.wait()


def main() -> None:
    load = json.load(sys.stdin)
    found = (
        play_agents(AgentsLoad(**load))
        if sys.argv[1] == "agents"
        else asyncio.run(play_ranks(RanksLoad(**load)))
    )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
