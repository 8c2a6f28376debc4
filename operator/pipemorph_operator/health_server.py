"""Serves ``/metrics``, ``/healthz`` and ``/readyz`` over plain HTTP, in both processes.

``/healthz`` checks that work makes progress, not only that the process answers: periodic tasks
send heartbeats, and the event loop must not be blocked. The limits are far above the delays of a
loaded machine or an unreachable API server, which a restart would not cure.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from pipemorph.ingest import Acceptor, ConnectionLimits

log = logging.getLogger("pipemorph.serve")

Check = Callable[[], str]
"""Returns the current problem in one line; empty if healthy."""

LIMITS = ConnectionLimits(total=64, per_source=64, unauthenticated=64)
ANSWER_SECONDS = 10.0
"""Time limit of a connection, from accept to the end of its response. Clients are not
authenticated; above the connection limit the oldest connection is closed."""
BEAT_SECONDS = 1.0
STUCK_SECONDS = 30.0
"""Longest time for which the event loop may be blocked."""
FAULT_SECONDS = 60.0
"""Time for which a longer block is reported: as long as a liveness probe needs to fail."""


class Heartbeat:
    """Checks that ``what`` happens at least every ``within`` seconds."""

    def __init__(
        self, what: str, within: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._within, self._clock = what, within, clock
        self.record_beat()

    def record_beat(self) -> None:
        """Record that ``what`` has happened."""
        self._last = self._clock()

    def __call__(self) -> str:
        silent = self._clock() - self._last
        if silent <= self._within:
            return ""
        return f"{self._what}: none for {silent:.0f} s, expected every {self._within:g} s"


class EventLoopMonitor:
    """Checks that the event loop is not blocked repeatedly. While it is blocked, the process
    answers no request; the check reports the block afterwards."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stuck, self._at = 0.0, float("-inf")

    async def run(self) -> None:
        """Measure the event loop's lateness, forever."""
        while True:
            began = self._clock()
            await asyncio.sleep(BEAT_SECONDS)
            late = self._clock() - began - BEAT_SECONDS
            if late > STUCK_SECONDS:
                self._stuck, self._at = late, self._clock()

    def __call__(self) -> str:
        if self._clock() - self._at > FAULT_SECONDS:
            return ""
        return f"the event loop was blocked for {self._stuck:.0f} s"


class HealthServer:
    """Running server, as returned by :func:`start`."""

    def __init__(self, runner: web.AppRunner, acceptor: Acceptor) -> None:
        self._runner, self._acceptor = runner, acceptor

    @property
    def port(self) -> int:
        """Port the server listens on."""
        port: int = self._acceptor.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Stop the server."""
        await self._acceptor.close()
        await self._runner.cleanup()


@web.middleware
async def _close_after_response(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    response = await handler(request)
    response.force_close()
    return response


async def start(
    host: str | None,
    port: int,
    unready: Check,
    checks: Sequence[Check] = (),
    state: Callable[[], str] = str,
) -> HealthServer:
    """Start the server, on every address of the pod if ``host`` is None.

    ``/healthz`` returns 503 with the problems of ``checks``, ``/readyz`` with that of ``unready``.
    Both append the lines of ``state`` to their "ok". Raises OSError if the port is in use.
    """

    async def serve_metrics(_: web.Request) -> web.Response:
        # Runs in a thread: the series of a thousand jobs take half a second.
        body = await asyncio.to_thread(generate_latest)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def build_ok_response() -> web.Response:
        said = state()
        return web.Response(text=f"ok\n{said}\n" if said else "ok\n")

    async def serve_health(_: web.Request) -> web.Response:
        wrong = [found for check in checks if (found := check())]
        if not wrong:
            return build_ok_response()
        log.error("unhealthy: %s", "; ".join(wrong))
        return web.Response(status=503, text="\n".join(wrong) + "\n")

    async def serve_readiness(_: web.Request) -> web.Response:
        missing = unready()
        return web.Response(status=503, text=f"{missing}\n") if missing else build_ok_response()

    app = web.Application(middlewares=[_close_after_response])
    app.router.add_get("/metrics", serve_metrics)
    app.router.add_get("/healthz", serve_health)
    app.router.add_get("/readyz", serve_readiness)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    assert runner.server is not None
    acceptor = Acceptor(runner.server, limits=LIMITS, head_seconds=ANSWER_SECONDS)
    try:
        await acceptor.open_listeners(host, port)
    except OSError:
        await runner.cleanup()
        raise
    return HealthServer(runner, acceptor)
