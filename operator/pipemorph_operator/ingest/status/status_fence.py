"""Fences the ingest's status writes: a write by an outdated ingest fails.

Two ingests can run briefly when a node is lost, and a write of a killed one can arrive late. Such a
write must not undo a counted failure or a plan version. So every write names the resourceVersion
that it is based on. The operator's writes change that too: after a conflict, the plan version and
the recoveries in status show whether another ingest wrote.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from pipemorph.spec.job_status import JobStatus
from pipemorph_operator import names
from pipemorph_operator.kube.client import KubeApiError, KubeClient, build_path

MAX_TRIES = 5
"""Number of tries of a write that conflicts with other writers."""
CONFLICT = 409
FENCED = {"control", "recoveries"}


class StatusOvertakenError(Exception):
    """Raised if another ingest has written this job's status. ``body``: the job as it is now."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__("another ingest has written a plan or a recovery of this job")
        self.body = body


class StatusFence:
    """Tracks a job's resourceVersion, and what this ingest may have written to status.

    ``version`` and ``status``: as read from the job.
    """

    def __init__(self, version: str | None, status: JobStatus) -> None:
        self._version = version
        self._own = {_hash_fenced_fields(status)}
        """Hashes of the fenced fields in status, and of later writes whose outcome is unknown."""

    async def apply_status(
        self, cluster: KubeClient, about: Mapping[str, str], status: JobStatus
    ) -> None:
        """Write the ingest's part of the status. ``about``: name, namespace and uid of the job.

        Raises :class:`StatusOvertakenError`; :class:`KubeApiError` with 409 if the job was
        replaced.
        """
        mark = _hash_fenced_fields(status)
        self._own.add(mark)
        for tries_left in reversed(range(MAX_TRIES)):
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
            except KubeApiError as refused:
                if refused.status != CONFLICT or not tries_left:
                    raise
                await self._refresh_version(cluster, about, refused)
                continue
            self._version, self._own = made["metadata"].get("resourceVersion"), {mark}
            return

    def accept_version(self, version: str | None, status: Mapping[str, Any]) -> None:
        """Accept a version from the watch if the fenced fields of its ``status`` are this ingest's:
        then only the operator has written, and a write based on that version does not conflict."""
        if version is None or version == self._version:
            return
        # Kubernetes guarantees that versions are increasing integers.
        if self._version is not None and int(version) < int(self._version):
            return
        fenced = {key: status[key] for key in FENCED if key in status}
        if _hash_fenced_fields(JobStatus.model_validate(fenced)) in self._own:
            self._version = version

    async def _refresh_version(
        self, cluster: KubeClient, about: Mapping[str, str], refused: KubeApiError
    ) -> None:
        body = await cluster.get(build_path(names.KIND, about["namespace"], about["name"]))
        if body is None or body["metadata"]["uid"] != about["uid"]:
            raise refused
        found = JobStatus.model_validate(body.get("status") or {})
        if _hash_fenced_fields(found) not in self._own:
            raise StatusOvertakenError(body)
        self._version = body["metadata"]["resourceVersion"]


def _hash_fenced_fields(status: JobStatus) -> str:
    """Hash of the fenced fields."""
    text = status.model_dump_json(include=FENCED, exclude_none=True)
    return hashlib.sha256(text.encode()).hexdigest()
