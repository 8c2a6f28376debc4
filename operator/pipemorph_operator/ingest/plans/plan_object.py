"""Reads and writes the PipeMorphPlan of a job.

Who may write is decided by status: its write comes first, and is fenced
(:mod:`~pipemorph_operator.ingest.status.fence`). So whatever is written here is the one plan of its
version, but it may come late: a write is based on the version of the object that was read, and one
that is behind another ingest's is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pipemorph.api.plan import PlanSummary, SavedPlan
from pipemorph.manifest import describe
from pipemorph_operator import names
from pipemorph_operator.cluster.client import ApiRefused, Cluster, Object, path

MOST_TRIES = 5
"""Tries of a write that conflicts with other writers."""
NOT_FOUND, CONFLICT = 404, 409


@dataclass(frozen=True)
class Found:
    """What was read. ``plan``: of this job; None if there is none that can be read. ``version``:
    the object's resourceVersion, None if it does not exist. ``problem``: why it cannot be read."""

    plan: SavedPlan | None = None
    version: str | None = None
    problem: str = ""


async def read(cluster: Cluster, namespace: str, job: str, uid: str) -> Found:
    """The plan of the job with this UID. Raises :data:`~.client.REQUEST_ERRORS`."""
    body = await cluster.get(path(names.PLAN_KIND, namespace, job))
    if body is None:
        return Found()
    version = body["metadata"].get("resourceVersion")
    try:
        plan = SavedPlan.model_validate(body)
    except ValidationError as error:
        return Found(None, version, f"the saved plan is unusable: {describe(error)}")
    # One of another UID is that of a deleted job of the same name.
    return Found(plan if plan.job_uid == uid else None, version)


class PlanObject:
    """The PipeMorphPlan of one job. ``version``: its resourceVersion as read; None: there is
    none."""

    def __init__(self, version: str | None) -> None:
        self._version = version

    async def write(self, cluster: Cluster, about: Mapping[str, str], plan: SavedPlan) -> None:
        """Write it, unless there is a newer one of the job. ``about``: name, namespace and uid of
        the job. Raises :data:`~.client.REQUEST_ERRORS`."""
        for _ in range(MOST_TRIES):
            made = await self._try(cluster, _object(about, plan, self._version))
            if made is not None:
                self._version = made["metadata"].get("resourceVersion")
                return
            found = await read(cluster, about["namespace"], about["name"], about["uid"])
            if found.plan is not None and found.plan.plan_version > plan.plan_version:
                return  # Another ingest's; the next write of status says so.
            self._version = found.version
        raise ApiRefused(CONFLICT, "Conflict", "others write the PipeMorphPlan all the time")

    async def _try(self, cluster: Cluster, obj: Object) -> Object | None:
        """None: the object is another one than was read."""
        if self._version is None:
            return await cluster.create(obj, names.INGEST_OWNER)
        try:
            return await cluster.replace(obj, names.INGEST_OWNER)
        except ApiRefused as refused:
            if refused.status not in (NOT_FOUND, CONFLICT):
                raise
            return None


def _object(about: Mapping[str, str], plan: SavedPlan, version: str | None) -> Object:
    owner = {"apiVersion": names.API_VERSION, "kind": names.KIND}
    owner |= {"name": about["name"], "uid": about["uid"]}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.PLAN_KIND,
        "metadata": {
            "name": about["name"],
            "namespace": about["namespace"],
            # Kubernetes deletes it with the job.
            "ownerReferences": [owner | {"controller": True}],
            **({"resourceVersion": version} if version is not None else {}),
        },
        **plan.model_dump(mode="json", by_alias=True, exclude_none=True),
    }


def saved_plan(uid: str, snapshot: Mapping[str, Any], packed: str) -> SavedPlan:
    """``packed``, the snapshot of a job's controller, with what people read of it."""
    return SavedPlan(
        job_uid=uid,
        attempt=snapshot["attempt"],
        plan_version=snapshot["plan_version"],
        plan=_summary(snapshot.get("directive")),
        snapshot=packed,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _summary(directive: Mapping[str, Any] | None) -> PlanSummary | None:
    if directive is None:
        return None
    plan, record = directive["plan"], directive.get("record") or {}
    return PlanSummary(
        version=directive["plan_version"],
        kind=record.get("kind"),
        policy=plan["policy"],
        dispatch=plan["dispatch"],
        stages=len(plan["stages"]),
        microbatches=plan["microbatches"],
        delegated_links=plan["routes"].count("delegated"),
        iteration_seconds=_rounded(record.get("predicted_seconds_after")),
        promised=_rounded(record.get("promised")),
        reason=record.get("reason"),
    )
