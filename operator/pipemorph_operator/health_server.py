"""``/metrics``, ``/healthz`` and ``/readyz`` on a plain port of either process.

``/healthz`` tells whether the work moves, not only whether the process answers: what must happen
again and again gives a sign, and the event loop must not be held up. The limits are far above what
a loaded machine or an API server that is away makes of it: a restart would help with neither.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from pipemorph.ingest import ConnectionLimits, Doors

log = logging.getLogger("pipemorph.serve")

Check = Callable[[], str]
"""What is wrong now, in one line; empty if nothing is."""

LIMITS = ConnectionLimits(in_all=64, per_source=64, silent=64)
ANSWER_SECONDS = 10.0
"""Anybody may connect: from its start to the end of its answer a connection has so long, and where
there are too many the oldest makes room for the next."""
BEAT_SECONDS = 1.0
STUCK_SECONDS = 30.0
"""An event loop that was held up for longer is a fault."""
TOLD_SECONDS = 60.0
"""So long afterwards: as long as a liveness probe takes to make up its mind."""


class Sign:
    """Something that must happen at least every ``within`` seconds, such as ``what``."""

    def __init__(
        self, what: str, within: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._within, self._clock = what, within, clock
        self.give()

    def give(self) -> None:
        """It has happened."""
        self._last = self._clock()

    def __call__(self) -> str:
        silent = self._clock() - self._last
        if silent <= self._within:
            return ""
        return f"{self._what}: no sign for {silent:.0f} s, expected every {self._within:g} s"


class Pulse:
    """Whether the event loop has turns. While it has none nothing is answered at all; this tells
    of one that is held up again and again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stuck, self._at = 0.0, float("-inf")

    async def run(self) -> None:
        """Take the pulse, for ever."""
        while True:
            began = self._clock()
            await asyncio.sleep(BEAT_SECONDS)
            late = self._clock() - began - BEAT_SECONDS
            if late > STUCK_SECONDS:
                self._stuck, self._at = late, self._clock()

    def __call__(self) -> str:
        if self._clock() - self._at > TOLD_SECONDS:
            return ""
        return f"the event loop was held up for {self._stuck:.0f} s"


class Serving:
    """What :func:`start` started."""

    def __init__(self, runner: web.AppRunner, doors: Doors) -> None:
        self._runner, self._doors = runner, doors

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._doors.sockets[0].getsockname()[1]
        return port

    async def cleanup(self) -> None:
        """Serve no more."""
        await self._doors.close()
        await self._runner.cleanup()


@web.middleware
async def _once(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    response = await handler(request)
    response.force_close()
    return response


async def start(
    host: str | None,
    port: int,
    is_ready: Callable[[], bool],
    checks: Sequence[Check] = (),
) -> Serving:
    """Serve until it is cleaned up, at every address of the pod if ``host`` is None.

    Raises OSError if the port is taken.
    ``/healthz`` answers 503 with what ``checks`` find; ``/readyz`` as ``is_ready`` says.
    """

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthy(_: web.Request) -> web.Response:
        wrong = [found for check in checks if (found := check())]
        if not wrong:
            return web.Response(text="ok\n")
        log.error("not well: %s", "; ".join(wrong))
        return web.Response(status=503, text="\n".join(wrong) + "\n")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if is_ready() else web.Response(status=503)

    app = web.Application(middlewares=[_once])
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthy)
    app.router.add_get("/readyz", ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    assert runner.server is not None
    doors = Doors(runner.server, limits=LIMITS, head_seconds=ANSWER_SECONDS)
    try:
        await doors.open(host, port)
    except OSError:
        await runner.cleanup()
        raise
    return Serving(runner, doors)
