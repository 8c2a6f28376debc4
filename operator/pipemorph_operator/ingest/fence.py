"""Writes of the ingest's part of a job's status, of which those by an ingest that is behind lose.

Two ingests there are for a moment when a node is lost, or a write of one that was killed is still
on its way. Both number plans from the same version, and a version must never stand for two
plans. So a write names the resourceVersion of the job that it follows from. The operator writes as
well, which changes it too: whether it was another ingest is seen from the plan on record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from pipemorph.api.status import ControlState, JobStatus
from pipemorph_operator import names
from pipemorph_operator.cluster.client import ApiRefused, Cluster, path

MOST_TRIES = 5
"""In a row, each after another writer was quicker."""
CONFLICT = 409


class Overtaken(Exception):
    """Another ingest has written a plan of this job. ``body`` is the job as it is now."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__("another ingest has written a plan of this job")
        self.body = body


class Fence:
    """What is known of a job's object: the version it has, and the plans that may be on record.

    ``version`` and ``control`` are as read.
    """

    def __init__(self, version: str | None, control: ControlState | None) -> None:
        self._version = version
        self._own = {_mark(control)}
        """That on record, and those written since of which it is not known that they got there."""

    async def apply(self, cluster: Cluster, about: Mapping[str, str], status: JobStatus) -> None:
        """Write the ingest's part of the status. ``about``: name, namespace and uid of the job.

        Raises :class:`Overtaken`; :class:`ApiRefused` with 409 if it is another job by now.
        """
        mark = _mark(status.control)
        self._own.add(mark)
        for tries_left in reversed(range(MOST_TRIES)):
            version = {"resourceVersion": self._version} if self._version is not None else {}
            try:
                made = await cluster.apply(
                    {
                        "apiVersion": names.API_VERSION,
                        "kind": names.KIND,
                        # With the UID: another job of the same name is not this one.
                        "metadata": {**about, **version},
                        "status": status.model_dump(
                            mode="json",
                            by_alias=True,
                            exclude_none=True,
                            include={"conditions", "training", "control"},
                        ),
                    },
                    names.INGEST_OWNER,
                    subresource="status",
                )
            except ApiRefused as refused:
                if refused.status != CONFLICT or not tries_left:
                    raise
                await self._catch_up(cluster, about, refused)
                continue
            self._version, self._own = made["metadata"].get("resourceVersion"), {mark}
            return

    async def _catch_up(
        self, cluster: Cluster, about: Mapping[str, str], refused: ApiRefused
    ) -> None:
        body = await cluster.get(path(names.KIND, about["namespace"], about["name"]))
        if body is None or body["metadata"]["uid"] != about["uid"]:
            raise refused
        found = JobStatus.model_validate(body.get("status") or {}).control
        if _mark(found) not in self._own:
            raise Overtaken(body)
        self._version = body["metadata"]["resourceVersion"]


def _mark(control: ControlState | None) -> str | None:
    """Stands for a plan, which may be large."""
    if control is None:
        return None
    return hashlib.sha256(control.model_dump_json().encode()).hexdigest()
