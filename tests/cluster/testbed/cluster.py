"""Cluster of a test, and the few things every test does with it."""

import base64
import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from testbed import tools
from testbed.api import STRATEGIC_MERGE_PATCH, ApiClient, ApiError, Object
from testbed.controlplane import ControlPlane
from testbed.kubeconfig import write_kubeconfig
from testbed.pki import sign_es256
from testbed.processes import output
from testbed.waiting import NotYet, wait_for

Condition = str | Callable[[Object], object]

# A range that is not routed (RFC 2544, benchmarks), for pods that run nowhere.
_FAKE_IPS = itertools.count(1)
"""Last 16 bits of addresses. No generator: threads take from it together."""


class Cluster:
    """A cluster with administrator's rights and a control plane of its own."""

    def __init__(self, directory: Path, control_plane: ControlPlane) -> None:
        self.directory = directory
        self.admin = control_plane.admin
        self.control_plane = control_plane
        self.client = ApiClient(self.admin)

    @classmethod
    @contextmanager
    def own(cls, directory: Path) -> Iterator["Cluster"]:
        """A cluster with a control plane of its own, gone after the block."""
        plane = ControlPlane(directory)
        plane.start()
        try:
            yield cls(directory, plane)
        finally:
            plane.stop()

    @property
    def server(self) -> str:
        return self.client.server

    @property
    def version(self) -> str:
        version: str = self.client.request("GET", "/version")["gitVersion"]
        return version

    # --- programs -------------------------------------------------------------------------

    def kubectl(
        self,
        *arguments: str,
        input: str | None = None,
        deadline: float = 60.0,
    ) -> str:
        """Output of kubectl; `TestbedError` with its complaint if it fails."""
        return output(
            [tools.find("kubectl"), f"--kubeconfig={self.admin}", *arguments],
            input=input,
            environment=self._environment(),
            deadline=deadline,
        )

    def helm(self, *arguments: str) -> str:
        """Output of helm; `TestbedError` with its complaint if it fails."""
        program = tools.find("helm")
        environment = self._environment() | {
            "KUBECONFIG": str(self.admin),
            # Not the plugins, repositories and caches of the user who runs the tests.
            **{
                f"HELM_{name}_HOME": str(self.directory / "helm" / name.lower())
                for name in ("CACHE", "CONFIG", "DATA")
            },
        }
        return output([program, *arguments], environment=environment, deadline=120.0)

    def _environment(self) -> dict[str, str]:
        # Discovery is cached by address, and a later cluster may get the address of an earlier one.
        return {
            "KUBECACHEDIR": str(self.directory / "kubectl-cache"),
            "HOME": str(self.directory / "home"),
        }

    def apply(self, manifest: str | Object | Sequence[Object], *arguments: str) -> None:
        """`kubectl apply` of YAML text, an object or several."""
        if not isinstance(manifest, str):
            objects = [manifest] if isinstance(manifest, dict) else manifest
            manifest = yaml.safe_dump_all(objects)
        self.kubectl("apply", "-f", "-", *arguments, input=manifest)

    # --- users ----------------------------------------------------------------------------

    def kubeconfig(self, user: str) -> Path:
        """A kubeconfig of a user with only the bound rights, who signs in with a certificate."""
        return self.control_plane.kubeconfig(f"user-{secrets.token_hex(4)}", user)

    def kubeconfig_of_token(self, token: str, name: str = "token") -> Path:
        """A kubeconfig of a token's owner, such as the operator's service account."""
        return write_kubeconfig(
            self.directory / "kubeconfig" / f"{name}-{secrets.token_hex(4)}.yaml",
            server=self.server,
            authority=self.control_plane.authority.pair.certificate.read_bytes(),
            user=name,
            token=token,
        )

    def service_account_token(
        self,
        namespace: str,
        name: str,
        audience: str | None = None,
        bound_pod: str | None = None,
        seconds: int = 3600,
    ) -> str:
        """A token as the kubelet projects it: for one audience, bound to one pod.

        Kubernetes grants no less than 600 seconds; see `expired` for one whose time is over.
        """
        spec: Object = {"expirationSeconds": seconds}
        if audience is not None:
            spec["audiences"] = [audience]
        if bound_pod is not None:
            pod = self.client.get("pods", bound_pod, namespace)
            spec["boundObjectRef"] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": bound_pod,
                "uid": pod["metadata"]["uid"],
            }
        answer = self.client.request(
            "POST", f"{self.client.path('serviceaccounts', namespace, name)}/token", {"spec": spec}
        )
        token: str = answer["status"]["token"]
        return token

    def expired(self, token: str, seconds: int = 60) -> str:
        """Token as it would be `seconds` after its end, signed by the cluster's key."""
        key = self.control_plane.token_key
        head, body, _ = token.split(".")
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        shift = int(time.time()) - seconds - int(claims["exp"])
        for name in ("exp", "iat", "nbf"):
            claims[name] += shift
        body = _base64url(json.dumps(claims).encode())
        signature = sign_es256(key, f"{head}.{body}".encode())
        return f"{head}.{body}.{_base64url(signature)}"

    # --- objects --------------------------------------------------------------------------

    @contextmanager
    def namespace(self, prefix: str = "test") -> Iterator[str]:
        """A namespace of one test; its deletion is not waited for, the next test has its own."""
        name = f"{prefix}-{secrets.token_hex(3)}"
        self.client.create("namespaces", {"metadata": {"name": name}})
        # A pod cannot be created before the namespace's default service account.
        self.wait("serviceaccounts", "default", lambda _: True, namespace=name)
        try:
            yield name
        finally:
            self.client.delete("namespaces", name)

    def wait(
        self,
        kind: str,
        name: str,
        condition: Condition,
        deadline: float = 120.0,
        *,
        namespace: str | None = None,
    ) -> Object:
        """Wait for an object and return it as it was then.

        `condition` is a condition type that must be True (`"Complete"`), or one with its status
        (`"LinksHealthy=False"`), or the word `"deleted"`, or a function of the object that returns
        something true or raises `NotYet`. The error of a missed deadline shows the object's last
        status and its events.
        """
        last: Object = {}

        def look() -> Object | None:
            nonlocal last
            try:
                last = self.client.get(kind, name, namespace)
            except ApiError as error:
                if error.code == 404 and condition == "deleted":
                    return last or {"metadata": {"name": name}}
                # 5xx: etcd or the API server were not given the processor for a while.
                if error.code in {404, 429} or error.code >= 500:
                    raise NotYet(error.message) from None
                raise
            except OSError as error:
                raise NotYet(f"no answer from {self.server}: {error!r}") from None
            if condition == "deleted":
                finalizers = last["metadata"].get("finalizers", [])
                raise NotYet(f"it still exists, with finalizers {finalizers}")
            return last if _holds(last, condition) else None

        def details() -> str:
            status = json.dumps(last.get("status", {}), indent=1)
            try:
                events = self.events(kind, name, namespace)
            except (ApiError, OSError) as error:
                events = f"its events could not be listed: {error!r}"
            return f"last status: {status}\n{events}"

        what = condition if isinstance(condition, str) else "the condition"
        return wait_for(f"{what} of {kind} {name}", look, deadline, details=details)

    def events(self, kind: str, name: str, namespace: str | None = None) -> str:
        """The object's events, one per line, oldest first."""
        if namespace is None:
            return ""
        found = self.client.list("events", namespace, fields=f"involvedObject.name={name}")
        found.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime")))
        return "\n".join(
            f"  {event['type']} {event['reason']}: {event.get('message', '')}" for event in found
        )

    # --- in place of nodes ----------------------------------------------------------------

    def fake_node(
        self,
        name: str,
        labels: Mapping[str, str] | None = None,
        resources: Mapping[str, str] | None = None,
    ) -> None:
        """A node that is only an object: ready, with resources, and no kubelet."""
        self.client.create("nodes", {"metadata": {"name": name, "labels": dict(labels or {})}})
        # The API server taints a new node; its creation cannot prevent that.
        self.client.patch("nodes", name, {"spec": {"taints": None}})
        have = {"cpu": "64", "memory": "256Gi", "pods": "500"} | dict(resources or {})
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        status = {
            "capacity": have,
            "allocatable": have,
            "conditions": [ready | _times("lastTransitionTime", "lastHeartbeatTime")],
        }
        self.client.patch("nodes", name, {"status": status}, subresource="status")

    def fake_pod_running(self, namespace: str, pod: str, *, node: str | None = None) -> Object:
        """Report a pod as running and ready, as its kubelet would.

        Without `node` the pod stays unbound, so that the API server deletes it at once: a bound pod
        waits for its kubelet (`fake_pod_gone`).
        """
        if node is not None:
            self.client.request(
                "POST",
                f"{self.client.path('pods', namespace, pod)}/binding",
                {"metadata": {"name": pod}, "target": {"kind": "Node", "name": node}},
            )
        spec = self.client.get("pods", pod, namespace)["spec"]
        number = next(_FAKE_IPS)
        address = f"198.18.{number >> 8}.{number & 255}"
        running = {"running": _times("startedAt")}
        return self._pod_status(
            namespace,
            pod,
            {
                "phase": "Running",
                "podIP": address,
                "podIPs": [{"ip": address}],
                **_times("startTime"),
                "conditions": [
                    {"type": kind, "status": "True"} | _times("lastTransitionTime")
                    for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
                ],
                "containerStatuses": [
                    _container(container, running, ready=True) for container in spec["containers"]
                ],
            },
        )

    def fake_pod_succeeded(self, namespace: str, pod: str) -> Object:
        return self._fake_pod_ended(namespace, pod, exit_code=0, reason="Completed")

    def fake_pod_failed(self, namespace: str, pod: str, *, exit_code: int = 1) -> Object:
        return self._fake_pod_ended(namespace, pod, exit_code=exit_code, reason="Error")

    def fake_pod_gone(self, namespace: str, pod: str) -> None:
        """Let a deleted pod go, as its kubelet does once its containers have ended."""
        self.client.delete("pods", pod, namespace, grace=0)

    def _fake_pod_ended(self, namespace: str, pod: str, *, exit_code: int, reason: str) -> Object:
        phase = "Failed" if exit_code else "Succeeded"
        spec = self.client.get("pods", pod, namespace)["spec"]
        state = {
            "terminated": {"exitCode": exit_code, "reason": reason}
            | _times("startedAt", "finishedAt")
        }
        not_ready = {"status": "False", "reason": f"Pod{phase}"} | _times("lastTransitionTime")
        ended = [{"type": kind} | not_ready for kind in ("ContainersReady", "Ready")]
        return self._pod_status(
            namespace,
            pod,
            {
                "phase": phase,
                "conditions": ended,
                "containerStatuses": [
                    _container(container, state, ready=False) for container in spec["containers"]
                ],
            },
        )

    def _pod_status(self, namespace: str, pod: str, status: Object) -> Object:
        return self.client.patch(
            "pods",
            pod,
            {"status": status},
            namespace,
            subresource="status",
            content_type=STRATEGIC_MERGE_PATCH,
        )

    # --- its own control plane ------------------------------------------------------------

    def logs(self, lines: int = 30) -> str:
        """The end of every log of the control plane, for a failure's report."""
        return "\n".join(process.log_end(lines) for process in self.control_plane.processes)


def _holds(found: Object, condition: Condition) -> bool:
    if not isinstance(condition, str):
        return bool(condition(found))
    kind, _, status = condition.partition("=")
    conditions = found.get("status", {}).get("conditions") or []  # A new CRD has null there.
    for entry in conditions:
        if entry["type"] == kind:
            if entry["status"] == (status or "True"):
                return True
            said = f"{entry.get('reason', '')} {entry.get('message', '')}".strip()
            raise NotYet(f"found {kind}={entry['status']} ({said})")
    raise NotYet(f"found no condition {kind}, only {[entry['type'] for entry in conditions]}")


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _times(*names: str) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return dict.fromkeys(names, now)


def _container(spec: Object, state: Object, *, ready: bool) -> Object:
    return {
        "name": spec["name"],
        "image": spec["image"],
        "imageID": "",
        "ready": ready,
        "restartCount": 0,
        "state": state,
    }
