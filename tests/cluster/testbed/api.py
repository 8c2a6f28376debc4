"""A plain client of the API server: one call, one answer, no client library in between.

Tests ask for exactly one request and look at exactly its answer, so nothing here retries, caches
objects or guesses a type.
"""

import base64
import json
import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
import yaml

from testbed.errors import TestbedError

Object = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
# One more try on a fresh connection: the server may have closed an old one while it was idle.
_AGAIN = urllib3.Retry(
    total=1, redirect=False, status=0, respect_retry_after_header=False, raise_on_status=False
)


class ApiError(Exception):
    """An answer of the API server other than 2xx, with its Status object."""

    def __init__(self, method: str, path: str, code: int, body: Object) -> None:
        self.code = code
        self.message = str(body.get("message", body))
        super().__init__(f"{method} {path}: {code} {body.get('reason', '')}: {self.message}")


class ApiClient:
    """Requests to one API server as one user, both of a kubeconfig that :mod:`testbed.kubeconfig`
    wrote. A client certificate is written to a file in its folder, as :mod:`ssl` reads files."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self.server: str = cluster["server"]
        authority = base64.b64decode(cluster["certificate-authority-data"])
        self._tls = ssl.create_default_context(cadata=authority.decode())
        if "client-key-data" in user:
            parts = (user[f"client-{part}-data"] for part in ("certificate", "key"))
            pair = kubeconfig.with_suffix(".pem")
            pair.touch(mode=0o600)
            pair.write_bytes(b"".join(map(base64.b64decode, parts)))
            self._tls.load_cert_chain(pair)
        self._headers = {"Accept": "application/json"}
        if "token" in user:
            self._headers["Authorization"] = f"Bearer {user['token']}"
        self._paths: dict[str, tuple[str, str, bool]] = {}
        self._persistent = self._connections()

    def _connections(self) -> urllib3.HTTPConnectionPool:
        return urllib3.connection_from_url(self.server, ssl_context=self._tls, maxsize=8)

    def request(
        self,
        method: str,
        path: str,
        body: Object | list[Any] | None = None,
        *,
        content_type: str = "application/json",
        query: Mapping[str, str] | None = None,
    ) -> Object:
        """The decoded answer; `ApiError` if it is not 2xx, `OSError` if there is none."""
        code, data = self.raw(method, path, body, content_type=content_type, query=query)
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
        """Status code and bytes of the answer, such as those of /metrics."""
        target = path + (f"?{urlencode(query)}" if query else "")
        headers = self._headers | ({} if body is None else {"Content-Type": content_type})
        data = None if body is None else json.dumps(body).encode()
        # A write has a connection of its own: on an old one, an answer that does not come may mean
        # that the server had closed it while it was idle, or that it did the write and died.
        reads = method == "GET"
        pool = self._persistent if reads else self._connections()
        try:
            answer = pool.urlopen(
                method, target, data, headers, retries=_AGAIN if reads else False, timeout=deadline
            )
            return answer.status, answer.data
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionError(f"{method} {self.server}{path}: {error!r}") from error
        finally:
            if not reads:
                pool.close()

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
        """The object after each change that follows the resource version `since`, for some seconds;
        `ApiError` if the server no longer knows that version."""
        query = {
            "watch": "1",
            "fieldSelector": f"metadata.name={name}",
            "resourceVersion": since,
            "timeoutSeconds": str(seconds),
        }
        target = f"{self.path(kind, namespace)}?{urlencode(query)}"
        try:
            with self._connections() as pool:
                answer = pool.urlopen(
                    "GET", target, headers=self._headers, retries=False,
                    timeout=seconds + 30.0, preload_content=False,
                )  # fmt: skip
                if answer.status != 200:
                    said = {"message": answer.data.decode(errors="replace")}
                    raise ApiError("GET", target, answer.status, said)
                for line in answer:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise ApiError("GET", target, event["object"]["code"], event["object"])
                    found: Object = event["object"]
                    yield found
        except (urllib3.exceptions.HTTPError, json.JSONDecodeError) as error:
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
        """Delete an object and, in the background, those it owns; a missing one is no error."""
        options: Object = {"propagationPolicy": "Background"}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            self.request("DELETE", self.path(kind, namespace, name), options)
        except ApiError as error:
            if error.code != 404:
                raise
