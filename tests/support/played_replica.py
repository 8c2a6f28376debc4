"""Replicas of the ingest that name each other as the owner of a job."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for a name that is its own authority, and its key."""
    made = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=x", "-addext", f"subjectAltName=DNS:{name}"]
    files = ["-out", str(made[0]), "-keyout", str(made[1])]
    subprocess.run([*command, *files], check=True, capture_output=True)
    return made


class Replica:
    """Answers what it is told to; ``asked``: the tokens of all requests."""

    def __init__(self, certificate: tuple[Path, Path] | None) -> None:
        self.certificate = certificate
        self.asked: list[str] = []
        self.owner: str | None = None
        """Whom it names; None: nobody, and it answers itself."""
        self.serves = True
        self.says: dict[str, object] = {}
        self.status = 200
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
        self.asked.append(request.headers["Authorization"])
        if self.serves:
            return web.json_response(self.says, status=self.status)
        said = {"error": "another one"} | ({"owner": self.owner} if self.owner else {})
        answer = web.json_response(said, status=421)
        answer.force_close()
        return answer
