"""A PipeMorphJob as the API has it: what is read of one, and how its status is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status import JobStatus
from pipemorph.errors import InputError
from pipemorph.manifest import describe
from pipemorph_operator import names
from pipemorph_operator.children.naming import attempt_name


def read_job(body: Mapping[str, Any]) -> PipeMorphJob:
    """The job in an API object, its pod template as it stands: an attempt's pods are made from it
    by :func:`~pipemorph_operator.children.pod_template.pod_template`, which checks it. Raises
    :class:`InputError`, one line that names the field. Whether its spec allows a plan is found out
    later (:mod:`pipemorph_operator.reconcile.plans`)."""
    metadata = body["metadata"]
    spec = dict(body.get("spec") or {})
    # What is wrong with a template can be edited: an attempt that has its pods does not end by it.
    template = spec.pop("template", None)
    document = {
        "apiVersion": body.get("apiVersion", names.API_VERSION),
        "kind": names.KIND,
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": dict(metadata.get("labels") or {}),
        },
        "spec": spec,
    }
    try:
        job = PipeMorphJob.model_validate(document)
    except ValidationError as error:
        raise InputError(describe(error)) from None
    job.spec.template = template
    return job


def operator_part(body: Mapping[str, Any]) -> JobStatus:
    """The operator's own part of a job's status; the ingest's is its own to write."""
    status = JobStatus.model_validate(body.get("status") or {})
    own = [c for c in status.conditions if c.type in names.OPERATOR_CONDITIONS]
    return status.model_copy(
        update={"conditions": own, "training": None, "control": None}, deep=True
    )


def dump(status: JobStatus) -> dict[str, Any]:
    """A status for the API."""
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def current_name(body: Mapping[str, Any]) -> str | None:
    """Name of the Job to look for: of the attempt in status, or of the first."""
    spec = body.get("spec") or {}
    cut = spec.get("parallelism") or {}
    ranks = int(cut.get("stages") or 1) * int(cut.get("replicas") or 1)
    number = (body.get("status") or {}).get("attempt") or 0
    metadata = body["metadata"]
    return attempt_name(metadata["name"], metadata["uid"], number, ranks)
