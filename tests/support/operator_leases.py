"""Leases of the operator and of its ingest, in an API server in this process."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable

from fake_api import FakeCluster, Object

from pipemorph_operator.kube.client import build_path
from pipemorph_operator.names import LABEL_LEADER

INGEST = {"app.kubernetes.io/component": "ingest"}


class Leases(FakeCluster):
    """The Leases of namespace ``system``, and a client of them."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.before_write: Callable[[], Awaitable[None]] | None = None
        """Callback that is run once, when the next write of a Lease is on its way."""

    def another(self) -> Leases:
        """Second client of the same Leases."""
        made = copy.copy(self)
        made.away, made.before_write = False, None
        return made

    async def arrives(self, verb: str, url: str) -> None:
        if verb in ("create", "replace") and "/leases" in url:
            action, self.before_write = self.before_write, None
            if action is not None:
                await action()
        if self.away:
            raise ConnectionRefusedError("away")

    def lease(self, name: str) -> Object:
        return self.objects[build_path("Lease", "system", name)]

    def spec(self, name: str) -> Object:
        return self.lease(name)["spec"]

    def take(self, name: str, **spec: object) -> None:
        """A write of a Lease by others."""
        metadata = {"namespace": "system", "name": name}
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        self.put(kind | {"metadata": metadata, "spec": spec})

    def lose(self, name: str) -> None:
        """A Lease is deleted."""
        del self.objects[build_path("Lease", "system", name)]

    def add(self, name: str, *, leads: bool = False, **labels: str) -> None:
        """A pod, of the ingest unless it has other labels."""
        found = (labels or INGEST) | ({LABEL_LEADER: "true"} if leads else {})
        about = {"namespace": "system", "name": name, "labels": found}
        self.put({"apiVersion": "v1", "kind": "Pod", "metadata": about})

    def labelled(self) -> list[str]:
        """Names of the pods that have the leader's label."""
        pods = [each["metadata"] for url, each in sorted(self.objects.items()) if "/pods/" in url]
        return [pod["name"] for pod in pods if LABEL_LEADER in pod["labels"]]

    def holders(self) -> dict[str, str]:
        """Names of all Leases that are held, and by whom."""
        leases = [each for url, each in sorted(self.objects.items()) if "/leases/" in url]
        held = {each["metadata"]["name"]: each["spec"]["holderIdentity"] for each in leases}
        return {name: holder for name, holder in held.items() if holder}
