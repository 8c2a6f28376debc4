"""A played API server with jobs that train: what the ingest asks of one, and nothing else.

It leaves nearly all of the processor to what is measured. Every job is one that the operator has
started: it has an attempt, and a Job and a first pod of that, and had earlier ones. The API server
believes every token and takes every write.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from pipemorph_operator import names
from pipemorph_operator.children.attempt import audience

Object = dict[str, Any]
NAMESPACE = "bench"
JOBS_URL = "/apis/pipemorph.io/v1alpha1"
LEASES_URL = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


def token(name: str, pod: str | None = None, signature: str = "signature") -> str:
    """For a job, of its first pod or of another one, see :func:`pod_of`."""
    claims = {
        "aud": [audience(NAMESPACE, name, _uid(name))],
        "exp": time.time() + 86400,
        "pod": pod or pod_of(name),
    }
    part = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"head.{part}.{signature}"


def pod_of(name: str, attempt: int = 0) -> str:
    """The first pod of an attempt of a job; the one in progress is 0."""
    return f"{name}.{attempt}-0"


def _uid(name: str) -> str:
    return f"uid-of-{name}"


class PlayedApi:
    """``specs``: of the jobs, by name. ``asked`` counts requests by what they are for."""

    def __init__(self, specs: Mapping[str, Object]) -> None:
        self.asked: dict[str, int] = {}
        self._version = 1
        self._jobs: dict[str, Object] = {
            name: {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "metadata": {
                    "name": name, "namespace": NAMESPACE, "uid": _uid(name), "generation": 1,
                    "resourceVersion": "1",
                },
                "spec": spec,
                "status": {"state": "Running", "attempt": 0, "jobUid": f"job-of-{name}"},
            }
            for name, spec in specs.items()
        }  # fmt: skip
        self._plans: dict[str, Object] = {}
        self._leases: dict[str, Object] = {}
        self._watching: set[asyncio.Queue[Object | None]] = set()

    async def serve(self, tls: ssl.SSLContext) -> tuple[web.AppRunner, int]:
        """The server, to be cleaned up, and its port."""
        app, one = web.Application(client_max_size=2**24), "/namespaces/{namespace}"
        for method, way, answer in (
            ("GET", f"{JOBS_URL}/pipemorphjobs", self._list),
            ("GET", f"{JOBS_URL}{one}/pipemorphjobs/{{name}}", self._get),
            ("PATCH", f"{JOBS_URL}{one}/pipemorphjobs/{{name}}/status", self._apply),
            ("GET", f"{JOBS_URL}{one}/pipemorphplans/{{name}}", self._get_plan),
            ("POST", f"{JOBS_URL}{one}/pipemorphplans", self._put_plan),
            ("PUT", f"{JOBS_URL}{one}/pipemorphplans/{{name}}", self._put_plan),
            ("GET", LEASES_URL, self._list_leases),
            ("GET", f"{LEASES_URL}/{{name}}", self._get_lease),
            ("POST", LEASES_URL, self._put_lease),
            ("PUT", f"{LEASES_URL}/{{name}}", self._put_lease),
            ("POST", "/apis/authentication.k8s.io/v1/tokenreviews", self._review),
            ("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", self._access),
            ("GET", f"/api/v1{one}/pods/{{name}}", self._pod),
            ("POST", f"/api/v1{one}/events", self._event),
        ):
            app.router.add_route(method, way, self._counted(answer))
        app.on_shutdown.append(self._end_watches)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        return runner, runner.addresses[0][1]

    def _counted(
        self, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def counting(request: web.Request) -> web.StreamResponse:
            what = answer.__name__.strip("_")
            self.asked[what] = self.asked.get(what, 0) + 1
            return await answer(request)

        return counting

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if "watch" in request.query:
            return await self._watch(request)
        start = int(request.query.get("continue", "0"))
        end, items = start + int(request.query["limit"]), [*self._jobs.values()]
        metadata = {"resourceVersion": str(self._version)}
        metadata |= {"continue": str(end)} if end < len(items) else {}
        return web.json_response({"metadata": metadata, "items": items[start:end]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response, queue = web.StreamResponse(), asyncio.Queue[Object | None]()
        await response.prepare(request)
        self._watching.add(queue)
        try:
            while (changed := await queue.get()) is not None:
                event = {"type": "MODIFIED", "object": changed}
                await response.write(json.dumps(event).encode() + b"\n")
        except ConnectionError:
            pass  # The ingest was killed.
        finally:
            self._watching.discard(queue)
        return response

    async def _end_watches(self, _: web.Application) -> None:
        for queue in self._watching:
            queue.put_nowait(None)

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._jobs[request.match_info["name"]])

    async def _apply(self, request: web.Request) -> web.StreamResponse:
        written, job = await request.json(), self._jobs[request.match_info["name"]]
        based_on = written["metadata"].get("resourceVersion")
        if based_on not in (None, job["metadata"]["resourceVersion"]):
            return web.json_response({"reason": "Conflict", "message": "it changed"}, status=409)
        self._version += 1
        version = {"resourceVersion": str(self._version)}
        changed = job | {
            "metadata": job["metadata"] | version,
            "status": job["status"] | written["status"],
        }
        self._jobs[request.match_info["name"]] = changed
        for queue in self._watching:
            queue.put_nowait(changed)
        return web.json_response(changed)

    async def _get_plan(self, request: web.Request) -> web.StreamResponse:
        plan = self._plans.get(request.match_info["name"])
        if plan is None:
            return web.json_response({"reason": "NotFound", "message": "no plan"}, status=404)
        return web.json_response(plan)

    async def _put_plan(self, request: web.Request) -> web.StreamResponse:
        """Of a job's one ingest: it is the only one that writes it."""
        plan = await request.json()
        self._version += 1
        plan["metadata"]["resourceVersion"] = str(self._version)
        self._plans[plan["metadata"]["name"]] = plan
        return web.json_response(plan)

    async def _list_leases(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"metadata": {}, "items": [*self._leases.values()]})

    async def _get_lease(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self._leases[request.match_info["name"]])

    async def _put_lease(self, request: web.Request) -> web.StreamResponse:
        lease = await request.json()
        self._leases[lease["metadata"]["name"]] = lease
        return web.json_response(lease)

    async def _review(self, request: web.Request) -> web.StreamResponse:
        asked = (await request.json())["spec"]
        part = asked["token"].split(".")[1]
        pod = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))["pod"]
        extra = {
            "authentication.kubernetes.io/pod-name": [pod],
            "authentication.kubernetes.io/pod-uid": [f"uid-of-{pod}"],
        }
        user = {"username": f"system:serviceaccount:{NAMESPACE}:default", "extra": extra}
        status = {"authenticated": True, "audiences": asked["audiences"], "user": user}
        return web.json_response({"status": status})

    async def _access(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": {"allowed": True}})

    async def _pod(self, request: web.Request) -> web.StreamResponse:
        pod = request.match_info["name"]
        name, attempt = pod.removesuffix("-0").rsplit(".", 1)
        owner = {"kind": "Job", "controller": True, "uid": f"job-of-{name}"}
        labels = {names.LABEL_JOB_UID: _uid(name), names.LABEL_ATTEMPT: attempt}
        metadata = {"uid": f"uid-of-{pod}", "labels": labels, "ownerReferences": [owner]}
        return web.json_response({"metadata": metadata})

    async def _event(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await request.json(), status=201)


def kubeconfig(path: Path, port: int, authority: Path) -> None:
    """Write one that leads here."""
    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(authority)}
    path.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "played",
                "clusters": [{"name": "played", "cluster": cluster}],
                "users": [{"name": "played", "user": {"token": "any"}}],
                "contexts": [
                    {"name": "played", "context": {"cluster": "played", "user": "played"}}
                ],
            }
        )
    )
