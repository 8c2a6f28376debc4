"""A plain client of the API server: one call, one answer, no client library in between.

Tests ask for exactly one request and look at exactly its answer, so nothing here retries, caches
objects or guesses a type.
"""

import base64
import http.client
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import yaml

from testbed.errors import TestbedError

Object = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"


class ApiError(Exception):
    """An answer of the API server other than 2xx, with its Status object."""

    def __init__(self, method: str, path: str, code: int, body: Object) -> None:
        self.code = code
        self.body = body
        self.reason = str(body.get("reason", ""))
        self.message = str(body.get("message", body))
        super().__init__(f"{method} {path}: {code} {self.reason}: {self.message}")


class ApiClient:
    """Requests to one API server as one user, both from a kubeconfig's current context.

    Credentials that the kubeconfig holds as text are written to files beside it, since the ssl
    module reads nothing else: give it a kubeconfig in a folder of the test's own.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        config = yaml.safe_load(kubeconfig.read_text())
        context = _named(config["contexts"], config["current-context"], kubeconfig)["context"]
        cluster = _named(config["clusters"], context["cluster"], kubeconfig)["cluster"]
        user = _named(config["users"], context["user"], kubeconfig)["user"]
        self.server: str = cluster["server"]
        address = urlsplit(self.server)
        self._host = address.hostname or ""
        self._port = address.port or 443
        self._prefix = address.path.rstrip("/")
        self._tls = _tls(cluster, user, kubeconfig)
        self._headers = _headers(user, kubeconfig)
        self._paths: dict[str, tuple[str, str, bool]] = {}
        self._local = threading.local()  # http.client serves one thread at a time

    def request(
        self,
        method: str,
        path: str,
        body: Object | list[Any] | None = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
        deadline: float = 30.0,
    ) -> Object:
        """The decoded answer; `ApiError` if it is not 2xx, `OSError` if there is none."""
        code, data = self.raw(
            method, path, body, content_type=content_type, query=query, deadline=deadline
        )
        try:
            answer = json.loads(data) if data else {}
        except json.JSONDecodeError:
            answer = {"message": data.decode(errors="replace")}
        if not isinstance(answer, dict):
            answer = {"message": answer}
        if not 200 <= code < 300:
            raise ApiError(method, path, code, answer)
        return answer

    def raw(
        self,
        method: str,
        path: str,
        body: Object | list[Any] | None = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
        deadline: float = 30.0,
    ) -> tuple[int, bytes]:
        """The status code and the bytes of the answer, such as those of /metrics."""
        target = self._prefix + path + (f"?{urlencode(query)}" if query else "")
        data = b"" if body is None else json.dumps(body).encode()
        headers = list(self._headers)
        if data:
            headers += [("Content-Type", content_type), ("Content-Length", str(len(data)))]

        def once(connection: http.client.HTTPSConnection) -> tuple[int, bytes]:
            connection.putrequest(method, target)
            for name, value in headers:
                connection.putheader(name, value)
            connection.endheaders(data or None)
            answer = connection.getresponse()
            return answer.status, answer.read()

        try:
            if method == "GET":
                return self._over_kept_connection(once, deadline)
            # A connection of its own: on a kept one, an answer that does not come may mean that
            # the server had closed it while it was idle, or that it did what was asked and died.
            with closing(self._connect(deadline)) as connection:
                return once(connection)
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {self.server}{path}: {error!r}") from error

    def _connect(self, deadline: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(
            self._host, self._port, context=self._tls, timeout=deadline
        )

    def _over_kept_connection(
        self, once: Callable[[http.client.HTTPSConnection], tuple[int, bytes]], deadline: float
    ) -> tuple[int, bytes]:
        kept: http.client.HTTPSConnection | None = getattr(self._local, "connection", None)
        self._local.connection = None
        if kept is not None:
            try:
                if kept.sock is not None:
                    kept.sock.settimeout(deadline)
                answer = once(kept)
                self._local.connection = kept
                return answer
            except (ConnectionError, ssl.SSLError, http.client.HTTPException):
                kept.close()  # closed by the server while it was idle: ask on a fresh one
        fresh = self._connect(deadline)
        try:
            answer = once(fresh)
        except BaseException:
            fresh.close()
            raise
        self._local.connection = fresh
        return answer

    def path(self, kind: str, namespace: str | None = None, name: str | None = None) -> str:
        """The path of a kind, as `kubectl` names it: `Job`, `jobs`, `job` or `jobs.batch`."""
        key = kind.lower()
        if key not in self._paths:
            self._discover()
        if key not in self._paths:
            raise TestbedError(f"found no kind {kind!r} at {self.server}: is its CRD applied?")
        base, plural, namespaced = self._paths[key]
        middle = f"/namespaces/{namespace}" if namespaced and namespace else ""
        return f"{base}{middle}/{plural}" + (f"/{name}" if name else "")

    def _discover(self) -> None:
        groups = self.request("GET", "/apis")["groups"]
        bases = [("", "/api/v1")]
        bases += [(g["name"], f"/apis/{g['preferredVersion']['groupVersion']}") for g in groups]
        # A new one, whole: other threads read the present one, and may discover at the same time.
        paths: dict[str, tuple[str, str, bool]] = {}
        for group, base in bases:
            for resource in self.request("GET", base).get("resources", []):
                plural = resource["name"]
                if "/" in plural:
                    continue
                names = {plural, resource.get("singularName", ""), resource["kind"].lower()}
                names |= set(resource.get("shortNames", []))
                names |= {f"{name}.{group}" for name in names if group and name}
                for name in names - {""}:
                    # The first group wins, as with kubectl: core events before events.k8s.io.
                    paths.setdefault(name, (base, plural, bool(resource["namespaced"])))
        self._paths = paths

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object:
        return self.request("GET", self.path(kind, namespace, name))

    def list(
        self, kind: str, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        query = {"labelSelector": labels, "fieldSelector": fields}
        found = self.request(
            "GET", self.path(kind, namespace), query={k: v for k, v in query.items() if v}
        )
        items: list[Object] = found["items"]
        return items

    def watch(
        self, kind: str, name: str, namespace: str | None = None, *, since: str, seconds: int
    ) -> Iterator[Object]:
        """The object as it was after each change that follows the resource version `since`, for
        so many seconds; `ApiError` if the server does not know that version any more."""
        query = {
            "watch": "1",
            "fieldSelector": f"metadata.name={name}",
            "resourceVersion": since,
            "timeoutSeconds": str(seconds),
        }
        target = f"{self.path(kind, namespace)}?{urlencode(query)}"
        with closing(self._connect(seconds + 30.0)) as connection:
            try:
                connection.putrequest("GET", self._prefix + target)
                for header, value in self._headers:
                    connection.putheader(header, value)
                connection.endheaders()
                answer = connection.getresponse()
                if answer.status != 200:
                    said = {"message": answer.read().decode(errors="replace")}
                    raise ApiError("GET", target, answer.status, said)
                for line in answer:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError("GET", target, event["object"]["code"], event["object"])
                    found: Object = event["object"]
                    yield found
            except (http.client.HTTPException, json.JSONDecodeError) as error:
                raise ConnectionError(f"GET {self.server}{target}: {error!r}") from error

    def create(self, kind: str, body: Object, namespace: str | None = None) -> Object:
        namespace = namespace or body.get("metadata", {}).get("namespace")
        return self.request("POST", self.path(kind, namespace), body)

    def patch(
        self,
        kind: str,
        name: str,
        body: Object,
        namespace: str | None = None,
        *,
        subresource: str = "",
        content_type: str = MERGE_PATCH,
    ) -> Object:
        path = self.path(kind, namespace, name) + (f"/{subresource}" if subresource else "")
        return self.request("PATCH", path, body, content_type=content_type)

    def delete(
        self, kind: str, name: str, namespace: str | None = None, *, grace: int | None = None
    ) -> None:
        """Delete an object and, in the background, what it owns; one that is gone is fine."""
        options: Object = {"propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            self.request("DELETE", self.path(kind, namespace, name), options)
        except ApiError as error:
            if error.code != 404:
                raise


def _named(entries: Any, name: str, source: Path) -> Object:
    for entry in entries or []:
        if entry["name"] == name:
            found: Object = entry
            return found
    raise TestbedError(f"found nothing named {name!r} in the kubeconfig {source}")


def _tls(cluster: Object, user: Object, source: Path) -> ssl.SSLContext:
    authority = _content(cluster, "certificate-authority", source)
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    certificate = _file(user, "client-certificate", source)
    key = _file(user, "client-key", source)
    if certificate and key:
        context.load_cert_chain(certificate, key)
    return context


def _headers(user: Object, source: Path) -> list[tuple[str, str]]:
    if "exec" in user or "auth-provider" in user:
        raise TestbedError(
            f"{source} gets its credentials from a program, which the tests do not run: make a "
            "kubeconfig with a token or a client certificate for them"
        )
    headers = [("Accept", "application/json")]
    token: str | None = user.get("token")
    if not token and user.get("tokenFile"):
        token = (source.parent / user["tokenFile"]).read_text().strip()
    if token:
        headers.append(("Authorization", f"Bearer {token}"))
    if user.get("as"):
        headers.append(("Impersonate-User", user["as"]))
    headers += [("Impersonate-Group", group) for group in user.get("as-groups", [])]
    return headers


def _content(entry: Object, name: str, source: Path) -> bytes | None:
    if entry.get(f"{name}-data"):
        return base64.b64decode(str(entry[f"{name}-data"]))
    if entry.get(name):
        return (source.parent / str(entry[name])).read_bytes()
    return None


def _file(entry: Object, name: str, source: Path) -> Path | None:
    """A credential as a file, which is what the ssl module reads."""
    if entry.get(name):
        return source.parent / str(entry[name])
    data = _content(entry, name, source)
    if data is None:
        return None
    path = source.parent / f".{source.name}.{name}"
    path.touch(mode=0o600)
    path.write_bytes(data)
    return path
