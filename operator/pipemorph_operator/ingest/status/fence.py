"""Fences the ingest's status writes: a write by an outdated ingest fails.

Two ingests can run briefly when a node is lost, or a write of a killed one can arrive late. A
failure that was counted must not be forgotten, nor a plan version. So every write carries the
resourceVersion it is based on. The operator's writes change that too: after a conflict the plan
version and the recoveries in status show whether another ingest wrote.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from pipemorph.api.status import JobStatus
from pipemorph_operator import names
from pipemorph_operator.cluster.client import ApiRefused, Cluster, path

MOST_TRIES = 5
"""Tries of a write that conflicts with other writers."""
CONFLICT = 409
FENCED = {"control", "recoveries"}


class Overtaken(Exception):
    """Another ingest has written of this job. ``body`` is the job as it is now."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__("another ingest has written a plan or a recovery of this job")
        self.body = body


class Fence:
    """Tracks a job's resourceVersion, and what this ingest may have written to status.

    ``version`` and ``status``: as read from the job.
    """

    def __init__(self, version: str | None, status: JobStatus) -> None:
        self._version = version
        self._own = {_mark(status)}
        """Hashes of what is in status, and of later writes whose outcome is unknown."""

    async def apply(self, cluster: Cluster, about: Mapping[str, str], status: JobStatus) -> None:
        """Write the ingest's part of the status. ``about``: name, namespace and uid of the job.

        Raises :class:`Overtaken`; :class:`ApiRefused` with 409 if the job was replaced.
        """
        mark = _mark(status)
        self._own.add(mark)
        for tries_left in reversed(range(MOST_TRIES)):
            version = {"resourceVersion": self._version} if self._version is not None else {}
            try:
                made = await cluster.apply(
                    {
                        "apiVersion": names.API_VERSION,
                        "kind": names.KIND,
                        # The UID protects a new job of the same name.
                        "metadata": {**about, **version},
                        "status": status.model_dump(
                            mode="json",
                            by_alias=True,
                            exclude_none=True,
                            include={"conditions", *names.INGEST_FIELDS},
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

    def seen(self, version: str | None, status: Mapping[str, Any]) -> None:
        """Take the version of a job that the watch has shown, if what is fenced in its ``status``
        is this ingest's: then the operator has written, and a write that is based on it finds no
        conflict."""
        if version is None or version == self._version:
            return
        # Kubernetes guarantees that versions are increasing integers.
        if self._version is not None and int(version) < int(self._version):
            return
        fenced = {key: status[key] for key in FENCED if key in status}
        if _mark(JobStatus.model_validate(fenced)) in self._own:
            self._version = version

    async def _catch_up(
        self, cluster: Cluster, about: Mapping[str, str], refused: ApiRefused
    ) -> None:
        body = await cluster.get(path(names.KIND, about["namespace"], about["name"]))
        if body is None or body["metadata"]["uid"] != about["uid"]:
            raise refused
        found = JobStatus.model_validate(body.get("status") or {})
        if _mark(found) not in self._own:
            raise Overtaken(body)
        self._version = body["metadata"]["resourceVersion"]


def _mark(status: JobStatus) -> str:
    """A hash of what is fenced."""
    text = status.model_dump_json(include=FENCED, exclude_none=True)
    return hashlib.sha256(text.encode()).hexdigest()
