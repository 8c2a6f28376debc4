"""An API server's part in writes of one job's status, for tests of those who write."""

from __future__ import annotations

import copy
from typing import Any

from operator_objects import body

from pipemorph_operator.cluster.client import ApiRefused


class Shared:
    """An API server with one job that several write: each write makes another version."""

    def __init__(self) -> None:
        self.job = body(stages=4)
        self.job["metadata"]["resourceVersion"] = "1"
        self.job["status"] = {"attempt": 0}
        self.breaks: list[Exception] = []
        """What writers are told of writes that got through."""

    def write(self, status: dict[str, Any]) -> None:
        self.job["status"] |= status
        self.job["metadata"]["resourceVersion"] += "0"

    async def get(self, url: str) -> dict[str, Any]:
        assert url.endswith("/namespaces/team/pipemorphjobs/gpt")
        return copy.deepcopy(self.job)

    async def create(self, obj: dict[str, Any], owner: str) -> dict[str, Any]:
        return obj

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        version = obj["metadata"].get("resourceVersion")
        if version not in (None, self.job["metadata"]["resourceVersion"]):
            raise ApiRefused(409, "Conflict", "the object has been modified")
        self.write(obj["status"])
        if self.breaks:
            raise self.breaks.pop(0)
        return copy.deepcopy(self.job)
