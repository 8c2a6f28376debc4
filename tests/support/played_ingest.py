"""Ingest with answers that the test sets."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from certificates import self_signed


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for a name that is its own authority, and its key."""
    return self_signed(folder, name, name=name)


class PlayedIngest:
    """``certificate``: None for plain HTTP. ``tokens``: the tokens of all requests."""

    def __init__(self, certificate: tuple[Path, Path] | None) -> None:
        self.certificate = certificate
        self.tokens: list[str] = []
        self.says: dict[str, object] = {}
        self.status = 200
        self.headers: dict[str, str] = {}
        self.port = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        tls = None
        if self.certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(*self.certificate)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, ssl_context=tls)
        await site.start()
        self.port = runner.addresses[0][1]
        try:
            yield
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers["Authorization"])
        return web.json_response(self.says, status=self.status, headers=self.headers)
