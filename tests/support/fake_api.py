"""An API server of one kind of objects, over HTTP, that forgets and breaks when the test says so.

Its rules are those of kube-apiserver 1.37; tests/cluster/test_operator_forgotten.py asks it:

- The pages of a list are one snapshot. When it is forgotten, the next page is refused with 410.
- A watch tells what happened after the version that it is given, also of what is gone by then. Of
  a version before what it remembers it answers 200, and one event: ERROR with a Status of code 410.
- Of a version that is not reached yet it tells nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from kubernetes.aio.client import Configuration

from pipemorph_operator.cluster.client import Cluster

Object = dict[str, Any]
Key = tuple[str, str]


class FakeApi:
    """See the module. Serves batch Jobs of all namespaces."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.version = 100
        self.asked: list[dict[str, str]] = []
        self.refusals: list[int] = []
        """Statuses with which the next requests are refused; 0 for none."""
        self.mute = False
        """Whether watches are not told what happens, as if it had happened while they were down."""
        self.ends_watches = False
        """Whether each watch is ended at once."""
        self._events: list[tuple[int, Object]] = []
        self._oldest = 0
        self._snapshots: dict[int, list[Object]] = {}
        self._watching: set[asyncio.Queue[Object | None]] = set()
        self._uids = itertools.count()

    # --- what the test does ---------------------------------------------------------------

    def put(self, name: str, namespace: str = "team", **fields: Any) -> Object:
        """Create or change an object."""
        key, before = (namespace, name), self.objects.get((namespace, name))
        uid = before["metadata"]["uid"] if before else f"uid-{next(self._uids)}"
        metadata = {"namespace": namespace, "name": name, "uid": uid} | fields.pop("metadata", {})
        self.objects[key] = {"metadata": metadata} | fields
        self._record("MODIFIED" if before else "ADDED", self.objects[key])
        return self.objects[key]

    def delete(self, name: str, namespace: str = "team") -> None:
        gone = self.objects.pop((namespace, name))
        self._record("DELETED", gone | {"metadata": dict(gone["metadata"])})

    def bookmark(self) -> None:
        self.version += 1  # Something of another kind has happened.
        self._send(_event("BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}}))

    def end_watches(self) -> None:
        """As the API server does every few minutes."""
        self._send(None)

    def forget(self) -> None:
        """As after a compaction and a restart: of the past, only the present is known."""
        self.version += 1
        self._oldest = self.version
        self._snapshots.clear()
        self._events.clear()
        self.end_watches()

    async def idle(self, watches: int = 1) -> None:
        """Until so many watches have been told everything."""
        async with asyncio.timeout(10):
            while len(self._watching) < watches or any(not each.empty() for each in self._watching):
                await asyncio.sleep(0.001)

    # --- what it answers ------------------------------------------------------------------

    def _record(self, kind: str, obj: Object) -> None:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        event = _event(kind, json.loads(json.dumps(obj)))
        self._events.append((self.version, event))
        if not self.mute:
            self._send(event)

    def _send(self, event: Object | None) -> None:
        for queue in self._watching:
            queue.put_nowait(event)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.asked.append(query)
        status = self.refusals.pop(0) if self.refusals else 0
        if status:
            return web.json_response(_status(status, "refused"), status=status)
        return await (self._watch(request, query) if "watch" in query else self._list(query))

    async def _list(self, query: dict[str, str]) -> web.Response:
        version, start = map(int, query.get("continue", f"{self.version} 0").split())
        if "continue" not in query:
            self._snapshots[version] = [self.objects[key] for key in sorted(self.objects)]
        if version not in self._snapshots:
            said = _status(410, "The provided continue parameter is too old")
            return web.json_response(said, status=410)
        end, items = start + int(query["limit"]), self._snapshots[version]
        more = {"continue": f"{version} {end}"} if end < len(items) else {}
        metadata = {"resourceVersion": str(version)} | more
        return web.json_response({"metadata": metadata, "items": items[start:end]})

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        since = int(query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        if since < self._oldest:
            said = f"too old resource version: {since} ({self._oldest})"
            await response.write(_line(_event("ERROR", _status(410, said))))
            return response
        queue: asyncio.Queue[Object | None] = asyncio.Queue()
        for version, event in self._events:
            if version > since and not self.mute:
                queue.put_nowait(event)
        if since <= self.version:
            self._watching.add(queue)
        if self.ends_watches:
            queue.put_nowait(None)
        try:
            while (event := await queue.get()) is not None:
                await response.write(_line(event))
        finally:
            self._watching.discard(queue)
        return response


@asynccontextmanager
async def fake_api() -> AsyncIterator[tuple[FakeApi, Cluster]]:
    """A server, and a client of it."""
    api, app = FakeApi(), web.Application()
    app.router.add_get("/apis/batch/v1/jobs", api._answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    try:
        async with Cluster(Configuration(host=f"http://{host}:{port}")) as cluster:
            yield api, cluster
    finally:
        await runner.cleanup()


def _event(kind: str, obj: Object) -> Object:
    return {"type": kind, "object": obj}


def _status(code: int, message: str) -> Object:
    return {"kind": "Status", "metadata": {}, "code": code, "reason": "", "message": message}


def _line(event: Object) -> bytes:
    return json.dumps(event).encode() + b"\n"
