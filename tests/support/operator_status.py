"""An API server's part in writes of one job's status, for tests of those who write.

Its rules are those of kube-apiserver 1.37; tests/cluster/test_operator_ingest.py asks it.
"""

from __future__ import annotations

import copy
import json
import time
from datetime import UTC, datetime
from itertools import count
from typing import Any

from observing import trained
from operator_objects import body

from pipemorph.ingest import RestartHandler
from pipemorph.spec.job_spec import JobSpec
from pipemorph_operator import names
from pipemorph_operator.ingest.job_store import ClusterJobStore
from pipemorph_operator.kube.client import KubeApiError, build_path

KEY = ("team", "gpt")
_sequence = count(1)
"""Numbers of reports: each is newer than those before."""


def spec_of(stages: int = 4, replicas: int = 1, **fields: Any) -> JobSpec:
    given = body(stages=stages, **fields)["spec"]
    given["parallelism"]["replicas"] = replicas
    return JobSpec.model_validate(given)


def hear(store: ClusterJobStore, *indices: int, now: float | None = None, **fields: Any) -> None:
    """The job's agent reports finished iterations, as of ``trained``. ``now``: wall clock."""
    controller = store.find_job(*KEY)
    assert controller is not None
    sent = trained(*indices, **{"sequence": next(_sequence)} | fields)
    controller.process_report(sent, time.time() if now is None else now)


async def tell(desk: RestartHandler, pod: int, wait: str = "0", **fields: Any) -> dict[str, Any]:
    """Report from the launcher of a pod that its ranks are gone, or what the fields say. Returns
    the answer."""
    given: dict[str, Any] = {"attempt": 0, "generation": 0, "pod": pod, "event": "gone"}
    reply = await desk.handle_pod_report(*KEY, json.dumps(given | fields).encode(), wait)
    assert reply.status == 200, reply
    return json.loads(reply.body)


async def known(store: ClusterJobStore, body: dict[str, Any]) -> None:
    """Tell the store of the job, and wait until it is tracked."""
    store.process_change(KEY, copy.deepcopy(body))
    await store.wait_for_job(*KEY)


class Shared:
    """An API server with one job that several write: each write makes another version."""

    def __init__(self) -> None:
        self.job = body(stages=4)
        self.job["metadata"]["resourceVersion"] = "1"
        self.job["status"] = {"attempt": 0}
        self.breaks: list[Exception] = []
        """Errors that writers get for writes that got through."""
        self.requests: list[str] = []

    def write(self, status: dict[str, Any]) -> None:
        self.job["status"] |= status
        self.job["metadata"]["resourceVersion"] += "0"

    def lose(self, pod: int, cause: str) -> None:
        """The operator writes that a pod is lost, in whole seconds."""
        at = datetime.now(UTC).replace(microsecond=0).isoformat().replace("+00:00", "Z")
        record = {"attempt": 0, "pod": pod, "uid": str(pod), "at": at, "cause": cause}
        self.job["status"]["replacements"] = [record]

    async def get(self, url: str) -> dict[str, Any] | None:
        self.requests.append("get")
        assert url == build_path(names.KIND, *KEY)
        return copy.deepcopy(self.job)

    async def create(self, obj: dict[str, Any], owner: str) -> dict[str, Any] | None:
        return obj

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        self.requests.append("apply")
        version = obj["metadata"].get("resourceVersion")
        if version not in (None, self.job["metadata"]["resourceVersion"]):
            raise KubeApiError(409, "Conflict", "the object has been modified")
        self.write(obj["status"])
        if self.breaks:
            raise self.breaks.pop(0)
        return copy.deepcopy(self.job)


class StatusWrites:
    """An API server that takes every status and event, after as many as it was given refusals."""

    def __init__(self, *refusals: Exception) -> None:
        self.taken: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.refusals = list(refusals)

    async def create(self, obj: dict[str, Any], owner: str) -> dict[str, Any]:
        assert (obj["kind"], owner) == ("Event", "pipemorph-ingest")
        self.events.append(obj)
        return obj

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        if self.refusals:
            raise self.refusals.pop(0)
        self.taken.append(obj["status"])
        return obj
