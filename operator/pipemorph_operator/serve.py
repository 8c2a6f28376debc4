"""``/metrics``, ``/healthz`` and ``/readyz`` on a plain port of either process."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest


async def start(host: str | None, port: int, is_ready: Callable[[], bool]) -> web.AppRunner:
    """Serve until the runner is cleaned up, at every address of the pod if ``host`` is None.

    Raises OSError if the port is taken.
    ``/healthz`` answers if the event loop runs; ``/readyz`` as ``is_ready`` says.
    """

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ok\n") if is_ready() else web.Response(status=503)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/healthz", healthy)
    app.router.add_get("/readyz", ready)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
