"""Proxy before the API server that records requests and can be cut.

A program that is given :attr:`ApiProxy.kubeconfig` speaks plain HTTP to the proxy; its token is
passed on. The record shows its requests apart from those of other programs with the same rights.
"""

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import aiohttp
import yaml
from aiohttp import web
from testbed import Cluster, wait_for

Request = tuple[str, str]
"""Method and path."""

Moment = Literal["lost", "late", "unanswered"]
"""Fate of a write that is held: it never arrives, it does when the proxy is opened, or its
answer does then."""

HOP = frozenset({"host", "connection", "transfer-encoding", "content-length"})


class ApiProxy:
    """See the module. What is held is answered when the proxy is opened again."""

    def __init__(self, cluster: Cluster, kubeconfig: Path, copy: Path) -> None:
        self.kubeconfig = copy
        self._document = yaml.safe_load(kubeconfig.read_text())
        self._server = cluster.server
        self._requests: list[Request] = []
        self._holds: Callable[[str, str], bool] = lambda *_: False
        self._held = 0
        self._moment: Moment = "late"
        self._cut = False
        self._connections: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._released = asyncio.Event()

    @property
    def requests(self) -> list[Request]:
        """Requests that were passed on, in order."""
        return list(self._requests)

    def writes(self) -> list[Request]:
        """Requests to change an object, except for the Lease and events about it."""
        return [r for r in self.requests if r[0] != "GET" and "/pipemorph-system/" not in r[1]]

    def hold(self, which: Callable[[str, str], bool], moment: Moment = "late") -> None:
        """Answer no request from now on for which ``which(method, path)`` is true: reads are passed
        on now and answered later; ``moment`` says what becomes of the others."""

        async def begin() -> None:
            self._holds, self._held, self._moment = which, 0, moment
            self._released.clear()

        # Never between two requests that are passed on meanwhile.
        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(30.0)

    def cut(self) -> None:
        """Break all connections, and every new one, until the proxy is opened."""
        self._cut = True

        def abort() -> None:
            for each in self._connections:
                each.abort()

        self._loop.call_soon_threadsafe(abort)

    def wait_held(self) -> None:
        """Wait until a request is held."""
        wait_for("a request that is held", lambda: self._held > 0, 60.0, interval=0.005)

    @property
    def holds(self) -> bool:
        """True if a request is held."""
        return self._held > 0

    def open(self) -> None:
        """Pass everything on again."""
        self._holds, self._cut = lambda *_: False, False
        self._loop.call_soon_threadsafe(self._released.set)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        connection = request.transport
        assert isinstance(connection, asyncio.Transport)
        self._connections.add(connection)
        try:
            if self._cut:
                connection.abort()
                raise ConnectionAbortedError
            return await self._passed(request)
        except (ConnectionError, aiohttp.ClientError):
            return web.Response(status=502)  # Either side has hung up.
        finally:
            self._connections.discard(connection)

    async def _passed(self, request: web.Request) -> web.StreamResponse:
        held, moment = self._holds(request.method, request.path), self._moment
        reads = request.method == "GET"
        if held and not reads and moment != "unanswered":
            self._held += 1
            await self._released.wait()
            if moment == "lost":
                raise ConnectionAbortedError
        self._requests.append((request.method, request.path))
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP}
        async with self._session.request(
            request.method,
            f"{self._server}{request.path_qs}",
            headers=headers,
            data=await request.read() or None,
        ) as answer:
            forwarded = {k: v for k, v in answer.headers.items() if k.lower() not in HOP}
            response = web.StreamResponse(status=answer.status, headers=forwarded)
            if held and (reads or moment == "unanswered"):
                self._held += 1
                await self._released.wait()
            await response.prepare(request)
            async for part in answer.content.iter_any():
                if reads and self._holds(request.method, request.path):
                    await self._released.wait()
                await response.write(part)
            await response.write_eof()
            return response

    async def _serve(self, ready: threading.Event) -> None:
        trust = ssl.create_default_context()
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        connector = aiohttp.TCPConnector(ssl=trust, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False
        ) as self._session:
            app = web.Application(client_max_size=8 << 20)
            app.router.add_route("*", "/{path:.*}", self._pass)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]
            self._document["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{port}"}
            self.kubeconfig.write_text(yaml.safe_dump(self._document))
            self._end = asyncio.Event()
            ready.set()
            await self._end.wait()
            self._released.set()
            await runner.cleanup()
            remaining = asyncio.all_tasks() - {asyncio.current_task()}
            for task in remaining:
                task.cancel()
            await asyncio.gather(*remaining, return_exceptions=True)


@contextmanager
def api_proxy(cluster: Cluster, kubeconfig: Path, copy: Path) -> Iterator[ApiProxy]:
    """Proxy for a client of ``kubeconfig``; ``copy`` becomes one that leads to the proxy."""
    proxy, ready = ApiProxy(cluster, kubeconfig, copy), threading.Event()
    thread = threading.Thread(target=proxy._loop.run_until_complete, args=(proxy._serve(ready),))
    thread.start()
    try:
        assert ready.wait(30.0), "the proxy does not start"
        yield proxy
    finally:
        proxy._loop.call_soon_threadsafe(proxy._end.set)
        thread.join(30.0)
        proxy._loop.close()
