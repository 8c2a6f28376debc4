"""An API server's part in writes of one job's status and plan, for tests of those who write.

Its rules are those of kube-apiserver 1.37; tests/cluster/test_operator_ingest.py asks it.
"""

from __future__ import annotations

import copy
from typing import Any

from operator_objects import body

from pipemorph_operator import names
from pipemorph_operator.cluster.client import ApiRefused, path
from pipemorph_operator.ingest.store import ClusterStore

KEY = ("team", "gpt")


async def known(store: ClusterStore, body: dict[str, Any]) -> None:
    """Tell the store of the job, and wait until it has read the saved plan."""
    store.changed(KEY, copy.deepcopy(body))
    await store.arrival(*KEY)


class Shared:
    """An API server with one job, and its plan, that several write: each write makes another
    version."""

    def __init__(self) -> None:
        self.job = body(stages=4)
        self.job["metadata"]["resourceVersion"] = "1"
        self.job["status"] = {"attempt": 0}
        self.plan: dict[str, Any] | None = None
        self.breaks: list[Exception] = []
        """What writers are told of writes that got through."""
        self._plans = 0

    def write(self, status: dict[str, Any]) -> None:
        self.job["status"] |= status
        self.job["metadata"]["resourceVersion"] += "0"

    async def get(self, url: str) -> dict[str, Any] | None:
        assert url in (path(names.KIND, *KEY), path(names.PLAN_KIND, *KEY))
        return copy.deepcopy(self.job if url == path(names.KIND, *KEY) else self.plan)

    async def create(self, obj: dict[str, Any], owner: str) -> dict[str, Any] | None:
        if obj["kind"] != names.PLAN_KIND:
            return obj
        return None if self.plan is not None else self.put(obj)

    async def replace(self, obj: dict[str, Any], owner: str) -> dict[str, Any]:
        if self.plan is None:
            raise ApiRefused(404, "NotFound", "there is no such plan")
        if obj["metadata"]["resourceVersion"] != self.plan["metadata"]["resourceVersion"]:
            raise ApiRefused(409, "Conflict", "the plan has been modified")
        return self.put(obj)

    def put(self, plan: dict[str, Any]) -> dict[str, Any]:
        """A write of the plan."""
        self._plans += 1
        self.plan = copy.deepcopy(plan)
        self.plan["metadata"]["resourceVersion"] = str(self._plans)
        return copy.deepcopy(self.plan)

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        version = obj["metadata"].get("resourceVersion")
        if version not in (None, self.job["metadata"]["resourceVersion"]):
            raise ApiRefused(409, "Conflict", "the object has been modified")
        self.write(obj["status"])
        if self.breaks:
            raise self.breaks.pop(0)
        return copy.deepcopy(self.job)
