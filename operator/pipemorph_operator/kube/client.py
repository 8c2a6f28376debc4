"""Kubernetes API client: plain dictionaries, server-side apply, lists and watches.

Thin layer over ``kubernetes.aio``: uses its configuration, credentials and connection pool, but not
its models. Every request has a time limit; every error response raises :class:`KubeApiError` with
the API server's message.
"""

from __future__ import annotations

import copy
import json
import os
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
"""Duration after which the API server ends a watch."""
SILENCE_SECONDS = 90.0
"""Longest silence of a live watch: bookmarks arrive every minute."""
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
MAX_CONNECTIONS = 64

_PLURALS = {
    "Service": ("v1", "services"),
    "ConfigMap": ("v1", "configmaps"),
    "Secret": ("v1", "secrets"),
    "Pod": ("v1", "pods"),
    "Event": ("v1", "events"),
    "Node": ("v1", "nodes"),
    "Job": ("batch/v1", "jobs"),
    "Lease": ("coordination.k8s.io/v1", "leases"),
    "NetworkPolicy": ("networking.k8s.io/v1", "networkpolicies"),
    "PipeMorphJob": (f"{API_GROUP}/{VERSION}", PLURAL),
}


class KubeApiError(Exception):
    """Error returned by the API server: HTTP ``status``, its ``reason`` and ``message``, and the
    reasons of its ``causes``."""

    def __init__(self, status: int, reason: str, message: str, causes: Sequence[str] = ()) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.causes = tuple(causes)

    @property
    def is_namespace_terminating(self) -> bool:
        """True if the request was rejected because the namespace is being deleted."""
        return "NamespaceTerminating" in self.causes


REQUEST_ERRORS = (KubeApiError, aiohttp.ClientError, TimeoutError, OSError)
"""Exceptions of a failed request."""


def describe_error(error: Exception) -> str:
    """Message of the error, or its type if it has none."""
    return str(error) or type(error).__name__


def build_path(
    kind: str, namespace: str | None, name: str | None = None, *, api_version: str | None = None
) -> str:
    """URL path of an object or a list."""
    version, plural = _PLURALS.get(kind, (api_version or "", f"{kind.lower()}s"))
    version = api_version or version
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    where = f"/namespaces/{quote(namespace)}" if namespace else ""
    return f"{root}{where}/{plural}" + (f"/{quote(name)}" if name else "")


def build_object_path(obj: Mapping[str, Any]) -> str:
    metadata = obj["metadata"]
    namespace = metadata.get("namespace")
    return build_path(obj["kind"], namespace, metadata["name"], api_version=obj["apiVersion"])


class KubeClient:
    """Client of one API server, used with ``async with``."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._client: ApiClient | None = None
        self._permit: Callable[[], float] | None = None

    @staticmethod
    async def from_environment() -> KubeClient:
        """Client for KUBECONFIG, else the pod's service account, else ``~/.kube/config``. Raises
        the errors of the loaders of ``kubernetes.aio``."""
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
        configuration.connection_pool_maxsize = MAX_CONNECTIONS
        return KubeClient(configuration)

    async def __aenter__(self) -> KubeClient:
        self._client = ApiClient(self._configuration)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.close()  # type: ignore[no-untyped-call]
            self._client = None

    def with_write_permit(self, permit: Callable[[], float]) -> KubeClient:
        """Copy of this client, with its connections, that calls ``permit`` right before each write.
        ``permit`` returns the remaining seconds in which writes are allowed, or raises."""
        made = copy.copy(self)
        made._permit = permit
        return made

    # --- one request ----------------------------------------------------------------------

    async def get(self, url: str) -> Object | None:
        """Object at the URL path; None if it does not exist."""
        try:
            return await self._request_json("GET", url)
        except KubeApiError as refused:
            if refused.status == 404:
                return None
            raise

    async def list(
        self, url: str, *, labels: str | None = None, fields: str | None = None
    ) -> list[Object]:
        """Objects of a list that match the label and field selectors; reads page by page."""
        return [
            item
            async for page in self.list_pages(url, labels=labels, fields=fields)
            for item in page.get("items") or []
        ]

    async def list_metadata(self, url: str) -> AsyncIterator[Object]:
        """Metadata of all objects of a list, without the rest: a job may be half a MiB large."""
        async for page in self.list_pages(url, accept=METADATA_ONLY):
            for item in page.get("items") or []:
                yield item["metadata"]

    async def list_pages(
        self,
        url: str,
        *,
        labels: str | None = None,
        fields: str | None = None,
        limit: int = 500,
        accept: str = "application/json",
    ) -> AsyncIterator[Object]:
        """Pages of a list, of at most ``limit`` objects each; together one consistent snapshot.
        Raises :class:`KubeApiError` with 410 if the API server has discarded it meanwhile."""
        query = {"limit": str(limit)} | _build_selectors(labels, fields)
        while True:
            page = await self._request_json("GET", url, query, accept=accept)
            yield page
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return
            query["continue"] = token

    async def apply(self, obj: Object, owner: str, *, subresource: str = "") -> Object:
        """Server-side apply. Overrides changes that others made to fields of ``owner``."""
        url = build_object_path(obj) + (f"/{subresource}" if subresource else "")
        query = {"fieldManager": owner, "force": "true"}
        return await self._request_json("PATCH", url, query, obj, "application/apply-patch+yaml")

    async def create(self, obj: Object, owner: str) -> Object | None:
        """Create an object; None if one of that name exists. The API server rejects an unknown
        field with its path, whereas an apply with one fails with an internal error (500)."""
        url = build_path(obj["kind"], obj["metadata"]["namespace"], api_version=obj["apiVersion"])
        query = {"fieldManager": owner, "fieldValidation": "Strict"}
        try:
            return await self._request_json("POST", url, query, obj)
        except KubeApiError as refused:
            if refused.status == 409 and refused.reason == "AlreadyExists":
                return None
            raise

    async def replace(self, obj: Object) -> Object:
        """Replace an object as it was read. Raises 409 if it has changed since."""
        return await self._request_json("PUT", build_object_path(obj), {}, obj)

    async def patch(self, url: str, changes: Object, owner: str, *, merge: bool = False) -> Object:
        """Strategic merge patch; with ``merge`` a JSON merge patch, as custom resources need."""
        query = {"fieldManager": owner}
        kind = f"application/{'' if merge else 'strategic-'}merge-patch+json"
        return await self._request_json("PATCH", url, query, changes, kind)

    async def post(self, url: str, body: Object) -> Object:
        return await self._request_json("POST", url, {}, body)

    async def delete(
        self,
        url: str,
        *,
        uid: str | None = None,
        propagation: str = "Background",
        grace: int | None = None,
    ) -> None:
        """Delete an object. Succeeds also if it does not exist or has another UID. ``grace``:
        seconds in which a pod may end; 0: without waiting for its node."""
        body: Object = {"propagationPolicy": propagation}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            await self._request_json("DELETE", url, {}, body)
        except KubeApiError as refused:
            if refused.status not in (404, 409):
                raise

    async def _request_json(
        self,
        method: str,
        url: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        *,
        accept: str = "application/json",
    ) -> Object:
        response = await self._send_request(
            method, url, query, body, content_type=content_type, accept=accept
        )
        try:
            data = await response.read()
        finally:
            response.release()
        answer: Object = json.loads(data) if data else {}
        return answer

    async def _send_request(
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
        if self._permit is not None and method != "GET":
            limit = aiohttp.ClientTimeout(total=min(REQUEST_SECONDS, self._permit()))
        answer = await self._client.rest_client.request(  # type: ignore[no-untyped-call]
            method, whole, headers=headers, body=body, _request_timeout=limit
        )
        response: aiohttp.ClientResponse = answer.response
        API_REQUESTS.labels(verb=method, code=str(response.status)).inc()
        if response.status >= 400:
            data = await response.read()
            response.release()
            raise _parse_error(response.status, data)
        return response

    async def watch(
        self, url: str, version: str, *, labels: str | None = None, fields: str | None = None
    ) -> AsyncIterator[tuple[str, Object]]:
        """Changes of objects that match the selectors since the resource version: ``(type,
        object)``, bookmarks included, until the API server ends the watch. Raises
        :class:`KubeApiError`, with 410 if the API server has discarded that version."""
        query = _build_selectors(labels, fields) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=SILENCE_SECONDS)
        response = await self._send_request("GET", url, query, None, timeout=timeout)
        try:
            async for line in response.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise KubeApiError(
                        status.get("code", 500), status.get("reason", ""), status.get("message", "")
                    )
                yield event["type"], event["object"]
        finally:
            response.close()


def _build_selectors(labels: str | None, fields: str | None = None) -> dict[str, str]:
    selectors = {"labelSelector": labels, "fieldSelector": fields}
    return {name: selector for name, selector in selectors.items() if selector}


def _parse_error(status: int, data: bytes) -> KubeApiError:
    try:
        answer = json.loads(data)
        causes = (answer.get("details") or {}).get("causes") or []
        reasons = [cause.get("reason", "") for cause in causes]
        return KubeApiError(status, answer.get("reason", ""), answer.get("message", ""), reasons)
    except (ValueError, AttributeError):
        return KubeApiError(status, "", data[:300].decode(errors="replace"))
