"""Load for the ingest: reports of many jobs from a process of its own, as cheap as they can be.

Used by operator_scale.py, which runs it as ``python benchmarks/report_load.py`` with a JSON
object on standard input (:class:`Load`) and reads one of figures from standard output. Reports
are those of the agent (agent_reports.py). HTTP is written by hand over asyncio, so that most of
the processor is left to what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from agent_reports import Kind, Reports

OPENED_AT_A_TIME = 32
"""Connections: the ingest cuts those that say nothing within 5 s, and handshakes take some ms."""


@dataclass(frozen=True)
class Job:
    """One job's seat: what it needs to speak for itself."""

    namespace: str
    name: str
    token: str
    stages: int = 2


@dataclass(frozen=True)
class Load:
    """What to do. ``slow_from``, ``slow_over``: turns from which on, and over which, link 0 of
    job after job goes slow, all at once if that is 0; with ``period`` 0 every connection is kept
    busy for ``seconds``, up to ``rate`` reports a second of each."""

    port: int
    server_name: str
    ca_file: str
    jobs: list[dict[str, Any]]
    period: float = 0.0
    turns: int = 0
    slow_from: int = 0
    slow_over: int = 0
    completes: int = 1
    """Which report of a slow link, counted from 1, is the one that a controller can act on."""
    seconds: float = 0.0
    rate: float = 20.0
    first: int = 1
    """Sequence number of a job's first report."""


@cache
def reports_of(stages: int) -> Reports:
    """Of all jobs of so many stages."""
    return Reports(stages)


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


class Reporter:
    """Rank 0's agent of one job: one connection for reports, one for the long poll."""

    def __init__(self, load: Load, trust: ssl.SSLContext, job: Job) -> None:
        self._load, self._trust, self._job = load, trust, job
        reports_of(job.stages)  # Made before anything is timed.
        self._base = f"/v1/jobs/{job.namespace}/{job.name}"
        self._end = f"Host: {load.server_name}\r\nAuthorization: Bearer {job.token}\r\n"
        self._sequence = load.first - 1
        self._slow = 0
        """Reports since link 0 has turned slow."""
        self.observed = 0
        self.slow_sent: list[float] = []
        """When each report of the slow link was sent, until the directive was there."""

    async def line(self) -> Line:
        _, line = await asyncio.get_running_loop().create_connection(
            Line, "127.0.0.1", self._load.port, ssl=self._trust,
            server_hostname=self._load.server_name, ssl_handshake_timeout=120,
        )  # fmt: skip
        return line

    def request(self, slow: bool) -> bytes:
        """The next report."""
        self._sequence += 1
        self._slow += slow
        kind: Kind = "quiet"
        if slow:
            kind = "alarm" if self._slow == 1 else "slow"
        elif self._sequence == self._load.first:
            kind = "first"
        job = self._job
        body = reports_of(job.stages).body(
            job.namespace, job.name, self._sequence, self.observed, kind
        )
        return (
            f"POST {self._base}/reports HTTP/1.1\r\n{self._end}"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        ).encode()

    async def send(self, line: Line, *, slow: bool = False) -> float:
        """Seconds to the answer."""
        request = self.request(slow)
        started = time.monotonic()
        if slow and not self.observed:
            self.slow_sent.append(started)
        self.take(*await line.ask(request))
        return time.monotonic() - started

    async def poll(self, line: Line) -> None:
        """Wait for a directive, as long as a poll may."""
        query = f"attempt=0&after={self.observed}&wait=25"
        self.take(
            *await line.ask(
                f"GET {self._base}/directive?{query} HTTP/1.1\r\n{self._end}\r\n".encode()
            )
        )

    def take(self, status: int, body: bytes) -> None:
        if status != 200:
            raise RuntimeError(f"{self._job.name} was answered {status}: {body!r}")
        if b'"plan_version"' in body:
            self.observed = max(self.observed, json.loads(body)["directive"]["plan_version"])


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
    """What was seen. Seconds. ``directives``: from when the report that completes the evidence
    was sent (:attr:`Load.completes`) to the directive at the agent, however many more reports
    were sent meanwhile; ``evidence``: the same from the first report of the slow link. A report
    that was lost counts as sent, so that both are too long then. ``wall``, ``own_cpu``: since
    all connections are open; what this process takes of a processor."""

    reports: int = 0
    wall: float = 0.0
    own_cpu: float = 0.0
    late: float = 0.0
    """Most seconds a report left after it was due: above some ms, this process is the bound."""
    reconnects: int = 0
    answers: list[float] = field(default_factory=list)
    directives: list[float] = field(default_factory=list)
    evidence: list[float] = field(default_factory=list)
    unasked: int = 0
    """Directives that came before the evidence was complete."""


async def steady(load: Load, reporters: Sequence[Reporter], out: Figures) -> None:
    """Every job reports once per period and holds a long poll; link after link goes slow."""
    everybody = _Gate(len(reporters))

    opening = asyncio.Semaphore(OPENED_AT_A_TIME)
    began: list[tuple[float, float]] = []

    async def one(number: int, reporter: Reporter) -> None:
        async def wait_for_directive(polled: Line) -> None:
            while not reporter.observed:
                try:
                    await reporter.poll(polled)
                except ConnectionError:
                    out.reconnects += 1
                    polled = await reporter.line()
            now = time.monotonic()
            if len(reporter.slow_sent) < load.completes:
                out.unasked += 1
                return
            out.directives.append(now - reporter.slow_sent[load.completes - 1])
            out.evidence.append(now - reporter.slow_sent[0])

        async with opening:
            line = await reporter.line()
            await reporter.send(line)  # Asks for a TokenReview.
            waiting = asyncio.create_task(wait_for_directive(await reporter.line()))
        everybody.release()
        await everybody.wait()
        if not began:
            began.append((time.monotonic(), time.process_time()))
        start = time.monotonic() + load.period * number / len(reporters)
        slow_from = load.slow_from + number * load.slow_over // len(reporters)
        for turn in range(load.turns):
            due = start + turn * load.period
            await asyncio.sleep(due - time.monotonic())
            out.late = max(out.late, time.monotonic() - due)
            try:
                took = await reporter.send(line, slow=turn >= slow_from)
            except ConnectionError:
                # As an agent would: this report is lost, the next one has its line.
                out.reconnects += 1
                line = await reporter.line()
                continue
            out.reports += 1
            out.answers.append(took)
        waiting.cancel()
        for error in await asyncio.gather(waiting, return_exceptions=True):
            if isinstance(error, Exception):
                raise error

    await _all(one(i, reporter) for i, reporter in enumerate(reporters))
    wall, cpu = began[0]
    out.wall, out.own_cpu = time.monotonic() - wall, time.process_time() - cpu


async def full(load: Load, reporters: Sequence[Reporter], out: Figures) -> None:
    """All connections busy, each within its job's limit."""
    lines = []
    for reporter in reporters:
        lines.append(await reporter.line())
        await reporter.send(lines[-1])
    out.own_cpu = -time.process_time()
    started = time.monotonic()
    stop = started + load.seconds

    async def one(reporter: Reporter, line: Line) -> None:
        due = time.monotonic()
        while due < stop:
            out.answers.append(await reporter.send(line))
            out.reports += 1
            due = max(due + 1 / load.rate, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    await _all(one(r, line) for r, line in zip(reporters, lines, strict=True))
    out.wall = time.monotonic() - started
    out.own_cpu += time.process_time()


async def _all(work: Iterable[Coroutine[None, None, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for each in work:
            tasks.create_task(each)


def main() -> None:
    asked = json.load(sys.stdin)
    load = Load(**asked)
    trust = ssl.create_default_context(cafile=load.ca_file)
    reporters = [Reporter(load, trust, Job(**job)) for job in load.jobs]
    out = Figures()
    asyncio.run((steady if load.period else full)(load, reporters, out))
    json.dump(asdict(out) | {"pid": os.getpid()}, sys.stdout)


if __name__ == "__main__":
    main()
