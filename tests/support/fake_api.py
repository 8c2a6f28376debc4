"""API servers for tests of the operator: :class:`FakeCluster` in this process, for single requests,
and :class:`FakeApi` over HTTP, for lists and watches of one kind that break when the test says so.

Their rules are those of kube-apiserver 1.37; tests/cluster/test_operator_forgotten.py asks it:

- The pages of a list are one snapshot. When it is forgotten, the next page is refused with 410.
- A watch tells what happened after the version that it is given, also of what is gone by then. Of
  a version before what it remembers it answers 200, and one event: ERROR with a Status of code 410.
- Of a version that is not reached yet it tells nothing.
- Each write that changes an object gives it another resourceVersion. A write that names another one
  than the object has is refused with 409 Conflict.
- To create what exists is 409 AlreadyExists, to replace what does not is 404.
- An apply creates what does not exist. It removes fields that its manager applied before and
  does not apply now. Conditions are merged by their type, other lists are replaced. An apply of a
  subresource changes only that, and is 404 if there is no object.
- A strategic merge patch changes the keys of maps that it names, and removes those that it sets to
  null. Of what does not exist it is 404.
- A delete with another UID than the object's deletes nothing.
- Items of a list have neither kind nor apiVersion.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from kubernetes.aio.client import Configuration

from pipemorph_operator.kube.client import KubeApiError, KubeClient, build_object_path

Object = dict[str, Any]
Key = tuple[str, str]


class FakeCluster(KubeClient):
    """The objects of an API server, with the methods of :class:`KubeClient`. See the module.

    A test overrides :meth:`arrives`, :meth:`admit` and :meth:`answers` for what goes wrong.
    """

    def __init__(self, *objects: Object) -> None:
        self.objects: dict[str, Object] = {}
        """Objects by URL path."""
        self.requests: list[tuple[str, str]] = []
        """Requests, all of them: method of :class:`KubeClient`, and URL path."""
        self._versions = itertools.count(1)
        self._applied: dict[tuple[str, str, str], Object] = {}
        for each in objects:
            self.put(each)

    # --- hooks ----------------------------------------------------------------------------

    async def arrives(self, verb: str, url: str) -> None:
        """Called before a request is handled; may wait, or raise what the client gets."""

    def admit(self, old: Object | None, new: Object) -> None:
        """Called before an object is written; may raise, as validation does."""

    async def answers(self, verb: str, url: str) -> None:
        """Called after a write; may raise what the client gets although the write is done."""

    def made(self, verb: str) -> list[str]:
        """URL paths of all requests by this method."""
        return [url for each, url in self.requests if each == verb]

    # --- writes by the test ---------------------------------------------------------------

    def put(self, obj: Object) -> Object:
        """Write an object, whatever there is."""
        return self._write(build_object_path(obj), obj)

    def _write(self, url: str, obj: Object) -> Object:
        old, new = self.objects.get(url), copy.deepcopy(obj)
        self.admit(old, new)
        metadata = new.setdefault("metadata", {})
        current = (
            old["metadata"] if old is not None else {"uid": f"uid-{len(self.objects)}"} | metadata
        )
        metadata["uid"] = current["uid"]
        metadata.pop("resourceVersion", None)
        if old is None or new != _without_version(old):
            new["metadata"]["resourceVersion"] = str(next(self._versions))
            self.objects[url] = new
        return copy.deepcopy(self.objects[url])

    # --- requests -------------------------------------------------------------------------

    async def _arrives(self, verb: str, url: str) -> None:
        self.requests.append((verb, url))
        await self.arrives(verb, url)

    async def get(self, url: str) -> Object | None:
        await self._arrives("get", url)
        return copy.deepcopy(self.objects.get(url))

    async def list(
        self, url: str, *, labels: str | None = None, fields: str | None = None
    ) -> list[Object]:
        assert fields is None, "field selectors are not played"
        await self._arrives("list", url)
        found = [copy.deepcopy(each) for each in self._in(url) if _selects(labels, each)]
        for each in found:
            each.pop("kind"), each.pop("apiVersion")
        return found

    async def list_metadata(self, url: str) -> AsyncIterator[Object]:
        await self._arrives("list", url)
        for each in self._in(url):
            yield copy.deepcopy(each["metadata"])

    def _in(self, url: str) -> list[Object]:
        """Objects of a list, of one namespace or of all."""
        root, _, plural = url.rpartition("/")
        namespaced = "/namespaces/" in url
        return [
            each
            for at, each in sorted(self.objects.items())
            if at.rpartition("/")[0] == url
            or (
                not namespaced
                and at.startswith(f"{root}/namespaces/")
                and at.split("/")[-2] == plural
            )
        ]

    async def create(self, obj: Object, owner: str) -> Object | None:
        url = build_object_path(obj)
        await self._arrives("create", url)
        if url in self.objects:
            return None
        made = self._write(url, obj)
        await self.answers("create", url)
        return made

    async def replace(self, obj: Object, owner: str = "") -> Object:
        url = build_object_path(obj)
        await self._arrives("replace", url)
        self._must_be(url, obj, exists=True)
        made = self._write(url, obj)
        await self.answers("replace", url)
        return made

    async def apply(self, obj: Object, owner: str, *, subresource: str = "") -> Object:
        url = build_object_path(obj)
        await self._arrives("apply", url)
        self._must_be(url, obj, exists=bool(subresource))
        now = copy.deepcopy(self.objects.get(url, {}))
        fields = {k: v for k, v in obj.items() if not subresource or k == subresource}
        fields = copy.deepcopy(fields)
        fields.get("metadata", {}).pop("resourceVersion", None)
        before = self._applied.get((url, owner, subresource), {})
        self._applied[url, owner, subresource] = copy.deepcopy(fields)
        made = self._write(url, _merged(now, before, fields))
        await self.answers("apply", url)
        return made

    async def patch(self, url: str, changes: Object, owner: str, *, merge: bool = False) -> Object:
        await self._arrives("patch", url)
        url = url.removesuffix("/status")
        found = self.objects.get(url)
        if found is None:
            raise KubeApiError(404, "NotFound", f"{url} not found")
        made = self._write(url, _patched(found, changes))
        await self.answers("patch", url)
        return made

    async def delete(
        self,
        url: str,
        *,
        uid: str | None = None,
        propagation: str = "Background",
        grace: int | None = None,
    ) -> None:
        await self._arrives("delete", url)
        found = self.objects.get(url)
        if found is not None and uid in (None, found["metadata"]["uid"]):
            del self.objects[url]
        await self.answers("delete", url)

    def _must_be(self, url: str, obj: Object, *, exists: bool) -> None:
        """Refuse a write of an object that is gone, or of another version than is there."""
        found, version = self.objects.get(url), obj["metadata"].get("resourceVersion")
        if found is None and exists:
            raise KubeApiError(404, "NotFound", f"{url} not found")
        if found is not None and version not in (None, found["metadata"]["resourceVersion"]):
            raise KubeApiError(409, "Conflict", "the object has been modified")


def _without_version(obj: Object) -> Object:
    metadata = {k: v for k, v in obj["metadata"].items() if k != "resourceVersion"}
    return obj | {"metadata": metadata}


def _selects(labels: str | None, obj: Object) -> bool:
    """True if a label selector, of equalities and names, matches."""
    found = obj["metadata"].get("labels") or {}
    for term in (labels or "").split(",") if labels else ():
        name, equals, value = term.partition("=")
        if name not in found or (equals and found[name] != value):
            return False
    return True


def _patched(now: Any, changes: Any) -> Any:
    """Maps after a strategic merge patch: null removes a key."""
    if not (isinstance(now, dict) and isinstance(changes, dict)):
        return changes
    stay = {k: v for k, v in now.items() if k not in changes}
    return stay | {k: _patched(now.get(k), v) for k, v in changes.items() if v is not None}


def _merged(now: Any, before: Any, new: Any) -> Any:
    """Fields as they are after an apply of ``new`` by the applier of ``before``."""
    if isinstance(now, dict) and isinstance(new, dict):
        before = before if isinstance(before, dict) else {}
        stay = {k: v for k, v in now.items() if k in new or k not in before}
        return stay | {k: _merged(now.get(k), before.get(k), v) for k, v in new.items()}
    if _are_conditions(now) and _are_conditions(new):
        applied = {each["type"]: each for each in (before or [])}
        found, wanted = ({each["type"]: each for each in rows} for rows in (now, new))
        return list(_merged(found, applied, wanted).values())
    return new


def _are_conditions(rows: Any) -> bool:
    return isinstance(rows, list) and all(isinstance(r, dict) and "type" in r for r in rows)


class FakeApi:
    """See the module. Serves batch Jobs of all namespaces."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.version = 100
        self.requests: list[dict[str, str]] = []
        self.refusals: list[int] = []
        """Statuses with which the next requests are refused; 0 for none."""
        self.refused: dict[str, int] = {}
        """Statuses with which every request about a namespace is refused."""
        self.mute = False
        """True if watches receive no events, as if these had happened while they were down."""
        self.ends_watches = False
        """True if each watch is ended at once."""
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
        """End the watches as the API server does every few minutes."""
        self._send(None)

    def forget(self) -> None:
        """Forget the past, as after a compaction and a restart: only the present is known."""
        self.version += 1
        self._oldest = self.version
        self._snapshots.clear()
        self._events.clear()
        self.end_watches()

    async def idle(self, watches: int = 1) -> None:
        """Wait until so many watches have received all events."""
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
        self.requests.append(query)
        namespace = query["namespace"] = request.match_info.get("namespace", "")
        status = self.refused.get(namespace, 0)
        status = status or (self.refusals.pop(0) if self.refusals else 0)
        if status:
            return web.json_response(_status(status, "refused"), status=status)
        return await (self._watch(request, query) if "watch" in query else self._list(query))

    async def _list(self, query: dict[str, str]) -> web.Response:
        version, start = map(int, query.get("continue", f"{self.version} 0").split())
        if "continue" not in query:
            wanted = [k for k in sorted(self.objects) if query["namespace"] in ("", k[0])]
            self._snapshots[version] = [self.objects[key] for key in wanted]
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
                if query["namespace"] in ("", event["object"]["metadata"].get("namespace", "")):
                    await response.write(_line(event))
        finally:
            self._watching.discard(queue)
        return response


@asynccontextmanager
async def fake_api() -> AsyncIterator[tuple[FakeApi, KubeClient]]:
    """A server, and a client of it."""
    api, app = FakeApi(), web.Application()
    app.router.add_get("/apis/batch/v1/jobs", api._answer)
    app.router.add_get("/apis/batch/v1/namespaces/{namespace}/jobs", api._answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    try:
        async with KubeClient(Configuration(host=f"http://{host}:{port}")) as cluster:
            yield api, cluster
    finally:
        await runner.cleanup()


def _event(kind: str, obj: Object) -> Object:
    return {"type": kind, "object": obj}


def _status(code: int, message: str) -> Object:
    return {"kind": "Status", "metadata": {}, "code": code, "reason": "", "message": message}


def _line(event: Object) -> bytes:
    return json.dumps(event).encode() + b"\n"
