"""The Kubernetes API as this product uses it: plain objects, server-side apply, watches.

A thin layer over ``kubernetes.aio``: its configuration, credentials and connection pool, none of
its thousands of models. Every request has a time limit; every refusal is one exception that
carries the API server's own words.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import load_incluster_config, load_kube_config

from pipemorph_operator.metrics import API_REQUESTS
from pipemorph_operator.names import API_GROUP, PLURAL, VERSION

Object = dict[str, Any]

REQUEST_SECONDS = 30.0
WATCH_SECONDS = 300
"""The API server ends a watch after this; it is opened again where it ended."""
SILENCE_SECONDS = 90.0
"""Bookmarks come every minute: a watch without any line for this long is dead."""
WATCHED_AT_A_TIME = 50
"""Objects of one part of a list whose objects are wanted: some may weigh half a MiB."""
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
CONNECTIONS = 64
FIRST_RETRY_SECONDS = 0.2
LAST_RETRY_SECONDS = 10.0

_PLURALS = {
    "Service": ("v1", "services"),
    "ConfigMap": ("v1", "configmaps"),
    "Secret": ("v1", "secrets"),
    "Pod": ("v1", "pods"),
    "Event": ("v1", "events"),
    "Job": ("batch/v1", "jobs"),
    "PipeMorphJob": (f"{API_GROUP}/{VERSION}", PLURAL),
}


class ApiRefused(Exception):
    """The API server answered with an error. ``status`` is HTTP's, ``message`` its own, and
    ``causes`` are the reasons of its causes."""

    def __init__(self, status: int, reason: str, message: str, causes: Sequence[str] = ()) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.causes = tuple(causes)

    @property
    def namespace_ends(self) -> bool:
        """Whether nothing more is taken because the namespace is being deleted."""
        return "NamespaceTerminating" in self.causes


def path(
    kind: str, namespace: str | None, name: str | None = None, *, api_version: str | None = None
) -> str:
    """URL path of an object or a list."""
    version, plural = _PLURALS.get(kind, (api_version or "", f"{kind.lower()}s"))
    version = api_version or version
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    where = f"/namespaces/{quote(namespace)}" if namespace else ""
    return f"{root}{where}/{plural}" + (f"/{quote(name)}" if name else "")


def path_of(obj: Mapping[str, Any]) -> str:
    metadata = obj["metadata"]
    return path(obj["kind"], metadata["namespace"], metadata["name"], api_version=obj["apiVersion"])


class Cluster:
    """One API server. ``async with`` it. Uses KUBECONFIG, else the pod's service account."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._client: ApiClient | None = None

    @staticmethod
    async def configured() -> Cluster:
        """From the environment. Raises what the loaders raise: nothing works without it."""
        configuration = Configuration()
        kubeconfig = os.environ.get("KUBECONFIG")
        if kubeconfig:
            await load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, client_configuration=configuration, persist_config=False
            )
        elif "KUBERNETES_SERVICE_HOST" in os.environ:
            load_incluster_config(  # type: ignore[no-untyped-call]
                client_configuration=configuration
            )
        else:
            default = Path("~/.kube/config").expanduser()
            await load_kube_config(  # type: ignore[no-untyped-call]
                config_file=str(default), client_configuration=configuration, persist_config=False
            )
        configuration.connection_pool_maxsize = CONNECTIONS
        return Cluster(configuration)

    async def __aenter__(self) -> Cluster:
        self._client = ApiClient(self._configuration)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()  # type: ignore[no-untyped-call]
            self._client = None

    # --- one request ----------------------------------------------------------------------

    async def get(self, url: str) -> Object | None:
        """The object, or None if there is none."""
        try:
            return await self._json("GET", url)
        except ApiRefused as refused:
            if refused.status == 404:
                return None
            raise

    async def list(
        self, url: str, *, labels: str | None = None, fields: str | None = None
    ) -> list[Object]:
        """All objects of a list, in chunks; those with the labels and fields of two selectors."""
        items: list[Object] = []
        token = ""
        while True:
            query = {"limit": "500"}
            if labels:
                query["labelSelector"] = labels
            if fields:
                query["fieldSelector"] = fields
            if token:
                query["continue"] = token
            answer = await self._json("GET", url, query)
            items += answer.get("items") or []
            token = (answer.get("metadata") or {}).get("continue") or ""
            if not token:
                return items

    async def metadata(self, url: str, *, labels: str = "") -> AsyncIterator[Object]:
        """Metadata of all objects of a list, without the objects: a job may weigh half a MiB."""
        query = {"labelSelector": labels} if labels else {}
        async for page in self._pages(url, query, limit=500, accept=METADATA_ONLY):
            for item in page.get("items") or []:
                yield item["metadata"]

    async def _pages(
        self, url: str, query: Mapping[str, str], *, limit: int, accept: str = "application/json"
    ) -> AsyncIterator[Object]:
        """A list in parts, each of them a list of at most ``limit`` objects."""
        token = ""
        while True:
            part = {**query, "limit": str(limit), **({"continue": token} if token else {})}
            page = await self._json("GET", url, part, accept=accept)
            yield page
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return

    async def apply(self, obj: Object, owner: str, *, subresource: str = "") -> Object:
        """Server-side apply. Fields of ours that others changed become ours again."""
        url = path_of(obj) + (f"/{subresource}" if subresource else "")
        query = {"fieldManager": owner, "force": "true"}
        return await self._json("PATCH", url, query, obj, "application/apply-patch+yaml")

    async def create(self, obj: Object, owner: str) -> Object | None:
        """The object as created, or None if one of that name exists. An unknown field is refused
        with its path, where an apply gets a fault of the server's (500)."""
        url = path(obj["kind"], obj["metadata"]["namespace"], api_version=obj["apiVersion"])
        query = {"fieldManager": owner, "fieldValidation": "Strict"}
        try:
            return await self._json("POST", url, query, obj)
        except ApiRefused as refused:
            if refused.status == 409 and refused.reason == "AlreadyExists":
                return None
            raise

    async def post(self, url: str, body: Object) -> Object:
        return await self._json("POST", url, {}, body)

    async def delete(
        self, url: str, *, uid: str | None = None, propagation: str = "Background"
    ) -> None:
        """Delete an object; that there is none, or another one by now, is as good."""
        body: Object = {"propagationPolicy": propagation}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            await self._json("DELETE", url, {}, body)
        except ApiRefused as refused:
            if refused.status not in (404, 409):
                raise

    async def _json(
        self,
        method: str,
        url: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        *,
        accept: str = "application/json",
    ) -> Object:
        response = await self._request(
            method, url, query, body, content_type=content_type, accept=accept
        )
        try:
            data = await response.read()
        finally:
            response.release()
        answer: Object = json.loads(data) if data else {}
        return answer

    async def _request(
        self,
        method: str,
        url: str,
        query: Mapping[str, str] | None,
        body: Object | None,
        *,
        content_type: str = "application/json",
        accept: str = "application/json",
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.ClientResponse:
        if self._client is None:
            raise RuntimeError("the connection to the API server is not open; use async with")
        headers = {"Accept": accept, "Content-Type": content_type}
        auth = await self._configuration.auth_settings()
        if "BearerToken" in auth:
            headers["authorization"] = auth["BearerToken"]["value"] or ""
        whole = f"{self._configuration.host}{url}" + (f"?{urlencode(query)}" if query else "")
        limit = timeout or aiohttp.ClientTimeout(total=REQUEST_SECONDS)
        answer = await self._client.rest_client.request(  # type: ignore[no-untyped-call]
            method, whole, headers=headers, body=body, _request_timeout=limit
        )
        response: aiohttp.ClientResponse = answer.response
        API_REQUESTS.labels(verb=method, code=str(response.status)).inc()
        if response.status >= 400:
            data = await response.read()
            response.release()
            raise _refusal(response.status, data)
        return response

    # --- a watch --------------------------------------------------------------------------

    async def watch(
        self,
        url: str,
        on_error: Callable[[Exception], None],
        on_sign: Callable[[], None] = lambda: None,
        *,
        labels: str | None = None,
    ) -> AsyncIterator[tuple[str, Object]]:
        """All objects, then every change, for ever: ``(type, object)``. Those with the labels of
        a selector, if one is given.

        ``("SYNCED", {})`` follows a complete list; what was known before and is not in it is
        gone. A watch that ends, dies or falls behind goes on, or starts with another list.
        ``on_sign`` hears of everything that comes, changes or not, ``on_error`` of what is wrong.
        """
        retry = FIRST_RETRY_SECONDS
        version = ""
        selected = {"labelSelector": labels} if labels else {}
        while True:
            try:
                if not version:
                    async for page in self._pages(url, selected, limit=WATCHED_AT_A_TIME):
                        for item in page.get("items") or []:
                            yield "LISTED", item
                    # That of all parts: they are of one moment.
                    version = page["metadata"]["resourceVersion"]
                    on_sign()
                    yield "SYNCED", {}
                async for kind, obj in self._watch_once(url, version, selected):
                    retry = FIRST_RETRY_SECONDS
                    version = obj["metadata"]["resourceVersion"]
                    on_sign()
                    if kind != "BOOKMARK":
                        yield kind, obj
            except ApiRefused as refused:
                on_error(refused)
                if refused.status == 410:
                    version = ""
                    continue
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                on_error(error)
            else:
                continue  # The server ended it, as it does every few minutes.
            await asyncio.sleep(retry * random.uniform(0.75, 1.25))
            retry = min(2 * retry, LAST_RETRY_SECONDS)

    async def _watch_once(
        self, url: str, version: str, selected: Mapping[str, str]
    ) -> AsyncIterator[tuple[str, Object]]:
        query = {
            **selected,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_SECONDS)
        response = await self._request("GET", url, query, None, timeout=timeout)
        try:
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise ApiRefused(
                        status.get("code", 500), status.get("reason", ""), status.get("message", "")
                    )
                yield event["type"], event["object"]
        finally:
            response.close()


def _refusal(status: int, data: bytes) -> ApiRefused:
    try:
        said = json.loads(data)
        causes = (said.get("details") or {}).get("causes") or []
        reasons = [cause.get("reason", "") for cause in causes]
        return ApiRefused(status, said.get("reason", ""), said.get("message", ""), reasons)
    except (ValueError, AttributeError):
        return ApiRefused(status, "", data[:300].decode(errors="replace"))
