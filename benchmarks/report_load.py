"""Load for the ingest: reports of many jobs from a process of its own, as cheap as they can be.

:func:`load` runs it as ``python benchmarks/report_load.py`` with a JSON object on standard input
(:class:`Load`) and reads one of figures from standard output. Reports are those of the agent
(agent_reports.py). HTTP is written by hand over asyncio, so that most of the processor is left to
what is measured. Every agent has an address of its own, as a pod has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from agent_reports import ITERATION, Kind, Reports

from pipemorph_trainer.agent.uplinks.to_ingest import (
    FIRST_BACKOFF_SECONDS as FIRST_BACKOFF,
)
from pipemorph_trainer.agent.uplinks.to_ingest import (
    LAST_BACKOFF_SECONDS as LAST_BACKOFF,
)

OPENED_AT_A_TIME = 32
"""Connections: the ingest cuts those that say nothing within 5 s, and handshakes take some ms."""
BEGAN = "began"
"""What it says on standard error once everybody is connected: its time begins."""
OWN_SECONDS = 0.05
"""From one look at whether this process runs to the next."""
DEADLINE = 1800.0
"""Seconds until it has ended."""


@dataclass(frozen=True)
class Job:
    """One job's seat: what it needs to speak for itself. ``seed``: see
    :class:`~agent_reports.Reports`; ``slow_at``: seconds after which its link turns slow;
    ``slow_iteration``: seconds of an iteration from then until another plan is in effect."""

    namespace: str
    name: str
    token: str
    stages: int = 2
    seed: int = 0
    slow_at: float | None = None
    slow_iteration: float = ITERATION


@dataclass(frozen=True)
class Load:
    """What to do: all jobs report once per ``period``, or as seldom as the ingest wants, for so
    many ``seconds``. ``gone_at``: seconds after which the ingest may be away; before that an agent
    that is refused ends it all."""

    port: int
    server_name: str
    ca_file: str
    jobs: list[dict[str, Any]]
    period: float
    seconds: float
    gone_at: float = math.inf
    first: int = 1
    """Sequence number of a job's first report."""
    others: tuple[int, ...] = ()
    """Ports of other replicas of the ingest: an agent tries the next where it is not served, and
    goes where it is sent."""


@cache
def reports_of(stages: int, seed: int) -> Reports:
    """Of all such jobs."""
    return Reports(stages, seed)


class Line(asyncio.Protocol):
    """One connection: a request at a time."""

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
        fields = head.lower()
        start = fields.index(b"content-length:") + 15
        length = int(fields[start:].split(b"\r\n", 1)[0])
        if len(rest) < length:
            return
        self._buffer = b""
        self._answer.set_result((int(head[9:12]), rest[:length]))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        if self._transport is None:
            raise ConnectionError("the ingest hung up")
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer


class Refused(Exception):
    """The ingest answered with an error."""


class Moved(OSError):
    """Another replica serves the job."""


class Reporter:
    """Rank 0's agent of one job: one connection for reports, one for the long poll."""

    def __init__(self, load: Load, trust: ssl.SSLContext, job: Job, address: str) -> None:
        """``address``: its own, as a pod has one."""
        self._address = address
        self._load, self._trust, self._job = load, trust, job
        self._ports = [load.port, *load.others]
        self._port = self._ports[sum(map(ord, job.name)) % len(self._ports)]
        reports_of(job.stages, job.seed)  # Made before anything is timed.
        self._base = f"/v1/jobs/{job.namespace}/{job.name}"
        self._end = f"Host: {load.server_name}\r\nAuthorization: Bearer {job.token}\r\n"
        self._sequence = load.first - 1
        self._memory = b""
        self._told = False
        """Whether the ingest has been told everything."""
        self.name, self.stages, self.slow_at = job.name, job.stages, job.slow_at
        self.observed = 0
        self.again = asyncio.Event()
        """Set when a poll fails: an agent reports at once then."""
        self._slow_since = 0
        """The plan version in effect when the link turned slow."""
        self._told_slow = False
        self._iteration = self._sequence % 2**31
        self.pause = load.period
        """Seconds until the next report, as the ingest wants it."""
        self.alarm_sent: float | None = None

    async def line(self) -> Line:
        try:
            _, line = await asyncio.get_running_loop().create_connection(
                Line, "127.0.0.1", self._port, ssl=self._trust,
                server_hostname=self._load.server_name, ssl_handshake_timeout=120,
                local_addr=(self._address, 0),
            )  # fmt: skip
        except OSError:
            self._try_next()
            raise
        return line

    async def served(self) -> Line:
        """A connection to the replica that serves the job, which has had its first report."""
        for _ in range(2 * len(self._ports)):
            line = await self.line()
            with contextlib.suppress(Moved):
                await self.send(line)  # Asks for a TokenReview.
                return line
        raise Refused(f"no replica serves {self._job.name}")

    def _try_next(self) -> None:
        self._port = self._ports[(self._ports.index(self._port) + 1) % len(self._ports)]

    def request(self, kind: Kind) -> bytes:
        """The next report."""
        self._sequence += 1
        # The iteration in which a link turns slow ends under the plan before.
        job, first = self._job, kind == "slow" and not self._told_slow
        self._told_slow |= first
        applied = self._slow_since if first else self.observed
        slow = kind == "slow" and applied == self._slow_since
        finished = 0 if kind == "alarm" else round(self.pause / self._load.period)
        self._iteration += finished
        body = reports_of(job.stages, job.seed).body(
            job.namespace, job.name, self._sequence, self.observed, kind,
            applied=applied, iteration=self._iteration, finished=finished,
            seconds=job.slow_iteration if slow else ITERATION,
        )  # fmt: skip
        return (
            f"POST {self._base}/reports HTTP/1.1\r\n{self._end}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()

    async def send(self, line: Line, *, slow: bool = False) -> float:
        """Seconds to the answer."""
        kind: Kind = "first" if not self._told else "slow" if slow else "quiet"
        if slow and self.alarm_sent is None and self._told:
            kind = "alarm"
        request = self.request(kind)
        started = time.monotonic()
        if kind == "alarm":
            self.alarm_sent, self._slow_since = started, self.observed
        body = await line.ask(request)
        took = time.monotonic() - started
        answer = self.take(*body)
        memory = _memory_of(answer)
        # While a link is slow an agent tells of each iteration as it finishes.
        attentive = slow or b'"attentive":true' in answer
        self.pause = self._load.period if attentive else _seldom_of(answer)
        # An ingest that has another one remembers nothing: it is told everything again.
        self._told = kind == "first" or memory == self._memory
        self._memory = memory
        return took

    async def poll(self, line: Line) -> None:
        """Wait for a directive, as long as a poll may."""
        query = f"attempt=0&after={self.observed}&wait=25"
        self.take(
            *await line.ask(
                f"GET {self._base}/directive?{query} HTTP/1.1\r\n{self._end}\r\n".encode()
            )
        )

    def take(self, status: int, body: bytes) -> bytes:
        if status == 421:
            owner = json.loads(body).get("owner")
            if owner is not None:
                self._port = int(owner.rpartition(":")[2])
            else:
                self._try_next()
            raise Moved(f"{self._job.name} is served by {owner}")
        if status != 200:
            raise Refused(f"{self._job.name} was answered {status}: {body!r}")
        if b'"plan_version"' in body:
            self.observed = max(self.observed, json.loads(body)["directive"]["plan_version"])
        return body


def _memory_of(body: bytes) -> bytes:
    """What an answer names the memory of the ingest; empty if it does not."""
    return body.partition(b'"memory":"')[2].partition(b'"')[0]


def _seldom_of(body: bytes) -> float:
    """How seldom an answer wants reports, seconds."""
    return float(body.partition(b'"seldom":')[2].partition(b",")[0])


class _Gate:
    """Opens when everybody is there: what is measured begins with all connections open."""

    def __init__(self, count: int) -> None:
        self._missing, self._open = count, asyncio.Event()

    def release(self) -> None:
        self._missing -= 1
        if self._missing == 0:
            self._open.set()

    async def wait(self) -> None:
        await self._open.wait()


@dataclass
class Figures:
    """What was seen. Seconds. ``directives``: stages, when the link turned slow, from when the
    alarm was sent to the directive at the agent, and when that was. ``alarms``: of each of these,
    the job, its stages, when its link turned slow, and when the alarm was sent and the directive
    came by the machine's monotonic clock. ``late``: most seconds that a
    report left after it was due: above some ms, this process is the bound, or an answer came late.
    ``stalled``: most seconds that this process did not run although it had to, as if the machine
    had stopped. ``back``: from ``gone_at`` until a report was answered again, per job that was not
    answered meanwhile. ``reconnects``: of agents that were hung up on before that. ``wall``,
    ``own_cpu``: since all connections are open until the ingest may be away; what this process
    takes of a processor."""

    reports: int = 0
    wall: float = 0.0
    own_cpu: float = 0.0
    late: float = 0.0
    stalled: float = 0.0
    reconnects: int = 0
    answers: list[float] = field(default_factory=list)
    answered_at: list[float] = field(default_factory=list)
    """When each of them came: seconds since all connections are open."""
    directives: list[tuple[int, float, float, float]] = field(default_factory=list)
    alarms: list[tuple[str, int, float, float, float]] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    unasked: list[float] = field(default_factory=list)
    """Of directives that came before the alarm, when that would have been; 0 if there was none."""


class Fleet:
    """All jobs, which report and hold a long poll each."""

    def __init__(self, load: Load, reporters: Sequence[Reporter], out: Figures) -> None:
        self._load, self._reporters, self._out = load, reporters, out
        self._everybody = _Gate(len(reporters))
        self._opening = asyncio.Semaphore(OPENED_AT_A_TIME)
        self._began = 0.0
        self._cpu = 0.0

    async def run(self) -> None:
        watching = asyncio.create_task(self._watch_own_loop())
        async with asyncio.TaskGroup() as tasks:
            for number, reporter in enumerate(self._reporters):
                tasks.create_task(self._one(number, reporter))
        watching.cancel()

    async def _watch_own_loop(self) -> None:
        while True:
            due = time.monotonic() + OWN_SECONDS
            await asyncio.sleep(OWN_SECONDS)
            if self._began:
                self._out.stalled = max(self._out.stalled, time.monotonic() - due)

    def _now(self) -> float:
        return time.monotonic() - self._began

    async def _one(self, number: int, reporter: Reporter) -> None:
        async with self._opening:
            line = await reporter.served()
            waiting = asyncio.create_task(self._wait_for_directive(reporter))
        self._everybody.release()
        await self._everybody.wait()
        if not self._began:
            self._began, self._cpu = time.monotonic(), time.process_time()
            print(BEGAN, file=sys.stderr, flush=True)
        due = self._load.period * number / len(self._reporters)
        backoff, away = 0.0, False
        while due < self._load.seconds:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reporter.again.wait(), max(0.0, due - self._now()))
            reporter.again.clear()
            now = self._now()
            due = min(due, now)
            if now < self._load.gone_at:
                self._out.late = max(self._out.late, now - due)
                self._out.wall = now
                self._out.own_cpu = time.process_time() - self._cpu
            slow = reporter.slow_at is not None and now >= reporter.slow_at
            try:
                took = await reporter.send(line, slow=slow)
            except (OSError, Refused) as error:
                away = self._now() >= self._load.gone_at
                if isinstance(error, Refused) and not away:
                    raise
                backoff = min(max(2 * backoff, FIRST_BACKOFF), LAST_BACKOFF)
                await asyncio.sleep(backoff * random.uniform(0.75, 1.25))
                with contextlib.suppress(OSError):
                    async with self._opening:
                        line = await reporter.line()
                    self._out.reconnects += not away
                due = self._now()
                continue
            backoff = 0.0
            if now < self._load.gone_at:
                self._out.reports += 1
                self._out.answers.append(took)
                self._out.answered_at.append(self._now())
            elif away:
                away = False
                self._out.back.append(self._now() - self._load.gone_at)
            due = self._next(due, reporter)
        waiting.cancel()
        for error in await asyncio.gather(waiting, return_exceptions=True):
            if isinstance(error, Exception):
                raise error

    def _next(self, due: float, reporter: Reporter) -> float:
        """When the next report is due: an alarm at once, and one after each period."""
        due, turns_slow = due + reporter.pause, reporter.slow_at
        if turns_slow is not None and reporter.alarm_sent is None:
            return min(due, max(turns_slow, self._now()))
        return due

    async def _wait_for_directive(self, reporter: Reporter) -> None:
        polled, backoff, seen = await reporter.line(), FIRST_BACKOFF, False
        while True:
            try:
                await reporter.poll(polled)
                backoff = FIRST_BACKOFF
            except (OSError, Refused) as error:
                if isinstance(error, Refused) and self._now() < self._load.gone_at:
                    raise
                if backoff == FIRST_BACKOFF:
                    reporter.again.set()
                await asyncio.sleep(backoff * random.uniform(0.75, 1.25))
                backoff = min(2 * backoff, LAST_BACKOFF)
                with contextlib.suppress(OSError):
                    async with self._opening:
                        polled = await reporter.line()
            if not reporter.observed or seen:
                continue
            seen = True
            if reporter.alarm_sent is None or reporter.slow_at is None:
                self._out.unasked.append(reporter.slow_at or 0.0)
                continue
            sent, came = reporter.alarm_sent, time.monotonic()
            took, slow_at = came - sent, reporter.slow_at
            self._out.directives.append((reporter.stages, slow_at, took, self._now()))
            self._out.alarms.append((reporter.name, reporter.stages, slow_at, sent, came))


@contextlib.contextmanager
def load(**what: Any) -> Iterator[Callable[[], dict[str, Any]]]:
    """A :class:`Load` from a process of its own. Entered once all are connected; yields what waits
    for its :class:`Figures`."""
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write(json.dumps(what))
    process.stdin.close()
    process.stdin = None
    if (said := process.stderr.readline()).strip() != BEGAN:
        raise RuntimeError(f"report_load.py: {said}{process.stderr.read()[-2000:]}")

    def figures() -> dict[str, Any]:
        out, errors = process.communicate(timeout=DEADLINE)
        if process.returncode != 0:
            raise RuntimeError(f"report_load.py: {errors[-2000:]}")
        found: dict[str, Any] = json.loads(out)
        return found

    try:
        yield figures
    finally:
        process.kill()
        process.wait()


def main() -> None:
    asked = json.load(sys.stdin)
    load = Load(**asked)
    trust = ssl.create_default_context(cafile=load.ca_file)
    reporters = [
        Reporter(load, trust, Job(**job), f"127.1.{1 + i // 250}.{1 + i % 250}")
        for i, job in enumerate(load.jobs)
    ]
    out = Figures()
    asyncio.run(Fleet(load, reporters, out).run())
    json.dump(asdict(out), sys.stdout)


if __name__ == "__main__":
    main()
